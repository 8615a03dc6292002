"""The real server under streaming HTTP clients: throughput, time to first token, time between tokens, right texts.

`raymoe serve` runs as a subprocess; 1, 8 and 32 clients at once ask for greedy completions. The engine's bare loop
(`bench.engine`) computes the same requests in turns with it: what HTTP, Serve and tokenizer cost is the ratio.
Every answer is checked: against the answer that the same server gave to a single client and, wherever they differ
and for some prompts in any case, against transformers (`bench.truth`).
Then the KV cache is filled to its limit, and the growth of the engine process measured.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.growth import Growth
from bench.model import ensure, with_own_head
from bench.router import THREADS
from bench.server import add_word_tokenizer, ids_of, served
from bench.topk import top_k
from bench.truth import Truth
from bench.worker import Worker
from raymoe.checkpoint.folder import Checkpoint
from raymoe.checkpoint.moe import describe
from raymoe.policy.threads import thread_environment

CONCURRENCY = (1, 8, 32)
SLEEP_S = 0.05
"""Added to each step in the negative control: about as much as a step of the benchmark checkpoint takes."""

CONTROLS = 8
"""Prompts that are answered with one expert per token, in another negative control."""

Prompts = list[list[int]]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """How much is asked. `generated` answers are also compared with `generate` of transformers."""

    prompts: int
    shortest: int
    longest: int
    tokens: int
    rounds: int
    kv_bytes: int
    generated: int


FULL = Plan(64, 16, 128, 48, 3, 256 << 20, 8)
QUICK = Plan(32, 8, 32, 4, 1, 32 << 20, 2)


def run(quick: bool, say: Say) -> dict[str, Any]:
    """Measure on the benchmark checkpoint."""
    return run_on(ensure(), QUICK if quick else FULL, say)


def run_on(path: Path, plan: Plan, say: Say) -> dict[str, Any]:
    """Measure on any fp32 checkpoint.

    Raises:
        RuntimeError: an answer is wrong, a request failed, or a control found the measurement blind.
    """
    vocab_size = describe(Checkpoint.open(path)).vocab_size
    runs = Runs(make_prompts(plan, vocab_size), plan.tokens)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        model = with_own_head(path, folder / path.name)
        add_word_tokenizer(model, vocab_size)
        result = {**measure(folder, model, plan, runs, say), **check(Truth(model), runs, plan.generated)}
    say("texts: " + ", ".join(f"{count} {name}" for name, count in result["texts"].items()))
    result |= {"plan": vars(plan), "threads": THREADS}
    if problems := find_problems(result):
        raise RuntimeError("; ".join(problems))
    return result


def measure(folder: Path, model: Path, plan: Plan, runs: Runs, say: Say) -> dict[str, Any]:
    """Start everything, ask everything, stop everything. `folder` is for the server's log and state."""
    options = (
        "--groups",
        "2",
        "--set",
        f"router.kv_bytes={plan.kv_bytes}",
        "--set",
        f"router.threads={THREADS}",
    )
    with (
        Worker("bench.engine", str(model), environment=thread_environment(THREADS)) as engine,
        Worker("bench.growth") as imports,
        served(folder, model, *options) as server,
        Worker("bench.clients", server.url) as clients,
    ):
        for number in range(plan.rounds):
            for concurrency in CONCURRENCY:
                # Who goes first changes, so that none always runs on the warmer machine.
                for worker in (clients, engine)[:: -1 if number % 2 else 1]:
                    runs.measure(worker, concurrency)
                say(runs.line(concurrency))
        slow_over_fast = control(engine, runs.prompts[:4], plan.tokens)
        growth = Growth(server.engine(), imports.ask(), model, plan.kv_bytes)
        growth.fill(clients)
        say(growth.line())
    return {
        **runs.result(),
        **growth.result(),
        "slow_over_fast": slow_over_fast,
        "left_over": server.left_over,
    }


