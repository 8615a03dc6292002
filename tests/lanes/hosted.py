"""An actor that holds the group's ends of object_store lanes, and what stands for such an end in the test."""

from __future__ import annotations

import select
import time
from typing import Any

import numpy as np
import ray
import torch

from raymoe.lanes.base import Request
from raymoe.lanes.hello import Hello
from raymoe.lanes.object_store_door import Door, ObjectStoreGroupLane, as_bytes, as_rows

NAMESPACE = "serve"


class LaneHost:
    """What an expert group's actor is to a lane, with the serve thread's part done by the test."""

    def __init__(self, group: str, hello: Hello) -> None:
        self._lanes: list[ObjectStoreGroupLane] = []
        self._requests: list[Request] = []
        self._door = Door(group, hello, self._lanes.append)

    async def lane(self, name: str, lane: str, *args: Any) -> Any:
        return await self._door.call(name, lane, *args)

    async def count(self) -> int:
        return len(self._lanes)

    async def open_lanes(self) -> int:
        return len(self._door._lanes)

    async def ready(self, index: int) -> bool:
        return bool(select.select([self._lanes[index]], [], [], 0)[0])

    async def receive(self, index: int) -> Any:
        request = self._lanes[index].receive()
        if request is None:
            return None
        self._requests.append(request)
        header, rows = request.header, as_bytes(request.rows_RH)
        return len(self._requests) - 1, header, rows, request.row_P, request.segments_S3

    async def reply(self, index: int, number: int, out: Any, figures: tuple[int, int, int]) -> None:
        request = self._requests[number]
        request.out_PH.copy_(as_rows(out, request.header.pairs, request.out_PH.dtype))
        self._lanes[index].reply(request, *figures)

    async def refuse(self, index: int, number: int, reason: str) -> None:
        self._lanes[index].refuse(self._requests[number], reason)

    async def tick(self, index: int) -> None:
        self._lanes[index].tick()

    async def close(self, index: int) -> None:
        self._lanes[index].close()


class HostedGroupLane:
    """A `GroupLane` whose work an actor does. Has `wait` instead of `fileno`."""

    def __init__(self, host: Any, hello: Hello) -> None:
        self._host, self._dtype = host, getattr(torch, hello.dtype)
        self._hidden = hello.hidden_size
        self._index = self._ask("count") - 1
        self._numbers: dict[int, int] = {}

    def wait(self, within_s: float = 10) -> bool:
        deadline = time.monotonic() + within_s
        while not self._ask("ready", self._index):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def receive(self) -> Request | None:
        found = self._ask("receive", self._index)
        if found is None:
            return None
        number, header, rows, row_P, segments_S3 = found
        out_PH = torch.empty(header.pairs, self._hidden, dtype=self._dtype)
        rows_RH = as_rows(rows, header.rows, self._dtype)
        request = Request(header, rows_RH, np.array(row_P), np.array(segments_S3), out_PH)
        self._numbers[id(request)] = number
        return request

    def reply(self, request: Request, queue_rows: int, queue_ns: int, busy_ns: int) -> None:
        figures = (queue_rows, queue_ns, busy_ns)
        self._ask("reply", self._index, self._numbers[id(request)], as_bytes(request.out_PH), figures)

    def refuse(self, request: Request, reason: str) -> None:
        self._ask("refuse", self._index, self._numbers[id(request)], reason)

    def tick(self) -> None:
        self._ask("tick", self._index)

    def close(self) -> None:
        self._ask("close", self._index)

    def _ask(self, name: str, *args: Any) -> Any:
        return ray.get(getattr(self._host, name).remote(*args), timeout=30)


def start_host(name: str, hello: Hello) -> tuple[Any, str]:
    """A new host, and the address of lanes to it."""
    host = ray.remote(LaneHost).options(name=name, namespace=NAMESPACE, num_cpus=0).remote(name, hello)
    ray.get(host.count.remote(), timeout=60)
    return host, f"{ray.get_runtime_context().gcs_address}/{NAMESPACE}/{name}"
