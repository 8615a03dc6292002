"""The shapes of log probabilities in answers: OpenAI's for both endpoints, and vLLM's `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from raymoe.api.spelling import Speller
from raymoe.engine.messages import TokenLogprob

MAX_TOP = 20
"""How many of the likeliest tokens can be asked for, as at OpenAI and vLLM."""
LEAST = -9999.0
"""What stands for minus infinity, which JSON can't write; OpenAI uses the same number."""


class Scored(NamedTuple):
    """A token of an answer: where its text begins, in characters of the choice's text, and its log probability.

    The first token of an echoed prompt has no log probability, as nothing stands before it.
    """

    token_id: int
    offset: int
    score: TokenLogprob | None


def completion_logprobs(scored: Sequence[Scored], top: int, speller: Speller) -> dict[str, Any]:
    """For /v1/completions. The token itself is among `top_logprobs`, even beyond the `top` likeliest."""
    return {
        "text_offset": [one.offset for one in scored],
        "token_logprobs": [None if one.score is None else _finite(one.score.logprob) for one in scored],
        "tokens": [speller.key(one.token_id) for one in scored],
        "top_logprobs": [
            None if one.score is None else _by_text(one.token_id, one.score, top, speller) for one in scored
        ],
    }


def chat_logprobs(scored: Sequence[Scored], top: int, speller: Speller) -> dict[str, Any]:
    """For /v1/chat/completions."""
    content = []
    for one in scored:
        if one.score is not None:
            likeliest = [_chat_token(token, value, speller) for token, value in one.score.top[:top]]
            content.append(
                {**_chat_token(one.token_id, one.score.logprob, speller), "top_logprobs": likeliest}
            )
    return {"content": content, "refusal": None}


def prompt_logprobs(
    token_ids: Sequence[int], scores: Sequence[TokenLogprob], top: int, speller: Speller
) -> list[dict[str, Any] | None]:
    """vLLM's: by token id, the `top` likeliest and the prompt's own one; null for the prompt's first token."""
    found: list[dict[str, Any] | None] = [None]
    for token_id, score in zip(token_ids[1:], scores, strict=True):
        entries = {token: (place, value) for place, (token, value) in enumerate(score.top[:top], start=1)}
        entries.setdefault(token_id, (score.rank, score.logprob))
        found.append(
            {
                str(token): {
                    "logprob": _finite(value),
                    "rank": rank,
                    "decoded_token": speller.text(token),
                }
                for token, (rank, value) in entries.items()
            }
        )
    return found


def mean_logprob(scored: Sequence[Scored]) -> float:
    """Of the tokens that have one; minus infinity without any."""
    values = [one.score.logprob for one in scored if one.score is not None]
    return sum(values) / len(values) if values else float("-inf")


def _by_text(token_id: int, score: TokenLogprob, top: int, speller: Speller) -> dict[str, float]:
    # Two tokens may be written alike; the likelier one counts.
    found: dict[str, float] = {}
    for token, value in (*score.top[:top], (token_id, score.logprob)):
        found.setdefault(speller.key(token), _finite(value))
    return found


def _chat_token(token_id: int, value: float, speller: Speller) -> dict[str, Any]:
    return {
        "token": speller.text(token_id),
        "logprob": _finite(value),
        "bytes": list(speller.spell(token_id)),
    }


def _finite(value: float) -> float:
    return max(value, LEAST)
