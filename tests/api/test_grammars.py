"""From the fields of a request to a grammar, or a refusal that names the field."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher

from tests.api.scripted import ScriptedBackend, chat, complete, error_of, make_service

USER = [{"role": "user", "content": "x"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def grammar(ask: Any, **fields: Any) -> str | None:
    backend = ScriptedBackend()
    body = {"messages": USER} if ask is chat else {"prompt": "x"}
    response = ask(make_service(backend), **body, **fields)
    assert response.status_code == 200, response.text
    return backend.requests[0].grammar


@pytest.mark.parametrize("ask", [chat, complete])
@pytest.mark.parametrize(
    ("fields", "holds"),
    [
        ({"response_format": {"type": "json_object"}}, '"type":"object"'),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}, '"a"'),
        ({"guided_json": SCHEMA}, '"a"'),
        ({"guided_json": '{"enum": ["q"]}'}, '"q"'),
        ({"guided_regex": "a+b"}, "a+b"),
        ({"guided_choice": ["yes", 'n"o\n']}, "yes"),
        ({"guided_grammar": 'start: "z"'}, "z"),
    ],
)
def test_each_field_becomes_a_grammar(ask: Any, fields: Any, holds: str) -> None:
    made = grammar(ask, **fields)
    assert made is not None and holds in made
    assert LLMatcher.validate_grammar(made) == ""


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"response_format": None}])
def test_free_texts_have_none(fields: Any) -> None:
    assert grammar(chat, **fields) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "text", "json_schema": {"name": "n"}}}, "response_format.json_schema"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"type": "q"}},
                }
            },
            "response_format.json_schema.schema",
        ),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {"$ref": "#/nowhere"}}, "guided_json"),
        ({"guided_json": {"unevaluatedProperties": {"a": 1}}}, "guided_json"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice[0]"),
        ({"guided_grammar": "start: foo"}, "guided_grammar"),
        ({"guided_grammar": "x" * 100_001}, "guided_grammar"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "min_tokens": 1}, "min_tokens"),
    ],
)
def test_what_can_not_be_followed_is_refused_by_name(fields: Any, param: str) -> None:
    backend = ScriptedBackend()
    response = chat(make_service(backend), messages=USER, **fields)
    assert (response.status_code, error_of(response)["param"]) == (400, param)
    assert backend.requests == []
