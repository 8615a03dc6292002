"""The engine against transformers' `generate`, and what it does when things go wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from raymoe.engine.messages import SamplingParams
from raymoe.errors import (
    ContextLengthError,
    DeadlineError,
    EngineError,
    ExpertUnavailableError,
    OverloadedError,
    RequestError,
    VocabularyError,
)
from tests.engine.doubles import Answers, Clock, LocalExperts, engine, generated, request
from tests.tiny import TINY_TYPES

Folder = Callable[[str], Path]
GENERATOR = torch.Generator().manual_seed(1)
PROMPTS = [tuple(torch.randint(0, 255, (n,), generator=GENERATOR).tolist()) for n in (5, 17, 33, 1, 9, 60)]
TOKENS = 24


def expected(folder: Path) -> dict[str, list[int]]:
    return {str(n): generated(folder, prompt, TOKENS) for n, prompt in enumerate(PROMPTS)}


@pytest.mark.parametrize("model_type", TINY_TYPES)
def test_greedy_equals_generate_alone_and_in_staggered_company(tiny_folder: Folder, model_type: str) -> None:
    folder = tiny_folder(model_type)
    one = engine(folder)
    for n, prompt in enumerate(PROMPTS[:3]):
        one.submit(request(str(n), prompt, TOKENS))
        assert Answers().drain(one).tokens[str(n)] == expected(folder)[str(n)]
    answers = Answers()
    for n, prompt in enumerate(PROMPTS):
        one.submit(request(str(n), prompt, TOKENS))
        for _ in range(n):
            answers.take(one.step())
    assert answers.drain(one).tokens == expected(folder)
    assert set(answers.ends.values()) <= {"length", "stop"}
    assert one.stats()["kv_bytes"] == 0


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("step_tokens", [1, 5, 23])
def test_greedy_equals_generate_in_chunks(tiny_folder: Folder, model_type: str, step_tokens: int) -> None:
    folder = tiny_folder(model_type)
    one, answers = engine(folder, step_tokens=step_tokens), Answers()
    for n, prompt in enumerate(PROMPTS):
        one.submit(request(str(n), prompt, TOKENS))
    assert answers.drain(one).tokens == expected(folder)


@pytest.mark.parametrize("model_type", ["olmoe", "deepseek_v3", "gpt_oss"])
def test_preemption_changes_no_token(tiny_folder: Folder, model_type: str) -> None:
    folder = tiny_folder(model_type)
    sampled = SamplingParams(temperature=1.0, seed=11)

    def run(kv_tokens: int) -> tuple[dict[str, list[int]], int]:
        one, answers = engine(folder, kv_tokens=kv_tokens), Answers()
        for n, prompt in enumerate(PROMPTS):
            one.submit(request(str(n), prompt, TOKENS * 2))
            one.submit(request(f"s{n}", prompt, TOKENS * 2, sampling=sampled))
        return answers.drain(one).tokens, one.stats()["preemptions"]

    roomy, none = run(4096)
    tight, some = run(256)
    assert none == 0
    assert some > 2
    assert tight == roomy


def test_a_seed_gives_the_same_tokens_in_any_company_and_another_seed_others(tiny_folder: Folder) -> None:
    one, answers = engine(tiny_folder("olmoe")), Answers()
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        one.submit(request(name, PROMPTS[0], TOKENS, sampling=SamplingParams(1.0, seed=seed)))
        answers.take(one.step())
    tokens = answers.drain(one).tokens
    assert tokens["a"] == tokens["b"] != tokens["c"]


def test_stop_tokens_end_a_sequence_and_are_not_returned(tiny_folder: Folder) -> None:
    folder = tiny_folder("olmoe")
    whole = generated(folder, PROMPTS[1], TOKENS)
    stop = whole[7]
    one, answers = engine(folder), Answers()
    one.submit(request("a", PROMPTS[1], TOKENS, stop_token_ids=(stop,)))
    one.submit(request("b", PROMPTS[1], 1))
    answers.drain(one)
    assert answers.tokens["a"] == whole[: whole.index(stop)]
    assert answers.tokens["b"] == whole[:1]
    assert answers.ends == {"a": "stop", "b": "length"}


def test_a_cancelled_sequence_leaves_at_once_and_the_others_do_not_notice(tiny_folder: Folder) -> None:
    folder = tiny_folder("qwen3_moe")
    one, answers = engine(folder, max_sequences=2), Answers()
    for n, prompt in enumerate(PROMPTS[:4]):
        one.submit(request(str(n), prompt, TOKENS))
    answers.take(one.step())
    for gone in ("0", "3", "unknown"):
        one.cancel(gone)
    answers.drain(one)
    assert set(answers.ends) == {"1", "2"}
    assert all(answers.tokens[n] == expected(folder)[n] for n in ("1", "2"))
    assert one.stats()["cancelled"] == 2


def test_what_the_model_cannot_take_is_refused_and_the_next_request_works(tiny_folder: Folder) -> None:
    folder = tiny_folder("olmoe")
    one = engine(folder, max_sequences=1, max_waiting=0, kv_tokens=1024)
    refused = [
        (RequestError, request("a", (), 4)),
        (RequestError, request("a", (1,), 0)),
        (VocabularyError, request("a", (1, 264), 4)),
        (VocabularyError, request("a", (-1,), 4)),
        (ContextLengthError, request("a", (1,) * 500, 13)),
    ]
    for error, bad in refused:
        with pytest.raises(error):
            one.submit(bad)
    one.submit(request("a", PROMPTS[0], TOKENS))
    with pytest.raises(RequestError, match="in use"):
        one.submit(request("a", PROMPTS[0], TOKENS))
    with pytest.raises(OverloadedError):
        one.submit(request("b", PROMPTS[0], TOKENS))
    assert Answers().drain(one).tokens["a"] == expected(folder)["0"]


def test_a_deadline_ends_one_sequence_and_frees_it(tiny_folder: Folder) -> None:
    folder, clock = tiny_folder("olmoe"), Clock()
    one, answers = engine(folder, clock, max_sequences=1), Answers()
    one.submit(request("late", PROMPTS[0], TOKENS, deadline_s=5))
    one.submit(request("queued", PROMPTS[0], TOKENS, deadline_s=5))
    one.submit(request("good", PROMPTS[1], TOKENS))
    answers.take(one.step())
    clock.now = 5.0
    answers.drain(one)
    assert isinstance(answers.ends["late"], DeadlineError)
    assert isinstance(answers.ends["queued"], DeadlineError)
    assert "1 of at most 24" in str(answers.ends["late"])
    assert answers.tokens["good"] == expected(folder)["1"]


def blocked_engine(folder: Path, clock: Clock) -> tuple:
    experts = LocalExperts(folder)
    one, answers = engine(folder, clock, experts), Answers()
    for n, prompt in enumerate(PROMPTS[:3]):
        one.submit(request(str(n), prompt, TOKENS, deadline_s=100))
    for _ in range(4):
        answers.take(one.step())
    # The second MoE layer of the step loses its expert: the first has run.
    experts.failure, experts.fail_after = ExpertUnavailableError(1, ("g0",)), 1
    return one, answers, experts


def test_a_missing_expert_blocks_without_effect_until_it_is_back(tiny_folder: Folder) -> None:
    folder, clock = tiny_folder("olmoe"), Clock()
    one, answers, experts = blocked_engine(folder, clock)
    before = {name: list(tokens) for name, tokens in answers.tokens.items()}
    for _ in range(3):
        clock.now += 3
        answers.take(one.step())
    assert answers.tokens == before
    assert one.blocked is experts.failure
    assert one.waits
    experts.failure = None
    clock.now += 1
    answers.drain(one)
    assert one.blocked is None
    assert answers.tokens == {n: expected(folder)[n] for n in "012"}


def test_who_waited_too_long_for_an_expert_gets_an_error_that_names_it(tiny_folder: Folder) -> None:
    folder, clock = tiny_folder("olmoe"), Clock()
    one, answers, experts = blocked_engine(folder, clock)
    answers.take(one.step())
    clock.now = 9
    one.submit(request("later", PROMPTS[0], TOKENS))
    answers.take(one.step())
    assert answers.ends == {}
    clock.now = 10
    answers.take(one.step())
    assert {n: str(error) for n, error in answers.ends.items()} == dict.fromkeys("012", str(experts.failure))
    experts.failure = None
    clock.now = 11
    assert answers.drain(one).tokens["later"] == expected(folder)["0"]


def test_a_deadline_that_passes_while_an_expert_is_missing_names_the_expert(tiny_folder: Folder) -> None:
    folder, clock = tiny_folder("olmoe"), Clock()
    one, answers, _ = blocked_engine(folder, clock)
    one.submit(request("hasty", PROMPTS[0], TOKENS, deadline_s=2))
    answers.take(one.step())
    clock.now = 2
    answers.take(one.step())
    assert isinstance(answers.ends["hasty"], ExpertUnavailableError)


def test_a_defect_ends_the_requests_of_its_step_and_not_the_engine(tiny_folder: Folder) -> None:
    folder = tiny_folder("olmoe")
    experts = LocalExperts(folder)
    one, answers = engine(folder, experts=experts, max_sequences=1), Answers()
    one.submit(request("hit", PROMPTS[0], TOKENS))
    one.submit(request("next", PROMPTS[1], TOKENS))
    experts.failure = RuntimeError("a kernel broke")
    answers.take(one.step())
    experts.failure = None
    answers.drain(one)
    assert isinstance(answers.ends["hit"], EngineError)
    assert answers.tokens["next"] == expected(folder)["1"]


def test_logits_that_are_not_finite_end_their_sequence_only(tiny_folder: Folder) -> None:
    folder = tiny_folder("olmoe")
    experts = LocalExperts(folder)
    good = experts.run

    def poisoned(layer, hidden, ids, weights):
        out = good(layer, hidden, ids, weights)
        if layer == 2:
            out[4] = float("nan")  # the last row of the first sequence's prompt
        return out

    one, answers = engine(folder, experts=experts), Answers()
    one.submit(request("0", PROMPTS[0], TOKENS))
    one.submit(request("1", PROMPTS[1], TOKENS))
    experts.run = poisoned  # type: ignore[method-assign]
    answers.take(one.step())
    experts.run = good  # type: ignore[method-assign]
    answers.drain(one)
    assert isinstance(answers.ends["0"], EngineError)
    assert answers.tokens["1"] == expected(folder)["1"]
