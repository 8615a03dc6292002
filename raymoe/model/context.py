"""What one forward works on. It travels in a context variable, so forwards in other threads see their own."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

from raymoe.errors import EngineError, ExpertUnavailableError
from raymoe.model.cache import PackedCache
from raymoe.model.rows import LiveRows

# T tokens, K top-k, H width of the rows, Q query rows of one sequence, L keys it sees

RunExperts = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(index of the MoE layer, hidden_TH, ids_TK, weights_TK) → [T, H]; may raise ExpertUnavailableError."""


@dataclass(frozen=True)
class StepContext:
    """One forward: its rows, who computes the experts (None: the model itself), and the packed cache, if any.

    `masks` holds the attention masks that the layers share, by (Q, L, window).
    """

    rows: LiveRows
    experts: RunExperts | None = None
    packed: PackedCache | None = None
    masks: dict[tuple[int, int, int | None], Tensor] = field(default_factory=dict)


STEP: ContextVar[StepContext] = ContextVar("raymoe_step")


def current_step() -> StepContext:
    """The step whose forward is running here.

    Raises:
        EngineError: the model was called outside `model.forward.forward`.
    """
    step = STEP.get(None)
    if step is None:
        raise EngineError("a model of raymoe was called outside a step; call raymoe.model.forward.forward")
    return step


def run_experts(layer: int, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """The function for `checkpoint.router.load_router`: hands each call to the running step's experts.

    Rows of sequences that miss an expert get zeros, from this layer on.

    Raises:
        ExpertUnavailableError: no sequence of the step has all its experts.
    """
    step = current_step()
    if step.experts is None:
        raise EngineError(f"MoE layer {layer} has its experts elsewhere, and the step names nobody for them")
    while True:
        live_N = step.rows.index_N
        try:
            if live_N is None:
                return step.experts(layer, hidden_TH, ids_TK, weights_TK)
            out_TH = torch.zeros_like(hidden_TH)
            out_TH[live_N] = step.experts(layer, hidden_TH[live_N], ids_TK[live_N], weights_TK[live_N])
            return out_TH
        except ExpertUnavailableError as error:
            step.rows.check(hidden_TH.shape[0])
            step.rows.lose(error)
