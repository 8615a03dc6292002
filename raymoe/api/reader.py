"""One sequence's tokens, read: text that can be sent, and the log probabilities of the tokens it is made of."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

from raymoe.api.logprobs import Scored
from raymoe.api.text import Decoder, StopMatcher, TextDecoder
from raymoe.engine.messages import GenerateChunk, TokenLogprob
from raymoe.errors import EngineError


@dataclass(frozen=True)
class Echo:
    """The prompt is to stand in front of the text. `text` None: as its tokens are decoded."""

    text: str | None = None


class Reader:
    """Log probabilities go out with the text of their tokens: what a stop string cut off has none in the answer."""

    def __init__(
        self,
        decoder: Decoder,
        prompt_ids: Sequence[int],
        stops: Sequence[str],
        *,
        min_tokens: int,
        context_ids: Sequence[int],
        echo: Echo | None,
    ) -> None:
        """
        Args:
            min_tokens: as in vLLM, stop strings are looked for behind the text of so many tokens.
            context_ids: last tokens of the prompt that the text continues; empty for a text of its own.
        """
        self._prompt_ids, self._min_tokens = prompt_ids, min_tokens
        self._stop = StopMatcher(stops)
        self._text = TextDecoder(decoder, context_ids)
        self._lead, self._offsets = "", list[int]()
        if echo is not None:
            self._lead, self._offsets = self._spell_prompt(decoder, echo)
        self._scores: list[TokenLogprob] = []
        self._read = 0
        """Tokens of the text so far."""
        self._decoded = self._sent = len(self._lead)
        """Characters of the choice's text that are known, and that can be sent."""
        self._open: list[Scored] = []
        """Tokens that end within a character."""
        self._held: deque[tuple[Scored, int]] = deque()
        """Tokens whose text may still become a stop string, and where it ends."""

    @property
    def stopped(self) -> bool:
        """A stop string was found: nothing comes any more."""
        return self._stop.stopped

    @property
    def prompt_scores(self) -> tuple[TokenLogprob, ...]:
        """Those of the prompt's tokens behind the first, so far."""
        return tuple(self._scores)

    def lead(self, *, scored: bool) -> tuple[str, tuple[Scored, ...]]:
        """The echoed prompt, with the log probabilities that it has got by now if they are asked for."""
        if not scored:
            return self._lead, ()
        scores = (None, *self._scores)
        places = zip(self._prompt_ids, self._offsets, scores, strict=True)
        return self._lead, tuple(Scored(*place) for place in places)

    def read(self, chunk: GenerateChunk) -> tuple[str, int, tuple[Scored, ...]]:
        """Text, number of tokens taken, and log probabilities, of a chunk that isn't the last one's end."""
        self._scores += chunk.prompt_logprobs
        scores = chunk.logprobs or repeat(None)
        piece, tokens = "", 0
        # `repeat` never ends, so the lengths can't be compared.
        for token_id, score in zip(chunk.token_ids, scores):  # noqa: B905
            start = self._decoded
            fresh = self._text.push(token_id)
            self._decoded += len(fresh)
            if score is not None:
                self._open.append(Scored(token_id, start, score))
            if not self._text.inside:
                self._held.extend((one, self._decoded) for one in self._open)
                self._open.clear()
            piece += fresh if self._read < self._min_tokens else self._stop.push(fresh)
            self._read, tokens = self._read + 1, tokens + 1
            if self._stop.stopped:
                break
        self._sent += len(piece)
        return piece, tokens, self._release()

    def finish(self) -> tuple[str, tuple[Scored, ...]]:
        """What was held back, once the last chunk has been read."""
        rest = self._text.finish()
        self._decoded += len(rest)
        piece = self._stop.push(rest) + self._stop.finish()
        self._sent += len(piece)
        self._held.extend((one, self._decoded) for one in self._open)
        self._open.clear()
        return piece, self._release(all_=True)

    def check_scores(self) -> None:
        """Raise EngineError unless every token of the prompt has its log probability."""
        if len(self._scores) != len(self._prompt_ids) - 1:
            raise EngineError(
                f"{len(self._scores)} log probabilities came for a prompt of {len(self._prompt_ids)} tokens"
            )

    def _release(self, *, all_: bool = False) -> tuple[Scored, ...]:
        released = []
        while self._held:
            one, end = self._held[0]
            if self._stop.stopped:
                # Of what is left, only tokens that begin in front of the stop string are in the text.
                if one.offset >= self._sent:
                    break
            elif not all_ and end > self._sent:
                break
            released.append(one)
            self._held.popleft()
        return tuple(released)

    def _spell_prompt(self, decoder: Decoder, echo: Echo) -> tuple[str, list[int]]:
        """The prompt's text, and where in it each token begins."""
        spelled = TextDecoder(decoder)
        text, offsets = "", []
        for token_id in self._prompt_ids:
            offsets.append(len(text))
            text += spelled.push(token_id)
        if echo.text is None:
            # The text goes on where the prompt ends, even inside a character.
            self._text = spelled
            return text, offsets
        return echo.text, [min(offset, len(echo.text)) for offset in offsets]
