"""Texts that fit their grammars, drawn by an engine beside free ones, preempted and replayed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLMatcher

from raymoe.engine.messages import SamplingParams
from raymoe.errors import EngineError, RequestError
from raymoe.model.grammar import Grammar
from tests.engine.doubles import Answers, engine, request
from tests.tiny import EOS

Folder = Callable[[str], Path]
GENERATOR = torch.Generator().manual_seed(6)
PROMPT = tuple(torch.randint(0, 255, (50,), generator=GENERATOR).tolist())
SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 999}, "ok": {"type": "boolean"}},
    "required": ["id", "ok"],
    "additionalProperties": False,
}
COMPACT = LLMatcher.grammar_from_json_schema(SCHEMA, defaults={"whitespace_flexible": False})
WORDS = LLMatcher.grammar_from_regex("(yes|no)( maybe){2,9}")


def asks(count: int = 4, tokens: int = 90, **fields: Any) -> list[Any]:
    made = []
    for n in range(count):
        sampling = SamplingParams(1.0, seed=n, repetition_penalty=1.1 if n % 2 else 1.0)
        made.append(request(f"json{n}", PROMPT, tokens, sampling=sampling, grammar=COMPACT, **fields))
        made.append(request(f"words{n}", PROMPT, tokens, sampling=sampling, grammar=WORDS, **fields))
        made.append(request(f"free{n}", PROMPT, 30, sampling=sampling, stop_token_ids=()))
    return made


def run(folder: Path, requests: list[Any], **limits: int) -> tuple[Answers, int]:
    one, answers = engine(folder, **limits), Answers()
    for made in requests:
        one.submit(made)
    return answers.drain(one), one.stats()["preemptions"]


def check(answers: Answers, count: int = 4) -> None:
    for n in range(count):
        assert answers.ends[f"json{n}"] == answers.ends[f"words{n}"] == "stop"
        value = json.loads(bytes(answers.tokens[f"json{n}"]))
        assert set(value) == {"id", "ok"} and 0 <= value["id"] <= 999 and type(value["ok"]) is bool
        assert re.fullmatch("(yes|no)( maybe){2,9}", bytes(answers.tokens[f"words{n}"]).decode())


def test_texts_fit_and_free_ones_beside_them_are_as_without(tiny_folder: Folder) -> None:
    folder = tiny_folder("qwen3_moe")
    answers, _ = run(folder, asks())
    check(answers)
    free = [one for one in asks() if one.grammar is None]
    alone, _ = run(folder, free)
    assert alone.tokens == {one.request_id: answers.tokens[one.request_id] for one in free}


def test_preemption_and_replay_change_nothing(tiny_folder: Folder) -> None:
    folder = tiny_folder("qwen3_moe")
    roomy, none = run(folder, asks())
    tight, some = run(folder, asks(), kv_tokens=256)
    assert none == 0 < some and tight.tokens == roomy.tokens
    for cut in (1, 7):
        behind = tuple(roomy.tokens["json0"][:cut])
        again = asks(1, generated_ids=behind)[0]
        rest, _ = run(folder, [again])
        assert rest.tokens["json0"] == roomy.tokens["json0"][cut:]


def test_a_grammar_ends_a_sequence_that_ignores_eos(tiny_folder: Folder) -> None:
    folder = tiny_folder("qwen3_moe")
    answers, _ = run(folder, asks(1, stop_token_ids=()))
    check(answers, 1)
    assert EOS not in answers.tokens["json0"]


def test_a_text_that_is_cut_ends_by_length(tiny_folder: Folder) -> None:
    answers, _ = run(tiny_folder("qwen3_moe"), asks(1, tokens=3))
    assert answers.ends["json0"] == "length" and bytes(answers.tokens["json0"]) == b'{"i'


def test_a_wrong_grammar_is_refused_and_a_failing_one_ends_its_own_request(
    tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_folder("qwen3_moe")
    with pytest.raises(RequestError):
        run(folder, [request("r", PROMPT, grammar="{")])
    accept = Grammar.accept
    monkeypatch.setattr(Grammar, "accept", lambda grammar, token: accept(grammar, 0))
    answers, _ = run(folder, asks(1))
    assert isinstance(answers.ends["json0"], EngineError) and "grammar" in str(answers.ends["json0"])
    assert answers.ends["free0"] == "length"
