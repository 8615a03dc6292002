"""`python -m bench.group FOLDER NAME FIRST LAST MODE`: one expert group as a plain process.

It prints its address, serves until its standard input ends, and needs no Ray.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raymoe.checkpoint.folder import Checkpoint
from raymoe.checkpoint.slices import ExpertLoader
from raymoe.dispatch.dispatcher import Dispatcher
from raymoe.experts.group import ExpertGroup
from raymoe.experts.serve import GroupServer
from raymoe.lanes.hello import Hello
from raymoe.lanes.shm import connect
from raymoe.policy.layout import GroupPlace, even_layout, even_slices
from raymoe.policy.threads import thread_environment

GROUPS = 2
TOKEN = "bench"


@contextlib.contextmanager
def expert_groups(path: Path, loader: ExpertLoader, hello: Hello) -> Iterator[Dispatcher]:
    """Two expert groups in processes of their own, and a dispatcher connected to them; in the mode of `hello`."""
    experts = [layer.experts for layer in loader.model.layers]
    slices = even_slices(experts[0], GROUPS)
    command = [sys.executable, "-m", "bench.group", str(path)]
    processes = [
        subprocess.Popen(
            [*command, f"g{n}", str(part.start), str(part.stop), mode_name(hello.deterministic)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **thread_environment(1)},
        )
        for n, part in enumerate(slices)
    ]
    try:
        places = []
        for n, process in enumerate(processes):
            address = process.stdout.readline().strip() if process.stdout else ""
            if not address:
                raise RuntimeError(f"expert group g{n} did not start")
            places.append(GroupPlace(f"g{n}", address))

        def open_lane(place: GroupPlace) -> Any:
            return connect(
                place.name, place.address, hello, ring_bytes=64 << 20, router="bench", timeout_s=10
            )

        dispatcher = Dispatcher(open_lane, silence_s=30)
        dispatcher.set_layout(even_layout(0, places, experts))
        with contextlib.closing(dispatcher):
            yield dispatcher
    finally:
        for process in processes:
            if process.stdin:
                process.stdin.close()
            process.wait(timeout=30)
            if process.stdout:
                process.stdout.close()


def mode_name(deterministic: bool) -> str:
    """How a mode is called on a command line."""
    return "deterministic" if deterministic else "normal"


def main(path: str, name: str, first: str, last: str, mode: str) -> None:
    """Load experts [first, last) of every layer and serve them."""
    checkpoint = Checkpoint.open(path)
    loader = ExpertLoader(checkpoint)
    deterministic = mode == mode_name(True)
    group = ExpertGroup(loader, name, deterministic)
    for layer in loader.model.layers:
        group.load_slice(layer.index, range(int(first), int(last)))
    hello = Hello(TOKEN, checkpoint.fingerprint, "float32", loader.model.hidden_size, deterministic)
    server = GroupServer(group, hello, threads=1)
    server.start()
    print(server.address, flush=True)
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
