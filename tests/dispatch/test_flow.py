"""Flow control and fencing, with groups in other processes that are slow, and stopped at random."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from raymoe.dispatch import exchange
from raymoe.dispatch.dispatcher import Dispatcher
from raymoe.errors import ExpertUnavailableError
from raymoe.lanes.shm import connect
from raymoe.policy.layout import Copy, GroupPlace, Layout
from tests.dispatch.group_process import serve
from tests.doubles import EXPERTS, HELLO, HIDDEN, MemoryLoader, cluster, routed

RING = 1 << 20
PAGE = 4096
SLICES = {"g0": [0, 1, 2, 3, 4, 5], "g1": [2, 3, 4, 5, 6, 7], "g2": [0, 1, 6, 7]}
"""Every expert has two copies, so that any one group may be given up."""


class Groups:
    """Three processes. Their imports are done once, in the server that forks them."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.dispatch.group_process"])
        self.processes, self.pipes = {}, {}
        for name, experts in SLICES.items():
            self.pipes[name], theirs = context.Pipe()
            self.processes[name] = context.Process(target=serve, args=(theirs, name, experts), daemon=True)
            self.processes[name].start()
            theirs.close()
        places = tuple(GroupPlace(name, pipe.recv()) for name, pipe in self.pipes.items())
        copies = tuple(
            tuple(Copy(name, held.index(expert), 0) for name, held in SLICES.items() if expert in held)
            for expert in range(EXPERTS)
        )
        self.layout = Layout(0, places, (copies, copies))
        self.loader = MemoryLoader()

    def delay(self, longest_s: float) -> None:
        for pipe in self.pipes.values():
            pipe.send(longest_s)

    def stop(self, name: str) -> None:
        os.kill(self.processes[name].pid, signal.SIGSTOP)

    def go_on(self, name: str) -> None:
        os.kill(self.processes[name].pid, signal.SIGCONT)

    def end(self) -> None:
        for name, process in self.processes.items():
            self.go_on(name)
            process.kill()
            process.join()
            self.pipes[name].close()

    def expected(self, layer: int, hidden: Any, ids: Any, weights: Any) -> torch.Tensor:
        with torch.inference_mode():
            return self.loader.modules[layer](hidden, ids, weights)


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    made = Groups()
    try:
        yield made
    finally:
        made.end()


@pytest.fixture
def dispatcher(groups: Groups) -> Iterator[Callable[[float], Dispatcher]]:
    with contextlib.ExitStack() as stack:

        def make(silence_s: float) -> Dispatcher:
            def opened(place: GroupPlace) -> Any:
                return connect(place.name, place.address, HELLO, ring_bytes=RING, router="r", timeout_s=5)

            made = stack.enter_context(contextlib.closing(Dispatcher(opened, silence_s)))
            made.set_layout(groups.layout)
            return made

        yield make


