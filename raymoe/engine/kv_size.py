"""How much memory the cache of a sequence takes, measured."""

from __future__ import annotations

from typing import NamedTuple

from transformers import PreTrainedModel

from raymoe.model.cache import SequenceCache
from raymoe.model.context import RunExperts
from raymoe.model.forward import Part, forward, new_cache
from raymoe.model.own_cache import OwnCache

FEW, MORE = 2, 66
"""Tokens of the probes."""


class KvSize(NamedTuple):
    """Bytes: a sequence of n tokens takes at most `fixed + n * per_token`."""

    per_token: int
    fixed: int


def kv_size(model: PreTrainedModel, experts: RunExperts) -> KvSize:
    """Measured by forwards of a few tokens, which also show that every layer's experts answer.

    Raises:
        ExpertUnavailableError: they don't.
    """
    few = _cached(model, experts, FEW)
    if not isinstance(few, OwnCache):
        return KvSize(max(few.nbytes // few.capacity, 1), 0)
    growth = max(_cached(model, experts, MORE).nbytes - few.nbytes, 0)
    per_token = max(-(-growth // (MORE - FEW)), 1)
    return KvSize(per_token, max(few.nbytes - FEW * per_token, 0))


def _cached(model: PreTrainedModel, experts: RunExperts, tokens: int) -> SequenceCache | OwnCache:
    cache = new_cache(model)
    forward(model, [Part(cache, [number % 2 for number in range(tokens)], True)], experts)
    return cache
