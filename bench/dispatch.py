"""Step time through two expert groups against one process, and against plain transformers.

Four ways to compute the same step, in turns within each round:
  groups        a router process (two threads) and two expert group processes (one thread each), in turns at work
  deterministic the same in batch-invariant mode
  inprocess     the same router code and the same kernels, router and experts in one process, two threads
  transformers  the library's own model with grouped_mm experts, two threads
The first two have the environment that raymoe gives its processes, the others torch's own.
Each figure is the median over rounds of the ratio within a round. All must choose the same next tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.group import GROUPS
from bench.model import ensure
from bench.router import THREADS, RemoteStep, remote_router
from bench.steps import Library, LocalExperts, Packed, Step
from raymoe.checkpoint.folder import Checkpoint
from raymoe.checkpoint.router import load_router
from raymoe.checkpoint.slices import ExpertLoader
from raymoe.model.attention import NAME as ATTENTION
from raymoe.model.context import RunExperts, run_experts
from raymoe.policy.layout import even_slices

CASES = {"decode_1": (1, 1), "decode_8": (8, 1), "decode_32": (32, 1), "prefill_512": (1, 512)}
RATIOS = {
    "ratio_inprocess": ("groups", "inprocess"),
    "ratio_transformers": ("groups", "transformers"),
    "inprocess_vs_transformers": ("inprocess", "transformers"),
    "deterministic_cost": ("deterministic", "groups"),
}


def run(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure all cases on the benchmark checkpoint."""
    return run_on(ensure(), 3 if quick else 25, say)


def run_on(path: Path, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure all cases on any checkpoint."""
    checkpoint = Checkpoint.open(path)
    torch.set_num_threads(THREADS)
    loader = ExpertLoader(checkpoint)
    router = load_router(checkpoint, run_experts, attention=ATTENTION)
    library = AutoModelForCausalLM.from_pretrained(path, experts_implementation="grouped_mm").eval()
    local = LocalExperts(loader)
    result: dict[str, Any] = {key: {} for key in RATIOS}
    result |= {
        "ms": {},
        "ratios": {},
        "imbalance": {},
        "threads": THREADS,
        "groups": GROUPS,
        "rounds": rounds,
    }
    with remote_router(path) as remote, remote_router(path, deterministic=True) as invariant:
        for case, (sequences, rows) in CASES.items():
            steps: dict[str, Step] = {
                "groups": RemoteStep(remote, sequences, rows),
                "deterministic": RemoteStep(invariant, sequences, rows),
                "inprocess": Packed(router, local, sequences, rows),
                "transformers": Library(library, sequences, rows),
            }
            result["imbalance"][case] = imbalance(router, local, sequences, rows)
            check_equal({name: step.run() for name, step in steps.items()}, case)
            times = measure(steps, rounds if rows == 1 else max(rounds // 3, 2), 3 if rows == 1 else 1)
            for key, (over, under) in RATIOS.items():
                ratios = [a / b for a, b in zip(times[over], times[under], strict=True)]
                result[key][case] = round(statistics.median(ratios), 3)
                result["ratios"].setdefault(case, {})[key] = [round(ratio, 3) for ratio in ratios]
            result["ms"][case] = {n: round(statistics.median(t) * 1e3, 2) for n, t in times.items()}
            say(
                f"{case:12} "
                + "  ".join(f"{name} {ms:.1f} ms" for name, ms in result["ms"][case].items())
                + "  "
                + "  ".join(f"{key} {result[key][case]:.3f}" for key in RATIOS)
            )
    result["control"] = {"slow_over_fast": control(router, local)}
    say(f"negative control, 1 ms added to each layer: ratio {result['control']['slow_over_fast']}")
    return result


def measure(steps: Mapping[str, Step], rounds: int, repeats: int) -> dict[str, list[float]]:
    """Seconds per step, in turns; the order rotates, so that none always runs after the same one."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            times[name].append(steps[name].timed(repeats))
    return times


def control(router: Any, experts: RunExperts) -> float:
    """A step that is slower on purpose must show: decode_8 with a sleep per layer against itself."""

    def slow(layer: int, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        time.sleep(0.001)
        return experts(layer, hidden, ids, weights)

    times = measure({"slow": Packed(router, slow, 8, 1), "fast": Packed(router, experts, 8, 1)}, 5, 2)
    return round(statistics.median(a / b for a, b in zip(times["slow"], times["fast"], strict=True)), 3)


def imbalance(router: Any, experts: RunExperts, sequences: int, rows: int) -> float:
    """Pairs of the busiest group over the mean, averaged over layers: what waiting for it costs at least."""
    ratios = []

    def count(layer: int, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        pairs_E = torch.bincount(ids.reshape(-1), minlength=router.config.num_experts).tolist()
        loads = [sum(pairs_E[e] for e in part) for part in even_slices(len(pairs_E), GROUPS)]
        ratios.append(max(loads) * GROUPS / sum(loads))
        return experts(layer, hidden, ids, weights)

    step = Packed(router, count, sequences, rows)
    ratios.clear()
    step.run()
    return round(statistics.mean(ratios), 3)


def check_equal(logits: dict[str, Tensor], case: str) -> None:
    """Refuse to measure ways that don't compute the same.

    Ours use the same kernels, but other numbers of threads, which may round otherwise. The library's attention
    does so too, and that can flip a gate's near tie in some sequence: so the median sequence is held to 1e-4
    of the logits' spread and each to a tenth.
    """
    spread = logits["transformers"].std().item()
    for a, b in RATIOS.values():
        difference = (logits[a] - logits[b]).abs().amax(dim=1)
        if difference.median() > 1e-4 * spread or difference.max() > 0.1 * spread:
            raise RuntimeError(f"{case}: the logits of {a} and {b} differ by {difference.max():.2e}")
