"""The shapes of OpenAI's answers: whole ones and stream chunks, for chat and for completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from raymoe.api.generation import Delta, Generation
from raymoe.engine.messages import FinishReason


class CompletionAnswer:
    """Shapes of /v1/completions. Id, time and model stay the same throughout one answer."""

    id_prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, generation: Generation) -> None:
        self._generation = generation
        self._head = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    async def whole(self, deltas: AsyncIterator[Delta]) -> dict[str, Any]:
        """The answer without streaming, from all deltas."""
        count = len(self._generation.choices)
        texts: list[list[str]] = [[] for _ in range(count)]
        reasons: list[FinishReason | None] = [None] * count
        tokens = 0
        async for delta in deltas:
            texts[delta.index].append(delta.text)
            tokens += delta.tokens
            reasons[delta.index] = delta.finish_reason
        choices = [
            self._choice(index, "".join(text), reason)
            for index, (text, reason) in enumerate(zip(texts, reasons, strict=True))
        ]
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": self._usage(tokens)}

    async def chunks(
        self, first: Delta, rest: AsyncIterator[Delta], include_usage: bool
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Stream chunks: openings, deltas, one finish per choice without text, then usage if asked for."""
        usage = {"usage": None} if include_usage else {}
        head = {**self._head, "object": self.chunk_object}
        for index in range(len(self._generation.choices)):
            for opening in self._opening(index):
                yield {**head, "choices": [opening], **usage}
        tokens = 0
        delta: Delta | None = first
        while delta is not None:
            tokens += delta.tokens
            if delta.text:
                yield {**head, "choices": [self._piece(delta.index, delta.text)], **usage}
            if delta.finish_reason is not None:
                yield {**head, "choices": [self._end(delta.index, delta.finish_reason)], **usage}
            delta = await anext(rest, None)
        if include_usage:
            yield {**head, "choices": [], "usage": self._usage(tokens)}

    def _usage(self, completion: int) -> dict[str, int]:
        prompt = self._generation.prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def _choice(self, index: int, text: str, reason: FinishReason | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}

    def _opening(self, index: int) -> tuple[dict[str, Any], ...]:  # noqa: ARG002 - chats have one
        return ()

    def _piece(self, index: int, text: str) -> dict[str, Any]:
        return self._choice(index, text, None)

    def _end(self, index: int, reason: FinishReason) -> dict[str, Any]:
        return self._choice(index, "", reason)


class ChatAnswer(CompletionAnswer):
    """Shapes of /v1/chat/completions."""

    id_prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _choice(self, index: int, text: str, reason: FinishReason | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": reason}

    def _opening(self, index: int) -> tuple[dict[str, Any], ...]:
        return (self._delta(index, {"role": "assistant", "content": ""}, None),)

    def _piece(self, index: int, text: str) -> dict[str, Any]:
        return self._delta(index, {"content": text}, None)

    def _end(self, index: int, reason: FinishReason) -> dict[str, Any]:
        return self._delta(index, {}, reason)

    def _delta(self, index: int, delta: dict[str, str], reason: FinishReason | None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
