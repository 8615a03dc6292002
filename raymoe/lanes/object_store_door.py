"""The expert group's end of object_store lanes: between the event loop of its actor and its serve thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raymoe.errors import LaneClosedError
from raymoe.lanes.base import SEGMENT_FIELDS, Ints, Request
from raymoe.lanes.doorbell import doorbells
from raymoe.lanes.header import Header, Kind
from raymoe.lanes.hello import Hello, refuse, welcome

log = logging.getLogger(__name__)

WATCH_S = 60.0
Bytes = NDArray[np.uint8]
Answer = tuple[bytes, Bytes | None]
"""A header and the rows that answer it, or a header with the reason of a refusal behind it."""


def as_bytes(rows: torch.Tensor) -> Bytes:
    """NumPy has no bfloat16, so rows of every dtype travel as bytes."""
    return rows.contiguous().view(torch.uint8).numpy()


def as_rows(data: Bytes, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `as_bytes`, and a copy: what Ray hands out can't be written to, which torch doesn't know."""
    return torch.from_numpy(np.array(data)).view(dtype).view(rows, -1)


class ObjectStoreGroupLane:
    """See `GroupLane`, for the serve thread; `ask` and `leave` are for the event loop."""

    def __init__(self, router: str, hello: Hello) -> None:
        self._router = router
        self._dtype: torch.dtype = getattr(torch, hello.dtype)
        self._hidden = hello.hidden_size
        self._loop = asyncio.get_running_loop()
        self._bell, self._ring = doorbells(router)
        self._requests: deque[Request] = deque()
        self._answers: dict[tuple[int, int, int, int], asyncio.Future[Answer]] = {}
        self.progress, self.watched = 0, False
        self.ended = asyncio.Event()

    def fileno(self) -> int:
        return self._bell.fileno()

    def receive(self) -> Request | None:
        return None if self._bell.receive() is None else self._requests.popleft()

    def reply(self, request: Request, queue_rows: int, queue_ns: int, busy_ns: int) -> None:
        header = request.header._replace(
            kind=Kind.REPLY, queue_rows=queue_rows, queue_ns=queue_ns, busy_ns=busy_ns
        )
        self._in_loop(self._resolve, header, header.pack(), as_bytes(request.out_PH))

    def refuse(self, request: Request, reason: str) -> None:
        header = request.header._replace(kind=Kind.ERROR)
        self._in_loop(self._resolve, header, header.pack() + reason.encode()[:1024], None)

    def tick(self) -> None:
        self.progress += 1

    def close(self) -> None:
        self._bell.close()
        self._in_loop(self._finish)

    def leave(self) -> None:
        """The router is gone: the serve thread sees end-of-file. Idempotent."""
        self._ring.close()

    async def ask(self, message: bytes, rows: Bytes, row_P: Ints, segments_S3: Ints) -> Answer:
        """Hand a piece to the serve thread and wait for the answer.

        Raises:
            LaneClosedError: the lane ended, or what was sent does not fit its header.
        """
        header = Header.unpack(message)
        width = self._hidden * self._dtype.itemsize
        wanted = ((header.rows, width), (header.pairs,), (header.segments, SEGMENT_FIELDS))
        if (rows.shape, row_P.shape, segments_S3.shape) != wanted or header.key in self._answers:
            self.leave()
            raise LaneClosedError(self._router, f"protocol broken: {rows.shape} rows with {header}")
        out_PH = torch.empty(header.pairs, self._hidden, dtype=self._dtype)
        rows_RH = as_rows(rows, header.rows, self._dtype)
        self._requests.append(Request(header, rows_RH, np.array(row_P), np.array(segments_S3), out_PH))
        if not self._ring.send(b"\0"):
            raise LaneClosedError(self._router, "it sends more than the lane takes")
        answer = self._answers[header.key] = self._loop.create_future()
        return await answer

    def _in_loop(self, act: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop ends with its actor
            self._loop.call_soon_threadsafe(act, *args)

    def _resolve(self, header: Header, message: bytes, out: Bytes | None) -> None:
        answer = self._answers.pop(header.key, None)
        if answer is not None and not answer.done():
            answer.set_result((message, out))

    def _finish(self) -> None:
        self._ring.close()
        self.ended.set()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(LaneClosedError(self._router, "the group closed the lane"))
        self._answers.clear()


class Door:
    """Where routers open their lanes. `admit` gets each new one."""

    def __init__(self, group: str, hello: Hello, admit: Callable[[ObjectStoreGroupLane], None]) -> None:
        self._group, self._hello, self._admit = group, hello, admit
        self._lanes: dict[str, ObjectStoreGroupLane] = {}

    async def call(self, name: str, lane: str, *args: Any) -> Any:
        """What a router's end says. `open` returns the name of a new lane, its key for everything else.

        Raises:
            LaneClosedError: there is no such lane, or no more.
        """
        if name == "open":
            return self._open(*args)
        calls: dict[str, Callable[..., Awaitable[Any]]] = {
            "ask": ObjectStoreGroupLane.ask,
            "end": self._end,
            "watch": self._watch,
            "progress": self._progress,
            "close": self._close,
        }
        found = self._lanes.get(lane)
        if found is None or name not in calls:
            raise LaneClosedError(self._group, f"no such lane, or no call {name!r} to it")
        return await calls[name](found, *args)

    def _open(self, message: bytes) -> tuple[bytes, str]:
        fields, reason = self._hello.judge(message)
        if reason is not None:
            log.warning("refused a caller: %s", reason)
            return refuse(reason), ""
        name = secrets.token_hex(16)
        lane = self._lanes[name] = ObjectStoreGroupLane(str(fields.get("router", "router")), self._hello)
        self._admit(lane)
        # A caller that dies between its hello and its `watch` would never be missed.
        asyncio.get_running_loop().call_later(WATCH_S, _leave_unwatched, lane)
        return welcome(self._group), name

    async def _end(self, lane: ObjectStoreGroupLane) -> None:
        await lane.ended.wait()
        self._lanes = {name: other for name, other in self._lanes.items() if other is not lane}

    async def _watch(self, lane: ObjectStoreGroupLane, refs: list[Any]) -> None:
        lane.watched = True
        # Ray answers with an error when the process that owns the reference is gone.
        gone = asyncio.ensure_future(_value(refs[0]))
        await asyncio.wait({gone})
        gone.exception()
        lane.leave()

    async def _progress(self, lane: ObjectStoreGroupLane) -> int:
        return lane.progress

    async def _close(self, lane: ObjectStoreGroupLane) -> None:
        lane.leave()


def _leave_unwatched(lane: ObjectStoreGroupLane) -> None:
    if not lane.watched:
        lane.leave()


async def _value(ref: Any) -> Any:
    return await ref
