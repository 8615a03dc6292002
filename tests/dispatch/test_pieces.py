import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raymoe.dispatch.pieces import combine, cut
from raymoe.dispatch.table import LanePlan


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(1, 9), st.integers(1, 3), st.data())
def test_pieces_hold_every_pair_once_and_cut_slots_at_fixed_rows(counts, most, top_k, data):
    pairs = sum(counts)
    tokens = -(-pairs // top_k)
    pair_P = np.array(data.draw(st.permutations(range(pairs))), np.int64)
    segments = np.int32([[slot, slot + 1, count] for slot, count in enumerate(counts)])
    hidden = torch.arange(tokens)
    pieces = list(cut(LanePlan(0, pair_P, segments), top_k, tokens, most))
    assert np.concatenate([piece.pair_P for piece in pieces]).tolist() == pair_P.tolist()
    rows_of_slot = {slot: [] for slot in range(len(counts))}
    for piece in pieces:
        assert 0 < len(piece.pair_P) <= most
        assert piece.segments_S3[:, 2].sum() == len(piece.pair_P) == len(piece.row_P)
        travelling = hidden if piece.token_R is None else hidden[torch.from_numpy(piece.token_R)]
        assert travelling[torch.from_numpy(piece.row_P).long()].tolist() == (piece.pair_P // top_k).tolist()
        assert len(set(travelling.tolist())) == len(travelling)
        for slot, generation, count in piece.segments_S3.tolist():
            assert generation == slot + 1
            rows_of_slot[slot].append(count)
    for slot, count in enumerate(counts):
        assert rows_of_slot[slot] == [most] * (count // most) + [count % most] * bool(count % most)


@pytest.mark.parametrize("top_k", [1, 2, 4, 8, 22])
@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_combine_weighs_and_sums_in_slot_order(top_k, tokens):
    out = torch.randn(tokens, top_k, 96) * torch.logspace(0, 6, top_k)[:, None]
    weights = torch.rand(tokens, top_k)
    one_by_one = torch.zeros(tokens, 96)
    for k in range(top_k):
        one_by_one += out[:, k] * weights[:, k : k + 1]
    assert torch.equal(combine(out.clone(), weights, torch.float32), one_by_one)


def test_combine_keeps_the_rows_dtype_when_the_weights_are_wider():
    out, weights = torch.randn(2, 3, 8).bfloat16(), torch.rand(2, 3)
    combined = combine(out.clone(), weights, torch.bfloat16)
    assert torch.equal(combined, (out.float() * weights[..., None]).sum(1).bfloat16())
