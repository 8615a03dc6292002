"""The lanes of one router, numbered as the layout numbers its groups."""

from __future__ import annotations

import logging
import select

from raymoe.dispatch.opener import Connect, Opener
from raymoe.errors import LaneError
from raymoe.lanes.base import RouterLane
from raymoe.policy.layout import GroupPlace, Layout

log = logging.getLogger(__name__)


class LaneSet:
    """Living lanes by number, and why the others are lost."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._poll = select.poll()
        self._opener = Opener(connect)
        self._number_of: dict[int, int] = {}
        self._places: tuple[GroupPlace, ...] = ()
        self.living: dict[int, RouterLane] = {}
        self.lost: dict[int, str] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The groups, by lane number."""
        return tuple(place.name for place in self._places)

    def update(self, layout: Layout) -> None:
        """Open lanes to new groups, close those to groups that left.

        A group that can't be reached counts as lost: that shows when one of its experts is needed. Those that
        were lost before stay so until `reconnect` reaches them.
        """
        known = {lane.group: lane for lane in self.living.values()}
        lost = {self._places[number]: why for number, why in self.lost.items()}
        self._places, self.living, self.lost = layout.groups, {}, {}
        for number, place in enumerate(layout.groups):
            lane = known.pop(place.name, None)
            if lane is None and place in lost:
                self.lost[number] = lost[place]
                continue
            try:
                self.living[number] = lane or self._connect(place)
            except LaneError as error:
                log.warning("%s", error)
                self.lost[number] = error.detail
        for lane in known.values():
            lane.close()
        self._poll = select.poll()
        self._number_of = {}
        for number in self.living:
            self._watch(number)

    def reconnect(self) -> None:
        """Take in the lanes that a thread has opened to lost groups since, and have it try again.

        A thread, since a group that hangs keeps `connect` waiting, and a step must not wait with it.
        """
        for place, lane in self._opener.opened():
            number = self._places.index(place) if place in self._places else -1
            if number not in self.lost:
                lane.close()
                continue
            log.info("lane to expert group %s is open again", place.name)
            del self.lost[number]
            self.living[number] = lane
            self._watch(number)
        self._opener.open([self._places[number] for number in self.lost])

    def notice(self) -> None:
        """Lose the lanes that are at end-of-file. To be called while nothing is in flight."""
        for number in self.wait(0):
            try:
                reply = self.living[number].receive()
                if reply is not None:
                    self.living[number].release(reply)
            except LaneError as error:
                self.lose(number, error)

    def _watch(self, number: int) -> None:
        fd = self.living[number].fileno()
        self._number_of[fd] = number
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
        self._opener.close()
        for lane in self.living.values():
            lane.close()
        self.living, self._number_of, self._poll = {}, {}, select.poll()
