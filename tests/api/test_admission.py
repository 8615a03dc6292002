"""Keys, limits and labels through the HTTP interface, with a clock that is a number."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.routing import Route

from raymoe.api.admission import Admission
from raymoe.api.http import create_app
from raymoe.api.keys import KeyRing, digest_of
from raymoe.api.service import Service
from raymoe.config import ClientSettings, Settings
from raymoe.engine.messages import ANONYMOUS
from raymoe.errors import ConfigError
from tests.api.scripted import ScriptedBackend, call, client, complete, error_of, events, make_service, run

PATH = "/v1/completions"
A, B = {"authorization": "Bearer key-a"}, {"authorization": "Bearer key-b"}
KEYS = {"alice": digest_of("key-a"), "bob": digest_of("key-b")}


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def guarded(backend: ScriptedBackend | None = None, clock: Clock | None = None, **allowed: int) -> Service:
    limits = ClientSettings(**allowed)
    admission = Admission(KeyRing(None, KEYS, limits), limits, clock=clock or Clock())
    return make_service(backend or ScriptedBackend(), admission=admission)


def post(service: Service, headers: dict[str, str], **body: Any) -> httpx.Response:
    return call(service, "POST", PATH, json={"prompt": "abc", **body}, headers=headers)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/m", "/metrics", "/version", "/nope"])
def test_everything_but_the_probes_needs_a_key(path: str) -> None:
    service = guarded()
    response = call(service, "GET", path)
    assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
    error = error_of(response)
    assert (error["code"], error["type"], error["param"]) == (
        "invalid_api_key",
        "invalid_request_error",
        None,
    )
    assert "x-request-id" in response.headers
    assert call(service, "GET", path, headers=A).status_code == (404 if path == "/nope" else 200)


def test_probes_need_none_and_they_are_the_only_routes_that_do_not() -> None:
    service = guarded()
    routes = [route for route in create_app(service).routes if isinstance(route, Route)]
    assert len(routes) >= 8
    answered = {
        (route.path, call(service, method, re.sub("{.*}", "m", route.path)).status_code)
        for route in routes
        for method in route.methods or ()
    }
    assert {path for path, status in answered if status != 401} == {"/health", "/ready"}
    assert {status for path, status in answered if path in ("/health", "/ready")} == {200}


def test_without_a_key_no_body_is_read_and_nothing_reaches_the_backend() -> None:
    backend = ScriptedBackend()
    read = []

    async def body() -> Any:
        read.append(1)
        yield b"{}"

    service = guarded(backend)
    for headers in ({}, {"authorization": "Bearer key-c"}, {"authorization": "Basic key-a"}):
        response = call(service, "POST", PATH, content=body(), headers=headers)
        assert error_of(response)["code"] == "invalid_api_key"
    two = [("authorization", "Bearer key-a"), ("authorization", "Bearer key-a")]
    assert call(service, "POST", PATH, content=body(), headers=two).status_code == 401
    assert (backend.requests, read) == ([], [])


def test_the_key_says_whose_request_it_is_and_without_keys_all_are_one_clients() -> None:
    backend = ScriptedBackend()
    service = guarded(backend)
    for headers in (A, B):
        assert post(service, headers, n=2).status_code == 200
    assert [request.client for request in backend.requests] == ["alice", "alice", "bob", "bob"]
    backend = ScriptedBackend()
    assert complete(make_service(backend), prompt="x").status_code == 200
    assert backend.requests[0].client == ANONYMOUS


def test_openais_client_sees_its_own_errors() -> None:
    service = guarded(requests_per_minute=1)

    async def ask(key: str) -> Any:
        transport = httpx.ASGITransport(create_app(service))
        http = httpx.AsyncClient(transport=transport)
        async with openai.AsyncOpenAI(
            api_key=key, base_url="http://test/v1", http_client=http, max_retries=0
        ) as api:
            return await api.completions.create(model="m", prompt="x")

    with pytest.raises(openai.AuthenticationError) as refused:
        run(ask("wrong"))
    assert refused.value.code == "invalid_api_key"
    assert run(ask("key-a")).choices[0].text == "hello"
    with pytest.raises(openai.RateLimitError) as limited:
        run(ask("key-a"))
    assert limited.value.code == "rate_limit_exceeded"


def test_each_client_has_its_own_requests_a_minute() -> None:
    clock = Clock()
    service = guarded(clock=clock, requests_per_minute=2)
    assert [post(service, A).status_code for _ in range(3)] == [200, 200, 429]
    assert post(service, B).status_code == 200
    response = post(service, A)
    assert (response.headers["retry-after"], error_of(response)["code"]) == ("30", "rate_limit_exceeded")
    assert response.headers["x-ratelimit-remaining-requests"] == "0"
    clock.now += 30
    response = post(service, A)
    assert (response.status_code, response.headers["x-ratelimit-limit-requests"]) == (200, "2")


def test_only_what_asks_for_work_counts_as_a_request_and_a_refused_body_does_too() -> None:
    service = guarded(requests_per_minute=2)
    for path in ("/v1/models", "/metrics"):
        assert call(service, "GET", path, headers=A).status_code == 200
    assert post(service, A, nonsense=1).status_code == 400
    assert [post(service, A).status_code for _ in range(2)] == [200, 429]


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_and_generated_tokens_count_for_each_choice(stream: bool) -> None:
    clock = Clock()
    service = guarded(ScriptedBackend("hello"), clock, tokens_per_minute=20)
    response = post(service, A, n=2, stream=stream)
    # "abc" and "hello" twice are 16, of which a stream's headers know what came before its first token.
    assert response.headers["x-ratelimit-limit-tokens"] == "20"
    assert int(response.headers["x-ratelimit-remaining-tokens"]) <= (14 if stream else 4)
    assert post(service, A, n=2, stream=stream).status_code == 200
    response = post(service, A)
    assert (response.status_code, response.headers["retry-after"]) == (429, "39")
    clock.now += 39
    assert post(service, A).status_code == 200


def test_a_stream_counts_as_running_until_it_ends_or_its_client_leaves() -> None:
    backend = ScriptedBackend("hello", sleep_at=2)
    service = guarded(backend, concurrent_requests=1)

    async def two() -> tuple[httpx.Response, httpx.Response]:
        async with client(service) as http:
            slow = asyncio.create_task(http.post(PATH, json={"prompt": "x", "stream": True}, headers=A))
            await backend.sleeping.wait()
            refused = await http.post(PATH, json={"prompt": "x"}, headers=A)
            other = asyncio.create_task(http.post(PATH, json={"prompt": "x"}, headers=B))
            while len(backend.requests) < 2:
                await asyncio.sleep(0)
            for task in (slow, other):
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            backend._sleep_at = None
            return refused, await http.post(PATH, json={"prompt": "x"}, headers=A)

    refused, after = run(two())
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert after.status_code == 200


def test_a_stream_is_one_request() -> None:
    service = guarded(requests_per_minute=1)
    response = post(service, A, stream=True)
    assert events(response.text)
    assert post(service, A).status_code == 429


def test_more_requests_than_the_server_takes_are_refused_whoever_sends_them_and_probes_are_not() -> None:
    backend = ScriptedBackend("hello", sleep_at=0)
    service = make_service(backend, admission=Admission(max_requests=3))

    async def many() -> list[int]:
        async with client(service) as http:
            tasks = [asyncio.create_task(http.post(PATH, json={"prompt": "x"})) for _ in range(10)]
            done, pending = await asyncio.wait(tasks, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            while len(done) < 7:
                more, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                done |= more
            probe = await http.get("/health")
            for task in pending:
                task.cancel()
            await asyncio.wait(pending)
            answers = [task.result() for task in done]
            assert {error_of(answer)["code"] for answer in answers} == {"overloaded"}
            assert {answer.headers["retry-after"] for answer in answers} == {"1"}
            return [*(answer.status_code for answer in answers), probe.status_code]

    assert run(many()) == [429] * 7 + [200]
    backend._sleep_at = None
    assert complete(service, prompt="x").status_code == 200


def test_a_key_with_other_limits_takes_effect_at_once(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.touch(0o600)
    file.write_text(f"alice {KEYS['alice']} requests_per_minute=1\n")
    service = make_service(ScriptedBackend(), admission=Admission(KeyRing(str(file), {}), clock=Clock()))
    assert [post(service, A).status_code for _ in range(2)] == [200, 429]
    file.write_text(f"alice {KEYS['alice']} requests_per_minute=3\n")
    assert [post(service, A).status_code for _ in range(4)] == [200, 200, 200, 429]
    file.write_text("# none\n")
    assert post(service, A).status_code == 401


def test_settings_make_it_and_wrong_ones_are_refused() -> None:
    settings = Settings.build(
        {"server": {"keys": {"alice": KEYS["alice"]}}, "clients": {"requests_per_minute": 1}}
    )
    service = make_service(ScriptedBackend(), admission=Admission.of(settings))
    assert [post(service, A).status_code for _ in range(2)] == [200, 429]
    with pytest.raises(ConfigError, match=r"server.keys alice"):
        Admission.of(Settings.build({"server": {"keys": {"alice": "secret"}}}))


def test_limits_without_keys_are_for_all_requests_together() -> None:
    service = make_service(
        ScriptedBackend(), admission=Admission(allowed=ClientSettings(requests_per_minute=1), clock=Clock())
    )
    assert [post(service, headers).status_code for headers in (A, B)] == [200, 429]
