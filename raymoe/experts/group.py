"""An expert group: its slots, and the rows it computes with them. No I/O.

Shape letters: R rows of a request, P its pairs, H hidden size.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raymoe.checkpoint.memory import give_back
from raymoe.checkpoint.slices import ExpertLoader
from raymoe.errors import StaleLayoutError
from raymoe.experts.kernels import Weights, kernel_for
from raymoe.lanes.base import Request
from raymoe.model.row_check import check_rows, random_rows


@dataclass(frozen=True)
class Slot:
    """One physical expert in place."""

    generation: int
    expert: int
    weights: Weights


class ExpertGroup:
    """Slots of all layers. Loading and freeing may run in another thread than `compute`.

    `deterministic`: the bits of a row's results depend on that row alone.
    """

    def __init__(self, loader: ExpertLoader, name: str, deterministic: bool = False) -> None:
        self.name = name
        self._loader = loader
        self._kernel = kernel_for(loader.experts_module(0, 1), deterministic)
        self._checked: set[tuple[torch.Size, torch.dtype]] = set()
        self.tick: Callable[[], None] = lambda: None
        """Called after each slot that was computed."""
        self._slots: list[dict[int, Slot]] = [{} for _ in loader.model.layers]
        self._generations: list[dict[int, int]] = [defaultdict(int) for _ in loader.model.layers]
        self._lock = threading.Lock()

    def load_slice(
        self, layer: int, experts: Sequence[int], on_bytes: Callable[[int], None] | None = None
    ) -> list[tuple[int, int]]:
        """Load experts of one layer into free slots, lowest first; returns (slot, generation) of each.

        Raises:
            CheckpointError: names the file and tensor.
            ConfigError: the kernel can't be deterministic on this machine.
        """
        stacked = self._loader.load(layer, experts, on_bytes)
        places = []
        for i, expert in enumerate(experts):
            # A clone, so that freeing this slot frees its memory whatever was loaded beside it.
            weights = self._kernel.weights({name: tensor[i].clone() for name, tensor in stacked.items()})
            if self._kernel.deterministic:
                self._check(weights)
            with self._lock:
                slots, generations = self._slots[layer], self._generations[layer]
                slot = next(n for n in range(len(slots) + 1) if n not in slots)
                slots[slot] = Slot(generations[slot], expert, weights)
            places.append((slot, slots[slot].generation))
        del stacked
        # The new layouts that the kernel made have left holes where the old ones were.
        give_back()
        return places

    def free(self, layer: int, slot: int) -> None:
        """Empty a slot. Its next expert gets another generation, so that old layouts are noticed.

        Raises:
            StaleLayoutError: the slot is empty.
        """
        with self._lock:
            if self._slots[layer].pop(slot, None) is None:
                raise StaleLayoutError(self.name, f"slot {slot} of MoE layer {layer} is empty")
            self._generations[layer][slot] += 1

    def check(self, request: Request) -> str | None:
        """Why a request can't be computed here, or None."""
        layer, rows, pairs = request.header.layer, request.header.rows, request.header.pairs
        if layer >= len(self._slots):
            return f"MoE layer {layer} is unknown"
        if pairs and (int(request.row_P.min()) < 0 or int(request.row_P.max()) >= rows):
            return "a pair points outside the request's rows"
        total = 0
        for slot, generation, count in request.segments_S3.tolist():
            held = self._slots[layer].get(slot)
            if held is None or held.generation != generation:
                has = "is empty" if held is None else f"holds generation {held.generation}"
                return f"slot {slot} of MoE layer {layer} {has}, the layout says generation {generation}"
            if count < 1:
                return f"a segment of {count} pairs"
            total += count
        return None if total == pairs else f"segments hold {total} pairs, the header says {pairs}"

    def compute(self, requests: Sequence[Request]) -> None:
        """Compute checked requests of one layer, merging what goes to the same slot.

        Each request's pairs are sorted by slot, and their results are written into its `out_PH`.
        """
        slots = self._slots[requests[0].header.layer]
        if len(requests) == 1:
            (request,) = requests
            parts = [(slots[slot].weights, count) for slot, _, count in request.segments_S3.tolist()]
            self._kernel.run(parts, _gather(request), request.out_PH, self.tick)
            return
        pieces: dict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for request in requests:
            segments = request.segments_S3.tolist()
            counts = [count for _, _, count in segments]
            rows, outs = _gather(request).split(counts), request.out_PH.split(counts)
            for (slot, _, _), piece in zip(segments, zip(rows, outs, strict=True), strict=True):
                pieces[slot].append(piece)
        ordered = [piece for slot in pieces.values() for piece in slot]
        parts = [(slots[slot].weights, sum(len(r) for r, _ in piece)) for slot, piece in pieces.items()]
        rows_PH = torch.cat([rows for rows, _ in ordered])
        out_PH = torch.empty_like(rows_PH)
        self._kernel.run(parts, rows_PH, out_PH, self.tick)
        for (_, out), done in zip(ordered, out_PH.split([len(rows) for rows, _ in ordered]), strict=True):
            out.copy_(done)

    def _check(self, weights: Weights) -> None:
        shape = weights.up.shape, weights.up.dtype
        if shape not in self._checked:
            rows_TH = random_rows(weights.up.shape[0], weights.up.dtype)
            what = f"an expert of {self.name}"
            check_rows(lambda rows_NH: self._kernel.alone(weights, rows_NH), rows_TH, what, tile=1)
            self._checked.add(shape)

    def stats(self) -> dict[str, Any]:
        """Slots in use and the bytes they hold."""
        with self._lock:
            held = [slot for layer in self._slots for slot in layer.values()]
        return {"slots": len(held), "bytes": sum(slot.weights.nbytes for slot in held)}


def _gather(request: Request) -> Tensor:
    rows = request.rows_RH
    if rows.shape[0] == 1:
        return rows.expand(request.header.pairs, -1)
    return rows.index_select(0, torch.from_numpy(request.row_P))
