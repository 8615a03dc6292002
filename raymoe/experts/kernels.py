"""How a group's slots are computed: a table from the weights' shape to a kernel.

The table depends on nothing but the architecture, so two groups that hold copies of one expert always use the
same kernel and round alike. Measured on CPU (hidden 768, expert width 384, 32 experts, top-4): a product per
slot gives the same bits as `torch._grouped_mm`, takes 0.95-1.03 of its time at 1 to 32 tokens, and 0.8 at 512
tokens with two threads.

In batch-invariant mode each slot's rows are padded to a multiple of `policy.tiles.ROWS`: a row's bits are then the
same whatever else is computed for its expert. Weights are kept in the layout that is fastest for so few rows.

Shape letters: P pairs sorted by slot, X those and the padding, N those of one slot, H hidden size, I expert width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from raymoe.errors import NotMoeError
from raymoe.policy.tiles import ROWS


class Form(NamedTuple):
    """What tells the four weight layouts of transformers' experts classes apart."""

    transposed: bool
    bias: bool
    gated: bool


class Weights(NamedTuple):
    """One expert, ready for `rows @ up` and `inner @ down`; the products are views where they can be."""

    up: Tensor
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(tensor.nbytes for tensor in self if tensor is not None)


@dataclass(frozen=True)
class Kernel:
    """Computes experts' outputs for their rows: `up`, the architecture's own activation, then `down`.

    `deterministic`: a row's bits depend on it alone.
    """

    form: Form
    activation: Callable[[Tensor], Tensor]
    deterministic: bool = False

    def weights(self, tensors: Mapping[str, Tensor]) -> Weights:
        """Take one expert's tensors, named as the architecture's parameters and without the expert axis."""
        name = "gate_up_proj" if self.form.gated else "up_proj"
        up, down = tensors[name], tensors["down_proj"]
        if not self.form.transposed:
            up, down = up.t(), down.t()
        if self.deterministic:
            # 4 rows take 0.85 to 1.0 of the time that they take with the views.
            up, down = up.contiguous(), down.contiguous()
        biases = (tensors[f"{one}_bias"] if self.form.bias else None for one in (name, "down_proj"))
        up_bias, down_bias = biases
        return Weights(up, up_bias, down, down_bias)

    def run(
        self,
        parts: Sequence[tuple[Weights, int]],
        rows_PH: Tensor,
        out_PH: Tensor,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """Write the unweighted outputs into `out_PH`. `parts` names the experts and their rows N, in order.

        `tick` is called after each expert.

        Each expert's rows pass the activation alone. Once for all would be less work, but vectorised operators
        compute the ends of what they are given in another way, so bits would depend on the other experts' rows.
        """
        if self.deterministic and any(count % ROWS for _, count in parts):
            self._run_padded(parts, rows_PH, out_PH, tick)
            return
        counts = [count for _, count in parts]
        split = zip(parts, rows_PH.split(counts), out_PH.split(counts), strict=True)
        for (weights, _), rows_NH, out_NH in split:
            wide_NI = torch.mm(rows_NH, weights.up)
            if weights.up_bias is not None:
                wide_NI += weights.up_bias
            torch.mm(self.activation(wide_NI), weights.down, out=out_NH)
            if weights.down_bias is not None:
                out_NH += weights.down_bias
            tick()

    def alone(self, weights: Weights, rows_NH: Tensor) -> Tensor:
        """One expert's outputs [N, H]."""
        out_NH = torch.empty_like(rows_NH)
        self.run([(weights, len(rows_NH))], rows_NH, out_NH)
        return out_NH

    def _run_padded(
        self,
        parts: Sequence[tuple[Weights, int]],
        rows_PH: Tensor,
        out_PH: Tensor,
        tick: Callable[[], None],
    ) -> None:
        count_S = np.array([count for _, count in parts])
        room_S = -(-count_S // ROWS) * ROWS
        shift_S = np.cumsum(room_S - count_S) - (room_S - count_S)
        place_P = torch.from_numpy(np.arange(len(rows_PH)) + np.repeat(shift_S, count_S))
        rows_XH = rows_PH.new_zeros(int(room_S.sum()), rows_PH.shape[1])
        rows_XH[place_P] = rows_PH
        out_XH = torch.empty_like(rows_XH)
        padded = [(weights, room) for (weights, _), room in zip(parts, room_S.tolist(), strict=True)]
        self.run(padded, rows_XH, out_XH, tick)
        torch.index_select(out_XH, 0, place_P, out=out_PH)


def kernel_for(experts: nn.Module, deterministic: bool = False) -> Kernel:
    """The kernel of an architecture's own experts module.

    Raises:
        NotMoeError: the module computes something between experts that a slot alone can't.
    """
    if experts.has_post_expert_norm:
        raise NotMoeError(f"{type(experts).__name__} normalises after each expert, which slots don't do yet")
    form = Form(bool(experts.is_transposed), bool(experts.has_bias), bool(experts.has_gate))
    return Kernel(form, experts._apply_gate if form.gated else experts.act_fn, deterministic)
