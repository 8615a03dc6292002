import pytest
import torch

from raymoe.checkpoint.embedded_gate import moe_inputs, router_rows, shares
from tests.checkpoint.test_upcycle import tiny_dense


def blobs(counts: list[int], hidden: int = 32) -> torch.Tensor:
    """Points around one centre per count, all far from the origin in one direction."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(len(counts), hidden, generator=generator) + 3.0
    points = [
        centre + 0.2 * torch.randn(n, hidden, generator=generator)
        for centre, n in zip(centres, counts, strict=True)
    ]
    return torch.cat(points)


def test_tokens_of_one_cluster_go_to_one_copy() -> None:
    states_NH = blobs([200, 160, 140, 100])
    chosen_N = (states_NH @ router_rows(states_NH, copies=4, seed=0).T).argmax(dim=1)
    parts = chosen_N.split([200, 160, 140, 100])
    winners = [int(part.mode().values) for part in parts]
    assert sorted(winners) == [0, 1, 2, 3]
    for part, winner in zip(parts, winners, strict=True):
        assert (part == winner).float().mean() > 0.9


@pytest.mark.parametrize("counts", [[400, 100, 60, 40], [150, 150, 150, 150]])
def test_shares_fall_evenly_from_two_to_one_whatever_the_clusters_are(counts: list[int]) -> None:
    states_NH = blobs(counts)
    share_R = shares(router_rows(states_NH, copies=4, seed=3), states_NH).sort(descending=True).values
    torch.testing.assert_close(share_R, torch.tensor([2, 5 / 3, 4 / 3, 1]) / 6, atol=0.02, rtol=0)


def test_logits_are_centred_and_of_unit_spread_so_that_scores_can_be_steered() -> None:
    states_NH = 50 * blobs([100, 100, 100])
    logits_NR = states_NH @ router_rows(states_NH, copies=3, seed=0).T
    assert float(logits_NR.mean(dim=1).abs().max()) < 1e-3
    assert float(logits_NR.std()) == pytest.approx(1.0, abs=1e-3)


def test_the_seed_alone_decides() -> None:
    states_NH = blobs([100, 80, 60])
    assert torch.equal(router_rows(states_NH, 3, seed=5), router_rows(states_NH, 3, seed=5))
    assert not torch.equal(router_rows(states_NH, 3, seed=5), router_rows(states_NH, 3, seed=6))


def test_moe_inputs_are_the_states_of_all_chats_and_leave_no_hook() -> None:
    dense = tiny_dense()
    states = moe_inputs(dense, [[1, 2, 3], [4, 5]])
    assert [tuple(layer.shape) for layer in states] == [(5, 48)] * 3
    seen: list[torch.Tensor] = []
    dense.model.layers[2].mlp.register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    with torch.no_grad():
        dense(torch.tensor([[4, 5]]))
    torch.testing.assert_close(states[2][3:], seen[0][0])
    assert len(states[2]) == 5
