"""What released checkpoints ship beyond the plain case: layers and towers of no use here, odd sizes, traps."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from raymoe.checkpoint.folder import Checkpoint
from raymoe.checkpoint.moe import describe
from raymoe.errors import CheckpointError
from raymoe.policy.layout import even_slices
from tests.matrix import TOKENS, full_logits, split_model
from tests.tiny import tiny_checkpoint, tiny_config


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object], **config: Any) -> None:
    """Change the tensors, and set (or with None: drop) values of config.json."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    raw = json.loads((folder / "config.json").read_text()) | config
    raw = {name: value for name, value in raw.items() if name not in config or value is not None}
    (folder / "config.json").write_text(json.dumps(raw))


def difference(folder: Path, groups: int = 3, experts: int = 8) -> float:
    with split_model(folder, even_slices(experts, groups)) as model:
        return float((model(TOKENS).logits - full_logits(folder)).abs().max())


def add_prediction_layer(tensors: dict[str, torch.Tensor]) -> None:
    """As DeepSeek-V3 and GLM-4.5 ship it: a whole layer behind the last one, and some tensors of its own."""
    last = [name for name in tensors if name.startswith("model.layers.2.")]
    tensors.update({name.replace("layers.2.", "layers.3."): tensors[name].clone() for name in last})
    tensors["model.layers.3.eh_proj.weight"] = torch.zeros(64, 128)
    tensors["model.layers.3.shared_head.norm.weight"] = torch.ones(64)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe"])
def test_layers_that_predict_more_tokens_are_left_out(model_type: str, tmp_path: Path) -> None:
    tiny_checkpoint(model_type, tmp_path)
    before, expected = describe(Checkpoint.open(tmp_path)), full_logits(tmp_path)
    edit(tmp_path, add_prediction_layer, num_nextn_predict_layers=1)
    assert describe(Checkpoint.open(tmp_path)) == before
    with split_model(tmp_path, even_slices(8, 2)) as model:
        assert torch.equal(model(TOKENS).logits, expected)


def test_a_layer_more_than_the_config_tells_of_is_refused(tmp_path: Path) -> None:
    tiny_checkpoint("glm4_moe", tmp_path)
    edit(tmp_path, add_prediction_layer, num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=r"no place for: model\.layers\.3\."):
        describe(Checkpoint.open(tmp_path))


def test_30_experts_over_8_groups(tmp_path: Path) -> None:
    tiny_checkpoint("qwen3_moe", tmp_path, num_experts=30)
    assert [len(part) for part in even_slices(30, 8)] == [4, 4, 4, 4, 4, 4, 3, 3]
    assert difference(tmp_path, groups=8, experts=30) <= 1e-5


def test_latent_experts_get_narrower_rows(tmp_path: Path) -> None:
    tiny_checkpoint("nemotron_h", tmp_path, moe_latent_size=24)
    assert describe(Checkpoint.open(tmp_path)).hidden_size == 24
    assert difference(tmp_path) <= 1e-5


def test_several_experts_for_a_row_of_llama4(tmp_path: Path) -> None:
    tiny_checkpoint("llama4_text", tmp_path, num_experts_per_tok=3, interleave_moe_layer_step=2)
    assert len(describe(Checkpoint.open(tmp_path)).layers) == 1
    assert difference(tmp_path) <= 1e-5


def test_longcat_without_tensors_for_its_identity_experts(tmp_path: Path) -> None:
    tiny_checkpoint("longcat_flash", tmp_path)
    expected = full_logits(tmp_path)

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".experts.8." in name or ".experts.9." in name]:
            del tensors[name]

    edit(tmp_path, drop)
    with split_model(tmp_path, even_slices(8, 2)) as model:
        assert (model(TOKENS).logits - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("saved", [True, False])
def test_tied_head_with_and_without_a_tensor_of_its_own(saved: bool, tmp_path: Path) -> None:
    tiny_checkpoint("qwen3_moe", tmp_path, tie_word_embeddings=True)
    if saved:
        edit(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert difference(tmp_path) <= 1e-5


def wide_config(model_type: str) -> PretrainedConfig:
    """A text model's tiny config within one that has a tower for images too."""
    cls, text = CONFIG_MAPPING[model_type], tiny_config(f"{model_type}_text")
    small = {"hidden_size": 32, "num_hidden_layers": 1, "depth": 1, "num_heads": 2, "num_attention_heads": 2}
    small |= {"intermediate_size": 32, "out_hidden_size": 64}
    default = (cls().vision_config or CONFIG_MAPPING[f"{model_type}_vision"]()).to_dict()
    return cls(
        text_config=text.to_dict(),
        vision_config={name: value for name, value in small.items() if name in default},
    )


@pytest.mark.parametrize("model_type", ["qwen3_5_moe", "llama4", "gemma4"])
def test_the_text_model_of_a_checkpoint_that_sees_images(model_type: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(wide_config(model_type))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path)
    assert any("vision" in name or "visual" in name for name in load_file(tmp_path / "model.safetensors"))
    assert full_logits(tmp_path).std() > 0.05
    assert difference(tmp_path) <= 1e-5


def traps() -> Iterator[tuple[str, dict[str, Any]]]:
    """Normalised or not or unsaid, scaled or not: families differ in what an absent value means."""
    for norm, scale in itertools.product((True, False, None), (1.0, 2.5, None)):
        yield "deepseek_v3", {"norm_topk_prob": norm, "routed_scaling_factor": scale}
        yield "glm4_moe", {"norm_topk_prob": norm, "routed_scaling_factor": scale}
    for scale in (1.0, 2.5, None):
        yield "deepseek_v2", {"routed_scaling_factor": scale}
    for norm in (True, False, None):
        yield "qwen3_moe", {"norm_topk_prob": norm}


@pytest.mark.parametrize(("model_type", "values"), list(traps()), ids=str)
def test_gate_weights_are_normalised_and_scaled_as_the_whole_model_does(
    model_type: str, values: dict[str, Any], tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    for file in tiny_folder(model_type).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    edit(tmp_path, lambda tensors: None, **values)
    with split_model(tmp_path, even_slices(8, 2)) as model:
        assert torch.equal(model(TOKENS).logits, full_logits(tmp_path))


def test_normalisation_and_scale_show_in_the_logits(
    tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tiny_folder("glm4_moe")
    seen = []
    for norm, scale in itertools.product((True, False), (1.0, 2.5)):
        model = AutoModelForCausalLM.from_pretrained(folder, norm_topk_prob=norm, routed_scaling_factor=scale)
        seen.append(model.eval()(TOKENS).logits.detach())
    for one, other in itertools.combinations(seen, 2):
        assert (one - other).abs().max() > 1e-2
