"""One request's way through the engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from raymoe.engine.messages import GenerateRequest
from raymoe.errors import EngineError, ExpertUnavailableError, RaymoeError
from raymoe.model.adjust import Adjustment
from raymoe.model.cache import SequenceCache
from raymoe.model.grammar import Grammar
from raymoe.model.own_cache import OwnCache
from raymoe.model.sampler import Draw


class Sequence:
    """Prompt and generated tokens, and the cache of those computed. `arrived_s` is the engine's clock."""

    __slots__ = (
        "_adjustment",
        "arrived_s",
        "cache",
        "grammar",
        "missing",
        "parked",
        "prompt_length",
        "request",
        "scored",
        "tokens",
        "unusable",
        "waiting_since_s",
    )

    def __init__(
        self,
        request: GenerateRequest,
        arrived_s: float,
        cache: SequenceCache | OwnCache | None = None,
        grammar: Grammar | None = None,
    ) -> None:
        self.request = request
        self.grammar = grammar
        """Stands behind the generated tokens."""
        self.arrived_s = arrived_s
        self.tokens = [*request.prompt_ids, *request.generated_ids]
        self.prompt_length = len(request.prompt_ids)
        self.scored = request.prompt_scored
        """Prompt tokens behind the first whose log probabilities have gone out."""
        self.unusable = False
        """The model gave it logits that are no distribution."""
        self._adjustment = Adjustment.of(request.sampling, request.prompt_ids)
        self.cache = SequenceCache() if cache is None else cache
        self.parked = False
        """No step takes it until its expert may be back."""
        self.missing: ExpertUnavailableError | None = None
        """Which expert its last step lacked."""
        self.waiting_since_s: float | None = None
        """Since when."""

    def park(self, missing: ExpertUnavailableError, now_s: float) -> None:
        """It was left out of a step."""
        self.parked, self.missing = True, missing
        if self.waiting_since_s is None:
            self.waiting_since_s = now_s

    def go_on(self) -> None:
        """It took part in a step."""
        self.parked, self.missing, self.waiting_since_s = False, None, None

    @property
    def id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def pending(self) -> int:
        """Tokens that are known and not computed. 1 while decoding."""
        return len(self.tokens) - self.cache.length

    @property
    def decoding(self) -> bool:
        """Only the newest token is to be computed."""
        return self.pending == 1 and self.cache.length > 0

    @property
    def generated(self) -> int:
        """Tokens sampled so far, here or by another router before."""
        return len(self.tokens) - self.prompt_length

    @property
    def scores(self) -> bool:
        """Log probabilities of its prompt are still to be computed."""
        return self.request.prompt_logprobs is not None and self.scored < self.prompt_length - 1

    def scored_rows(self, rows: int) -> range:
        """Which of the next `rows` rows have logits that score a token of the prompt; they are contiguous."""
        if not self.scores:
            return range(0)
        start = self.cache.length
        return range(max(self.scored - start, 0), min(rows, self.prompt_length - 1 - start))

    def draw(self) -> Draw:
        """How its next token is chosen."""
        adjust = None if self._adjustment is None else partial(self._adjustment.apply, tokens=self.tokens)
        if self.grammar is not None:
            adjust = partial(_adjust_within, adjust, self.grammar)
        return Draw(self.request.sampling, len(self.tokens), adjust)

    @property
    def failure(self) -> RaymoeError:
        """Why it is `unusable`."""
        failure = None if self.grammar is None else self.grammar.failure
        return failure or EngineError("the model's logits are not finite")

    def take(self, token: int) -> bool:
        """Go on with a token that was drawn for it; False if it ends the sequence instead."""
        if token in self.request.stop_token_ids:
            return False
        if self.grammar is not None:
            if self.grammar.ends_with(token):
                return False
            self.grammar.accept(token)
        self.tokens.append(token)
        return True

    @property
    def final_length(self) -> int:
        """Tokens when it ends by length; the last one is never computed."""
        return self.prompt_length + self.request.max_tokens

    @property
    def deadline_s(self) -> float:
        """When it must be done, on the engine's clock."""
        return self.arrived_s + self.request.deadline_s


def _adjust_within(adjust: Callable[[Tensor], Tensor] | None, grammar: Grammar, logits_V: Tensor) -> Tensor:
    return grammar.allow(logits_V if adjust is None else adjust(logits_V))
