"""A model without experts: everything else loaded, and a stand-in where each experts module was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from raymoe.checkpoint.folder import Checkpoint
from raymoe.checkpoint.moe import Skeleton
from raymoe.checkpoint.private import read_generation_config
from raymoe.checkpoint.tensors import LazyTensor, OnBytes

# T tokens, K top-k, H width of the rows

ExpertsFn = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(index of the MoE layer, hidden_TH, ids_TK int64, weights_TK) → combined rows [T, H] in hidden's dtype."""


class RemoteExperts(nn.Module):
    """Stands where an experts module was, holds no parameter, and hands its call to `experts`."""

    def __init__(self, index: int, experts: ExpertsFn, num_experts: int) -> None:
        super().__init__()
        self.index, self.experts, self.num_experts = index, experts, num_experts

    def forward(self, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """The same contract as every experts module of transformers 5.24, with positional arguments."""
        return self.experts(self.index, hidden_TH, ids_TK, weights_TK)

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"MoE layer {self.index}, {self.num_experts} experts elsewhere"


def load_router(
    checkpoint: Checkpoint,
    experts: ExpertsFn,
    *,
    dtype: torch.dtype | None = None,
    attention: str | None = None,
    on_bytes: OnBytes | None = None,
) -> PreTrainedModel:
    """Load all but the experts, whose bytes are never read. The model is in eval mode and wants no gradient.

    `attention` names a registered attention implementation. `on_bytes` is told of bytes read, from several
    threads.

    Raises:
        NotMoeError, CheckpointError: as `Skeleton.of`, or a file ends early while it is read.
    """
    skeleton = Skeleton.of(checkpoint, dtype, attention)
    model = skeleton.model
    for index, (name, module) in enumerate(skeleton.experts.items()):
        model.set_submodule(name, RemoteExperts(index, experts, module.num_experts))
    tensors: dict[str, Any] = {
        entry.name: LazyTensor(entry, on_bytes=on_bytes) for entry in skeleton.keys.router
    }
    info = skeleton.conversion.load(model, tensors)
    skeleton.conversion.finish(model, info)
    generation = read_generation_config(checkpoint.path)
    if generation is not None:
        model.generation_config = generation
    return model.eval().requires_grad_(False)
