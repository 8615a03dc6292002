"""A progress bar by bytes on stderr."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class ByteProgress:
    """Shows `advance`d bytes of `total` while the context is open; silent when stderr is not a terminal."""

    def __init__(self, label: str, total: int) -> None:
        console = Console(file=sys.stderr)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(label, total=total)

    def advance(self, n: int) -> None:
        """`n` more bytes are done. Several threads may call it."""
        self._progress.advance(self._task, n)

    @property
    def done(self) -> int:
        """Bytes so far."""
        return int(self._progress.tasks[0].completed)

    def __enter__(self) -> ByteProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
