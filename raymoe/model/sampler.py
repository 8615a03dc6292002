"""Choose next tokens from logits, each sequence by its own settings and its own random stream.

Shape letters: N sequences that sample, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from raymoe.errors import EngineError

GREEDY_BELOW = 1e-4
"""A smaller temperature is greedy: dividing by it would overflow, and nothing else could be drawn anyway."""


class Choice(NamedTuple):
    """How one sequence chooses. `position` is the index of the token being chosen, prompt included."""

    temperature: float
    top_p: float
    top_k: int
    seed: int
    position: int


def choose(logits_NV: Tensor, choices: Sequence[Choice]) -> list[int | EngineError]:
    """One token id per row; a row without a finite maximum gets an error of its own.

    The draw for (seed, position) is one uniform number from a counter-based generator (Philox; Salmon et al.,
    SC 2011), so it depends on nothing else: not on the batch, and not on whether the sequence was replayed.
    """
    best_N, ids_N = logits_NV.max(dim=-1)
    bad = ~torch.isfinite(best_N)  # NaN wins every maximum, and a row of -inf has no finite one
    chosen: list[int | EngineError] = list(ids_N.tolist())
    for row in bad.nonzero()[:, 0].tolist():
        chosen[row] = EngineError("the model's logits are not finite")
    for row, choice in enumerate(choices):
        if choice.temperature >= GREEDY_BELOW and not bad[row]:
            chosen[row] = _draw(logits_NV[row], choice)
    return chosen


def _draw(logits_V: Tensor, choice: Choice) -> int:
    scores = logits_V.double() / choice.temperature
    ids = None
    if 0 < choice.top_k < scores.shape[0]:
        # Ties at the border: the lower id stays, as a stable sort would have it.
        scores, ids = torch.sort(scores, descending=True, stable=True)
        scores, ids = scores[: choice.top_k], ids[: choice.top_k]
    probabilities = torch.softmax(scores, dim=-1)
    if choice.top_p < 1.0:
        order = torch.argsort(probabilities, descending=True, stable=True)
        probabilities = probabilities[order]
        before = probabilities.cumsum(0) - probabilities
        kept = int((before < choice.top_p).sum())  # the first one always stays
        probabilities = probabilities[: max(kept, 1)]
        ids = order[: max(kept, 1)] if ids is None else ids[order[: max(kept, 1)]]
    cumulated = probabilities.cumsum(0)
    point = uniform(choice.seed, choice.position) * float(cumulated[-1])
    at = min(int(torch.searchsorted(cumulated, point, right=True)), cumulated.shape[0] - 1)
    return at if ids is None else int(ids[at])


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that belongs to (seed, position)."""
    key = seed & 0xFFFFFFFFFFFFFFFF
    return float(np.random.Generator(np.random.Philox(key=key, counter=position)).random())
