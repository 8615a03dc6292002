"""From logits to the next tokens. A draw depends on (seed, position) alone, so a replay draws the same.

The order is: what `model/adjust.py` changes, temperature, min_p, top_k, top_p (as in vLLM), typical_p. Each works
on what the one before has left.

Shape letters: S rows to sample, V vocabulary, N tokens that are candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

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
    def min_p(self) -> float: ...
    @property
    def seed(self) -> int: ...
    @property
    def typical_p(self) -> float: ...


class Draw(NamedTuple):
    """How one row's token is chosen. `adjust` takes and gives logits [V]; None: they stay as they are."""

    params: Sampling
    position: int
    adjust: Callable[[Tensor], Tensor] | None = None

    @property
    def greedy(self) -> bool:
        """Takes the largest logit."""
        return self.params.temperature == 0 or self.params.top_k == 1


def sample(logits_SV: Tensor, draws: Sequence[Draw]) -> list[int | None]:
    """The next token of each row.

    None where a row holds no usable distribution: NaN, plus infinity, or nothing but minus infinity.
    """
    if not draws:
        return []
    top_S, greedy_S = logits_SV.max(-1)
    tokens: list[int | None] = list(greedy_S.tolist())
    for row, usable in enumerate(torch.isfinite(top_S).tolist()):
        draw = draws[row]
        if not usable:
            tokens[row] = None
        elif draw.adjust is not None:
            tokens[row] = _adjusted(logits_SV[row], draw, draw.adjust)
        elif not draw.greedy:
            tokens[row] = _draw(logits_SV[row], top_S[row], draw)
    return tokens


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that belongs to a position: Philox 4x64 (Salmon et al., SC 2011)."""
    generator = np.random.Philox(key=seed % (1 << 64), counter=position)
    return float(np.random.Generator(generator).random())


def _adjusted(logits_V: Tensor, draw: Draw, adjust: Callable[[Tensor], Tensor]) -> int | None:
    logits_V = adjust(logits_V)
    top, largest = logits_V.max(-1)
    if not torch.isfinite(top):
        return None
    return int(largest) if draw.greedy else _draw(logits_V, top, draw)


def _draw(logits_V: Tensor, top: Tensor, draw: Draw) -> int:
    """Invert the distribution function, with the candidates in the order of `_candidates`."""
    params = draw.params
    scaled_V = (logits_V.double() - top).div_(params.temperature)
    weight_N, ids_N = _candidates(torch.exp_(scaled_V), params)
    reached_N = weight_N.cumsum(0)
    chosen = int(
        torch.searchsorted(reached_N, uniform(params.seed, draw.position) * reached_N[-1], right=True)
    )
    # A product that rounds up to the whole mass would fall behind the last candidate that has any.
    chosen = min(chosen, int(torch.searchsorted(reached_N, reached_N[-1])))
    return chosen if ids_N is None else int(ids_N[chosen])


def _candidates(weight_V: Tensor, params: Sampling) -> tuple[Tensor, Tensor | None]:
    """Weights and ids of what the four cuts leave, at least one; ids None: all, in their order.

    The largest weight is 1. min_p leaves tokens of at least that share of it (Nguyen et al., 2024); top_p the
    smallest set whose mass reaches it (Holtzman et al., 2020), of what the others have left.
    """
    if params.min_p == 0:
        weight_N, ids_N = _largest(weight_V, params)
    else:
        ids_N = torch.nonzero(weight_V >= params.min_p).squeeze(1)
        weight_N, order_N = _largest(weight_V[ids_N], params)
        ids_N = ids_N if order_N is None else ids_N[order_N]
    if params.typical_p < 1:
        weight_N, order_N = _typical(weight_N, params.typical_p)
        ids_N = order_N if ids_N is None else ids_N[order_N]
    return weight_N, ids_N


def _typical(weight_N: Tensor, typical_p: float) -> tuple[Tensor, Tensor]:
    """The smallest set of mass `typical_p` of tokens whose information is nearest to the entropy.

    Locally typical sampling (Meister et al., TACL 2023).
    """
    share_N = weight_N / weight_N.sum()
    information_N = -torch.log(share_N)
    # What can't be drawn has no share in the entropy, and comes last.
    entropy = torch.nansum(share_N * information_N)
    order_N = torch.sort((information_N - entropy).abs(), stable=True).indices
    keep = int((share_N[order_N].cumsum(0) < typical_p).sum()) + 1
    order_N = order_N[:keep]
    return weight_N[order_N], order_N


def _largest(weight_V: Tensor, params: Sampling) -> tuple[Tensor, Tensor | None]:
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
