"""What ends a command from outside: Ctrl-C, SIGTERM, and the terminal that closes."""

from __future__ import annotations

import signal
from types import FrameType

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_came: list[int] = []


class StopServer(KeyboardInterrupt):
    """A signal asked for the end. Calls of Ray turn it into a plain KeyboardInterrupt, and swallow all others."""


def exit_code() -> int | None:
    """Of a process that a signal ends; None when none came.

    Ctrl-C tells the shell that its command was interrupted; a service manager got the stop that it asked for.
    """
    if not _came:
        return None
    return 128 + signal.SIGINT if _came[0] == signal.SIGINT else 0


def catch() -> None:
    """Have these signals raise StopServer in the main thread. Who ignores SIGHUP (nohup) goes on doing so."""
    for number in ENDS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _stop)


def ignore() -> None:
    """From now on they have no effect. Stopping has deadlines, and half of it would leave processes behind."""
    for number in ENDS:
        signal.signal(number, signal.SIG_IGN)


def _stop(number: int, _frame: FrameType | None) -> None:
    _came.append(number)
    raise StopServer(signal.Signals(number).name)
