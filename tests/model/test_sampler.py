"""Which token is drawn, how often, and from what."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TypicalLogitsWarper

from raymoe.engine.messages import SamplingParams
from raymoe.model import sampler
from raymoe.model.sampler import Draw, sample, uniform

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 3.0, -2.0])


def draws(params: SamplingParams, count: int = 3000, logits: torch.Tensor = LOGITS) -> Counter[int]:
    return Counter(sample(logits.repeat(count, 1), [Draw(params, position) for position in range(count)]))


def test_greedy_takes_the_largest() -> None:
    assert sample(LOGITS[None], [Draw(SamplingParams(temperature=0), 5)]) == [4]
    assert sample(LOGITS[None], [Draw(SamplingParams(temperature=1, top_k=1), 5)]) == [4]


@given(st.floats(1e-300, 1e-3), st.integers(0, 50))
@settings(max_examples=50, deadline=None)
def test_a_tiny_temperature_is_greedy(temperature: float, position: int) -> None:
    assert sample(LOGITS[None], [Draw(SamplingParams(temperature=temperature), position)]) == [4]


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    params = [SamplingParams(seed=seed) for seed in (0, 1, -1, 2**63, 2**64 - 2)]
    rows = torch.randn(5, 100, generator=torch.Generator().manual_seed(0))
    batch = sample(rows, [Draw(p, 7) for p in params])
    alone = [sample(rows[i : i + 1], [Draw(p, 7)])[0] for i, p in enumerate(params)]
    assert batch == alone
    assert len({uniform(seed, position) for seed in range(20) for position in range(20)}) == 400


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_their_probability_says(temperature: float) -> None:
    expected = torch.softmax(LOGITS.double() / temperature, 0)
    seen = draws(SamplingParams(temperature=temperature))
    for token, share in enumerate(expected.tolist()):
        # Five standard deviations of a binomial count.
        assert abs(seen[token] - 3000 * share) < 5 * (3000 * share * (1 - share)) ** 0.5 + 1


def test_top_k_leaves_the_k_largest() -> None:
    assert set(draws(SamplingParams(temperature=5, top_k=3))) == {4, 0, 1}
    assert set(draws(SamplingParams(temperature=5, top_k=100))) == set(range(6))


def test_top_p_leaves_the_smallest_set_that_reaches_it() -> None:
    mass = torch.softmax(LOGITS.double(), 0).sort(descending=True).values.cumsum(0)
    order = [4, 0, 1, 2, 3, 5]
    for size in range(1, 6):
        top_p = float(mass[size - 1]) - 1e-9
        assert set(draws(SamplingParams(top_p=top_p), 6000)) <= set(order[:size])
        assert set(draws(SamplingParams(top_p=min(top_p + 1e-6, 1.0)), 6000)) <= set(order[: size + 1])
    assert set(draws(SamplingParams(top_p=1e-9))) == {4}


def test_top_p_counts_what_top_k_has_left() -> None:
    # Of tokens 4 and 0 alone, 4 has 0.73 of the mass; of all tokens only 0.63.
    assert set(draws(SamplingParams(top_k=2, top_p=0.7))) == {4}
    assert set(draws(SamplingParams(top_p=0.7))) == {4, 0}


def test_min_p_leaves_what_transformers_leaves() -> None:
    for temperature, min_p in ((1.0, 0.1), (1.0, 0.3), (2.0, 0.2), (0.3, 0.01), (1.0, 1.0)):
        processors = [TemperatureLogitsWarper(temperature), MinPLogitsWarper(min_p)]
        left = LOGITS[None]
        for processor in processors:
            left = processor(None, left)
        expected = set(torch.isfinite(left[0]).nonzero().flatten().tolist())
        assert set(draws(SamplingParams(temperature=temperature, min_p=min_p))) == expected


@pytest.mark.parametrize("temperature", [0.7, 1.0, 3.0])
@pytest.mark.parametrize("typical_p", [1e-6, 0.2, 0.5, 0.9, 0.999])
def test_typical_p_leaves_what_transformers_leaves(temperature: float, typical_p: float) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 2.8, -2.0, 1.7, 0.4])
    scaled = TemperatureLogitsWarper(temperature)(torch.tensor([[0]]), logits[None].double())
    kept = TypicalLogitsWarper(typical_p)(torch.tensor([[0]]), scaled)[0].isfinite().nonzero().flatten()
    params = SamplingParams(temperature=temperature, typical_p=typical_p)
    seen = draws(params, 1, logits)
    weight = torch.exp((logits.double() - logits.max()) / temperature)
    _, ids = sampler._candidates(weight, params)
    assert ids is not None and set(ids.tolist()) == set(kept.tolist()) >= set(seen)


def test_typical_p_counts_what_the_others_have_left_and_never_what_is_impossible() -> None:
    # Of 4 and 0 alone, 4 has 0.73 of the mass and is nearer to the entropy of 0.58 than 0 is.
    assert set(draws(SamplingParams(top_k=2, typical_p=0.7))) == {4}
    assert set(draws(SamplingParams(top_k=2, typical_p=0.74))) == {4, 0}
    assert set(draws(SamplingParams(min_p=0.3, typical_p=0.7))) == {4}
    some = torch.tensor([-torch.inf, 1.0, -torch.inf, 1.0])
    assert set(draws(SamplingParams(typical_p=0.999), 200, some)) == {1, 3}


def test_top_p_counts_what_min_p_has_left() -> None:
    # Of all tokens, 4 and 0 have 0.86 of the mass, so 0.88 takes a third; of what min_p leaves they have 0.90.
    assert set(draws(SamplingParams(top_p=0.88))) == {4, 0, 1}
    assert set(draws(SamplingParams(top_p=0.88, min_p=0.1))) == {4, 0}
    assert set(draws(SamplingParams(top_k=1000, top_p=0.88, min_p=0.1))) == {4, 0}
    assert set(draws(SamplingParams(temperature=50, top_k=2, min_p=0.01))) == {4, 0}


def test_min_p_changes_how_often_only_what_it_leaves_comes() -> None:
    expected = torch.softmax(LOGITS[[0, 4]].double(), 0)
    seen = draws(SamplingParams(min_p=0.3))
    assert abs(seen[0] - 3000 * expected[0]) < 5 * 3000**0.5 / 2


def test_a_flat_distribution_needs_more_than_the_few_largest() -> None:
    flat = torch.randn(2 * sampler._FEW, generator=torch.Generator().manual_seed(1)) * 1e-3
    seen = draws(SamplingParams(top_p=0.9), 2000, flat)
    allowed = set(flat.sort(descending=True).indices[: int(0.91 * len(flat))].tolist())
    assert len(seen) > sampler._FEW
    assert set(seen) <= allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_only_the_row_that_is_not_finite_fails(dtype: torch.dtype) -> None:
    rows = LOGITS.repeat(5, 1)
    rows[1, 2] = float("nan")
    rows[2] = float("-inf")
    rows[3, 0] = float("inf")
    for params in (SamplingParams(temperature=0), SamplingParams(top_p=1e-9)):
        assert sample(rows.to(dtype), [Draw(params, 0)] * 5) == [4, None, None, None, 4]


def test_a_masked_token_is_never_drawn() -> None:
    logits = LOGITS.clone()
    logits[4] = float("-inf")
    assert 4 not in draws(SamplingParams(temperature=50), logits=logits)


def test_only_the_adjusted_row_is_adjusted() -> None:
    greedy, drawn = SamplingParams(temperature=0), SamplingParams(seed=3)

    def forbid(logits_V: torch.Tensor) -> torch.Tensor:
        return logits_V.index_fill(0, torch.tensor([4]), float("-inf"))

    plain = sample(LOGITS.repeat(2, 1), [Draw(greedy, 0), Draw(drawn, 9)])
    mixed = sample(
        LOGITS.repeat(4, 1),
        [Draw(greedy, 0), Draw(greedy, 0, forbid), Draw(drawn, 9), Draw(drawn, 9, forbid)],
    )
    assert mixed[0] == plain[0] == 4 and mixed[1] == 0
    assert mixed[2] == plain[1] and mixed[3] != 4
    nothing = sample(LOGITS[None], [Draw(greedy, 0, lambda logits_V: logits_V.fill_(float("-inf")))])
    assert nothing == [None]


def test_nothing_to_sample_is_nothing() -> None:
    assert sample(torch.empty(0, 6), []) == []
