"""The body of /v1/responses, validated field by field, and the chat that it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from raymoe.api.fields import Neutral, parse_fields
from raymoe.api.logprobs import MAX_TOP
from raymoe.api.requests import ChatRequest, check_labels

RESPONSES_NEUTRAL: Neutral = {
    "access_programs": (),
    "background": (False,),
    "background_options": (),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "max_tool_calls": (),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "previous_response_id": (),
    "prompt": (),
    "prompt_cache_options": ({},),
    "prompt_cache_retention": ("in_memory",),
    "reasoning": ({}, {"effort": "none"}, {"effort": None}, {"effort": None, "summary": None}),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "stream_options": ({}, {"include_obfuscation": False}),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncation": ("disabled",),
}


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TextFormat(_Part):
    """What the text must fit. All but the type belong to `json_schema`; there the text fits, `strict` or not."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True)

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _fits_type(self) -> TextFormat:
        if self.type == "json_schema" and (self.name is None or self.schema_ is None):
            raise ValueError("json_schema needs a name and a schema")
        if (
            self.type != "json_schema"
            and (self.name, self.description, self.schema_, self.strict) != (None,) * 4
        ):
            raise ValueError("a name, a schema and what describes it belong to type json_schema")
        return self

    def to_chat(self) -> dict[str, Any]:
        """As a chat's `response_format`."""
        if self.type != "json_schema":
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"name": self.name, "schema": self.schema_}}

    def to_answer(self) -> dict[str, Any]:
        """As the response repeats it."""
        return self.model_dump(by_alias=True, exclude_none=True)


class TextOptions(_Part):
    """What is asked of the text."""

    format: TextFormat = Field(default_factory=TextFormat)
    verbosity: Literal["medium"] | None = None


class InputPart(_Part):
    """Text of a turn. Earlier answers come back with `annotations` and `logprobs`, which say nothing to a model."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = Field(default=None, max_length=0)
    logprobs: list[Any] | None = None


class InputMessage(_Part):
    """One turn. Answers of ours are turns too, with an `id` and a `status`."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: list[InputPart]
    id: str | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None
    phase: None = None

    @field_validator("content", mode="before", json_schema_input_type=str | list[InputPart])
    @classmethod
    def _parts(cls, value: Any) -> list[Any]:
        if isinstance(value, str):
            return [{"type": "input_text", "text": value}]
        if not isinstance(value, list):
            raise ValueError("must be a string or a list of text parts")
        return value

    def to_chat(self) -> dict[str, str]:
        """As a chat's message."""
        return {"role": self.role, "content": "".join(part.text for part in self.content)}


class ResponsesRequest(_Part):
    """POST /v1/responses. Nothing is stored: the next request brings all earlier turns along."""

    input: list[InputMessage] = Field(min_length=1)
    model: str | None = None
    instructions: str | None = None
    """Stands in front of all turns, as the system's."""
    max_output_tokens: int | None = Field(default=None, ge=1)
    text: TextOptions = Field(default_factory=TextOptions)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_logprobs: int = Field(default=0, ge=0, le=MAX_TOP)
    include: list[Literal["message.output_text.logprobs"]] = Field(default_factory=list)
    stream: bool = False
    user: str | None = None
    """A label of the client's own, as are the next three fields; they change nothing."""
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] = Field(default_factory=dict, max_length=16)

    @field_validator("input", mode="before", json_schema_input_type=str | list[InputMessage])
    @classmethod
    def _turns(cls, value: Any) -> list[Any]:
        if isinstance(value, str):
            return [{"role": "user", "content": value}]
        if not isinstance(value, list):
            raise ValueError("must be a string or a list of messages")
        return value

    @field_validator("metadata")
    @classmethod
    def _labels(cls, value: dict[str, str]) -> dict[str, str]:
        return check_labels(value)

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> ResponsesRequest:
        """Validate a body; raises RequestError with the field's path."""
        return parse_fields(cls, body, RESPONSES_NEUTRAL)

    @staticmethod
    def own_name(param: str | None) -> str | None:
        """What a field of the chat is called here."""
        names = {"messages": "input", "response_format": "text", "max_completion_tokens": "max_output_tokens"}
        first = (param or "").partition(".")[0].partition("[")[0]
        return names.get(first, param)

    def to_chat(self) -> ChatRequest:
        """The chat that answers it."""
        turns = [turn.to_chat() for turn in self.input]
        if self.instructions is not None:
            turns.insert(0, {"role": "system", "content": self.instructions})
        return ChatRequest.parse(
            {
                "model": self.model,
                "messages": turns,
                "max_completion_tokens": self.max_output_tokens,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "logprobs": bool(self.include or self.top_logprobs),
                "top_logprobs": self.top_logprobs,
                "response_format": self.text.format.to_chat(),
                "stream": self.stream,
            }
        )
