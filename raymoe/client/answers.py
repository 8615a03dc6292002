"""Answers as the client's user gets them: the same for completions and chats, whole and in pieces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Usage:
    """Tokens of one request: of its prompts, and generated in all choices."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Choice:
    """One continuation, or what is new of it. `finish_reason` is None while it goes on.

    `logprobs` and `prompt_logprobs` have the shape of the HTTP interface, None if they weren't asked for.
    """

    index: int
    text: str
    finish_reason: str | None
    logprobs: Mapping[str, Any] | None = None
    prompt_logprobs: list[Any] | None = None


@dataclass(frozen=True)
class Answer:
    """A whole answer, or a piece of one: then it has the choices that changed, and the last one the usage."""

    id: str
    model: str
    created: int
    choices: tuple[Choice, ...]
    usage: Usage | None

    @property
    def text(self) -> str:
        """That of the first choice in it; empty without one."""
        return self.choices[0].text if self.choices else ""

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Answer:
        """From the body of an HTTP answer, or of a message (where what is empty is absent)."""
        usage = body.get("usage")
        return cls(
            id=body.get("id", ""),
            model=body.get("model", ""),
            created=body.get("created", 0),
            choices=tuple(_choice(choice, body) for choice in body.get("choices", ())),
            usage=None
            if usage is None
            else Usage(usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)),
        )


def _choice(choice: Mapping[str, Any], body: Mapping[str, Any]) -> Choice:
    turn = choice.get("message") or choice.get("delta") or {}
    return Choice(
        index=choice.get("index", 0),
        text=choice.get("text") or turn.get("content") or "",
        finish_reason=choice.get("finish_reason") or None,
        logprobs=choice.get("logprobs"),
        # A chat has one prompt, so its answer has them beside the choices.
        prompt_logprobs=choice.get("prompt_logprobs", body.get("prompt_logprobs")),
    )
