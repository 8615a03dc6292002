"""The reference lane: one actor call for each piece, its rows as Ray objects. Slow, and the same on every host.

This is the router's end; `object_store_door` is the group's. Answers come in Ray's threads; a socket pair inside
the process makes them something to poll, as on any other lane. Pieces may overtake each other on the way. Ray
frees an object once nobody refers to it, which is when its piece is answered or its group dead.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from raymoe.errors import HelloRefusedError, LaneClosedError, LaneTimeoutError, StaleLayoutError
from raymoe.lanes.base import Piece, Reply, max_pairs, request_bytes
from raymoe.lanes.doorbell import doorbells
from raymoe.lanes.header import HEADER_BYTES, Header
from raymoe.lanes.hello import Hello, check_answer
from raymoe.lanes.object_store_door import Answer, as_bytes, as_rows
from raymoe.lanes.ring import aligned

MAX_IN_FLIGHT = 64
_joining = threading.Lock()


class ObjectStoreRouterLane:
    """See `RouterLane`. Opened by `connect`. `ring_bytes` bounds what is under way in each direction."""

    def __init__(self, group: str, actor: Any, lane: str, hello: Hello, ring_bytes: int) -> None:
        self.group = group
        self._actor, self._lane = actor, lane
        self._dtype: torch.dtype = getattr(torch, hello.dtype)
        self._hidden = hello.hidden_size
        self.max_pairs = max_pairs(ring_bytes, self._hidden, self._dtype.itemsize)
        self._request_room = self._reply_room = ring_bytes
        self._bell, self._ring = doorbells(group)
        self._arrived: deque[Answer] = deque()
        self._sent: dict[tuple[int, int, int, int], Header] = {}
        self._end: str | None = None
        self._progress, self._asking = 0, False
        # The first call ends with the lane. The second tells the group when this process is gone: it waits for the
        # first one's result, which Ray ties to this process.
        end = self._call(lambda _: self._finish("it closed the lane"), "end")
        self._call(lambda _: None, "watch", [end])

    def fileno(self) -> int:
        return self._bell.fileno()

    def send(self, piece: Piece) -> bool:
        if self._end is not None:
            raise LaneClosedError(self.group, self._end)
        header = piece.header()
        request, reply = self._room(header)
        if len(self._sent) >= MAX_IN_FLIGHT or request > self._request_room or reply > self._reply_room:
            return False
        rows = piece.hidden_TH
        if piece.token_R is not None:
            rows = rows.index_select(0, torch.from_numpy(piece.token_R))
        self._request_room -= request
        self._reply_room -= reply
        self._sent[header.key] = header
        self._call(self._take, "ask", header.pack(), as_bytes(rows), piece.row_P, piece.segments_S3)
        return True

    def receive(self) -> Reply | None:
        try:
            if self._bell.receive() is None:
                return None
        except LaneClosedError:
            raise LaneClosedError(self.group, self._end or "closed") from None
        message, out = self._arrived.popleft()
        header = Header.unpack(message)
        sent = self._sent.pop(header.key, None)
        if sent is None:
            raise LaneClosedError(self.group, f"a reply to {header.key}, which was not asked")
        request, reply = self._room(sent)
        self._request_room += request
        if out is None:
            self._reply_room += reply
            raise StaleLayoutError(self.group, message[HEADER_BYTES:].decode(errors="replace"))
        return Reply(header, as_rows(out, sent.pairs, self._dtype))

    def release(self, reply: Reply) -> None:
        self._reply_room += self._room(reply.header)[1]

    def progress(self) -> int:
        """What the group said last; each call asks it again."""
        if not self._asking and self._end is None:
            self._asking = True
            self._call(self._take_progress, "progress")
        return self._progress

    def in_flight(self) -> int:
        return len(self._sent)

    def close(self) -> None:
        if self._bell.fileno() < 0:
            return
        self._bell.close()
        if self._end is None and ray.is_initialized():
            self._call(lambda _: None, "close")
        self._finish("closed")
        self._sent.clear()
        self._arrived.clear()

    def _room(self, header: Header) -> tuple[int, int]:
        """Bytes that a piece takes of each direction's room."""
        width, item = self._hidden, self._dtype.itemsize
        request = request_bytes(header.rows, header.pairs, header.segments, width, item)
        return request, aligned(header.pairs * width * item)

    def _call(self, then: Callable[[Any], None], name: str, *args: Any) -> Any:
        """Call the group; `then` gets the answer in one of Ray's threads."""
        ref = self._actor.lane.remote(name, self._lane, *args)
        ref.future().add_done_callback(partial(self._on_answer, then))
        return ref

    def _on_answer(self, then: Callable[[Any], None], future: Any) -> None:
        try:
            answer = future.result()
        except RayTaskError as error:
            self._finish(str(error.cause))
        except RayError as error:
            self._finish(first_line(error))
        else:
            then(answer)

    def _take(self, answer: Answer) -> None:
        if self._end is None:  # what comes too late is nobody's, and must not be kept
            self._arrived.append(answer)
            with contextlib.suppress(LaneClosedError):  # closed just now
                self._ring.send(b"\0")

    def _take_progress(self, progress: int) -> None:
        self._progress, self._asking = progress, False

    def _finish(self, reason: str) -> None:
        if self._end is None:
            self._end = reason
            self._ring.close()


def connect(
    group: str, address: str, hello: Hello, *, ring_bytes: int, router: str, timeout_s: float
) -> ObjectStoreRouterLane:
    """Open a lane to the actor at `address`: Ray's own address, a namespace and the actor's name, with `/` between.

    A process that is in no Ray yet joins that one as a driver.

    Raises:
        LaneClosedError: there is no such actor, or it died.
        LaneTimeoutError: no answer within `timeout_s` seconds.
        HelloRefusedError: the two sides don't fit together.
    """
    dtype: torch.dtype = getattr(torch, hello.dtype)
    ring_bytes = aligned(ring_bytes)
    if max_pairs(ring_bytes, hello.hidden_size, dtype.itemsize) < 1:
        raise HelloRefusedError(
            group, f"a ring of {ring_bytes} bytes can't hold a row; raise groups.lane_bytes"
        )
    cluster, namespace, name = address.split("/")
    try:
        with _joining:
            if not ray.is_initialized():
                ray.init(
                    address=cluster, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR
                )
        actor = ray.get_actor(name, namespace=namespace)
        answer, lane = ray.get(actor.lane.remote("open", "", hello.pack(router=router)), timeout=timeout_s)
    except GetTimeoutError:
        raise LaneTimeoutError(group, f"no answer to the hello within {timeout_s:g} s") from None
    except (RayError, ValueError, ConnectionError) as error:
        raise LaneClosedError(group, f"can't connect: {first_line(error)}") from None
    check_answer(group, answer)
    return ObjectStoreRouterLane(group, actor, lane, hello, ring_bytes)


def first_line(error: Exception) -> str:
    """Of one of Ray's long texts."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
