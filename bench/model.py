"""The benchmark checkpoint: a random Qwen3-MoE, the same on every machine, with evenly used experts.

At the usual random weights attention drowns the tokens: in deeper layers the rows of a prompt share 95 % of
their direction and all go to the same four experts, so the busier of two groups gets 31 % more than its share.
Training prevents that in real models. Here larger embeddings do, so that `dispatch` measures dispatch.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

CONFIG: dict[str, Any] = {
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 384,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "norm_topk_prob": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

HEAD_STD = 0.1
"""Of `with_own_head`: logits of a standard deviation of about 3, as trained models have."""
EMBEDDING_STD = 1.0
"""torch's default for embeddings; the other weights have 0.02."""


def folder() -> Path:
    """Where the checkpoint is kept: beside the embedded default, in the user's cache."""
    from raymoe.checkpoint.embedded import cache_folder

    return cache_folder() / "bench-qwen3-moe-even"


def ensure() -> Path:
    """Write the checkpoint unless it is there; the folder appears whole or not at all."""
    target = folder()
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**CONFIG), dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(std=EMBEDDING_STD)
    made = Path(tempfile.mkdtemp(dir=target.parent, prefix="bench-"))
    model.save_pretrained(made)
    try:
        os.rename(made, target)
    except OSError:
        shutil.rmtree(made)  # another run was faster
    return target


def with_own_head(path: Path, target: Path) -> Path:
    """The checkpoint in a new folder, with a random output head of its own if its head is its embeddings.

    Large embeddings as a head make the benchmark model repeat its last token, whatever its experts compute: no
    time changes by that, but texts and distributions would say nothing. Weights are linked, not copied.
    """
    target.mkdir()
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    if not config.get("tie_word_embeddings"):
        for file in path.iterdir():
            if file.name == "config.json" or file.name.startswith("model"):
                (target / file.name).symlink_to(file.resolve())
        return target
    (target / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}), encoding="utf-8")
    body, head = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    (target / body).symlink_to((path / "model.safetensors").resolve())
    weight = torch.empty(config["vocab_size"], config["hidden_size"])
    weight.normal_(std=HEAD_STD, generator=torch.Generator().manual_seed(0))
    save_file({"lm_head.weight": weight}, target / head, metadata={"format": "pt"})
    with safe_open(target / body, "pt") as opened:
        names = dict.fromkeys(opened.keys(), body) | {"lm_head.weight": head}
    index = {"metadata": {}, "weight_map": names}
    (target / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return target


def run(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Write it and count it."""
    del quick
    path = ensure()
    from raymoe.checkpoint.folder import Checkpoint

    entries = Checkpoint.open(path).tensors.values()
    size = sum(entry.nbytes for entry in entries)
    say(f"benchmark checkpoint: {size / 4e6:.0f} M parameters, {size / 1e9:.2f} GB")
    return {"parameters": size // 4, "bytes": size}
