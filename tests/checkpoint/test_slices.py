from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from raymoe.checkpoint.folder import Checkpoint
from raymoe.checkpoint.slices import ExpertLoader
from raymoe.errors import CheckpointError, ConfigError
from tests.tiny import TINY_TYPES


def whole(folder: Path, layer: str) -> dict[str, Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    return {name: value.detach() for name, value in model.get_submodule(layer).named_parameters()}


@pytest.mark.parametrize("model_type", TINY_TYPES)
@pytest.mark.parametrize("experts", [[3], [0, 1, 2], [7, 2, 5], list(range(8))], ids=str)
def test_loaded_experts_are_the_library_s_own(
    model_type: str, experts: list[int], tiny_folder: Callable[[str], Path]
) -> None:
    folder = tiny_folder(model_type)
    loader = ExpertLoader(Checkpoint.open(folder))
    read: list[int] = []
    loaded = loader.load(1, experts, read.append)
    expected = whole(folder, loader.model.layers[1].name)
    assert loaded.keys() == expected.keys()
    for name, tensor in loaded.items():
        assert torch.equal(tensor, expected[name][experts]), name
    assert sum(read) == loader.bytes_of(1, experts) == len(experts) * loader.model.layers[1].expert_bytes


def test_load_converts_to_the_load_dtype(tiny_folder: Callable[[str], Path]) -> None:
    folder = tiny_folder("mixtral")
    loader = ExpertLoader(Checkpoint.open(folder), torch.bfloat16)
    expected = whole(folder, loader.model.layers[0].name)
    for name, tensor in loader.load(0, [6]).items():
        assert torch.equal(tensor, expected[name][[6]].bfloat16()), name
    assert loader.bytes_of(0, [6]) == 2 * loader.model.layers[0].expert_bytes


def test_experts_module_has_only_its_slots(tiny_folder: Callable[[str], Path]) -> None:
    loader = ExpertLoader(Checkpoint.open(tiny_folder("gpt_oss")))
    module = loader.experts_module(0, 3)
    assert module.num_experts == 3
    assert {name: tuple(p.shape) for name, p in module.named_parameters()} == {
        "gate_up_proj": (3, 64, 96),
        "gate_up_proj_bias": (3, 96),
        "down_proj": (3, 48, 64),
        "down_proj_bias": (3, 64),
    }
    assert all(p.device.type == "cpu" and not p.requires_grad for p in module.parameters())
    assert loader.experts_module(0, 5).num_experts == 5
    assert module.num_experts == 3


def test_loaded_tensors_are_writable_and_apart_from_each_other(tiny_folder: Callable[[str], Path]) -> None:
    loader = ExpertLoader(Checkpoint.open(tiny_folder("gpt_oss")))
    first = loader.load(0, [1])
    for tensor in first.values():
        tensor.zero_()
    assert all(tensor.abs().max() > 0 for tensor in loader.load(0, [1]).values())


def test_threads_may_load_at_once(tiny_folder: Callable[[str], Path]) -> None:
    loader = ExpertLoader(Checkpoint.open(tiny_folder("qwen3_moe")))
    wanted = [(layer, expert) for layer in range(3) for expert in range(8)]
    alone = [loader.load(layer, [expert]) for layer, expert in wanted]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda one: loader.load(one[0], [one[1]]), wanted))
    for a, b in zip(alone, together, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("layer", "experts"), [(0, [8]), (0, [-1]), (0, []), (3, [0]), (-1, [0])])
def test_what_does_not_exist_is_refused(
    layer: int, experts: list[int], tiny_folder: Callable[[str], Path]
) -> None:
    loader = ExpertLoader(Checkpoint.open(tiny_folder("olmoe")))
    for ask in (loader.load, loader.bytes_of):
        with pytest.raises(ConfigError, match="MoE layer"):
            ask(layer, experts)


def test_zero_slots_are_refused(tiny_folder: Callable[[str], Path]) -> None:
    loader = ExpertLoader(Checkpoint.open(tiny_folder("olmoe")))
    with pytest.raises(ConfigError, match="at least one slot"):
        loader.experts_module(0, 0)


def test_wrong_shape_of_an_expert_names_its_parameter(
    tmp_path: Path, tiny_folder: Callable[[str], Path]
) -> None:
    folder = Path(shutil.copytree(tiny_folder("olmoe"), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.mlp.experts.4.down_proj.weight"] = torch.ones(48, 64)  # only loading can tell
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    loader = ExpertLoader(Checkpoint.open(folder))
    loader.load(2, [3])
    for experts in ([4], [3, 4]):
        with pytest.raises(CheckpointError, match=r"model\.layers\.2\.mlp\.experts\.down_proj"):
            loader.load(2, experts)


def test_stacked_tensor_with_another_number_of_experts_is_refused(
    tmp_path: Path, tiny_folder: Callable[[str], Path]
) -> None:
    folder = Path(shutil.copytree(tiny_folder("gpt_oss"), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    tensors[name] = tensors[name][:7].contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"tensor {name}: shape \(7, 48, 64\)"):
        ExpertLoader(Checkpoint.open(folder))
