"""Attention over packed rows: no padding, and no row of one sequence sees another's.

Registered with transformers as `raymoe_packed`. There is no mask function under that name, so models build
no mask, and each sequence's rows meet its own keys here.

Shape letters: T rows of the step, Q of them of one sequence, A query heads, G heads of keys and values,
R = A / G, L keys of a sequence, D and W widths of a key and of a value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, PretrainedConfig

from raymoe.checkpoint.private import attention_kinds
from raymoe.errors import EngineError
from raymoe.model.context import StepContext, current_step
from raymoe.model.invariant import attend

NAME = "raymoe_packed"
_KINDS = {"full_attention", "sliding_attention", "dummy"}
"""As transformers names them; `dummy` layers have no attention, or read the keys of another layer."""
_SCORES = 1 << 22
"""Scores that are in memory at once where they are computed in tiles of query rows."""


def can_pack(config: PretrainedConfig) -> bool:
    """Whether the packed cache can hold what the model's layers keep: keys and values, full or in a window.

    Linear and compressed attention, convolutions and sparse attention with an index keep something else.
    """
    return attention_kinds(config) <= _KINDS


def wants_joined(config: PretrainedConfig) -> bool:
    """Whether the model itself computes with the cached tensors: MLA latents, or keys shared by layers."""
    text = config.get_text_config()
    return bool(getattr(text, "kv_lora_rank", None) or getattr(text, "num_kv_shared_layers", None))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The interface of transformers: query [1, A, T, D] → ([1, T, A, W], None).

    Raises:
        EngineError: the model asks for what isn't computed here.
    """
    if softcap or dropout or attention_mask is not None or position_bias is not None:
        raise EngineError(f"{type(module).__name__} wants a soft cap, dropout, mask or bias in its attention")
    step = current_step()
    cache = step.packed
    if cache is None:
        raise EngineError("packed attention was called in a forward without a packed cache")
    if cache.joined:
        keys, values = key[0].split(cache.spans, 1), value[0].split(cache.spans, 1)
        views = list(zip(keys, values, strict=True))
    else:
        views = cache.views[int(module.layer_idx)]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sinks_A = getattr(module, "sinks", None)
    single = sinks_A is None and query.dtype == torch.float32
    query_TAD = query[0].transpose(0, 1)
    if cache.tile > 1:
        packed = views, cache.counts, cache.lengths
        return attend(step, query_TAD, *packed, scale, sliding_window, sinks_A)[None], None
    outs, start = [], 0
    rows_GRD: tuple[Tensor, ...] = ()
    if single and 1 in cache.counts:
        heads = views[0][0].shape[0]
        rows_GRD = (query_TAD * scale).reshape(query_TAD.shape[0], heads, -1, query.shape[-1]).unbind()
    for count, (keys_GLD, values_GLW) in zip(cache.counts, views, strict=True):
        if single and count == 1:
            outs.append(_one_row(rows_GRD[start], keys_GLD, values_GLW, sliding_window))
        else:
            rows_QAD = query_TAD[start : start + count]
            outs.append(_rows(step, rows_QAD, keys_GLD, values_GLW, scale, sliding_window, sinks_A))
        start += count
    return (torch.cat(outs) if len(outs) > 1 else outs[0])[None], None


def _one_row(row_GRD: Tensor, keys_GLD: Tensor, values_GLW: Tensor, window: int | None) -> Tensor:
    """[1, A, W]. Two products without a mask: less than the fused kernel costs for one row (measured: 4
    against 6 µs for 16 keys, 19 against 22 for 200, 83 against 96 for 1000, and it reads the keys once
    per group of heads)."""
    if window is not None:
        keys_GLD, values_GLW = keys_GLD[:, -window:], values_GLW[:, -window:]
    scores_GRL = torch.bmm(row_GRD, keys_GLD.transpose(1, 2))
    return torch.bmm(torch.softmax(scores_GRL, -1), values_GLW).view(1, -1, values_GLW.shape[-1])


def _rows(
    step: StepContext,
    rows_QAD: Tensor,
    keys_GLD: Tensor,
    values_GLW: Tensor,
    scale: float,
    window: int | None,
    sinks_A: Tensor | None,
) -> Tensor:
    """[Q, A, W]: the last Q of L positions attend to what is before them and within the window."""
    count, length = rows_QAD.shape[0], keys_GLD.shape[1]
    if window is not None and length >= count + window:
        # No row sees keys further back than this.
        first = length - count - window + 1
        keys_GLD, values_GLW, length = keys_GLD[:, first:], values_GLW[:, first:], length - first
    if window is not None and window >= length:
        window = None
    if sinks_A is not None:
        return _with_sinks(step, rows_QAD, keys_GLD, values_GLW, scale, window, sinks_A)
    causal = window is None and count == length
    mask_QL = None if causal or count == 1 else _mask(step, count, length, window, rows_QAD)
    out_1AQW = functional.scaled_dot_product_attention(
        rows_QAD.transpose(0, 1)[None],
        keys_GLD[None],
        values_GLW[None],
        attn_mask=mask_QL,
        is_causal=causal and count > 1,
        scale=scale,
        enable_gqa=rows_QAD.shape[1] != keys_GLD.shape[0],
    )
    return out_1AQW[0].transpose(0, 1)


def _with_sinks(
    step: StepContext,
    rows_QAD: Tensor,
    keys_GLD: Tensor,
    values_GLW: Tensor,
    scale: float,
    window: int | None,
    sinks_A: Tensor,
) -> Tensor:
    """Each head has one more score, its sink, that takes part in the softmax and brings no value."""
    (count, heads, width), (groups, length, _) = rows_QAD.shape, keys_GLD.shape
    mask_QL = None if count == 1 else _mask(step, count, length, window, rows_QAD)
    tile, outs = max(1, _SCORES // (heads * length)), []
    for start in range(0, count, tile):
        part_QAD = rows_QAD[start : start + tile]
        rows = part_QAD.shape[0]
        query_GMD = part_QAD.transpose(0, 1).reshape(groups, -1, width)
        scores_AQL = torch.bmm(query_GMD, keys_GLD.transpose(1, 2)).view(heads, rows, length) * scale
        if mask_QL is not None:
            scores_AQL += mask_QL[start : start + rows]
        sinks_AQ1 = sinks_A.to(scores_AQL.dtype).view(-1, 1, 1).expand(-1, rows, 1)
        shares_AQS = torch.softmax(torch.cat([scores_AQL, sinks_AQ1], -1), -1, dtype=torch.float32)
        shares_GML = shares_AQS[..., :-1].to(values_GLW.dtype).reshape(groups, -1, length)
        outs.append(torch.bmm(shares_GML, values_GLW).view(heads, rows, -1).transpose(0, 1))
    return torch.cat(outs)


def _mask(step: StepContext, count: int, length: int, window: int | None, like: Tensor) -> Tensor:
    """Additive mask [Q, L] in the dtype of the scores; built once for all layers of a step."""
    name = (count, length, window)
    if name not in step.masks:
        row_Q1 = torch.arange(length - count, length, device=like.device)[:, None]
        key_L = torch.arange(length, device=like.device)
        hidden_QL = key_L > row_Q1
        if window is not None:
            hidden_QL |= key_L <= row_Q1 - window
        step.masks[name] = like.new_zeros(count, length).masked_fill_(hidden_QL, float("-inf"))
    return step.masks[name]


AttentionInterface.register(NAME, packed_attention)
