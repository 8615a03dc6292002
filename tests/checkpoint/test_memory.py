from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from raymoe.checkpoint.memory import PROCESS_BYTES, check_memory, needed_bytes
from raymoe.checkpoint.moe import MoeLayer, MoeModel
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


MEASURE = """
import json, sys
from pathlib import Path
from raymoe.checkpoint.folder import Checkpoint
from raymoe.checkpoint.memory import give_back
from raymoe.checkpoint.router import load_router
from raymoe.checkpoint.slices import ExpertLoader

def held():
    return 1024 * int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0])

def load(folder):
    checkpoint = Checkpoint.open(folder)
    loader = ExpertLoader(checkpoint)
    give_back()
    start = held()
    router = load_router(checkpoint, lambda layer, hidden, ids, weights: hidden)
    with_router = held()
    slices = [loader.load(layer.index, range(8)) for layer in loader.model.layers]
    with_slices = held()
    return {
        "router": with_router - start,
        "slices": with_slices - with_router,
        "router_bytes": loader.model.router_bytes,
        "slice_bytes": sum(8 * layer.expert_bytes for layer in loader.model.layers),
    }

load(sys.argv[1])  # what is imported and allocated once
print(json.dumps(load(sys.argv[2])))
"""


def test_a_process_grows_by_what_it_loads_and_no_more(tmp_path: Path) -> None:
    small = tiny_checkpoint("qwen3_moe", tmp_path / "small")
    large = tiny_checkpoint(
        "qwen3_moe",
        tmp_path / "large",
        hidden_size=256,
        moe_intermediate_size=512,
        num_experts=16,
        vocab_size=32768,
    )
    # In a process of its own: what other tests have left in this one's heap is reused or not, as it comes.
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, small, large], capture_output=True, text=True, check=True
    )
    grown = json.loads(done.stdout)
    assert grown["router_bytes"] > 60 << 20
    assert grown["slice_bytes"] > 30 << 20
    slack = 20 << 20  # bounded: it does not grow with more loads
    assert grown["router"] <= grown["router_bytes"] + slack
    assert grown["slices"] <= grown["slice_bytes"] + slack
