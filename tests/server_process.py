"""`raymoe serve` as a subprocess, the way an operator runs it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from raymoe.actors.ports import free_port

ROOT = Path(__file__).parents[1]
RAYMOE = [sys.executable, "-m", "raymoe.cli"]


def environment(runtime: Path, **more: str) -> dict[str, str]:
    """The caller's environment without Ray's or raymoe's settings, and a state folder of its own."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "RAYMOE_"))}
    return {**kept, "XDG_RUNTIME_DIR": str(runtime), "PYTHONWARNINGS": "", "OMP_NUM_THREADS": "1", **more}


def raymoe(runtime: Path, *args: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command of raymoe to its end."""
    return subprocess.run(
        [*RAYMOE, *args], env=environment(runtime, **more), capture_output=True, text=True, timeout=120
    )


class Server:
    """A running server. `log` holds what it printed."""

    def __init__(
        self,
        runtime: Path,
        command: list[str],
        port: int,
        *,
        cwd: Path | None = None,
        scheme: str = "http",
        verify: ssl.SSLContext | bool = True,
    ) -> None:
        self.runtime, self.port, self._verify = runtime, port, verify
        self.url = f"{scheme}://127.0.0.1:{port}"
        self.log = runtime / f"{port}.log"
        with self.log.open("w") as log:
            # A session of its own, so that a signal to its group is what Ctrl-C in a terminal is.
            self.process = subprocess.Popen(
                command, env=environment(runtime), stdout=log, stderr=log, start_new_session=True, cwd=cwd
            )

    @classmethod
    def serve(cls, runtime: Path, model: Path, *args: str) -> Server:
        port = free_port("127.0.0.1")
        server = cls(runtime, [*RAYMOE, "serve", str(model), "--port", str(port), *args], port)
        server.wait_ready()
        return server

    def wait_ready(self, within_s: float = 120.0) -> None:
        deadline = time.monotonic() + within_s
        while True:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            try:
                if httpx.get(f"{self.url}/ready", timeout=10, verify=self._verify).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.2)

    def family(self) -> list[psutil.Process]:
        """All living processes that belong to it."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def called(self, part: str) -> list[psutil.Process]:
        """Its living processes with `part` in their command line."""
        found = []
        for process in self.family():
            with contextlib.suppress(psutil.Error):  # it ended, or nobody has reaped it yet
                if part in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def engines(self) -> list[psutil.Process]:
        """The living engine processes."""
        return self.called("raymoe.engine.process")

    def status(self) -> dict[str, Any]:
        done = raymoe(self.runtime, "status", "--json")
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def stop(self, number: int = signal.SIGINT) -> int:
        """Signal its whole process group, as Ctrl-C does, and wait."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)
        return self.process.wait(timeout=90)

    def complete(self, prompt: list[int], max_tokens: int, **more: Any) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=120)


def left_over(family: list[psutil.Process], within_s: float = 15.0) -> list[str]:
    """Which of these processes still run after a while. A zombie is gone: nobody reaps it in a container."""
    deadline = time.monotonic() + within_s
    while True:
        left = []
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    left.append(" ".join(process.cmdline()))
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)
