"""Architectures whose experts module has a contract of its own, brought into the common one on the meta model.

The common contract, that of every decorated experts class of transformers 5.24: parameters with the experts
along dimension 0, a gate that takes the widened rows, and a call with (rows_TH, ids_TK, weights_TK). Blocks are
told by their class's name, so that no model code is imported for it; a test holds the names to the installed
transformers.

Shape letters: T rows, K experts a row, E experts, I expert width, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

CANT_SPLIT = {
    "DbrxFFN": "all experts of a layer are rows of the same matrices",
    "DogeCDMoE": "its experts are rows of an embedding, picked by product keys",
    "JetMoeMoE": "its attention is made of experts as well",
}
"""Blocks with experts that raymoe doesn't serve, by class name: why."""


class PlainExperts(nn.Module):
    """Parameters [E, ...] of gated experts without bias, marked as transformers marks decorated classes.

    It is never called: groups compute from the parameters, routers put their stand-in here.
    """

    has_gate, has_bias, has_post_expert_norm = True, False, False
    is_concatenated, _is_expert_parallel = True, False
    identity_experts = 0
    """Experts after the last one that compute nothing. transformers saves tensors for them, others don't."""

    def __init__(
        self, experts: nn.Module, config: object, gate_up_proj: Tensor, down_proj: Tensor, transposed: bool
    ) -> None:
        super().__init__()
        self.config, self.act_fn, self.is_transposed = config, experts.act_fn, transposed
        self.num_experts = len(down_proj)
        self.gate_up_proj = nn.Parameter(gate_up_proj)
        self.down_proj = nn.Parameter(down_proj)

    def _apply_gate(self, wide_TI: Tensor) -> Tensor:
        gate_TI, up_TI = wide_TI.chunk(2, dim=-1)
        return self.act_fn(gate_TI) * up_TI


class Llama4Block(nn.Module):
    """`Llama4TextMoe`, sparse: transformers' own runs every expert on every row, and weights the experts' inputs.

    One call for each of the K choices (released models have K = 1), with rows that are weighted already.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.router, self.shared_expert = block.router, block.shared_expert
        own = block.experts
        self.experts = PlainExperts(own, block.shared_expert.config, own.gate_up_proj, own.down_proj, True)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[..., H] → rows [T, H] and the router's logits [T, E]."""
        rows_TH = hidden.reshape(-1, hidden.shape[-1])
        scores_TE, logits_TE = self.router(rows_TH)
        ids_TK = logits_TE.topk(self.router.top_k, dim=1).indices
        ones_T1 = rows_TH.new_ones(len(rows_TH), 1)
        out_TH = self.shared_expert(rows_TH)
        for ids_T1 in ids_TK.split(1, dim=1):
            out_TH = out_TH + self.experts(rows_TH * scores_TE.gather(1, ids_T1), ids_T1, ones_T1)
        return out_TH, logits_TE


class LongcatBlock(nn.Module):
    """`LongcatFlashMoE`: ids from `num_experts` on mean "the row itself", which the router computes."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.router, own = block.router, block.experts
        # 5.24 has rows of gate_up_proj for the identity experts too, and never reads them.
        gate_up_proj = own.gate_up_proj[: own.num_routed_experts]
        self.experts = PlainExperts(own, block.config, gate_up_proj, own.down_proj, False)
        self.experts.identity_experts = own.zero_expert_num

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., H] → the same shape."""
        rows_TH = hidden.reshape(-1, hidden.shape[-1])
        _, weights_TK, ids_TK = self.router(rows_TH)
        real_TK = ids_TK < self.experts.num_experts
        # An identity pair still is a pair of the call: of an expert that the row needs anyway, with weight 0.
        own_T1 = torch.where(real_TK, ids_TK, -1).amax(dim=1, keepdim=True).clamp(min=0)
        out_TH = self.experts(
            rows_TH, torch.where(real_TK, ids_TK, own_T1), torch.where(real_TK, weights_TK, 0.0)
        )
        kept_T1 = torch.where(real_TK, 0.0, weights_TK).sum(dim=1, keepdim=True)
        return (out_TH + rows_TH * kept_T1).to(hidden.dtype).view(hidden.shape)


BLOCKS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "Llama4TextMoe": Llama4Block,
    "LongcatFlashMoE": LongcatBlock,
}
"""Blocks by class name, and what stands in for them. Parameters keep their names."""


def adapt(model: nn.Module) -> None:
    """Replace the blocks of `model` that have a contract of their own."""
    found = [(name, module) for name, module in model.named_modules() if type(module).__name__ in BLOCKS]
    for name, module in found:
        model.set_submodule(name, BLOCKS[type(module).__name__](module))


def why_not(model: nn.Module) -> str | None:
    """Why the experts of a model can't be split, None if it has none of the known reasons."""
    reasons = (CANT_SPLIT.get(type(module).__name__) for module in model.modules())
    return next((reason for reason in reasons if reason), None)
