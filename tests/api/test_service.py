"""What reaches the backend, and what is refused before it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3MoeConfig

from raymoe.api.service import Limits, Service
from raymoe.config import Settings
from raymoe.engine.messages import GenerateRequest, SamplingParams
from raymoe.errors import CheckpointError
from tests.api.scripted import (
    BOS,
    CONTEXT,
    EOS,
    VOCAB,
    ScriptedBackend,
    byte_tokenizer,
    chat,
    complete,
    error_of,
    make_service,
)
from tests.api.test_text import metaspace_tokenizer

USER = [{"role": "user", "content": "x"}]


def sent(
    response_of: Any, *, tokenizer: Any = None, options: Any = None, **body: Any
) -> list[GenerateRequest]:
    backend = ScriptedBackend()
    response = response_of(make_service(backend, tokenizer=tokenizer, **(options or {})), **body)
    assert response.status_code == 200, response.text
    return backend.requests


def refused(response_of: Any, *, tokenizer: Any = None, options: Any = None, **body: Any) -> dict[str, Any]:
    """The error; checks that the backend saw nothing, and that the next request is answered."""
    backend = ScriptedBackend()
    service = make_service(backend, tokenizer=tokenizer, **(options or {}))
    response = response_of(service, **body)
    assert response.status_code == 400, response.text
    assert response.headers["content-type"] == "application/json"
    assert backend.requests == []
    assert complete(service, prompt="good").status_code == 200
    return error_of(response)


def test_the_prompt_is_tokenized_and_defaults_are_openais() -> None:
    (request,) = sent(complete, prompt="héllo")
    assert request.prompt_ids == tuple("héllo".encode())
    assert request.max_tokens == 16
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (1.0, 1.0, 0)
    assert request.stop_token_ids == (EOS,)
    assert request.deadline_s == 600.0


def test_a_chat_renders_the_template_and_may_fill_the_context() -> None:
    (request,) = sent(chat, messages=USER)
    assert bytes(request.prompt_ids) == b"<user>x>"
    assert request.max_tokens == CONTEXT - 8


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["ok", ""], [[1], []]])
def test_an_empty_prompt_is_refused(prompt: Any) -> None:
    assert refused(complete, prompt=prompt)["param"] == "prompt"


def test_an_empty_prompt_is_a_prompt_when_the_tokenizer_adds_bos() -> None:
    (request,) = sent(complete, tokenizer=byte_tokenizer(bos=True), prompt="")
    assert request.prompt_ids == (BOS,)


def test_a_chat_gets_no_second_bos() -> None:
    (request,) = sent(chat, tokenizer=byte_tokenizer(bos=True), messages=USER)
    assert bytes(request.prompt_ids) == b"<user>x>"


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 200])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(length: int, stream: bool) -> None:
    error = refused(complete, prompt="x" * length, stream=stream)
    assert error["code"] == "context_length_exceeded"
    assert str(length) in error["message"] and str(CONTEXT) in error["message"]
    error = refused(chat, messages=[{"role": "user", "content": "x" * length}], stream=stream)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


def test_a_given_max_tokens_must_fit_and_an_absent_one_is_cut() -> None:
    assert refused(complete, prompt="x" * 60, max_tokens=16)["code"] == "context_length_exceeded"
    assert refused(complete, prompt="x" * 60, max_tokens=5)["code"] == "context_length_exceeded"
    assert refused(complete, prompt="x", max_tokens=10**9)["code"] == "context_length_exceeded"
    assert sent(complete, prompt="x" * 60)[0].max_tokens == 4
    assert sent(complete, prompt="x" * 60, max_tokens=4)[0].max_tokens == 4
    assert sent(complete, prompt="x", max_tokens=None)[0].max_tokens == 16


def test_a_smaller_kv_cache_limits_instead_of_the_context() -> None:
    small = {"kv_tokens": 20}
    error = refused(complete, options=small, prompt="x" * 20)
    assert error["code"] == "context_length_exceeded" and "KV cache of 20 tokens" in error["message"]
    assert sent(chat, options=small, messages=USER)[0].max_tokens == 12


@pytest.mark.parametrize("prompt", [[VOCAB], [-1], [[1], [VOCAB]], [2**70]])
def test_ids_out_of_the_vocabulary_are_refused(prompt: Any) -> None:
    error = refused(complete, prompt=prompt)
    assert (error["code"], error["param"]) == ("token_out_of_vocabulary", "prompt")
    assert str(VOCAB - 1) in error["message"]


def test_a_tokenizer_that_truncates_or_pads_does_not_change_prompts() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=8)
    assert bytes(sent(complete, tokenizer=tokenizer, prompt="abcdef")[0].prompt_ids) == b"abcdef"


def test_a_completion_continues_its_prompt_and_a_chat_starts_its_own_text() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=metaspace_tokenizer())
    tokenizer.chat_template = "x"
    service = make_service(ScriptedBackend(lambda _: [257, 258]), tokenizer=tokenizer)
    assert complete(service, prompt=[256]).json()["choices"][0]["text"] == " world!"
    assert chat(service, messages=USER).json()["choices"][0]["message"]["content"] == "world!"


def test_several_prompts_with_n_are_one_sequence_each() -> None:
    requests = sent(complete, prompt=["a", "b"], n=2, seed=7)
    assert [bytes(request.prompt_ids) for request in requests] == [b"a", b"a", b"b", b"b"]
    seeds = [request.sampling.seed for request in requests]
    assert seeds[0] == seeds[2] == 7 and seeds[1] == seeds[3] != 7
    assert len({request.request_id for request in requests}) == 4


def test_seeds_are_drawn_when_none_is_given_and_never_negative() -> None:
    seeds = [request.sampling.seed for request in sent(complete, prompt=["a", "a"], n=2)]
    assert len(set(seeds)) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert 0 <= sent(complete, prompt="a", seed=-3)[0].sampling.seed < 2**63


def test_sampling_fields_become_parameters() -> None:
    fields = {
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
    }
    (request,) = sent(complete, prompt="a", logit_bias={"5": 2, str(VOCAB - 1): -100}, **fields)
    assert {name: getattr(request.sampling, name) for name in fields} == fields
    assert request.sampling.logit_bias == ((5, 2.0), (VOCAB - 1, -100.0))
    (request,) = sent(complete, prompt="a")
    assert request.sampling == SamplingParams(seed=request.sampling.seed)


@pytest.mark.parametrize(
    ("fields", "ends", "late"),
    [
        ({}, (EOS,), ()),
        ({"stop_token_ids": [7, 7, EOS]}, (EOS, 7), ()),
        ({"ignore_eos": True}, (), ()),
        ({"ignore_eos": True, "stop_token_ids": [7]}, (7,), ()),
        ({"min_tokens": 2, "stop_token_ids": [7]}, (EOS, 7), (EOS, 7)),
        ({"min_tokens": 2, "ignore_eos": True}, (), (EOS,)),
    ],
)
def test_which_tokens_end_a_sequence_and_which_must_wait(fields: Any, ends: Any, late: Any) -> None:
    (request,) = sent(complete, prompt="a", **fields)
    assert (request.stop_token_ids, request.sampling.late_ids) == (ends, late)
    assert request.sampling.min_tokens == fields.get("min_tokens", 0)


@pytest.mark.parametrize(
    "fields", [{"logit_bias": {str(VOCAB): 1}}, {"stop_token_ids": [VOCAB]}, {"stop_token_ids": [3, -1]}]
)
@pytest.mark.parametrize("of", [complete, chat])
def test_biases_and_stops_outside_the_vocabulary_are_refused(of: Any, fields: Any) -> None:
    error = refused(of, **({"prompt": "a"} if of is complete else {"messages": USER}), **fields)
    assert (error["code"], [error["param"]]) == ("token_out_of_vocabulary", list(fields))
    assert str(VOCAB - 1) in error["message"]


def test_min_tokens_must_fit_into_what_may_be_generated() -> None:
    assert refused(complete, prompt="a", min_tokens=17)["param"] == "min_tokens"
    assert refused(complete, prompt="a", min_tokens=3, max_tokens=2)["param"] == "min_tokens"
    assert refused(chat, messages=USER, min_tokens=CONTEXT)["param"] == "min_tokens"
    assert sent(complete, prompt="a", min_tokens=16)[0].sampling.min_tokens == 16


def test_stop_strings_are_looked_for_behind_min_tokens() -> None:
    def said(**fields: Any) -> tuple[str, str, int]:
        body = complete(make_service(ScriptedBackend("abcabc.")), prompt="x", stop="bc", **fields).json()
        choice = body["choices"][0]
        return choice["text"], choice["finish_reason"], body["usage"]["completion_tokens"]

    assert said() == ("a", "stop", 3)
    assert said(min_tokens=2) == ("abca", "stop", 6)
    assert said(min_tokens=3) == ("abca", "stop", 6)
    assert said(min_tokens=6) == ("abcabc.", "stop", 7)


def test_too_many_choices_are_refused() -> None:
    assert refused(complete, options={"limits": Limits(choices=3)}, prompt=["a", "b"], n=2)["param"] == "n"
    assert refused(complete, options={"limits": Limits(choices=3)}, prompt=["a"] * 4)["param"] == "prompt"


def test_top_k_never_exceeds_the_vocabulary() -> None:
    assert sent(complete, prompt="a", top_k=10**12)[0].sampling.top_k == VOCAB


@pytest.mark.parametrize("name", ["nope", "", "m "])
def test_an_unknown_model_is_not_found_and_the_served_one_is_named(name: str) -> None:
    backend = ScriptedBackend()
    response = complete(make_service(backend), model=name, prompt="x")
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert error["message"].endswith("served: m")
    assert backend.requests == []


def test_the_served_model_may_be_named_or_left_out() -> None:
    assert sent(complete, prompt="x", model="m") and sent(complete, prompt="x", model=None)


def test_a_model_without_a_template_refuses_chats_alone(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = byte_tokenizer(template=None)
    with caplog.at_level(logging.WARNING):
        error = refused(chat, tokenizer=tokenizer, messages=USER)
    assert error["param"] == "messages" and "no chat template" in error["message"]
    assert "no chat template" in caplog.text


def test_a_refusing_template_is_a_bad_request_with_its_text() -> None:
    error = refused(chat, messages=[{"role": "assistant", "content": "x"}])
    assert "first turn must not be the assistant" in error["message"]


def test_a_broken_template_is_a_bad_request_that_shows_nothing() -> None:
    broken = byte_tokenizer(template="{{ 1 + messages[0].content }}")
    error = refused(chat, tokenizer=broken, messages=[{"role": "user", "content": "secret"}])
    assert "can't render" in error["message"] and "secret" not in error["message"]


def test_named_templates_use_the_default_one() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": "D{{ messages[0].content }}", "tool_use": "T"}
    assert bytes(sent(chat, tokenizer=tokenizer, messages=USER)[0].prompt_ids) == b"Dx"


def test_tool_call_history_renders_without_none() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "4"},
    ]
    (request,) = sent(chat, messages=messages)
    assert bytes(request.prompt_ids) == b'<user>x<assistant>[f {"a": 1}]<tool>4>'


def write_checkpoint(folder: Path, **config: Any) -> Path:
    Qwen3MoeConfig(vocab_size=300, max_position_embeddings=64, **config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def test_a_checkpoint_gives_names_limits_and_end_tokens(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny-model", eos_token_id=9)
    settings = Settings.build({"server": {"request_timeout_s": 5, "max_body_bytes": 2048}})
    backend = ScriptedBackend()
    service = Service.from_checkpoint(folder, backend, settings)
    assert service.model_name == "tiny-model"
    assert service.limits == Limits(body_bytes=2048, request_timeout_s=5)
    assert chat(service, messages=USER).status_code == 200
    assert complete(service, prompt=[299]).status_code == 200
    assert backend.requests[0].stop_token_ids == (9,)
    assert backend.requests[0].max_tokens == CONTEXT - 8

    GenerationConfig(eos_token_id=[5, 3]).save_pretrained(folder)
    named = Settings.build({"model": {"name": "other", "max_context": 32}})
    service = Service.from_checkpoint(folder, backend, named)
    assert service.model_name == "other"
    assert complete(service, prompt="x" * 32).status_code == 400
    assert complete(service, prompt="x").status_code == 200
    assert backend.requests[-1].stop_token_ids == (3, 5)


def test_the_jinja_file_wins_over_the_tokenizer_config(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": "C"}))
    backend = ScriptedBackend()
    assert chat(Service.from_checkpoint(folder, backend, Settings()), messages=USER).status_code == 200
    (folder / "chat_template.jinja").write_text("J")
    assert chat(Service.from_checkpoint(folder, backend, Settings()), messages=USER).status_code == 200
    assert [bytes(request.prompt_ids) for request in backend.requests] == [b"C", b"J"]


def test_a_folder_without_a_config_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        Service.from_checkpoint(tmp_path, ScriptedBackend(), Settings())
