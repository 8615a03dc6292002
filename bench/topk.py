"""What fewer experts per token save and cost: decode time of 8 sequences, and KL of the next-token distribution.

Each gate's own `top_k` is overridden, so weights are renormalised if and only if the architecture does so.
Native against native is the control: its KL must be 0.
The benchmark checkpoint's weights are random, so its KL says nothing about trained models. The embedded model's
are trained, but its 8 experts per token are the 8 shards of one dense network with weight 1/8 each: k < 8 takes
k shards with weight 1/k. That cuts a dense network in pieces, and is not what fewer experts do to a model that was
trained as a mixture.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.model import ensure, with_own_head
from bench.router import THREADS
from bench.steps import LocalExperts, Packed
from raymoe.checkpoint.embedded import cache_folder
from raymoe.checkpoint.folder import Checkpoint
from raymoe.checkpoint.router import load_router
from raymoe.checkpoint.slices import ExpertLoader
from raymoe.model.attention import NAME as ATTENTION
from raymoe.model.context import run_experts

SEQUENCES = 8
K = (1, 2, 4)


def run(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """The benchmark checkpoint, and the embedded default model if it is in the cache."""
    folders = {}
    embedded = list(cache_folder().glob("embedded-*/*/config.json"))
    if embedded:
        folders["embedded"] = max(embedded, key=lambda file: file.stat().st_mtime).parent
    else:
        say("the embedded model is not in the cache: left out")
    rounds = 3 if quick else 25
    with tempfile.TemporaryDirectory() as made:
        folders["benchmark"] = with_own_head(ensure(), Path(made) / "benchmark")
        return {name: run_on(path, rounds, say) for name, path in folders.items()}


def run_on(path: Path, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """One checkpoint: by k, `kl` (mean, nats), `ms` (median of a decode step), `ratio_native` and raw `ratios`.

    Raises:
        RuntimeError: native against native is not 0.
    """
    torch.set_num_threads(THREADS)
    checkpoint = Checkpoint.open(path)
    loader = ExpertLoader(checkpoint)
    router = load_router(checkpoint, run_experts, attention=ATTENTION)
    experts, native = LocalExperts(loader), loader.model.layers[0].top_k
    names = [*(k for k in K if k < native), native]
    seconds: dict[int, list[float]] = {k: [] for k in names}
    with top_k(router, native):
        reference = Packed(router, experts, SEQUENCES, 32).run()
    kl: dict[int, float] = {}
    steps = {}
    for k in names:
        with top_k(router, k):
            kl[k] = divergence(reference, Packed(router, experts, SEQUENCES, 32).run())
            steps[k] = Packed(router, experts, SEQUENCES, 1)
    for number in range(rounds):
        for k in names[number % len(names) :] + names[: number % len(names)]:
            with top_k(router, k):
                seconds[k].append(steps[k].timed(2))
    if kl[native] != 0:
        raise RuntimeError(f"native against native has a KL of {kl[native]}")
    ratios = {k: [a / b for a, b in zip(seconds[k], seconds[native], strict=True)] for k in names}
    for k in names:
        ms, ratio = statistics.median(seconds[k]) * 1e3, statistics.median(ratios[k])
        say(f"{path.name:18} k {k}: {ms:.1f} ms ({ratio:.3f} of native {native}), KL {kl[k]:.4f}")
    return {
        "native": native,
        "kl": kl,
        "ms": {k: round(statistics.median(seconds[k]) * 1e3, 2) for k in names},
        "ratio_native": {k: round(statistics.median(ratios[k]), 3) for k in names},
        "ratios": {k: [round(ratio, 3) for ratio in ratios[k]] for k in names},
    }


@contextmanager
def top_k(router: nn.Module, k: int) -> Iterator[None]:
    """Every gate chooses k experts."""
    gates = [m for name, m in router.named_modules() if name.endswith(".gate") and hasattr(m, "top_k")]
    if not gates:
        raise RuntimeError("no gate of this architecture has a top_k")
    before = [gate.top_k for gate in gates]
    for gate in gates:
        gate.top_k = k
    try:
        yield
    finally:
        for gate, value in zip(gates, before, strict=True):
            gate.top_k = value


def divergence(native_SV: Tensor, other_SV: Tensor) -> float:
    """Mean KL(native || other) over the rows, in nats."""
    p, q = (logits.double().log_softmax(-1) for logits in (native_SV, other_SV))
    return float((p.exp() * (p - q)).sum(-1).mean())
