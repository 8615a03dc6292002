"""`python -m bench.router FOLDER MODE`: the router of `bench dispatch`, with its two expert groups.

A process of its own, so that it has the environment that raymoe gives to engines, and its peers have torch's own.
It reads one JSON command a line and answers with one: {"prepare": [sequences, rows], "to": FILE} writes the logits
of one step, {"run": N} takes N steps and tells the seconds of one.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.group import TOKEN, expert_groups, mode_name
from bench.steps import Packed, Step
from raymoe.checkpoint.folder import Checkpoint
from raymoe.checkpoint.router import load_router
from raymoe.checkpoint.slices import ExpertLoader
from raymoe.lanes.hello import Hello
from raymoe.model.attention import NAME as ATTENTION
from raymoe.model.context import run_experts
from raymoe.model.invariant_check import make_invariant
from raymoe.policy.threads import thread_environment

THREADS = 2


def main(folder: str, mode: str) -> None:
    """Serve commands until the standard input ends."""
    deterministic = mode == mode_name(True)
    path = Path(folder)
    checkpoint = Checkpoint.open(path)
    torch.set_num_threads(THREADS)
    loader = ExpertLoader(checkpoint)
    hello = Hello(TOKEN, checkpoint.fingerprint, "float32", loader.model.hidden_size, deterministic)
    router = load_router(checkpoint, run_experts, attention=ATTENTION)
    with expert_groups(path, loader, hello) as dispatcher:
        if deterministic:
            make_invariant(router, dispatcher.run)
        print("{}", flush=True)
        step = None
        for line in sys.stdin:
            command = json.loads(line)
            if "prepare" in command:
                step = Packed(router, dispatcher.run, *command["prepare"])
                torch.save(step.run().clone(), command["to"])
                answer: dict[str, float] = {}
            elif step is None:
                raise RuntimeError("no case is prepared")
            else:
                answer = {"seconds": step.timed(command["run"])}
            print(json.dumps(answer), flush=True)


class RemoteStep(Step):
    """A step of that process, which keeps the time itself."""

    def __init__(self, process: subprocess.Popen[str], sequences: int, rows: int) -> None:
        self._process = process
        with tempfile.TemporaryDirectory() as folder:
            file = f"{folder}/logits.pt"
            _ask(process, {"prepare": [sequences, rows], "to": file})
            self._logits: Tensor = torch.load(file)

    def run(self) -> Tensor:
        """The logits of its first step."""
        return self._logits

    def timed(self, repeats: int) -> float:
        return float(_ask(self._process, {"run": repeats})["seconds"])


@contextlib.contextmanager
def remote_router(path: Path, deterministic: bool = False) -> Iterator[subprocess.Popen[str]]:
    """The router process, loaded and connected to its groups."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.router", str(path), mode_name(deterministic)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **thread_environment(THREADS)},
    )
    with process:
        _answer(process)
        yield process


def _ask(process: subprocess.Popen[str], command: dict[str, Any]) -> dict[str, Any]:
    if process.stdin is None:
        raise RuntimeError("the router process has no standard input")
    process.stdin.write(json.dumps(command) + "\n")
    process.stdin.flush()
    return _answer(process)


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    line = process.stdout.readline() if process.stdout else ""
    if not line:
        raise RuntimeError("the router process ended; its error is above")
    answer: dict[str, Any] = json.loads(line)
    return answer


if __name__ == "__main__":
    main(*sys.argv[1:])
