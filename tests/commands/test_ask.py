"""`raymoe generate` and `raymoe chat` against a server that says what it is told."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from raymoe.actors import state
from raymoe.cli import app
from raymoe.errors import AuthenticationError, ContextLengthError, NoAnswerError, RequestError
from tests.api.scripted import ScriptedBackend, make_service
from tests.api.test_admission import guarded
from tests.client.served import served


@pytest.fixture(scope="module")
def backend() -> ScriptedBackend:
    return ScriptedBackend(lambda request: list("wörd\n".encode()))


@pytest.fixture(scope="module")
def urls(backend: ScriptedBackend) -> Iterator[dict[str, str]]:
    with served(make_service(backend, max_context=200)) as found:
        yield found


@pytest.fixture(params=["http", "grpc"])
def url(urls: dict[str, str], request: pytest.FixtureRequest) -> str:
    return urls[request.param]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("RAYMOE_API_KEY", raising=False)


def call(*args: str, stdin: str = "") -> Result:
    return CliRunner().invoke(app, list(args), input=stdin)


def said(*args: str, stdin: str = "") -> str:
    result = call(*args, stdin=stdin)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_generate_prints_the_text_and_passes_its_options_on(url: str, backend: ScriptedBackend) -> None:
    options = ["--max-tokens", "3", "--temperature", "0", "--seed", "5", "--model", "m"]
    assert said("generate", "ab", "--url", url, *options) == "wö\n"
    request = backend.requests[-1]
    assert (bytes(request.prompt_ids), request.max_tokens) == (b"ab", 3)
    assert (request.sampling.temperature, request.sampling.seed) == (0, 5)


def test_without_options_the_defaults_are_the_servers(url: str, backend: ScriptedBackend) -> None:
    assert said("generate", "-", "--url", url, stdin="from stdin") == "wörd\n\n"
    request = backend.requests[-1]
    assert (bytes(request.prompt_ids), request.max_tokens) == (b"from stdin", 16)
    assert request.sampling.temperature == 1


def test_chat_asks_one_question(url: str, backend: ScriptedBackend) -> None:
    assert said("chat", "q", "--url", url, "--system", "s") == "wörd\n\n"
    assert bytes(backend.requests[-1].prompt_ids) == b"<system>s<user>q>"


def test_chat_without_a_question_keeps_the_conversation(url: str, backend: ScriptedBackend) -> None:
    assert said("chat", "--url", url, stdin="one\n\ntwo") == "wörd\n\n" * 2
    wanted = "<user>one<assistant>wörd\n<user>two>"
    assert bytes(backend.requests[-1].prompt_ids).decode() == wanted


def test_a_refused_turn_of_a_conversation_is_told_and_left_out(url: str, backend: ScriptedBackend) -> None:
    result = call("chat", "--url", url, stdin="x" * 300 + "\nshort\n")
    assert result.exit_code == 0 and "raymoe: the prompt has" in result.stderr
    assert bytes(backend.requests[-1].prompt_ids) == b"<user>short>"
    assert isinstance(call("chat", "x" * 300, "--url", url).exception, ContextLengthError)


def test_errors_are_the_servers(url: str) -> None:
    error = call("generate", "x", "--url", url, "--temperature", "9").exception
    assert isinstance(error, RequestError) and error.param == "temperature"


def test_the_key_comes_from_an_option_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(guarded()) as urls:
        for url in urls.values():
            assert isinstance(call("generate", "x", "--url", url).exception, AuthenticationError)
            assert said("generate", "x", "--url", url, "--api-key", "key-a") == "hello\n"
            with monkeypatch.context() as patch:
                patch.setenv("RAYMOE_API_KEY", "key-b")
                assert said("generate", "x", "--url", url) == "hello\n"


def test_the_server_of_this_machine_is_found(urls: dict[str, str]) -> None:
    error = call("chat", "x").exception
    assert isinstance(error, NoAnswerError) and "--url" in str(error)
    pid, born = state.this_process()
    record = state.ServerRecord(
        app="other",
        pid=pid,
        born=born,
        address="",
        private=True,
        host="0.0.0.0",
        port=int(urls["http"].rpartition(":")[2]),
        model="m",
        logs=os.devnull,
    )
    record.write()
    assert said("chat", "x", "--app", "other") == "wörd\n\n"
