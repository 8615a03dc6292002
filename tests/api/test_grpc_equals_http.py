"""Over gRPC a request has the answer that it has over HTTP, and every field of a body has its place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from pydantic import BaseModel

from raymoe.api.grpc_methods import METHODS
from raymoe.api.requests import ChatRequest, CompletionRequest
from raymoe.api.tokenizing import DetokenizeRequest, TokenizeRequest
from raymoe.v1 import inference_pb2 as v1
from raymoe.v1.bodies import body_of, fill
from tests.api.grpc_server import ask, refused, trailing
from tests.api.scripted import EOS, ScriptedBackend, byte_tokenizer, events, make_service, post

BODIES: dict[type[BaseModel], type[Message]] = {
    CompletionRequest: v1.GenerateRequest,
    ChatRequest: v1.ChatRequest,
    TokenizeRequest: v1.TokenizeRequest,
    DetokenizeRequest: v1.DetokenizeRequest,
}
HTTP_ALONE = {
    "stream",  # methods of their own
    "stream_options",  # a stream always ends with the usage
    "max_completion_tokens",  # max_tokens says it
    *("metadata", "prompt_cache_key", "safety_identifier"),  # labels that OpenAI's clients send
    "response_format",  # guided_json says it
}


def essence(value: Any) -> Any:
    """A body without what differs from answer to answer, what only HTTP has, and what is null, zero or empty."""
    if isinstance(value, list):
        return [essence(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {key: essence(item) for key, item in value.items() if key not in {"id", "created", "object"}}
    return {key: item for key, item in kept.items() if item or type(item) is float}


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("Generate", {"prompt": ["xy", "z"], "n": 2}),
        ("Generate", {"prompt": "xy", "logprobs": 2}),
        ("Generate", {"prompt": "xy", "logprobs": 0, "echo": True}),
        ("Generate", {"prompt": [5, 6, 7], "echo": True, "max_tokens": 0, "logprobs": 1}),
        ("Generate", {"prompt": "xyz", "prompt_logprobs": 1}),
        ("Generate", {"prompt": "xyz", "best_of": 3, "n": 2, "logprobs": 1}),
        ("Chat", {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2}),
        ("Chat", {"messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 0, "n": 2}),
    ],
)
def test_an_answer_is_that_of_the_http_interface(name: str, body: dict[str, Any]) -> None:
    service = make_service(ScriptedBackend("héy", sizes=(2, 3)))
    request = METHODS[name].request()
    fill(request, body)
    path = "/v1/completions" if name == "Generate" else "/v1/chat/completions"
    response = post(service, path, body)
    assert response.status_code == 200, response.text
    assert essence(body_of(ask(service, name, request))) == essence(response.json())
    if "best_of" in body or "prompt_logprobs" in body:
        assert refused(service, f"{name}Stream", request).code() is grpc.StatusCode.INVALID_ARGUMENT
        return
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = [essence(chunk) for chunk in events(post(service, path, body | options).text)]
    pieces = [essence(body_of(piece)) for piece in ask(service, f"{name}Stream", request)]
    # Choices run side by side; each keeps its order.
    assert sorted(pieces, key=_choice) == sorted(chunks, key=_choice)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["ab", "c"], "n": 2, "best_of": 3, "logprobs": 2},
        {"prompt": [7, 8], "echo": True, "prompt_logprobs": 1, "max_tokens": 5},
        {"prompt": "a", "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "typical_p": 0.9},
        {"prompt": "a", "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5},
        {"prompt": "a", "logit_bias": {"5": 1.5, "6": -2}, "stop": ["x", "y"], "stop_token_ids": [9]},
        {"prompt": "a", "min_tokens": 3, "ignore_eos": True, "user": "u", "model": "m"},
        {"prompt": "a", "guided_json": {"type": "integer"}},
        {"prompt": "a", "guided_regex": "a+"},
        {"prompt": "a", "guided_choice": ["a", "b"]},
        {"prompt": "a", "guided_grammar": 'start: "a"'},
    ],
)
def test_the_backend_gets_the_same_sequences(body: dict[str, Any]) -> None:
    backend = ScriptedBackend("x")
    service = make_service(backend)
    body["seed"] = 5
    response = post(service, "/v1/completions", body)
    assert response.status_code == 200, response.text
    over_http = [replace(sequence, request_id="") for sequence in backend.requests]
    backend.requests.clear()
    request = v1.GenerateRequest()
    fill(request, body)
    ask(service, "Generate", request)
    assert [replace(sequence, request_id="") for sequence in backend.requests] == over_http
    assert over_http


def _choice(piece: dict[str, Any]) -> int:
    return piece["choices"][0].get("index", 0) if piece.get("choices") else 1000


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("Tokenize", {"prompt": "hé"}),
        ("Tokenize", {"prompt": "", "add_special_tokens": False}),
        ("Tokenize", {"prompt": "hé", "return_token_strs": True}),
        ("Tokenize", {"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": False}),
        ("Detokenize", {"tokens": [104, 195, 169, EOS]}),
        ("Detokenize", {"tokens": []}),
    ],
)
def test_tokens_are_those_of_the_http_interface(name: str, body: dict[str, Any]) -> None:
    service = make_service(ScriptedBackend(), tokenizer=byte_tokenizer(bos=True))
    request = METHODS[name].request()
    fill(request, body)
    response = post(service, f"/{name.lower()}", body)
    assert response.status_code == 200, response.text
    assert essence(body_of(ask(service, name, request))) == essence(response.json())


def test_what_can_not_be_tokenized_is_refused() -> None:
    service = make_service(ScriptedBackend())
    assert trailing(refused(service, "Tokenize", v1.TokenizeRequest()))["raymoe-param"] == "prompt"
    assert refused(service, "Tokenize", v1.TokenizeRequest(model="n", prompt="x")).code().name == "NOT_FOUND"
    error = refused(service, "Detokenize", v1.DetokenizeRequest(tokens=[999]))
    assert trailing(error)["raymoe-code"] == "token_out_of_vocabulary"


def test_every_field_of_the_bodies_is_there_or_left_out_on_purpose() -> None:
    sampling = set(v1.Sampling.DESCRIPTOR.fields_by_name)
    for body, message in BODIES.items():
        fields = set(message.DESCRIPTOR.fields_by_name)
        if "sampling" in fields:
            fields = fields - {"sampling"} | sampling
        assert fields <= set(body.model_fields)
        assert set(body.model_fields) - fields <= HTTP_ALONE, (
            "give it a place in inference.proto, or in HTTP_ALONE"
        )
