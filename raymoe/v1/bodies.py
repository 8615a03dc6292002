"""Messages of the gRPC interface as the bodies of the HTTP interface, and back.

Names and meanings are the same, so one pair of functions serves server and client, and each field is checked in
one place. What differs: `sampling` is a message of its own; a prompt has its kind; bytes are numbers in JSON, and
ids as keys of an object text; a message whose only field is `value` stands for that value, or for null.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from raymoe.errors import RequestError
from raymoe.v1.inference_pb2 import Prompt, Sampling

JSON_ONLY = frozenset({"object"})
"""What HTTP answers carry for the sake of OpenAI's clients, and no message has."""

_SCHEMA = "guided_json"
"""In a body this may be an object, in a message it is its text."""
_SAMPLING = frozenset(Sampling.DESCRIPTOR.fields_by_name)


def parse(kind: type[Message], data: bytes) -> Message:
    """The message in `data`.

    Raises:
        RequestError: it is malformed, holds invalid UTF-8, or has a field that this version doesn't know.
    """
    try:
        message = kind.FromString(data)
    except DecodeError:
        raise RequestError(f"this is no {kind.DESCRIPTOR.full_name}, or it holds invalid UTF-8") from None
    _refuse_unknown(message, "")
    return message


def body_of(message: Message) -> dict[str, Any]:
    """What is set in a message, as a JSON body has it.

    Raises:
        RequestError: a prompt without a kind.
    """
    body: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.message_type is Sampling.DESCRIPTOR:
            body |= body_of(value)
        elif _is_map(field):
            body[field.name] = {str(key): _value(entry) for key, entry in value.items()}
        elif field.is_repeated:
            body[field.name] = [_value(item) for item in value]
        else:
            body[field.name] = _value(value)
    return body


def fill(message: Message, body: Mapping[str, Any]) -> None:
    """Set the fields of a message from a JSON body; null counts as absent.

    Raises:
        RequestError: the message has no such field, or the value doesn't fit it.
    """
    fields = message.DESCRIPTOR.fields_by_name
    for name, value in body.items():
        if value is None or name in JSON_ONLY:
            continue
        if name not in fields and name in _SAMPLING and "sampling" in fields:
            fill(message.sampling, {name: value})
        elif name not in fields:
            raise RequestError(f"the gRPC interface has no field {name}", name)
        else:
            try:
                _set(message, fields[name], value)
            except (TypeError, ValueError, AttributeError):
                raise RequestError(f"{name}: this value does not fit the gRPC interface", name) from None


def _value(value: Any) -> Any:
    if isinstance(value, bytes):
        return list(value)
    if isinstance(value, Prompt):
        kind = value.WhichOneof("kind")
        if kind is None:
            raise RequestError("a prompt must hold text or token_ids", "prompt")
        return value.text if kind == "text" else list(value.token_ids.ids)
    if not isinstance(value, Message):
        return value
    body = body_of(value)
    return body.get("value") if _stands_for_its_value(value) else body


def _set(message: Message, field: FieldDescriptor, value: Any) -> None:
    if field.message_type is Prompt.DESCRIPTOR:
        value = _prompts(value)
    if field.name == _SCHEMA and isinstance(value, dict):
        value = json.dumps(value)
    place = getattr(message, field.name)
    if _is_map(field):
        entry = field.message_type.fields_by_name
        for key, item in value.items():
            key = key if entry["key"].type == FieldDescriptor.TYPE_STRING else int(key)
            if entry["value"].message_type is None:
                place[key] = item
            else:
                _put(place[key], item)
    elif field.message_type is None and field.is_repeated:
        place.extend([value] if isinstance(value, str) else value)
    elif field.message_type is None:
        setattr(message, field.name, bytes(value) if field.type == FieldDescriptor.TYPE_BYTES else value)
    elif field.is_repeated:
        for item in value:
            _put(place.add(), item)
    else:
        _put(place, value)


def _put(message: Message, value: Any) -> None:
    message.SetInParent()
    if isinstance(message, Prompt):
        if isinstance(value, str):
            message.text = value
        else:
            message.token_ids.SetInParent()
            message.token_ids.ids.extend(value)
    elif _stands_for_its_value(message):
        fill(message, {"value": value})
    else:
        fill(message, value)


def _prompts(value: Any) -> list[Any]:
    # One text or one list of ids is a list of one prompt.
    if isinstance(value, str) or (value and all(isinstance(item, int) for item in value)):
        return [value]
    return list(value)


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _stands_for_its_value(message: Message) -> bool:
    return list(message.DESCRIPTOR.fields_by_name) == ["value"]


def _refuse_unknown(message: Message, path: str) -> None:
    unknown = UnknownFieldSet(message)
    if len(unknown):
        number = unknown[0].field_number
        known = ", ".join(f"{field.number} {field.name}" for field in message.DESCRIPTOR.fields)
        raise RequestError(
            f"{message.DESCRIPTOR.full_name} has no field {number} here; it has: {known}", path or None
        )
    for field, value in message.ListFields():
        if field.message_type is None or _is_map(field):
            continue
        name = f"{path}.{field.name}" if path else field.name
        if field.is_repeated:
            for index, item in enumerate(value):
                _refuse_unknown(item, f"{name}[{index}]")
        else:
            _refuse_unknown(value, name)
