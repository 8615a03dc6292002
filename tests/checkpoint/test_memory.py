from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raymoe.checkpoint.folder import Checkpoint
from raymoe.checkpoint.memory import PROCESS_BYTES, check_memory, give_back, needed_bytes
from raymoe.checkpoint.moe import MoeLayer, MoeModel
from raymoe.checkpoint.router import load_router
from raymoe.checkpoint.slices import ExpertLoader
from raymoe.errors import MemoryLimitError
from tests.tiny import tiny_checkpoint

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


def held() -> int:
    """Bytes of memory that are this process's own."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def test_a_process_grows_by_what_it_loads_and_no_more(tmp_path: Path) -> None:
    tiny_checkpoint(
        "qwen3_moe", tmp_path, hidden_size=256, moe_intermediate_size=512, num_experts=16, vocab_size=32768
    )
    checkpoint = Checkpoint.open(tmp_path)
    loader = ExpertLoader(checkpoint)
    slice_bytes = sum(8 * layer.expert_bytes for layer in loader.model.layers)
    assert loader.model.router_bytes > 60 << 20
    assert slice_bytes > 30 << 20

    give_back()
    start = held()
    router = load_router(checkpoint, lambda layer, hidden_TH, ids_TK, weights_TK: hidden_TH)
    with_router = held()
    slices = [loader.load(layer.index, range(8)) for layer in loader.model.layers]
    with_slices = held()
    slack = 12 << 20  # bounded: it does not grow with more loads
    assert with_router - start <= loader.model.router_bytes + slack
    assert with_slices - with_router <= slice_bytes + slack
    assert router.training is False
    assert len(slices) == 3
