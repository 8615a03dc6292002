"""`bench serve` on a tiny checkpoint, and its judge of texts. Nothing here looks at a duration."""

from __future__ import annotations

import pytest
import torch

from bench.serve import CONCURRENCY, Plan, find_problems, run_on
from bench.server import ids_of
from bench.truth import Truth

TINY = Plan(prompts=8, shortest=4, longest=16, tokens=4, rounds=1, kv_bytes=1 << 20, generated=2)


@pytest.mark.server
def test_serve_measures_a_real_server_and_leaves_nothing_behind(tiny_folder):
    result = run_on(tiny_folder("qwen3_moe"), TINY, lambda text: None)
    assert set(result["output_tokens_per_s"]) == set(result["ratio_engine"]) == set(CONCURRENCY)
    assert all(errors == [] for errors in result["errors"].values())
    assert sum(result["texts"].values()) == result["answers"] == 2 * 3 * TINY.prompts
    assert result["texts"]["wrong"] == result["texts"]["missing"] == 0
    assert result["changed_token"] == "wrong" and result["fewer_experts"] > 0
    assert result["slow_over_fast"] > 1
    assert all(len(s["first_token_ms"]) == TINY.prompts for s in result["samples"].values())
    assert 0 < result["router_growth_bytes"] <= result["router_growth_limit_bytes"]
    assert result["left_over"] == []


def test_the_judge_tells_right_from_wrong(tiny_folder):
    truth, prompt = Truth(tiny_folder("qwen3_moe")), [5, 9, 200, 17]
    answer = truth.generate(prompt, 6)
    assert len(answer) == 6
    assert truth.judge(prompt, answer)["verdict"] == "right"
    for position in range(6):
        changed = [*answer[:position], (answer[position] + 1) % 256, *answer[position + 1 :]]
        verdict = truth.judge(prompt, changed)
        assert (verdict["verdict"], verdict["position"]) == ("wrong", position)


def test_a_token_as_likely_as_the_best_is_a_tie(tiny_folder):
    truth, prompt = Truth(tiny_folder("qwen3_moe")), [5, 9, 200, 17]
    (best,) = truth.generate(prompt, 1)
    head = truth.model.get_output_embeddings().weight
    with torch.no_grad():
        head[262] = head[best] * (1 - 1e-7)
    assert truth.judge(prompt, [262])["verdict"] in ("tie", "right")
    with torch.no_grad():
        head[262] = head[best] * 0.9
    assert truth.judge(prompt, [262])["verdict"] == "wrong"


def test_whatever_makes_a_result_worthless_is_named():
    good = {
        "texts": {"right": 4, "tie": 0, "gate tie": 0, "wrong": 0, "missing": 0},
        "not_right": [],
        "errors": {},
        "changed_token": "wrong",
        "fewer_experts": 3,
        "slow_over_fast": 2.0,
        "router_growth_bytes": 150,
        "router_growth_limit_bytes": 400,
        "router_growth": {"non_expert_weights": 50, "kv_limit": 100},
        "left_over": [],
    }
    assert find_problems(good) == []
    bad = [
        {"texts": {**good["texts"], "wrong": 1}},
        {"texts": {**good["texts"], "missing": 1}},
        {"changed_token": "tie"},
        {"fewer_experts": 0},
        {"slow_over_fast": 0.9},
        {"router_growth_bytes": 401},
        {"router_growth_bytes": 120},
        {"left_over": ["ray"]},
    ]
    assert all(len(find_problems(good | change)) == 1 for change in bad)


def test_texts_of_the_word_tokenizer_tell_their_ids():
    assert ids_of(" t5 t0 t49151") == [5, 0, 49151]
