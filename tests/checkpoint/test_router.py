from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from raymoe.checkpoint.folder import Checkpoint
from raymoe.checkpoint.moe import describe
from raymoe.checkpoint.router import RemoteExperts, load_router
from raymoe.errors import CheckpointError
from tests.tiny import TINY_TYPES, tiny_checkpoint


def no_experts(layer: int, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    return torch.zeros_like(hidden_TH)


@pytest.mark.parametrize("model_type", TINY_TYPES)
def test_router_reads_no_byte_of_an_expert(model_type: str, tiny_folder: Callable[[str], Path]) -> None:
    checkpoint = Checkpoint.open(tiny_folder(model_type))
    read: list[int] = []
    load_router(checkpoint, no_experts, on_bytes=read.append)
    experts = sum(entry.nbytes for name, entry in checkpoint.tensors.items() if ".experts." in name)
    total = sum(entry.nbytes for entry in checkpoint.tensors.values())
    assert experts > 0
    assert sum(read) == total - experts == describe(checkpoint).router_file_bytes


def test_router_loads_although_the_experts_bytes_are_gone(tmp_path: Path) -> None:
    tiny_checkpoint("olmoe", tmp_path, max_shard_size="40KB")
    checkpoint = Checkpoint.open(tmp_path)
    by_file: dict[Path, list[str]] = {}
    for name, entry in checkpoint.tensors.items():
        by_file.setdefault(entry.file, []).append(name)
    only_experts = [f for f, names in by_file.items() if all(".experts." in name for name in names)]
    assert len(only_experts) > 3
    for file in only_experts:
        file.unlink()
    assert load_router(checkpoint, no_experts)(torch.tensor([[1, 2]])).logits.isfinite().all()


def test_stand_in_gets_layer_rows_ids_and_weights(tiny_folder: Callable[[str], Path]) -> None:
    calls: list[tuple[int, tuple[int, ...], torch.dtype, tuple[int, ...]]] = []

    def experts(layer: int, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        calls.append((layer, tuple(hidden_TH.shape), ids_TK.dtype, tuple(weights_TK.shape)))
        return torch.zeros_like(hidden_TH)

    router = load_router(Checkpoint.open(tiny_folder("deepseek_v3")), experts)
    router(torch.tensor([[1, 2, 3, 4, 5]]))
    assert calls == [(0, (5, 64), torch.int64, (5, 2)), (1, (5, 64), torch.int64, (5, 2))]


def test_router_holds_own_writable_memory_and_no_expert(tiny_folder: Callable[[str], Path]) -> None:
    checkpoint = Checkpoint.open(tiny_folder("qwen3_moe"))
    router = load_router(checkpoint, no_experts)
    stand_ins = [module for module in router.modules() if isinstance(module, RemoteExperts)]
    assert len(stand_ins) == 3
    assert all(not list(module.parameters()) for module in stand_ins)
    assert not any(tensor.is_meta for tensor in (*router.parameters(), *router.buffers()))
    assert not any(parameter.requires_grad for parameter in router.parameters())
    assert not router.training
    held = {t.data_ptr(): t.numel() * t.element_size() for t in (*router.parameters(), *router.buffers())}
    assert sum(held.values()) == describe(checkpoint).router_bytes
    mapped = Path("/proc/self/maps").read_text()
    assert str(checkpoint.path) not in mapped
    router.model.norm.weight.add_(1)


def test_values_are_those_of_the_file(tiny_folder: Callable[[str], Path]) -> None:
    folder = tiny_folder("glm4_moe")
    router = load_router(Checkpoint.open(folder), no_experts)
    state = router.state_dict()
    tensors = load_file(folder / "model.safetensors")
    assert len(state) == sum(".mlp.experts." not in name for name in tensors)
    for name, value in state.items():
        assert torch.equal(value, tensors[name]), name


def test_load_dtype_and_the_parts_that_stay_float32(tiny_folder: Callable[[str], Path]) -> None:
    router = load_router(Checkpoint.open(tiny_folder("deepseek_v3")), no_experts, dtype=torch.bfloat16)
    assert router.lm_head.weight.dtype == torch.bfloat16
    gate = router.model.layers[1].mlp.gate
    assert gate.e_score_correction_bias.dtype == torch.float32
    assert gate.e_score_correction_bias.abs().max() > 0


def test_attention_is_the_one_asked_for(tiny_folder: Callable[[str], Path]) -> None:
    checkpoint = Checkpoint.open(tiny_folder("olmoe"))
    router = load_router(checkpoint, no_experts, attention="eager")
    assert router.config._attn_implementation == "eager"
    assert checkpoint.config._attn_implementation != "eager"


def test_wrong_shape_is_refused_by_name(tmp_path: Path, tiny_folder: Callable[[str], Path]) -> None:
    folder = Path(shutil.copytree(tiny_folder("olmoe"), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(63)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \(63,\).*\(64,\)"):
        load_router(Checkpoint.open(folder), no_experts)


def test_file_cut_after_opening_is_refused_by_name(
    tmp_path: Path, tiny_folder: Callable[[str], Path]
) -> None:
    folder = Path(shutil.copytree(tiny_folder("olmoe"), tmp_path / "model"))
    checkpoint = Checkpoint.open(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:20_000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors ends within tensor "):
        load_router(checkpoint, no_experts)


def test_malformed_generation_config_is_refused(tmp_path: Path, tiny_folder: Callable[[str], Path]) -> None:
    folder = Path(shutil.copytree(tiny_folder("olmoe"), tmp_path / "model"))
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="generation_config"):
        load_router(Checkpoint.open(folder), no_experts)
