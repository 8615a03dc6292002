"""A group's serve loop: one thread, one poll over all its doorbells, requests merged per layer."""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections import deque
from typing import Any

import torch

from raymoe.errors import HelloRefusedError, LaneClosedError
from raymoe.experts.group import ExpertGroup
from raymoe.lanes.base import GroupLane, Request
from raymoe.lanes.hello import Hello
from raymoe.lanes.shm_listener import ShmListener

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0
IDLE_POLL_MS = 500


class _Caller:
    """A lane, and what has arrived on it."""

    def __init__(self, lane: GroupLane) -> None:
        self.lane = lane
        self.waiting: deque[Request] = deque()


class GroupServer:
    """Serves one expert group over lanes. `start` and `stop` are called once; a lane may join at any time."""

    def __init__(self, group: ExpertGroup, hello: Hello, threads: int) -> None:
        self.group, self.threads = group, threads
        group.tick = self._tick
        self._listener = ShmListener(group.name, hello)
        self._callers: dict[int, _Caller] = {}
        self._greeting: dict[int, tuple[socket.socket, float]] = {}
        self._joining: deque[GroupLane] = deque()
        self._wake, self._woken = socket.socketpair()
        self._poll = select.poll()
        self._thread = threading.Thread(target=self._run, name=f"experts-{group.name}", daemon=True)
        self._stopping = False
        self._failed: str | None = None
        self._stats = {"requests": 0, "merged": 0, "rows": 0, "pairs": 0, "busy_ns": 0, "progress": 0}

    @property
    def address(self) -> str:
        """What routers connect to."""
        return self._listener.address

    @property
    def failed(self) -> str | None:
        """Why the serve thread ended, if it ended by a fault."""
        return self._failed

    def start(self) -> None:
        """Start the serve thread."""
        self._thread.start()

    def add_lane(self, lane: GroupLane) -> None:
        """Serve a lane that was opened elsewhere (inproc)."""
        self._joining.append(lane)
        self._wake.send(b"\0")

    def stop(self) -> None:
        """End the thread and close all lanes. Idempotent."""
        self._stopping = True
        if self._thread.is_alive():
            self._wake.send(b"\0")
            self._thread.join(timeout=30)
        for end in (self._listener, self._wake, self._woken):
            end.close()

    def stats(self) -> dict[str, Any]:
        """Counters since the start; `busy_ns` is the time spent computing."""
        return {**self._stats, "lanes": len(self._callers), **self.group.stats()}

    def _run(self) -> None:
        torch.set_num_threads(self.threads)
        try:
            with torch.inference_mode():
                self._loop()
        except Exception as error:
            # The routers see end-of-file at once and the controller reads `failed`.
            log.exception("expert group %s stops serving", self.group.name)
            self._failed = f"{type(error).__name__}: {error}"
        finally:
            for caller in list(self._callers.values()):
                caller.lane.close()
            for sock, _ in self._greeting.values():
                sock.close()
            self._listener.close()

    def _loop(self) -> None:
        self._poll.register(self._listener, select.POLLIN)
        self._poll.register(self._woken, select.POLLIN)
        while not self._stopping:
            busy = any(caller.waiting for caller in self._callers.values())
            for fd, _ in self._poll.poll(0 if busy else IDLE_POLL_MS):
                self._on_event(fd)
            self._expire_greetings()
            self._tick()
            self._serve_one_layer()

    def _tick(self) -> None:
        """Between computations and after each slot: a group that computes for long is not a silent one."""
        self._stats["progress"] += 1
        for caller in self._callers.values():
            caller.lane.tick()

    def _on_event(self, fd: int) -> None:
        caller = self._callers.get(fd)
        if caller is not None:
            self._read(fd, caller)
        elif fd in self._greeting:
            self._greet(fd)
        elif fd == self._listener.fileno():
            while (sock := self._listener.accept()) is not None:
                self._greeting[sock.fileno()] = (sock, time.monotonic() + HELLO_TIMEOUT_S)
                self._poll.register(sock, select.POLLIN)
        else:
            self._woken.recv(4096)
            while self._joining:
                self._admit(self._joining.popleft())

    def _admit(self, lane: GroupLane) -> None:
        self._callers[lane.fileno()] = _Caller(lane)
        self._poll.register(lane, select.POLLIN)

    def _greet(self, fd: int) -> None:
        sock, _ = self._greeting.pop(fd)
        self._poll.unregister(fd)
        try:
            lane = self._listener.greet(sock)
        except HelloRefusedError as error:
            log.warning("refused a caller: %s", error)
        else:
            self._admit(lane)

    def _expire_greetings(self) -> None:
        now = time.monotonic()
        for fd in [fd for fd, (_, deadline) in self._greeting.items() if deadline < now]:
            self._poll.unregister(fd)
            self._greeting.pop(fd)[0].close()

    def _read(self, fd: int, caller: _Caller) -> None:
        try:
            while (request := caller.lane.receive()) is not None:
                reason = self.group.check(request)
                if reason is None:
                    caller.waiting.append(request)
                else:
                    caller.lane.refuse(request, reason)
        except LaneClosedError as error:
            self._drop(fd, caller, error)

    def _drop(self, fd: int, caller: _Caller, error: LaneClosedError) -> None:
        log.info("%s", error)
        self._poll.unregister(fd)
        del self._callers[fd]
        caller.lane.close()

    def _serve_one_layer(self) -> None:
        """Serve the first waiting request's layer, with every lane's first request if it is for that layer.

        One per lane: two pieces of one router are cut at fixed rows, and merging them would change bits.
        """
        heads = [(fd, caller) for fd, caller in self._callers.items() if caller.waiting]
        if not heads:
            return
        layer = heads[0][1].waiting[0].header.layer
        batch = [(fd, c) for fd, c in heads if c.waiting[0].header.layer == layer]
        requests = [caller.waiting[0] for _, caller in batch]
        start = time.monotonic_ns()
        self.group.compute(requests)
        busy_ns = time.monotonic_ns() - start
        stats = self._stats
        stats["requests"] += len(requests)
        stats["merged"] += len(requests) > 1
        stats["busy_ns"] += busy_ns
        for _, caller in batch:
            request = caller.waiting.popleft()
            stats["rows"] += request.header.rows
            stats["pairs"] += request.header.pairs
        queue_rows = sum(r.header.rows for c in self._callers.values() for r in c.waiting)
        queue_ns = queue_rows * stats["busy_ns"] // max(stats["rows"], 1)
        for (fd, caller), request in zip(batch, requests, strict=True):
            try:
                caller.lane.reply(request, queue_rows, queue_ns, busy_ns)
            except LaneClosedError as error:
                self._drop(fd, caller, error)
            # Fair turns: who was served goes to the end of the line.
            if fd in self._callers:
                self._callers[fd] = self._callers.pop(fd)
