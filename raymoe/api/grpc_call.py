"""Around every gRPC call: its id, its metrics, and the status of whatever went wrong."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import grpc

from raymoe.api.callers import Caller
from raymoe.api.envelope import error_body
from raymoe.api.middleware import clean_id
from raymoe.errors import OverloadedError, status_of
from raymoe.observe.metrics import ApiMetrics

MAX_DETAILS_CHARS = 500
"""gRPC escapes what is not ASCII, and its clients accept 8 KiB of headers in all."""


class Context(Protocol):
    """What is used of a call's context: Serve's and that of `grpc.aio` have it in common."""

    def invocation_metadata(self) -> Iterable[tuple[str, Any]] | None:
        """Metadata that the client sent."""

    def set_code(self, code: grpc.StatusCode) -> None:
        """The status of the answer."""

    def set_details(self, details: str) -> None:
        """The status's text."""

    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, str]]) -> None:
        """Metadata behind the answer."""


class Call:
    """One call of a method."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._metadata = tuple(context.invocation_metadata() or ())
        self.request_id = clean_id(self.metadata("x-request-id"))
        self.code = "OK"
        self._trailing = {"x-request-id": self.request_id}
        self._send_trailing()

    def metadata(self, key: str) -> str | None:
        """A text that the client sent; several under the same key are one, as with the headers of HTTP."""
        values = [value for name, value in self._metadata if name == key and isinstance(value, str)]
        return ", ".join(values) if values else None

    def admitted(self, caller: Caller) -> None:
        """Tell the client its limits, and what is left of them."""
        self._trailing |= {key.lower(): value for key, value in caller.headers().items()}
        self._send_trailing()

    def fail(self, error: Exception) -> None:
        """Answer with the error's status, and log what isn't for clients."""
        told = error_body(error, self.request_id)["error"]
        self.code = status_of(error).grpc
        self._trailing["raymoe-code"] = told["code"]
        if told["param"]:
            self._trailing["raymoe-param"] = told["param"].encode("ascii", "replace").decode()
        if isinstance(error, OverloadedError):
            self._trailing["retry-after"] = str(error.retry_after_s)
        self._context.set_code(grpc.StatusCode[self.code])
        self._context.set_details(told["message"][:MAX_DETAILS_CHARS])
        self._send_trailing()

    def _send_trailing(self) -> None:
        self._context.set_trailing_metadata(list(self._trailing.items()))


@contextmanager
def measured(name: str, context: Context, metrics: ApiMetrics) -> Iterator[Call]:
    """One call of the method `name`, counted and timed. One that ends by an exception was cancelled."""
    call, started = Call(context), time.monotonic()
    metrics.grpc_in_flight.inc()
    try:
        yield call
    except BaseException:
        if call.code == "OK":
            call.code = "CANCELLED"
        raise
    finally:
        metrics.grpc_in_flight.dec()
        metrics.grpc_answered(name, call.code, time.monotonic() - started)
