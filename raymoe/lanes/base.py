"""What every lane offers to its two ends.

Shape letters: T tokens of the step, R rows of a piece, P pairs of a piece, S segments, H hidden size.
A piece carries R rows and P pairs sorted by slot; its segments say how many pairs go to which slot. The reply
holds one unweighted row per pair, in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from raymoe.lanes.header import Header, Kind
from raymoe.lanes.ring import aligned

Ints = NDArray[np.int32]
SEGMENT_FIELDS = 3
"""A segment is (slot, generation, pairs)."""


@dataclass(frozen=True)
class Piece:
    """What a router asks of one group for one layer.

    `hidden_TH` holds the step's rows, `token_R` (int64) those that travel, or None for all of them;
    `row_P` points from a pair to its travelling row.
    """

    epoch: int
    step: int
    layer: int
    number: int
    hidden_TH: torch.Tensor
    token_R: NDArray[np.int64] | None
    row_P: Ints
    segments_S3: Ints
    budget_us: int

    @property
    def rows(self) -> int:
        """R."""
        return self.hidden_TH.shape[0] if self.token_R is None else self.token_R.shape[0]

    def header(self, request_at: int = 0, reply_at: int = 0) -> Header:
        """What announces it, with where its payload is and where the reply's rows go."""
        return Header(
            Kind.ROWS,
            self.epoch,
            self.step,
            self.layer,
            self.number,
            self.rows,
            self.row_P.shape[0],
            self.segments_S3.shape[0],
            request_at,
            reply_at,
            self.budget_us,
        )


class Reply(NamedTuple):
    """A group's answer. `out_PH` may be a view of the lane's memory: valid until `RouterLane.release`."""

    header: Header
    out_PH: torch.Tensor


@dataclass(frozen=True)
class Request:
    """A piece as the group sees it; results are written into `out_PH`. Views of the lane's memory."""

    header: Header
    rows_RH: torch.Tensor
    row_P: Ints
    segments_S3: Ints
    out_PH: torch.Tensor


class RouterLane(Protocol):
    """The router's end. No call blocks but opening and closing; not thread-safe."""

    group: str
    max_pairs: int
    """Pairs that always fit one piece of an otherwise empty lane."""

    def fileno(self) -> int:
        """Readable when a reply or end-of-file has arrived."""

    def send(self, piece: Piece) -> bool:
        """Send, with the reply's space reserved first. False = no room before a reply is released.

        Raises:
            LaneClosedError: the group is gone.
        """

    def receive(self) -> Reply | None:
        """The next reply, or None when none has arrived.

        Raises:
            LaneClosedError: the group is gone.
            StaleLayoutError: the group refused the piece.
        """

    def release(self, reply: Reply) -> None:
        """Give the reply's space back."""

    def progress(self) -> int:
        """A counter that rises while the group's serve loop is alive."""

    def in_flight(self) -> int:
        """Pieces sent and not answered."""

    def close(self) -> None:
        """Close this end; the group sees end-of-file. Idempotent."""


class GroupLane(Protocol):
    """The group's end."""

    def fileno(self) -> int:
        """Readable when a request or end-of-file has arrived."""

    def receive(self) -> Request | None:
        """The next request, or None.

        Raises:
            LaneClosedError: the router is gone, or broke the protocol.
        """

    def reply(self, request: Request, queue_rows: int, queue_ns: int, busy_ns: int) -> None:
        """Publish `request.out_PH`."""

    def refuse(self, request: Request, reason: str) -> None:
        """Say that the request can't be computed."""

    def tick(self) -> None:
        """Raise the progress counter."""

    def close(self) -> None:
        """Close this end. Idempotent."""


def request_bytes(rows: int, pairs: int, segments: int, hidden: int, itemsize: int) -> int:
    """Length of a request's payload: rows, then row indices, then segments."""
    return aligned(rows * hidden * itemsize) + aligned(pairs * 4) + segments * SEGMENT_FIELDS * 4


def max_pairs(ring_bytes: int, hidden: int, itemsize: int) -> int:
    """Pairs of a piece that fills at most half a ring in either direction, so two can be under way."""
    per_pair = hidden * itemsize + 4 + SEGMENT_FIELDS * 4
    return max((ring_bytes // 2 - 256) // per_pair, 0)
