"""What evaluation harnesses compute from an echoed prompt: the log-likelihoods of transformers itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from raymoe.api.service import Service
from raymoe.engine.loop import Engine
from raymoe.engine.messages import GenerateChunk, GenerateRequest
from raymoe.errors import RaymoeError
from tests.api.scripted import complete
from tests.engine.doubles import engine, whole_model
from tests.tiny import EOS, VOCAB

CONTEXT_IDS = list(b"The quick brown fox jumps over ")
CONTINUATIONS = [list(b"the lazy dog."), list(b"a"), list(" é😀".encode())]


class EngineBackend:
    """An engine in this process, stepped by whoever waits."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._events: dict[str, list[GenerateChunk | RaymoeError]] = {}

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        own = self._events[request.request_id] = []
        self._engine.submit(request)
        while True:
            while not own:
                for name, what in self._engine.step():
                    self._events[name].append(what)
            what = own.pop(0)
            if isinstance(what, RaymoeError):
                raise what
            yield what
            if what.finish_reason is not None:
                return

    async def readiness(self) -> str | None:
        return None


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("model_type", ["olmoe", "qwen3_next"])
def test_log_likelihoods_equal_transformers(
    tiny_folder: Callable[[str], Path], model_type: str, max_tokens: int
) -> None:
    folder = tiny_folder(model_type)
    service = Service(
        EngineBackend(engine(folder, step_tokens=16)),
        AutoTokenizer.from_pretrained(folder),
        model_name="m",
        max_context=512,
        vocab_size=VOCAB,
        eos_ids=[EOS],
    )
    # As lm-eval's `local-completions` asks.
    body: dict[str, Any] = {"temperature": 0, "seed": 1234, "echo": True, "logprobs": 1}
    prompts = [CONTEXT_IDS + continuation for continuation in CONTINUATIONS]
    answer = complete(service, prompt=prompts, max_tokens=max_tokens, **body).json()
    for ids, continuation, choice in zip(prompts, CONTINUATIONS, answer["choices"], strict=True):
        found, start, end = choice["logprobs"], len(CONTEXT_IDS), len(ids)
        with torch.inference_mode():
            logits = whole_model(folder)(torch.tensor([ids])).logits[0].float()
        table = torch.log_softmax(logits, -1)[start - 1 : -1]
        expected = table.gather(1, torch.tensor(continuation).unsqueeze(1)).sum()
        assert sum(found["token_logprobs"][start:end]) == pytest.approx(float(expected), abs=1e-3)
        greedy = [
            token == max(top, key=top.__getitem__)
            for token, top in zip(found["tokens"][start:end], found["top_logprobs"][start:end], strict=True)
        ]
        assert greedy == (table.argmax(-1) == torch.tensor(continuation)).tolist()
