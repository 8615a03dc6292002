"""One forward over a packed batch: rows of many sequences, each at its own position.

Shape letters: T rows of the step, S of them that are sampled from, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from raymoe.model.attention import wants_joined
from raymoe.model.cache import PackedCache, SequenceCache
from raymoe.model.context import STEP, RunExperts, StepContext


class Part(NamedTuple):
    """One sequence's share of a step: the tokens behind its cache, and whether the last one is sampled."""

    cache: SequenceCache
    token_ids: Sequence[int]
    samples: bool


@torch.inference_mode()
def forward(model: PreTrainedModel, parts: Sequence[Part], experts: RunExperts | None = None) -> Tensor:
    """Logits [S, V] of the parts that sample, in their order. The model's attention is `raymoe_packed`.

    If anything raises, no cache has moved: the same step can be run again.
    """
    cache = PackedCache([(part.cache, len(part.token_ids)) for part in parts], wants_joined(model.config))
    ids_T = list(chain.from_iterable(part.token_ids for part in parts))
    positions_T = list(
        chain.from_iterable(range(p.cache.length, p.cache.length + len(p.token_ids)) for p in parts)
    )
    keep_S, end = [], 0
    for part in parts:
        end += len(part.token_ids)
        if part.samples:
            keep_S.append(end - 1)
    token = STEP.set(StepContext(cache, experts))
    try:
        out = model(
            input_ids=torch.tensor([ids_T], device=model.device),
            position_ids=torch.tensor([positions_T], device=model.device),
            cache=cache,
            use_cache=False,
            # All rows of a step may be in the middle of a prompt; one row keeps every model's code path.
            logits_to_keep=torch.tensor(keep_S or [0], device=model.device),
        )
    finally:
        STEP.reset(token)
    cache.advance()
    return out.logits[0, : len(keep_S)]
