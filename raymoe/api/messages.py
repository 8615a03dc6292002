"""Chat messages as clients send them, and as chat templates want them."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

_NEUTRAL_EMPTY = ("annotations", "tool_calls")
"""Lists that OpenAI's own answers carry empty, so that clients send them back in the history."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class FunctionCall(_Part):
    """The function that an earlier assistant turn called; `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCall(_Part):
    """One call of an earlier assistant turn."""

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall

    def to_template(self) -> dict[str, Any]:
        """As templates expect it: arguments as an object where they are one."""
        try:
            arguments: Any = json.loads(self.function.arguments)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            arguments = self.function.arguments
        return {
            "id": self.id,
            "type": self.type,
            "function": {"name": self.function.name, "arguments": arguments},
        }


class TextPart(_Part):
    """What a list as content consists of."""

    type: Literal["text"]
    text: str


class Message(_Part):
    """One turn. Lists of text parts are joined without a separator."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {
            key: item
            for key, item in value.items()
            if item is not None and not (key in _NEUTRAL_EMPTY and item == [])
        }

    @field_validator("content", mode="before", json_schema_input_type=str | list[TextPart] | None)
    @classmethod
    def _join_parts(cls, value: Any) -> str:
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise ValueError("must be a string or a list of text parts")
        texts = []
        for index, part in enumerate(value):
            if not isinstance(part, dict) or part.get("type") != "text":
                raise ValueError(f"part {index} is not a text part; only text is supported")
            if not isinstance(part.get("text"), str) or set(part) != {"type", "text"}:
                raise ValueError(f"part {index} must hold type and text, and nothing else")
            texts.append(part["text"])
        return "".join(texts)

    @model_validator(mode="after")
    def _fits_role(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls belong to assistant messages")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise ValueError("tool_call_id belongs to tool messages, and each of them has one")
        if self.content is None and not self.tool_calls:
            raise ValueError("content is missing")
        return self

    def to_template(self) -> dict[str, Any]:
        """The dict that a chat template renders. Content is always a string, so none prints `None`."""
        # Templates know "system"; "developer" is OpenAI's newer name of the same role.
        turn: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content or "",
        }
        if self.name is not None:
            turn["name"] = self.name
        if self.tool_calls:
            turn["tool_calls"] = [call.to_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            turn["tool_call_id"] = self.tool_call_id
        return turn
