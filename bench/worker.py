"""A process of a benchmark's own that takes one JSON job a line and answers each with one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any


class Worker:
    """`python -m MODULE ARGUMENTS...`, which prints `{}` when it is ready. Use as a context manager.

    It starts at once; the first job waits until it is ready.
    """

    def __init__(self, module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self.module = module
        self._ready = False
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        # End-of-file ends it; __exit__ waits.
        self.process.__exit__(None, None, None)

    def ask(self, **job: Any) -> dict[str, Any]:
        """Send a job and wait for its answer."""
        if not self._ready:
            self._answer()
            self._ready = True
        if self.process.stdin is None:
            raise RuntimeError(f"{self.module} has no standard input")
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline() if self.process.stdout else ""
        if not line:
            raise RuntimeError(f"{self.module} ended; its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer
