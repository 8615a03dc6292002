"""Server-sent events, framed as OpenAI's clients expect them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from raymoe.api.streams import ClientGoneError, while_connected

DONE = b"data: [DONE]\n\n"


def frame(value: dict[str, Any]) -> bytes:
    """One event. ASCII only, so that no client takes U+2028 and its kind for the end of a line."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode("ascii") + b"\n\n"


def typed_frame(value: dict[str, Any]) -> bytes:
    """One event that also says its type on a line of its own, as /v1/responses wants it."""
    return b"event: " + value["type"].encode("ascii") + b"\n" + frame(value)


class Framing(Protocol):
    """How one endpoint's events look."""

    @property
    def end(self) -> bytes:
        """What is sent after the last event, also after a failure."""

    def frame(self, event: dict[str, Any]) -> bytes:
        """An event."""

    def failure(self, error: Exception, request_id: str) -> bytes:
        """What is sent instead of the rest when something fails."""


class EventStream(Response):
    """Sends chunks as events, then `framing.end`. A failure becomes an error event before it.

    Unlike Starlette's StreamingResponse it notices a client that leaves between two chunks, and closes
    `source`, which cancels the generation. `scope["raymoe.failed"]` tells the middleware of a failure.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[dict[str, Any], None],
        source: AsyncGenerator[Any, None],
        request_id: str,
        framing: Framing,
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._chunks, self._source = chunks, source
        self._request_id, self._framing = request_id, framing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._source), aclosing(self._chunks):
            await while_connected(receive, self._send_all(scope, send))

    async def _send_all(self, scope: Scope, send: Send) -> None:
        await _send(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for chunk in self._chunks:
                await _send_body(send, self._framing.frame(chunk))
        except ClientGoneError:
            raise
        except Exception as error:  # noqa: BLE001 - answered in the stream, and logged there if it is ours
            scope["raymoe.failed"] = True
            await _send_body(send, self._framing.failure(error, self._request_id))
        await _send_body(send, self._framing.end, more=False)


async def _send_body(send: Send, body: bytes, *, more: bool = True) -> None:
    await _send(send, {"type": "http.response.body", "body": body, "more_body": more})


async def _send(send: Send, message: Message) -> None:
    try:
        await send(message)
    except OSError:  # how ASGI servers say that the connection is closed
        raise ClientGoneError from None
