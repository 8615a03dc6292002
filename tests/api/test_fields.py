"""Every field of OpenAI's schema is either implemented, or refused unless its value changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params

from raymoe.api.fields import CHAT_NEUTRAL, COMPLETION_NEUTRAL
from raymoe.api.requests import ChatRequest, CompletionRequest
from raymoe.api.responses_request import RESPONSES_NEUTRAL, ResponsesRequest
from raymoe.errors import RequestError

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
COMPLETION: dict[str, Any] = {"prompt": "x"}


RESPONSE: dict[str, Any] = {"input": "x"}


def schema_fields(params: Any, kind: str = "Completion") -> set[str]:
    """Every field that OpenAI's own client knows today."""
    fields: set[str] = set()
    for name in ("Base", "Streaming", "NonStreaming"):
        fields |= set(getattr(params, f"{kind}CreateParams{name}").__annotations__)
    return fields


ENDPOINTS = [
    pytest.param(ChatRequest, CHAT, CHAT_NEUTRAL, schema_fields(chat_params), id="chat"),
    pytest.param(
        CompletionRequest, COMPLETION, COMPLETION_NEUTRAL, schema_fields(completion_params), id="completions"
    ),
    pytest.param(
        ResponsesRequest,
        RESPONSE,
        RESPONSES_NEUTRAL,
        schema_fields(response_params, "Response"),
        id="responses",
    ),
]


@pytest.mark.parametrize(("model", "body", "neutral", "fields"), ENDPOINTS)
def test_every_field_of_the_schema_is_known_and_in_one_place(
    model: Any, body: Any, neutral: Any, fields: set[str]
) -> None:
    assert fields - set(model.model_fields) - set(neutral) == set()
    assert set(model.model_fields) & set(neutral) == set()
    assert set(neutral) <= fields


@pytest.mark.parametrize(("model", "body", "neutral", "fields"), ENDPOINTS)
def test_null_counts_as_absent_for_every_field(model: Any, body: Any, neutral: Any, fields: set[str]) -> None:
    for field in fields - set(body):
        assert model.parse({**body, field: None}) == model.parse(body)


@pytest.mark.parametrize(("model", "body", "neutral", "fields"), ENDPOINTS)
def test_neutral_values_pass_and_all_others_are_refused_by_name(
    model: Any, body: Any, neutral: Any, fields: set[str]
) -> None:
    for field, accepted in neutral.items():
        for value in accepted:
            assert model.parse({**body, field: value}) == model.parse(body)
        for value in (1.5, 7, "secret-value", ["secret-value"], {"secret-value": 1}):
            with pytest.raises(RequestError) as caught:
                model.parse({**body, field: value})
            assert caught.value.param == field
            assert "not supported" in str(caught.value) and "secret-value" not in str(caught.value)


def test_numbers_and_booleans_are_not_taken_for_each_other() -> None:
    for field, value in (("frequency_penalty", False), ("best_of", True), ("echo", 0), ("logprobs", True)):
        with pytest.raises(RequestError) as caught:
            CompletionRequest.parse({**COMPLETION, field: value})
        assert caught.value.param == field


