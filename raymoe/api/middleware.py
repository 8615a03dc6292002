"""Around every HTTP request: its id, its client, its metrics, and the envelope of whatever went wrong."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raymoe.api.callers import Caller
from raymoe.api.envelope import error_response
from raymoe.api.streams import ClientGoneError
from raymoe.observe.metrics import Outcome

if TYPE_CHECKING:
    from raymoe.api.service import Service

MAX_ID_CHARS = 128
OPEN_PATHS = ("/health", "/ready")
"""Probes hold no key, and learn nothing but which part is missing. Everything else needs one if there are keys."""


class RequestMiddleware:
    """Pure ASGI, so that it neither buffers streams nor hides disconnects."""

    def __init__(self, app: ASGIApp, service: Callable[[], Service]) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = scope["raymoe.request_id"] = clean_id(Headers(scope=scope).get("x-request-id"))
        status: int | None = None
        caller: Caller | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message.setdefault("headers", [])
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                headers.update(caller.headers() if caller is not None else {})
            await send(message)

        metrics, started = self._service().metrics, time.monotonic()
        outcome: Outcome = "cancelled"
        metrics.in_flight.inc()
        try:
            try:
                if scope["path"] not in OPEN_PATHS:
                    caller = self._service().admission.identify(_authorization(scope))
                with self._working(scope, caller):
                    await self._app(scope, receive, send_with_id)
            except Exception as error:
                if isinstance(error, ClientGoneError):
                    return
                if status is not None:  # too late for an answer: the server cuts the connection
                    outcome = "failed"
                    raise
                await error_response(error, request_id)(scope, receive, send_with_id)
            outcome = _outcome(status, failed="raymoe.failed" in scope)
        finally:
            metrics.in_flight.dec()
            metrics.answered(_path_label(scope["path"]), outcome, time.monotonic() - started)

    def _working(self, scope: Scope, caller: Caller | None) -> AbstractContextManager[None]:
        if caller is None or scope["method"] != "POST":
            return nullcontext()
        return self._service().admission.enter(caller)


def _authorization(scope: Scope) -> str | None:
    # Of several none may win: together they are no key.
    return ", ".join(Headers(scope=scope).getlist("authorization")) or None


def clean_id(given: str | None) -> str:
    """The client's id, for echo and log only: printable ASCII, at most 128. Ours if none is left."""
    kept = "".join(char for char in (given or "")[:MAX_ID_CHARS] if "!" <= char <= "~")
    return kept or uuid.uuid4().hex


def _path_label(path: str) -> str:
    return "/v1/models/{id}" if path.startswith("/v1/models/") else path


def _outcome(status: int | None, *, failed: bool) -> Outcome:
    if failed or status is None or status >= 500:
        return "failed"
    return "refused" if status >= 400 else "completed"
