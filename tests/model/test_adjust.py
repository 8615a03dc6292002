"""Biases and penalties against transformers' processors and a reference that counts the whole history anew."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from raymoe.engine.messages import SamplingParams
from raymoe.model.adjust import _FIRST_ROOM, Adjustment
from raymoe.model.sampler import Draw, sample

VOCAB = 40
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 3


def adjusted(prompt: list[int], generated: list[int], logits: torch.Tensor = LOGITS, **fields: Any) -> Any:
    adjustment = Adjustment.of(SamplingParams(**fields), prompt)
    assert adjustment is not None
    return adjustment.apply(logits, prompt + generated)


def reference(params: SamplingParams, prompt: list[int], generated: list[int]) -> list[float]:
    """The definition, token by token."""
    out, counts = LOGITS.double().tolist(), Counter(generated)
    for token, bias in params.logit_bias:
        out[token] += bias
    for token in {*prompt, *generated}:
        r = params.repetition_penalty
        out[token] = out[token] / r if out[token] > 0 else out[token] * r
        out[token] -= params.frequency_penalty * counts[token] + params.presence_penalty * (counts[token] > 0)
    for token in params.late_ids if len(generated) < params.min_tokens else ():
        out[token] = float("-inf")
    return out


TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=60)
PARAMS = st.builds(
    SamplingParams,
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.1, 10),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100)).map(
        lambda bias: tuple(bias.items())
    ),
    min_tokens=st.integers(0, 60),
    late_ids=st.sampled_from([(), (3,), (0, VOCAB - 1)]),
)


@given(PARAMS, TOKENS, TOKENS, st.integers(0, 60))
@settings(max_examples=150, deadline=None)
def test_all_together_are_what_the_definition_says_and_counting_goes_on_from_anywhere(
    params: SamplingParams, prompt: list[int], generated: list[int], first: int
) -> None:
    adjustment = Adjustment(params, prompt)
    tokens = prompt + generated[:first]
    adjustment.apply(LOGITS, tokens)
    for token in generated[first:]:
        tokens.append(token)
        adjustment.apply(LOGITS, tokens)
    expected = torch.tensor(reference(params, prompt, generated), dtype=torch.float64)
    torch.testing.assert_close(adjustment.apply(LOGITS, tokens).double(), expected, rtol=1e-5, atol=1e-4)
    # As after a preemption or on another router: a new object meets all tokens at once.
    assert torch.equal(Adjustment(params, prompt).apply(LOGITS, tokens), adjustment.apply(LOGITS, tokens))


@pytest.mark.parametrize("penalty", [0.5, 1.3, 5.0])
def test_repetition_is_transformers_over_prompt_and_generated(penalty: float) -> None:
    ids = [3, 7, 7, 11, 39]
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    expected = processor(torch.tensor([ids]), LOGITS[None].clone())[0]
    for split in range(len(ids) + 1):
        torch.testing.assert_close(
            adjusted(ids[:split], ids[split:], repetition_penalty=penalty), expected, rtol=1e-6, atol=1e-6
        )


def test_presence_and_frequency_count_generated_tokens_alone() -> None:
    changed = adjusted([1, 2], [2, 5, 5, 5], presence_penalty=0.5, frequency_penalty=0.25) - LOGITS
    assert changed[[1, 2, 5]].tolist() == pytest.approx([0, -0.75, -1.25], abs=1e-6)
    assert changed.count_nonzero() == 2


def test_the_order_is_bias_repetition_subtraction() -> None:
    logits = torch.zeros(VOCAB)
    out = adjusted(
        [4],
        [4],
        logits,
        logit_bias=((4, 3.0),),
        repetition_penalty=2.0,
        frequency_penalty=1.0,
        presence_penalty=0.5,
    )
    assert out[4] == 3.0 / 2.0 - 1.0 - 0.5


def test_late_ids_come_only_from_min_tokens_on() -> None:
    fields: dict[str, Any] = {"min_tokens": 2, "late_ids": (5, 9), "logit_bias": ((5, 100.0),)}
    for generated in ([], [1]):
        out = adjusted([0, 0, 0], generated, **fields)
        assert out[[5, 9]].tolist() == [float("-inf")] * 2 and out.isfinite().sum() == VOCAB - 2
    assert adjusted([0, 0, 0], [1, 1], **fields).argmax() == 5


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(0.3, 0.5, 7, 1, 0.2), SamplingParams(min_tokens=3)]
)
def test_parameters_that_change_no_logit_need_no_adjustment(params: SamplingParams) -> None:
    assert Adjustment.of(params, [1, 2]) is None


def test_each_token_is_read_once() -> None:
    class Watched(list[int]):
        reads = 0

        def __getitem__(self, index: Any) -> Any:
            Watched.reads += 1
            return super().__getitem__(index)

    prompt, tokens = [0] * 10, Watched([0] * 10)
    adjustment = Adjustment(SamplingParams(frequency_penalty=1.0), prompt)
    big = torch.zeros(1000)
    for token in range(4 * _FIRST_ROOM):
        tokens.append(token)
        out = adjustment.apply(big, tokens)
    assert Watched.reads == 4 * _FIRST_ROOM
    assert out.sum() == -4 * _FIRST_ROOM


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_models_logits_stay_and_arithmetic_is_fp32(dtype: torch.dtype) -> None:
    logits = LOGITS.to(dtype)
    before = logits.clone()
    with torch.inference_mode():
        inference = logits * 1
    for given_logits in (logits, inference):
        out = adjusted([1], [2], given_logits, frequency_penalty=0.001)
        assert out.dtype == torch.float32 and out[2] == logits[2].double().sub(0.001).float()
    assert torch.equal(logits, before)


@pytest.mark.parametrize("penalty", [1e-300, 1e-30, 1e30, 1e300])
def test_extreme_penalties_make_no_infinity_and_masks_stay(penalty: float) -> None:
    logits = LOGITS.clone()
    logits[:5] = float("-inf")
    out = adjusted(list(range(20)), [], logits, repetition_penalty=penalty)
    assert out[:5].tolist() == [float("-inf")] * 5
    assert out[5:].isfinite().all()


def choose(params: SamplingParams, logits: torch.Tensor, tokens: list[int] | None = None) -> int | None:
    adjustment = Adjustment.of(params, [])
    adjust = adjustment and (lambda row: adjustment.apply(row, tokens or []))
    return sample(logits[None], [Draw(params, 0, adjust)])[0]


@pytest.mark.parametrize("temperature", [0, 1e-300, 1e-5, 1.0, 2.0])
def test_bias_forces_or_forbids_at_any_temperature(temperature: float) -> None:
    best, worst = int(LOGITS.argmax()), int(LOGITS.argmin())
    assert choose(SamplingParams(temperature, logit_bias=((worst, 100.0),)), LOGITS) == worst
    assert choose(SamplingParams(temperature, logit_bias=((best, -100.0),)), LOGITS) != best
    # -100 is not minus infinity: with all of them biased the order stays.
    everything = tuple((token, -100.0) for token in range(VOCAB))
    assert choose(SamplingParams(0, logit_bias=everything), LOGITS) == best
    assert choose(SamplingParams(temperature, logit_bias=everything), LOGITS) is not None


def test_a_row_without_a_token_left_or_with_nan_ends_in_none() -> None:
    forbidden = SamplingParams(0, min_tokens=1, late_ids=tuple(range(VOCAB)))
    assert choose(forbidden, LOGITS) is None
    assert choose(forbidden, LOGITS, [1]) == LOGITS.argmax()
    broken = LOGITS.clone()
    broken[7] = float("nan")
    assert choose(SamplingParams(logit_bias=((7, -100.0),)), broken) is None
