"""Upcycling: writes a dense Llama as a Mixture-of-Experts checkpoint that computes the same function.

The method is fine-grained upcycling (Komatsuzaki et al., arXiv 2212.05055; shards as in He et al.,
arXiv 2410.07524), made exact. Each feed-forward network is cut along its width into `shards` routed shards
and `shared` shards that always run; the routed ones exist in `copies` equal copies. The target is glm4_moe,
whose router is limited to groups: one copy is one group and one group is chosen, so neither ties nor a
selection bias can mix shards of two copies. All shards of a copy score alike, each gets the weight
1/shards, and `down_proj` is scaled by `shards` (a power of two: no bit of the mantissa changes).

Why shared shards: glm4_moe always builds a shared expert, and of width 0 it makes torch warn at each load.

Letters in names: R copies, S routed shards of a copy, E = R·S experts (copy-major: e = r·S + s), I width of
the dense feed-forward network, W width of a shard, H hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from raymoe.errors import CheckpointError

Progress = Callable[[str, int, int], None]
"""Called as (stage, done, total); the unit of done and total depends on the stage."""


@dataclass(frozen=True)
class Recipe:
    """How a dense feed-forward network is cut.

    Raises:
        CheckpointError: a count is below 1, or `shards` is no power of two or below 2.
    """

    shards: int = 8
    copies: int = 4
    shared: int = 4

    def __post_init__(self) -> None:
        # The router sums the two best scores of a group, so a group needs two experts.
        if self.shards < 2 or self.shards & (self.shards - 1):
            raise CheckpointError(
                f"upcycling: shards must be 2, 4, 8, ... to scale exactly, got {self.shards}"
            )
        if self.copies < 1 or self.shared < 1:
            raise CheckpointError(
                f"upcycling: copies and shared must be at least 1, got {self.copies} and {self.shared}"
            )

    def width(self, intermediate: int) -> int:
        """Width of one shard of a feed-forward network of width `intermediate`.

        Raises:
            CheckpointError: it can't be cut evenly.
        """
        parts = self.shards + self.shared
        if intermediate % parts:
            raise CheckpointError(
                f"upcycling: intermediate_size {intermediate} can't be cut into {parts} equal shards"
            )
        return intermediate // parts


def moe_config(dense: Any, recipe: Recipe) -> Any:
    """The `Glm4MoeConfig` of the upcycled model.

    Args:
        dense: a `LlamaConfig`.

    Raises:
        CheckpointError: the dense model has something that glm4_moe would compute differently.
    """
    from transformers import Glm4MoeConfig

    rope = dict(dense.rope_parameters or {})
    wanted = {"model_type": "llama", "attention_bias": False, "mlp_bias": False}
    for name, value in wanted.items():
        if getattr(dense, name) != value:
            raise CheckpointError(
                f"upcycling: {name} is {getattr(dense, name)!r}, only {value!r} can be turned into glm4_moe"
            )
    if rope.get("rope_type", "default") != "default":
        raise CheckpointError(f"upcycling: rope_type is {rope['rope_type']!r}, only 'default' is accepted")
    return Glm4MoeConfig(
        architectures=["Glm4MoeForCausalLM"],
        dtype="float32",
        vocab_size=dense.vocab_size,
        hidden_size=dense.hidden_size,
        intermediate_size=dense.intermediate_size,
        num_hidden_layers=dense.num_hidden_layers,
        num_attention_heads=dense.num_attention_heads,
        num_key_value_heads=dense.num_key_value_heads,
        head_dim=dense.head_dim,
        hidden_act=dense.hidden_act,
        max_position_embeddings=dense.max_position_embeddings,
        rms_norm_eps=dense.rms_norm_eps,
        tie_word_embeddings=dense.tie_word_embeddings,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": rope["rope_theta"],
            "partial_rotary_factor": 1.0,
        },
        attention_bias=False,
        use_qk_norm=False,
        moe_intermediate_size=recipe.width(dense.intermediate_size),
        num_experts_per_tok=recipe.shards,
        n_routed_experts=recipe.shards * recipe.copies,
        n_shared_experts=recipe.shared,
        n_group=recipe.copies,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        first_k_dense_replace=0,
        num_nextn_predict_layers=0,
        bos_token_id=dense.bos_token_id,
        eos_token_id=dense.eos_token_id,
        pad_token_id=dense.pad_token_id,
    )


def mlp_tensors(
    gate_IH: torch.Tensor, up_IH: torch.Tensor, down_HI: torch.Tensor, router_RH: torch.Tensor, recipe: Recipe
) -> dict[str, torch.Tensor]:
    """The tensors of one MoE block, by their hub names below `mlp.`; each has memory of its own.

    Args:
        gate_IH, up_IH, down_HI: the dense feed-forward network, fp32.
        router_RH: one router row per copy, fp32.

    Raises:
        CheckpointError: the router's rows are not one per copy.
    """
    if router_RH.shape != (recipe.copies, gate_IH.shape[1]):
        raise CheckpointError(
            f"upcycling: router rows have shape {tuple(router_RH.shape)},"
            f" wanted {(recipe.copies, gate_IH.shape[1])}"
        )
    W = recipe.width(gate_IH.shape[0])
    tensors = {
        "gate.weight": router_RH.float().repeat_interleave(recipe.shards, dim=0),
        "gate.e_score_correction_bias": torch.zeros(recipe.copies * recipe.shards),
        "shared_experts.gate_proj.weight": gate_IH[recipe.shards * W :].clone(),
        "shared_experts.up_proj.weight": up_IH[recipe.shards * W :].clone(),
        "shared_experts.down_proj.weight": down_HI[:, recipe.shards * W :].clone(
            memory_format=torch.contiguous_format
        ),
    }
    for copy in range(recipe.copies):
        for shard in range(recipe.shards):
            part, name = slice(shard * W, (shard + 1) * W), f"experts.{copy * recipe.shards + shard}"
            tensors[f"{name}.gate_proj.weight"] = gate_IH[part].clone()
            tensors[f"{name}.up_proj.weight"] = up_IH[part].clone()
            tensors[f"{name}.down_proj.weight"] = (down_HI[:, part] * recipe.shards).contiguous()
    return tensors


def upcycle(
    dense: Any,
    routers: Sequence[torch.Tensor],
    folder: Path,
    recipe: Recipe,
    progress: Progress | None = None,
) -> None:
    """Write `config.json`, `generation_config.json`, one safetensors file per layer and their index.

    Args:
        dense: a `LlamaForCausalLM` in fp32 on the CPU.
        routers: for each layer the router's rows [R, H], fp32.
        folder: exists and is empty.
        progress: stage "writing", in bytes.

    Raises:
        CheckpointError: the model can't be upcycled exactly (see `moe_config`, `Recipe`).
    """
    from transformers import GenerationConfig

    config = moe_config(dense.config, recipe)
    weights = dense.state_dict()
    for name, tensor in weights.items():
        if tensor.dtype != torch.float32:
            raise CheckpointError(f"upcycling: {name} is {tensor.dtype}, only float32 can be scaled exactly")
    if len(routers) != config.num_hidden_layers:
        raise CheckpointError(f"upcycling: {len(routers)} routers for {config.num_hidden_layers} layers")

    files, done = config.num_hidden_layers + 1, 0
    total = upcycled_bytes(dense.config, recipe)
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(_parts(config, weights, routers, recipe), start=1):
        file = f"model-{number:05d}-of-{files:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        done += sum(tensor.nbytes for tensor in tensors.values())
        if progress is not None:
            progress("writing", done, total)
    index = {"metadata": {"total_size": done}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
    config.save_pretrained(folder)
    GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(folder)


def upcycled_bytes(dense: Any, recipe: Recipe) -> int:
    """Bytes of all tensors of the upcycled model in fp32, from the dense `LlamaConfig` alone."""
    H, W = dense.hidden_size, recipe.width(dense.intermediate_size)
    E = recipe.shards * recipe.copies
    heads = 2 * dense.num_attention_heads + 2 * dense.num_key_value_heads
    layer = 3 * H * W * (E + recipe.shared) + E * (H + 1) + heads * dense.head_dim * H + 2 * H
    embeddings = dense.vocab_size * H * (1 if dense.tie_word_embeddings else 2)
    return 4 * (layer * dense.num_hidden_layers + embeddings + H)


def _parts(
    config: Any, weights: dict[str, torch.Tensor], routers: Sequence[torch.Tensor], recipe: Recipe
) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of each file: first what belongs to no layer, then layer by layer."""
    names = ["model.embed_tokens.weight", "model.norm.weight"]
    if not config.tie_word_embeddings:
        names.append("lm_head.weight")
    yield {name: weights[name] for name in names}
    for layer, router_RH in enumerate(routers):
        prefix = f"model.layers.{layer}."
        own = {name: tensor for name, tensor in weights.items() if name.startswith(prefix)}
        mlp = [own.pop(f"{prefix}mlp.{part}_proj.weight") for part in ("gate", "up", "down")]
        moe = mlp_tensors(mlp[0], mlp[1], mlp[2], router_RH, recipe)
        yield own | {f"{prefix}mlp.{name}": tensor for name, tensor in moe.items()}
