"""`python -m bench.group FOLDER NAME FIRST LAST TOKEN`: one expert group as a plain process.

It prints its address, serves until its standard input ends, and needs no Ray.
"""

from __future__ import annotations

import sys

from raymoe.checkpoint.folder import Checkpoint
from raymoe.checkpoint.slices import ExpertLoader
from raymoe.experts.group import ExpertGroup
from raymoe.experts.serve import GroupServer
from raymoe.lanes.hello import Hello


def main(path: str, name: str, first: str, last: str, token: str) -> None:
    """Load experts [first, last) of every layer and serve them."""
    checkpoint = Checkpoint.open(path)
    loader = ExpertLoader(checkpoint)
    group = ExpertGroup(loader, name)
    for layer in loader.model.layers:
        group.load_slice(layer.index, range(int(first), int(last)))
    hello = Hello(token, checkpoint.fingerprint, "float32", loader.model.hidden_size)
    server = GroupServer(group, hello, threads=1)
    server.start()
    print(server.address, flush=True)
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
