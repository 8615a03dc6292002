"""What every lane promises, run on each lane there is."""

import contextlib
import os
import select
import socket
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from raymoe.errors import HelloRefusedError, LaneClosedError, LaneTimeoutError, StaleLayoutError
from raymoe.lanes import shm, shm_memory
from raymoe.lanes.base import Piece
from raymoe.lanes.header import MAX_MESSAGE, Header, Kind
from raymoe.lanes.inproc import inproc_pair
from raymoe.lanes.shm_listener import ShmListener
from tests.doubles import HELLO, HIDDEN

RING = 64 << 10


def shm_pair(ring_bytes=RING):
    listener = ShmListener("g0", HELLO)
    lanes = []

    def answer():
        select.select([listener], [], [], 5)
        caller = listener.accept()
        select.select([caller], [], [], 5)
        lanes.append(listener.greet(caller))

    thread = threading.Thread(target=answer)
    thread.start()
    router = shm.connect("g0", listener.address, HELLO, ring_bytes=ring_bytes, router="r0", timeout_s=5)
    thread.join()
    listener.close()
    return router, lanes[0]


def object_store_pair(host, hello=HELLO, ring_bytes=RING):
    from raymoe.lanes import object_store
    from tests.lanes.hosted import HostedGroupLane

    actor, address = host
    router = object_store.connect("g0", address, hello, ring_bytes=ring_bytes, router="r0", timeout_s=30)
    return router, HostedGroupLane(actor, hello)


@pytest.fixture(params=["inproc", "shm", pytest.param("object_store", marks=pytest.mark.ray)])
def pair(request):
    if request.param == "object_store":
        router, group = object_store_pair(request.getfixturevalue("host"))
    else:
        router, group = inproc_pair("g0") if request.param == "inproc" else shm_pair()
    yield router, group
    router.close()
    group.close()


def piece(number=0, tokens=4, token_R=None, pairs=None, hidden=None):
    hidden = (
        torch.arange(tokens * HIDDEN, dtype=torch.float32).view(tokens, HIDDEN) if hidden is None else hidden
    )
    rows = tokens if token_R is None else len(token_R)
    row_P = np.arange(pairs or rows, dtype=np.int32) % rows
    segments = np.array([[3, 1, len(row_P)]], dtype=np.int32)
    return Piece(7, 1, 2, number, hidden, token_R, row_P, segments, 1000)


def wait(lane):
    arrived = lane.wait() if hasattr(lane, "wait") else select.select([lane], [], [], 5)[0]
    assert arrived, "nothing arrived"


def test_rows_arrive_and_the_reply_comes_back(pair):
    router, group = pair
    assert router.receive() is None and group.receive() is None
    assert router.send(piece(token_R=np.array([1, 3])))
    wait(group)
    request = group.receive()
    assert request.header[:5] == (Kind.ROWS, 7, 1, 2, 0)
    assert torch.equal(request.rows_RH, torch.arange(4 * HIDDEN).view(4, HIDDEN)[[1, 3]].float())
    assert request.row_P.tolist() == [0, 1] and request.segments_S3.tolist() == [[3, 1, 2]]
    request.out_PH.copy_(request.rows_RH * 2)
    group.reply(request, queue_rows=5, queue_ns=6, busy_ns=7)
    wait(router)
    reply = router.receive()
    assert (reply.header.queue_rows, reply.header.queue_ns, reply.header.busy_ns) == (5, 6, 7)
    assert torch.equal(reply.out_PH, torch.arange(4 * HIDDEN).view(4, HIDDEN)[[1, 3]].float() * 2)
    assert router.in_flight() == 0
    router.release(reply)


def test_all_rows_travel_when_no_tokens_are_picked(pair):
    router, group = pair
    assert router.send(piece(tokens=3))
    wait(group)
    assert group.receive().rows_RH.shape == (3, HIDDEN)


def test_a_refusal_names_the_group_and_the_reason(pair):
    router, group = pair
    router.send(piece())
    wait(group)
    group.refuse(group.receive(), "slot 3 is empty")
    wait(router)
    with pytest.raises(StaleLayoutError, match="g0: slot 3 is empty"):
        router.receive()
    assert router.in_flight() == 0


def test_each_side_sees_the_other_leave(pair):
    router, group = pair
    group.close()
    wait(router)
    with pytest.raises(LaneClosedError, match="g0"):
        router.receive()
    with pytest.raises(LaneClosedError):
        router.send(piece())


def test_the_group_sees_the_router_leave(pair):
    router, group = pair
    router.close()
    router.close()
    wait(group)
    with pytest.raises(LaneClosedError):
        group.receive()


def test_progress_rises_with_each_tick(pair):
    router, group = pair
    before = router.progress()
    group.tick()
    group.tick()
    deadline = time.monotonic() + 10
    while router.progress() <= before:
        assert time.monotonic() < deadline, "no progress"