def resident(pid: int) -> int:
    """Bytes of a process's memory, the lanes' included."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


def mapped(pid: int | str) -> list[tuple[str, int]]:
    """Inode and size of each lane that a process maps."""
    found = re.findall(
        r"^(\w+)-(\w+) \S+ \S+ \S+ (\d+) +/memfd:raymoe-lane", Path(f"/proc/{pid}/maps").read_text(), re.M
    )
    return sorted((inode, int(end, 16) - int(start, 16)) for start, end, inode in found)


def test_long_prefills_pass_while_groups_are_stopped_and_continued_at_random(
    groups: Groups, dispatcher: Callable[[float], Dispatcher]
) -> None:
    """Two routers, each with ten rings of rows for a layer: all waits end, no row is wrong, memory is bounded."""
    tokens, rounds = 10 * RING // (HIDDEN * 4), 4
    groups.delay(0.004)
    routers = [dispatcher(60.0) for _ in range(2)]
    before: dict[int, int] = {}
    errors: list[BaseException] = []
    done = threading.Event()
    begun = threading.Barrier(3)

    def route(number: int) -> None:
        try:
            for turn in range(rounds):
                layer = (turn + number) % 2
                hidden, ids, weights = routed_fast(tokens, seed=10 * number + turn)
                out = routers[number].run(layer, hidden, ids, weights)
                torch.testing.assert_close(
                    out, groups.expected(layer, hidden, ids, weights), atol=1e-5, rtol=1e-5
                )
                if turn == 0:
                    begun.wait(60)
        except BaseException as error:  # noqa: BLE001  told by the test's own thread
            errors.append(error)
            begun.abort()

    def disturb() -> None:
        chance = random.Random(7)
        while not done.is_set():
            name = chance.choice(list(SLICES))
            groups.stop(name)
            done.wait(chance.random() * 0.3)
            groups.go_on(name)
            done.wait(chance.random() * 0.1)

    threads = [threading.Thread(target=route, args=(n,), daemon=True) for n in range(2)]
    disturber = threading.Thread(target=disturb)
    pids = [os.getpid(), *(process.pid for process in groups.processes.values())]
    for thread in (*threads, disturber):
        thread.start()
    with contextlib.suppress(threading.BrokenBarrierError):
        begun.wait(60)
    # After the first round, when every buffer has had its size once.
    before = {pid: resident(pid) for pid in pids}
    lanes = {pid: mapped(pid) for pid in pids}
    for thread in threads:
        thread.join(60)
    done.set()
    disturber.join()
    assert not errors, errors
    assert not any(thread.is_alive() for thread in threads), "a router still waits"
    for pid in pids[1:]:
        assert lanes[pid] == mapped(pid)
        assert [size for _, size in lanes[pid]] == [2 * RING + PAGE] * 2
    # 10 MiB of rows and 20 MiB of replies passed each router and layer.
    grown = {pid: (resident(pid) - before[pid]) >> 20 for pid in pids}
    assert all(grown[pid] <= 16 for pid in pids[1:]), grown
    assert grown[pids[0]] <= 64, grown
    for router in routers:
        stats = router.stats()
        assert stats["lost"] == {} and stats["retries"] == 0
        assert stats["pieces"] >= rounds * 3 * 10


def routed_fast(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `routed`, without a loop over so many tokens."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, HIDDEN, generator=generator)
    first = torch.randint(EXPERTS, (tokens,), generator=generator)
    other = (first + torch.randint(1, EXPERTS, (tokens,), generator=generator)) % EXPERTS
    return hidden, torch.stack([first, other], 1), torch.rand(tokens, 2, generator=generator)


def test_a_fenced_group_that_wakes_writes_where_nobody_reads(
    groups: Groups, dispatcher: Callable[[float], Dispatcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "PROGRESS_POLL_S", 0.1)
    groups.delay(0.4)
    router = dispatcher(1.0)
    hidden, ids, weights = routed(200)
    old = router._lanes.living[1]
    inode = {i for i, _ in mapped("self")}
    out: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: out.append(router.run(0, hidden, ids, weights)))
    # Until g1 has been stopped with a request in its hands.
    for _ in range(20):
        thread.start()
        while not old.in_flight() and thread.is_alive():
            time.sleep(0.001)
        time.sleep(0.05)
        groups.stop("g1")
        time.sleep(0.05)
        if old.in_flight():
            break
        groups.go_on("g1")
        thread.join(30)
        out.clear()
        thread = threading.Thread(target=lambda: out.append(router.run(0, hidden, ids, weights)))
    thread.join(30)
    torch.testing.assert_close(out[0], groups.expected(0, hidden, ids, weights), atol=1e-5, rtol=1e-5)
    assert list(router.stats()["lost"]) == ["g1"] and "no progress for 1 s" in router.stats()["lost"]["g1"]
    assert old.fileno() == -1
    written = old._memory._elements.clone()
    groups.delay(0.0)
    groups.go_on("g1")
    deadline = time.monotonic() + 20
    while torch.equal(old._memory._elements.nan_to_num(), written.nan_to_num()):
        assert time.monotonic() < deadline, "the late writer wrote nothing: this test shows nothing"
        time.sleep(0.01)
    # Meanwhile and afterwards, with the group back on a new lane, every row is right.
    step = 0
    while router.stats()["lost"] or step < 20:
        assert time.monotonic() < deadline, "g1 did not come back"
        router.reconnect()
        step += 1
        hidden, ids, weights = routed(50, seed=step)
        got = router.run(step % 2, hidden, ids, weights)
        expected = groups.expected(step % 2, hidden, ids, weights)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        time.sleep(0.01)
    new = router._lanes.living[1]
    assert new is not old and new.in_flight() == 0
    del old, written
    fresh = {i for i, _ in mapped("self")} - inode
    assert len(fresh) == 1, "the new lane has a mapping of its own"


@pytest.mark.parametrize("kind", ["inproc", "shm"])
@pytest.mark.parametrize("copies", [1, 2])
def test_a_slow_group_is_kept_while_its_counter_moves_even_in_one_long_computation(
    kind: str, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight slots of 0.1 s each take longer than the 0.4 s of silence that are allowed."""
    monkeypatch.setattr(exchange, "PROGRESS_POLL_S", 0.05)
    hidden, ids, weights = routed(30)
    with cluster([range(EXPERTS)] * copies) as made:
        for server in made.servers.values():
            tick = server.group.tick
            server.group.tick = lambda tick=tick: (time.sleep(0.1), tick())

        def over_shm(place: GroupPlace) -> Any:
            return connect(place.name, place.address, HELLO, ring_bytes=RING, router="r", timeout_s=5)

        router = Dispatcher(made.connect if kind == "inproc" else over_shm, silence_s=0.4)
        router.set_layout(made.layout)
        out = router.run(0, hidden, ids, weights)
        assert torch.equal(out, made.expected(0, hidden, ids, weights))
        assert router.stats()["lost"] == {} and router.stats()["retries"] == 0
        router.close()


@pytest.mark.parametrize("kind", ["inproc", "shm"])
def test_a_group_without_progress_is_given_up_and_made_up_for_where_copies_live(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "PROGRESS_POLL_S", 0.05)
    hidden, ids, weights = routed(30)
    gate = threading.Event()
    with cluster([range(EXPERTS), range(EXPERTS)]) as made:
        stuck = made.servers["g1"].group
        compute = stuck.compute
        stuck.compute = lambda requests: (gate.wait(30), compute(requests))  # type: ignore[method-assign]

        def over_shm(place: GroupPlace) -> Any:
            return connect(place.name, place.address, HELLO, ring_bytes=RING, router="r", timeout_s=5)

        router = Dispatcher(made.connect if kind == "inproc" else over_shm, silence_s=0.4)
        router.set_layout(made.layout)
        try:
            out = router.run(0, hidden, ids, weights)
            assert torch.equal(out, made.expected(0, hidden, ids, weights))
            assert list(router.stats()["lost"]) == ["g1"] and router.stats()["retries"] == 1
            made.servers["g0"].stop()
            with pytest.raises(ExpertUnavailableError, match="g0, g1"):
                router.run(0, hidden, ids, weights)
        finally:
            gate.set()
            router.close()
