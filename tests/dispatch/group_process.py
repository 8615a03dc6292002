"""An expert group in a process of its own, over shm lanes, with random delays."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch

from raymoe.experts.group import ExpertGroup
from raymoe.experts.serve import GroupServer
from raymoe.lanes.base import Request
from tests.doubles import HELLO, MemoryLoader


def serve(pipe: Connection, name: str, experts: list[int]) -> None:
    """Send the address, then take the longest delay of a computation, in seconds, again and again, until EOF."""
    torch.set_num_threads(1)
    loader = MemoryLoader()
    group = ExpertGroup(loader, name)
    for layer in range(len(loader.modules)):
        group.load_slice(layer, experts)
    compute, longest = group.compute, 0.0

    def late(requests: Sequence[Request]) -> None:
        time.sleep(random.random() * longest)
        compute(requests)

    group.compute = late  # type: ignore[method-assign]
    server = GroupServer(group, HELLO, threads=1)
    server.start()
    pipe.send(server.address)
    try:
        while True:
            longest = pipe.recv()
    except EOFError:
        server.stop()
