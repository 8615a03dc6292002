"""One missing expert holds up the sequences that need it, and nobody else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from raymoe.engine.kv_size import kv_size
from raymoe.engine.messages import SamplingParams
from raymoe.errors import ExpertUnavailableError
from tests.engine.doubles import Answers, Clock, LocalExperts, engine, generated, request, router_model

Folder = Callable[[str], Path]
GENERATOR = torch.Generator().manual_seed(5)
PROMPTS = {str(n): tuple(torch.randint(0, 255, (1 + 3 * n,), generator=GENERATOR).tolist()) for n in range(6)}
TOKENS = 6
OWN = ("qwen3_next", "deepseek_v32", "jamba", "minimax", "deepseek_v4", "lfm2_moe", "zaya")
"""Models whose sequences have caches of their own."""


def start(folder: Path, clock: Clock, experts: LocalExperts, **limits: int) -> tuple:
    one, answers = engine(folder, clock, experts, **limits), Answers()
    for name, prompt in PROMPTS.items():
        one.submit(request(name, prompt, TOKENS, deadline_s=100))
    return one, answers


class Recorder(LocalExperts):
    """Keeps which experts were needed."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.seen: set[tuple[int, int]] = set()

    def run(self, layer, hidden_TH, ids_TK, weights_TK):
        self.seen |= {(layer, expert) for expert in ids_TK.unique().tolist()}
        return super().run(layer, hidden_TH, ids_TK, weights_TK)


def needed_by_some(folder: Path, after: int = 0) -> set[tuple[int, int]]:
    """One (layer, expert) that some of the sequences need after so many steps, and some don't."""
    users: dict[tuple[int, int], set[str]] = {}
    for name, prompt in PROMPTS.items():
        one = engine(folder, experts=(experts := Recorder(folder)))
        one.submit(request(name, prompt, TOKENS))
        for step in range(TOKENS):
            one.step()
            for place in experts.seen if step >= after else ():
                users.setdefault(place, set()).add(name)
            experts.seen.clear()
    return {min(users, key=lambda place: abs(len(users[place]) - len(PROMPTS) / 2))}


def expected(folder: Path) -> dict[str, list[int]]:
    return {name: generated(folder, prompt, TOKENS) for name, prompt in PROMPTS.items()}


@pytest.mark.parametrize("model_type", ["olmoe", "deepseek_v3", "gpt_oss", *OWN[:4]])
@pytest.mark.parametrize("steps", [0, 5])
def test_who_needs_the_lost_expert_waits_and_the_others_end(
    tiny_folder: Folder, model_type: str, steps: int
) -> None:
    folder, clock = tiny_folder(model_type), Clock()
    experts = LocalExperts(folder)
    one, answers = start(folder, clock, experts)
    for _ in range(steps):
        answers.take(one.step())
    experts.gone = needed_by_some(folder, after=steps)
    for _ in range(60):
        clock.now += 0.1
        answers.take(one.step())
    stats = one.stats()
    assert 0 < stats["parked"] < len(PROMPTS)
    assert len(answers.ends) == len(PROMPTS) - stats["parked"]
    assert one.waits and one.blocked is not None
    wanted = expected(folder)
    for name, tokens in answers.tokens.items():
        assert tokens == wanted[name][: len(tokens)]
        assert name not in answers.ends or tokens == wanted[name]
    experts.gone = set()
    clock.now += 1
    assert answers.drain(one).tokens == wanted
    assert one.blocked is None and one.stats()["parked"] == 0


def test_rows_that_are_left_out_are_not_sent_on(tiny_folder: Folder) -> None:
    folder, clock = tiny_folder("olmoe"), Clock()
    experts = LocalExperts(folder)
    one, answers = start(folder, clock, experts)
    answers.take(one.step())
    experts.rows = 0
    answers.take(one.step())
    assert experts.rows == 3 * len(PROMPTS)
    experts.gone = {(0, expert) for expert in range(7)}
    experts.rows = 0
    answers.take(one.step())
    assert one.stats()["parked"] == len(PROMPTS)
    assert experts.rows == 0


