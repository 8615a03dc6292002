"""What a Mixture-of-Experts model consists of, read from its config and file headers alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from raymoe.checkpoint.folder import Checkpoint
from raymoe.checkpoint.keys import Keys, split_keys
from raymoe.checkpoint.private import Conversion, experts_of, meta_model
from raymoe.checkpoint.tensors import DTYPES
from raymoe.errors import CheckpointError, NotMoeError


@dataclass(frozen=True)
class MoeLayer:
    """One MoE layer. `index` counts MoE layers only; `name` is the experts module's full name.

    `expert_bytes` is the size of one expert in the load dtype.
    """

    index: int
    name: str
    experts: int
    top_k: int
    expert_bytes: int


@dataclass(frozen=True)
class MoeModel:
    """The sizes of a model that the other parts plan with.

    `hidden_size` is the width of the rows that reach the experts, `dtype` the load dtype, `max_context`
    counts tokens. `router_bytes` is all that is not an expert's, in the load dtype; `router_file_bytes` is
    what reading it takes from disk.
    """

    layers: tuple[MoeLayer, ...]
    hidden_size: int
    dtype: torch.dtype
    vocab_size: int
    max_context: int
    router_bytes: int
    router_file_bytes: int


@dataclass(frozen=True)
class Skeleton:
    """A checkpoint's model on the meta device, with the owner of each tensor; the start of every load."""

    model: PreTrainedModel
    conversion: Conversion
    experts: dict[str, nn.Module]
    keys: Keys
    moe: MoeModel

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, dtype: torch.dtype | None = None, attention: str | None = None
    ) -> Skeleton:
        """Build the meta model and assign the tensors.

        Raises:
            NotMoeError: no routed experts, or experts whose parameters can't be cut by expert.
            CheckpointError: tensors are missing, have no place or the wrong shape.
        """
        dtype = dtype or _own_dtype(checkpoint)
        model = meta_model(checkpoint.config, dtype, attention)
        conversion = Conversion.of(model, dtype)
        experts = experts_of(model)
        _check_experts(checkpoint, experts)
        keys = split_keys(checkpoint, model, conversion, experts)
        return cls(model, conversion, experts, keys, _describe(model, experts, keys, dtype))


def describe(checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> MoeModel:
    """The model's sizes. Builds a meta model and checks that each tensor has a place; reads no weights.

    Raises:
        NotMoeError, CheckpointError: as `Skeleton.of`.
    """
    return Skeleton.of(checkpoint, dtype).moe


def _describe(
    model: PreTrainedModel, experts: dict[str, nn.Module], keys: Keys, dtype: torch.dtype
) -> MoeModel:
    config = model.config.get_text_config()
    layers = tuple(
        MoeLayer(index, name, module.num_experts, _top_k(model, name, config), _expert_bytes(module))
        for index, (name, module) in enumerate(experts.items())
    )
    widths = {_row_width(module) for module in experts.values()}
    if len(widths) != 1:
        raise NotMoeError(
            f"the MoE layers of a {config.model_type} model have rows of different widths {widths}"
        )
    own = {id(tensor) for module in experts.values() for tensor in module.parameters()}
    rest = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in own}
    return MoeModel(
        layers=layers,
        hidden_size=widths.pop(),
        dtype=dtype,
        vocab_size=config.vocab_size,
        max_context=config.max_position_embeddings,
        router_bytes=sum(tensor.numel() * tensor.element_size() for tensor in rest.values()),
        router_file_bytes=sum(entry.nbytes for entry in keys.router),
    )


def _check_experts(checkpoint: Checkpoint, experts: dict[str, nn.Module]) -> None:
    for name, module in experts.items():
        own = dict(module.named_parameters(recurse=False))
        whole = [leaf for leaf, _ in module.named_parameters() if leaf not in own]
        whole += [leaf for leaf, _ in module.named_buffers()]
        whole += [leaf for leaf, parameter in own.items() if parameter.shape[0] != module.num_experts]
        if whole:
            raise NotMoeError(
                f"{name} of {checkpoint.path} ({type(module).__name__}) has {', '.join(whole)}, which belongs"
                " to no single expert; raymoe can't split this architecture"
            )


def _expert_bytes(module: nn.Module) -> int:
    return sum(p.numel() // module.num_experts * p.element_size() for p in module.parameters())


def _row_width(module: nn.Module) -> int:
    weight = module.gate_up_proj if module.has_gate else module.up_proj
    return int(weight.shape[1 if module.is_transposed else 2])


def _top_k(model: PreTrainedModel, name: str, config: PretrainedConfig) -> int:
    """K of the layer: what the gate beside the experts says, else the config."""
    block = model.get_submodule(name.rpartition(".")[0])
    for module in (*block.children(), block, config):
        for attribute in ("top_k", "num_experts_per_tok", "top_k_experts"):
            value = getattr(module, attribute, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    raise NotMoeError(f"can't tell how many experts per token {name} of a {config.model_type} model chooses")


def _own_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """What the config says, else the floating dtype that most of the checkpoint's bytes have."""
    if checkpoint.config.dtype is not None:
        return checkpoint.config.dtype
    sizes: Counter[torch.dtype] = Counter()
    for entry in checkpoint.tensors.values():
        if DTYPES[entry.dtype].is_floating_point:
            sizes[DTYPES[entry.dtype]] += entry.nbytes
    if not sizes:
        raise CheckpointError(f"{checkpoint.path} holds no floating point tensor")
    return sizes.most_common(1)[0][0]
