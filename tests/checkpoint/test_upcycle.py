import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from raymoe.checkpoint.upcycle import Recipe, moe_config, upcycle, upcycled_bytes
from raymoe.errors import CheckpointError

RECIPE = Recipe(shards=4, copies=3, shared=2)
IDS = torch.arange(40).view(2, 20) % 61


def tiny_dense(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
    }
    return LlamaForCausalLM(LlamaConfig(**(sizes | changes))).eval()


def random_routers() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(RECIPE.copies, 48, generator=generator) for _ in range(3)]


def load(folder: Path) -> Any:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model


def chosen_copies(model: Any) -> list[torch.Tensor]:
    """The chosen copies of each layer's tokens, after checking that no token mixes two copies."""
    seen: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _m, _a, out: seen.append(out[2]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(IDS)
    for hook in hooks:
        hook.remove()
    for ids_TK in seen:
        assert (ids_TK.sort(dim=1).values % RECIPE.shards == torch.arange(RECIPE.shards)).all()
        assert (ids_TK // RECIPE.shards == ids_TK[:, :1] // RECIPE.shards).all()
    return [ids_TK[:, 0] // RECIPE.shards for ids_TK in seen]


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def dense(request: pytest.FixtureRequest) -> LlamaForCausalLM:
    return tiny_dense(tie_word_embeddings=request.param)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def test_the_upcycled_model_computes_what_the_dense_one_does(dense: LlamaForCausalLM, tmp_path: Path) -> None:
    upcycle(dense, random_routers(), tmp_path, RECIPE)
    model = load(tmp_path)
    torch.testing.assert_close(logits(model), logits(dense), atol=1e-5, rtol=1e-5)
    assert all(len(copies.unique()) == RECIPE.copies for copies in chosen_copies(model))


def test_a_bias_on_a_copy_sends_every_token_there_and_changes_nothing(tmp_path: Path) -> None:
    dense = tiny_dense()
    upcycle(dense, random_routers(), tmp_path, RECIPE)
    model = load(tmp_path)
    for copy in range(RECIPE.copies):
        for layer in model.model.layers:
            layer.mlp.gate.e_score_correction_bias.zero_()
            layer.mlp.gate.e_score_correction_bias.view(RECIPE.copies, -1)[copy] = 2.0
        assert all((copies == copy).all() for copies in chosen_copies(model))
        torch.testing.assert_close(logits(model), logits(dense), atol=1e-5, rtol=1e-5)


def test_ties_and_biases_of_single_experts_never_mix_copies(tmp_path: Path) -> None:
    dense = tiny_dense()
    upcycle(dense, [torch.zeros(RECIPE.copies, 48)] * 3, tmp_path, RECIPE)
    model = load(tmp_path)
    chosen_copies(model)
    generator = torch.Generator().manual_seed(2)
    for layer in model.model.layers:
        layer.mlp.gate.e_score_correction_bias.normal_(generator=generator)
    chosen_copies(model)
    torch.testing.assert_close(logits(model), logits(dense), atol=1e-5, rtol=1e-5)


def test_files_hold_what_the_index_says_and_progress_ends_at_the_bytes_foretold(
    dense: LlamaForCausalLM, tmp_path: Path
) -> None:
    steps: list[tuple[str, int, int]] = []
    upcycle(dense, random_routers(), tmp_path, RECIPE, lambda *step: steps.append(step))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    held: dict[str, str] = {}
    for file in tmp_path.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            held |= dict.fromkeys(tensors.keys(), file.name)
    assert held == index["weight_map"]
    total = upcycled_bytes(dense.config, RECIPE)
    assert steps[-1] == ("writing", total, total) and len(steps) == 4
    assert index["metadata"]["total_size"] == total


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"intermediate_size": 100}, "intermediate_size 100 can't be cut into 6"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type is 'linear'",
        ),
    ],
)
def test_a_dense_model_that_glm4_moe_would_compute_differently_is_refused(
    changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(CheckpointError, match=says):
        moe_config(tiny_dense(**changes).config, RECIPE)


def test_a_model_in_bfloat16_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"bfloat16, only float32"):
        upcycle(tiny_dense().bfloat16(), random_routers(), tmp_path, RECIPE)


def test_routers_must_fit_layers_and_copies(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="2 routers for 3 layers"):
        upcycle(tiny_dense(), random_routers()[:2], tmp_path, RECIPE)
    with pytest.raises(CheckpointError, match=r"shape \(2, 48\), wanted \(3, 48\)"):
        upcycle(tiny_dense(), [rows[:2] for rows in random_routers()], tmp_path, RECIPE)


@pytest.mark.parametrize("wrong", [{"shards": 6}, {"shards": 1}, {"copies": 0}, {"shared": 0}])
def test_a_recipe_that_would_not_be_exact_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(CheckpointError, match="upcycling"):
        Recipe(**wrong)