@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest])
def test_an_unknown_field_is_refused(model: Any) -> None:
    with pytest.raises(RequestError, match="unknown field") as caught:
        model.parse({**CHAT, **COMPLETION, "temprature": 1})
    assert caught.value.param in {"temprature", "prompt", "messages"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -1),
        ("top_k", 1.5),
        ("max_tokens", 0),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
        ("logprobs", "1"),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 21),
        ("echo", 1),
        ("best_of", 0),
        ("best_of", 129),
        ("max_tokens", -1),
        ("max_tokens", "5"),
        ("max_tokens", 1e9),
        ("max_tokens", True),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", "0"),
        ("typical_p", 0),
        ("typical_p", 1.1),
        ("presence_penalty", 2.1),
        ("presence_penalty", True),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", "1"),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("repetition_penalty", float("inf")),
        ("logit_bias", []),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"01": 1}),
        ("logit_bias", {"1.0": 1}),
        ("logit_bias", {"٣": 1}),
        ("logit_bias", {"9" * 5000: 1}),
        ("logit_bias", {"1": 100.1}),
        ("logit_bias", {"1": -101}),
        ("logit_bias", {"1": "1"}),
        ("logit_bias", {"1": True}),
        ("logit_bias", {"1": None}),
        ("logit_bias", {"1": float("inf")}),
        ("logit_bias", {str(token): 0 for token in range(1025)}),
        ("stop_token_ids", 1),
        ("stop_token_ids", ["1"]),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", list(range(129))),
        ("min_tokens", -1),
        ("min_tokens", 1.5),
        ("ignore_eos", 1),
        ("ignore_eos", "true"),
        ("seed", 2**63),
        ("seed", "1"),
        ("n", 0),
        ("n", 129),
        ("stop", ""),
        ("stop", [""]),
        ("stop", ["a"] * 5),
        ("stop", [1]),
        ("stop", 1),
        ("stop", "x" * 2000),
        ("stream", 1),
        ("stream", "true"),
        ("user", 5),
        ("model", 5),
        ("stream_options", {}),
        ("stream_options", {"include_usage": True}),
        ("prompt", 5),
        ("prompt", {}),
        ("prompt", []),
        ("prompt", [1, "a"]),
        ("prompt", [1.0]),
        ("prompt", [True]),
        ("prompt", [[1], 2]),
    ],
)
def test_a_malformed_value_is_refused_with_the_name_of_its_field(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        CompletionRequest.parse({**COMPLETION, field: value})
    assert str(caught.value.param).split("[")[0] == field


@pytest.mark.parametrize("options", [{"include_usage": 1}, {"include_obfuscation": True}, {"other": 1}])
def test_stream_options_are_checked_field_by_field(options: Any) -> None:
    with pytest.raises(RequestError) as caught:
        CompletionRequest.parse({**COMPLETION, "stream": True, "stream_options": options})
    assert caught.value.param == f"stream_options.{next(iter(options))}"


def test_good_values_arrive_as_they_were_sent() -> None:
    request = CompletionRequest.parse(
        {
            "prompt": [[1, 2], [3]],
            "temperature": 0,
            "top_p": 1e-4,
            "top_k": 3,
            "seed": -5,
            "stop": "x",
            "n": 2,
        }
    )
    assert request.prompt == [[1, 2], [3]]
    assert (request.temperature, request.top_p, request.top_k) == (0.0, 1e-4, 3)
    assert (request.seed, request.stop, request.n) == (-5, ["x"], 2)


@pytest.mark.parametrize(("model", "body"), [(ChatRequest, CHAT), (CompletionRequest, COMPLETION)])
def test_sampling_fields_arrive_at_both_endpoints(model: Any, body: Any) -> None:
    fields = {
        "min_p": 1,
        "typical_p": 0.5,
        "presence_penalty": -2,
        "frequency_penalty": 2.0,
        "repetition_penalty": 1.5,
        "logit_bias": {"0": -100, "17": 2.5},
        "stop_token_ids": [3, 3, 4],
        "min_tokens": 2,
        "ignore_eos": True,
    }
    request = model.parse({**body, **fields})
    assert request.logit_bias == {0: -100.0, 17: 2.5}
    assert {name: getattr(request, name) for name in fields if name != "logit_bias"} == {
        name: value for name, value in fields.items() if name != "logit_bias"
    }


@pytest.mark.parametrize(
    ("model", "body", "fields", "param", "why"),
    [
        (CompletionRequest, COMPLETION, {"max_tokens": 0}, "max_tokens", "with echo"),
        (CompletionRequest, COMPLETION, {"n": 3, "best_of": 2}, "best_of", "at least n, which is 3"),
        (CompletionRequest, COMPLETION, {"stream": True, "best_of": 2}, "best_of", "stream"),
        (CompletionRequest, COMPLETION, {"stream": True, "prompt_logprobs": 0}, "prompt_logprobs", "stream"),
        (ChatRequest, CHAT, {"stream": True, "prompt_logprobs": 0}, "prompt_logprobs", "stream"),
        (ChatRequest, CHAT, {"top_logprobs": 1}, "top_logprobs", "logprobs: true"),
        (ChatRequest, CHAT, {"top_logprobs": 21, "logprobs": True}, "top_logprobs", "20"),
        (ChatRequest, CHAT, {"logprobs": 1}, "logprobs", "bool"),
        (ChatRequest, CHAT, {"max_tokens": 0}, "max_tokens", "1"),
    ],
)
def test_fields_that_need_others_say_which(model: Any, body: Any, fields: Any, param: str, why: str) -> None:
    with pytest.raises(RequestError, match=why) as caught:
        model.parse({**body, **fields})
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("model", "body", "fields"),
    [
        (CompletionRequest, COMPLETION, {"max_tokens": 0, "echo": True}),
        (CompletionRequest, COMPLETION, {"stream": True, "n": 2, "best_of": 2}),
        (ChatRequest, CHAT, {"top_logprobs": 0}),
        (ChatRequest, CHAT, {"top_logprobs": 20, "logprobs": True, "stream": True}),
    ],
)
def test_fields_that_fit_together_pass(model: Any, body: Any, fields: Any) -> None:
    request = model.parse({**body, **fields})
    assert {name: getattr(request, name) for name in fields} == fields


@pytest.mark.parametrize(
    "metadata",
    [{"k" * 65: "v"}, {"k": "v" * 513}, {str(n): "v" for n in range(17)}, {"k": 1}, {"k": None}, ["k"]],
)
def test_metadata_are_a_few_short_labels(metadata: Any) -> None:
    good = {"metadata": {"k" * 64: "v" * 512}, "safety_identifier": "me", "prompt_cache_key": "k"}
    assert ChatRequest.parse({**CHAT, **good}).metadata == good["metadata"]
    with pytest.raises(RequestError) as caught:
        ChatRequest.parse({**CHAT, "metadata": metadata})
    assert str(caught.value.param).split(".")[0] == "metadata"


def test_the_newer_token_limit_wins() -> None:
    assert ChatRequest.parse({**CHAT, "max_tokens": 32, "max_completion_tokens": 1}).token_limit == 1
    assert ChatRequest.parse({**CHAT, "max_tokens": 32}).token_limit == 32
    assert ChatRequest.parse(CHAT).token_limit is None
