"""When a stream sends: at once while it is alone or slow, and never later than the limit."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymoe.engine import client
from raymoe.engine.client import EngineClient
from raymoe.engine.messages import GenerateChunk, GenerateRequest, TokenLogprob, joined
from raymoe.engine.pace import FEW, MESSAGE_S, MOST_S, Pace
from raymoe.engine.wire import Unframer, event_to_wire, frame
from raymoe.errors import ExpertUnavailableError, RaymoeError


def test_few_streams_never_wait() -> None:
    pace = Pace()
    for streams in range(FEW + 1):
        assert pace.wait_s(5.0, streams) == 0
        pace.sent(5.0)


def test_the_first_token_and_those_of_a_slow_model_never_wait() -> None:
    pace = Pace()
    assert pace.wait_s(0.0, 1000) == 0
    pace.sent(0.0)
    assert pace.wait_s(MOST_S, 1000) == 0
    assert pace.wait_s(0.01, 8) == pytest.approx(8 * MESSAGE_S - 0.01)


@given(st.lists(st.floats(0, 1), min_size=1), st.integers(0, 10_000))
def test_no_wait_is_longer_than_the_limit(gaps: list[float], streams: int) -> None:
    pace, now = Pace(), 0.0
    for gap in gaps:
        now += gap
        assert 0 <= pace.wait_s(now, streams) <= MOST_S
        pace.sent(now)


def test_joined_chunks_keep_all_they_hold_in_order() -> None:
    scores = [TokenLogprob(-float(n), n) for n in range(1, 6)]
    chunks = [
        GenerateChunk((), prompt_logprobs=(scores[0],)),
        GenerateChunk((), prompt_logprobs=(scores[1],)),
        GenerateChunk((7,), None, (scores[2],)),
        GenerateChunk((8, 9), "length", tuple(scores[3:])),
    ]
    assert joined(chunks) == GenerateChunk((7, 8, 9), "length", tuple(scores[2:]), tuple(scores[:2]))
    assert joined(chunks[:1]) is chunks[0]


class FakeProcess:
    """Stands for the engine process, which the tests play themselves."""

    pid = 0

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def kill(self) -> None: ...


class Pauses:
    """`asyncio.sleep` of the client: the test says when each pause ends."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self.ends = asyncio.Semaphore(0)

    async def __call__(self, seconds: float) -> None:
        self.asked.append(seconds)
        if seconds > 0:
            await self.ends.acquire()


async def received(theirs: socket.socket, count: int) -> None:
    """Take `count` messages of the client's."""
    loop, unframer, seen = asyncio.get_running_loop(), Unframer(), 0
    while seen < count:
        seen += len(list(unframer.feed(await loop.sock_recv(theirs, 1 << 16))))


@pytest.mark.parametrize("end", [GenerateChunk((4,), "length"), ExpertUnavailableError(0, ("g0",))])
def test_what_comes_while_a_stream_waits_shares_a_message(
    end: GenerateChunk | RaymoeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        pauses = Pauses()
        engine: Any = EngineClient(FakeProcess(), ours)  # type: ignore[arg-type]
        streams = [engine.generate(GenerateRequest(str(n), (1,), 9)) for n in range(30)]
        others = [asyncio.ensure_future(anext(stream)) for stream in streams[1:]]
        first = asyncio.ensure_future(anext(streams[0]))
        await received(theirs, 30)
        real = asyncio.sleep
        monkeypatch.setattr(client.asyncio, "sleep", pauses)

        async def say(*whats: GenerateChunk | RaymoeError) -> None:
            events = [event_to_wire("0", what) for what in whats]
            await asyncio.get_running_loop().sock_sendall(theirs, frame({"kind": "events", "events": events}))

        await say(GenerateChunk((1,)))
        assert await first == GenerateChunk((1,))
        second = asyncio.ensure_future(anext(streams[0]))
        await say(GenerateChunk((2,)), GenerateChunk((3,)))
        while len(pauses.asked) < 2:
            await real(0)
        await say(end)
        while engine._requests["0"].qsize() < 2:
            await real(0)
        assert not second.done()
        pauses.ends.release()
        if isinstance(end, GenerateChunk):
            assert await second == GenerateChunk((2, 3, 4), "length")
            with pytest.raises(StopAsyncIteration):
                await anext(streams[0])
        else:
            assert await second == GenerateChunk((2, 3))
            with pytest.raises(ExpertUnavailableError):
                await anext(streams[0])
        assert pauses.asked[0] == 0 < pauses.asked[1] <= MOST_S
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await engine.close()
        theirs.close()

    async def limited() -> None:
        async with asyncio.timeout(30):
            await run()

    asyncio.run(limited())
