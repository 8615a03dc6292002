"""The lane between two processes of one host: payload in shared memory, headers on a Unix socket.

The router makes the memory (`memfd_create`: no name to leak, not bounded by /dev/shm), seals its size and
passes it with its hello. The router gives out both rings' space and reserves the reply's before it sends, so
neither side ever waits for the other's ring. The socket call orders the payload's stores before the header
that announces them.
"""

from __future__ import annotations

import os
import select
import socket
import time

import torch

from raymoe.errors import HelloRefusedError, LaneClosedError, LaneTimeoutError, StaleLayoutError
from raymoe.lanes import shm_memory
from raymoe.lanes.base import Piece, Reply, Request, max_pairs, request_bytes
from raymoe.lanes.doorbell import Doorbell
from raymoe.lanes.header import HEADER_BYTES, MAX_MESSAGE, Header, Kind
from raymoe.lanes.hello import Hello, check_answer
from raymoe.lanes.ring import Ring, aligned
from raymoe.lanes.shm_memory import CONTROL_BYTES, SharedMemory

MAX_IN_FLIGHT = 64
"""Pieces under way per lane: fewer than a socket's queue holds, so a send of either side never blocks."""


class ShmRouterLane:
    """See `RouterLane`. Opened by `connect`."""

    def __init__(self, group: str, bell: Doorbell, memory: SharedMemory) -> None:
        self.group = group
        self.max_pairs = max_pairs(memory.ring_bytes, memory.hidden, memory.itemsize)
        self._bell, self._memory = bell, memory
        self._requests, self._replies = Ring(memory.ring_bytes), Ring(memory.ring_bytes)
        self._sent: dict[tuple[int, int, int, int], Header] = {}

    def fileno(self) -> int:
        return self._bell.fileno()

    def send(self, piece: Piece) -> bool:
        memory, pairs, segments = self._memory, piece.row_P.shape[0], piece.segments_S3.shape[0]
        if len(self._sent) >= MAX_IN_FLIGHT:
            return False
        reply_at = self._replies.reserve(pairs * memory.hidden * memory.itemsize)
        if reply_at is None:
            return False
        rows = piece.rows
        request_at = self._requests.reserve(
            request_bytes(rows, pairs, segments, memory.hidden, memory.itemsize)
        )
        if request_at is None:
            self._replies.release(reply_at)
            return False
        header = piece.header(request_at, reply_at)
        to = memory.request(header)
        if piece.token_R is None:
            to.rows_RH.copy_(piece.hidden_TH)
        else:
            torch.index_select(piece.hidden_TH, 0, torch.from_numpy(piece.token_R), out=to.rows_RH)
        to.row_P[:] = piece.row_P
        to.segments_S3[:] = piece.segments_S3
        if not self._bell.send(header.pack()):
            self._give_back(header)
            return False
        self._sent[header.key] = header
        return True

    def receive(self) -> Reply | None:
        message = self._bell.receive()
        if message is None:
            return None
        header = Header.unpack(message)
        sent = self._sent.pop(header.key, None)
        if sent is None:
            raise LaneClosedError(self.group, f"a reply to {header.key}, which was not asked")
        if header.kind != Kind.REPLY:
            self._give_back(sent)
            raise StaleLayoutError(self.group, message[HEADER_BYTES:].decode(errors="replace"))
        # Only figures are taken from the reply: where its rows are is what was sent.
        answer = sent._replace(
            kind=Kind.REPLY,
            queue_rows=header.queue_rows,
            queue_ns=header.queue_ns,
            busy_ns=header.busy_ns,
        )
        at = CONTROL_BYTES + self._memory.ring_bytes + sent.reply_at
        return Reply(answer, self._memory.rows(at, sent.pairs))

    def release(self, reply: Reply) -> None:
        self._give_back(reply.header)

    def progress(self) -> int:
        return int(self._memory.control[0])

    def in_flight(self) -> int:
        return len(self._sent)

    def close(self) -> None:
        # The mapping goes with its last view; a fenced lane's memory is never used again.
        self._bell.close()

    def _give_back(self, header: Header) -> None:
        self._requests.release(header.request_at)
        self._replies.release(header.reply_at)


class ShmGroupLane:
    """See `GroupLane`. Made by `ShmListener`."""

    def __init__(self, bell: Doorbell, memory: SharedMemory) -> None:
        self._bell, self._memory = bell, memory
        self._ticks = 0

    def fileno(self) -> int:
        return self._bell.fileno()

    def receive(self) -> Request | None:
        message = self._bell.receive()
        if message is None:
            return None
        try:
            header = Header.unpack(message)
            if header.kind != Kind.ROWS:
                raise ValueError(f"kind {header.kind} is not a request")
            return self._memory.request(header)
        except ValueError as error:
            raise LaneClosedError(self._bell.peer, f"protocol broken: {error}") from None

    def reply(self, request: Request, queue_rows: int, queue_ns: int, busy_ns: int) -> None:
        self._answer(
            request.header._replace(
                kind=Kind.REPLY, queue_rows=queue_rows, queue_ns=queue_ns, busy_ns=busy_ns
            ).pack()
        )

    def refuse(self, request: Request, reason: str) -> None:
        self._answer(request.header._replace(kind=Kind.ERROR).pack() + reason.encode()[:1024])

    def tick(self) -> None:
        self._ticks += 1
        self._memory.control[0] = self._ticks

    def close(self) -> None:
        self._bell.close()

    def _answer(self, message: bytes) -> None:
        if not self._bell.send(message):
            raise LaneClosedError(self._bell.peer, "it sends without reading its replies")


def connect(
    group: str, address: str, hello: Hello, *, ring_bytes: int, router: str, timeout_s: float
) -> ShmRouterLane:
    """Open a lane to the expert group that listens at `address`.

    Raises:
        LaneClosedError: nobody listens there.
        LaneTimeoutError: no answer within `timeout_s` seconds.
        HelloRefusedError: the two sides don't fit together.
    """
    ring_bytes = aligned(ring_bytes)
    dtype: torch.dtype = getattr(torch, hello.dtype)
    if max_pairs(ring_bytes, hello.hidden_size, dtype.itemsize) < 1:
        raise HelloRefusedError(
            group, f"a ring of {ring_bytes} bytes can't hold a row; raise groups.lane_bytes"
        )
    deadline = time.monotonic() + timeout_s
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fd = shm_memory.create(ring_bytes)
    try:
        sock.settimeout(timeout_s)
        sock.connect("\0" + address.removeprefix("@"))
        socket.send_fds(sock, [hello.pack(ring_bytes=ring_bytes, router=router)], [fd])
        ready, _, _ = select.select([sock], [], [], max(deadline - time.monotonic(), 0))
        if not ready:
            raise LaneTimeoutError(group, f"no answer to the hello within {timeout_s:g} s")
        answer = sock.recv(MAX_MESSAGE)
        if not answer:
            raise LaneClosedError(group, "it closed the connection during the hello")
        check_answer(group, answer)
        return ShmRouterLane(
            group, Doorbell(sock, group), SharedMemory(fd, ring_bytes, dtype, hello.hidden_size)
        )
    except TimeoutError:
        sock.close()
        raise LaneTimeoutError(group, f"no connection within {timeout_s:g} s") from None
    except OSError as error:
        sock.close()
        raise LaneClosedError(group, f"can't connect: {error.strerror or error}") from None
    except Exception:
        sock.close()
        raise
    finally:
        os.close(fd)
