"""The fixed binary header that crosses a lane's doorbell.

One record serves both directions. Offsets and lengths are bytes into the lane's rings; `budget_us` is what
is left of the step's time when the piece was sent; `busy_ns`, `queue_rows` and `queue_ns` are filled by the
reply: time spent on this piece, and the rows and estimated time still waiting behind it.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

PROTOCOL_VERSION = 1


class Kind(IntEnum):
    """What a doorbell message says."""

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    ROWS = 4
    REPLY = 5
    ERROR = 6


class Header(NamedTuple):
    """`(epoch, step, layer, piece)` names a piece; a reply repeats it, so no late one passes for another."""

    kind: int
    epoch: int
    step: int
    layer: int
    piece: int
    rows: int
    pairs: int
    segments: int
    request_at: int
    reply_at: int
    budget_us: int
    queue_rows: int = 0
    queue_ns: int = 0
    busy_ns: int = 0

    def pack(self) -> bytes:
        """As bytes, little-endian."""
        return _FORMAT.pack(*self)

    @classmethod
    def unpack(cls, data: bytes) -> Header:
        """The inverse of `pack`; what follows the header in `data` is left alone.

        Raises:
            ValueError: `data` is shorter than a header.
        """
        if len(data) < _FORMAT.size:
            raise ValueError(f"a lane header has {_FORMAT.size} bytes, got {len(data)}")
        return cls(*_FORMAT.unpack_from(data))

    @property
    def key(self) -> tuple[int, int, int, int]:
        """What names the piece."""
        return (self.epoch, self.step, self.layer, self.piece)


_FORMAT = struct.Struct("<B3xIQIIIIIQQQIQQ")
HEADER_BYTES = _FORMAT.size
MAX_MESSAGE = 4096
"""Longest doorbell message: a header, or a hello, or a header with the text of an error."""
