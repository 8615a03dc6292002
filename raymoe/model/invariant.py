"""Attention whose bits depend on a sequence's own tokens alone, and the tiles that make products so.

What this rests on was measured (docs/decisions.md) and is checked at each start (`invariant_check.py`): a product
of 4, 8, 12, ... rows gives each row the same bits whatever their number is. A softmax over 64, 128, ... scores
gives the same however many minus infinities follow, a product over 64 or 128 keys however many zero shares. So rows
are padded to multiples of `ROWS`, keys to multiples of `KEYS`, and values are summed in blocks of `BLOCK` keys, all
at absolute positions: what lies behind a row's own position adds exact zeros.

Shape letters: T rows of the step, Q of them of one sequence, A query heads, G heads of keys and values, R = A / G,
M = R · Q, L keys, D and W widths of a key and of a value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from raymoe.model.context import StepContext
from raymoe.policy.tiles import BLOCK, KEYS, ROWS, tiled

_QUERIES = 128
"""Rows of one product at most, so that the first rows of a long prompt don't meet its last keys."""
_SCORES = 1 << 22
"""Scores that are in memory at once, as far as `ROWS` rows allow it."""


def attend(
    step: StepContext,
    query_TAD: Tensor,
    views: Sequence[tuple[Tensor, Tensor]],
    counts: Sequence[int],
    lengths: Sequence[int],
    scale: float,
    window: int | None,
    sinks_A: Tensor | None,
) -> Tensor:
    """[T, A, W]: of each sequence, the last `counts` of `lengths` positions attend to what is before them.

    `views` are its keys [G, L, D] and values [G, L, W], L its length rounded up to `KEYS`; what the last of them
    hold doesn't matter, if it is finite. Rows behind the sequences' are padding and get zeros.
    """
    heads, groups = query_TAD.shape[1], views[0][0].shape[0]
    single = sinks_A is None and query_TAD.dtype == torch.float32
    rows_GRD: tuple[Tensor, ...] = ()
    if single and 1 in counts:
        query_TGRD = query_TAD.view(len(query_TAD), groups, -1, query_TAD.shape[2]) * scale
        rows_GRD = functional.pad(query_TGRD, (0, 0, 0, -query_TGRD.shape[2] % ROWS)).unbind()
    outs, start = [], 0
    for count, length, (keys_GLD, values_GLW) in zip(counts, lengths, views, strict=True):
        if single and count == 1:
            out_GRW = _one_row(rows_GRD[start], keys_GLD, values_GLW, length, window)
            outs.append(out_GRW[:, : heads // groups].reshape(1, heads, -1))
        else:
            rows_QAD = query_TAD[start : start + count]
            outs.append(_rows(step, rows_QAD, keys_GLD, values_GLW, length, scale, window, sinks_A))
        start += count
    outs.append(query_TAD.new_zeros(len(query_TAD) - start, heads, outs[0].shape[2]))
    return torch.cat(outs)


def _one_row(
    row_GRD: Tensor, keys_GLD: Tensor, values_GLW: Tensor, length: int, window: int | None
) -> Tensor:
    """[G, R, W] of a row that is scaled and whose heads are padded: the operations of `_attend`, and no others."""
    first = _first_key(length - 1, window)
    keys_GLD, values_GLW = keys_GLD[:, first:], values_GLW[:, first:]
    scores_GRL = torch.bmm(row_GRD, keys_GLD.transpose(1, 2))
    _hide(scores_GRL, length - 1, first, window)
    return _sum_values(torch.softmax(scores_GRL, -1), values_GLW)


def _first_key(position: int, window: int | None) -> int:
    """Where the first block begins of which a row at `position` sees something."""
    return 0 if window is None else max(position - window + 1, 0) // BLOCK * BLOCK


def _hide(scores_GML: Tensor, position: int, first: int, window: int | None) -> None:
    """Hide what a row at `position` doesn't see."""
    if position + 1 - first < scores_GML.shape[2]:
        scores_GML[:, :, position + 1 - first :] = -torch.inf
    if window is not None and position - window + 1 > first:
        scores_GML[:, :, : position - window + 1 - first] = -torch.inf


def _rows(
    step: StepContext,
    rows_QAD: Tensor,
    keys_GLD: Tensor,
    values_GLW: Tensor,
    length: int,
    scale: float,
    window: int | None,
    sinks_A: Tensor | None,
) -> Tensor:
    """[Q, A, W], in parts whose scores fit and that skip keys which none of their rows sees."""
    count, heads, _ = rows_QAD.shape
    tile = min(_QUERIES, max(_SCORES // (heads * keys_GLD.shape[1]) // ROWS, 1) * ROWS)
    outs = []
    for start in range(0, count, tile):
        part_QAD = rows_QAD[start : start + tile]
        position = length - count + start
        end = tiled(position + part_QAD.shape[0], KEYS)
        first = _first_key(position, window)
        part = part_QAD, keys_GLD[:, first:end], values_GLW[:, first:end]
        outs.append(_attend(step, *part, position, first, scale, window, sinks_A))
    return torch.cat(outs) if len(outs) > 1 else outs[0]


def _attend(
    step: StepContext,
    rows_QAD: Tensor,
    keys_GLD: Tensor,
    values_GLW: Tensor,
    position: int,
    first: int,
    scale: float,
    window: int | None,
    sinks_A: Tensor | None,
) -> Tensor:
    """`position` is that of the first row, `first` that of the first key."""
    count, heads, width = rows_QAD.shape
    groups, length, _ = keys_GLD.shape
    query_GRQD = rows_QAD.view(count, groups, -1, width).permute(1, 2, 0, 3)
    repeats = heads // groups
    # One row has its heads padded, several are padded themselves: so either way M is a multiple.
    if count == 1:
        query_GRQD = functional.pad(query_GRQD, (0, 0, 0, 0, 0, -repeats % ROWS))
    else:
        query_GRQD = functional.pad(query_GRQD, (0, 0, 0, -count % ROWS))
    padded = query_GRQD.shape[:3]
    query_GMD = query_GRQD.reshape(groups, -1, width)
    if query_GMD.dtype == torch.float32:
        scores_GML = torch.bmm(query_GMD * scale, keys_GLD.transpose(1, 2))
    else:
        scores_GML = torch.bmm(query_GMD, keys_GLD.transpose(1, 2)).float() * scale
    if count == 1:
        _hide(scores_GML, position, first, window)
    else:
        mask_QL = _mask(step, padded[2], position, first, length, window)
        scores_GML = scores_GML.view(*padded, length).add_(mask_QL).view(groups, -1, length)
    if sinks_A is None:
        shares_GML = torch.softmax(scores_GML, -1)
    else:
        shares_GML = _softmax_with_sinks(scores_GML, sinks_A, padded)
    out_GMW = _sum_values(shares_GML.to(values_GLW.dtype), values_GLW)
    out_GRQW = out_GMW.view(*padded, -1)[:, :repeats, :count]
    return out_GRQW.permute(2, 0, 1, 3).reshape(count, heads, -1)


def _sum_values(shares_GML: Tensor, values_GLW: Tensor) -> Tensor:
    """[G, M, W] in the values' dtype. A block of zero shares adds nothing, so it may be there or not."""
    sum_GMW = torch.bmm(shares_GML[:, :, :BLOCK], values_GLW[:, :BLOCK])
    if shares_GML.shape[2] <= BLOCK:
        return sum_GMW
    single = sum_GMW.dtype == torch.float32
    sum_GMW = sum_GMW.float()
    for start in range(BLOCK, shares_GML.shape[2], BLOCK):
        block = shares_GML[:, :, start : start + BLOCK], values_GLW[:, start : start + BLOCK]
        sum_GMW = sum_GMW.baddbmm_(*block) if single else sum_GMW.add_(torch.bmm(*block))
    return sum_GMW.to(values_GLW.dtype)


def _softmax_with_sinks(scores_GML: Tensor, sinks_A: Tensor, padded: torch.Size) -> Tensor:
    """Each head's sink is one more score. It leads a tile of its own, so all others keep their lanes."""
    groups, heads, count = padded
    sinks_GR = sinks_A.view(groups, -1).float()
    sinks_GR = functional.pad(sinks_GR, (0, heads - sinks_GR.shape[1]))
    lead_GMK = scores_GML.new_full((*scores_GML.shape[:2], KEYS), -torch.inf)
    lead_GMK[:, :, 0] = sinks_GR.repeat_interleave(count, dim=1)
    return torch.softmax(torch.cat([lead_GMK, scores_GML], -1), -1)[:, :, KEYS:]


def _mask(
    step: StepContext, count: int, position: int, first: int, length: int, window: int | None
) -> Tensor:
    """Additive mask [Q, L], built once for all layers of a step; the other arguments follow from its name."""
    name = (count, position, window)
    if name not in step.masks:
        row_Q1 = torch.arange(position, position + count)[:, None]
        key_L = torch.arange(first, first + length)
        hidden_QL = key_L > row_Q1
        if window is not None:
            hidden_QL |= key_L <= row_Q1 - window
        step.masks[name] = torch.zeros(count, length).masked_fill_(hidden_QL, -torch.inf)
    return step.masks[name]