def test_a_parked_sequence_ends_after_its_time_and_names_layer_and_group(tiny_folder: Folder) -> None:
    folder, clock = tiny_folder("olmoe"), Clock()
    experts = LocalExperts(folder)
    one, answers = start(folder, clock, experts)
    experts.gone = needed_by_some(folder)
    layer = min(experts.gone)[0]
    for _ in range(200):
        clock.now += 0.1
        answers.take(one.step())
    lost = [error for error in answers.ends.values() if isinstance(error, ExpertUnavailableError)]
    assert 0 < len(lost) < len(PROMPTS) == len(answers.ends)
    assert {(error.layer, error.groups) for error in lost} == {(layer, ("g0",))}
    assert not one.busy and one.stats()["kv_bytes"] == 0


def test_parked_sequences_do_not_keep_others_from_memory_for_ever(tiny_folder: Folder) -> None:
    folder, clock = tiny_folder("olmoe"), Clock()
    experts = LocalExperts(folder)
    one, answers = start(folder, clock, experts, kv_tokens=128)
    experts.gone = needed_by_some(folder)
    for _ in range(300):
        clock.now += 0.1
        answers.take(one.step())
    wanted = expected(folder)
    assert len(answers.ends) == len(PROMPTS)
    assert all(answers.tokens[name] == wanted[name] for name, end in answers.ends.items() if end == "length")


@pytest.mark.parametrize("model_type", OWN)
def test_sequences_with_caches_of_their_own_run_several_at_once(tiny_folder: Folder, model_type: str) -> None:
    folder = tiny_folder(model_type)
    one, answers = engine(folder, step_tokens=4), Answers()
    for name, prompt in PROMPTS.items():
        one.submit(request(name, prompt, TOKENS))
        answers.take(one.step())
    assert one.stats()["running"] > 1
    assert answers.drain(one).tokens == expected(folder)
    assert one.stats()["kv_bytes"] == 0


@pytest.mark.parametrize("model_type", ["qwen3_next", "deepseek_v32"])
def test_preemption_changes_no_token_of_them(tiny_folder: Folder, model_type: str) -> None:
    folder = tiny_folder(model_type)
    size = kv_size(router_model(folder), LocalExperts(folder).run)
    fixed = -(-size.fixed // size.per_token)

    def run(kv_tokens: int) -> tuple[dict[str, list[int]], int]:
        one = engine(folder, kv_tokens=kv_tokens, fixed_tokens=fixed)
        answers = Answers()
        for name, prompt in PROMPTS.items():
            one.submit(request(name, prompt, 60))
            one.submit(request(f"s{name}", prompt, 60, sampling=SamplingParams(1.0, seed=7)))
        while one.busy:
            answers.take(one.step())
            stats = one.stats()
            assert stats["kv_tokens"] <= kv_tokens
            assert stats["kv_bytes"] <= kv_tokens * size.per_token
        return answers.tokens, one.stats()["preemptions"]

    roomy, none = run(100_000)
    tight, some = run(3 * (fixed + 64))
    assert none == 0 and some > 2
    assert tight == roomy


@pytest.mark.parametrize("model_type", ["olmoe", "deepseek_v3", "qwen3_next", "lfm2_moe"])
def test_kv_bytes_are_measured(tiny_folder: Folder, model_type: str) -> None:
    folder = tiny_folder(model_type)
    size = kv_size(router_model(folder), LocalExperts(folder).run)
    # olmoe: 3 layers, key and value, 2 heads of 16; deepseek_v3: the latent of 16 and the shared key of 8.
    per_token = {"olmoe": 3 * 2 * 2 * 16 * 4, "deepseek_v3": 3 * (16 + 8) * 4}
    if model_type in per_token:
        assert size == (per_token[model_type], 0)
    else:
        assert size.per_token > 0 and size.fixed > 0
