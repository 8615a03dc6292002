"""Packed attention against one written out row by row."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from raymoe.errors import EngineError
from raymoe.model import attention
from raymoe.model.attention import can_pack, packed_attention, wants_joined
from raymoe.model.cache import PackedCache, SequenceCache
from raymoe.model.context import STEP, StepContext
from raymoe.model.rows import LiveRows
from tests.tiny import tiny_config

HEADS, WIDTH, VALUE = 4, 8, 6


def naive(query_AD, keys_GLD, values_GLV, scale, window, sinks_A) -> torch.Tensor:
    """One row that is the last of L positions, in float64."""
    out = []
    for head, row_D in enumerate(query_AD.double()):
        group = head * keys_GLD.shape[0] // query_AD.shape[0]
        scores = keys_GLD[group].double() @ row_D * scale
        if window is not None:
            scores = scores[-window:]
        values = values_GLV[group].double()[-len(scores) :]
        if sinks_A is not None:
            scores = torch.cat([scores, sinks_A[head : head + 1].double()])
        out.append(torch.softmax(scores, 0)[: len(values)] @ values)
    return torch.stack(out)


def run(lengths, counts, *, groups=2, window=None, sinks=False, dtype=torch.float32, joined=False):
    """(packed, naive) outputs [T, A, V]; sequence i has lengths[i] rows before and counts[i] new ones."""
    torch.manual_seed(0)
    caches, all_keys, all_values = [], [], []
    for before, new in zip(lengths, counts, strict=True):
        keys, values = torch.randn(groups, before + new, WIDTH), torch.randn(groups, before + new, VALUE)
        all_keys.append(keys.to(dtype))
        all_values.append(values.to(dtype))
        cache = SequenceCache()
        if before:
            cache.write(3, all_keys[-1][:, :before], all_values[-1][:, :before])
            cache.advance(before)
        caches.append(cache)
    packed = PackedCache(list(zip(caches, counts, strict=True)), joined)
    key, value = packed.update(
        torch.cat([k[:, n:] for k, n in zip(all_keys, lengths, strict=True)], 1)[None],
        torch.cat([v[:, n:] for v, n in zip(all_values, lengths, strict=True)], 1)[None],
        3,
    )
    query = torch.randn(1, HEADS, sum(counts), WIDTH).to(dtype)
    module = SimpleNamespace(layer_idx=3)
    if sinks:
        module.sinks = torch.randn(HEADS)
    token = STEP.set(StepContext(LiveRows(counts, strict=True), packed=packed))
    try:
        out, weights = packed_attention(module, query, key, value, None, scaling=0.3, sliding_window=window)
    finally:
        STEP.reset(token)
    assert weights is None
    expected, at = [], 0
    for before, new, keys, values in zip(lengths, counts, all_keys, all_values, strict=True):
        for row in range(new):
            end = before + row + 1
            expected.append(
                naive(
                    query[0, :, at],
                    keys[:, :end],
                    values[:, :end],
                    0.3,
                    window,
                    getattr(module, "sinks", None),
                )
            )
            at += 1
    return out[0], torch.stack(expected)


@pytest.mark.parametrize("window", [None, 1, 5, 16])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("joined", [False, True])
def test_every_row_sees_its_own_sequence_up_to_itself(window, sinks, groups, joined) -> None:
    out, expected = run(
        [9, 0, 20, 0, 3, 30], [1, 1, 1, 7, 6, 5], groups=groups, window=window, sinks=sinks, joined=joined
    )
    assert out.shape == (21, HEADS, VALUE)
    assert torch.allclose(out.double(), expected, atol=2e-6)


def test_sinks_in_tiles_of_rows_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_SCORES", HEADS * 40 * 3)
    out, expected = run([20], [20], sinks=True, window=9)
    assert torch.allclose(out.double(), expected, atol=2e-6)


def test_low_precision_is_only_as_wrong_as_its_rounding() -> None:
    for sinks in (False, True):
        out, expected = run([9, 0], [1, 7], dtype=torch.bfloat16, sinks=sinks)
        assert out.dtype == torch.bfloat16
        assert torch.allclose(out.double(), expected, atol=0.03)


def test_what_would_have_to_be_ignored_is_refused() -> None:
    tensor = torch.zeros(1, 1, 1, 4)
    for extra in ({"softcap": 30.0}, {"dropout": 0.1}, {"position_bias": tensor}):
        with pytest.raises(EngineError, match="soft cap"):
            packed_attention(SimpleNamespace(layer_idx=0), tensor, tensor, tensor, None, **extra)
    with pytest.raises(EngineError, match="mask"):
        packed_attention(SimpleNamespace(layer_idx=0), tensor, tensor, tensor, tensor)
    token = STEP.set(StepContext(LiveRows([1], strict=True)))
    with pytest.raises(EngineError, match="without a packed cache"):
        packed_attention(SimpleNamespace(layer_idx=0), tensor, tensor, tensor, None)
    STEP.reset(token)


def config(**fields) -> SimpleNamespace:
    text = SimpleNamespace(model_type="tiny", **fields)
    text.get_text_config = lambda: text
    return text


def test_what_the_packed_cache_can_hold_is_told_by_the_kinds_of_layers() -> None:
    assert can_pack(tiny_config("olmoe"))
    assert can_pack(tiny_config("gpt_oss"))
    assert can_pack(tiny_config("deepseek_v3"))
    for other in ("qwen3_next", "deepseek_v32", "jamba", "zaya"):
        assert not can_pack(tiny_config(other)), other


def test_models_that_compute_with_what_is_cached_get_it_joined() -> None:
    assert not wants_joined(config(kv_lora_rank=None))
    assert wants_joined(config(kv_lora_rank=16))
    assert wants_joined(config(num_kv_shared_layers=2))
