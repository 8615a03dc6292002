"""Send the pieces of one layer to all groups and wait for all replies.

Shape letters: T tokens, P pairs, H hidden size.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from raymoe.dispatch.laneset import LaneSet
from raymoe.dispatch.pieces import Cut, cut
from raymoe.dispatch.table import Int64s, LanePlan
from raymoe.errors import LaneError, LaneTimeoutError
from raymoe.lanes.base import Piece, Reply

PROGRESS_POLL_S = 1.0
"""How often a silent group's progress counter is looked at."""


class Call(NamedTuple):
    """What all pieces of one dispatch share. `out_PH` takes the replies, in pair order."""

    epoch: int
    step: int
    layer: int
    top_k: int
    hidden_TH: Tensor
    out_PH: Tensor


class Exchange:
    """One round: each lane's queue of cuts, those in flight, and the pairs whose group was lost.

    Windows: a lane takes as many pieces as it has room for; the rest follow as its replies are released.
    """

    def __init__(self, lanes: LaneSet, call: Call, silence_s: float, first_number: int = 0) -> None:
        self._lanes, self._call, self._silence_s = lanes, call, silence_s
        self._todo: dict[int, deque[Cut]] = {}
        self._flying: dict[int, dict[int, Cut]] = {}
        self._heard: dict[int, float] = {}
        self._progress: dict[int, int] = {}
        self.next_number = first_number
        self.failed: list[Int64s] = []
        self.busy_ns = 0
        self.queued: dict[int, int] = {}

    def run(self, plans: Sequence[LanePlan]) -> None:
        """Returns when every pair has its row in `out_PH` or its positions in `failed`."""
        tokens = self._call.hidden_TH.shape[0]
        for plan in plans:
            lane = self._lanes.living.get(plan.lane)
            if lane is None:
                self.failed.append(plan.pair_P)
                continue
            self._todo[plan.lane] = deque(cut(plan, self._call.top_k, tokens, lane.max_pairs))
            self._flying[plan.lane] = {}
        started = time.monotonic()
        for number in list(self._todo):
            self._heard[number] = started
            self._guarded(number, self._fill)
        while self._flying:
            ready = self._lanes.wait(PROGRESS_POLL_S)
            for number in ready:
                self._guarded(number, self._collect)
            if not ready:
                self._look_for_silence()

    def _guarded(self, number: int, act: Callable[[int], None]) -> None:
        try:
            act(number)
        except LaneError as error:
            self._lose(number, error)

    def _fill(self, number: int) -> None:
        lane, call = self._lanes.living[number], self._call
        todo, flying = self._todo[number], self._flying[number]
        while todo:
            part = todo[0]
            name = self.next_number
            piece = Piece(
                call.epoch,
                call.step,
                call.layer,
                name,
                call.hidden_TH,
                part.token_R,
                part.row_P,
                part.segments_S3,
                int(self._silence_s * 1e6),
            )
            if not lane.send(piece):
                return
            self.next_number += 1
            flying[name] = todo.popleft()

    def _collect(self, number: int) -> None:
        lane = self._lanes.living[number]
        while (reply := lane.receive()) is not None:
            self._take(number, reply)
            lane.release(reply)
        if number in self._todo:
            self._fill(number)
            if not self._todo[number] and not self._flying[number]:
                del self._todo[number], self._flying[number]

    def _take(self, number: int, reply: Reply) -> None:
        header, call = reply.header, self._call
        self._heard[number] = time.monotonic()
        if (header.step, header.layer) != (call.step, call.layer):
            return  # the answer to a step that was broken off
        part = self._flying[number].pop(header.piece)
        self.queued[number] = header.queue_rows
        self.busy_ns += header.busy_ns
        call.out_PH.index_copy_(0, torch.from_numpy(part.pair_P), reply.out_PH)

    def _lose(self, number: int, error: LaneError) -> None:
        for part in (*self._flying.pop(number, {}).values(), *self._todo.pop(number, ())):
            self.failed.append(part.pair_P)
        self._lanes.lose(number, error)

    def _look_for_silence(self) -> None:
        now = time.monotonic()
        for number in list(self._flying):
            lane = self._lanes.living[number]
            progress = lane.progress()
            if progress != self._progress.get(number, progress):
                self._heard[number] = now
            self._progress[number] = progress
            if now - self._heard[number] > self._silence_s:
                text = f"no reply and no progress for {self._silence_s:g} s"
                self._lose(number, LaneTimeoutError(lane.group, text))
