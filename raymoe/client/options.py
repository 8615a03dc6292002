"""What can be asked for besides the prompt; names and meanings as in protos/raymoe/v1/inference.proto."""

from __future__ import annotations

from typing import Any, TypedDict


class Sampling(TypedDict, total=False):
    """How tokens are chosen, and when generation ends; for completions and chats alike."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    typical_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: dict[str, float]
    seed: int
    stop: str | list[str]
    stop_token_ids: list[int]
    min_tokens: int
    ignore_eos: bool
    n: int
    user: str
    guided_json: str | dict[str, Any]
    guided_regex: str
    guided_choice: list[str]
    guided_grammar: str


class GenerateOptions(Sampling, total=False):
    """Options of a completion."""

    echo: bool
    logprobs: int
    best_of: int
    prompt_logprobs: int


class ChatOptions(Sampling, total=False):
    """Options of an answer to a conversation."""

    logprobs: bool
    top_logprobs: int
    prompt_logprobs: int


class Message(TypedDict, total=False):
    """One turn of a conversation. `role` and, but for calls of tools, `content` are needed."""

    role: str
    content: str | None
    name: str
    tool_calls: list[dict[str, Any]]
    tool_call_id: str


Prompt = str | list[str] | list[int] | list[list[int]]
"""A text or its token ids, or several."""
