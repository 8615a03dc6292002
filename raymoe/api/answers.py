"""The shapes of OpenAI's answers: whole ones and stream chunks, for chat and for completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from raymoe.api.envelope import error_body
from raymoe.api.generation import Delta, Generation
from raymoe.api.logprobs import (
    Scored,
    chat_logprobs,
    completion_logprobs,
    mean_logprob,
    prompt_logprobs,
)
from raymoe.api.sse import DONE, frame
from raymoe.engine.messages import FinishReason, TokenLogprob


@dataclass
class _Collected:
    """One choice, from all its deltas."""

    texts: list[str] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    prompt_scores: tuple[TokenLogprob, ...] = ()
    reason: FinishReason | None = None

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.scored += delta.logprobs
        self.prompt_scores = delta.prompt_scores or self.prompt_scores
        self.reason = delta.finish_reason


class CompletionAnswer:
    """Shapes of /v1/completions. Id, time and model stay the same throughout one answer."""

    id_prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, generation: Generation) -> None:
        self._generation, self._speller, self._wants = generation, generation.speller, generation.wants
        self._head = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    end = DONE

    def frame(self, event: dict[str, Any]) -> bytes:
        """A chunk as it is sent."""
        return frame(event)

    def failure(self, error: Exception, request_id: str) -> bytes:
        """What is sent when the answer fails after its first chunk."""
        return frame(error_body(error, request_id))

    async def whole(self, deltas: AsyncIterator[Delta]) -> dict[str, Any]:
        """The answer without streaming, from all deltas."""
        collected = [_Collected() for _ in self._generation.choices]
        tokens = 0
        async for delta in deltas:
            collected[delta.index].add(delta)
            tokens += delta.tokens
        kept = self._kept(collected)
        choices = []
        for index, own in enumerate(collected[number] for number in kept):
            choices.append(self._choice(index, "".join(own.texts), own.scored, own.reason))
        answer = {**self._head, "object": self.whole_object, "choices": choices, "usage": self._usage(tokens)}
        if self._wants.prompt_logprobs is not None:
            self._add_prompts(answer, [self._prompt(number, collected[number]) for number in kept])
        return answer

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
            if delta.text or delta.logprobs:
                yield {**head, "choices": [self._piece(delta.index, delta.text, delta.logprobs)], **usage}
            if delta.finish_reason is not None:
                yield {**head, "choices": [self._end(delta.index, delta.finish_reason)], **usage}
            delta = await anext(rest, None)
        if include_usage:
            yield {**head, "choices": [], "usage": self._usage(tokens)}

    def _kept(self, collected: Sequence[_Collected]) -> list[int]:
        """Which choices the client gets: if some are left out, those with the best mean log probability."""
        if self._generation.best is None:
            return list(range(len(collected)))
        of, count = self._generation.best
        kept: list[int] = []
        for start in range(0, len(collected), of):
            # Equal ones keep their order, as sorting is stable.
            means = {number: self._mean(number, collected[number]) for number in range(start, start + of)}
            kept += sorted(means, key=means.__getitem__, reverse=True)[:count]
        return kept

    def _mean(self, number: int, collected: _Collected) -> float:
        choice = self._generation.choices[number]
        echoed = len(choice.request.prompt_ids) if choice.scores_echo else 0
        return mean_logprob(collected.scored[echoed:])

    def _usage(self, completion: int) -> dict[str, int]:
        prompt = self._generation.prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def _prompt(self, number: int, collected: _Collected) -> list[dict[str, Any] | None]:
        ids, top = self._generation.choices[number].request.prompt_ids, self._wants.prompt_logprobs or 0
        return prompt_logprobs(ids, collected.prompt_scores, top, self._speller)

    def _add_prompts(self, answer: dict[str, Any], prompts: list[list[dict[str, Any] | None]]) -> None:
        for choice, prompt in zip(answer["choices"], prompts, strict=True):
            choice["prompt_logprobs"] = prompt

    def _logprobs(self, scored: Sequence[Scored]) -> dict[str, Any] | None:
        top = self._wants.logprobs
        return None if top is None else completion_logprobs(scored, top, self._speller)

    def _choice(
        self, index: int, text: str, scored: Sequence[Scored], reason: FinishReason | None
    ) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": self._logprobs(scored), "finish_reason": reason}

    def _opening(self, index: int) -> tuple[dict[str, Any], ...]:  # noqa: ARG002 - chats have one
        return ()

    def _piece(self, index: int, text: str, scored: Sequence[Scored]) -> dict[str, Any]:
        return self._choice(index, text, scored, None)

    def _end(self, index: int, reason: FinishReason) -> dict[str, Any]:
        return {"index": index, "text": "", "logprobs": None, "finish_reason": reason}


class ChatAnswer(CompletionAnswer):
    """Shapes of /v1/chat/completions."""

    id_prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _add_prompts(self, answer: dict[str, Any], prompts: list[list[dict[str, Any] | None]]) -> None:
        answer["prompt_logprobs"] = prompts[0]  # there is one prompt

    def _logprobs(self, scored: Sequence[Scored]) -> dict[str, Any] | None:
        top = self._wants.logprobs
        return None if top is None else chat_logprobs(scored, top, self._speller)

    def _choice(
        self, index: int, text: str, scored: Sequence[Scored], reason: FinishReason | None
    ) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(scored),
            "finish_reason": reason,
        }

    def _opening(self, index: int) -> tuple[dict[str, Any], ...]:
        return (self._delta(index, {"role": "assistant", "content": ""}),)

    def _piece(self, index: int, text: str, scored: Sequence[Scored]) -> dict[str, Any]:
        return self._delta(index, {"content": text}, logprobs=self._logprobs(scored))

    def _end(self, index: int, reason: FinishReason) -> dict[str, Any]:
        return self._delta(index, {}, reason)

    def _delta(
        self,
        index: int,
        delta: dict[str, str],
        reason: FinishReason | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
