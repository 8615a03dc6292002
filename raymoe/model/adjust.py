"""What a request changes of its logits before a token is chosen: bias, penalties, tokens that may not come yet.

The names and the order are vLLM's (`SamplingParams`, and its sampler's order of operations):

1. `logit_bias` is added to the logits of its tokens.
2. `repetition_penalty` r divides a positive logit and multiplies a negative one, if the token stands in the prompt
   or has been generated (Keskar et al., CTRL, 2019).
3. `frequency_penalty` f and `presence_penalty` p subtract f * count + p * [count > 0] from a logit, where count is
   how often the token has been generated; the prompt doesn't count. This is OpenAI's definition.
4. Below `min_tokens`, tokens of `late_ids` get minus infinity, whatever the steps before made of them.

Then the sampler goes on: temperature, min_p, top_k, top_p, typical_p.

Shape letters: V vocabulary, D distinct tokens that a penalty concerns, B tokens with a bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

_FIRST_ROOM = 64
_LARGEST = torch.finfo(torch.float32).max


class Adjusting(Protocol):
    """Fields of `engine.messages.SamplingParams`, which lies to the right of this package."""

    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def logit_bias(self) -> tuple[tuple[int, float], ...]: ...
    @property
    def min_tokens(self) -> int: ...
    @property
    def late_ids(self) -> tuple[int, ...]: ...


class Adjustment:
    """One sequence's adjustments. What has been generated is counted as it comes, not anew at each token."""

    def __init__(self, params: Adjusting, prompt_ids: Sequence[int]) -> None:
        """All ids lie inside the vocabulary."""
        self._params, self._prompt_length = params, len(prompt_ids)
        self._counts: _Counts | None = None
        if params.repetition_penalty != 1:
            self._counts = _Counts(prompt_ids)
        elif params.presence_penalty or params.frequency_penalty:
            self._counts = _Counts(())
        self._bias_ids_B = torch.tensor([i for i, _ in params.logit_bias], dtype=torch.long)
        self._bias_B = torch.tensor([bias for _, bias in params.logit_bias], dtype=torch.float32)
        self._late_ids = torch.tensor(params.late_ids, dtype=torch.long)

    @classmethod
    def of(cls, params: Adjusting, prompt_ids: Sequence[int]) -> Adjustment | None:
        """None if the parameters change no logit."""
        neutral = (
            params.repetition_penalty == 1
            and not params.presence_penalty
            and not params.frequency_penalty
            and not params.logit_bias
            and not (params.min_tokens and params.late_ids)
        )
        return None if neutral else cls(params, prompt_ids)

    def apply(self, logits_V: Tensor, tokens: Sequence[int]) -> Tensor:
        """The adjusted logits, fp32, in new memory. `tokens`: the prompt and all that has been generated.

        Costs O(V) for the copy and O(D + B) for the rest, whatever the length of `tokens`.
        """
        adjusted_V = logits_V.to(torch.float32, copy=True)
        if len(self._bias_ids_B):
            adjusted_V[self._bias_ids_B] += self._bias_B
        if self._counts is not None:
            self._counts.extend(tokens, self._prompt_length)
            self._penalise(adjusted_V, *self._counts.arrays())
        if len(tokens) - self._prompt_length < self._params.min_tokens:
            adjusted_V[self._late_ids] = float("-inf")
        return adjusted_V

    def _penalise(self, logits_V: Tensor, ids_D: Tensor, counts_D: Tensor) -> None:
        params = self._params
        before_D = logits_V[ids_D].double()
        r = params.repetition_penalty
        after_D = torch.where(before_D > 0, before_D / r, before_D * r)
        after_D -= params.frequency_penalty * counts_D + params.presence_penalty * (counts_D > 0)
        # An extreme r must not make infinities, which would look as if the model had failed.
        after_D = torch.where(before_D.isinf(), before_D, after_D.clamp(-_LARGEST, _LARGEST))
        logits_V[ids_D] = after_D.float()


class _Counts:
    """Distinct tokens in the order in which they came, and how often each was generated."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        """Tokens of the prompt are there from the start, with count 0."""
        distinct = dict.fromkeys(prompt_ids)
        self._place = {token: place for place, token in enumerate(distinct)}
        self._ids = np.zeros(max(2 * len(distinct), _FIRST_ROOM), np.int64)
        self._ids[: len(distinct)] = list(distinct)
        self._counts = np.zeros(len(self._ids), np.float64)
        self._counted = 0

    def extend(self, tokens: Sequence[int], prompt_length: int) -> None:
        """Count what was generated since the last call."""
        for position in range(prompt_length + self._counted, len(tokens)):
            token = tokens[position]
            place = self._place.setdefault(token, len(self._place))
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token
            self._counts[place] += 1
        self._counted = len(tokens) - prompt_length

    def arrays(self) -> tuple[Tensor, Tensor]:
        """Ids and counts, [D] each, int64 and fp64."""
        used = len(self._place)
        return torch.from_numpy(self._ids[:used]), torch.from_numpy(self._counts[:used])
