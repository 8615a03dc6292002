"""Log probabilities against torch's log-softmax, with ties, infinities and rows that are no distribution."""

from __future__ import annotations

import math

import pytest
import torch

from raymoe.model.logprobs import _BLOCK, log_probabilities

GENERATOR = torch.Generator().manual_seed(5)
ROWS = 2 * _BLOCK + 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_equal_a_log_softmax_in_fp32(dtype: torch.dtype) -> None:
    logits = (6 * torch.randn(ROWS, 50, generator=GENERATOR)).to(dtype)
    tokens, tops = [row % 50 for row in range(ROWS)], [row % 7 for row in range(ROWS)]
    expected = torch.log_softmax(logits.float(), -1)
    found = log_probabilities(logits, tokens, tops)
    assert len(found) == ROWS
    for row, one in enumerate(found):
        assert one is not None
        logprob, rank, top = one
        assert logprob == pytest.approx(float(expected[row, tokens[row]]), abs=1e-5)
        assert rank == 1 + int((expected[row] > expected[row, tokens[row]]).sum())
        values = [value for _, value in top]
        assert len(top) == tops[row] and values == sorted(values, reverse=True)
        assert values == pytest.approx(expected[row].topk(tops[row]).values.tolist(), abs=1e-5)
        assert all(value == pytest.approx(float(expected[row, token]), abs=1e-5) for token, value in top)


def test_equal_ones_are_sorted_by_id_and_share_a_rank() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 2.0, 1.0, 3.0]])
    (one,) = log_probabilities(logits, [5], [4])
    assert one is not None and one[1] == 1
    assert [token for token, _ in one[2]] == [1, 5, 3, 0]
    (flat,) = log_probabilities(torch.zeros(1, 300), [299], [3])
    assert flat is not None and [token for token, _ in flat[2]] == [0, 1, 2]
    assert flat[0] == pytest.approx(-math.log(300))


def test_impossible_tokens_have_minus_infinity_and_more_than_all_is_all() -> None:
    (one,) = log_probabilities(torch.tensor([[0.0, -torch.inf, 0.0]]), [1], [9])
    assert one is not None and one[0] == -math.inf and one[1] == 3
    assert [token for token, _ in one[2]] == [0, 2, 1]


@pytest.mark.parametrize("bad", [[torch.nan, 0.0], [torch.inf, 0.0], [-torch.inf, -torch.inf]])
def test_a_row_that_is_no_distribution_has_none_and_spoils_no_other(bad: list[float]) -> None:
    first, second = log_probabilities(torch.tensor([bad, [0.0, 0.0]]), [0, 0], [1, 1])
    assert first is None
    assert second is not None and second[0] == pytest.approx(-math.log(2))
