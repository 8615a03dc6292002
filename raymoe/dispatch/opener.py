"""Opens lanes to lost groups in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue

from raymoe.errors import LaneError
from raymoe.lanes.base import RouterLane
from raymoe.policy.layout import GroupPlace

Connect = Callable[[GroupPlace], RouterLane]
"""Opens a lane within a bounded time, or raises LaneError."""

RETRY_S = 0.5
"""The least time between two rounds of tries."""


class Opener:
    """One round of tries at a time. All but the tries happens in the caller's thread."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._opened: SimpleQueue[tuple[GroupPlace, RouterLane]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._tried = float("-inf")
        self._closed = False

    def open(self, places: Sequence[GroupPlace]) -> None:
        """Try all of `places` once, unless a round is under way or has just been."""
        now = time.monotonic()
        if not places or now - self._tried < RETRY_S or (self._thread and self._thread.is_alive()):
            return
        self._tried = now
        self._thread = threading.Thread(target=self._try, args=(tuple(places),), name="opener", daemon=True)
        self._thread.start()

    def opened(self) -> Iterator[tuple[GroupPlace, RouterLane]]:
        """What has been opened since the last time; whoever takes a lane owns it."""
        while True:
            try:
                yield self._opened.get_nowait()
            except Empty:
                return

    def close(self) -> None:
        """Close the lanes that nobody took. Idempotent."""
        self._closed = True
        for _, lane in self.opened():
            lane.close()

    def _try(self, places: tuple[GroupPlace, ...]) -> None:
        for place in places:
            try:
                lane = self._connect(place)
            except LaneError:
                continue  # why it was lost is known; the next round tries again
            self._opened.put((place, lane))
        if self._closed:
            self.close()
