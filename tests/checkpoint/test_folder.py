from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from raymoe.checkpoint.folder import Checkpoint
from raymoe.checkpoint.moe import describe
from raymoe.errors import CheckpointError, NotMoeError
from tests.tiny import tiny_checkpoint

EXPERT = "model.layers.1.mlp.experts.5.up_proj.weight"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return tiny_checkpoint("olmoe", tmp_path / "model", max_shard_size="100KB")


@pytest.fixture
def single(tmp_path: Path, tiny_folder: Callable[[str], Path]) -> Path:
    return Path(shutil.copytree(tiny_folder("olmoe"), tmp_path / "model"))


def edit_json(file: Path, change: Callable[[dict], object]) -> None:
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def refused(folder: Path, *words: str, kind: type[CheckpointError] = CheckpointError) -> None:
    with pytest.raises(kind) as caught:
        describe(Checkpoint.open(folder))
    assert type(caught.value) is kind
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value)


def test_entries_tell_where_each_tensor_lies(single: Path) -> None:
    checkpoint = Checkpoint.open(single)
    tensors = load_file(single / "model.safetensors")
    assert checkpoint.tensors.keys() == tensors.keys()
    entry = checkpoint.tensors[EXPERT]
    assert (entry.name, entry.file, entry.dtype) == (EXPERT, single / "model.safetensors", "F32")
    assert entry.shape == tuple(tensors[EXPERT].shape)
    raw = (single / "model.safetensors").read_bytes()[entry.offset : entry.offset + entry.nbytes]
    assert raw == tensors[EXPERT].numpy().tobytes()


def test_fingerprint_follows_config_and_headers(single: Path, sharded: Path, tmp_path: Path) -> None:
    first = Checkpoint.open(single).fingerprint
    shutil.copytree(single, tmp_path / "copy")
    assert Checkpoint.open(tmp_path / "copy").fingerprint == first
    edit_json(single / "config.json", lambda config: config.update(rms_norm_eps=1e-3))
    assert Checkpoint.open(single).fingerprint != first


def test_missing_folder_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "there is no folder", "nowhere")


def test_missing_config_is_refused(single: Path) -> None:
    (single / "config.json").unlink()
    refused(single, "config.json", "can't be read")


def test_config_that_is_not_json_is_refused(single: Path) -> None:
    (single / "config.json").write_text("{not json")
    refused(single, "config.json", "is not JSON")


def test_config_that_is_a_list_is_refused(single: Path) -> None:
    (single / "config.json").write_text("[]")
    refused(single, "must hold a JSON object")


def test_unknown_architecture_is_refused_by_name(single: Path) -> None:
    edit_json(single / "config.json", lambda config: config.update(model_type="flying_carpet"))
    refused(single, "config.json", "flying_carpet")


def test_wrong_type_in_config_is_refused(single: Path) -> None:
    edit_json(single / "config.json", lambda config: config.update(hidden_size="wide"))
    refused(single, "config.json", "hidden_size")


def test_quantised_checkpoint_is_refused(single: Path) -> None:
    quantised = {"quantization_config": {"quant_method": "mxfp4"}}
    edit_json(single / "config.json", lambda config: config.update(quantised))
    refused(single, "quantised (mxfp4)", "bfloat16")


def test_dense_model_is_not_moe(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=32,
        vocab_size=64,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    refused(tmp_path, "llama", "without routed experts", kind=NotMoeError)


def test_model_that_generates_no_text_is_not_moe(single: Path) -> None:
    (single / "config.json").write_text('{"model_type": "vit"}')
    refused(single, "vit", kind=NotMoeError)


def test_missing_shard_is_refused_by_name(sharded: Path) -> None:
    victim = sorted(sharded.glob("*.safetensors"))[2]
    victim.unlink()
    refused(sharded, victim.name, "incomplete")


@pytest.mark.parametrize("cut", [100, 10**9])
def test_truncated_shard_is_refused_by_name(sharded: Path, cut: int) -> None:
    victim = sorted(sharded.glob("*.safetensors"))[2]
    victim.write_bytes(victim.read_bytes()[: max(0, victim.stat().st_size - cut)])
    refused(sharded, victim.name, "complete")


def test_garbage_instead_of_a_header_is_refused(single: Path) -> None:
    (single / "model.safetensors").write_bytes((20).to_bytes(8, "little") + b"x" * 20)
    refused(single, "model.safetensors", "malformed")


def test_tensor_that_the_index_does_not_know_is_refused_by_name(sharded: Path) -> None:
    edit_json(sharded / "model.safetensors.index.json", lambda index: index["weight_map"].pop(EXPERT))
    refused(sharded, EXPERT, "doesn't place there")


def test_tensor_in_two_files_is_refused_by_name(sharded: Path) -> None:
    index = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    file = sharded / next(file for file in index.values() if file != index[EXPERT])
    save_file(load_file(file) | {EXPERT: torch.zeros(48, 64)}, file, {"format": "pt"})
    refused(sharded, EXPERT, file.name, "doesn't place there")


def test_stale_index_that_names_more_files_is_refused(sharded: Path) -> None:
    files = sorted(sharded.glob("*.safetensors"))
    everything = {name: value for file in files for name, value in load_file(file).items()}
    for file in files:
        file.unlink()
    save_file(everything, sharded / "model-00001-of-00001.safetensors", {"format": "pt"})
    refused(sharded, files[0].name, "which model.safetensors.index.json names", "incomplete")


@pytest.mark.parametrize("name", [EXPERT, "model.norm.weight", "lm_head.weight"])
def test_tensor_in_no_file_is_refused_by_name(single: Path, name: str) -> None:
    edit_tensors(single, lambda tensors: tensors.pop(name))
    refused(single, name, "incomplete")


def test_one_half_of_all_experts_of_a_layer_missing_is_refused(single: Path) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".layers.1." in name and "up_proj" in name]:
            del tensors[name]

    edit_tensors(single, drop)
    refused(single, "only a part of model.layers.1.mlp.experts.gate_up_proj", "up_proj", "incomplete")


