"""A tiny model with its experts in the same process, and what transformers itself generates."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from raymoe.checkpoint.folder import Checkpoint
from raymoe.checkpoint.private import experts_of
from raymoe.checkpoint.router import load_router
from raymoe.engine.loop import Engine, Event, Experts
from raymoe.engine.messages import GenerateRequest, SamplingParams
from raymoe.engine.scheduler import Limits
from raymoe.errors import ExpertUnavailableError, RaymoeError
from raymoe.model.attention import NAME, can_pack
from raymoe.model.context import run_experts
from raymoe.model.forward import new_cache
from raymoe.model.grammar import Grammars
from raymoe.model.own_cache import OwnCache
from tests.tiny import EOS, PAD

GREEDY = SamplingParams(temperature=0)


@cache
def whole_model(folder: Path) -> PreTrainedModel:
    """The checkpoint as transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(False)


@cache
def router_model(folder: Path) -> PreTrainedModel:
    """Without experts, with packed attention where that is possible."""
    checkpoint = Checkpoint.open(folder)
    return load_router(checkpoint, run_experts, attention=NAME if can_pack(checkpoint.config) else None)


@cache
def generated(folder: Path, prompt: tuple[int, ...], tokens: int) -> list[int]:
    """Greedy tokens by transformers' `generate`, up to the end-of-sequence token."""
    config = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=EOS, pad_token_id=PAD)
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = whole_model(folder).generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    new: list[int] = out[0, len(prompt) :].tolist()
    return new[: new.index(EOS)] if EOS in new else new


class LocalExperts:
    """The whole model's experts. `failure` is raised by the call that follows `fail_after` good ones.

    `gone` are (layer, expert) without a living copy: rows that need one are refused by number.
    """

    def __init__(self, folder: Path) -> None:
        self._modules = list(experts_of(whole_model(folder)).values())
        self.failure: Exception | None = None
        self.fail_after = 0
        self.gone: set[tuple[int, int]] = set()
        self.calls = 0
        self.rows = 0

    def run(self, layer: int, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        self.calls += 1
        if self.failure is not None:
            self.fail_after -= 1
            if self.fail_after < 0:
                raise self.failure
        lost_E = torch.tensor([expert for at, expert in self.gone if at == layer])
        rows = torch.isin(ids_TK, lost_E).any(1).nonzero().flatten().tolist()
        if rows:
            raise ExpertUnavailableError(layer, ("g0",), rows=rows)
        self.rows += len(hidden_TH)
        out: Tensor = self._modules[layer](hidden_TH, ids_TK, weights_TK)
        return out

    def set_layout(self, layout: Any) -> None: ...

    def reconnect(self) -> None: ...

    def missing(self) -> ExpertUnavailableError | None:
        if isinstance(self.failure, ExpertUnavailableError):
            return self.failure
        return ExpertUnavailableError(min(self.gone)[0], ("g0",)) if self.gone else None

    def stats(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def close(self) -> None: ...


class Clock:
    """Time that tests move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def engine(folder: Path, clock: Clock | None = None, experts: Experts | None = None, **limits: int) -> Engine:
    """An engine over a tiny checkpoint; `limits` are those of `Limits`."""
    model = router_model(folder)
    values = {"step_tokens": 64, "max_sequences": 8, "max_waiting": 32, "kv_tokens": 4096, **limits}
    values["stepwise"] = isinstance(new_cache(model), OwnCache)
    return Engine(
        model,
        experts or LocalExperts(folder),
        Limits(**values),
        replace_timeout_s=10,
        clock=clock or Clock(),
        grammars=Grammars(folder, model.config.get_text_config().vocab_size),
    )


def request(name: str, prompt: tuple[int, ...], tokens: int = 8, **fields: Any) -> GenerateRequest:
    """Greedy unless told otherwise."""
    values = {"sampling": GREEDY, "stop_token_ids": (EOS,), **fields}
    return GenerateRequest(name, prompt, tokens, **values)


class Answers:
    """What came out of an engine, by request."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, str | RaymoeError] = {}

    def take(self, events: list[Event]) -> None:
        for name, what in events:
            if name in self.ends:
                raise AssertionError(f"{name} goes on after its end")
            if isinstance(what, RaymoeError):
                self.ends[name] = what
                continue
            self.tokens.setdefault(name, []).extend(what.token_ids)
            if what.finish_reason is not None:
                self.ends[name] = what.finish_reason

    def drain(self, engine: Engine, steps: int = 2000) -> Answers:
        """Step until nothing is left."""
        for _ in range(steps):
            if not engine.busy:
                return self
            self.take(engine.step())
        raise AssertionError(f"the engine is stuck: {engine.stats()}")
