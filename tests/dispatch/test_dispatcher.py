import itertools
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from raymoe.dispatch.dispatcher import Dispatcher
from raymoe.errors import EngineError, ExpertUnavailableError
from raymoe.lanes.shm import connect
from raymoe.policy.layout import GroupPlace, Layout
from tests.doubles import EXPERTS, HELLO, HIDDEN, TOP_K, cluster, routed

PLACEMENTS = [[range(8)], [range(3), range(3, 8)], [[7, 1, 3], [0, 2], [6, 5, 4]], [[e] for e in range(8)]]


def shm_to(made, ring_bytes=1 << 20):
    return lambda place: connect(
        place.name, place.address, HELLO, ring_bytes=ring_bytes, router="r", timeout_s=5
    )


@pytest.mark.parametrize("tokens", [1, 2, 9, 130])
def test_output_has_the_same_bits_as_the_full_module_for_every_placement(tokens):
    for slices in PLACEMENTS:
        with cluster(slices) as made:
            for opened in (made.connect, shm_to(made)):
                dispatcher = Dispatcher(opened, silence_s=10)
                dispatcher.set_layout(made.layout)
                for layer in range(2):
                    hidden, ids, weights = routed(tokens, seed=tokens + layer)
                    out = dispatcher.run(layer, hidden, ids, weights)
                    assert torch.equal(out, made.expected(layer, hidden, ids, weights))
                dispatcher.close()


def test_bf16_weights_in_fp32_are_combined_as_the_library_does(monkeypatch):
    hidden, ids, weights = routed(5)
    with cluster(2) as made:
        dispatcher = Dispatcher(made.connect, silence_s=10)
        dispatcher.set_layout(made.layout)
        out = dispatcher.run(0, hidden, ids, weights.double())
        assert out.dtype == torch.float32
        torch.testing.assert_close(out, made.expected(0, hidden, ids, weights), atol=1e-6, rtol=1e-6)
        dispatcher.close()


def test_copies_change_nothing_in_the_result():
    hidden, ids, weights = routed(40)
    with cluster([range(8), range(8), [0, 1]]) as made:
        dispatcher = Dispatcher(made.connect, silence_s=10)
        dispatcher.set_layout(made.layout)
        out = dispatcher.run(1, hidden, ids, weights)
        assert torch.equal(out, made.expected(1, hidden, ids, weights))
        busy = [server.stats()["pairs"] for server in made.servers.values()]
        assert sum(busy) == 80 and min(busy[:2]) > 0
        dispatcher.close()


