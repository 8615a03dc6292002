"""The shapes of /v1/responses: the response object, and the events of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from raymoe.api.envelope import error_body
from raymoe.api.generation import Delta, Generation
from raymoe.api.logprobs import Scored, chat_logprobs
from raymoe.api.responses_request import ResponsesRequest
from raymoe.api.sse import typed_frame
from raymoe.engine.messages import FinishReason


class ResponsesAnswer:
    """One response: a single message of text. Its events are numbered from 0."""

    def __init__(self, model: str, generation: Generation, request: ResponsesRequest) -> None:
        self._generation, self._request = generation, request
        self._id, self._message_id = f"resp_{uuid.uuid4().hex}", f"msg_{uuid.uuid4().hex}"
        self._model, self._created, self._number = model, int(time.time()), 0
        self._text, self._scored, self._tokens = "", list[Scored](), 0
        self._reason: FinishReason | None = None

    async def whole(self, deltas: AsyncIterator[Delta]) -> dict[str, Any]:
        """The response without streaming."""
        async for delta in deltas:
            self._add(delta)
        return self._response(self._status, [self._message(self._status)])

    async def chunks(
        self, first: Delta, rest: AsyncIterator[Delta], include_usage: bool
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The events; the last one holds the whole response, always with usage."""
        del include_usage
        place = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        yield self._event("response.created", response=self._response("in_progress", []))
        yield self._event("response.in_progress", response=self._response("in_progress", []))
        opened = {**self._message("in_progress"), "content": []}
        yield self._event("response.output_item.added", output_index=0, item=opened)
        yield self._event("response.content_part.added", **place, part=self._part("", []))
        delta: Delta | None = first
        while delta is not None:
            self._add(delta)
            if delta.text or delta.logprobs:
                logprobs = self._logprobs(delta.logprobs)
                yield self._event("response.output_text.delta", **place, delta=delta.text, logprobs=logprobs)
            delta = await anext(rest, None)
        part = self._part(self._text, self._scored)
        yield self._event("response.output_text.done", **place, text=self._text, logprobs=part["logprobs"])
        yield self._event("response.content_part.done", **place, part=part)
        message = self._message(self._status)
        yield self._event("response.output_item.done", output_index=0, item=message)
        yield self._event(f"response.{self._status}", response=self._response(self._status, [message]))

    def frame(self, event: dict[str, Any]) -> bytes:
        """One event as it is sent."""
        return typed_frame(event)

    def failure(self, error: Exception, request_id: str) -> bytes:
        """What is sent when the response fails after its first event."""
        said = error_body(error, request_id)["error"]
        problem = {key: said[key] for key in ("code", "message", "param")}
        failed = self._response("failed", [])
        failed["error"] = {"code": "server_error", "message": said["message"]}
        first = typed_frame(self._event("error", **problem))
        return first + typed_frame(self._event("response.failed", response=failed))

    end = b""
    """The last event is known by its type."""

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number, **fields}

    def _add(self, delta: Delta) -> None:
        self._text += delta.text
        self._scored += delta.logprobs
        self._tokens += delta.tokens
        self._reason = delta.finish_reason

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _logprobs(self, scored: Sequence[Scored]) -> list[dict[str, Any]]:
        top = self._generation.wants.logprobs
        if top is None:
            return []
        found: list[dict[str, Any]] = chat_logprobs(scored, top, self._generation.speller)["content"]
        return found

    def _part(self, text: str, scored: Sequence[Scored]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs(scored)}

    def _message(self, status: str) -> dict[str, Any]:
        part = self._part(self._text, self._scored)
        return {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [part],
        }

    def _usage(self) -> dict[str, Any]:
        prompt = self._generation.prompt_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": self._tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + self._tokens,
        }

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        request, done = self._request, status in ("completed", "incomplete")
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata,
            "model": self._model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None},
            "safety_identifier": request.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": request.temperature,
            "text": {"format": request.text.format.to_answer()},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": request.top_logprobs,
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": self._usage() if done else None,
            "user": request.user,
        }
