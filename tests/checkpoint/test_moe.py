from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from raymoe.checkpoint import tensors
from raymoe.checkpoint.folder import Checkpoint
from raymoe.checkpoint.moe import MoeLayer, describe
from tests.tiny import TINY_TYPES, tiny_checkpoint


@pytest.mark.parametrize("model_type", TINY_TYPES)
def test_sizes_of_every_architecture(model_type: str, tiny_folder: Callable[[str], Path]) -> None:
    model = describe(Checkpoint.open(tiny_folder(model_type)))
    first = 1 if model_type in ("deepseek_v3", "glm4_moe") else 0
    inner = 48 if model_type in ("olmoe", "mixtral", "gpt_oss") else 32
    biases = 2 * inner + 64 if model_type == "gpt_oss" else 0
    size = 4 * (3 * 64 * inner + biases)
    assert model.layers == tuple(
        MoeLayer(i, f"model.layers.{i + first}.mlp.experts", 8, 2, size) for i in range(3 - first)
    )
    assert (model.hidden_size, model.vocab_size, model.max_context) == (64, 264, 512)
    assert model.dtype == torch.float32


def test_dtype_asked_for_halves_the_bytes(tiny_folder: Callable[[str], Path]) -> None:
    checkpoint = Checkpoint.open(tiny_folder("olmoe"))
    full, half = describe(checkpoint), describe(checkpoint, torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert half.layers[0].expert_bytes * 2 == full.layers[0].expert_bytes
    assert half.router_bytes < full.router_bytes
    assert half.router_file_bytes == full.router_file_bytes


def test_config_without_dtype_takes_that_of_the_weights(tmp_path: Path) -> None:
    tiny_checkpoint("olmoe", tmp_path, dtype=torch.bfloat16)
    config = tmp_path / "config.json"
    text = config.read_text()
    assert '"dtype": "bfloat16"' in text
    config.write_text(text.replace('"dtype": "bfloat16",', ""))
    assert describe(Checkpoint.open(tmp_path)).dtype == torch.bfloat16


def test_describing_reads_no_weight(
    tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(tensors.LazyTensor, "__getitem__", fail)
    assert len(describe(Checkpoint.open(tiny_folder("gpt_oss"))).layers) == 3


def test_code_named_by_the_config_is_neither_run_nor_asked_for(tmp_path: Path) -> None:
    tiny_checkpoint("deepseek_v3", tmp_path)
    config = tmp_path / "config.json"
    named = '{"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},'
    config.write_text(config.read_text().replace("{", named, 1).replace('"dtype"', '"torch_dtype"'))
    (tmp_path / "evil.py").write_text("raise SystemExit('the code was run')")
    assert describe(Checkpoint.open(tmp_path)).dtype == torch.float32
