"""From bytes to a JSON object: surrogates by field, and bodies that never come."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from raymoe.api.body import parse_object
from raymoe.api.service import Limits
from raymoe.errors import RequestError
from tests.api.scripted import ScriptedBackend, call, complete, error_of, make_service

PATH = "/v1/completions"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (r'{"prompt": "a\ud800"}', "prompt"),
        (r'{"prompt": ["a", "\udc00b"]}', "prompt[1]"),
        (r'{"prompt": "a\uDBFF\uD800"}', "prompt"),
        (r'{"stop": "\ude00\ud83d"}', "stop"),
        (r'{"stop": ["a", "\ud83d"]}', "stop[1]"),
        (r'{"suffix": "\ud83d"}', "suffix"),
        (r'{"user": "\ud83d"}', "user"),
        (r'{"model": "\ud83d"}', "model"),
        (r'{"messages": [{"role": "user", "content": "\ud83d"}]}', "messages[0].content"),
        (r'{"messages": [{"content": [{"type": "text", "text": "\ud83d"}]}]}', "messages[0].content[0].text"),
        (r'{"messages": [{"name": "\ud83d"}]}', "messages[0].name"),
        (
            r'{"messages": [{"tool_calls": [{"function": {"arguments": "\ud83d"}}]}]}',
            "messages[0].tool_calls[0].function.arguments",
        ),
        (r'{"metadata": {"x\ud83d": "y"}}', "metadata"),
        (r'{"x\ud83d": 1}', None),
    ],
)
def test_half_a_surrogate_pair_is_refused_with_its_field(body: str, param: str | None) -> None:
    with pytest.raises(RequestError, match="unpaired surrogate") as refused:
        parse_object(body.encode())
    assert refused.value.param == param
    for path in (PATH, "/v1/chat/completions"):
        response = call(make_service(ScriptedBackend()), "POST", path, content=body)
        assert (response.status_code, error_of(response)["param"]) == (400, param)


@pytest.mark.parametrize("raw", [b"\xed\xa0\xbd", b"\xff", b"\xc0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82"])
def test_bytes_that_are_no_utf8_are_refused_with_their_place(raw: bytes) -> None:
    with pytest.raises(RequestError, match=r"not valid UTF-8 .at byte 13"):
        parse_object(b'{"prompt": "x' + raw + b'"}')


def test_pairs_and_escaped_backslashes_pass() -> None:
    assert parse_object(rb'{"a": "\ud83d\ude00 \\ud83d"}') == {"a": "😀 \\ud83d"}


def test_a_body_that_does_not_come_is_given_up() -> None:
    async def never() -> Any:
        yield b"{"
        await asyncio.sleep(3600)

    service = make_service(ScriptedBackend(), limits=Limits(body_timeout_s=0.05))
    response = call(service, "POST", PATH, content=never())
    assert (response.status_code, error_of(response)["code"]) == (408, "request_timeout")


def test_a_prompt_longer_than_the_operator_wants_is_refused_with_both_numbers() -> None:
    backend = ScriptedBackend()
    service = make_service(backend, limits=Limits(prompt_tokens=5))
    assert complete(service, prompt="abcde").status_code == 200
    response = complete(service, prompt=["abc", "abcdef"])
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert "6 tokens" in error["message"] and "at most 5" in error["message"]
    assert len(backend.requests) == 1
