"""A Unix SEQPACKET socket: carries headers, keeps message borders, shows a dead peer as end-of-file."""

from __future__ import annotations

import contextlib
import errno
import socket

from raymoe.errors import LaneClosedError
from raymoe.lanes.header import MAX_MESSAGE


class Doorbell:
    """One end. `peer` is named in errors. Sending never blocks."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.peer = peer
        self._sock = sock
        sock.setblocking(False)

    def fileno(self) -> int:
        """The socket's descriptor, -1 once closed."""
        return self._sock.fileno()

    def send(self, message: bytes) -> bool:
        """True when sent, False when the peer's queue is full.

        Raises:
            LaneClosedError: the peer is gone.
        """
        try:
            self._sock.send(message)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._closed(error) from None
        return True

    def receive(self) -> bytes | None:
        """The next message, or None.

        Raises:
            LaneClosedError: at end-of-file.
        """
        try:
            message = self._sock.recv(MAX_MESSAGE)
        except BlockingIOError:
            return None
        except OSError as error:
            raise self._closed(error) from None
        if not message:
            raise LaneClosedError(self.peer, "end of file")
        return message

    def close(self) -> None:
        """Idempotent. The shutdown wakes a peer even if a copy of the descriptor lives elsewhere."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _closed(self, error: OSError) -> LaneClosedError:
        return LaneClosedError(self.peer, errno.errorcode.get(error.errno or 0, "closed"))


def doorbells(near: str, far: str | None = None) -> tuple[Doorbell, Doorbell]:
    """Both ends of a new one inside this process; `near` and `far` name the peers of the two."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Doorbell(ours, near), Doorbell(theirs, near if far is None else far)
