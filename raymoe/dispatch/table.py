"""One layer of a layout as integer arrays, so that planning is a dozen NumPy calls.

Shape letters: E logical experts, X physical experts (sorted by lane, then slot), G lanes, P pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raymoe.policy.layout import Copy

Int64s = NDArray[np.int64]


class LanePlan(NamedTuple):
    """One group's part of a layer: `pair_P` are positions in the flattened `ids_TK`, sorted by slot."""

    lane: int
    pair_P: Int64s
    segments_S3: NDArray[np.int32]


class LayerTable:
    """Where the experts of one layer live. `lanes` numbers the groups of the layout."""

    def __init__(self, layer: int, copies: Sequence[Sequence[Copy]], lanes: dict[str, int]) -> None:
        self.layer = layer
        places = sorted({(lanes[c.group], c.slot, c.generation) for expert in copies for c in expert})
        number = {place: x for x, place in enumerate(places)}
        self._groups = tuple(lanes)
        self._lane_X = np.array([lane for lane, _, _ in places])
        self._slot_X3 = np.array([[slot, generation, 0] for _, slot, generation in places], dtype=np.int32)
        self._copies = [[number[lanes[c.group], c.slot, c.generation] for c in expert] for expert in copies]
        self._lane_from_G = np.searchsorted(self._lane_X, np.arange(len(lanes) + 1))
        self._first_E = np.array([copies[0] for copies in self._copies])
        self._single = all(len(copies) == 1 for copies in self._copies)
        self._gone: tuple[frozenset[int], NDArray[np.bool_]] = (frozenset(), np.zeros(len(copies), bool))

    @property
    def experts(self) -> int:
        """E."""
        return len(self._copies)

    def gone(self, lost: frozenset[int]) -> NDArray[np.bool_]:
        """Which experts have no copy outside `lost`: bool [E]."""
        if self._gone[0] != lost:
            lanes = [{int(self._lane_X[x]) for x in copies} for copies in self._copies]
            self._gone = lost, np.array([lost.issuperset(own) for own in lanes])
        return self._gone[1]

    def groups_of(self, experts: Sequence[int]) -> tuple[str, ...]:
        """Names of the groups that hold these experts, in order."""
        lanes = {int(self._lane_X[x]) for expert in experts for x in self._copies[expert]}
        return tuple(self._groups[lane] for lane in sorted(lanes))

    def plan(self, expert_P: Int64s, lost: frozenset[int], queued_G: Sequence[int]) -> list[LanePlan]:
        """Give every pair's logical expert to one living copy; none of them may be `gone`.

        All rows of an expert go to one copy, the one on the lane with the fewest rows (`queued_G` plus what
        this plan gave it), hottest expert first: so the row count of a product, and with it its rounding,
        does not depend on how many copies there are.
        """
        if self._single and not lost:
            physical_E = self._first_E
        else:
            physical_E = self._choose(expert_P, lost, queued_G)
        physical_P = physical_E[expert_P]
        order = np.argsort(physical_P, kind="stable")
        count_X = np.bincount(physical_P, minlength=len(self._lane_X))
        ends = np.cumsum(count_X)
        plans = []
        pair_from = 0
        for lane in range(len(self._lane_from_G) - 1):
            first, last = self._lane_from_G[lane], self._lane_from_G[lane + 1]
            pair_to = int(ends[last - 1]) if last else 0
            if pair_to > pair_from:
                used = np.flatnonzero(count_X[first:last]) + first
                segments = self._slot_X3[used]
                segments[:, 2] = count_X[used]
                plans.append(LanePlan(lane, order[pair_from:pair_to], segments))
                pair_from = pair_to
        return plans

    def _choose(self, expert_P: Int64s, lost: frozenset[int], queued_G: Sequence[int]) -> Int64s:
        rows_E = np.bincount(expert_P, minlength=self.experts)
        load = list(queued_G)
        physical_E = self._first_E.copy()
        for expert in np.argsort(-rows_E, kind="stable").tolist():
            rows = int(rows_E[expert])
            if rows == 0:
                break
            living = [x for x in self._copies[expert] if int(self._lane_X[x]) not in lost]
            best = min(living, key=lambda x: (load[int(self._lane_X[x])], x))
            load[int(self._lane_X[best])] += rows
            physical_E[expert] = best
        return physical_E
