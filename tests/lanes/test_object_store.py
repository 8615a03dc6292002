"""What only the object_store lane can get wrong: Ray's objects, and a process at either end that dies."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from raymoe.errors import LaneClosedError, LaneTimeoutError
from tests.doubles import HELLO, HIDDEN
from tests.lanes.test_lanes import object_store_pair, piece, wait

pytestmark = pytest.mark.ray
RING = 4 << 20


def until(condition: Any, within_s: float = 20) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def stored() -> int:
    """Objects in Ray's store."""
    import ray
    from ray._private.internal_api import memory_summary

    told = memory_summary(ray.get_runtime_context().gcs_address, stats_only=True)
    line = next(x for x in told.splitlines() if x.startswith("Plasma memory"))
    return int(line.split(",")[1].split()[0])


def test_rows_of_bfloat16_keep_their_bits(host: Any) -> None:
    import ray

    from tests.lanes.hosted import start_host

    hello = replace(HELLO, dtype="bfloat16")
    half = start_host("g0-bf16", replace(hello))
    router, group = object_store_pair_of("g0-bf16", half, hello)
    rows = torch.randn(3, HIDDEN).bfloat16()
    assert router.send(piece(hidden=rows, tokens=3))
    wait(group)
    request = group.receive()
    assert torch.equal(request.rows_RH, rows)
    request.out_PH.copy_(rows * 3)
    group.reply(request, 0, 0, 0)
    wait(router)
    assert torch.equal(router.receive().out_PH, rows * 3)
    router.close()
    ray.kill(half[0])


def object_store_pair_of(name: str, host: Any, hello: Any = HELLO) -> Any:
    from raymoe.lanes import object_store
    from tests.lanes.hosted import HostedGroupLane

    router = object_store.connect(name, host[1], hello, ring_bytes=RING, router="r0", timeout_s=30)
    return router, HostedGroupLane(host[0], hello)


def test_large_pieces_are_freed_once_they_are_answered_and_released(host: Any) -> None:
    router, group = object_store_pair(host, ring_bytes=RING)
    until(lambda: stored() == 0)
    for number in range(3):
        assert router.send(piece(number, tokens=8000))
    until(lambda: stored() == 3)
    for _ in range(3):
        wait(group)
        request = group.receive()
        request.out_PH.copy_(request.rows_RH)
        group.reply(request, 0, 0, 0)
    for _ in range(3):
        wait(router)
        reply = router.receive()
        assert torch.equal(reply.out_PH, piece(tokens=8000).hidden_TH)
        router.release(reply)
    router.close()
    until(lambda: stored() == 0)


def test_a_closed_lane_takes_nothing_and_leaves_nothing(host: Any) -> None:
    import ray

    actor = host[0]
    router, group = object_store_pair(host, ring_bytes=RING)
    open_before = ray.get(actor.open_lanes.remote())
    assert router.send(piece(tokens=8000))
    wait(group)
    late = group.receive()
    router.close()
    with pytest.raises(LaneClosedError):
        router.send(piece())
    with pytest.raises(LaneClosedError):
        router.receive()
    wait(group)
    with pytest.raises(LaneClosedError):
        group.receive()
    # An answer that comes too late is nobody's, and neither is its memory.
    group.reply(late, 0, 0, 0)
    group.close()
    until(lambda: ray.get(actor.open_lanes.remote()) == open_before - 1)
    until(lambda: stored() == 0)


def test_what_does_not_fit_its_header_ends_the_lane(host: Any) -> None:
    router, group = object_store_pair(host)
    good = piece(tokens=4)
    router._actor.lane.remote(
        "ask", router._lane, good.header().pack(), np.zeros((3, 4), np.uint8), good.row_P, good.segments_S3
    )
    wait(group)
    with pytest.raises(LaneClosedError):
        group.receive()
    group.close()
    wait(router)
    with pytest.raises(LaneClosedError):
        router.receive()
    router.close()


def test_nobody_at_the_address_and_a_silent_one_are_told_apart(host: Any) -> None:
    import ray

    from raymoe.lanes import object_store
    from tests.lanes.hosted import start_host

    cluster = host[1].split("/")[0]
    options = {"ring_bytes": RING, "router": "r0"}
    with pytest.raises(LaneClosedError, match="nobody"):
        object_store.connect("g9", f"{cluster}/serve/nobody", HELLO, timeout_s=5, **options)
    silent, address = start_host("g9", HELLO)
    pid = ray.get(silent.__ray_call__.remote(lambda _: os.getpid()))
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(LaneTimeoutError, match=r"within 0\.5 s"):
            object_store.connect("g9", address, HELLO, timeout_s=0.5, **options)
    finally:
        os.kill(pid, signal.SIGCONT)
    router, _ = object_store_pair_of("g9", (silent, address))
    assert router.send(piece())
    os.kill(pid, signal.SIGKILL)
    assert wait(router) is None
    with pytest.raises(LaneClosedError, match="g9: ActorDiedError"):
        router.receive()
    with pytest.raises(LaneClosedError):
        router.send(piece())
    router.close()


ROUTER = """
import sys, time
from raymoe.lanes import object_store
from tests.doubles import HELLO
lane = object_store.connect("g0", sys.argv[1], HELLO, ring_bytes=1 << 20, router="doomed", timeout_s=60)
print("open", flush=True)
time.sleep(600)
"""


def test_the_group_notices_that_a_router_process_was_killed(host: Any) -> None:
    import ray

    actor, address = host
    before = ray.get(actor.open_lanes.remote())
    with subprocess.Popen(
        [sys.executable, "-c", ROUTER, address], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as router:
        assert router.stdout is not None and router.stderr is not None
        assert router.stdout.readline() == "open\n", router.stderr.read()
        from tests.lanes.hosted import HostedGroupLane

        group = HostedGroupLane(actor, HELLO)
        assert ray.get(actor.open_lanes.remote()) == before + 1
        router.kill()
        assert router.stderr.read() == "", "a router that joins Ray says nothing"
    assert group.wait(within_s=60)
    with pytest.raises(LaneClosedError):
        group.receive()
    with contextlib.suppress(LaneClosedError):
        group.close()
