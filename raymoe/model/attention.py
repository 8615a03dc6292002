"""Attention over packed rows: one product per sequence, no padding and no mask over the whole batch.

Registered with transformers under `NAME`. A name without a mask function makes the models build no mask.

Shape letters: T rows of the step, Q rows of one sequence, L its keys, Hq query heads, Hk key/value heads,
D head size, G = Hq / Hk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from raymoe.errors import EngineError
from raymoe.model.context import current

NAME = "raymoe_packed"

_KNOWN = {
    "dropout",
    "position_ids",
    "cache",
    "past_key_values",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "cache_position",
    "is_causal",
    "s_aux",
    "logits_to_keep",
}
"""Arguments that the models pass along and that change nothing here (`s_aux` is read from the module)."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention of query [1, Hq, T, D] over each row's own sequence; returns [1, T, Hq, D].

    Raises:
        EngineError: the architecture asks for something that this function would have to ignore.
    """
    unknown = [name for name, value in others.items() if name not in _KNOWN and value is not None]
    if attention_mask is not None or unknown:
        raise EngineError(f"{type(module).__name__} asks attention for {unknown or 'a mask'}")
    cache = current().cache
    groups = query.shape[1] // key.shape[1]
    sinks = getattr(module, "sinks", None)
    out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
    row = at = 0
    for number, part in enumerate(cache.parts):
        end, length = row + part.rows, cache.lengths[number]
        query_HQD = query[0, :, row:end]
        if cache.separate:
            key_HLD, value_HLD = cache.views[number]
        else:
            key_HLD, value_HLD = key[0, :, at : at + length], value[0, :, at : at + length]
        if sinks is not None:
            done = _with_sinks(query_HQD, key_HLD, value_HLD, groups, scaling, sliding_window, sinks)
        elif part.rows == 1:
            done = _decode(query_HQD, key_HLD, value_HLD, groups, scaling, sliding_window)
        else:
            done = _prefill(query_HQD, key_HLD, value_HLD, groups, scaling, sliding_window)
        out[0, row:end] = done.transpose(0, 1)
        row, at = end, at + length
    return out, None


def _decode(
    query_HQD: Tensor,
    key_HLD: Tensor,
    value_HLD: Tensor,
    groups: int,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """One row sees all keys (of its window), so no mask; the G heads of a group become rows."""
    if window is not None and key_HLD.shape[1] > window:
        key_HLD, value_HLD = key_HLD[:, -window:], value_HLD[:, -window:]
    heads = key_HLD.shape[0]
    rows = query_HQD.reshape(1, heads, groups, -1)
    done = scaled_dot_product_attention(rows, key_HLD[None], value_HLD[None], scale=scaling)
    return done.view(heads * groups, 1, -1)


def _prefill(
    query_HQD: Tensor,
    key_HLD: Tensor,
    value_HLD: Tensor,
    groups: int,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    rows, length = query_HQD.shape[1], key_HLD.shape[1]
    fresh = rows == length and (window is None or length <= window)
    return scaled_dot_product_attention(
        query_HQD[None],
        key_HLD[None],
        value_HLD[None],
        attn_mask=None if fresh else _visible(rows, length, window, query_HQD.device),
        is_causal=fresh,
        scale=scaling,
        enable_gqa=groups > 1,
    )[0]


def _with_sinks(
    query_HQD: Tensor,
    key_HLD: Tensor,
    value_HLD: Tensor,
    groups: int,
    scaling: float | None,
    window: int | None,
    sinks_H: Tensor,
) -> Tensor:
    """Each head has one more logit that takes weight and gives no value (gpt-oss, arXiv 2508.10925)."""
    rows, length = query_HQD.shape[1], key_HLD.shape[1]
    key, value = key_HLD.repeat_interleave(groups, 0), value_HLD.repeat_interleave(groups, 0)
    logits = (query_HQD @ key.transpose(1, 2)) * (scaling or query_HQD.shape[-1] ** -0.5)
    visible = _visible(rows, length, window, query_HQD.device)
    logits = logits.masked_fill(~visible, torch.finfo(logits.dtype).min)
    logits = torch.cat([logits, sinks_H.reshape(-1, 1, 1).expand(-1, rows, 1).to(logits.dtype)], dim=-1)
    logits = logits - logits.amax(dim=-1, keepdim=True)
    return torch.softmax(logits, dim=-1, dtype=torch.float32).to(value.dtype)[..., :-1] @ value


def _visible(rows: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """[Q, L], True where a row may look."""
    row = torch.arange(length - rows, length, device=device)[:, None]
    column = torch.arange(length, device=device)[None]
    visible = column <= row
    if window is not None:
        visible &= column > row - window
    return visible


AttentionInterface.register(NAME, packed_attention)
