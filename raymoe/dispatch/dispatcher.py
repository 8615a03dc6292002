"""Dispatch and combine for one router: rows out to the groups, their outputs back and weighted.

Shape letters: T tokens, K experts a token, P pairs, H hidden size.
"""

from __future__ import annotations

import logging
import select
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raymoe.dispatch.pieces import Cut, combine, cut
from raymoe.dispatch.table import Int64s, LanePlan, LayerTable
from raymoe.errors import EngineError, ExpertUnavailableError, LaneClosedError, LaneError, LaneTimeoutError
from raymoe.lanes.base import Piece, RouterLane
from raymoe.policy.layout import GroupPlace, Layout

log = logging.getLogger(__name__)

Connect = Callable[[GroupPlace], RouterLane]
PROGRESS_POLL_S = 1.0
"""How often a silent group's progress counter is looked at."""


class Dispatcher:
    """Owns the lanes of one router. Not thread-safe: one step at a time.

    `connect` opens a lane within a bounded time or raises LaneError. A group is given up when its lane is at
    end-of-file, or when neither a reply nor its progress counter moved for `reply_timeout_s` seconds; its pairs
    then go to other living copies within the same call.
    """

    def __init__(self, connect: Connect, reply_timeout_s: float) -> None:
        self._connect = connect
        self._reply_timeout_s = reply_timeout_s
        self._layout: Layout | None = None
        self._tables: list[LayerTable] = []
        self._lanes: list[RouterLane | None] = []
        self._by_name: dict[str, RouterLane] = {}
        self._lost: dict[int, str] = {}
        self._queued: list[int] = []
        self._step = 0
        self._pairs_LE: list[Int64s] = []
        self._stats = {"calls": 0, "pieces": 0, "retries": 0, "wait_ns": 0, "plan_ns": 0, "busy_ns": 0}

    @property
    def epoch(self) -> int:
        """The layout in use, -1 before the first."""
        return -1 if self._layout is None else self._layout.epoch

    def set_layout(self, layout: Layout) -> None:
        """Use `layout` from the next call on: open lanes to new groups, close those to groups that left.

        A group that can't be reached counts as lost, which shows when one of its experts is needed.
        """
        known = self._by_name
        lanes: list[RouterLane | None] = []
        lost: dict[int, str] = {}
        for number, place in enumerate(layout.groups):
            lane = known.get(place.name)
            if lane is None:
                try:
                    lane = self._connect(place)
                except LaneError as error:
                    log.warning("%s", error)
                    lost[number] = error.detail
            lanes.append(lane)
        self._lanes, self._lost = lanes, lost
        self._by_name = {lane.group: lane for lane in lanes if lane is not None}
        for name, lane in known.items():
            if name not in self._by_name:
                lane.close()
        numbers = {place.name: number for number, place in enumerate(layout.groups)}
        self._tables = [LayerTable(n, experts, numbers) for n, experts in enumerate(layout.copies)]
        self._queued = [0] * len(lanes)
        if [len(p) for p in self._pairs_LE] != [table.experts for table in self._tables]:
            self._pairs_LE = [np.zeros(table.experts, np.int64) for table in self._tables]
        self._layout = layout

    def run(self, layer: int, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """The experts' part of MoE layer `layer`, [T, H] in the dtype of `hidden_TH`.

        `ids_TK` int64 are logical experts, `weights_TK` the gate's weights in any float dtype.

        Raises:
            ExpertUnavailableError: names the layer and the groups; nothing is left in flight.
            EngineError: the gate chose an expert that the layout doesn't know.
        """
        if self._layout is None:
            raise EngineError("experts were called before the first layout")
        planned = time.monotonic_ns()
        tokens, top_k = ids_TK.shape
        table = self._tables[layer]
        expert_P = ids_TK.reshape(-1).numpy()
        pairs_E = np.bincount(expert_P, minlength=table.experts)
        if len(pairs_E) > table.experts:
            raise EngineError(
                f"MoE layer {layer} has {table.experts} experts, the gate chose {expert_P.max()}"
            )
        out_PH = hidden_TH.new_empty(tokens * top_k, hidden_TH.shape[1])
        plans = table.plan(expert_P, frozenset(self._lost), self._queued)
        self._stats["plan_ns"] += time.monotonic_ns() - planned
        self._step += 1
        numbers = iter(range(1 << 31))
        while plans:
            failed = self._exchange(layer, plans, hidden_TH, out_PH, top_k, numbers)
            if not failed:
                break
            self._stats["retries"] += 1
            pair_P = np.sort(np.concatenate(failed))
            again = table.plan(expert_P[pair_P], frozenset(self._lost), self._queued)
            plans = [plan._replace(pair_P=pair_P[plan.pair_P]) for plan in again]
        self._pairs_LE[layer] += pairs_E
        self._stats["calls"] += 1
        return combine(out_PH.view(tokens, top_k, -1), weights_TK, hidden_TH.dtype)

    def stats(self) -> dict[str, Any]:
        """Counters since the start, and pairs per (layer, logical expert)."""
        return {
            **self._stats,
            "epoch": self.epoch,
            "lanes": [lane.group for lane in self._by_name.values()],
            "lost": {self._layout.groups[n].name: why for n, why in self._lost.items()}
            if self._layout
            else {},
            "pairs": [pairs.tolist() for pairs in self._pairs_LE],
        }

    def close(self) -> None:
        """Close all lanes. Idempotent."""
        for lane in self._by_name.values():
            lane.close()
        self._by_name, self._lanes = {}, []

    def _exchange(
        self,
        layer: int,
        plans: list[LanePlan],
        hidden_TH: Tensor,
        out_PH: Tensor,
        top_k: int,
        numbers: Any,
    ) -> list[Int64s]:
        """Send all plans, wait for all replies; returns the pairs whose group was lost."""
        lanes = self._lanes
        todo: dict[int, deque[Cut]] = {}
        flying: dict[int, dict[int, Cut]] = {}
        failed: list[Int64s] = []
        for plan in plans:
            lane = lanes[plan.lane]
            if lane is None:
                failed.append(plan.pair_P)
                continue
            todo[plan.lane] = deque(cut(plan, top_k, hidden_TH.shape[0], lane.max_pairs))
            flying[plan.lane] = {}

        def lose(number: int, error: LaneError) -> None:
            failed.extend(piece.pair_P for piece in (*flying.pop(number).values(), *todo.pop(number)))
            self._lose(number, error)

        def fill(number: int) -> None:
            lane, queue = lanes[number], todo[number]
            while lane is not None and queue:
                piece = queue[0]
                name = next(numbers)
                sent = lane.send(
                    Piece(
                        self.epoch,
                        self._step,
                        layer,
                        name,
                        hidden_TH,
                        piece.token_R,
                        piece.row_P,
                        piece.segments_S3,
                        int(self._reply_timeout_s * 1e6),
                    )  # fmt: skip
                )
                if not sent:
                    return
                flying[number][name] = queue.popleft()
                self._stats["pieces"] += 1

        for number in list(flying):
            try:
                fill(number)
            except LaneError as error:
                lose(number, error)
        waited = time.monotonic_ns()
        patience = _Patience(self._reply_timeout_s)
        while flying := {n: pieces for n, pieces in flying.items() if pieces or todo[n]}:
            ready = self._wait(flying)
            if not ready:
                for number in patience.expired({n: self._alive(n) for n in flying}):
                    lose(number, LaneTimeoutError(self._alive(number).group, patience.text))
                continue
            for number in ready:
                lane = self._alive(number)
                try:
                    while (reply := lane.receive()) is not None:
                        patience.heard(number)
                        piece = flying[number].pop(reply.header.piece)
                        self._queued[number] = reply.header.queue_rows
                        self._stats["busy_ns"] += reply.header.busy_ns
                        out_PH.index_copy_(0, torch.from_numpy(piece.pair_P), reply.out_PH)
                        lane.release(reply)
                    fill(number)
                except LaneError as error:
                    lose(number, error)
        self._stats["wait_ns"] += time.monotonic_ns() - waited
        return failed

    def _wait(self, flying: dict[int, Any]) -> list[int]:
        poll = select.poll()
        numbers = {}
        for number in flying:
            fd = self._alive(number).fileno()
            poll.register(fd, select.POLLIN)
            numbers[fd] = number
        return [numbers[fd] for fd, _ in poll.poll(PROGRESS_POLL_S * 1000)]

    def _alive(self, number: int) -> RouterLane:
        lane = self._lanes[number]
        if lane is None:
            raise EngineError(f"lane {number} is used after it was lost")
        return lane

    def _lose(self, number: int, error: LaneError) -> None:
        """Never talk to this group's lane again: a group that wakes later writes into memory nobody reads."""
        lane = self._alive(number)
        log.warning("%s", error)
        self._lost[number] = error.detail
        self._lanes[number] = None
        del self._by_name[lane.group]
        lane.close()


class _Patience:
    """Which groups have neither answered nor moved their progress counter for too long."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since: dict[int, float] = {}
        self._progress: dict[int, int] = {}
        self._start = time.monotonic()
        self.text = f"no reply and no progress for {limit_s:g} s"

    def heard(self, number: int) -> None:
        self._since[number] = time.monotonic()

    def expired(self, lanes: dict[int, RouterLane]) -> list[int]:
        now = time.monotonic()
        late = []
        for number, lane in lanes.items():
            progress = lane.progress()
            if progress != self._progress.get(number, progress):
                self._since[number] = now
            self._progress[number] = progress
            if now - self._since.get(number, self._start) > self._limit_s:
                late.append(number)
        return late