def control(engine: Worker, prompts: Prompts, tokens: int) -> float:
    """Steps that are slower on purpose must show."""
    ratios = []
    for _ in range(3):
        slow = engine.ask(prompts=prompts, tokens=tokens, concurrency=len(prompts), sleep_s=SLEEP_S)
        fast = engine.ask(prompts=prompts, tokens=tokens, concurrency=len(prompts))
        ratios.append(slow["seconds"] / fast["seconds"])
    return round(statistics.median(ratios), 3)


def make_prompts(plan: Plan, vocab_size: int) -> Prompts:
    """Random token ids, lengths from `shortest` to `longest` in turn."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(plan.shortest, plan.longest, plan.prompts).long().tolist()
    return [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in lengths]


class Runs:
    """All that was asked and answered."""

    def __init__(self, prompts: Prompts, tokens: int) -> None:
        self.prompts, self.tokens = prompts, tokens
        self.seconds: dict[str, dict[int, list[float]]] = {"bench.clients": {}, "bench.engine": {}}
        self.first_s: dict[int, list[float]] = {}
        self.between_s: dict[int, list[float]] = {}
        self.errors: dict[int, list[str]] = {}
        self.answers: list[tuple[str, int, list[int] | None]] = []
        """Who answered at which concurrency, with which tokens; the prompts come in order, again and again."""

    def measure(self, worker: Worker, concurrency: int) -> None:
        """Ask all prompts."""
        done = worker.ask(prompts=self.prompts, tokens=self.tokens, concurrency=concurrency)
        self.seconds[worker.module].setdefault(concurrency, []).append(done["seconds"])
        if worker.module == "bench.engine":
            self.answers += [("engine", concurrency, tokens) for tokens in done["tokens"]]
            return
        for answer in done["answers"]:
            if answer["error"] is not None:
                self.errors.setdefault(concurrency, []).append(answer["error"])
                self.answers.append(("server", concurrency, None))
                continue
            times = answer["times"]
            self.first_s.setdefault(concurrency, []).append(times[0] - answer["sent"])
            gaps = [b - a for a, b in itertools.pairwise(times)]
            self.between_s.setdefault(concurrency, []).extend(gaps)
            self.answers.append(("server", concurrency, ids_of(answer["text"])))

    def rates(self, module: str, concurrency: int) -> list[float]:
        """Output tokens per second, of each round."""
        return [len(self.prompts) * self.tokens / s for s in self.seconds[module][concurrency]]

    def line(self, concurrency: int) -> str:
        """The last round for people."""
        server, engine = (self.rates(name, concurrency)[-1] for name in ("bench.clients", "bench.engine"))
        first, between = (percentiles(s.get(concurrency, [])) for s in (self.first_s, self.between_s))
        return (
            f"{concurrency:2} clients: {server:.1f} tokens/s ({server / engine:.2f} of the bare engine),"
            f" first token {first['p50']:.0f} ms (p95 {first['p95']:.0f}), between {between['p50']:.1f} ms (p95"
            f" {between['p95']:.1f}), {len(self.errors.get(concurrency, []))} errors"
        )

    def result(self) -> dict[str, Any]:
        """Figures and raw samples, by concurrency."""
        keys = (
            "output_tokens_per_s",
            "ratio_engine",
            "first_token_ms",
            "between_tokens_ms",
            "errors",
            "samples",
        )
        out: dict[str, Any] = {key: {} for key in keys}
        for concurrency in CONCURRENCY:
            rates = {name: self.rates(name, concurrency) for name in self.seconds}
            ratios = [a / b for a, b in zip(rates["bench.clients"], rates["bench.engine"], strict=True)]
            out["output_tokens_per_s"][concurrency] = round(statistics.median(rates["bench.clients"]), 1)
            out["ratio_engine"][concurrency] = round(statistics.median(ratios), 3)
            first, between = self.first_s.get(concurrency, []), self.between_s.get(concurrency, [])
            out["first_token_ms"][concurrency] = percentiles(first)
            out["between_tokens_ms"][concurrency] = percentiles(between)
            out["errors"][concurrency] = self.errors.get(concurrency, [])
            out["samples"][concurrency] = {
                "server_tokens_per_s": [round(rate, 2) for rate in rates["bench.clients"]],
                "engine_tokens_per_s": [round(rate, 2) for rate in rates["bench.engine"]],
                "first_token_ms": [round(s * 1e3, 1) for s in first],
                "between_tokens_ms": [round(s * 1e3, 1) for s in between],
            }
        return out


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50 and p95 in milliseconds; NaN without samples."""
    if len(seconds) < 2:
        return {"p50": float("nan"), "p95": float("nan")}
    cuts = statistics.quantiles(seconds, n=20, method="inclusive")
    return {"p50": round(cuts[9] * 1e3, 2), "p95": round(cuts[18] * 1e3, 2)}


