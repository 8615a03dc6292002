"""The step loop of one router: schedule, run, postprocess."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from transformers import PreTrainedModel

from raymoe.engine.messages import GenerateChunk, GenerateRequest
from raymoe.engine.scheduler import Chunk, Limits, Scheduler
from raymoe.engine.scoring import score_prompt, score_tokens
from raymoe.engine.sequence import Sequence
from raymoe.errors import (
    ContextLengthError,
    DeadlineError,
    EngineError,
    ExpertUnavailableError,
    RaymoeError,
    RequestError,
    VocabularyError,
)
from raymoe.model.forward import Outcome, Part, forward, forward_available, new_cache
from raymoe.model.grammar import Grammars
from raymoe.model.sampler import sample
from raymoe.policy.layout import Layout

log = logging.getLogger(__name__)

PROBE_TOKENS = (0, 1)
LOOK_S = 0.5
"""How often it is looked which experts are missing or back."""


class Experts(Protocol):
    """What computes the experts' part of a step: `dispatch.Dispatcher`, or a double in tests."""

    def run(self, layer: int, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """[T, H]; raises ExpertUnavailableError."""

    def set_layout(self, layout: Layout) -> None:
        """Use this layout from the next call on."""

    def reconnect(self) -> None:
        """Try to reach what was lost, without waiting for it."""

    def missing(self) -> ExpertUnavailableError | None:
        """Which expert can't be computed now, None while all can."""

    def stats(self) -> dict[str, Any]:
        """Counters."""

    def close(self) -> None:
        """Close all lanes."""


class Event(NamedTuple):
    """Something for the client of one request. A finish reason or an error is the last one."""

    request_id: str
    what: GenerateChunk | RaymoeError


class Engine:
    """Continuous batching over one model. Not thread-safe: `step` and the rest are called in turns."""

    def __init__(
        self,
        model: PreTrainedModel,
        experts: Experts,
        limits: Limits,
        *,
        replace_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        grammars: Grammars | None = None,
    ) -> None:
        self._model, self._experts, self._clock = model, experts, clock
        self._replace_timeout_s, self._grammars = replace_timeout_s, grammars
        config = model.config.get_text_config()
        self._vocab_size, self._max_context = config.vocab_size, config.max_position_embeddings
        self._scheduler = Scheduler(limits)
        self._sequences: dict[str, Sequence] = {}
        self.blocked: ExpertUnavailableError | None = None
        """The expert that is missing, None while all are there as far as is known."""
        self._looked = clock()
        self._stats = {
            "steps": 0,
            "blocked_steps": 0,
            "parkings": 0,
            "prompt_tokens": 0,
            "generated_tokens": 0,
            "finished": 0,
        }
        self._stats |= {"failed": 0, "cancelled": 0, "computed_tokens": 0, "step_ns": 0}

    @property
    def busy(self) -> bool:
        """There are sequences."""
        return bool(self._sequences)

    @property
    def waits(self) -> bool:
        """Whatever sequences there are, all are parked."""
        return all(sequence.parked for sequence in self._sequences.values())

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request.

        Raises:
            OverloadedError, ContextLengthError: as `Scheduler.add`.
            ContextLengthError, VocabularyError: the model can't take it.
            RequestError: the prompt is empty, nothing is asked for, the id is in use, or the model can't score a
                prompt of this length.
        """
        if request.max_tokens == 0 and request.prompt_logprobs is not None:
            needed = 0
        else:
            needed = len(request.generated_ids) + 1
        if not request.prompt_ids or request.max_tokens < needed:
            raise RequestError("a sequence needs at least one prompt token and one new token", "prompt")
        if request.request_id in self._sequences:
            raise RequestError(f"request id {request.request_id} is in use", "request_id")
        biased = (token for token, _ in request.sampling.logit_bias)
        known = (*request.prompt_ids, *request.generated_ids, *biased, *request.sampling.late_ids)
        if min(known) < 0 or max(known) >= self._vocab_size:
            raise VocabularyError(f"a token id lies outside 0..{self._vocab_size - 1}", "prompt")
        grammar = None
        if request.grammar is not None:
            if self._grammars is None:
                raise RequestError("this engine follows no grammars", "grammar")
            grammar = self._grammars.start(request.grammar, request.stop_token_ids, request.generated_ids)
        sequence = Sequence(request, self._clock(), new_cache(self._model), grammar)
        if sequence.final_length > self._max_context:
            raise ContextLengthError(
                f"{sequence.prompt_length} prompt tokens and {request.max_tokens} new ones exceed the model's"
                f" context of {self._max_context} tokens",
                "prompt",
            )
        limits = self._scheduler.limits
        if limits.stepwise and sequence.scores and sequence.prompt_length > limits.score_rows:
            raise RequestError(
                f"this model computes a prompt in one step; log probabilities are possible for prompts of at most"
                f" {limits.score_rows} tokens, this one has {sequence.prompt_length}",
                "prompt",
            )
        self._scheduler.add(sequence)
        self._sequences[sequence.id] = sequence
        self._stats["prompt_tokens"] += sequence.prompt_length

    def cancel(self, request_id: str) -> None:
        """Stop a request at once; its id may be unknown, as it may just have ended."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._scheduler.remove(sequence)
            self._stats["cancelled"] += 1

    def step(self) -> list[Event]:
        """Advance what can advance. Sequences that miss an expert are parked, as if this step had not been."""
        started = self._clock()
        if started - self._looked >= LOOK_S:
            self.look()
        events = self._expire(started)
        chunks = self._scheduler.schedule()
        if not chunks:
            return events
        try:
            outcome = self._run(chunks)
        except ExpertUnavailableError as error:
            self._stats["blocked_steps"] += 1
            self._park([chunk.sequence for chunk in chunks], error)
            return events
        except Exception as error:
            # A defect must end the requests it hit, and not the engine.
            log.exception("step failed")
            failure = error if isinstance(error, RaymoeError) else EngineError(f"step failed: {error}")
            return events + [self._end(chunk.sequence, failure) for chunk in chunks]
        if outcome.missing is not None:
            self._park([chunks[number].sequence for number in outcome.parked], outcome.missing)
        done = [chunk for number, chunk in enumerate(chunks) if number not in outcome.parked]
        for number, logits_RV in outcome.scores.items():
            scored = score_prompt(chunks[number].sequence, logits_RV)
            if scored is not None:
                events.append(Event(chunks[number].sequence.id, scored))
        events += self._postprocess(done, outcome.logits_SV)
        self._stats["steps"] += 1
        self._stats["computed_tokens"] += sum(chunk.rows for chunk in done)
        self._stats["step_ns"] += int((self._clock() - started) * 1e9)
        return events

    def look(self) -> None:
        """Look whether all experts are there, and let what is parked try again."""
        self._looked = self._clock()
        self._experts.reconnect()
        self.blocked = self._experts.missing()
        for sequence in self._sequences.values():
            sequence.parked = False

    def probe(self) -> None:
        """As `look`, and try the experts with two tokens of nobody's."""
        self.look()
        if self.blocked is None:
            try:
                forward(self._model, [Part(new_cache(self._model), PROBE_TOKENS, True)], self._experts.run)
            except ExpertUnavailableError as error:
                self.blocked = error

    def stats(self) -> dict[str, Any]:
        """Counters since the start, and what is there now."""
        scheduler = self._scheduler
        return {
            **self._stats,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "parked": sum(sequence.missing is not None for sequence in scheduler.all()),
            "kv_tokens": scheduler.kv_tokens,
            "kv_tokens_limit": scheduler.limits.kv_tokens,
            "kv_bytes": sum(sequence.cache.nbytes for sequence in scheduler.running),
            "preemptions": scheduler.preemptions,
            "blocked": None if self.blocked is None else str(self.blocked),
            "experts": self._experts.stats(),
        }

    def _run(self, chunks: list[Chunk]) -> Outcome:
        parts = []
        for chunk in chunks:
            sequence, start = chunk.sequence, chunk.sequence.cache.length
            tokens = sequence.tokens[start : start + chunk.rows]
            parts.append(Part(sequence.cache, tokens, chunk.samples, sequence.scored_rows(chunk.rows)))
        return forward_available(self._model, parts, self._experts.run)

    def _postprocess(self, chunks: list[Chunk], logits: Tensor) -> list[Event]:
        # The caches have advanced: who has nothing pending is who sampled.
        sampled = [chunk.sequence for chunk in chunks if chunk.sequence.pending == 0]
        events = []
        for chunk in chunks:
            chunk.sequence.go_on()
        tokens = sample(logits, [sequence.draw() for sequence in sampled])
        found = score_tokens(sampled, tokens, logits)
        for row, (sequence, token) in enumerate(zip(sampled, tokens, strict=True)):
            if token is None or sequence.unusable:
                sequence.unusable = True
                continue
            if not sequence.request.max_tokens:
                events.append(self._end(sequence, GenerateChunk((), "length")))
                continue
            self._stats["generated_tokens"] += 1
            if not sequence.take(token):
                events.append(self._end(sequence, GenerateChunk((), "stop")))
                continue
            logprobs = found.get(row, ())
            if sequence.generated >= sequence.request.max_tokens:
                events.append(self._end(sequence, GenerateChunk((token,), "length", logprobs)))
            else:
                events.append(Event(sequence.id, GenerateChunk((token,), None, logprobs)))
        unusable = [chunk.sequence for chunk in chunks if chunk.sequence.unusable]
        return events + [self._end(one, one.failure) for one in unusable]

    def _end(self, sequence: Sequence, what: GenerateChunk | RaymoeError) -> Event:
        del self._sequences[sequence.id]
        self._scheduler.remove(sequence)
        self._stats["failed" if isinstance(what, RaymoeError) else "finished"] += 1
        return Event(sequence.id, what)

    def _expire(self, now: float) -> list[Event]:
        events = []
        for sequence in list(self._sequences.values()):
            since = sequence.waiting_since_s
            waited = since is not None and now - since >= self._replace_timeout_s
            if waited or sequence.deadline_s <= now:
                events.append(self._end(sequence, sequence.missing or self._lateness(sequence)))
        return events

    def _lateness(self, sequence: Sequence) -> RaymoeError:
        return DeadlineError(
            f"{sequence.generated} of at most {sequence.request.max_tokens} tokens were done after"
            f" {sequence.request.deadline_s:g} s"
        )

    def _park(self, sequences: list[Sequence], error: ExpertUnavailableError) -> None:
        if self.blocked is None:
            log.warning("%d of %d sequences wait: %s", len(sequences), len(self._sequences), error)
            self._looked = self._clock()
            self.blocked = error
        self._stats["parkings"] += len(sequences)
        for sequence in sequences:
            sequence.park(error, self._clock())
