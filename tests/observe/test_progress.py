from __future__ import annotations

import io
from threading import Thread

import pytest

from raymoe.observe.progress import ByteProgress


def test_silent_when_stderr_is_not_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with ByteProgress("Loading", 1000) as progress:
        progress.advance(400)
        progress.advance(600)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""
    assert progress.done == 1000


def test_shows_label_and_bytes_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with ByteProgress("Loading experts", 2048) as progress:
        progress.advance(2048)
    assert "Loading experts" in screen.getvalue()
    assert "2.0/2.0 KiB" in screen.getvalue()


def test_threads_may_advance_at_once() -> None:
    with ByteProgress("Loading", 4000) as progress:
        threads = [Thread(target=lambda: [progress.advance(1) for _ in range(1000)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert progress.done == 4000
