"""Log probabilities for the sequences of a step that asked for them; the others cost nothing."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

from raymoe.engine.messages import GenerateChunk, TokenLogprob
from raymoe.engine.sequence import Sequence
from raymoe.model.logprobs import log_probabilities


def score_tokens(
    sampled: Seq[Sequence], tokens: Seq[int | None], logits_SV: Tensor
) -> dict[int, tuple[TokenLogprob]]:
    """Of the newly drawn tokens, by row. A token that is None has none."""
    asked = [
        (row, token, sequence.request.logprobs)
        for row, (sequence, token) in enumerate(zip(sampled, tokens, strict=True))
        if sequence.request.logprobs is not None and token is not None
    ]
    if not asked:
        return {}
    rows, chosen, tops = zip(*asked, strict=True)
    scored = log_probabilities(logits_SV[list(rows)], chosen, tops)
    return {row: (TokenLogprob(*one),) for row, one in zip(rows, scored, strict=True) if one is not None}


def score_prompt(sequence: Sequence, logits_RV: Tensor) -> GenerateChunk | None:
    """Of the next prompt tokens, from the logits of the rows before them; the sequence notes that it has them.

    None if some logits are not usable; then the sequence is `unusable`.
    """
    start, top = sequence.scored + 1, sequence.request.prompt_logprobs or 0
    tokens = sequence.tokens[start : start + len(logits_RV)]
    scored = log_probabilities(logits_RV, tokens, [top] * len(tokens))
    usable = tuple(TokenLogprob(*one) for one in scored if one is not None)
    if len(usable) < len(tokens):
        sequence.unusable = True
        return None
    sequence.scored += len(tokens)
    return GenerateChunk((), prompt_logprobs=usable)
