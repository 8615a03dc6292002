"""Tiny random checkpoints and a byte tokenizer, written as the real ones are, in under a second each."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import raymoe.checkpoint.private  # noqa: F401  registers what transformers has and doesn't map

# The seven that most tests use; `tests.matrix` names all that raymoe serves.
TINY_TYPES = ("olmoe", "qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "gpt_oss")

PAD, BOS, EOS, VOCAB = 256, 257, 258, 264
EXPERTS, TOP_K = 8, 2

# One list for all architectures: each config takes the names that it knows.
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_topk": TOP_K,
    "moe_k": TOP_K,
    "top_k_experts": TOP_K,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_layer_start_index": 0,
    "moe_layer_interval": 1,
    "moe_layer_end_index": -1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
_WINDOW: dict[str, Any] = {"sliding_window": 16}
_MLA: dict[str, Any] = {"num_key_value_heads": 4}  # MLA has no grouped heads
_LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_INKLING: dict[str, Any] = {
    **_WINDOW,
    "rel_extent": 32,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "unpadded_vocab_size": VOCAB,
}
_DSA: dict[str, Any] = {**_MLA, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 16}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}
_OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("afmoe", "cohere2_moe", "exaone_moe", "flint", "granitemoe_swa", "kolibri1"), _WINDOW),
    **dict.fromkeys(("laguna", "lara_mini", "mimo_v2_flash"), _WINDOW),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "sarvam_mla", "axk1", "glm4_moe_lite"), _MLA),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "axk2", "dots3_note_text"), _DSA),
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe_text"), _LINEAR),
    **dict.fromkeys(("inkling_text", "inkling2_text", "inkling2_loop_text"), _INKLING),
    "bailing_hybrid": {"num_hidden_layers": 4, "layer_group_size": 2},
    "beam": {"num_hidden_layers": 4, **_WINDOW},
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 512,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 8, "moe_top_k": 2, "hidden_size": 64},
    },
    "deepseek_v4": {"num_hidden_layers": 4, **_WINDOW},
    "gemma4_text": {
        "enable_moe_block": True,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        **_WINDOW,
    },
    "gpt_oss": {**_WINDOW, "rope_parameters": _YARN},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"]},
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "kimi_linear": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        **_MLA,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "llama4_text": {"intermediate_size_mlp": 48},
    "longcat_flash": {
        "ffn_hidden_size": 64,
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 2,
        "num_layers": 2,
        "head_dim": 8,
        **_MLA,
    },
    "qwen4_exp_text": {
        **_LINEAR,
        "hc_lowrank": 8,
        "ple_layer_ids": [1],
        "ngram_vocab_size_base": 64,
        "heads_per_ngram": 2,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 2,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "zaya": {"num_experts_per_tok": 1, "num_hidden_layers": 2},
}
_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_config(model_type: str, **overrides: Any) -> PretrainedConfig:
    """A config of 3 layers, hidden 64, 8 experts, top-2, vocabulary 264. Unknown overrides are an error."""
    cls = CONFIG_MAPPING[model_type]
    known = {name for base in cls.__mro__ for name in getattr(base, "__annotations__", {})}
    known |= set(inspect.signature(cls.__init__).parameters) | set(cls.attribute_map)
    if unknown := set(overrides) - known - {"dtype"}:
        raise ValueError(f"{cls.__name__} has no {sorted(unknown)}")
    values = {name: value for name, value in _SIZES.items() if name in known}
    return cls(**{**values, **_OVERRIDES.get(model_type, {}), **overrides})


def tiny_checkpoint(
    model_type: str,
    folder: str | Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Path:
    """Write a random checkpoint with a byte tokenizer; `overrides` go to its config.

    Weights are large (std 0.2), gates and biases are random too: a wrong expert shows in the logits.
    """
    folder = Path(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(model_type, **overrides), dtype=dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() >= 2:
                    parameter.normal_(std=0.2)
                else:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(std=0.1)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    byte_tokenizer(folder)
    return folder


def byte_tokenizer(folder: str | Path) -> Path:
    """Save a fast tokenizer: id = byte value for 0..255, then <pad> <bos> <eos> and reserved ones: 264.

    It adds no special token by itself; its chat template is one line per message and a generation prompt.
    """
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<bos>", "<eos>", *(f"<reserved{i}>" for i in range(VOCAB - EOS - 1))]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        model_max_length=512,
    )
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(folder)
    return Path(folder)


def _byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level BPE: itself if printable, else from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]
