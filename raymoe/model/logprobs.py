"""Log probabilities of given tokens, and of the most likely ones beside them.

They are the log-softmax in fp32 of the model's logits as they are: before bias, penalties, temperature and cuts.
That is what OpenAI's and vLLM's `logprobs` mean by default. It says what the model thinks, doesn't depend on how a
token was then chosen, and is comparable between requests.

Shape letters: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_BLOCK = 16
"""Rows at once, so that temporary memory is a few rows of the vocabulary, however many are asked for."""

Scored = tuple[float, int, tuple[tuple[int, float], ...]]
"""Log probability of a token; its rank (1: no other is likelier); ids and log probabilities of the likeliest, in
order, equal ones by id."""


def log_probabilities(logits_RV: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[Scored | None]:
    """For each row those of its token in `tokens`, with the `tops` likeliest ones.

    None where a row holds no usable distribution: NaN, plus infinity, or nothing but minus infinity.
    """
    found: list[Scored | None] = []
    for start in range(0, len(tokens), _BLOCK):
        end = min(start + _BLOCK, len(tokens))
        found += _block(logits_RV[start:end].float(), tokens[start:end], tops[start:end])
    return found


def _block(logits_RV: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[Scored | None]:
    sum_R1 = torch.logsumexp(logits_RV, -1, keepdim=True)
    own_R1 = logits_RV.gather(1, torch.tensor(tokens).unsqueeze(1))
    ranks = ((logits_RV > own_R1).sum(-1) + 1).tolist()
    usable = torch.isfinite(sum_R1).flatten().tolist()
    own = (own_R1 - sum_R1).flatten().tolist()
    found: list[Scored | None] = []
    for row, top in enumerate(tops):
        best = _likeliest(logits_RV[row], sum_R1[row], top) if top and usable[row] else ()
        found.append((own[row], ranks[row], best) if usable[row] else None)
    return found


def _likeliest(logits_V: Tensor, sum_1: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    count = min(count, len(logits_V))
    # Which of several equal ones topk takes is not said, so all that reach the last place are sorted by id.
    least = torch.topk(logits_V, count).values[-1]
    ids = torch.nonzero(logits_V >= least).flatten()
    order = torch.sort(logits_V[ids], descending=True, stable=True).indices[:count]
    ids = ids[order]
    return tuple(zip(ids.tolist(), (logits_V[ids] - sum_1).tolist(), strict=True))
