"""What one forward works on. It travels in a context variable, so forwards in other threads see their own."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from torch import Tensor

from raymoe.errors import EngineError
from raymoe.model.cache import PackedCache

# T tokens, K top-k, H width of the rows, Q query rows of one sequence, L keys it sees

RunExperts = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(index of the MoE layer, hidden_TH, ids_TK, weights_TK) → [T, H]."""


@dataclass(frozen=True)
class StepContext:
    """One step: the packed batch with its cache, and who computes the experts (None: the model itself).

    `masks` holds the attention masks that the layers share, by (Q, L, window).
    """

    cache: PackedCache
    experts: RunExperts | None = None
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
    """The function for `checkpoint.router.load_router`: hands each call to the running step's experts."""
    experts = current_step().experts
    if experts is None:
        raise EngineError(f"MoE layer {layer} has its experts elsewhere, and the step names nobody for them")
    return experts(layer, hidden_TH, ids_TK, weights_TK)
