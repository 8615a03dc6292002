"""Penalties, forbidden and ending tokens through the engine: against `generate`, preemption and replay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from raymoe.engine.messages import SamplingParams
from raymoe.errors import EngineError, VocabularyError
from tests.engine.doubles import Answers, engine, generated, request, whole_model
from tests.tiny import EOS, PAD, VOCAB

Folder = Callable[[str], Path]
GENERATOR = torch.Generator().manual_seed(1)
PROMPTS = [tuple(torch.randint(0, 255, (n,), generator=GENERATOR).tolist()) for n in (5, 17, 33, 1, 9, 60)]
TOKENS = 24
PENALTIES = {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.5}
EVERYTHING: dict[str, Any] = {
    **PENALTIES,
    "logit_bias": ((10, 3.0), (11, -100.0)),
    "min_tokens": 20,
    "late_ids": (EOS, 7),
    "min_p": 0.01,
}


def by_transformers(folder: Path, prompt: tuple[int, ...], **options: Any) -> list[int]:
    config = GenerationConfig(
        max_new_tokens=TOKENS, do_sample=False, eos_token_id=EOS, pad_token_id=PAD, **options
    )
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = whole_model(folder).generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    new: list[int] = out[0, len(prompt) :].tolist()
    return new[: new.index(EOS)] if EOS in new else new


@pytest.mark.parametrize("penalty", [1.2, 3.0])
def test_a_greedy_repetition_penalty_equals_generate(tiny_folder: Folder, penalty: float) -> None:
    folder = tiny_folder("olmoe")
    one, answers = engine(folder), Answers()
    for n, prompt in enumerate(PROMPTS):
        sampling = SamplingParams(temperature=0, repetition_penalty=penalty)
        one.submit(request(str(n), prompt, TOKENS, sampling=sampling))
        one.submit(request(f"plain{n}", prompt, TOKENS))
    answers.drain(one)
    expected = [by_transformers(folder, prompt, repetition_penalty=penalty) for prompt in PROMPTS]
    assert [answers.tokens[str(n)] for n in range(len(PROMPTS))] == expected
    plain = [generated(folder, prompt, TOKENS) for prompt in PROMPTS]
    assert [answers.tokens[f"plain{n}"] for n in range(len(PROMPTS))] == plain != expected


def test_preemption_changes_no_token_of_a_penalised_sequence(tiny_folder: Folder) -> None:
    folder = tiny_folder("olmoe")

    def run(kv_tokens: int) -> tuple[dict[str, list[int]], int]:
        one, answers = engine(folder, kv_tokens=kv_tokens), Answers()
        for n, prompt in enumerate(PROMPTS):
            one.submit(request(str(n), prompt, 2 * TOKENS, sampling=SamplingParams(0, **PENALTIES)))
            one.submit(
                request(f"s{n}", prompt, 2 * TOKENS, sampling=SamplingParams(1.0, seed=n, **EVERYTHING))
            )
        return answers.drain(one).tokens, one.stats()["preemptions"]

    roomy, none = run(4096)
    tight, some = run(256)
    assert (none, tight) == (0, roomy) and some > 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_replay_draws_the_tokens_that_the_first_router_would_have_drawn(
    tiny_folder: Folder, temperature: float
) -> None:
    folder, sampling = tiny_folder("olmoe"), SamplingParams(temperature, seed=5, **EVERYTHING)
    one, answers = engine(folder), Answers()
    one.submit(request("whole", PROMPTS[1], TOKENS, sampling=sampling))
    whole = answers.drain(one).tokens["whole"]
    for cut in (1, 7, TOKENS - 1):
        again = request(str(cut), PROMPTS[1], TOKENS, sampling=sampling, generated_ids=tuple(whole[:cut]))
        one.submit(again)
        assert answers.drain(one).tokens[str(cut)] == whole[cut:]


def test_what_was_generated_elsewhere_is_not_a_prompt(tiny_folder: Folder) -> None:
    one, answers = engine(tiny_folder("olmoe")), Answers()
    # So strong a bias that the token comes until it has been generated often enough.
    sampling = SamplingParams(0, frequency_penalty=2.0, logit_bias=((65, 60.0),))
    one.submit(request("replayed", PROMPTS[1], 40, sampling=sampling, generated_ids=(65,) * 20))
    one.submit(request("prompt", PROMPTS[1] + (65,) * 20, 20, sampling=sampling))
    answers.drain(one)
    assert answers.tokens["replayed"].count(65) <= 12 < 20 == answers.tokens["prompt"].count(65)


def test_min_tokens_puts_the_end_off_and_then_it_comes(tiny_folder: Folder) -> None:
    folder = tiny_folder("olmoe")
    # A bias makes the end the likeliest token from the start.
    for least in (0, 1, 6):
        fields: dict[str, Any] = {"logit_bias": ((EOS, 100.0),), "min_tokens": least, "late_ids": (EOS,)}
        one, answers = engine(folder), Answers()
        one.submit(request("a", PROMPTS[0], TOKENS, sampling=SamplingParams(0, **fields)))
        answers.drain(one)
        assert (len(answers.tokens["a"]), answers.ends["a"]) == (least, "stop")
    assert answers.tokens["a"] == generated(folder, PROMPTS[0], TOKENS)[:6]


def test_a_sequence_without_a_token_left_fails_alone(tiny_folder: Folder) -> None:
    folder = tiny_folder("olmoe")
    one, answers = engine(folder), Answers()
    sampling = SamplingParams(min_tokens=1, late_ids=tuple(range(VOCAB)))
    one.submit(request("none", PROMPTS[0], TOKENS, sampling=sampling))
    one.submit(request("good", PROMPTS[1], TOKENS))
    answers.drain(one)
    assert isinstance(answers.ends["none"], EngineError)
    assert answers.tokens["good"] == generated(folder, PROMPTS[1], TOKENS)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(logit_bias=((VOCAB, 1.0),)),
        SamplingParams(logit_bias=((-1, 1.0),)),
        SamplingParams(min_tokens=1, late_ids=(VOCAB,)),
    ],
)
def test_ids_outside_the_vocabulary_are_refused_before_a_step(
    tiny_folder: Folder, sampling: SamplingParams
) -> None:
    one = engine(tiny_folder("olmoe"))
    with pytest.raises(VocabularyError):
        one.submit(request("a", PROMPTS[0], TOKENS, sampling=sampling))
    assert not one.busy
