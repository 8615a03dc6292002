"""One request's way through the engine."""

from __future__ import annotations

from functools import partial

from raymoe.engine.messages import GenerateRequest
from raymoe.model.adjust import Adjustment
from raymoe.model.cache import SequenceCache
from raymoe.model.sampler import Draw


class Sequence:
    """Prompt and generated tokens, and the cache of those computed. `arrived_s` is the engine's clock."""

    __slots__ = ("_adjustment", "arrived_s", "cache", "prompt_length", "request", "tokens", "waiting_since_s")

    def __init__(self, request: GenerateRequest, arrived_s: float) -> None:
        self.request = request
        self.arrived_s = arrived_s
        self.tokens = [*request.prompt_ids, *request.generated_ids]
        self.prompt_length = len(request.prompt_ids)
        self._adjustment = Adjustment.of(request.sampling, request.prompt_ids)
        self.cache = SequenceCache()
        self.waiting_since_s: float | None = None
        """Since when an expert that it needs is missing."""

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
