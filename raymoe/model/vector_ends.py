"""How many rows a step must have so that every operator of a model computes whole vectors only.

Vectorised operators compute what is left at the end of a tensor in another way: with the C library's function, not
the vector one. That matters to functions that aren't rounded correctly, and to them alone.

Shape letters: T rows of a forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from raymoe.policy.tiles import ROWS

VECTOR_BYTES = 128
"""Operators take two 512-bit vectors at a time; smaller vectors divide them."""
_NAMES = """
    celu cos cosh elu erf erfc exp exp2 expm1 gelu hardswish log log10 log1p log2 log_sigmoid mish pow selu sigmoid
    silu sin sinh softplus tan tanh
"""
_FUNCTIONS = frozenset(_NAMES.split())
"""Of torch's operators on single numbers, those that aren't rounded correctly."""


class _Widths(TorchDispatchMode):
    """Collects the tiles that the operators of a forward of `ROWS` rows ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.tile = ROWS

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and func.overloadpacket.__name__.rstrip("_") in _FUNCTIONS:
            lanes, width = VECTOR_BYTES // out.element_size(), max(out.numel() // ROWS, 1)
            self.tile = math.lcm(self.tile, lanes // math.gcd(lanes, width))
        return out


def fitting_tile(forward: Callable[[], object]) -> int:
    """The smallest multiple of `ROWS` that fills vectors. `forward` computes a step of `ROWS` rows.

    Most widths are multiples of anything. A gate that takes the sigmoid of 2 scores a row asks for 16 rows in fp32,
    a shared expert's gate with one number a row for 32.
    """
    with _Widths() as widths:
        forward()
    return widths.tile
