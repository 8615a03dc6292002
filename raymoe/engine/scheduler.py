"""What the next step computes. Pure bookkeeping: no tensors, no clock.

All decodes of running sequences come first, then chunks of prompts up to the token budget: of the client that has
been served least (`policy/shares.py`), and of its sequences the oldest first. Memory is
counted in the tokens for which cache buffers are made, in blocks of 64 and more. A running sequence that must grow
beyond the limit preempts the youngest one of the client that holds the most memory; that one gives its cache back
and is computed again later (recomputation, as in vLLM; Kwon et al., SOSP 2023). Parked sequences keep their place
and their cache, and get no rows.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from raymoe.engine.messages import ANONYMOUS
from raymoe.engine.sequence import Sequence
from raymoe.errors import ContextLengthError, OverloadedError
from raymoe.model.cache import capacity_for
from raymoe.policy.shares import Shares

RESERVE = 8
"""One part in so many of places and memory is left to clients that run nothing. Else one client's long answers
could fill all of them, and a running sequence isn't stopped for fairness."""


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
        self._shares = Shares()

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence.

        Raises:
            OverloadedError: the queue is full, and its client has an equal part of it already.
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
        client = sequence.request.client
        if self._is_full(client):
            raise OverloadedError(f"{len(self.waiting)} requests are waiting; try again later")
        self._shares.join(client, {one.request.client for one in self.all()})
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
        chunks = self._decodes()
        for chunk in chunks:
            self._shares.charge(chunk.sequence.request.client, chunk.rows)
        budget = self.limits.step_tokens - len(chunks)
        turns, room = self._turns(), True
        while budget > 0 and turns:
            client = self._shares.least(turns)
            sequence, runs = turns[client].popleft()
            if not turns[client]:
                del turns[client]
            if not runs:
                may = self._leaves_reserve(sequence)
                # Without room nobody else is let in: the turn of the least served client isn't passed on.
                room = room and (not may or self._admit(sequence))
                if not (may and room):
                    # Behind it are only others of this client that wait.
                    turns.pop(client, None)
                    continue
            rows = self._prefill(sequence, budget, chunks)
            self._shares.charge(client, rows)
            budget -= rows
        return [chunk for chunk in chunks if chunk.sequence in self.running]

    def _decodes(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        for sequence in [one for one in self.running if one.decoding and not one.parked]:
            room = len(chunks) < self.limits.step_tokens
            if room and sequence in self.running and self._grow(sequence, 1):
                chunks.append(Chunk(sequence, 1))
        # A later sequence's growth may have preempted one that was already given its row.
        return [chunk for chunk in chunks if chunk.sequence in self.running]

    def _turns(self) -> dict[str, deque[tuple[Sequence, bool]]]:
        """Each client's sequences with a prompt to compute, oldest first, and whether they run already.

        Without a free place, only those that do.
        """
        turns: dict[str, deque[tuple[Sequence, bool]]] = defaultdict(deque)
        waiting = self.waiting if len(self.running) < self._places else ()
        for queue, runs in ((self.running, True), (waiting, False)):
            for one in queue:
                if not one.parked and not (runs and one.decoding):
                    turns[one.request.client].append((one, runs))
        return turns

    def _is_full(self, client: str) -> bool:
        free = max(self._places - len(self.running), 0)
        if len(self.waiting) < self.limits.max_waiting + free:
            return False
        waiting = Counter(one.request.client for one in self.waiting)
        part = self.limits.max_waiting // len({*waiting, client})
        return waiting[client] >= part or len(self.waiting) >= 2 * self.limits.max_waiting + free

    def _leaves_reserve(self, sequence: Sequence) -> bool:
        """Its client runs nothing, or leaves enough to those that run nothing."""
        client = sequence.request.client
        # Without keys all requests belong to one client, and there are no others.
        if client == ANONYMOUS or all(one.request.client != client for one in self.running):
            return True
        if len(self.running) >= self._places - self._places // RESERVE:
            return False
        kept = self.limits.kv_tokens // RESERVE
        return self._fits(sequence, sequence.pending, self.limits.fixed_tokens + kept)

    def _admit(self, sequence: Sequence) -> bool:
        """Let a waiting sequence run, if there is room for it."""
        fits = self._fits(sequence, sequence.pending, self.limits.fixed_tokens)
        if not fits or len(self.running) >= self._places:
            return False
        self.waiting.remove(sequence)
        self.running.append(sequence)
        # Room for all known tokens at once: half a prompt in memory helps nobody.
        sequence.cache.reserve(len(sequence.tokens))
        return True

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
        """Make room for `rows` more, at the cost of other sequences, or give way itself."""
        while not self._fits(sequence, rows):
            victim = self._victim()
            self.running.remove(victim)
            victim.cache.release()
            self.waiting.appendleft(victim)
            self.preemptions += 1
            if victim is sequence:
                return False
        sequence.cache.reserve(sequence.cache.length + rows)
        return True

    def _victim(self) -> Sequence:
        held: Counter[str] = Counter()
        for one in self.running:
            held[one.request.client] += one.cache.capacity + self.limits.fixed_tokens
        most = max(held.values())
        return next(one for one in reversed(self.running) if held[one.request.client] == most)
