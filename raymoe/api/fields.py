"""Fields of OpenAI's schema that raymoe knows but does not implement, with the values that change nothing.

A neutral value passes, any other is refused by name: a field accepted and ignored misleads its sender.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from raymoe.errors import RequestError

Model = TypeVar("Model", bound=BaseModel)
Neutral = Mapping[str, tuple[Any, ...]]

CHAT_NEUTRAL: Neutral = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_cache_options": ({},),
    "prompt_cache_retention": ("in_memory",),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}

COMPLETION_NEUTRAL: Neutral = {
    "suffix": ("",),
}


def parse_fields(model: type[Model], body: Mapping[str, Any], neutral: Neutral) -> Model:
    """Validate `body` as `model`. A null field counts as absent.

    Raises:
        RequestError: names the first field that is unknown, not supported, missing or malformed.
    """
    kept: dict[str, Any] = {}
    for field, value in body.items():
        if value is None:
            continue
        if field in model.model_fields:
            kept[field] = value
        elif field not in neutral:
            raise RequestError(
                f"unknown field; this endpoint accepts: {', '.join(sorted(model.model_fields))}", field[:64]
            )
        elif not any(_same(value, accepted) for accepted in neutral[field]):
            accepted = ", ".join(["null", *(repr(value) for value in neutral[field])])
            raise RequestError(f"{field} is not supported; the only accepted values: {accepted}", field)
    try:
        return model.model_validate(kept)
    except ValidationError as error:
        raise _first_error(error) from None


def _same(value: Any, accepted: Any) -> bool:
    # True == 1 in Python, but not in JSON.
    return isinstance(value, bool) == isinstance(accepted, bool) and bool(value == accepted)


def _first_error(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = ""
    for part in first["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part[:64]}" if path else part[:64]
    reason = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        reason = "unknown field"
    return RequestError(f"{path}: {reason}" if path else reason, path or None)
