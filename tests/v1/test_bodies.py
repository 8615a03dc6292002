"""Bodies of the HTTP interface to messages and back, and what is refused on the way."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import Message

from raymoe.errors import RequestError
from raymoe.v1 import inference_pb2 as v1
from raymoe.v1.bodies import body_of, fill, parse

SCORE = {"5": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}}
TOKEN = {"token": "é", "logprob": -1.5, "bytes": [195, 169], "top_logprobs": []}


def there_and_back(kind: type[Message], body: dict[str, Any]) -> dict[str, Any]:
    message = kind()
    fill(message, body)
    return body_of(parse(kind, message.SerializeToString()))


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (
            v1.GenerateRequest,
            {"model": "", "prompt": ["a", "b"], "temperature": 0.0, "seed": -5, "stop": ["x"]},
        ),
        (v1.GenerateRequest, {"prompt": [[1, 2], []], "logit_bias": {"5": 1.5}, "ignore_eos": False, "n": 0}),
        (v1.ChatRequest, {"messages": [{"role": "user", "content": ""}], "logprobs": False, "max_tokens": 3}),
        (
            v1.ChatRequest,
            {"messages": [{"tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}]},
        ),
        (
            v1.GenerateResponse,
            {
                "choices": [
                    {
                        "text": "ab",
                        "logprobs": {
                            "text_offset": [0, 1],
                            "tokens": ["a", "b"],
                            "token_logprobs": [None, -1.0],
                            "top_logprobs": [None, {"b": -1.0}],
                        },
                        "prompt_logprobs": [None, SCORE],
                    }
                ]
            },
        ),
        (v1.ChatResponse, {"prompt_logprobs": [None, SCORE]}),
    ],
)
def test_a_body_comes_back_as_it_was(kind: type[Message], body: dict[str, Any]) -> None:
    assert there_and_back(kind, body) == body


def test_other_spellings_of_the_same() -> None:
    wanted = {"prompt": ["a"], "stop": ["x"]}
    assert there_and_back(v1.GenerateRequest, {"prompt": "a", "stop": "x", "n": None}) == wanted
    assert there_and_back(v1.GenerateRequest, {"prompt": [1, 2]}) == {"prompt": [[1, 2]]}


def test_a_json_schema_is_its_text_in_a_message() -> None:
    assert there_and_back(v1.ChatRequest, {"guided_json": {"type": "integer"}}) == {
        "guided_json": '{"type": "integer"}'
    }
    with pytest.raises(RequestError):
        fill(v1.ChatRequest(), {"model": {}})


def test_bytes_are_numbers_in_a_body() -> None:
    body = {"choices": [{"logprobs": {"content": [TOKEN], "refusal": None}, "finish_reason": None}]}
    message = v1.ChatResponse()
    fill(message, body | {"object": "chat.completion"})
    assert message.choices[0].logprobs.content[0].bytes == "é".encode()
    (token,) = body_of(message)["choices"][0]["logprobs"]["content"]
    assert token == {key: value for key, value in TOKEN.items() if key != "top_logprobs"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temprature": 1}, "temprature"),
        ({"n": 2**40}, "n"),
        ({"n": "many"}, "n"),
        ({"stop": [1]}, "stop"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [["a"]]}, "prompt"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"temperature": "hot"}, "temperature"),
    ],
)
def test_what_no_message_can_hold_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        fill(v1.GenerateRequest(), body)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("data", "text", "param"),
    [
        (b"\xff", "no raymoe.v1.ChatRequest", None),
        (b"\x0a\x01\xff", "invalid UTF-8", None),
        (b"\xf8\x07\x01", "raymoe.v1.ChatRequest has no field 127 here; it has: 1 model", None),
        (b"\x1a\x03\xf8\x07\x01", "raymoe.v1.Sampling has no field 127", "sampling"),
        (b"\x12\x00\x12\x03\xf8\x07\x01", "raymoe.v1.ChatMessage has no field 127", "messages[1]"),
        (b"\x12\x07\x22\x05\x1a\x03\xf8\x07\x01", "no field 127 here", "messages[0].tool_calls[0].function"),
    ],
)  # fmt: skip
def test_malformed_messages_and_unknown_fields_are_refused(data: bytes, text: str, param: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        parse(v1.ChatRequest, data)
    assert text in str(caught.value) and caught.value.param == param
