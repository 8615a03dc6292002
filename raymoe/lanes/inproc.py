"""The lane inside one process: the tensors themselves cross, a socket pair is the doorbell.

Used by tests and by programs that hold router and groups in one process.
"""

from __future__ import annotations

import itertools
from collections import deque

import torch

from raymoe.errors import LaneClosedError, StaleLayoutError
from raymoe.lanes.base import Piece, Reply, Request
from raymoe.lanes.doorbell import Doorbell, doorbells
from raymoe.lanes.header import HEADER_BYTES, Header, Kind

MAX_IN_FLIGHT = 64


class _Shared:
    def __init__(self) -> None:
        self.requests: deque[Request] = deque()
        self.ticks = itertools.count(1)
        self.progress = 0


class InprocRouterLane:
    """See `RouterLane`."""

    def __init__(self, group: str, bell: Doorbell, shared: _Shared, max_pairs: int) -> None:
        self.group, self.max_pairs = group, max_pairs
        self._bell, self._shared = bell, shared
        self._sent: dict[tuple[int, int, int, int], Request] = {}

    def fileno(self) -> int:
        return self._bell.fileno()

    def send(self, piece: Piece) -> bool:
        if len(self._sent) >= MAX_IN_FLIGHT:
            return False
        hidden, pairs = piece.hidden_TH, piece.row_P.shape[0]
        rows = hidden if piece.token_R is None else hidden.index_select(0, torch.from_numpy(piece.token_R))
        header = piece.header()
        request = Request(
            header, rows, piece.row_P, piece.segments_S3, hidden.new_empty(pairs, hidden.shape[1])
        )
        self._shared.requests.append(request)
        if not self._bell.send(header.pack()):
            self._shared.requests.pop()
            return False
        self._sent[header.key] = request
        return True

    def receive(self) -> Reply | None:
        message = self._bell.receive()
        if message is None:
            return None
        header = Header.unpack(message)
        request = self._sent.pop(header.key, None)
        if request is None:
            raise LaneClosedError(self.group, f"a reply to {header.key}, which was not asked")
        if header.kind == Kind.ERROR:
            raise StaleLayoutError(self.group, message[HEADER_BYTES:].decode(errors="replace"))
        return Reply(header, request.out_PH)

    def release(self, reply: Reply) -> None:
        """Nothing to give back: the reply owns its memory."""

    def progress(self) -> int:
        return self._shared.progress

    def in_flight(self) -> int:
        return len(self._sent)

    def close(self) -> None:
        self._bell.close()


class InprocGroupLane:
    """See `GroupLane`."""

    def __init__(self, bell: Doorbell, shared: _Shared) -> None:
        self._bell, self._shared = bell, shared

    def fileno(self) -> int:
        return self._bell.fileno()

    def receive(self) -> Request | None:
        return None if self._bell.receive() is None else self._shared.requests.popleft()

    def reply(self, request: Request, queue_rows: int, queue_ns: int, busy_ns: int) -> None:
        answer = request.header._replace(
            kind=Kind.REPLY, queue_rows=queue_rows, queue_ns=queue_ns, busy_ns=busy_ns
        )
        self._bell.send(answer.pack())

    def refuse(self, request: Request, reason: str) -> None:
        self._bell.send(request.header._replace(kind=Kind.ERROR).pack() + reason.encode()[:1024])

    def tick(self) -> None:
        self._shared.progress = next(self._shared.ticks)

    def close(self) -> None:
        self._bell.close()


def inproc_pair(group: str, max_pairs: int = 4096) -> tuple[InprocRouterLane, InprocGroupLane]:
    """Both ends of a new lane to `group`."""
    ours, theirs = doorbells(group, "router")
    shared = _Shared()
    return InprocRouterLane(group, ours, shared, max_pairs), InprocGroupLane(theirs, shared)
