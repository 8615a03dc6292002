"""Who may write where: space of a lane's rings, given out by the router alone."""

from __future__ import annotations

from collections import deque

ALIGN = 64
"""Every block starts on a cache line, which also suits every dtype."""


def aligned(size: int) -> int:
    """`size` rounded up to `ALIGN`."""
    return (size + ALIGN - 1) // ALIGN * ALIGN


class Ring:
    """Contiguous blocks of a fixed span, taken in order and given back in any order.

    Space is reused once everything older has been given back, so a block that a late writer may still touch
    is never handed out while its piece is in flight.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._blocks: deque[list[int]] = deque()  # [start, length, 1 while in use]
        self._by_start: dict[int, list[int]] = {}

    def reserve(self, length: int) -> int | None:
        """Start of a free block of `length` bytes, or None while there is no room."""
        length = max(aligned(length), ALIGN)
        if length > self.size:
            raise ValueError(f"a block of {length} bytes can't fit a ring of {self.size}")
        if not self._blocks:
            start = 0
        else:
            oldest, newest = self._blocks[0][0], self._blocks[-1]
            start = newest[0] + newest[1]
            if newest[0] >= oldest:
                if start + length > self.size:
                    start = 0
                    if length > oldest:
                        return None
            elif start + length > oldest:
                return None
        block = [start, length, 1]
        self._blocks.append(block)
        self._by_start[start] = block
        return start

    def release(self, start: int) -> None:
        """Give the block at `start` back."""
        self._by_start.pop(start)[2] = 0
        while self._blocks and not self._blocks[0][2]:
            self._blocks.popleft()

    @property
    def used(self) -> int:
        """Bytes in use."""
        return sum(block[1] for block in self._by_start.values())
