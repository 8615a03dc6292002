"""Log probabilities through the engine: equal to transformers', in chunks, in company, preempted and replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raymoe.engine.loop import Engine, Event
from raymoe.engine.messages import GenerateChunk, GenerateRequest, SamplingParams, TokenLogprob
from raymoe.errors import EngineError, RequestError
from tests.engine.doubles import Answers, LocalExperts, engine, request, router_model, whole_model
from tests.tiny import VOCAB

Folder = Callable[[str], Path]
GENERATOR = torch.Generator().manual_seed(4)
PROMPTS = [tuple(torch.randint(0, 255, (n,), generator=GENERATOR).tolist()) for n in (37, 1, 2, 60, 9)]
PACKED, STEPWISE = "qwen3_moe", "qwen3_next"
ODD = SamplingParams(1.3, seed=3, repetition_penalty=1.5, logit_bias=((9, 4.0),), top_k=20)


class Scores(Answers):
    """Also keeps what was said of log probabilities, and checks the order of it."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt: dict[str, list[TokenLogprob]] = {}
        self.own: dict[str, list[TokenLogprob]] = {}

    def take(self, events: list[Event]) -> None:
        for name, what in events:
            if isinstance(what, GenerateChunk):
                if what.prompt_logprobs and self.tokens.get(name):
                    raise AssertionError(f"{name}: the prompt comes behind generated tokens")
                self.prompt.setdefault(name, []).extend(what.prompt_logprobs)
                self.own.setdefault(name, []).extend(what.logprobs)
        super().take(events)


def drained(one: Engine, *requests: GenerateRequest) -> Scores:
    scores = Scores()
    for made in requests:
        one.submit(made)
        scores.take(one.step())
    scores.drain(one)
    return scores


def expected(folder: Path, tokens: tuple[int, ...]) -> torch.Tensor:
    """Log probabilities [T, V] of what follows each token, by transformers."""
    with torch.inference_mode():
        return torch.log_softmax(whole_model(folder)(torch.tensor([tokens])).logits[0].float(), -1)


def check(folder: Path, known: tuple[int, ...], start: int, found: list[TokenLogprob], top: int) -> None:
    """`found` are those of the tokens from `start` on."""
    table = expected(folder, known)[start - 1 : -1]
    assert len(found) == len(known) - start
    for row, token, one in zip(table, known[start:], found, strict=True):
        assert one.logprob == pytest.approx(float(row[token]), abs=1e-3)
        assert len(one.top) == top
        for other, value in one.top:
            assert value == pytest.approx(float(row[other]), abs=1e-3)
        assert [value for _, value in one.top] == pytest.approx(row.topk(top).values.tolist(), abs=1e-3)


@pytest.mark.parametrize("model_type", [PACKED, STEPWISE, "gpt_oss"])
@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0), ODD], ids=["greedy", "odd"])
def test_they_are_those_of_the_raw_logits(
    tiny_folder: Folder, model_type: str, sampling: SamplingParams
) -> None:
    folder = tiny_folder(model_type)
    fields: dict[str, Any] = {"sampling": sampling, "stop_token_ids": ()}
    asking = [
        request(str(n), prompt, 6, logprobs=n % 3, prompt_logprobs=(n + 1) % 3, **fields)
        for n, prompt in enumerate(PROMPTS)
    ]
    scores = drained(engine(folder, step_tokens=16), *asking, request("plain", PROMPTS[0], 6, **fields))
    for n, prompt in enumerate(PROMPTS):
        known = (*prompt, *scores.tokens[str(n)])
        check(folder, known, len(prompt), scores.own[str(n)], n % 3)
        check(folder, prompt, 1, scores.prompt[str(n)], (n + 1) % 3)
    assert scores.tokens["plain"] == scores.tokens["0"]
    assert scores.own["plain"] == scores.prompt["plain"] == []


@pytest.mark.parametrize("model_type", [PACKED, STEPWISE])
def test_a_prompt_can_be_scored_alone(tiny_folder: Folder, model_type: str) -> None:
    folder = tiny_folder(model_type)
    asking = [request(str(n), prompt, 0, prompt_logprobs=1) for n, prompt in enumerate(PROMPTS)]
    scores = drained(engine(folder, step_tokens=16), *asking)
    for n, prompt in enumerate(PROMPTS):
        check(folder, prompt, 1, scores.prompt[str(n)], 1)
        assert (scores.tokens[str(n)], scores.ends[str(n)]) == ([], "length")


def test_no_token_without_a_score_is_no_request(tiny_folder: Folder) -> None:
    with pytest.raises(RequestError, match="one new token"):
        engine(tiny_folder(PACKED)).submit(request("r", (1, 2), 0, logprobs=1))