@pytest.mark.parametrize("delay", [0.0, 0.002])
def test_a_prefill_ten_times_the_ring_passes_in_windows_from_two_routers(delay):
    """Request and reply rings are full at once on three groups; nobody waits for ever, no row is wrong."""
    tokens = 10 * (16 << 10) // (HIDDEN * 4)
    with cluster(3) as made:
        for server in made.servers.values():
            compute = server.group.compute

            def late(requests, compute=compute):
                threading.Event().wait(random.random() * delay)
                compute(requests)

            server.group.compute = late
        results = {}

        def route(name):
            dispatcher = Dispatcher(shm_to(made, ring_bytes=16 << 10), silence_s=30)
            dispatcher.set_layout(made.layout)
            hidden, ids, weights = routed(tokens, seed=hash(name) % 100)
            outs = [dispatcher.run(layer, hidden, ids, weights) for layer in (0, 1)]
            results[name] = (hidden, ids, weights, outs, dispatcher.stats())
            dispatcher.close()

        threads = [threading.Thread(target=route, args=(f"r{n}",)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(results) == 2, "a router still waits"
        for hidden, ids, weights, outs, stats in results.values():
            assert stats["pieces"] > 2 * 10
            for layer, out in enumerate(outs):
                torch.testing.assert_close(
                    out, made.expected(layer, hidden, ids, weights), atol=1e-5, rtol=1e-5
                )


def test_bits_do_not_depend_on_placement_when_pieces_are_cut():
    hidden, ids, weights = routed(300)
    outs = []
    for slices in PLACEMENTS:
        with cluster(slices) as made:
            dispatcher = Dispatcher(shm_to(made, ring_bytes=16 << 10), silence_s=10)
            dispatcher.set_layout(made.layout)
            outs.append(dispatcher.run(0, hidden, ids, weights))
            dispatcher.close()
    assert all(torch.equal(a, b) for a, b in itertools.pairwise(outs))


def test_a_group_that_dies_is_made_up_for_by_copies_in_the_same_call():
    hidden, ids, weights = routed(20)
    with cluster([range(8), range(8)]) as made:
        dispatcher = Dispatcher(made.connect, silence_s=10)
        dispatcher.set_layout(made.layout)
        server = made.servers["g1"]
        server.group.compute = lambda requests: (_ for _ in ()).throw(RuntimeError("dies in mid-step"))
        out = dispatcher.run(0, hidden, ids, weights)
        assert torch.equal(out, made.expected(0, hidden, ids, weights))
        stats = dispatcher.stats()
        assert stats["retries"] == 1 and list(stats["lost"]) == ["g1"] and stats["lanes"] == ["g0"]
        dispatcher.close()


def test_without_a_copy_the_layer_and_group_are_named_and_a_new_layout_heals():
    hidden, ids, weights = routed(20)
    with cluster(2) as made:
        dispatcher = Dispatcher(made.connect, silence_s=10)
        dispatcher.set_layout(made.layout)
        made.servers["g1"].stop()
        for _ in range(3):
            with pytest.raises(ExpertUnavailableError, match=r"MoE layer 1: expert group g1") as missing:
                dispatcher.run(1, hidden, ids, weights)
            assert missing.value.rows == (ids >= EXPERTS // 2).any(1).nonzero().flatten().tolist()
        only_first = ids % (EXPERTS // 2)
        assert torch.equal(
            dispatcher.run(1, hidden, only_first, weights), made.expected(1, hidden, only_first, weights)
        )
        with cluster(2) as replaced:
            places = (made.layout.groups[0], GroupPlace("g1", replaced.servers["g1"].address))
            other = {"g0": made, "g1": replaced}
            dispatcher._lanes._connect = lambda place: other[place.name].connect(place)
            dispatcher.set_layout(Layout(1, places, made.layout.copies))
            assert dispatcher.epoch == 1
            assert torch.equal(
                dispatcher.run(1, hidden, ids, weights), made.expected(1, hidden, ids, weights)
            )
        dispatcher.close()


def test_what_is_missing_is_known_without_a_call():
    with cluster([range(8), range(4)]) as made:
        dispatcher = Dispatcher(made.connect, silence_s=10)
        dispatcher.set_layout(made.layout)
        assert dispatcher.missing() is None
        made.servers["g1"].stop()
        while not dispatcher.stats()["lost"]:
            assert dispatcher.missing() is None  # all experts of g1 have copies
        made.servers["g0"].stop()
        while (missing := dispatcher.missing()) is None:
            pass
        assert (missing.layer, missing.groups) == (0, ("g0", "g1"))
        dispatcher.close()


def test_a_gate_that_names_an_unknown_expert_is_an_error_not_a_wrong_row():
    hidden, ids, weights = routed(2)
    with cluster(2) as made:
        dispatcher = Dispatcher(made.connect, silence_s=10)
        with pytest.raises(EngineError, match="before the first layout"):
            dispatcher.run(0, hidden, ids, weights)
        dispatcher.set_layout(made.layout)
        with pytest.raises(EngineError, match="has 8 experts, the gate chose 8"):
            dispatcher.run(0, hidden, torch.full_like(ids, EXPERTS), weights)
        dispatcher.close()


GROUP_PROCESS = """
import sys, torch
from tests.doubles import Cluster
made = Cluster([range(8)])
print(made.servers["g0"].address, flush=True)
sys.stdin.read()
made.close()
"""


@pytest.fixture
def group_process():
    process = subprocess.Popen(
        [sys.executable, "-c", GROUP_PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def layout_of(address):
    with cluster(1) as made:
        return Layout(0, (GroupPlace("g0", address),), made.layout.copies)


def test_a_group_in_another_process_that_is_killed_is_noticed_at_once(group_process):
    process, address = group_process
    dispatcher = Dispatcher(shm_to(None), silence_s=60)
    dispatcher.set_layout(layout_of(address))
    hidden, ids, weights = routed(6)
    with cluster(1) as made:
        assert torch.equal(dispatcher.run(0, hidden, ids, weights), made.expected(0, hidden, ids, weights))
    process.kill()
    with pytest.raises(ExpertUnavailableError, match="g0"):
        dispatcher.run(0, hidden, ids, weights)
    dispatcher.close()


def threads_of(pid):
    return Path(f"/proc/{pid}/task").glob("*/stat")


def test_a_group_that_hangs_is_given_up_after_its_silence(group_process):
    process, address = group_process
    dispatcher = Dispatcher(shm_to(None), silence_s=1)
    dispatcher.set_layout(layout_of(address))
    hidden, ids, weights = routed(6)
    os.kill(process.pid, signal.SIGSTOP)
    while any(stat.read_text().rpartition(") ")[2][0] != "T" for stat in threads_of(process.pid)):
        pass  # a stop reaches a process's threads one by one
    try:
        with pytest.raises(ExpertUnavailableError, match="g0"):
            dispatcher.run(0, hidden, ids, weights)
        assert "no progress for 1 s" in dispatcher.stats()["lost"]["g0"]
        # A group that hangs keeps no step waiting while it is tried again.
        for _ in range(3):
            dispatcher.reconnect()
            with pytest.raises(ExpertUnavailableError, match="g0"):
                dispatcher.run(0, hidden, ids, weights)
    finally:
        os.kill(process.pid, signal.SIGCONT)
    while dispatcher.missing() is not None:
        dispatcher.reconnect()
    with cluster(1) as made:
        assert torch.equal(dispatcher.run(0, hidden, ids, weights), made.expected(0, hidden, ids, weights))
    dispatcher.close()


def test_pairs_are_counted_per_layer_and_expert():
    hidden, ids, weights = routed(11)
    with cluster(2) as made:
        dispatcher = Dispatcher(made.connect, silence_s=10)
        dispatcher.set_layout(made.layout)
        dispatcher.run(1, hidden, ids, weights)
        pairs = np.array(dispatcher.stats()["pairs"])
        assert pairs[0].sum() == 0
        assert pairs[1].tolist() == np.bincount(ids.flatten(), minlength=EXPERTS).tolist()
        assert pairs.sum() == 11 * TOP_K
        dispatcher.close()
