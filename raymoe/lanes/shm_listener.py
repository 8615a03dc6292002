"""The group's door for shm lanes: an abstract Unix socket, so no file is left behind."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket

import torch

from raymoe.errors import HelloRefusedError
from raymoe.lanes import shm_memory
from raymoe.lanes.doorbell import Doorbell
from raymoe.lanes.header import MAX_MESSAGE
from raymoe.lanes.hello import Hello, refuse, welcome
from raymoe.lanes.shm import ShmGroupLane
from raymoe.lanes.shm_memory import SharedMemory


class ShmListener:
    """Listens for routers. `address` is what they connect to."""

    def __init__(self, group: str, hello: Hello) -> None:
        self.group, self.hello = group, hello
        self.address = f"@raymoe-{secrets.token_hex(12)}"
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.bind("\0" + self.address[1:])
        self._sock.listen(64)
        self._sock.setblocking(False)

    def fileno(self) -> int:
        return self._sock.fileno()

    def accept(self) -> socket.socket | None:
        """A new caller, whose hello `greet` reads once it has arrived."""
        try:
            caller, _ = self._sock.accept()
        except OSError:
            return None
        caller.setblocking(False)
        return caller

    def greet(self, caller: socket.socket) -> ShmGroupLane:
        """Open the lane, or refuse it and close the caller.

        Raises:
            HelloRefusedError: with the reason that the caller was told.
        """
        fds: list[int] = []
        try:
            # At most one descriptor is taken; a caller that sends more loses them with MSG_CTRUNC.
            message, fds, flags, _ = socket.recv_fds(caller, MAX_MESSAGE, 1)
            fields, reason = self.hello.judge(message)
            if reason is None and (len(fds) != 1 or flags & socket.MSG_CTRUNC):
                reason = f"a shm lane's hello carries one memory descriptor, got {len(fds)}"
            if reason is None:
                reason = shm_memory.check(fds[0], fields.get("ring_bytes"))
            if reason is not None:
                with contextlib.suppress(OSError):
                    caller.send(refuse(reason))
                raise HelloRefusedError(self.group, reason)
            dtype: torch.dtype = getattr(torch, self.hello.dtype)
            memory = SharedMemory(fds[0], int(fields["ring_bytes"]), dtype, self.hello.hidden_size)
            caller.send(welcome(self.group))
        except OSError as error:
            caller.close()
            raise HelloRefusedError(self.group, f"the caller went away: {error}") from None
        except HelloRefusedError:
            caller.close()
            raise
        finally:
            for fd in fds:
                os.close(fd)
        return ShmGroupLane(Doorbell(caller, str(fields.get("router", "router"))), memory)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._sock.close()
