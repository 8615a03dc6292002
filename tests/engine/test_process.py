"""A real engine process, spoken to by its client, with expert groups in this process over shared memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from raymoe.checkpoint.folder import Checkpoint
from raymoe.checkpoint.slices import ExpertLoader
from raymoe.engine.client import EngineClient
from raymoe.engine.messages import EngineConfig, GenerateRequest
from raymoe.errors import (
    CheckpointError,
    ContextLengthError,
    EngineError,
    ExpertUnavailableError,
    MemoryLimitError,
    RouterLostError,
)
from raymoe.experts.group import ExpertGroup
from raymoe.experts.serve import GroupServer
from raymoe.lanes.hello import Hello
from raymoe.policy.layout import GroupPlace, Layout, even_layout, even_slices
from tests.engine.doubles import generated, request

PROMPT = tuple(range(20, 40))
TOKEN = "secret"


class Groups:
    """Two expert groups of a tiny olmoe; `hold` keeps them from computing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._checkpoint = Checkpoint.open(folder)
        self._loader = ExpertLoader(self._checkpoint)
        self._experts = [layer.experts for layer in self._loader.model.layers]
        self._hello = Hello(TOKEN, self._checkpoint.fingerprint, "float32", self._loader.model.hidden_size)
        self._epoch = 0
        self.go = threading.Event()
        self.go.set()
        self.servers = [self._start(0, 0), self._start(1, 0)]

    def _start(self, index: int, incarnation: int) -> GroupServer:
        group = ExpertGroup(self._loader, f"g{index}r{incarnation}")
        for layer, experts in enumerate(self._experts):
            group.load_slice(layer, even_slices(experts, 2)[index])
        compute = group.compute

        def when_allowed(requests: Any) -> None:
            self.go.wait(60)
            compute(requests)

        group.compute = when_allowed  # type: ignore[method-assign]
        server = GroupServer(group, self._hello, threads=1)
        server.start()
        return server

    def replace(self, index: int) -> None:
        self._epoch += 1
        self.servers[index] = self._start(index, self._epoch)

    def layout(self) -> Layout:
        places = [GroupPlace(server.group.name, server.address) for server in self.servers]
        return even_layout(self._epoch, places, self._experts)

    def stop(self) -> None:
        self.go.set()
        for server in self.servers:
            server.stop()


def config(folder: Path, **fields: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "checkpoint": str(folder),
        "router": "r0",
        "token": TOKEN,
        "dtype": "auto",
        "threads": 1,
        "lane_bytes": 1 << 20,
        "silence_s": 30.0,
        "replace_timeout_s": 20.0,
        "kv_bytes": 1 << 20,
        "step_tokens": 64,
        "max_sequences": 8,
        "max_waiting": 8,
    }
    return EngineConfig(**{**values, **fields})


@contextlib.asynccontextmanager
async def serving(groups: Groups, **fields: Any) -> AsyncIterator[EngineClient]:
    """A client whose engine is ready."""
    client = await EngineClient.spawn(config(groups.folder, **fields))
    try:
        await client.set_layout(groups.layout(), 60)
        await client.wait_ready(60)
        yield client
    finally:
        groups.go.set()
        await client.close()
    assert client.process.returncode is not None


async def collect(client: EngineClient, what: GenerateRequest) -> list[int]:
    return [token async for chunk in client.generate(what) for token in chunk.token_ids]


def with_groups(
    tiny_folder: Callable[[str], Path], work: Callable[[Groups], Coroutine[Any, Any, None]]
) -> None:
    groups = Groups(tiny_folder("olmoe"))
    try:
        asyncio.run(asyncio.wait_for(work(groups), 120))
    finally:
        groups.stop()