def test_parameter_defined_by_two_names_is_refused(single: Path) -> None:
    edit_tensors(single, lambda tensors: tensors.update({"norm.weight": torch.ones(64)}))
    refused(single, "defines model.norm.weight more than once", "norm.weight, norm.weight")


def test_experts_both_stacked_and_one_by_one_are_refused(single: Path) -> None:
    name = "model.layers.1.mlp.experts.down_proj"
    edit_tensors(single, lambda tensors: tensors.update({name: torch.ones(8, 64, 48)}))
    refused(single, f"defines {name} more than once", "experts.0.down_proj.weight", "and 4 more")


@pytest.mark.parametrize("name", [EXPERT, "model.norm.weight"])
@pytest.mark.parametrize("shape", [(0,), (3, 5)])
def test_wrong_size_is_refused_before_loading(single: Path, name: str, shape: tuple[int, ...]) -> None:
    edit_tensors(single, lambda tensors: tensors.update({name: torch.zeros(shape)}))
    refused(single, name, f"has shape {shape}", "config.json asks for")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantised_tensors_that_the_config_hides_are_refused(single: Path, dtype: torch.dtype) -> None:
    edit_tensors(single, lambda tensors: tensors.update({EXPERT: tensors[EXPERT].to(dtype)}))
    refused(single, EXPERT, "quantised?", "bfloat16")


def test_header_with_one_name_twice_is_refused(single: Path) -> None:
    file = single / "model.safetensors"
    raw = file.read_bytes()
    names = (b"mlp.experts.4.up_proj", b"mlp.experts.5.up_proj")
    file.write_bytes(raw.replace(*names, 1))
    refused(single, "model.safetensors", "mlp.experts.5.up_proj.weight is defined twice")


def test_tensors_that_share_bytes_are_refused(single: Path) -> None:
    file = single / "model.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    norms = [name for name in header if name.endswith("input_layernorm.weight")]
    header[norms[0]]["data_offsets"] = header[norms[1]]["data_offsets"]
    changed = json.dumps(header).encode()
    file.write_bytes(len(changed).to_bytes(8, "little") + changed + raw[8 + length :])
    refused(single, "model.safetensors", "don't follow")


def test_index_that_names_another_file_for_a_tensor_is_refused(sharded: Path) -> None:
    files = sorted(file.name for file in sharded.glob("*.safetensors"))
    index = sharded / "model.safetensors.index.json"
    home = json.loads(index.read_text())["weight_map"][EXPERT]
    other = next(file for file in files if file != home)
    edit_json(index, lambda value: value["weight_map"].update({EXPERT: other}))
    refused(sharded, EXPERT, other)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "code.py", 5])
def test_index_that_leaves_the_folder_is_refused(sharded: Path, file: object) -> None:
    index = sharded / "model.safetensors.index.json"
    edit_json(index, lambda value: value["weight_map"].update({EXPERT: file}))
    refused(sharded, EXPERT, "not a safetensors file here")


def test_stray_file_is_ignored(sharded: Path) -> None:
    before = Checkpoint.open(sharded)
    save_file({"model.norm.weight": torch.zeros(3)}, sharded / "consolidated.safetensors")
    after = Checkpoint.open(sharded)
    assert (after.tensors, after.fingerprint) == (before.tensors, before.fingerprint)


def test_shards_without_an_index_are_refused(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    refused(sharded, "neither model.safetensors nor model.safetensors.index.json", "-00001-of-")


def test_pickled_weights_alone_are_refused(single: Path) -> None:
    (single / "model.safetensors").rename(single / "pytorch_model.bin")
    refused(single, "pytorch_model.bin", "safetensors alone")


def test_folder_without_weights_is_refused(single: Path) -> None:
    (single / "model.safetensors").unlink()
    refused(single, "has no weights")


def test_tensor_without_a_place_is_refused_by_name(single: Path) -> None:
    edit_tensors(single, lambda tensors: tensors.update({"value_head.weight": torch.zeros(2)}))
    refused(single, "value_head.weight", "no place")


def test_all_experts_of_a_layer_missing_is_refused(single: Path) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.1.mlp.experts.")]:
            del tensors[name]

    edit_tensors(single, drop)
    refused(single, "model.layers.1.mlp.experts.down_proj", "incomplete")