def test_a_full_lane_says_no_and_goes_on_after_a_release(pair):
    router, group = pair
    sent = 0
    while sent < 1000 and router.send(piece(sent, tokens=32)):
        sent += 1
    assert 1 < sent < 1000
    for _ in range(sent):
        wait(group)
        request = group.receive()
        request.out_PH.fill_(request.header.piece)
        group.reply(request, 0, 0, 0)
    answered = set()
    for _ in range(sent):
        wait(router)
        reply = router.receive()
        assert torch.all(reply.out_PH == reply.header.piece)
        answered.add(reply.header.piece)
        router.release(reply)
    assert answered == set(range(sent))
    assert router.send(piece(sent, tokens=32))


def test_the_largest_piece_fits_an_empty_lane_twice(pair):
    router, _ = pair
    most = min(router.max_pairs, 4096)
    for number in range(2):
        big = piece(number, tokens=most, hidden=torch.zeros(most, HIDDEN))
        assert router.send(replace(big, segments_S3=np.tile(np.int32([[0, 0, 1]]), (most, 1))))


MISFITS = [
    ({"token": "guess"}, "the token differs"),
    ({"fingerprint": "other"}, "fingerprint"),
    ({"dtype": "bfloat16"}, "dtype"),
    ({"hidden_size": 8}, "hidden_size"),
    ({"protocol": 0}, "protocol version 0 called"),
]


@pytest.mark.parametrize(("change", "text"), MISFITS)
def test_a_caller_that_does_not_fit_is_told_why(change, text):
    with pytest.raises(HelloRefusedError, match=text):
        connect_with(replace(HELLO, **change))


@pytest.mark.ray
def test_an_actor_tells_a_caller_that_does_not_fit_why(host):
    for change, text in MISFITS:
        with pytest.raises(HelloRefusedError, match=text):
            object_store_pair(host, replace(HELLO, **change))
    with pytest.raises(HelloRefusedError, match=r"groups\.lane_bytes"):
        object_store_pair(host, ring_bytes=64)


def connect_with(hello, **options):
    listener = ShmListener("g0", HELLO)

    def answer():
        select.select([listener], [], [], 5)
        caller = listener.accept()
        select.select([caller], [], [], 5)
        with contextlib.suppress(HelloRefusedError):
            listener.greet(caller)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        shm.connect(
            "g0", listener.address, hello, ring_bytes=RING, router="r", timeout_s=5, **options
        ).close()
    finally:
        thread.join()
        listener.close()


def test_nobody_at_the_address_and_a_silent_one_are_told_apart():
    with pytest.raises(LaneClosedError, match="can't connect"):
        shm.connect("g9", "@raymoe-nobody", HELLO, ring_bytes=RING, router="r", timeout_s=1)
    listener = ShmListener("g0", HELLO)
    with contextlib.closing(listener), pytest.raises(LaneTimeoutError, match=r"within 0\.1 s"):
        shm.connect("g0", listener.address, HELLO, ring_bytes=RING, router="r", timeout_s=0.1)


def greet_raw(message, fds):
    """What a hand-made hello is answered."""
    listener = ShmListener("g0", HELLO)
    with contextlib.closing(listener), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
        caller.connect("\0" + listener.address[1:])
        socket.send_fds(caller, [message], fds)
        with pytest.raises(HelloRefusedError) as refused:
            listener.greet(listener.accept())
        assert caller.recv(MAX_MESSAGE)[0] == Kind.REFUSED
        return str(refused.value)


def test_memory_that_could_be_pulled_away_is_refused():
    unsealed = os.memfd_create("t")
    os.ftruncate(unsealed, 4096 + 2 * RING)
    small = shm_memory.create(1024)
    read, write = os.pipe()
    try:
        hello = HELLO.pack(ring_bytes=RING)
        assert "one memory descriptor" in greet_raw(hello, [])
        assert "not sealed" in greet_raw(hello, [unsealed]) or "not a memfd" in greet_raw(hello, [unsealed])
        assert "its rings want" in greet_raw(hello, [small])
        assert "not a memfd" in greet_raw(hello, [read])
        assert "not a size" in greet_raw(HELLO.pack(ring_bytes="big"), [small])
        assert "not a hello" in greet_raw(b"GET / HTTP/1.1\r\n", [small])
    finally:
        for fd in (unsealed, small, read, write):
            os.close(fd)


def test_a_header_that_points_outside_the_rings_ends_the_lane():
    router, group = shm_pair()
    with contextlib.closing(router), contextlib.closing(group):
        bad = Header(
            Kind.ROWS, 0, 0, 0, 0, rows=1, pairs=1, segments=1, request_at=RING, reply_at=0, budget_us=0
        )
        router._bell.send(bad.pack())
        wait(group)
        with pytest.raises(LaneClosedError, match="protocol broken"):
            group.receive()


def test_a_lane_leaves_no_descriptor_behind():
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    for _ in range(5):
        router, group = shm_pair()
        router.close()
        group.close()
        del router, group  # the mapping goes with its last view
        with pytest.raises(HelloRefusedError):
            connect_with(replace(HELLO, token="x"))
    assert descriptors() == before
