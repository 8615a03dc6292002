"""The body of /v1/responses, validated field by field, and the chat that it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from raymoe.api.fields import Neutral, parse_fields
from raymoe.api.logprobs import MAX_TOP
from raymoe.api.requests import ChatRequest, check_labels

_TEXT_FORMAT = {"type": "text"}

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
    "text": (
        {},
        {"format": _TEXT_FORMAT},
        {"verbosity": "medium"},
        {"format": _TEXT_FORMAT, "verbosity": "medium"},
    ),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncation": ("disabled",),
}


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


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
                "stream": self.stream,
            }
        )
