"""From a request's `response_format` or `guided_*` field to a grammar in llguidance's own form."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

from llguidance import LLMatcher
from pydantic import BaseModel, ConfigDict, Field

from raymoe.errors import RequestError

MAX_GRAMMAR_CHARS = 100_000
_SPACE: Any = {"whitespace_pattern": "[ \\n\\t]{0,40}"}
"""Between JSON's parts: enough to be indented, and not for ever, which small models fall into."""


class JsonSchema(BaseModel):
    """OpenAI's. `strict` or not, the text fits the schema."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True)

    name: str = Field(max_length=64)
    description: str | None = None
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """`json_schema` belongs to the type of that name."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


def grammar_of(
    response_format: ResponseFormat | None,
    guided_json: dict[str, Any] | str | None,
    guided_regex: str | None,
    guided_choice: list[str] | None,
    guided_grammar: str | None,
) -> str | None:
    """None if the text is free.

    Raises:
        RequestError: a grammar that is wrong or too large, more than one, or a type without its schema.
    """
    made: list[tuple[str, Callable[[], str]]] = []
    if response_format is not None:
        schema = response_format.json_schema
        if (schema is not None) != (response_format.type == "json_schema"):
            raise RequestError("json_schema belongs to type json_schema", "response_format.json_schema")
        if schema is not None:
            made.append(("response_format.json_schema.schema", lambda: _json(schema.schema_)))
        elif response_format.type == "json_object":
            made.append(("response_format", lambda: _json({"type": "object"})))
    if guided_json is not None:
        made.append(("guided_json", lambda: _json(guided_json)))
    if guided_regex is not None:
        made.append(("guided_regex", lambda: LLMatcher.grammar_from_regex(guided_regex)))
    if guided_choice is not None:
        made.append(("guided_choice", lambda: _choice(guided_choice)))
    if guided_grammar is not None:
        made.append(("guided_grammar", lambda: LLMatcher.grammar_from_lark(guided_grammar)))
    if not made:
        return None
    field, make = made[0]
    if len(made) > 1:
        raise RequestError(
            f"only one of {' and '.join(name for name, _ in made)} can be followed", made[1][0]
        )
    return _checked(field, make)


def _checked(field: str, make: Callable[[], str]) -> str:
    try:
        grammar = make()
    except ValueError as error:
        raise RequestError(f"{field} is no grammar: {str(error)[:500]}", field) from None
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise RequestError(f"{field} has more than {MAX_GRAMMAR_CHARS} characters", field)
    problem = LLMatcher.validate_grammar(grammar)
    if problem:
        raise RequestError(f"{field} can't be followed: {problem[:500]}", field)
    return grammar


def _json(schema: dict[str, Any] | str) -> str:
    return str(LLMatcher.grammar_from_json_schema(schema, defaults=_SPACE))


def _choice(choices: list[str]) -> str:
    texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return str(LLMatcher.grammar_from_lark(f"start: {texts}"))
