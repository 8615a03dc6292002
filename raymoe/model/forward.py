"""One step: the rows of many sequences, each at its own position, through the router's model.

What the packed cache can hold goes through one forward. Sequences whose model keeps something else have a cache
of their own each, and a forward of their own.

Shape letters: T rows of the step, S of them that are sampled from, R of one part that are scored, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    """One sequence's share of a step: the tokens behind its cache, and whether the last one is sampled.

    `scored` are rows of it whose logits are wanted besides.
    """

    cache: SequenceCache | OwnCache
    token_ids: Sequence[int]
    samples: bool
    scored: range = range(0)


@dataclass(frozen=True)
class Outcome:
    """`logits_SV` of the parts that sample and are not `parked`, in their order.

    `parked` are the numbers of the parts that miss an expert, whose caches are as before; `missing` says which
    expert, of the first of them. `scores` has the logits [R, V] of the scored rows by the number of their part,
    of parts that are not parked.
    """

    logits_SV: Tensor
    parked: frozenset[int] = frozenset()
    missing: ExpertUnavailableError | None = None
    scores: Mapping[int, Tensor] = field(default_factory=dict)


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
    logits, scores, parked, missing = [], {}, set(), None
    for number, part in enumerate(parts):
        try:
            own, scored = _run_alone(model, part, experts)
            logits.append(own)
            if part.scored:
                scores[number] = scored
        except ExpertUnavailableError as error:
            if strict:
                raise
            parked.add(number)
            missing = missing or error
    if missing is not None and len(parked) == len(parts):
        raise missing
    return Outcome(torch.cat(logits), frozenset(parked), missing, scores)


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
    # Behind the rows that are sampled from: those that are scored, part by part.
    scored = {number: part.scored for number, part in enumerate(parts) if part.scored}
    kept = keep_S + [ends[number] - counts[number] + row for number, own in scored.items() for row in own]
    # All rows of a step may be in the middle of a prompt; one row keeps every model's code path.
    kept += [0] * (tiled(max(len(kept), 1), tile) - len(kept))
    token = STEP.set(StepContext(rows, experts, cache))
    try:
        out = model(
            input_ids=torch.tensor([ids_T]),
            position_ids=torch.tensor([[*positions_T, *[0] * padding]]),
            cache=cache,
            use_cache=False,
            logits_to_keep=torch.tensor(kept),
        )
    finally:
        STEP.reset(token)
    cache.advance(rows.lost)
    logits_SV = out.logits[0, : len(keep_S)]
    if rows.lost:
        sampling = [number for number, part in enumerate(parts) if part.samples]
        logits_SV = logits_SV[[at for at, number in enumerate(sampling) if number not in rows.lost]]
    scores, at = {}, len(keep_S)
    for number, own in scored.items():
        if number not in rows.lost:
            scores[number] = out.logits[0, at : at + len(own)]
        at += len(own)
    return Outcome(logits_SV, frozenset(rows.lost), rows.missing, scores)


def _run_alone(model: PreTrainedModel, part: Part, experts: RunExperts | None) -> tuple[Tensor, Tensor]:
    """Logits [1 or 0, V] and [R, V] of one part. If it raises, its cache is as before."""
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
                logits_to_keep=count - part.scored.start if part.scored else 1,
            )
            cache.extend(out.cache, count)
    finally:
        STEP.reset(token)
    logits = out.logits[0]
    return logits[-1:] if part.samples else logits[:0], logits[: len(part.scored)]
