"""Streams: OpenAI's chunk contract, stop strings, failures in the middle, and clients that leave."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
import openai
import pytest

from raymoe.api.http import create_app
from raymoe.api.service import Service
from raymoe.errors import ExpertUnavailableError
from tests.api.scripted import RawClient, ScriptedBackend, chat, complete, events, make_service, run

USER = [{"role": "user", "content": "x"}]
USAGE = {"include_usage": True}
PATHS = ["/v1/chat/completions", "/v1/completions"]
BODY = {PATHS[0]: {"messages": USER}, PATHS[1]: {"prompt": "x"}}


def text_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(choice.get("text") or "" for chunk in chunks for choice in chunk["choices"])


def test_a_chat_stream_opens_with_roles_and_closes_each_choice_once() -> None:
    response = chat(make_service(ScriptedBackend("héy")), messages=USER, n=2, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert "content-length" not in response.headers
    chunks = events(response.text)
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    for index in (0, 1):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in own) == "héy"
        assert all("role" not in choice["delta"] for choice in own[1:])
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["stop"]
        assert own[-1]["delta"] == {}
    assert all("usage" not in chunk for chunk in chunks)


def test_a_character_of_several_tokens_is_one_chunk_and_none_is_empty() -> None:
    chunks = events(complete(make_service(ScriptedBackend("a😀b")), prompt="x", stream=True).text)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "😀", "b", ""]


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
def test_usage_is_not_sent_unless_asked_for(options: Any) -> None:
    response = complete(make_service(ScriptedBackend()), prompt="x", stream=True, stream_options=options)
    assert all("usage" not in chunk for chunk in events(response.text))


def test_usage_comes_last_without_choices() -> None:
    service = make_service(ScriptedBackend("abc"))
    *chunks, last = events(complete(service, prompt=["x", "y"], n=2, stream=True, stream_options=USAGE).text)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 2, "completion_tokens": 12, "total_tokens": 14}


@pytest.mark.parametrize(
    ("said", "stop", "text", "reason"),
    [
        ("abc\nUser: x", "\nUser:", "abc", "stop"),
        ("abc\nUses", "\nUser:", "abc\nUses", "stop"),
        ("is UPDATED\nx", ["UPDATED", "UPDATED\n"], "is ", "stop"),
        ("is UPDATED\nx", ["UPDATED\n", "UPDATED"], "is ", "stop"),
        ("xab", "x", "", "stop"),
        ("abx", "x", "ab", "stop"),
        ("a😀b", "😀", "a", "stop"),
        ("abab", ["abc", "bc"], "abab", "stop"),
        ("hello", None, "hello", "stop"),
        ("0123456789abcdefgh", "fgh", "0123456789abcdef", "length"),
        ("0123456789abcdefgh", "def", "0123456789abc", "stop"),
    ],
)
@pytest.mark.parametrize("sizes", [(1,), (3, 1, 2), (50,)])
def test_stop_strings_end_the_text_alike_with_and_without_streaming(
    said: str, stop: Any, text: str, reason: str, sizes: tuple[int, ...]
) -> None:
    service = make_service(ScriptedBackend(said, sizes=sizes))
    whole = complete(service, prompt="x", stop=stop).json()["choices"][0]
    assert (whole["text"], whole["finish_reason"]) == (text, reason)
    chunks = events(complete(service, prompt="x", stop=stop, stream=True).text)
    assert text_of(chunks) == text
    assert chunks[-1]["choices"][0] == {"index": 0, "text": "", "logprobs": None, "finish_reason": reason}


@pytest.mark.parametrize("stream", [False, True])
def test_a_matched_stop_string_ends_the_sequence_and_later_tokens_do_not_count(stream: bool) -> None:
    backend = ScriptedBackend("ab-cdefgh", sizes=(5,))
    options = {"stream": True, "stream_options": USAGE} if stream else {}
    response = complete(make_service(backend), prompt="x", stop="-", **options)
    usage = events(response.text)[-1]["usage"] if stream else response.json()["usage"]
    assert usage["completion_tokens"] == 3
    assert not backend.active and len(backend.closed_early) == 1


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("said", [b"", b"ab\xf0\x9f"])
def test_a_stream_of_no_text_or_half_a_character_is_still_complete(path: str, said: bytes) -> None:
    service = make_service(ScriptedBackend(said))
    response = (chat if path == PATHS[0] else complete)(service, **BODY[path], stream=True)
    assert events(response.text)[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("error", "code"),
    [(ExpertUnavailableError(3, ("g1",)), "expert_unavailable"), (RuntimeError("secret"), "internal_error")],
)
def test_a_failure_in_the_middle_is_an_error_event_then_done(
    path: str, error: Exception, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    service = make_service(ScriptedBackend(fail_at=3, error=error))
    with caplog.at_level(logging.ERROR):
        response = (chat if path == PATHS[0] else complete)(service, **BODY[path], stream=True)
    assert response.status_code == 200
    *chunks, last = events(response.text)
    assert last["error"]["code"] == code and "secret" not in last["error"]["message"]
    assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])
    outcomes = [line for line in service.metrics.render().decode().splitlines() if "_requests_total{" in line]
    assert [line.split("} ")[1] for line in outcomes if 'outcome="failed"' in line] == ["1.0"]


def test_a_failing_choice_ends_the_others() -> None:
    def says(request: Any) -> bytes:
        if request.request_id.endswith("-1"):
            raise ExpertUnavailableError(0, ("g0",))
        return b"x" * 16

    backend = ScriptedBackend(says)
    assert complete(make_service(backend), prompt="x", n=2).status_code == 503
    assert not backend.active


async def until_left(raw: RawClient, service: Service, backend: ScriptedBackend, frames: int) -> None:
    serving = asyncio.create_task(raw.call())
    for _ in range(frames):
        await raw.frames.acquire()
    await backend.sleeping.wait()
    assert backend.active
    raw.leave()
    await serving
    assert not backend.active


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(("stream", "sleep_at"), [(True, 0), (True, 3), (False, 0), (False, 3)])
def test_a_client_that_leaves_stops_its_sequences_at_once(
    stream: bool, sleep_at: int, n: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def leave() -> None:
        backend = ScriptedBackend(sleep_at=sleep_at)
        service = make_service(backend)
        raw = RawClient(service, PATHS[0], {"messages": USER, "stream": stream, "n": n})
        # Header, roles and the tokens before the backend falls asleep.
        await until_left(raw, service, backend, 1 + n + n * sleep_at if stream and sleep_at else 0)
        assert len(backend.closed_early) == n
        rendered = service.metrics.render().decode()
        assert 'raymoe_http_requests_total{outcome="cancelled",path="/v1/chat/completions"} 1.0' in rendered
        assert "raymoe_http_requests_in_flight 0.0" in rendered

    run(leave())
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_a_connection_that_breaks_on_sending_stops_the_sequence() -> None:
    async def leave() -> None:
        backend = ScriptedBackend("x" * 40)
        raw = RawClient(make_service(backend), PATHS[1], {"prompt": "x", "stream": True, "max_tokens": 40})
        serving = asyncio.create_task(raw.call())
        await raw.frames.acquire()
        raw.leave()
        await serving
        assert not backend.active and len(backend.closed_early) == 1

    run(leave())


def test_many_clients_that_leave_at_once_leave_nothing_behind() -> None:
    async def leave() -> None:
        backend = ScriptedBackend(sleep_at=1)
        service = make_service(backend)
        clients = [RawClient(service, PATHS[1], {"prompt": "x", "stream": bool(i % 2)}) for i in range(200)]
        serving = [asyncio.create_task(raw.call()) for raw in clients]
        while len(backend.active) < 200:
            await asyncio.sleep(0.01)
        for raw in clients:
            raw.leave()
        await asyncio.gather(*serving)
        assert not backend.active
        assert len(asyncio.all_tasks()) == 1

    run(leave())


def test_a_cancelled_call_stops_its_sequence() -> None:
    async def cancelled() -> None:
        backend = ScriptedBackend(sleep_at=1)
        raw = RawClient(make_service(backend), PATHS[1], {"prompt": "x", "stream": True})
        serving = asyncio.create_task(raw.call())
        await backend.sleeping.wait()
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        assert not backend.active

    run(cancelled())


def official(service: Service) -> openai.AsyncOpenAI:
    transport = httpx.ASGITransport(create_app(service))
    http = httpx.AsyncClient(transport=transport)
    return openai.AsyncOpenAI(api_key="none", base_url="http://test/v1", http_client=http, max_retries=0)


def test_the_official_client_understands_every_answer() -> None:
    async def talk() -> None:
        service = make_service(ScriptedBackend("héllo 😀"))
        async with official(service) as ai:
            assert [model.id async for model in ai.models.list()] == ["m"]
            assert (await ai.models.retrieve("m")).owned_by == "raymoe"
            whole = await ai.chat.completions.create(model="m", messages=USER, n=2, max_completion_tokens=30)
            assert [choice.message.content for choice in whole.choices] == ["héllo 😀"] * 2
            assert whole.usage is not None and whole.usage.completion_tokens == 22
            plain = await ai.completions.create(model="m", prompt=[[1, 2]], max_tokens=7)
            assert (plain.choices[0].text, plain.choices[0].finish_reason) == ("héllo ", "length")
            stream = await ai.chat.completions.create(
                model="m", messages=USER, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "héllo 😀"
            assert chunks[0].choices[0].delta.role == "assistant"
            assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 11
            async with ai.chat.completions.stream(model="m", messages=USER) as helper:
                final = await helper.get_final_completion()
            assert final.choices[0].message.content == "héllo 😀"

    run(talk())


def test_the_official_client_reads_errors_before_and_within_a_stream() -> None:
    async def talk() -> None:
        async with official(make_service(ScriptedBackend())) as ai:
            with pytest.raises(openai.NotFoundError) as missing:
                await ai.chat.completions.create(model="nope", messages=USER)
            assert missing.value.code == "model_not_found"
            with pytest.raises(openai.BadRequestError) as bad:
                await ai.completions.create(model="m", prompt="", stream=True)
            assert bad.value.param == "prompt"
        error = ExpertUnavailableError(3, ("g1",))
        async with official(make_service(ScriptedBackend(fail_at=2, error=error))) as ai:
            stream = await ai.chat.completions.create(model="m", messages=USER, stream=True)
            with pytest.raises(openai.APIError, match="MoE layer 3"):
                [chunk async for chunk in stream]

    run(talk())
