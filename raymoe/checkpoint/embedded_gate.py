"""Router rows for an upcycled model: k-means over a layer's real hidden states, with a wanted share per copy.

Letters in names: N tokens, R copies, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

_LLOYD_STEPS = 25
_SHARE_STEPS = 400


def moe_inputs(dense: Any, chats: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """What each layer's feed-forward network receives.

    Args:
        dense: a `LlamaForCausalLM`.
        chats: token ids of each chat; each is run alone, so nothing is padded.

    Returns:
        for each layer the states [N, H] of all chats' tokens in order.
    """
    seen: list[list[torch.Tensor]] = [[] for _ in dense.model.layers]
    hooks = [
        layer.mlp.register_forward_pre_hook(
            lambda _module, args, into=into: into.append(args[0].detach().flatten(0, 1))
        )
        for layer, into in zip(dense.model.layers, seen, strict=True)
    ]
    try:
        with torch.no_grad():
            for ids in chats:
                dense.model(torch.tensor([list(ids)]), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return [torch.cat(states) for states in seen]


def shares(rows_RH: torch.Tensor, states_NH: torch.Tensor) -> torch.Tensor:
    """The part of the tokens that each copy gets, [R], when the largest logit wins."""
    chosen_N = (states_NH @ rows_RH.T).argmax(dim=1)
    return torch.bincount(chosen_N, minlength=len(rows_RH)) / len(states_NH)


def router_rows(states_NH: torch.Tensor, copies: int, seed: int, hottest: float = 2.0) -> torch.Tensor:
    """One router row per copy, [R, H] fp32, so that similar tokens go to one copy and copies differ in load.

    The winner depends on a state's direction only (scaling a state scales all its logits), so k-means runs on
    unit vectors. Their mean is large, which gives each row an almost constant term: along it the rows are
    moved until the copies' shares fall evenly from `hottest` to 1. Logits have mean 0 over the copies and
    a standard deviation of 1 over all, so that sigmoid scores neither saturate nor lie too close to steer.
    """
    generator = torch.Generator().manual_seed(seed)
    unit_NH = functional.normalize(states_NH.double(), dim=1)
    mean_H = unit_NH.mean(dim=0)
    centres_RH = _kmeans(unit_NH - mean_H, copies, generator)
    along_H = mean_H / mean_H.square().sum().clamp_min(1e-12)
    # Nearest centre of the centred points, written as largest inner product: u·c − mean·c − |c|²/2.
    offsets_R = -centres_RH @ mean_H - centres_RH.square().sum(dim=1) / 2
    projected_NR, constant_N = unit_NH @ centres_RH.T, unit_NH @ along_H

    def share_of(offsets_R: torch.Tensor) -> torch.Tensor:
        chosen_N = (projected_NR + constant_N[:, None] * offsets_R).argmax(dim=1)
        return torch.bincount(chosen_N, minlength=copies) / len(unit_NH)

    falling_R = torch.linspace(hottest, 1.0, copies, dtype=torch.float64)
    wanted_R = torch.empty_like(falling_R)
    wanted_R[share_of(offsets_R).argsort(descending=True)] = falling_R / falling_R.sum()
    spread = projected_NR.std()
    best_R, best = offsets_R, float("inf")
    for step in range(_SHARE_STEPS):
        error_R = share_of(offsets_R) - wanted_R
        if float(error_R.abs().max()) < best:
            best_R, best = offsets_R, float(error_R.abs().max())
        offsets_R = offsets_R - spread * (1 - step / _SHARE_STEPS) * error_R
    rows_RH = centres_RH + best_R[:, None] * along_H
    rows_RH = rows_RH[torch.randperm(copies, generator=generator)]
    rows_RH = rows_RH - rows_RH.mean(dim=0)
    logits_NR = states_NH.double() @ rows_RH.T
    return (rows_RH / logits_NR.std().clamp_min(1e-12)).float()


def _kmeans(points_NH: torch.Tensor, clusters: int, generator: torch.Generator) -> torch.Tensor:
    """Centres [R, H] by Lloyd's algorithm from a k-means++ start (Arthur and Vassilvitskii, 2007)."""
    first = int(torch.randint(len(points_NH), (1,), generator=generator))
    centres_RH = points_NH[first : first + 1]
    while len(centres_RH) < clusters:
        distance_N = torch.cdist(points_NH, centres_RH).amin(dim=1).square()
        pick = torch.multinomial(distance_N + 1e-12, 1, generator=generator)
        centres_RH = torch.cat([centres_RH, points_NH[pick]])
    for _ in range(_LLOYD_STEPS):
        nearest_N = torch.cdist(points_NH, centres_RH).argmin(dim=1)
        sums_RH = torch.zeros_like(centres_RH).index_add_(0, nearest_N, points_NH)
        counts_R1 = torch.bincount(nearest_N, minlength=clusters)[:, None]
        # A cluster that lost all its points stays where it is.
        centres_RH = torch.where(counts_R1 > 0, sums_RH / counts_R1.clamp_min(1), centres_RH)
    return centres_RH
