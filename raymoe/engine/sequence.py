"""One request's way through the engine."""

from __future__ import annotations

from functools import partial

from raymoe.engine.messages import GenerateRequest
from raymoe.errors import ExpertUnavailableError
from raymoe.model.adjust import Adjustment
from raymoe.model.cache import SequenceCache
from raymoe.model.own_cache import OwnCache
from raymoe.model.sampler import Draw


class Sequence:
    """Prompt and generated tokens, and the cache of those computed. `arrived_s` is the engine's clock."""

    __slots__ = (
        "_adjustment",
        "arrived_s",
        "cache",
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
        self, request: GenerateRequest, arrived_s: float, cache: SequenceCache | OwnCache | None = None
    ) -> None:
        self.request = request
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
        return Draw(self.request.sampling, len(self.tokens), adjust)

    @property
    def final_length(self) -> int:
        """Tokens when it ends by length; the last one is never computed."""
        return self.prompt_length + self.request.max_tokens

    @property
    def deadline_s(self) -> float:
        """When it must be done, on the engine's clock."""
        return self.arrived_s + self.request.deadline_s
