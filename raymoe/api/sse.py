"""Server-sent events, framed as OpenAI's clients expect them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from raymoe.api.envelope import error_body
from raymoe.api.streams import ClientGoneError, while_connected

DONE = b"data: [DONE]\n\n"


def frame(value: dict[str, Any]) -> bytes:
    """One event. ASCII only, so that no client takes U+2028 and its kind for the end of a line."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode("ascii") + b"\n\n"


class EventStream(Response):
    """Sends chunks as events, then `[DONE]`. A failure becomes an error event before it.

    Unlike Starlette's StreamingResponse it notices a client that leaves between two chunks, and closes
    `source`, which cancels the generation. `scope["raymoe.failed"]` tells the middleware of a failure.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[dict[str, Any], None],
        source: AsyncGenerator[Any, None],
        request_id: str,
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._chunks, self._source, self._request_id = chunks, source, request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._source), aclosing(self._chunks):
            await while_connected(receive, self._send_all(scope, send))

    async def _send_all(self, scope: Scope, send: Send) -> None:
        await _send(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for chunk in self._chunks:
                await _send_body(send, frame(chunk))
        except ClientGoneError:
            raise
        except Exception as error:  # noqa: BLE001 - answered in the stream, and logged there if it is ours
            scope["raymoe.failed"] = True
            await _send_body(send, frame(error_body(error, self._request_id)))
        await _send_body(send, DONE)
        await _send_body(send, b"", more=False)


async def _send_body(send: Send, body: bytes, *, more: bool = True) -> None:
    await _send(send, {"type": "http.response.body", "body": body, "more_body": more})


async def _send(send: Send, message: Message) -> None:
    try:
        await send(message)
    except OSError:  # how ASGI servers say that the connection is closed
        raise ClientGoneError from None
