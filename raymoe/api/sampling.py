"""From a request's fields to the parameters of each of its sequences."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Sequence

from raymoe.api.requests import SamplingBody
from raymoe.engine.messages import SamplingParams
from raymoe.errors import RequestError, VocabularyError


def check_ids(ids: Iterable[int], vocab_size: int, field: str) -> None:
    """Raise VocabularyError for `field` if an id is not in 0..vocab_size - 1."""
    if any(not 0 <= token_id < vocab_size for token_id in ids):
        raise VocabularyError(
            f"a token id is outside the vocabulary: ids go from 0 to {vocab_size - 1}", field
        )


def end_ids(request: SamplingBody, eos_ids: Sequence[int]) -> tuple[int, ...]:
    """The tokens that end the request's sequences."""
    eos_ids = () if request.ignore_eos else eos_ids
    return tuple(dict.fromkeys((*eos_ids, *request.stop_token_ids)))


def sampling_params(
    request: SamplingBody, vocab_size: int, eos_ids: Sequence[int], budget: int, copies: int
) -> list[SamplingParams]:
    """Those of `copies` sequences of up to `budget` new tokens; they differ in the seed.

    Raises:
        VocabularyError: `logit_bias` or `stop_token_ids` names a token that there is not.
        RequestError: `min_tokens` is more than `budget`.
    """
    check_ids(request.logit_bias, vocab_size, "logit_bias")
    check_ids(request.stop_token_ids, vocab_size, "stop_token_ids")
    if request.min_tokens > budget:
        raise RequestError(
            f"min_tokens {request.min_tokens} is more than the {budget} tokens that may be generated",
            "min_tokens",
        )
    return [
        SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=min(request.top_k, vocab_size),
            seed=_seed(request.seed, copy),
            min_p=request.min_p,
            typical_p=request.typical_p,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            repetition_penalty=request.repetition_penalty,
            logit_bias=tuple(request.logit_bias.items()),
            min_tokens=request.min_tokens,
            # An ignored EOS ends nothing, but as in vLLM it can't be drawn below min_tokens either.
            late_ids=tuple(dict.fromkeys((*eos_ids, *request.stop_token_ids))) if request.min_tokens else (),
        )
        for copy in range(copies)
    ]


def _seed(given: int | None, copy: int) -> int:
    """A seed in [0, 2**63). Without a given one each choice gets its own at random.

    With one, it depends on the copy alone, so a prompt's text is the same whatever prompts are sent with it.
    """
    if given is None:
        return secrets.randbits(63)
    if copy == 0:
        return given % 2**63
    return int.from_bytes(hashlib.blake2b(f"{given}:{copy}".encode(), digest_size=8).digest()) >> 1
