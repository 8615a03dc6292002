"""Sequences that go on elsewhere: the engine behind given tokens, and the replay over routers played by scripts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest

from raymoe.engine import replay
from raymoe.engine.messages import GenerateChunk, GenerateRequest, SamplingParams, TokenLogprob
from raymoe.engine.replay import MOST, replaying
from raymoe.errors import (
    ExpertUnavailableError,
    NotReadyError,
    OverloadedError,
    RequestError,
    RouterLostError,
    VocabularyError,
)
from tests.engine.doubles import Answers, engine, request

PROMPT = tuple(range(20, 40))
SAMPLED = SamplingParams(temperature=1.2, top_p=0.9, seed=11)


@pytest.mark.parametrize("cut", [1, 7, 23])
def test_an_engine_goes_on_behind_the_tokens_of_another(tiny_folder: Callable[[str], Path], cut: int) -> None:
    folder = tiny_folder("olmoe")
    fields: dict[str, Any] = {"sampling": SAMPLED, "stop_token_ids": ()}
    first = engine(folder)
    first.submit(request("r", PROMPT, 24, **fields))
    whole = Answers().drain(first)
    second = engine(folder)
    second.submit(request("r", PROMPT, 24, generated_ids=tuple(whole.tokens["r"][:cut]), **fields))
    rest = Answers().drain(second)
    assert rest.tokens["r"] == whole.tokens["r"][cut:]
    assert rest.ends["r"] == whole.ends["r"] == "length"


def test_an_engine_refuses_generated_tokens_that_leave_nothing_to_do(
    tiny_folder: Callable[[str], Path],
) -> None:
    with pytest.raises(RequestError, match="one new token"):
        engine(tiny_folder("olmoe")).submit(request("r", PROMPT, 3, generated_ids=(1, 2, 3)))
    with pytest.raises(VocabularyError):
        engine(tiny_folder("olmoe")).submit(request("r", PROMPT, 3, generated_ids=(10**6,)))


class Routers:
    """Each attempt plays the next script: chunks of one token, None for acceptance, an error, or a wait."""

    def __init__(self, *scripts: list[Any]) -> None:
        self.scripts = list(scripts)
        self.requests: list[GenerateRequest] = []
        self.closed = 0
        self.replays = 0

    async def attempt(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        self.requests.append(request)
        try:
            for step in self.scripts.pop(0):
                if isinstance(step, Exception):
                    raise step
                if step == "wait":
                    await asyncio.Event().wait()
                yield GenerateChunk(()) if step is None else step
        finally:
            self.closed += 1

    async def tokens(self, deadline_s: float = 60.0, wait_s: float = 30.0) -> list[int]:
        self.seen: list[int] = []
        chunks = replaying(
            self.attempt,
            GenerateRequest("r", (1, 2), 9, deadline_s=deadline_s),
            wait_s=wait_s,
            on_replay=self._count,
        )
        async for chunk in chunks:
            self.seen += chunk.token_ids
        return self.seen

    def _count(self) -> None:
        self.replays += 1


def token(number: int, reason: Any = None) -> GenerateChunk:
    return GenerateChunk((number,), reason)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "PAUSE_S", 0.001)


LOST = RouterLostError("gone")


def test_no_token_is_lost_or_sent_twice_over_two_losses() -> None:
    routers = Routers(
        [None, token(5), token(6), LOST],
        [None, LOST],
        [None, token(7), GenerateChunk((8,), "length")],
    )
    assert asyncio.run(routers.tokens()) == [5, 6, 7, 8]
    assert [r.generated_ids for r in routers.requests] == [(), (5, 6), (5, 6)]
    assert [r.max_tokens for r in routers.requests] == [9, 9, 9]
    assert len({r.request_id for r in routers.requests}) == 3
    assert routers.requests[0].deadline_s == 60 > routers.requests[1].deadline_s >= 0
    assert (routers.replays, routers.closed) == (2, 3)


def test_log_probabilities_of_a_prompt_are_not_asked_for_twice() -> None:
    scored = (TokenLogprob(-1.0, 1), TokenLogprob(-2.0, 2))

    async def run() -> None:
        routers = Routers(
            [None, GenerateChunk((), prompt_logprobs=scored), LOST],
            [None, GenerateChunk((), prompt_logprobs=scored[:1]), LOST],
            [None, GenerateChunk((), "length")],
        )
        request = GenerateRequest("r", (1, 2, 3, 4), 0, prompt_logprobs=1)
        chunks = replaying(routers.attempt, request, wait_s=9, on_replay=lambda: None)
        assert [len(chunk.prompt_logprobs) async for chunk in chunks] == [2, 1, 0]
        assert [request.prompt_scored for request in routers.requests] == [0, 2, 3]

    asyncio.run(run())


def test_tokens_given_at_the_start_stay_in_front() -> None:
    async def run() -> list[GenerateRequest]:
        routers = Routers([token(5), LOST], [token(6, "stop")])
        request = GenerateRequest("r", (1,), 9, generated_ids=(3, 4))
        chunks = replaying(routers.attempt, request, wait_s=9, on_replay=lambda: None)
        assert [c.token_ids async for c in chunks] == [(5,), (6,)]
        return routers.requests

    assert asyncio.run(run())[1].generated_ids == (3, 4, 5)


def test_a_sequence_that_ends_every_router_is_given_up() -> None:
    routers = Routers(*[[None, token(n), LOST] for n in range(MOST + 5)])
    with pytest.raises(RouterLostError):
        asyncio.run(routers.tokens())
    assert routers.seen == list(range(MOST + 1)) and routers.replays == MOST


def test_an_overloaded_router_is_waited_for_in_a_replay_and_refuses_a_new_request() -> None:
    full = OverloadedError("full")
    routers = Routers([token(5), LOST], [full], [full], [token(6, "stop")])
    assert asyncio.run(routers.tokens()) == [5, 6]
    assert routers.replays == 1
    with pytest.raises(OverloadedError):
        asyncio.run(Routers([full]).tokens())


@pytest.mark.parametrize("times", [{"wait_s": 0.05}, {"deadline_s": 0.05}])
def test_without_a_router_in_time_it_is_not_ready(times: dict[str, float]) -> None:
    routers = Routers([None, token(5), LOST], ["wait"])
    with pytest.raises(NotReadyError, match="no router"):
        asyncio.run(routers.tokens(**times))
    assert routers.seen == [5] and routers.closed == 2


def test_a_router_that_has_the_request_may_take_its_time() -> None:
    async def run() -> None:
        routers = Routers([None, "wait"])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await routers.tokens(wait_s=0.02)
        assert routers.closed == 1

    asyncio.run(run())


def test_other_failures_are_not_replayed() -> None:
    routers = Routers([token(5), ExpertUnavailableError(1, ("g0",))])
    with pytest.raises(ExpertUnavailableError):
        asyncio.run(routers.tokens())
    assert routers.replays == 0


def test_closing_the_stream_closes_the_routers() -> None:
    async def run() -> None:
        routers = Routers([token(5), "wait"])
        chunks = replaying(routers.attempt, GenerateRequest("r", (1,), 9), wait_s=9, on_replay=lambda: None)
        await anext(chunks)
        await chunks.aclose()  # type: ignore[attr-defined]
        assert routers.closed == 1

    asyncio.run(run())
