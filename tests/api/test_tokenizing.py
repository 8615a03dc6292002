"""/tokenize and /detokenize answer as vLLM's do."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.scripted import (
    BOS,
    CONTEXT,
    VOCAB,
    ScriptedBackend,
    byte_tokenizer,
    error_of,
    make_service,
    post,
)

SERVICE = make_service(ScriptedBackend(), tokenizer=byte_tokenizer(bos=True))
USER = [{"role": "user", "content": "é"}]


def test_a_prompt_gets_special_tokens_unless_refused() -> None:
    ids = list("aé".encode())
    answer = post(SERVICE, "/tokenize", {"prompt": "aé"}).json()
    assert answer == {"count": 4, "max_model_len": CONTEXT, "tokens": [BOS, *ids], "token_strs": None}
    body = {"model": "m", "prompt": "aé", "add_special_tokens": False, "return_token_strs": True}
    answer = post(SERVICE, "/tokenize", body).json()
    assert (answer["tokens"], answer["token_strs"]) == (ids, ["a", "\ufffd", "\ufffd"])
    assert post(SERVICE, "/tokenize", {"prompt": "", "add_special_tokens": False}).json()["count"] == 0


def test_messages_go_through_the_template() -> None:
    answer = post(SERVICE, "/tokenize", {"messages": USER}).json()
    assert bytes(answer["tokens"]).decode() == "<user>é>"
    answer = post(SERVICE, "/tokenize", {"messages": USER, "add_generation_prompt": False}).json()
    assert bytes(answer["tokens"]).decode() == "<user>é"
    answer = post(SERVICE, "/tokenize", {"messages": USER, "add_special_tokens": True}).json()
    assert answer["tokens"][0] == BOS


def test_ids_become_their_text() -> None:
    body = {"tokens": [BOS, *"é😀".encode()]}
    assert post(SERVICE, "/detokenize", body).json() == {"prompt": "<bos>é😀"}
    assert post(SERVICE, "/detokenize", {"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": USER}, "prompt"),
        ("/tokenize", {"prompt": ["x"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "x", "tools": [1]}, "tools"),
        ("/tokenize", {"prompt": "x", "other": 1}, "other"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["1"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ("/detokenize", {"tokens": [VOCAB]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
    ],
)
def test_what_is_wrong_is_named(path: str, body: Any, param: str) -> None:
    response = post(SERVICE, path, body)
    assert (response.status_code, error_of(response)["param"]) == (400, param)


def test_another_model_is_not_served() -> None:
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        response = post(SERVICE, path, {**body, "model": "nope"})
        assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")
