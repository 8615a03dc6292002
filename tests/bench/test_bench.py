"""The benchmarks run, measure what they say and notice a slower step. Nothing here looks at a duration."""

import json
import subprocess
import sys

import pytest
import torch

from bench import dispatch
from bench.__main__ import BENCHMARKS, main
from bench.dispatch import check_equal


def test_every_benchmark_is_listed_and_can_be_imported(capsys):
    assert main(["list"]) == 0
    listed = capsys.readouterr().out
    for name in BENCHMARKS:
        assert name in listed
        assert callable(__import__(f"bench.{name}", fromlist=["run"]).run)


def test_an_unknown_benchmark_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        main(["speed"])
    assert "dispatch" in capsys.readouterr().err


def test_the_last_line_is_one_json_object(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(dispatch, "run", lambda quick, say: (say("x"), {"quick_was": quick})[1])
    assert main(["dispatch", "--quick", "--json", "-"]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 1, "with --json - nothing else is printed"
    assert json.loads(out)["quick_was"] is True
    assert main(["dispatch", "--json", str(tmp_path / "r.json")]) == 0
    assert json.loads((tmp_path / "r.json").read_text())["bench"] == "dispatch"
    assert capsys.readouterr().out.splitlines()[0] == "x"


def test_dispatch_measures_all_cases_in_four_ways_that_agree(tiny_folder):
    threads = torch.get_num_threads()
    try:
        result = dispatch.run_on(tiny_folder("qwen3_moe"), 2, lambda text: None)
    finally:
        torch.set_num_threads(threads)
    for key in dispatch.RATIOS:
        assert set(result[key]) == set(dispatch.CASES)
        assert all(ratio > 0 for ratio in result[key].values())
    assert all(len(samples) >= 2 for case in result["ratios"].values() for samples in case.values())
    assert result["control"]["slow_over_fast"] > 1, "a step that sleeps must be the slower one"


def test_ways_that_compute_different_things_are_not_compared():
    same = torch.randn(3, 50)
    ways = {"groups": same, "inprocess": same.clone(), "transformers": same + 1e-6, "deterministic": same}
    check_equal(ways, "decode_1")
    for name in ways:
        others = "|".join(sorted(set(ways) - {name}))
        with pytest.raises(RuntimeError, match=rf"decode_1: the logits of ({name}|{others})"):
            check_equal(ways | {name: same + 1e-2}, "decode_1")


def test_the_command_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "bench", "list"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("model")
