"""Step time through two expert groups against one process, and against plain transformers.

Three ways to compute the same step, in turns within each round:
  groups        router in this process, two expert groups in processes of their own, one thread each
  inprocess     the same router and the same kernels, experts in this process, two threads
  transformers  the library's own model with grouped_mm experts, two threads
Each figure is the median over rounds of the ratio within a round. All three must choose the same next tokens.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from bench.model import ensure
from raymoe.checkpoint.folder import Checkpoint
from raymoe.checkpoint.router import load_router
from raymoe.checkpoint.slices import ExpertLoader
from raymoe.dispatch.dispatcher import Dispatcher
from raymoe.dispatch.pieces import combine
from raymoe.experts.group import ExpertGroup
from raymoe.lanes.base import Request
from raymoe.lanes.header import Header, Kind
from raymoe.lanes.hello import Hello
from raymoe.lanes.shm import connect
from raymoe.model.attention import NAME as ATTENTION
from raymoe.model.cache import SequenceCache
from raymoe.model.context import RunExperts, run_experts
from raymoe.model.forward import Part, forward
from raymoe.policy.layout import GroupPlace, even_layout, even_slices

THREADS = 2
GROUPS = 2
CONTEXT = 64
CASES = {"decode_1": (1, 1), "decode_8": (8, 1), "decode_32": (32, 1), "prefill_512": (1, 512)}
RATIOS = {
    "ratio_inprocess": ("groups", "inprocess"),
    "ratio_transformers": ("groups", "transformers"),
    "inprocess_vs_transformers": ("inprocess", "transformers"),
}
TOKEN = "bench"


def run(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure all cases on the benchmark checkpoint."""
    return run_on(ensure(), 3 if quick else 25, say)


def run_on(path: Path, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure all cases on any checkpoint."""
    checkpoint = Checkpoint.open(path)
    torch.set_num_threads(THREADS)
    loader = ExpertLoader(checkpoint)
    hello = Hello(TOKEN, checkpoint.fingerprint, "float32", loader.model.hidden_size)
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
    with expert_groups(path, loader, hello) as dispatcher:
        for case, (sequences, rows) in CASES.items():
            steps: dict[str, Packed | Library] = {
                "groups": Packed(router, dispatcher.run, sequences, rows),
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
        result["control"] = {"slow_over_fast": control(router, dispatcher.run)}
        say(f"negative control, 1 ms added to each layer: ratio {result['control']['slow_over_fast']}")
    return result


def measure(steps: dict[str, Any], rounds: int, repeats: int) -> dict[str, list[float]]:
    """Seconds per step, in turns; the order rotates, so that none always runs after the same one."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for step in steps.values():
        step.run()
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            steps[name].run()
            start = time.perf_counter()
            for _ in range(repeats):
                steps[name].run()
            times[name].append((time.perf_counter() - start) / repeats)
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


def prompts(model: Any, sequences: int, length: int) -> Tensor:
    """The same random tokens everywhere, [sequences, length]."""
    return torch.randint(
        5, model.config.vocab_size, (sequences, length), generator=torch.Generator().manual_seed(length)
    )


class Packed:
    """A step of raymoe's router; decodes start behind a context of 64 tokens each, again at every run."""

    def __init__(self, router: Any, experts: RunExperts, sequences: int, rows: int) -> None:
        self._router, self._experts, self._rows = router, experts, rows
        self._caches = [SequenceCache() for _ in range(sequences)]
        self._tokens = prompts(router, sequences, CONTEXT + rows).tolist()
        if rows == 1:
            for cache, tokens in zip(self._caches, self._tokens, strict=True):
                forward(router, [Part(cache, tokens[:-1], False)], experts)
        self._from = [cache.length for cache in self._caches]

    def run(self) -> Tensor:
        for cache, length in zip(self._caches, self._from, strict=True):
            cache.length = length
        parts = [Part(c, t[-self._rows :], True) for c, t in zip(self._caches, self._tokens, strict=True)]
        return forward(self._router, parts, self._experts)


class Library:
    """The same step by transformers, as one padded batch with its own cache."""

    def __init__(self, model: Any, sequences: int, rows: int) -> None:
        self._model, self._rows = model, rows
        self._tokens = prompts(model, sequences, CONTEXT + rows)
        self._cache = DynamicCache(config=model.config)
        if rows == 1:
            with torch.inference_mode():
                model(self._tokens[:, :-1], cache=self._cache, use_cache=True, logits_to_keep=1)

    def run(self) -> Tensor:
        if self._rows > 1:
            self._cache = DynamicCache(config=self._model.config)
        with torch.inference_mode():
            out = self._model(
                self._tokens[:, -self._rows :], cache=self._cache, use_cache=True, logits_to_keep=1
            )
            if self._rows == 1:
                self._cache.crop(-1)
        return out.logits[:, -1]


class LocalExperts:
    """The experts in this process: what a router with its experts beside it would do, with our kernels."""

    def __init__(self, loader: ExpertLoader) -> None:
        self._group = ExpertGroup(loader, "local")
        for layer in loader.model.layers:
            self._group.load_slice(layer.index, range(layer.experts))

    def __call__(self, layer: int, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        tokens, top_k = ids.shape
        expert_P = ids.reshape(-1).numpy()
        order = np.argsort(expert_P, kind="stable")
        counts = np.bincount(expert_P)
        used = np.flatnonzero(counts)
        segments = np.stack([used, np.zeros_like(used), counts[used]], axis=1).astype(np.int32)
        pairs = len(order)
        header = Header(Kind.ROWS, 0, 0, layer, 0, tokens, pairs, len(used), 0, 0, 0)
        done = hidden.new_empty(pairs, hidden.shape[1])
        self._group.compute([Request(header, hidden, (order // top_k).astype(np.int32), segments, done)])
        out = torch.empty_like(done)
        out.index_copy_(0, torch.from_numpy(order), done)
        return combine(out.view(tokens, top_k, -1), weights, hidden.dtype)


@contextlib.contextmanager
def expert_groups(path: Path, loader: ExpertLoader, hello: Hello) -> Iterator[Dispatcher]:
    """Two expert groups in processes of their own, and a dispatcher connected to them."""
    experts = [layer.experts for layer in loader.model.layers]
    slices = even_slices(experts[0], GROUPS)
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.group", str(path), f"g{n}", str(part.start), str(part.stop), TOKEN],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for n, part in enumerate(slices)
    ]
    try:
        places = []
        for n, process in enumerate(processes):
            address = process.stdout.readline().strip() if process.stdout else ""
            if not address:
                raise RuntimeError(f"expert group g{n} did not start")
            places.append(GroupPlace(f"g{n}", address))

        def open_lane(place: GroupPlace) -> Any:
            return connect(
                place.name, place.address, hello, ring_bytes=64 << 20, router="bench", timeout_s=10
            )

        dispatcher = Dispatcher(open_lane, silence_s=30)
        dispatcher.set_layout(even_layout(0, places, experts))
        with contextlib.closing(dispatcher):
            yield dispatcher
    finally:
        for process in processes:
            if process.stdin:
                process.stdin.close()
            process.wait(timeout=30)
            if process.stdout:
                process.stdout.close()


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
