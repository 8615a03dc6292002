"""The lanes of one router, numbered as the layout numbers its groups."""

from __future__ import annotations

import logging
import select
from collections.abc import Callable

from raymoe.errors import LaneError
from raymoe.lanes.base import RouterLane
from raymoe.policy.layout import GroupPlace, Layout

log = logging.getLogger(__name__)

Connect = Callable[[GroupPlace], RouterLane]
"""Opens a lane within a bounded time, or raises LaneError."""


class LaneSet:
    """Living lanes by number, and why the others are lost."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._poll = select.poll()
        self._number_of: dict[int, int] = {}
        self.living: dict[int, RouterLane] = {}
        self.lost: dict[int, str] = {}
        self.names: tuple[str, ...] = ()

    def update(self, layout: Layout) -> None:
        """Open lanes to new groups and to lost ones that are still named, close those to groups that left.

        A group that can't be reached counts as lost: that shows when one of its experts is needed.
        """
        known = {lane.group: lane for lane in self.living.values()}
        self.living, self.lost = {}, {}
        self.names = tuple(place.name for place in layout.groups)
        for number, place in enumerate(layout.groups):
            lane = known.pop(place.name, None)
            try:
                self.living[number] = lane or self._connect(place)
            except LaneError as error:
                log.warning("%s", error)
                self.lost[number] = error.detail
        for lane in known.values():
            lane.close()
        self._poll = select.poll()
        self._number_of = {lane.fileno(): number for number, lane in self.living.items()}
        for fd in self._number_of:
            self._poll.register(fd, select.POLLIN)

    def wait(self, timeout_s: float) -> list[int]:
        """Numbers of the lanes with something to receive, end-of-file included."""
        return [self._number_of[fd] for fd, _ in self._poll.poll(timeout_s * 1000)]

    def lose(self, number: int, error: LaneError) -> None:
        """Never use this lane again: a group that wakes later writes into memory that nobody reads."""
        log.warning("%s", error)
        self.lost[number] = error.detail
        lane = self.living.pop(number)
        fd = lane.fileno()
        if fd in self._number_of:
            self._poll.unregister(fd)
            del self._number_of[fd]
        lane.close()

    def close(self) -> None:
        """Close all. Idempotent."""
        for lane in self.living.values():
            lane.close()
        self.living, self._number_of, self._poll = {}, {}, select.poll()
