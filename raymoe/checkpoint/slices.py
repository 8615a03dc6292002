"""Experts of a checkpoint, one by one or many at a time, as their architecture's own parameters."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from raymoe.checkpoint.folder import Checkpoint
from raymoe.checkpoint.memory import give_back
from raymoe.checkpoint.moe import MoeModel, Skeleton
from raymoe.checkpoint.private import branch
from raymoe.checkpoint.tensors import OnBytes
from raymoe.errors import CheckpointError, ConfigError


class ExpertLoader:
    """Loads experts of one checkpoint. The assignment of its tensors is worked out once, at birth.

    Safe to use from several threads: a load shares nothing that it changes.

    Raises:
        NotMoeError, CheckpointError: as `Skeleton.of`.
    """

    model: MoeModel

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> None:
        skeleton = Skeleton.of(checkpoint, dtype)
        self.model = skeleton.moe
        self._conversion = skeleton.conversion
        self._sources = skeleton.keys.layers
        self._modules = list(skeleton.experts.values())

    def experts_module(self, layer: int, slots: int) -> nn.Module:
        """The architecture's own experts module with room for `slots` experts on the CPU, values not set.

        Eval mode, no gradient. Kernels take from it how the parameters lie, and the activation.
        """
        if slots < 1:
            raise ConfigError(f"an experts module needs at least one slot, not {slots}")
        meta = self._modules[self._checked(layer)]
        module = copy.deepcopy(meta, {id(meta.config): meta.config})
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            empty = torch.empty((slots, *parameter.shape[1:]), dtype=parameter.dtype)
            setattr(module, leaf, nn.Parameter(empty, requires_grad=False))
        module.num_experts = slots
        return module.eval()

    def load(self, layer: int, experts: Sequence[int], on_bytes: OnBytes | None = None) -> dict[str, Tensor]:
        """Read and convert `experts` of a layer: parameter name → [len(experts), ...], in the given order.

        Only these experts' bytes are read. `on_bytes` is told of them, from several threads.

        Raises:
            CheckpointError: a tensor doesn't fit its parameter, or a file ends early.
            ConfigError: there is no such layer or expert.
        """
        ascending = self._ascending(layer, experts)
        meta = self._modules[layer]
        holder = nn.Module()
        for leaf, parameter in meta.named_parameters(recurse=False):
            small = torch.empty((len(ascending), *parameter.shape[1:]), dtype=parameter.dtype, device="meta")
            holder.register_parameter(leaf, nn.Parameter(small, requires_grad=False))
        name = self.model.layers[layer].name
        info = self._conversion.load(
            branch(self._conversion, name, holder), self._sources[layer].lazy(ascending, on_bytes)
        )
        give_back()
        if info.missing_keys:
            raise CheckpointError(f"no tensor fills {', '.join(sorted(info.missing_keys))}")
        loaded = {leaf: parameter.data for leaf, parameter in holder.named_parameters()}
        if list(experts) == ascending:
            return loaded
        order = torch.tensor([ascending.index(expert) for expert in experts])
        return {leaf: tensor.index_select(0, order) for leaf, tensor in loaded.items()}

    def bytes_of(self, layer: int, experts: Sequence[int]) -> int:
        """How many bytes `load` reads from disk for these experts."""
        ascending = self._ascending(layer, experts)
        return sum(tensor.nbytes for tensor in self._sources[layer].lazy(ascending).values())

    def _ascending(self, layer: int, experts: Sequence[int]) -> list[int]:
        count = self.model.layers[self._checked(layer)].experts
        wrong = [expert for expert in experts if not 0 <= expert < count]
        if wrong or not experts:
            raise ConfigError(f"MoE layer {layer} has experts 0..{count - 1}, asked for {wrong or 'none'}")
        return sorted(set(experts))

    def _checked(self, layer: int) -> int:
        if not 0 <= layer < len(self._modules):
            raise ConfigError(f"there is no MoE layer {layer}; the model has 0..{len(self._modules) - 1}")
        return layer
