"""Dispatch and combine for one router: rows out to the groups, their outputs back and weighted.

Shape letters: T tokens, K experts a token, P pairs, E experts, H hidden size.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from torch import Tensor

from raymoe.dispatch.exchange import Call, Exchange
from raymoe.dispatch.laneset import LaneSet
from raymoe.dispatch.opener import Connect
from raymoe.dispatch.pieces import combine
from raymoe.dispatch.table import Int64s, LanePlan, LayerTable
from raymoe.errors import EngineError, ExpertUnavailableError
from raymoe.policy.layout import Layout


class Dispatcher:
    """Owns the lanes of one router. Not thread-safe: one step at a time.

    A group is given up when its lane is at end-of-file, or when neither a reply nor its progress counter
    moved for `silence_s` seconds; its pairs then go to other living copies within the same call.
    """

    def __init__(self, connect: Connect, silence_s: float) -> None:
        self._lanes = LaneSet(connect)
        self._silence_s = silence_s
        self._layout: Layout | None = None
        self._tables: list[LayerTable] = []
        self._queued_G: list[int] = []
        self._step = 0
        self._pairs_LE: list[Int64s] = []
        self._stats = {"calls": 0, "pieces": 0, "retries": 0, "plan_ns": 0, "wait_ns": 0, "busy_ns": 0}

    @property
    def epoch(self) -> int:
        """The layout in use, -1 before the first."""
        return -1 if self._layout is None else self._layout.epoch

    def set_layout(self, layout: Layout) -> None:
        """Use `layout` from the next call on; lanes are opened and closed to match."""
        self._lanes.update(layout)
        numbers = {name: number for number, name in enumerate(self._lanes.names)}
        self._tables = [LayerTable(n, experts, numbers) for n, experts in enumerate(layout.copies)]
        self._queued_G = [0] * len(numbers)
        if [len(pairs) for pairs in self._pairs_LE] != [table.experts for table in self._tables]:
            self._pairs_LE = [np.zeros(table.experts, np.int64) for table in self._tables]
        self._layout = layout

    def reconnect(self) -> None:
        """Open new lanes to the groups that were lost, where they answer; waits for nothing.

        To be called between steps, again and again. A fenced lane is never used again.
        """
        if self._lanes.lost:
            self._lanes.reconnect()

    def run(self, layer: int, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """The experts' part of MoE layer `layer`, [T, H] in the dtype of `hidden_TH`.

        `ids_TK` int64 are logical experts, `weights_TK` the gate's weights in any float dtype.

        Raises:
            ExpertUnavailableError: names the layer, the groups and the rows; nothing is left in flight.
            EngineError: no layout yet, or the gate chose an expert that the layout doesn't know.
        """
        if not self._tables:
            raise EngineError("experts were called before the first layout")
        started = time.monotonic_ns()
        tokens, top_k = ids_TK.shape
        table, stats = self._tables[layer], self._stats
        expert_P = ids_TK.reshape(-1).numpy()
        pairs_E = np.bincount(expert_P, minlength=table.experts)
        if len(pairs_E) > table.experts:
            raise EngineError(
                f"MoE layer {layer} has {table.experts} experts, the gate chose {expert_P.max()}"
            )
        out_PH = hidden_TH.new_empty(tokens * top_k, hidden_TH.shape[1])
        self._step += 1
        call = Call(self.epoch, self._step, layer, top_k, hidden_TH, out_PH)
        plans = self._plan(table, expert_P, None, top_k)
        stats["plan_ns"] += time.monotonic_ns() - started
        waited, number = time.monotonic_ns(), 0
        while plans:
            exchange = Exchange(self._lanes, call, self._silence_s, number)
            exchange.run(plans)
            number = exchange.next_number
            stats["busy_ns"] += exchange.busy_ns
            for lane, rows in exchange.queued.items():
                self._queued_G[lane] = rows
            if not exchange.failed:
                break
            stats["retries"] += 1
            plans = self._plan(table, expert_P, np.sort(np.concatenate(exchange.failed)), top_k)
        stats["wait_ns"] += time.monotonic_ns() - waited
        stats["pieces"] += number
        stats["calls"] += 1
        self._pairs_LE[layer] += pairs_E
        return combine(out_PH.view(tokens, top_k, -1), weights_TK, hidden_TH.dtype)

    def missing(self) -> ExpertUnavailableError | None:
        """Look at all lanes: which expert can't be computed now, None while all can."""
        self._lanes.notice()
        lost = frozenset(self._lanes.lost)
        for table in self._tables if lost else ():
            gone = np.flatnonzero(table.gone(lost)).tolist()
            if gone:
                return ExpertUnavailableError(table.layer, table.groups_of(gone))
        return None

    def _plan(self, table: LayerTable, expert_P: Int64s, pair_P: Int64s | None, top_k: int) -> list[LanePlan]:
        """Plan all pairs, or those at `pair_P`."""
        lost = frozenset(self._lanes.lost)
        wanted_P = expert_P if pair_P is None else expert_P[pair_P]
        if lost:
            at_P = np.flatnonzero(table.gone(lost)[wanted_P])
            if len(at_P):
                groups = table.groups_of(np.unique(wanted_P[at_P]).tolist())
                rows = np.unique((at_P if pair_P is None else pair_P[at_P]) // top_k).tolist()
                raise ExpertUnavailableError(table.layer, groups, rows=rows)
        plans = table.plan(wanted_P, lost, self._queued_G)
        return plans if pair_P is None else [plan._replace(pair_P=pair_P[plan.pair_P]) for plan in plans]

    def stats(self) -> dict[str, Any]:
        """Counters since the start, and pairs per (layer, logical expert)."""
        lanes = self._lanes
        return {
            **self._stats,
            "epoch": self.epoch,
            "lanes": [lane.group for lane in lanes.living.values()],
            "lost": {lanes.names[number]: why for number, why in lanes.lost.items()},
            "pairs": [pairs.tolist() for pairs in self._pairs_LE],
        }

    def close(self) -> None:
        """Close all lanes. Idempotent."""
        self._lanes.close()
