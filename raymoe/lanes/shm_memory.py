"""The memory of a shm lane: one page of control words, the request ring, the reply ring."""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np
import torch

from raymoe.lanes.base import SEGMENT_FIELDS, Request, request_bytes
from raymoe.lanes.header import Header
from raymoe.lanes.ring import aligned

CONTROL_BYTES = 4096
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def create(ring_bytes: int) -> int:
    """Descriptor of new anonymous memory for two rings of `ring_bytes`.

    Its size is sealed: a peer that could shrink the file would turn our next access into a bus error.
    """
    fd = os.memfd_create("raymoe-lane", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, CONTROL_BYTES + 2 * ring_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    return fd


def check(fd: int, ring_bytes: object) -> str | None:
    """Why a caller's memory can't be used."""
    if not isinstance(ring_bytes, int) or ring_bytes <= 0:
        return f"ring_bytes {ring_bytes!r} is not a size"
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return "the descriptor is not a memfd"
    if seals & SEALS != SEALS:
        return "the memory's size is not sealed"
    size = os.fstat(fd).st_size
    if size != CONTROL_BYTES + 2 * ring_bytes:
        return f"the memory has {size} bytes, its rings want {CONTROL_BYTES + 2 * ring_bytes}"
    return None


class SharedMemory:
    """One mapping, and views into it."""

    def __init__(self, fd: int, ring_bytes: int, dtype: torch.dtype, hidden: int) -> None:
        self._map = mmap.mmap(fd, CONTROL_BYTES + 2 * ring_bytes)
        self.ring_bytes, self.dtype, self.hidden = ring_bytes, dtype, hidden
        self.itemsize = dtype.itemsize
        self.control = np.frombuffer(self._map, dtype=np.uint64, count=CONTROL_BYTES // 8)
        self._elements = torch.frombuffer(self._map, dtype=dtype)
        self._ints = np.frombuffer(self._map, dtype=np.int32)

    def rows(self, at: int, rows: int) -> torch.Tensor:
        """View [rows, H] at byte `at` of the mapping."""
        first = at // self.itemsize
        return self._elements[first : first + rows * self.hidden].view(rows, self.hidden)

    def ints(self, at: int, count: int) -> np.ndarray:
        """View of int32s at byte `at`."""
        return self._ints[at // 4 : at // 4 + count]

    def request(self, header: Header) -> Request:
        """The views of a request. Offsets are checked: a bad header must not reach outside the rings."""
        length = request_bytes(header.rows, header.pairs, header.segments, self.hidden, self.itemsize)
        reply = header.pairs * self.hidden * self.itemsize
        if header.request_at + length > self.ring_bytes or header.reply_at + reply > self.ring_bytes:
            raise ValueError("a header points outside its rings")
        at = CONTROL_BYTES + header.request_at
        rows = self.rows(at, header.rows)
        at += aligned(header.rows * self.hidden * self.itemsize)
        row_P = self.ints(at, header.pairs)
        at += aligned(header.pairs * 4)
        segments = self.ints(at, header.segments * SEGMENT_FIELDS).reshape(header.segments, SEGMENT_FIELDS)
        out = self.rows(CONTROL_BYTES + self.ring_bytes + header.reply_at, header.pairs)
        return Request(header, rows, row_P, segments, out)
