"""Packed forwards against transformers' own, and forwards that disturb each other or break off."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from raymoe.errors import EngineError, ExpertUnavailableError
from raymoe.model.cache import SequenceCache
from raymoe.model.context import current_step, run_experts
from raymoe.model.forward import Part, forward
from tests.engine.doubles import LocalExperts, router_model, whole_model
from tests.tiny import TINY_TYPES

Folder = Callable[[str], Path]
GENERATOR = torch.Generator().manual_seed(3)
TOKENS = {n: torch.randint(0, 255, (n,), generator=GENERATOR).tolist() for n in (2, 21, 70)}


def last_logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return whole_model(folder)(torch.tensor([tokens]), logits_to_keep=1).logits[0, -1]


@pytest.mark.parametrize("model_type", TINY_TYPES)
def test_logits_equal_the_whole_models_in_company_and_in_chunks(tiny_folder: Folder, model_type: str) -> None:
    folder = tiny_folder(model_type)
    model, experts = router_model(folder), LocalExperts(folder)
    expected = torch.stack([last_logits(folder, tokens) for tokens in TOKENS.values()])
    for chunk in (1, 7, 100):
        caches = {n: SequenceCache() for n in TOKENS}
        found = {}
        for start in range(0, 70, chunk):
            here = {n: tokens[start : start + chunk] for n, tokens in TOKENS.items() if start < n}
            ends = [n for n in here if start + chunk >= n]
            logits = forward(model, [Part(caches[n], here[n], n in ends) for n in here], experts.run)
            assert logits.shape[0] == len(ends)
            found.update(zip(ends, logits, strict=True))
        assert [cache.length for cache in caches.values()] == list(TOKENS)
        assert torch.allclose(torch.stack([found[n] for n in TOKENS]), expected, atol=1e-5)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3"])
def test_a_step_that_breaks_off_can_be_run_again(tiny_folder: Folder, model_type: str) -> None:
    folder = tiny_folder(model_type)
    model, experts = router_model(folder), LocalExperts(folder)
    cache = SequenceCache()
    forward(model, [Part(cache, TOKENS[21], False)], experts.run)
    experts.failure, experts.fail_after = ExpertUnavailableError(1, ("g0",)), 1
    for _ in range(2):
        with pytest.raises(ExpertUnavailableError):
            forward(model, [Part(cache, TOKENS[70][:50], True)], experts.run)
        assert cache.length == 21
    experts.failure = None
    logits = forward(model, [Part(cache, TOKENS[70][:50], True)], experts.run)
    assert torch.allclose(logits[0], last_logits(folder, TOKENS[21] + TOKENS[70][:50]), atol=1e-5)


def test_forwards_of_two_threads_interleave_and_keep_apart(tiny_folder: Folder) -> None:
    folder = tiny_folder("olmoe")
    model = router_model(folder)
    barrier = threading.Barrier(2, timeout=30)
    results: dict[int, torch.Tensor] = {}
    callers: dict[int, set[int]] = {2: set(), 21: set()}

    def work(length: int) -> None:
        experts = LocalExperts(folder)

        def run(layer, hidden, ids, weights):  # both forwards are at this layer now
            barrier.wait()
            callers[length].add(hidden.shape[0])
            return experts.run(layer, hidden, ids, weights)

        results[length] = forward(model, [Part(SequenceCache(), TOKENS[length], True)], run)

    threads = [threading.Thread(target=work, args=(length,)) for length in (2, 21)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert callers == {2: {2}, 21: {21}}
    for length in (2, 21):
        assert torch.allclose(results[length][0], last_logits(folder, TOKENS[length]), atol=1e-5)


def test_outside_a_step_there_is_no_step(tiny_folder: Folder) -> None:
    with pytest.raises(EngineError, match="outside a step"):
        current_step()
    with pytest.raises(EngineError, match="outside a step"):
        router_model(tiny_folder("olmoe"))(torch.tensor([[1, 2]]), use_cache=False)


def test_a_router_without_a_place_for_its_experts_says_so(tiny_folder: Folder) -> None:
    with pytest.raises(EngineError, match="MoE layer 0"):
        forward(router_model(tiny_folder("olmoe")), [Part(SequenceCache(), [1], True)])
    with pytest.raises(EngineError):
        run_experts(0, *[torch.zeros(1, 1)] * 3)