def check(truth: Truth, runs: Runs, generated: int) -> dict[str, Any]:
    """Judge all answers. An answer that equals one already judged is not judged again."""
    judged: dict[tuple[int, tuple[int, ...]], dict[str, Any]] = {}
    same, texts = 0, dict.fromkeys(("right", "tie", "gate tie", "wrong", "missing"), 0)
    singles = [tokens for _, _, tokens in runs.answers[: len(runs.prompts)]]
    for number, (_, _, tokens) in enumerate(runs.answers):
        prompt = number % len(runs.prompts)
        if tokens is None:
            texts["missing"] += 1
            continue
        same += tokens == singles[prompt]
        key = prompt, tuple(tokens)
        if key not in judged:
            judged[key] = truth.judge(runs.prompts[prompt], tokens)
        texts[judged[key]["verdict"]] += 1
    step = max(len(runs.prompts) // generated, 1)
    by_library = 0
    for number in range(0, len(runs.prompts), step):
        by_library += truth.generate(runs.prompts[number], runs.tokens) == singles[number]
    with top_k(truth.model, 1):
        others = [truth.generate(prompt, runs.tokens) for prompt in runs.prompts[:CONTROLS]]
    fewer = sum(
        truth.judge(prompt, other)["verdict"] == "wrong"
        for prompt, other in zip(runs.prompts, others, strict=False)
    )
    wrong = list(singles[0] or [])
    wrong[len(wrong) // 2] = (wrong[len(wrong) // 2] + 1) % 2
    return {
        "texts": texts,
        "same_as_single_client": same,
        "answers": len(runs.answers),
        "same_as_generate": f"{by_library} of {len(range(0, len(runs.prompts), step))}",
        "not_right": [
            {"prompt": key[0], **found} for key, found in judged.items() if found["verdict"] != "right"
        ],
        "changed_token": truth.judge(runs.prompts[0], wrong)["verdict"],
        "fewer_experts": fewer,
    }


def find_problems(result: dict[str, Any]) -> list[str]:
    """What makes the result worthless or bad."""
    texts, problems = result["texts"], []
    if texts["wrong"] or texts["missing"]:
        problems.append(
            f"texts: {texts}; {result['not_right'][:3]}; {[e[:2] for e in result['errors'].values()]}"
        )
    if result["changed_token"] != "wrong":
        problems.append(f"the check took a changed token for {result['changed_token']}")
    if result["fewer_experts"] == 0:
        problems.append("texts with one expert per token are right too: they don't depend on experts")
    if result["slow_over_fast"] <= 1:
        problems.append("a step that sleeps was not slower")
    grown, limit, parts = (result[f"router_growth{end}"] for end in ("_bytes", "_limit_bytes", ""))
    if grown > limit:
        problems.append(f"the router grew by {grown} bytes, more than {limit}: {parts}")
    if grown < parts["non_expert_weights"] + 0.8 * parts["kv_limit"]:
        problems.append(
            f"the KV cache can't have been filled: the router grew by {grown} bytes only: {parts}"
        )
    if result["left_over"]:
        problems.append(f"left running: {result['left_over']}")
    return problems
