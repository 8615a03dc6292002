"""What one forward of the model needs to know of its step. Nothing about a step lives anywhere else.

The model's own modules can't carry extra arguments to the attention function and the experts, so the context
travels in a `ContextVar`: forwards that run at once in several threads or tasks each see their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor

from raymoe.errors import EngineError
from raymoe.model.cache import PackedCache

RunExperts = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(MoE layer, hidden_TH, ids_TK, weights_TK) → combined rows [T, H]."""


@dataclass(frozen=True)
class StepContext:
    """The packed cache of this forward, and what computes its experts."""

    cache: PackedCache
    experts: RunExperts


_STEP: ContextVar[StepContext] = ContextVar("raymoe_step")


def current() -> StepContext:
    """The context of the forward that is running.

    Raises:
        EngineError: no forward is running.
    """
    try:
        return _STEP.get()
    except LookupError:
        raise EngineError("the model was called outside a step") from None


@contextmanager
def step(context: StepContext) -> Iterator[None]:
    """Run a forward under `context`; nesting is refused."""
    if _STEP.get(None) is not None:
        raise EngineError("a step was started inside another one")
    token = _STEP.set(context)
    try:
        yield
    finally:
        _STEP.reset(token)


def run_experts(layer: int, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """What stands where the experts were: `checkpoint.load_router(..., experts=run_experts)`."""
    return current().experts(layer, hidden_TH, ids_TK, weights_TK)
