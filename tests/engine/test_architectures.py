"""The engine on every architecture that is served: the tokens of transformers' own `generate`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engine.doubles import Answers, engine, generated, request
from tests.matrix import MATRIX_TYPES, served_experts
from tests.tiny import TINY_TYPES

GENERATOR = torch.Generator().manual_seed(2)
# The first two are longer than the windows of 16, and than a step.
PROMPTS = [tuple(torch.randint(0, 255, (n,), generator=GENERATOR).tolist()) for n in (37, 20, 5)]
TOKENS = 8


@pytest.mark.parametrize("model_type", [name for name in MATRIX_TYPES if name not in TINY_TYPES])
def test_greedy_equals_generate(tiny_folder: Callable[[str], Path], model_type: str) -> None:
    folder = tiny_folder(model_type)
    with served_experts(folder, [range(5), range(5, 8)]) as experts:
        one, answers = engine(folder, experts=experts, step_tokens=16), Answers()
        for number, prompt in enumerate(PROMPTS):
            one.submit(request(str(number), prompt, TOKENS))
            answers.take(one.step())
        answers.drain(one)
    expected = {str(n): generated(folder, prompt, TOKENS) for n, prompt in enumerate(PROMPTS)}
    assert answers.tokens == expected
