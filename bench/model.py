"""The benchmark checkpoint: a random Qwen3-MoE, the same on every machine."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
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


def folder() -> Path:
    """Where the checkpoint is kept: beside the embedded default, in the user's cache."""
    from raymoe.checkpoint.embedded import cache_folder

    return cache_folder() / "bench-qwen3-moe"


def ensure() -> Path:
    """Write the checkpoint unless it is there; the folder appears whole or not at all."""
    target = folder()
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**CONFIG), dtype=torch.float32)
    made = Path(tempfile.mkdtemp(dir=target.parent, prefix="bench-"))
    model.save_pretrained(made)
    try:
        os.rename(made, target)
    except OSError:
        shutil.rmtree(made)  # another run was faster
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
