"""The client against real servers, over both protocols, sync and async: the same answers and the same errors."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints

import pytest

from raymoe.client import Answer, AsyncClient, ChatOptions, Client, GenerateOptions, Message
from raymoe.errors import (
    ConfigError,
    ContextLengthError,
    DeadlineError,
    ModelNotFoundError,
    NoAnswerError,
    OverloadedError,
    RaymoeError,
    RequestError,
)
from raymoe.v1 import inference_pb2 as v1
from tests.api.scripted import ScriptedBackend, make_service, run
from tests.client.served import served

Ask = Callable[..., Any]


def ask_sync(url: str, name: str, *args: Any, **options: Any) -> Any:
    with Client(url, timeout_s=20) as client:
        found = getattr(client, name)(*args, **options)
        return list(found) if name.endswith("_stream") else found


def ask_async(url: str, name: str, *args: Any, **options: Any) -> Any:
    async def ask() -> Any:
        async with AsyncClient(url, timeout_s=20) as client:
            found = getattr(client, name)(*args, **options)
            return [piece async for piece in found] if name.endswith("_stream") else await found

    return run(ask())


@pytest.fixture(scope="module")
def backend() -> ScriptedBackend:
    return ScriptedBackend(lambda request: list("héllo".encode()))


@pytest.fixture(scope="module")
def urls(backend: ScriptedBackend) -> Iterator[dict[str, str]]:
    with served(make_service(backend)) as found:
        yield found


@pytest.fixture(params=["http", "grpc"])
def url(urls: dict[str, str], request: pytest.FixtureRequest) -> str:
    return urls[request.param]


@pytest.fixture(params=[ask_sync, ask_async], ids=["sync", "async"])
def ask(request: pytest.FixtureRequest) -> Ask:
    found: Ask = request.param
    return found


def test_a_completion_with_all_it_has(url: str, ask: Ask) -> None:
    answer = ask(url, "generate", ["a", "b"], max_tokens=4, n=2, temperature=0, model="m")
    assert isinstance(answer, Answer) and answer.text == "hél" and answer.model == "m"
    assert answer.id.startswith("cmpl-") and abs(answer.created - time.time()) < 600
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [
        (i, "hél", "length") for i in range(4)
    ]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 16)


def test_streams_give_the_same_text_and_the_usage_last(url: str, ask: Ask) -> None:
    for pieces in (ask(url, "generate_stream", [1, 2], max_tokens=20), ask(url, "chat_stream", "hi")):
        assert "".join(piece.text for piece in pieces) == "héllo"
        assert [c.finish_reason for piece in pieces for c in piece.choices if c.finish_reason] == ["stop"]
        assert [piece.usage is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert len({piece.id for piece in pieces}) == 1


def test_a_chat(url: str, ask: Ask, backend: ScriptedBackend) -> None:
    messages = [Message(role="system", content="s"), Message(role="user", content="u")]
    answer = ask(url, "chat", messages, stop="lo", seed=3)
    assert (answer.text, answer.choices[0].finish_reason) == ("hél", "stop")
    assert bytes(backend.requests[-1].prompt_ids) == b"<system>s<user>u>"


def test_tokens_and_back(url: str, ask: Ask) -> None:
    ids = ask(url, "tokenize", "hé")
    assert ids == list("hé".encode())
    assert ask(url, "detokenize", ids, model="m") == "hé"
    assert bytes(ask(url, "tokenize", [Message(role="user", content="u")])) == b"<user>u>"
    assert (ask(url, "tokenize", ""), ask(url, "detokenize", [])) == ([], "")


def test_models(url: str, ask: Ask) -> None:
    assert ask(url, "models") == ["m"]


def test_the_layout_is_told_over_grpc_alone(urls: dict[str, str], ask: Ask) -> None:
    assert ask(urls["grpc"], "layout")["epoch"] == 7
    with pytest.raises(RequestError, match="use gRPC"):
        ask(urls["http"], "layout")


@pytest.mark.parametrize("name", ["generate", "generate_stream"])
@pytest.mark.parametrize(
    ("options", "kind", "param"),
    [
        ({"model": "nope"}, ModelNotFoundError, "model"),
        ({"temperature": 3.0}, RequestError, "temperature"),
        ({"max_tokens": 1000}, ContextLengthError, "prompt"),
    ],
)
def test_refusals_are_the_servers_own_errors(
    url: str, ask: Ask, name: str, options: dict[str, Any], kind: type[RequestError], param: str
) -> None:
    with pytest.raises(kind) as caught:
        ask(url, name, "x", **options)
    assert type(caught.value) is kind and caught.value.param == param


def test_an_unknown_option_is_refused_by_name(url: str, ask: Ask) -> None:
    with pytest.raises(RequestError) as caught:
        ask(url, "chat", "x", temprature=1)
    assert caught.value.param == "temprature"


@pytest.mark.parametrize("fail_at", [0, 3])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_failures_keep_their_kind_before_and_within_a_stream(ask: Ask, protocol: str, fail_at: int) -> None:
    with served(make_service(ScriptedBackend(fail_at=fail_at, error=OverloadedError("full", 7)))) as urls:
        with pytest.raises(OverloadedError, match="full") as caught:
            ask(urls[protocol], "generate", "x")
        assert caught.value.retry_after_s == 7
        with pytest.raises(OverloadedError, match="full"):
            ask(urls[protocol], "chat_stream", "x")


def test_internal_errors_say_nothing_but_the_id(ask: Ask) -> None:
    with served(make_service(ScriptedBackend(fail_at=2))) as urls:
        for url in urls.values():
            with pytest.raises(RaymoeError, match="internal error") as caught:
                ask(url, "generate", "x", request_id="mine")
            assert "mine" in str(caught.value) and "secret" not in str(caught.value)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("name", ["generate", "generate_stream"])
def test_a_deadline_ends_the_request_on_both_sides(ask: Ask, protocol: str, name: str) -> None:
    backend = ScriptedBackend(sleep_at=2)
    with served(make_service(backend)) as urls:
        with pytest.raises(DeadlineError, match="within 1 s"):
            ask(urls[protocol], name, "x", timeout_s=1)
        _until_idle(backend)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_leaving_a_stream_stops_its_sequence(protocol: str) -> None:
    backend = ScriptedBackend(sleep_at=2)
    with served(make_service(backend)) as urls:
        with Client(urls[protocol]) as client:
            stream = client.generate_stream("x")
            next(stream)
            stream.close()
            _until_idle(backend)

        async def leave() -> None:
            async with AsyncClient(urls[protocol]) as client:
                stream = client.generate_stream("x")
                await anext(stream)
                await stream.aclose()

        asyncio.run(leave())
        _until_idle(backend)
    assert len(backend.closed_early) == 2


def _until_idle(backend: ScriptedBackend) -> None:
    deadline = time.monotonic() + 30
    while backend.active or not backend.requests:
        assert time.monotonic() < deadline, "the sequence goes on"
        time.sleep(0.01)


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_where_nobody_answers_the_error_names_the_place(ask: Ask, scheme: str) -> None:
    with pytest.raises(NoAnswerError, match=r"127\.0\.0\.1:9\b"):
        ask(f"{scheme}://127.0.0.1:9", "models")


def test_who_speaks_another_protocol_is_no_server(urls: dict[str, str], ask: Ask) -> None:
    with pytest.raises(NoAnswerError):
        ask(urls["http"].replace("http", "grpc"), "models")
    with pytest.raises(NoAnswerError):
        ask(urls["grpc"].replace("grpc", "http"), "models")


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://x", "http://", "grpc://x:1/v1"])
def test_what_is_no_url_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="no URL of a server"):
        Client(url)


def test_options_are_those_of_the_messages() -> None:
    sampling = set(v1.Sampling.DESCRIPTOR.fields_by_name)
    for options, message, rest in (
        (GenerateOptions, v1.GenerateRequest, {"model", "prompt", "sampling"}),
        (ChatOptions, v1.ChatRequest, {"model", "messages", "sampling"}),
    ):
        assert set(get_type_hints(options)) == sampling | set(message.DESCRIPTOR.fields_by_name) - rest
    assert set(get_type_hints(Message)) == set(v1.ChatMessage.DESCRIPTOR.fields_by_name)


def test_the_client_needs_neither_ray_nor_torch() -> None:
    heavy = "{'ray', 'torch', 'transformers', 'fastapi', 'pydantic'}"
    code = f"import sys, raymoe.client; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
