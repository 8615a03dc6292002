"""Each architecture that raymoe serves computes, split over expert groups, what its whole model computes."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from raymoe.checkpoint.adapt import BLOCKS, CANT_SPLIT
from raymoe.checkpoint.folder import Checkpoint
from raymoe.errors import NotMoeError
from raymoe.policy.layout import even_slices
from tests.matrix import MATRIX_TYPES, REFUSED, SERVED, TOKENS, full_logits, split_model
from tests.tiny import tiny_checkpoint

MODELS = Path(transformers.__file__).parent / "models"
DECORATED = re.compile(r"^@use_experts_implementation(\([^)]*\))?\s*\nclass (\w+)", re.MULTILINE)
# Experts and blocks with experts that aren't decorated go by these names.
LIKE_EXPERTS = re.compile(r"^class (\w*(?:Experts|MoE|Moe|MoEBlock|SparseMLP))\(nn\.Module", re.MULTILINE)


@functools.cache
def sources() -> dict[str, str]:
    return {file.parent.name: file.read_text() for file in MODELS.glob("*/modeling_*.py")}


@pytest.mark.parametrize("model_type", MATRIX_TYPES)
def test_two_and_three_groups_compute_what_the_whole_model_does(
    model_type: str, tiny_folder: Callable[[str], Path]
) -> None:
    folder = tiny_folder(model_type)
    expected = full_logits(folder)
    assert expected.isfinite().all()
    assert expected.std() > 0.05
    for groups in (2, 3):
        with split_model(folder, even_slices(8, groups)) as model:
            assert (model(TOKENS).logits - expected).abs().max() <= 1e-5, groups


@pytest.mark.parametrize(
    "model_type", ["aria_text", "deepseek_v3", "gpt_oss", "mixtral", "nemotron_h", "qwen3_next"]
)
def test_bfloat16_is_equal_to_the_bit(model_type: str, tiny_folder: Callable[[str], Path]) -> None:
    folder = tiny_folder(model_type)
    with split_model(folder, even_slices(8, 3), torch.bfloat16) as model:
        logits = model(TOKENS).logits
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(logits, full_logits(folder, torch.bfloat16))


def test_no_architecture_with_experts_is_forgotten() -> None:
    found = {name for name, text in sources().items() if DECORATED.search(text) or LIKE_EXPERTS.search(text)}
    for name, reason in REFUSED.items():
        print(f"{name} has no tiny checkpoint: {reason}")
    assert found == SERVED.keys() | REFUSED.keys()
    decorated = {name for name, text in sources().items() if DECORATED.search(text)}
    assert len(decorated & SERVED.keys()) == 55


def test_what_has_no_tiny_checkpoint_could_not_be_served() -> None:
    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    blocks: dict[str, str] = {}
    for name, text in sources().items():
        classes = set(re.findall(r"^class (\w+)\(", text, re.MULTILINE))
        blocks |= dict.fromkeys(classes & (CANT_SPLIT.keys() | BLOCKS.keys()), name)
        if name in REFUSED and classes & causal:
            assert classes & CANT_SPLIT.keys(), name
    assert blocks.keys() == CANT_SPLIT.keys() | BLOCKS.keys()
    assert {blocks[block] for block in BLOCKS} <= SERVED.keys()


def test_only_an_architecture_without_text_class_normalises_after_each_expert() -> None:
    flagged = {name for name, text in sources().items() if "has_post_expert_norm=True" in text}
    assert flagged == {"muse_spark"}
    assert flagged <= REFUSED.keys()


@pytest.mark.parametrize(
    ("model_type", "overrides"), [("dbrx", {}), ("doge", {"is_moe": True}), ("jetmoe", {})]
)
def test_experts_that_cant_be_split_are_refused_with_the_reason(
    model_type: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    tiny_checkpoint(model_type, tmp_path, **overrides)
    with pytest.raises(NotMoeError, match=f"{model_type} model, whose experts raymoe can't split: .*experts"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("model_type", ["qwen3_vl_moe", "switch_transformers", "step3p7"])
def test_a_model_without_a_text_class_is_refused(model_type: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    save_file({"one": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(NotMoeError, match=f"no text generation model for the model type {model_type}"):
        Checkpoint.open(tmp_path)
