import select
import socket
import threading
import time

import numpy as np
import torch

from raymoe.experts import serve
from raymoe.lanes.base import Piece
from raymoe.lanes.shm import connect
from tests.doubles import EXPERTS, HELLO, HIDDEN, cluster

RING = 1 << 20


def ask(lane, step, layer, rows_TH, expert):
    pairs = len(rows_TH)
    segments = np.int32([[expert, 0, pairs]])
    assert lane.send(Piece(0, step, layer, 0, rows_TH, None, np.arange(pairs, dtype=np.int32), segments, 0))


def answer(lane):
    assert select.select([lane], [], [], 10)[0]
    reply = lane.receive()
    out = reply.out_PH.clone()
    lane.release(reply)
    return out


def open_lane(cluster, router="r0"):
    server = cluster.servers["g0"]
    return connect("g0", server.address, HELLO, ring_bytes=RING, router=router, timeout_s=5)


def test_two_routers_are_served_at_once_and_get_their_own_rows():
    with cluster(1) as made:
        lanes = [open_lane(made, f"r{n}") for n in range(2)]
        for step in range(20):
            rows = [torch.randn(3, HIDDEN) for _ in lanes]
            for lane, rows_TH in zip(lanes, rows, strict=True):
                ask(lane, step, step % 2, rows_TH, expert=step % EXPERTS)
            for lane, rows_TH in zip(lanes, rows, strict=True):
                expected = made.expected(
                    step % 2, rows_TH, torch.full((3, 1), step % EXPERTS), torch.ones(3, 1)
                )
                torch.testing.assert_close(answer(lane), expected, atol=1e-5, rtol=1e-5)
        stats = made.servers["g0"].stats()
        assert stats["requests"] == 40 and stats["pairs"] == 120 and stats["lanes"] == 2
        for lane in lanes:
            lane.close()


def test_rows_that_wait_for_the_same_layer_are_merged():
    with cluster(1) as made:
        server, gate = made.servers["g0"], threading.Event()
        compute = server.group.compute
        server.group.compute = lambda requests: (gate.wait(10), compute(requests))
        lanes = [open_lane(made, f"r{n}") for n in range(3)]
        for n, lane in enumerate(lanes):
            ask(lane, 1, 0, torch.randn(2, HIDDEN), expert=0)
            if n == 0:
                time.sleep(0.2)  # the first is being computed when the others arrive
        time.sleep(0.2)
        gate.set()
        for lane in lanes:
            answer(lane)
            lane.close()
        assert server.stats()["merged"] == 1
        assert server.stats()["requests"] == 3


def test_slots_come_and_go_while_others_are_served():
    with cluster(1) as made:
        group, lane, stop = made.servers["g0"].group, open_lane(made), threading.Event()

        def churn():
            while not stop.is_set():
                for slot, _ in group.load_slice(0, [6, 7]):
                    group.free(0, slot)

        thread = threading.Thread(target=churn)
        thread.start()
        rows_TH = torch.randn(3, HIDDEN)
        expected = made.expected(0, rows_TH, torch.full((3, 1), 2), torch.ones(3, 1))
        try:
            for step in range(200):
                ask(lane, step, 0, rows_TH, expert=2)
                assert torch.equal(answer(lane), expected)
        finally:
            stop.set()
            thread.join()
        places = group.load_slice(0, [6])
        assert places[0][0] == EXPERTS and places[0][1] > 0, (
            "a slot that was used before has a new generation"
        )
        lane.close()


def test_callers_that_speak_garbage_or_nothing_disturb_nobody(monkeypatch):
    monkeypatch.setattr(serve, "HELLO_TIMEOUT_S", 0.1)
    monkeypatch.setattr(serve, "IDLE_POLL_MS", 20)
    with cluster(1) as made:
        lane = open_lane(made)
        name = "\0" + made.servers["g0"].address[1:]
        silent, rude = (socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2))
        silent.connect(name)
        rude.connect(name)
        rude.send(b"\xff" * 200)
        for step in range(5):
            ask(lane, step, 0, torch.randn(1, HIDDEN), expert=step)
            answer(lane)
        silent.settimeout(5)
        assert silent.recv(10) == b"", "a caller without a hello is shown the door"
        assert made.servers["g0"].failed is None
        for sock in (silent, rude):
            sock.close()
        lane.close()


def test_a_router_that_leaves_in_mid_request_is_forgotten():
    with cluster(1) as made:
        for step in range(5):
            lane = open_lane(made)
            ask(lane, step, 0, torch.randn(64, HIDDEN), expert=0)
            lane.close()
        last = open_lane(made)
        ask(last, 9, 1, torch.randn(2, HIDDEN), expert=1)
        answer(last)
        deadline = time.monotonic() + 5
        while made.servers["g0"].stats()["lanes"] > 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert made.servers["g0"].stats()["lanes"] == 1
        last.close()


def test_a_fault_in_the_loop_is_reported_and_closes_the_lanes():
    with cluster(1) as made:
        server = made.servers["g0"]
        lane = open_lane(made)

        def broken(requests):
            raise RuntimeError("no such kernel")

        server.group.compute = broken
        ask(lane, 0, 0, torch.randn(1, HIDDEN), expert=0)
        assert select.select([lane], [], [], 5)[0]
        server.stop()
        assert server.failed == "RuntimeError: no such kernel"
        lane.close()
