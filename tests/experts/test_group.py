import numpy as np
import pytest
import torch

from raymoe.errors import ConfigError, NotMoeError, StaleLayoutError
from raymoe.experts import kernels
from raymoe.experts.group import ExpertGroup
from raymoe.experts.kernels import kernel_for
from raymoe.lanes.base import Request
from raymoe.lanes.header import Header, Kind
from tests.doubles import HIDDEN, MemoryLoader, experts_module


def request(rows_RH, row_P, segments, layer=0):
    pairs = len(row_P)
    header = Header(Kind.ROWS, 0, 0, layer, 0, len(rows_RH), pairs, len(segments), 0, 0, 0)
    return Request(
        header, rows_RH, np.int32(row_P), np.int32(segments).reshape(-1, 3), torch.empty(pairs, HIDDEN)
    )


def alone(module, expert, rows):
    """The library's own module on one expert, unweighted."""
    ids = torch.full((len(rows), 1), expert)
    return module(rows, ids, torch.ones(len(rows), 1, dtype=rows.dtype))


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("rows", [1, 2, 7, 65])
def test_a_slot_computes_what_the_architectures_own_module_computes(kind, rows):
    loader = MemoryLoader(kind=kind)
    group = ExpertGroup(loader, "g0")
    assert group.load_slice(0, [2, 5]) == [(0, 0), (1, 0)]
    rows_RH = torch.randn(rows, HIDDEN)
    asked = request(rows_RH, list(range(rows)) * 2, [(0, 0, rows), (1, 0, rows)])
    assert group.check(asked) is None
    group.compute([asked])
    for expert, out in ((2, asked.out_PH[:rows]), (5, asked.out_PH[rows:])):
        expected = alone(loader.modules[0], expert, rows_RH)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        # The library sorts many equal ids in an order of its own, which moves rows to other places of a product.
        assert rows > 16 or torch.equal(out, expected)


def test_a_slots_bits_do_not_depend_on_the_other_slots_of_a_request():
    group = ExpertGroup(MemoryLoader(kind="gpt_oss"), "g0")
    group.load_slice(0, range(8))
    for rows in (1, 3, 7, 18, 65):
        rows_RH = torch.randn(rows, HIDDEN)
        one = request(rows_RH, list(range(rows)), [(3, 0, rows)])
        all_ = request(rows_RH, list(range(rows)) * 8, [(slot, 0, rows) for slot in range(8)])
        group.compute([one])
        group.compute([all_])
        assert torch.equal(one.out_PH, all_.out_PH[3 * rows : 4 * rows])


def test_requests_of_several_routers_are_merged_and_told_apart():
    loader = MemoryLoader()
    group = ExpertGroup(loader, "g0")
    group.load_slice(1, [0, 1, 2])
    first = request(torch.randn(3, HIDDEN), [0, 1, 2, 0], [(0, 0, 2), (2, 0, 2)], layer=1)
    second = request(torch.randn(2, HIDDEN), [1, 0, 1], [(1, 0, 1), (2, 0, 2)], layer=1)
    group.compute([first, second])
    module = loader.modules[1]
    for asked, parts in ((first, [(0, [0, 1]), (2, [2, 0])]), (second, [(1, [1]), (2, [0, 1])])):
        expected = torch.cat([alone(module, expert, asked.rows_RH[rows]) for expert, rows in parts])
        torch.testing.assert_close(asked.out_PH, expected, atol=1e-5, rtol=1e-5)


def test_a_slot_is_freed_and_used_again_under_a_new_generation():
    group = ExpertGroup(MemoryLoader(), "g0")
    group.load_slice(0, [0, 1, 2])
    held = group.stats()
    group.free(0, 1)
    assert group.stats()["slots"] == held["slots"] - 1 and group.stats()["bytes"] < held["bytes"]
    assert group.load_slice(0, [7, 6]) == [(1, 1), (3, 0)]
    with pytest.raises(StaleLayoutError, match="slot 9 of MoE layer 0 is empty"):
        group.free(0, 9)


@pytest.mark.parametrize(
    ("row_P", "segments", "layer", "text"),
    [
        ([0, 1], [(0, 0, 2)], 5, "layer 5 is unknown"),
        ([0, 2], [(0, 0, 2)], 0, "outside the request's rows"),
        ([0, -1], [(0, 0, 2)], 0, "outside the request's rows"),
        ([0, 1], [(1, 0, 2)], 0, "slot 1 of MoE layer 0 is empty"),
        ([0, 1], [(0, 3, 2)], 0, "holds generation 0, the layout says generation 3"),
        ([0, 1], [(0, 0, 1)], 0, "segments hold 1 pairs, the header says 2"),
        ([0, 1], [(0, 0, -2), (0, 0, 4)], 0, "segment of -2 pairs"),
    ],
)
def test_a_request_that_does_not_fit_is_refused_with_the_reason(row_P, segments, layer, text):
    group = ExpertGroup(MemoryLoader(), "g0")
    group.load_slice(0, [4])
    assert text in group.check(request(torch.zeros(2, HIDDEN), row_P, segments, layer))


def test_experts_that_need_more_than_a_slot_are_refused_openly():
    module = experts_module()
    module.has_post_expert_norm = True
    with pytest.raises(NotMoeError, match="normalises after each expert"):
        kernel_for(module)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_in_deterministic_mode_a_rows_bits_are_its_own(kind):
    loader = MemoryLoader(kind=kind)
    group = ExpertGroup(loader, "g0", deterministic=True)
    group.load_slice(0, range(8))
    rows_RH = torch.randn(70, HIDDEN)
    every = request(rows_RH, list(range(70)) * 2, [(1, 0, 70), (4, 0, 70)])
    group.compute([every])
    torch.testing.assert_close(every.out_PH[:70], alone(loader.modules[0], 1, rows_RH), atol=1e-5, rtol=1e-5)
    for count in (1, 2, 3, 5, 33):
        some = rows_RH[10 : 10 + count]
        one = request(some, list(range(count)), [(4, 0, count)])
        group.compute([one])
        assert torch.equal(one.out_PH, every.out_PH[80 : 80 + count])
        # Of two routers, in one product.
        merged = [request(some, [0], [(4, 0, 1)]), request(rows_RH, list(range(70)), [(4, 0, 70)])]
        group.compute(merged)
        assert torch.equal(merged[0].out_PH, every.out_PH[80:81])
        assert torch.equal(merged[1].out_PH, every.out_PH[70:])


def test_a_kernel_that_can_not_be_deterministic_is_refused_at_loading(monkeypatch):
    group = ExpertGroup(MemoryLoader(), "g0", deterministic=True)
    monkeypatch.setattr(kernels, "ROWS", 1)
    with pytest.raises(ConfigError, match=r"an expert of g0 \(rows of 32 float32, 1 threads\)"):
        group.load_slice(0, [0])
    ExpertGroup(MemoryLoader(), "g1").load_slice(0, [0])
