"""One accepted request: its sequences run side by side, and come out as pieces of text."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from raymoe.api.backend import Backend
from raymoe.api.logprobs import Scored
from raymoe.api.reader import Echo, Reader
from raymoe.api.spelling import Speller
from raymoe.api.streams import closing, merge
from raymoe.api.text import Decoder
from raymoe.engine.messages import FinishReason, GenerateRequest, TokenLogprob
from raymoe.errors import EngineError
from raymoe.observe.metrics import ApiMetrics

_GRACE_S = 5.0
"""The engine enforces the deadline and says what it waited for; this much later nobody waits any more."""


@dataclass(frozen=True)
class Delta:
    """New text of one choice. The last one has a `finish_reason`; `tokens` counts what this one consumed.

    `logprobs` are those of the tokens whose text it is, if they were asked for; the first delta of a choice has
    the echoed prompt in front, and the `prompt_scores` of the prompt's tokens behind its first one.
    """

    index: int
    text: str
    tokens: int
    finish_reason: FinishReason | None = None
    logprobs: tuple[Scored, ...] = ()
    prompt_scores: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Wants:
    """What the answer holds besides text: so many of the likeliest tokens; None: no log probabilities."""

    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True)
class Choice:
    """One sequence of a request. `context_ids` are the prompt tokens that its text continues, if any."""

    request: GenerateRequest
    context_ids: tuple[int, ...] = ()
    echo: Echo | None = None

    @property
    def scores_echo(self) -> bool:
        """The tokens of the echoed prompt are among the log probabilities."""
        request = self.request
        return self.echo is not None and None not in (request.logprobs, request.prompt_logprobs)


class Generation:
    """A request that was validated whole. `deltas` starts it; closing that iterator cancels it."""

    def __init__(
        self,
        backend: Backend,
        decoder: Decoder,
        speller: Speller,
        choices: Sequence[Choice],
        stops: Sequence[str],
        prompt_tokens: int,
        metrics: ApiMetrics,
        *,
        wants: Wants,
        best: tuple[int, int] | None = None,
    ) -> None:
        """`best`: of each so many choices in a row, only so many are for the client."""
        self._backend, self._decoder, self._metrics = backend, decoder, metrics
        self.choices, self.stops, self.prompt_tokens = tuple(choices), tuple(stops), prompt_tokens
        self.speller, self.wants, self.best = speller, wants, best

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
        request = choice.request
        reader = Reader(
            self._decoder,
            request.prompt_ids,
            self.stops,
            min_tokens=request.sampling.min_tokens,
            context_ids=choice.context_ids,
            echo=choice.echo,
        )
        scores = request.prompt_logprobs is not None
        if not request.max_tokens and not scores:  # nothing but an echo
            yield Delta(index, reader.lead(scored=False)[0], 0, "length")
            return
        started = False
        async with closing(self._backend.generate(request)) as chunks:
            async for chunk in chunks:
                piece, tokens, logprobs = reader.read(chunk)
                prompt_scores: tuple[TokenLogprob, ...] = ()
                if not started:
                    if scores and not (chunk.token_ids or chunk.finish_reason):
                        continue  # more of the prompt's may come
                    if scores:
                        reader.check_scores()
                        prompt_scores = reader.prompt_scores
                    lead, scored = reader.lead(scored=choice.scores_echo)
                    piece, logprobs, started = lead + piece, scored + logprobs, True
                reason: FinishReason | None = "stop" if reader.stopped else None
                if reason is None and chunk.finish_reason is not None:
                    rest, more = reader.finish()
                    piece, logprobs = piece + rest, logprobs + more
                    reason = "stop" if reader.stopped else chunk.finish_reason
                yield Delta(index, piece, tokens, reason, logprobs, prompt_scores)
                if reason is not None:
                    return
        raise EngineError(f"sequence {request.request_id} ended without a finish reason")
