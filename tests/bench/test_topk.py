"""`bench topk` on a tiny checkpoint. Nothing here looks at a duration."""

from __future__ import annotations

import pytest
import torch

from bench.topk import divergence, run_on


def test_topk_measures_each_k_against_native(tiny_folder):
    threads = torch.get_num_threads()
    try:
        result = run_on(tiny_folder("qwen3_moe"), 2, lambda text: None)
    finally:
        torch.set_num_threads(threads)
    assert result["native"] == 2
    assert result["kl"][2] == 0 < result["kl"][1]
    assert all(len(samples) == 2 for samples in result["ratios"].values())


def test_divergence_is_that_of_torch():
    p, q = torch.randn(2, 5, 7)
    expected = torch.nn.functional.kl_div(
        q.log_softmax(-1), p.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    assert divergence(p, q) == pytest.approx(float(expected), rel=1e-5)
