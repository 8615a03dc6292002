"""One accepted request: its sequences run side by side, and come out as pieces of text."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from raymoe.api.backend import Backend
from raymoe.api.streams import closing, merge
from raymoe.api.text import Decoder, StopMatcher, TextDecoder
from raymoe.engine.messages import FinishReason, GenerateRequest
from raymoe.errors import EngineError
from raymoe.observe.metrics import ApiMetrics

_GRACE_S = 5.0
"""The engine enforces the deadline and says what it waited for; this much later nobody waits any more."""


@dataclass(frozen=True)
class Delta:
    """New text of one choice. The last one has a `finish_reason`; `tokens` counts what this one consumed."""

    index: int
    text: str
    tokens: int
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class Choice:
    """One sequence of a request. `context_ids` are the prompt tokens that its text continues, if any."""

    request: GenerateRequest
    context_ids: tuple[int, ...] = ()


class Generation:
    """A request that was validated whole. `deltas` starts it; closing that iterator cancels it."""

    def __init__(
        self,
        backend: Backend,
        decoder: Decoder,
        choices: Sequence[Choice],
        stops: Sequence[str],
        prompt_tokens: int,
        metrics: ApiMetrics,
    ) -> None:
        self._backend, self._decoder, self._metrics = backend, decoder, metrics
        self.choices, self.stops, self.prompt_tokens = tuple(choices), tuple(stops), prompt_tokens

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Text of all choices as it comes; a delta may hold no text (inside a character or a possible stop).

        Raises:
            RaymoeError: as the backend does; EngineError when it ends a sequence without a reason.
        """
        started, first = time.monotonic(), True
        self._metrics.prompt_tokens.inc(self.prompt_tokens)
        deadline_s = max(choice.request.deadline_s for choice in self.choices) + _GRACE_S
        sources = [self._run(index, choice) for index, choice in enumerate(self.choices)]
        async with aclosing(merge(sources, deadline_s)) as deltas:
            async for delta in deltas:
                if first:
                    self._metrics.first_token(time.monotonic() - started)
                    first = False
                self._metrics.completion_tokens.inc(delta.tokens)
                yield delta

    async def _run(self, index: int, choice: Choice) -> AsyncGenerator[Delta, None]:
        text, stop = TextDecoder(self._decoder, choice.context_ids), StopMatcher(self.stops)
        min_tokens, seen = choice.request.sampling.min_tokens, 0
        async with closing(self._backend.generate(choice.request)) as chunks:
            async for chunk in chunks:
                piece, tokens = "", 0
                for token_id in chunk.token_ids:
                    fresh = text.push(token_id)
                    # As in vLLM, stop strings are looked for behind the text of the first min_tokens tokens.
                    piece += fresh if seen < min_tokens else stop.push(fresh)
                    tokens, seen = tokens + 1, seen + 1
                    if stop.stopped:
                        break
                if chunk.finish_reason is not None and not stop.stopped:
                    piece += stop.push(text.finish()) + stop.finish()
                    yield Delta(index, piece, tokens, "stop" if stop.stopped else chunk.finish_reason)
                    return
                yield Delta(index, piece, tokens, "stop" if stop.stopped else None)
                if stop.stopped:
                    return
        raise EngineError(f"sequence {choice.request.request_id} ended without a finish reason")
