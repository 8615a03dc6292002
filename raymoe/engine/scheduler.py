"""What the next step computes. Pure bookkeeping: no tensors, no clock.

All decodes of running sequences come first, then prefill chunks up to the token budget, oldest first. Memory is
counted in the tokens for which cache buffers are made, in blocks of 64 and more. A running sequence that must grow
beyond the limit preempts the youngest one, which gives its cache back and is computed again later (recomputation,
as in vLLM; Kwon et al., SOSP 2023). Parked sequences keep their place and their cache, and get no rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from raymoe.engine.sequence import Sequence
from raymoe.errors import ContextLengthError, OverloadedError
from raymoe.model.cache import capacity_for


@dataclass(frozen=True)
class Limits:
    """`kv_tokens` is how many tokens' keys and values fit the KV limit.

    `fixed_tokens`: what a sequence holds besides, however long it is, counted in tokens. `stepwise`: a
    prompt is computed in one step, whatever its budget, and every later token in a step of its own, also when it
    is computed again: for models that can't go on in the middle of a prompt, or choose otherwise then.
    `score_rows`: prompt rows of a step whose logits may be kept, since each is as long as the vocabulary.
    """

    step_tokens: int
    max_sequences: int
    max_waiting: int
    kv_tokens: int
    fixed_tokens: int = 0
    stepwise: bool = False
    score_rows: int = 1 << 20


class Chunk(NamedTuple):
    """`rows` tokens of `sequence`, from what is computed on; it samples when they are the last known ones."""

    sequence: Sequence
    rows: int

    @property
    def samples(self) -> bool:
        """Its last row's logits choose the next token."""
        return self.rows == self.sequence.pending


class Scheduler:
    """Owns the queues; a sequence is in exactly one of them until it is removed."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        # With fewer rows than sequences in a step, the last ones would never get a turn.
        self._places = min(limits.max_sequences, limits.step_tokens)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence.

        Raises:
            OverloadedError: the queue is full.
            ContextLengthError: it could never run, however long it waits.
        """
        # The last token is never computed, but the prompt always is.
        tokens = max(sequence.final_length - 1, sequence.prompt_length)
        needed = capacity_for(tokens) + self.limits.fixed_tokens
        if needed > self.limits.kv_tokens:
            raise ContextLengthError(
                f"{sequence.prompt_length} prompt tokens and {sequence.request.max_tokens} new ones need room for"
                f" {needed} tokens in the KV cache, which holds {self.limits.kv_tokens}"
            )
        free = self._places - len(self.running)
        if len(self.waiting) >= self.limits.max_waiting + max(free, 0):
            raise OverloadedError(f"{len(self.waiting)} requests are waiting; try again later")
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence and give its cache back. Unknown ones are ignored: it may just have ended."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.cache.release()

    def all(self) -> Iterable[Sequence]:
        """Every sequence, running ones first."""
        return (*self.running, *self.waiting)

    @property
    def kv_tokens(self) -> int:
        """Tokens for which room is reserved."""
        fixed = self.limits.fixed_tokens
        return sum(sequence.cache.capacity + fixed for sequence in self.running)

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step; empty when there is nothing to do."""
        chunks: list[Chunk] = []
        budget = self.limits.step_tokens
        able = [sequence for sequence in self.running if not sequence.parked]
        for sequence in able:
            if sequence.decoding and budget > 0 and sequence in self.running and self._grow(sequence, 1):
                chunks.append(Chunk(sequence, 1))
                budget -= 1
        # A later sequence's growth may have preempted one that was already given rows.
        chunks = [chunk for chunk in chunks if chunk.sequence in self.running]
        for sequence in able:
            if not sequence.decoding and budget > 0 and sequence in self.running:
                budget -= self._prefill(sequence, budget, chunks)
        while budget > 0 and len(self.running) < self._places:
            first = next((one for one in self.waiting if not one.parked), None)
            if first is None or not self._fits(first, first.pending, self.limits.fixed_tokens):
                break
            self.waiting.remove(first)
            self.running.append(first)
            # Room for all known tokens at once: half a prompt in memory helps nobody.
            first.cache.reserve(len(first.tokens))
            budget -= self._prefill(first, budget, chunks)
        return [chunk for chunk in chunks if chunk.sequence in self.running]

    def _prefill(self, sequence: Sequence, budget: int, chunks: list[Chunk]) -> int:
        rows = min(budget, sequence.pending)
        if self.limits.stepwise:
            rows = sequence.prompt_length if sequence.cache.length == 0 else 1
        elif sequence.scores:
            scored = sum(len(chunk.sequence.scored_rows(chunk.rows)) for chunk in chunks)
            rows = min(rows, self.limits.score_rows - scored)
        if rows <= 0 or not self._grow(sequence, rows):
            return 0
        chunks.append(Chunk(sequence, rows))
        return rows

    def _fits(self, sequence: Sequence, rows: int, besides: int = 0) -> bool:
        more = capacity_for(sequence.cache.length + rows) - sequence.cache.capacity + besides
        return more <= 0 or self.kv_tokens + more <= self.limits.kv_tokens

    def _grow(self, sequence: Sequence, rows: int) -> bool:
        """Make room for `rows` more, at the cost of younger sequences, or give way to older ones."""
        while not self._fits(sequence, rows):
            youngest = self.running[-1]
            self.running.pop()
            youngest.cache.release()
            self.waiting.appendleft(youngest)
            self.preemptions += 1
            if youngest is sequence:
                return False
        sequence.cache.reserve(sequence.cache.length + rows)
        return True
