from __future__ import annotations

import pytest
import torch

from raymoe.checkpoint.memory import PROCESS_BYTES, check_memory, needed_bytes
from raymoe.checkpoint.moe import MoeLayer, MoeModel
from raymoe.errors import MemoryLimitError

GIB = 1 << 30
MODEL = MoeModel(
    layers=tuple(MoeLayer(i, f"model.layers.{i}.mlp.experts", 8, 2, GIB // 16) for i in range(4)),
    hidden_size=64,
    dtype=torch.float32,
    vocab_size=264,
    max_context=512,
    router_bytes=GIB // 4,
    router_file_bytes=GIB // 4,
)


def test_every_part_is_counted() -> None:
    need = needed_bytes(MODEL, groups=3, kv_bytes=GIB, lane_bytes=GIB // 64, routers=2)
    assert need.parts == {
        "experts": 2 * GIB,
        "loading": GIB // 2,
        "routers": GIB // 2,
        "KV cache": 2 * GIB,
        "lanes": 2 * 3 * 2 * GIB // 64,
        "processes": 5 * PROCESS_BYTES,
    }
    assert need.total == sum(need.parts.values())


def test_what_fits_is_accepted_and_one_byte_less_is_refused_in_one_sentence() -> None:
    need = needed_bytes(MODEL, groups=2, kv_bytes=GIB, lane_bytes=GIB // 64, routers=1)
    check_memory(need, need.total)
    with pytest.raises(MemoryLimitError) as caught:
        check_memory(need, need.total - 1)
    for word in ("experts 2.0 GiB", "KV cache 1.0 GiB", "are available", "router.kv_bytes", "model.dtype"):
        assert word in str(caught.value)
