"""From the bytes of an HTTP body to one JSON object, or a refusal that never repeats the bytes."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from raymoe.errors import RequestError

_MAYBE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`.

    Raises:
        RequestError: invalid UTF-8 or JSON, anything but an object, NaN or infinity, or half a surrogate pair
            (no tokenizer can encode one).
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not valid UTF-8 (at byte {error.start})") from None
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise RequestError(
            f"the body is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        ) from None
    except RecursionError:
        raise RequestError("the body's JSON is nested too deeply") from None
    except ValueError:  # Python's limit on the digits of an integer
        raise RequestError("the body's JSON holds a number that is too long") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    # Only escapes can smuggle one in, so the walk over every string is rarely needed.
    if _MAYBE_SURROGATE.search(body):
        _refuse_surrogates(value, "")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise RequestError(f"the body's JSON holds {name}, which is not a JSON number")


def _refuse_surrogates(value: Any, path: str) -> None:
    if isinstance(value, str):
        if any("\ud800" <= char <= "\udfff" for char in value):
            raise RequestError(f"{path} holds an unpaired surrogate, which is no character", path)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_surrogates(item, f"{path}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            if any("\ud800" <= char <= "\udfff" for char in key):
                raise RequestError("a field name holds an unpaired surrogate", path or None)
            _refuse_surrogates(item, f"{path}.{key}" if path else key)
