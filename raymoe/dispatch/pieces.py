"""Cut one group's part of a layer into pieces that fit a lane."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from raymoe.dispatch.table import LanePlan
from raymoe.lanes.base import Ints

SUM_IN_ORDER = 8
"""Up to so many terms `torch.sum` over a middle axis adds one by one (a test holds it to that)."""


class Cut(NamedTuple):
    """A piece before it is numbered: see `lanes.base.Piece`."""

    pair_P: NDArray[np.int64]
    token_R: NDArray[np.int64] | None
    row_P: Ints
    segments_S3: Ints


def cut(plan: LanePlan, top_k: int, tokens: int, max_pairs: int) -> Iterator[Cut]:
    """Pieces of at most `max_pairs` pairs.

    A slot's pairs are cut at multiples of `max_pairs` and nowhere else: then the rows of each product, and
    with them its rounding, are the same whatever else the group holds.
    """
    if len(plan.pair_P) <= max_pairs:
        yield _rows(plan.pair_P, plan.segments_S3, top_k, tokens)
        return
    start = end = 0
    segments: list[tuple[int, int, int]] = []
    for slot, generation, count in plan.segments_S3.tolist():
        while count:
            part = min(count, max_pairs)
            if end - start + part > max_pairs:
                yield _rows(plan.pair_P[start:end], np.array(segments, np.int32), top_k, tokens)
                start, segments = end, []
            segments.append((slot, generation, part))
            end += part
            count -= part
    yield _rows(plan.pair_P[start:end], np.array(segments, np.int32), top_k, tokens)


def _rows(pair_P: NDArray[np.int64], segments_S3: Ints, top_k: int, tokens: int) -> Cut:
    """Which tokens travel (each once), and which of them each pair means."""
    token_P = pair_P // top_k
    if tokens == 1:
        return Cut(pair_P, None, np.zeros(len(pair_P), np.int32), segments_S3)
    travels_T = np.zeros(tokens, bool)
    travels_T[token_P] = True
    token_R = np.flatnonzero(travels_T)
    if len(token_R) == tokens:
        return Cut(pair_P, None, token_P.astype(np.int32), segments_S3)
    row_T = np.cumsum(travels_T, dtype=np.int32) - 1
    return Cut(pair_P, token_R, row_T[token_P], segments_S3)


def combine(out_TKH: torch.Tensor, weights_TK: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Weight each pair's row and sum in slot order 0..K-1; [T, H] in `dtype`. May change `out_TKH`.

    The product is rounded as transformers' own experts do it, so results are the same to the bit; above
    `SUM_IN_ORDER` they sum in another order, which is theirs to change.
    """
    same = weights_TK.dtype == out_TKH.dtype
    weighted_TKH = out_TKH.mul_(weights_TK.unsqueeze(-1)) if same else out_TKH * weights_TK.unsqueeze(-1)
    if weighted_TKH.shape[1] <= SUM_IN_ORDER:
        return weighted_TKH.sum(dim=1).to(dtype)
    first, *rest = weighted_TKH.unbind(dim=1)
    sum_TH = first.clone()
    for row_TH in rest:
        sum_TH += row_TH
    return sum_TH.to(dtype)
