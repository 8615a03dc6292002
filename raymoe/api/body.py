"""From the bytes of an HTTP body to one JSON object, or a refusal that never repeats the bytes."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any, NoReturn

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from raymoe.api.streams import ClientGoneError
from raymoe.errors import RequestError, TooLargeError, TooSlowError

if TYPE_CHECKING:
    from raymoe.api.service import Limits

_MAYBE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_object(request: Request, limits: Limits) -> dict[str, Any]:
    """The JSON object in a request's body.

    Raises:
        HTTPException: it is said to be something else than JSON (415).
        TooLargeError, TooSlowError: there is more of it than `limits` allow, or it does not come in time.
        RequestError: as `parse_object`.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    # Browsers send other types across origins without asking; a server on loopback must not obey those.
    if kind != "application/json":
        raise HTTPException(415, "the body must be sent with Content-Type: application/json")
    too_large = TooLargeError(f"the body is larger than {limits.body_bytes} bytes (server.max_body_bytes)")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and len(length) < 20 and int(length) > limits.body_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            async for piece in request.stream():
                body += piece
                if len(body) > limits.body_bytes:
                    raise too_large
    except ClientDisconnect:
        raise ClientGoneError from None
    except TimeoutError:
        raise TooSlowError(f"the body did not arrive within {limits.body_timeout_s:g} s") from None
    return parse_object(bytes(body))


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
