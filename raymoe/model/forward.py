"""One step: the rows of many sequences, each at its own position, through the router's model.

What the packed cache can hold goes through one forward. Sequences whose model keeps something else have a cache
of their own each, and a forward of their own.

Shape letters: T rows of the step, S of them that are sampled from, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from raymoe.errors import ExpertUnavailableError
from raymoe.model.attention import NAME, wants_joined
from raymoe.model.cache import PackedCache, SequenceCache
from raymoe.model.context import STEP, RunExperts, StepContext
from raymoe.model.own_cache import OwnCache
from raymoe.model.rows import LiveRows
from raymoe.policy.tiles import KEYS, tiled


class Part(NamedTuple):
    """One sequence's share of a step: the tokens behind its cache, and whether the last one is sampled."""

    cache: SequenceCache | OwnCache
    token_ids: Sequence[int]
    samples: bool


@dataclass(frozen=True)
class Outcome:
    """`logits_SV` of the parts that sample and are not `parked`, in their order.

    `parked` are the numbers of the parts that miss an expert, whose caches are as before; `missing` says which
    expert, of the first of them.
    """

    logits_SV: Tensor
    parked: frozenset[int] = frozenset()
    missing: ExpertUnavailableError | None = None


def new_cache(model: PreTrainedModel) -> SequenceCache | OwnCache:
    """An empty cache for one sequence of this model."""
    return SequenceCache() if model.config._attn_implementation == NAME else OwnCache()


def row_tile(model: PreTrainedModel) -> int:
    """1, or in batch-invariant steps: what the numbers of rows in a step's products are multiples of."""
    tile: int = getattr(model, "_raymoe_row_tile", 1)
    return tile


def set_row_tile(model: PreTrainedModel, tile: int) -> None:
    """Make the model's steps batch-invariant; `invariant_check.make_invariant` finds the tile for it."""
    model._raymoe_row_tile = tile


def forward(model: PreTrainedModel, parts: Sequence[Part], experts: RunExperts | None = None) -> Tensor:
    """Logits [S, V] of the parts that sample, in their order: all of the step, or nothing.

    If anything raises, no packed cache has moved: the same step can be run again.

    Raises:
        ExpertUnavailableError: an expert is missing for any of the parts.
    """
    return _run(model, parts, experts, strict=True).logits_SV


def forward_available(model: PreTrainedModel, parts: Sequence[Part], experts: RunExperts) -> Outcome:
    """As `forward`, but parts that miss an expert are left out, and the step ends for all others.

    Raises:
        ExpertUnavailableError: all parts miss one; no cache has moved.
    """
    return _run(model, parts, experts, strict=False)


@torch.inference_mode()
def _run(model: PreTrainedModel, parts: Sequence[Part], experts: RunExperts | None, strict: bool) -> Outcome:
    if isinstance(parts[0].cache, SequenceCache):
        return _run_packed(model, parts, experts, strict)
    logits, parked, missing = [], set(), None
    for number, part in enumerate(parts):
        try:
            logits.append(_run_alone(model, part, experts))
        except ExpertUnavailableError as error:
            if strict:
                raise
            parked.add(number)
            missing = missing or error
    if missing is not None and len(parked) == len(parts):
        raise missing
    return Outcome(torch.cat(logits), frozenset(parked), missing)


def _run_packed(
    model: PreTrainedModel, parts: Sequence[Part], experts: RunExperts | None, strict: bool
) -> Outcome:
    counts = [len(part.token_ids) for part in parts]
    caches = [part.cache for part in parts if isinstance(part.cache, SequenceCache)]
    tile = row_tile(model)
    padding = tiled(sum(counts), tile) - sum(counts)
    key_tile = KEYS if tile > 1 else 1
    cache = PackedCache(list(zip(caches, counts, strict=True)), wants_joined(model.config), key_tile)
    rows = LiveRows(counts, strict, padding)
    positions_T = chain.from_iterable(
        range(own.length, own.length + count) for own, count in zip(caches, counts, strict=True)
    )
    ends = torch.tensor(counts).cumsum(0).tolist()
    keep_S = [end - 1 for end, part in zip(ends, parts, strict=True) if part.samples]
    ids_T = [*chain.from_iterable(part.token_ids for part in parts), *[0] * padding]
    # All rows of a step may be in the middle of a prompt; one row keeps every model's code path.
    kept_S = keep_S + [0] * (tiled(max(len(keep_S), 1), tile) - len(keep_S))
    token = STEP.set(StepContext(rows, experts, cache))
    try:
        out = model(
            input_ids=torch.tensor([ids_T]),
            position_ids=torch.tensor([[*positions_T, *[0] * padding]]),
            cache=cache,
            use_cache=False,
            logits_to_keep=torch.tensor(kept_S),
        )
    finally:
        STEP.reset(token)
    cache.advance(rows.lost)
    logits_SV = out.logits[0, : len(keep_S)]
    if rows.lost:
        sampling = [number for number, part in enumerate(parts) if part.samples]
        logits_SV = logits_SV[[at for at, number in enumerate(sampling) if number not in rows.lost]]
    return Outcome(logits_SV, frozenset(rows.lost), rows.missing)


def _run_alone(model: PreTrainedModel, part: Part, experts: RunExperts | None) -> Tensor:
    """Logits [1 or 0, V] of one part. If it raises, its cache is as before."""
    cache, count = part.cache, len(part.token_ids)
    if not isinstance(cache, OwnCache):
        raise TypeError(f"{type(cache).__name__} among caches of models that can't be packed")
    token = STEP.set(StepContext(LiveRows([count], strict=True), experts))
    try:
        with cache.extending() as kept:
            out = model(
                input_ids=torch.tensor([part.token_ids]),
                position_ids=torch.arange(cache.length, cache.length + count)[None],
                cache=kept,
                use_cache=True,
                logits_to_keep=1,
            )
            cache.extend(out.cache, count)
    finally:
        STEP.reset(token)
    return out.logits[0, -1:] if part.samples else out.logits[0, :0]