def test_an_engine_serves_refuses_cancels_and_survives_a_lost_group(tiny_folder) -> None:
    async def work(groups: Groups) -> None:
        expected = generated(groups.folder, PROMPT, 40)
        async with serving(groups) as client:
            assert client.ready == {"kv_tokens": (1 << 20) // 768, "kv_bytes_per_token": 768}
            answers = await asyncio.gather(*(collect(client, request(f"r{n}", PROMPT, 40)) for n in range(3)))
            assert answers == [expected] * 3

            # The same class of error comes out as was raised in the engine.
            with pytest.raises(ContextLengthError) as refused:
                await collect(client, request("long", (1,) * 500, 100))
            assert refused.value.param == "prompt"

            stream = client.generate(request("left", PROMPT, 400))
            await anext(stream)
            await stream.aclose()  # type: ignore[attr-defined]
            stats = await client.stats()
            assert (stats["running"], stats["cancelled"], stats["kv_bytes"]) == (0, 1, 0)

            # A group goes in the middle of a sequence, another one comes: the text is the same.
            stream = client.generate(request("long", PROMPT, 40))
            tokens = list((await anext(stream)).token_ids)
            groups.servers[1].stop()
            while (await client.stats())["blocked"] is None:
                await asyncio.sleep(0.02)
            groups.replace(1)
            await client.set_layout(groups.layout(), 30)
            tokens += [token async for chunk in stream for token in chunk.token_ids]
            assert tokens == expected
            assert (await client.stats())["experts"]["epoch"] == 1

            waiting = asyncio.ensure_future(collect(client, request("last", PROMPT, 400)))
            await asyncio.sleep(0.05)
            os.kill(client.process.pid, signal.SIGKILL)
            with pytest.raises(RouterLostError, match="again"):
                await waiting
            with pytest.raises(RouterLostError, match="again"):
                await collect(client, request("more", PROMPT, 4))
            with pytest.raises(EngineError, match="exit code -9"):
                await client.stats()

    with_groups(tiny_folder, work)


def test_an_idle_engine_notices_a_lost_group_and_its_replacement(tiny_folder) -> None:
    async def work(groups: Groups) -> None:
        async with serving(groups) as client:
            assert client.blocked is None
            groups.servers[1].stop()
            while client.blocked is None:
                await client.stats()  # as the replica's health check does
            assert "g1r0" in client.blocked
            groups.replace(1)
            await client.set_layout(groups.layout(), 30)
            while client.blocked is not None:
                await client.stats()
            assert await collect(client, request("r", PROMPT, 4)) == generated(groups.folder, PROMPT, 4)

    with_groups(tiny_folder, work)


def test_a_lost_group_that_is_not_replaced_is_named(tiny_folder) -> None:
    async def work(groups: Groups) -> None:
        async with serving(groups, replace_timeout_s=1.0) as client:
            groups.servers[0].stop()
            with pytest.raises(ExpertUnavailableError, match="g0r0") as lost:
                await collect(client, request("r", PROMPT, 4))
            assert lost.value.groups == ("g0r0",)

    with_groups(tiny_folder, work)


def test_an_engine_ends_at_once_when_its_replica_goes_even_in_a_step(tiny_folder) -> None:
    async def work(groups: Groups) -> None:
        async with serving(groups) as client:
            groups.go.clear()
            waiting = asyncio.ensure_future(collect(client, request("r", PROMPT, 4)))
            await asyncio.sleep(0.3)
            assert client.process.poll() is None
            # As the kernel does when the replica's process dies.
            client._sock.shutdown(2)
            for _ in range(40):
                if client.process.poll() is not None:
                    break
                await asyncio.sleep(0.05)
            assert client.process.returncode == 0
            with pytest.raises(RouterLostError):
                await waiting

    with_groups(tiny_folder, work)


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"checkpoint": "/nowhere"}, CheckpointError, "/nowhere"),
        ({"kv_bytes": 7680}, MemoryLimitError, "at least 49152"),
    ],
)
def test_an_engine_that_cannot_start_says_why(tiny_folder, fields, error, text) -> None:
    async def work(groups: Groups) -> None:
        client = await EngineClient.spawn(config(groups.folder, **fields))
        layout = asyncio.ensure_future(client.set_layout(groups.layout(), 60))
        try:
            with pytest.raises(error, match=text):
                await client.wait_ready(60)
            await asyncio.wait({layout})
            layout.exception()
        finally:
            await client.close()
        assert client.process.returncode == 1

    with_groups(tiny_folder, work)
