"""Routes, bodies and errors: always OpenAI's envelope, never a 500 for what a client did."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from raymoe import __version__
from raymoe.api.service import Limits
from raymoe.errors import (
    DeadlineError,
    EngineError,
    ExpertUnavailableError,
    NotReadyError,
    OverloadedError,
)
from tests.api.scripted import (
    ScriptedBackend,
    byte_tokenizer,
    call,
    chat,
    client,
    complete,
    error_of,
    make_service,
    run,
)

JSON = {"content-type": "application/json"}
PATHS = ["/v1/chat/completions", "/v1/completions"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b"null",
        b'"x"',
        b"5",
        b"{",
        b"",
        b"\xff\xfe{}",
        b'{"prompt": NaN}',
        b'{"temperature": Infinity}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [' + b"5," * 4999 + b'5], "prompt": ""}',
        b'{"x\\udfff": 1}',
    ],
    ids=range(14),
)
def test_a_bad_body_is_a_small_bad_request(path: str, body: bytes) -> None:
    backend = ScriptedBackend()
    response = call(make_service(backend), "POST", path, content=body, headers=JSON)
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"
    assert backend.requests == []


def test_an_unpaired_surrogate_is_named_by_its_field_and_a_pair_is_a_character() -> None:
    body = b'{"messages": [{"role": "user", "content": "\\ud83d"}]}'
    response = call(make_service(ScriptedBackend()), "POST", PATHS[0], content=body, headers=JSON)
    assert error_of(response)["param"] == "messages[0].content"
    backend = ScriptedBackend()
    body = b'{"prompt": "\\ud83d\\ude00"}'
    assert call(make_service(backend), "POST", PATHS[1], content=body, headers=JSON).status_code == 200
    assert bytes(backend.requests[0].prompt_ids).decode() == "😀"


def test_other_content_types_are_refused_and_none_is_taken_for_json() -> None:
    service, body = make_service(ScriptedBackend()), b'{"prompt": "x"}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", "nonsense"):
        response = call(service, "POST", PATHS[1], content=body, headers={"content-type": kind})
        assert (response.status_code, error_of(response)["code"]) == (415, "unsupported_media_type")
    assert call(service, "POST", PATHS[1], content=body).status_code == 200
    charset = {"content-type": "Application/JSON; charset=utf-8"}
    assert call(service, "POST", PATHS[1], content=body, headers=charset).status_code == 200


def test_a_body_over_the_limit_is_refused_declared_or_not() -> None:
    service = make_service(ScriptedBackend(), limits=Limits(body_bytes=1000))

    async def pieces() -> Any:
        for _ in range(30):
            yield b"x" * 100

    for content in (b"x" * 1001, pieces()):
        response = call(service, "POST", PATHS[1], content=content, headers=JSON)
        assert (response.status_code, error_of(response)["code"]) == (413, "request_too_large")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nope", 404),
        ("GET", "/", 404),
        ("GET", "/redoc", 404),
        ("POST", "/docs", 405),
        ("GET", "/tokenize", 405),
        ("GET", "/v1/completions/", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/health", 405),
        ("DELETE", "/v1/models/m", 405),
    ],
)
def test_wrong_routes_use_the_envelope(method: str, path: str, status: int) -> None:
    response = call(make_service(ScriptedBackend()), method, path)
    assert response.status_code == status
    assert error_of(response)["code"] in {"not_found", "method_not_allowed"}


def test_models_are_listed_and_found_by_the_listed_id() -> None:
    service = make_service(ScriptedBackend(), model_name="org/name")
    (card,) = call(service, "GET", "/v1/models").json()["data"]
    assert card["id"] == "org/name"
    assert call(service, "GET", f"/v1/models/{card['id']}").json() == card
    response = call(service, "GET", "/v1/models/nope")
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")


def test_health_answers_while_ready_names_the_missing_part() -> None:
    backend = ScriptedBackend()
    service = make_service(backend)
    backend.reason = "expert group g1 is loading"
    assert call(service, "GET", "/health").status_code == 200
    for path in ("/ready", "/v1/models", "/v1/models/m"):
        response = call(service, "GET", path)
        assert response.status_code == 503
        assert error_of(response)["message"] == "expert group g1 is loading"
    backend.reason = None
    assert call(service, "GET", "/ready").status_code == 200
    assert call(service, "GET", "/version").json() == {"version": __version__}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (OverloadedError("queue is full", retry_after_s=7), 429, "overloaded"),
        (NotReadyError("loading"), 503, "not_ready"),
        (DeadlineError("too late"), 504, "deadline_exceeded"),
        (ExpertUnavailableError(3, ("g1",)), 503, "expert_unavailable"),
    ],
)
def test_a_failure_before_the_first_token_keeps_its_status(
    error: Exception, status: int, code: str, stream: bool
) -> None:
    backend = ScriptedBackend(fail_at=0, error=error)
    response = complete(make_service(backend), prompt="x", stream=stream)
    assert (response.status_code, error_of(response)["code"]) == (status, code)
    assert error_of(response)["message"] == str(error)
    assert response.headers.get("retry-after") == {429: "7", 503: "1"}.get(status)


@pytest.mark.parametrize("error", [EngineError("secret detail"), RuntimeError("secret detail"), OSError("x")])
def test_internal_errors_show_only_the_request_id_and_log_the_rest(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    service = make_service(ScriptedBackend(fail_at=0, error=error))
    with caplog.at_level(logging.ERROR):
        response = call(service, "POST", PATHS[1], json={"prompt": "x"}, headers={"x-request-id": "id-1"})
    assert response.status_code == 500
    message = error_of(response)["message"]
    assert "id-1" in message and "secret" not in message
    assert "id-1" in caplog.text and str(error) in caplog.text


def test_a_backend_that_ends_without_a_reason_is_an_internal_error() -> None:
    assert complete(make_service(ScriptedBackend("x", ends=False)), prompt="x").status_code == 500


def test_a_sequence_that_never_ends_meets_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raymoe.api.generation._GRACE_S", 0.0)
    backend = ScriptedBackend(sleep_at=0)
    response = complete(make_service(backend, limits=Limits(request_timeout_s=0.05)), prompt="x")
    assert (response.status_code, error_of(response)["code"]) == (504, "deadline_exceeded")
    assert not backend.active


def test_two_requests_with_one_id_get_their_own_answers() -> None:
    backend = ScriptedBackend(lambda request: bytes(request.prompt_ids).upper())

    async def both() -> Any:
        async with client(make_service(backend)) as http:
            return await asyncio.gather(
                *(
                    http.post(PATHS[1], json={"prompt": prompt}, headers={"x-request-id": "same"})
                    for prompt in ("one", "two")
                )
            )

    answers = run(both())
    assert [answer.json()["choices"][0]["text"] for answer in answers] == ["ONE", "TWO"]
    assert [answer.headers["x-request-id"] for answer in answers] == ["same", "same"]
    assert len({request.request_id for request in backend.requests}) == 2


def test_cancelling_one_of_two_with_one_id_leaves_the_other() -> None:
    async def both() -> None:
        backend = ScriptedBackend(lambda request: bytes(request.prompt_ids).upper(), sleep_at=1)
        service = make_service(backend)
        async with client(service) as http:
            asks = [
                asyncio.create_task(
                    http.post(PATHS[1], json={"prompt": prompt}, headers={"x-request-id": "same"})
                )
                for prompt in ("one", "two")
            ]
            while len(backend.active) < 2:
                await asyncio.sleep(0.001)
            asks[0].cancel()
            await asyncio.wait(asks[:1])
            assert len(backend.active) == 1 and not asks[1].done()
            backend.wake.set()
            assert (await asks[1]).json()["choices"][0]["text"] == "TWO"

    run(both())


def test_request_ids_are_sanitised_and_made_when_absent() -> None:
    service = make_service(ScriptedBackend())
    for given, echoed in ((b"a\tb\x01 c\xe9", "abc"), (b"i" * 2**20, "i" * 128)):
        response = call(service, "GET", "/health", headers={"x-request-id": given})
        assert response.headers["x-request-id"] == echoed
    assert len(call(service, "GET", "/nope").headers["x-request-id"]) == 32
    assert len(call(service, "GET", "/health", headers={"x-request-id": " "}).headers["x-request-id"]) == 32


def test_a_long_prompt_is_tokenized_off_the_loop_with_the_same_result() -> None:
    backend = ScriptedBackend()
    service = make_service(backend, tokenizer=byte_tokenizer(), max_context=100_000)
    assert complete(service, prompt="ab" * 20_000).status_code == 200
    assert bytes(backend.requests[0].prompt_ids) == b"ab" * 20_000


def test_a_completion_and_a_chat_have_openais_shape() -> None:
    service = make_service(ScriptedBackend("hi"))
    answer = complete(service, prompt=["a", "bc"]).json()
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-")
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(0, "hi"), (1, "hi")]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    answer = chat(service, messages=[{"role": "user", "content": "x"}]).json()
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "hi", "refusal": None}
    assert answer["choices"][0]["finish_reason"] == "stop"
