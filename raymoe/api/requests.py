"""The bodies of /v1/completions and /v1/chat/completions, validated field by field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationInfo, field_validator

from raymoe.api.fields import CHAT_NEUTRAL, COMPLETION_NEUTRAL, parse_fields
from raymoe.api.grammars import ResponseFormat, grammar_of
from raymoe.api.logprobs import MAX_TOP
from raymoe.api.messages import Message
from raymoe.errors import RequestError

MAX_CHOICES = 128
MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
"""Entries; what vLLM's GPU sampler has room for, as is the limit above."""

Prompt = str | list[int]


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class StreamOptions(_Body):
    """`include_usage` asks for a last chunk with the token counts."""

    include_usage: bool | None = False
    include_obfuscation: Literal[False] | None = None


class SamplingBody(_Body):
    """What both endpoints share. The defaults are OpenAI's.

    Extensions, with vLLM's names and meanings: `top_k` (0: no limit), `min_p`, `repetition_penalty`,
    `stop_token_ids`, `min_tokens`, `ignore_eos` and `prompt_logprobs`; and transformers' `typical_p`.
    `model/adjust.py` says what the penalties do, `model/logprobs.py` of which distribution log probabilities are.
    """

    model: str | None = None
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    min_p: float = Field(default=0.0, ge=0, le=1)
    typical_p: float = Field(default=1.0, gt=0, le=1)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    logit_bias: dict[int, float] = Field(default_factory=dict)
    """Token id (in JSON: its decimal digits) to bias."""
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: list[str] = Field(default_factory=list)
    stop_token_ids: list[int] = Field(default_factory=list, max_length=MAX_STOP_TOKEN_IDS)
    min_tokens: int = Field(default=0, ge=0)
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP)
    """Ask for the log probabilities of the prompt's tokens, and of so many of the likeliest beside each."""
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    """A JSON schema. This and the next three are vLLM's, for what the text must fit; see `api/grammars.py`."""
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(default=None, min_length=1)
    guided_grammar: str | None = None
    """In Lark's notation."""
    user: str | None = None
    """A label of the client's own; it changes nothing."""

    @field_validator("stop", mode="before", json_schema_input_type=str | list[str])
    @classmethod
    def _stops(cls, value: Any) -> list[str]:
        stops = [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
            raise ValueError(f"must be a string or a list of at most {MAX_STOPS} strings")
        if len(stops) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop strings are accepted, got {len(stops)}")
        if any(not stop for stop in stops):
            raise ValueError("a stop string can't be empty")
        if any(len(stop) > MAX_STOP_CHARS for stop in stops):
            raise ValueError(f"a stop string has at most {MAX_STOP_CHARS} characters")
        return stops

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _biases(cls, value: Any) -> dict[int, float]:
        if not isinstance(value, dict):
            raise ValueError("must be an object from token ids to numbers")
        if len(value) > MAX_LOGIT_BIAS:
            raise ValueError(f"at most {MAX_LOGIT_BIAS} entries are accepted, got {len(value)}")
        # One way to write an id: else two keys could mean the same token.
        if not all(re.fullmatch("0|[1-9][0-9]{0,17}", key) for key in value):
            raise ValueError("a key must be a token id in decimal digits")
        if not all(type(bias) in (int, float) and -100 <= bias <= 100 for bias in value.values()):
            raise ValueError("a bias must be a number from -100 to 100")
        return {int(key): float(bias) for key, bias in value.items()}

    @field_validator("stream_options")
    @classmethod
    def _needs_stream(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if not info.data.get("stream"):
            raise ValueError("only accepted with stream: true")
        return value

    @field_validator("prompt_logprobs")
    @classmethod
    def _needs_whole(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("stream"):
            raise ValueError("not accepted with stream: true")
        return value

    def grammar(self) -> str | None:
        """What the text must fit, in llguidance's form; raises RequestError if that can't be done."""
        grammar = grammar_of(
            self.response_format, self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar
        )
        if grammar is not None and self.min_tokens:
            raise RequestError("min_tokens can't be kept where a grammar may end the text", "min_tokens")
        return grammar

    @property
    def wanted_logprobs(self) -> int | None:
        """So many of the likeliest tokens beside each generated one; None: no log probabilities."""
        raise NotImplementedError

    @property
    def candidates(self) -> int:
        """Sequences for each prompt, of which `n` are for the client."""
        return self.n

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def check_labels(value: dict[str, str]) -> dict[str, str]:
    """OpenAI's limits for `metadata`; raises ValueError."""
    if any(len(key) > 64 or len(label) > 512 for key, label in value.items()):
        raise ValueError("a key has at most 64 characters, and a value at most 512")
    return value


def _prompts(value: Any) -> list[Prompt]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        if not value:
            raise ValueError("the prompt is empty")
        if all(isinstance(item, str) for item in value):
            return list(value)
        if _are_ids(value):
            return [value]
        if all(isinstance(item, list) and _are_ids(item) for item in value):
            return list(value)
    raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists")


def _are_ids(value: list[Any]) -> bool:
    return all(type(item) is int for item in value)


class CompletionRequest(SamplingBody):
    """POST /v1/completions. `prompt` is kept as a list of texts or token id lists."""

    prompt: Annotated[
        list[Prompt],
        PlainValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ]
    echo: bool = False
    """The prompt stands in front of the text, and its tokens are among `logprobs`."""
    max_tokens: int | None = Field(default=None, ge=0)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP)
    best_of: int | None = Field(default=None, ge=1, le=MAX_CHOICES)

    @field_validator("max_tokens")
    @classmethod
    def _something(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value == 0 and not info.data.get("echo"):
            raise ValueError("0 is only accepted with echo: true")
        return value

    @field_validator("best_of")
    @classmethod
    def _enough(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value < info.data.get("n", 1):
            raise ValueError(f"must be at least n, which is {info.data['n']}")
        if value is not None and value > info.data.get("n", 1) and info.data.get("stream"):
            raise ValueError("not accepted with stream: true: the best is known at the end")
        return value

    @property
    def wanted_logprobs(self) -> int | None:
        """As `logprobs`."""
        return self.logprobs

    @property
    def candidates(self) -> int:
        """`best_of`, or `n`."""
        return self.best_of or self.n

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> CompletionRequest:
        """Validate a body; raises RequestError with the field's path."""
        return parse_fields(cls, body, COMPLETION_NEUTRAL)


class ChatRequest(SamplingBody):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    metadata: dict[str, str] = Field(default_factory=dict, max_length=16)
    """Labels of the client's own, as are the next two fields; they change nothing."""
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MAX_TOP)

    @field_validator("metadata")
    @classmethod
    def _labels(cls, value: dict[str, str]) -> dict[str, str]:
        return check_labels(value)

    @field_validator("top_logprobs")
    @classmethod
    def _needs_logprobs(cls, value: int, info: ValidationInfo) -> int:
        if value and not info.data.get("logprobs"):
            raise ValueError("only accepted with logprobs: true")
        return value

    @property
    def wanted_logprobs(self) -> int | None:
        """As `top_logprobs`."""
        return self.top_logprobs if self.logprobs else None

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> ChatRequest:
        """Validate a body; raises RequestError with the field's path."""
        return parse_fields(cls, body, CHAT_NEUTRAL)

    @property
    def token_limit(self) -> int | None:
        """The newer field wins over the deprecated one."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
