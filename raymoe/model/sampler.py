"""From logits to the next tokens. A draw depends on (seed, position) alone, so a replay draws the same.

Shape letters: S rows to sample, V vocabulary, N tokens that are candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

_FEW = 256
"""So many of the most probable tokens usually hold the mass that top_p asks for; sorting all is slow."""


class Sampling(Protocol):
    """The fields of `engine.messages.SamplingParams`, which lies to the right of this package."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def seed(self) -> int: ...


def sample(logits_SV: Tensor, draws: Sequence[tuple[Sampling, int]]) -> list[int | None]:
    """The next token of each row; `draws` names its parameters and the position that it will have.

    None where a row holds no usable distribution: NaN, plus infinity, or nothing but minus infinity.
    """
    if not draws:
        return []
    top_S, greedy_S = logits_SV.max(-1)
    tokens: list[int | None] = list(greedy_S.tolist())
    for row, usable in enumerate(torch.isfinite(top_S).tolist()):
        params, position = draws[row]
        if not usable:
            tokens[row] = None
        elif params.temperature > 0 and params.top_k != 1:
            tokens[row] = _draw(logits_SV[row], top_S[row], params, position)
    return tokens


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that belongs to a position: Philox 4x64 (Salmon et al., SC 2011)."""
    generator = np.random.Philox(key=seed % (1 << 64), counter=position)
    return float(np.random.Generator(generator).random())


def _draw(logits_V: Tensor, top: Tensor, params: Sampling, position: int) -> int:
    """Invert the distribution function, with the candidates in the order of `_candidates`."""
    scaled_V = (logits_V.double() - top).div_(params.temperature)
    weight_N, ids_N = _candidates(torch.exp_(scaled_V), params)
    reached_N = weight_N.cumsum(0)
    chosen = int(torch.searchsorted(reached_N, uniform(params.seed, position) * reached_N[-1], right=True))
    # A product that rounds up to the whole mass would fall behind the last candidate that has any.
    chosen = min(chosen, int(torch.searchsorted(reached_N, reached_N[-1])))
    return chosen if ids_N is None else int(ids_N[chosen])


def _candidates(weight_V: Tensor, params: Sampling) -> tuple[Tensor, Tensor | None]:
    """Weights and ids of what top_k and then top_p leave, at least one; ids None: all, in their order.

    top_p keeps the smallest set whose mass reaches it (Holtzman et al., 2020), of what top_k has left.
    """
    size = weight_V.shape[0]
    cuts_k, cuts_p = 0 < params.top_k < size, params.top_p < 1
    if not cuts_k and not cuts_p:
        return weight_V, None
    if cuts_k:
        weight_N, ids_N = torch.topk(weight_V, params.top_k)
        mass = params.top_p * weight_N.sum()
    else:
        weight_N, ids_N = torch.topk(weight_V, min(_FEW, size))
        mass = params.top_p * weight_V.sum()
        if weight_N.sum() < mass:
            weight_N, ids_N = torch.sort(weight_V, descending=True)
    if cuts_p:
        keep = int((weight_N.cumsum(0) < mass).sum()) + 1
        weight_N, ids_N = weight_N[:keep], ids_N[:keep]
    return weight_N, ids_N
