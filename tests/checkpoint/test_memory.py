from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from raymoe.checkpoint.memory import (
    GROUP_BYTES,
    MIB,
    ROUTER_BYTES,
    SERVER_BYTES,
    check_memory,
    needed_bytes,
)
from raymoe.checkpoint.moe import MoeLayer, MoeModel
from raymoe.config import Settings
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


def settings(**values: dict[str, object]) -> Settings:
    """Small lanes and a cache of 1 GiB, unless told otherwise."""
    small = {"groups": {"lane_bytes": GIB // 64}, "router": {"kv_bytes": GIB}}
    return Settings.build({name: small.get(name, {}) | values.get(name, {}) for name in {**small, **values}})


def applied(message: str, plan: Settings) -> tuple[MoeModel, Settings]:
    """What becomes of model and settings for someone who follows the advice at the end of `message`."""
    model = MODEL
    for section, key, value in re.findall(r"(\w+)\.(\w+) to (\w+)", message.rpartition(": set ")[2]):
        if key == "dtype":
            layers = tuple(replace(one, expert_bytes=one.expert_bytes // 2) for one in model.layers)
            model = replace(
                model, layers=layers, router_bytes=model.router_bytes // 2, dtype=getattr(torch, value)
            )
        else:
            own = getattr(plan, section).model_copy(update={key: int(value)})
            plan = plan.model_copy(update={section: own})
    return model, Settings.build(plan.model_dump())


def refusal(plan: Settings, available: int) -> str:
    with pytest.raises(MemoryLimitError) as caught:
        check_memory(MODEL, plan, available)
    return str(caught.value)


def test_every_part_is_counted() -> None:
    plan = settings(groups={"count": 3}, router={"replicas": 2})
    need = needed_bytes(MODEL, plan)
    assert need.parts == {
        "experts": 2 * GIB,
        "loading": GIB // 2,
        "routers": GIB // 2,
        "KV cache": 2 * GIB,
        "lanes": 2 * 3 * 2 * GIB // 64,
        "processes": 2 * ROUTER_BYTES + 3 * GROUP_BYTES + SERVER_BYTES,
    }
    assert need.total == sum(need.parts.values())
    through_ray = settings(groups={"count": 3, "lane": "object_store"}, router={"replicas": 2})
    assert needed_bytes(MODEL, through_ray).parts["lanes"] == 2 * need.parts["lanes"]


def test_what_fits_is_accepted_and_one_byte_less_is_refused_with_all_parts_largest_first() -> None:
    total = needed_bytes(MODEL, settings()).total
    check_memory(MODEL, settings(), total)
    message = refusal(settings(), total - 1)
    assert "(experts 2.0 GiB, processes 1.8 GiB, KV cache 1.0 GiB, loading 512 MiB, routers " in message
    assert " of memory (" in message and "GiB are available: set router.kv_bytes to " in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("plan", "less", "advice"),
    [
        (settings(), 1, f"router.kv_bytes to {1023 * MIB}"),
        (settings(), 10 * MIB, f"router.kv_bytes to {1014 * MIB}"),
        (settings(), 960 * MIB, f"router.kv_bytes to {64 * MIB}"),
        (settings(router={"kv_bytes": 64 * MIB}), 5 * MIB, f"groups.lane_bytes to {14 * MIB}"),
        (settings(router={"replicas": 2}), 20 * MIB, f"router.kv_bytes to {1014 * MIB}"),
        (settings(), 961 * MIB, "model.dtype to bfloat16"),
        (settings(), 1408 * MIB, "model.dtype to bfloat16"),
        (settings(), 1409 * MIB, f"router.kv_bytes to {1023 * MIB} and model.dtype to bfloat16"),
        (
            settings(),
            2400 * MIB,
            f"router.kv_bytes to {92 * MIB} and groups.lane_bytes to {MIB} and model.dtype to bfloat16",
        ),
        (settings(groups={"count": 20}), 4096 * MIB, "groups.count to 7"),
        (settings(router={"replicas": 12, "kv_bytes": 64 * MIB}), 3200 * MIB, "router.replicas to 7"),
    ],
)
def test_the_advice_names_the_least_change_and_makes_it_fit(plan: Settings, less: int, advice: str) -> None:
    available = needed_bytes(MODEL, plan).total - less
    message = refusal(plan, available)
    assert message.endswith(f": set {advice}")
    check_memory(*applied(message, plan), available)


def test_a_value_one_unit_larger_than_the_advice_would_not_fit() -> None:
    available = needed_bytes(MODEL, settings()).total - 10 * MIB - 5
    _, advised = applied(refusal(settings(), available), settings())
    larger = advised.router.model_copy(update={"kv_bytes": advised.router.kv_bytes + MIB})
    with pytest.raises(MemoryLimitError):
        check_memory(MODEL, advised.model_copy(update={"router": larger}), available)


def test_when_nothing_helps_the_least_is_named() -> None:
    message = refusal(settings(), 2 * GIB)
    found = re.search(
        r"no settings make it fit, it takes at least (\d\.\d) GiB: take a smaller model", message
    )
    assert found and float(found[1]) == pytest.approx(
        (1.375 * GIB + 64 * MIB + 2 * MIB + ROUTER_BYTES + GROUP_BYTES + SERVER_BYTES) / GIB, abs=0.06
    )
    half = replace(MODEL, dtype=torch.bfloat16)
    with pytest.raises(MemoryLimitError) as caught:
        check_memory(half, settings(), 3 * GIB)
    assert "bfloat16" not in str(caught.value)


MEASURE = """
import json, sys
from pathlib import Path
from raymoe.checkpoint.folder import Checkpoint
from raymoe.checkpoint.memory import give_back
from raymoe.checkpoint.router import load_router
from raymoe.checkpoint.slices import ExpertLoader
from raymoe.experts.group import ExpertGroup
from raymoe.model.attention import NAME
from raymoe.model.context import run_experts
from raymoe.model.invariant_check import make_invariant

def held():
    return 1024 * int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0])

def load(folder, deterministic):
    checkpoint = Checkpoint.open(folder)
    loader = ExpertLoader(checkpoint)
    give_back()
    start = held()
    router = load_router(checkpoint, run_experts, attention=NAME)
    if deterministic:
        make_invariant(router, lambda layer, hidden, ids, weights: hidden)
    with_router = held()
    group = ExpertGroup(loader, "group", deterministic)
    for layer in loader.model.layers:
        group.load_slice(layer.index, range(8))
    with_slices = held()
    return {
        "router": with_router - start,
        "slices": with_slices - with_router,
        "router_bytes": loader.model.router_bytes,
        "slice_bytes": sum(8 * layer.expert_bytes for layer in loader.model.layers),
    }

deterministic = sys.argv[3] == "deterministic"
load(sys.argv[1], deterministic)  # what is imported and allocated once
print(json.dumps(load(sys.argv[2], deterministic)))
"""


@pytest.mark.parametrize("mode", ["usual", "deterministic"])
def test_a_process_grows_by_what_it_loads_and_no_more(tmp_path: Path, mode: str) -> None:
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
        [sys.executable, "-c", MEASURE, small, large, mode], capture_output=True, text=True, check=True
    )
    grown = json.loads(done.stdout)
    assert grown["router_bytes"] > 60 << 20
    assert grown["slice_bytes"] > 30 << 20
    slack = 20 << 20  # bounded: it does not grow with more loads
    assert grown["router"] <= grown["router_bytes"] + slack
    assert grown["slices"] <= grown["slice_bytes"] + slack