def test_a_step_keeps_few_rows_of_prompts_and_decodes_go_on(tiny_folder: Folder) -> None:
    folder = tiny_folder(PACKED)
    one, scores, most = engine(folder, score_rows=5), Scores(), 0
    one.submit(request("decodes", PROMPTS[1], 40, stop_token_ids=()))
    scores.take(one.step())
    for n, prompt in enumerate(PROMPTS):
        one.submit(request(str(n), prompt, 2, prompt_logprobs=0))
    steps = 0
    while one.busy:
        events = one.step()
        rows = sum(len(w.prompt_logprobs) for _, w in events if isinstance(w, GenerateChunk))
        decoding = any(name == "decodes" for name, _ in events)
        assert decoding or "decodes" in scores.ends
        scores.take(events)
        most, steps = max(most, rows), steps + 1
        assert steps < 200
    assert most == 5
    for n, prompt in enumerate(PROMPTS):
        check(folder, prompt, 1, scores.prompt[str(n)], 0)


def test_preemption_repeats_nothing_and_changes_nothing(tiny_folder: Folder) -> None:
    folder = tiny_folder(PACKED)

    def run(kv_tokens: int) -> tuple[Scores, int]:
        one = engine(folder, kv_tokens=kv_tokens)
        asking = [
            request(str(n), prompt, 48, logprobs=2, prompt_logprobs=1, stop_token_ids=())
            for n, prompt in enumerate(PROMPTS * 2)
        ]
        return drained(one, *asking), one.stats()["preemptions"]

    (roomy, none), (tight, some) = run(4096), run(256)
    assert none == 0 and some > 2 and tight.tokens == roomy.tokens
    for name, own in roomy.own.items():
        for wanted, found in ((own, tight.own[name]), (roomy.prompt[name], tight.prompt[name])):
            assert [one.logprob for one in found] == pytest.approx([one.logprob for one in wanted], abs=1e-4)


@pytest.mark.parametrize("scored", [0, 1, 20, 36])
def test_another_router_goes_on_where_the_first_was_lost(tiny_folder: Folder, scored: int) -> None:
    folder, prompt = tiny_folder(PACKED), PROMPTS[0]
    asking = request("r", prompt, 12, sampling=ODD, logprobs=1, prompt_logprobs=1, stop_token_ids=())
    whole = drained(engine(folder), asking)
    cut = 5 if scored == 36 else 0
    rest = replace(asking, prompt_scored=scored, generated_ids=tuple(whole.tokens["r"][:cut]))
    again = drained(engine(folder, step_tokens=16), rest)
    assert again.tokens["r"] == whole.tokens["r"][cut:]
    for found, wanted in ((again.own, whole.own["r"][cut:]), (again.prompt, whole.prompt["r"][scored:])):
        assert [one.logprob for one in found["r"]] == pytest.approx([o.logprob for o in wanted], abs=1e-4)


def test_who_asks_changes_no_bit_for_the_neighbours(tiny_folder: Folder) -> None:
    folder = tiny_folder(PACKED)

    def run(**fields: Any) -> Scores:
        asks = request("asks", PROMPTS[0], 8, **fields)
        return drained(engine(folder), request("other", PROMPTS[4], 12, logprobs=3), asks)

    without, withal = run(), run(logprobs=5, prompt_logprobs=5)
    assert withal.tokens == without.tokens
    assert [one.logprob for one in withal.own["other"]] == pytest.approx(
        [one.logprob for one in without.own["other"]], abs=1e-5
    )


def test_a_prompt_with_unusable_logits_ends_its_own_request_alone(tiny_folder: Folder) -> None:
    folder = tiny_folder(PACKED)
    embedding = router_model(folder).get_input_embeddings().weight
    row = embedding[VOCAB - 1].clone()
    try:
        embedding[VOCAB - 1] = torch.nan
        bad = (VOCAB - 1, 5, 6)
        scores = drained(
            engine(folder, experts=LocalExperts(folder)),
            request("bad", bad, 4, prompt_logprobs=0),
            request("bad alone", bad, 0, prompt_logprobs=0),
            request("good", PROMPTS[0], 4, prompt_logprobs=0),
        )
    finally:
        embedding[VOCAB - 1] = row
    assert isinstance(scores.ends["bad"], EngineError) and isinstance(scores.ends["bad alone"], EngineError)
    assert scores.ends["good"] == "length" and len(scores.prompt["good"]) == len(PROMPTS[0]) - 1


def test_a_model_that_takes_a_prompt_at_once_refuses_to_score_a_long_one(tiny_folder: Folder) -> None:
    one = engine(tiny_folder(STEPWISE), score_rows=8)
    with pytest.raises(RequestError, match="at most 8 tokens, this one has 37"):
        one.submit(request("r", PROMPTS[0], 0, prompt_logprobs=0))
    assert drained(one, request("r", PROMPTS[2], 0, prompt_logprobs=0)).ends["r"] == "length"
