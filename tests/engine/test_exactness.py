"""The two levels of exactness.

Deterministic: a sequence's logits have the bits that it gets alone, whatever happens around it. Normal: they have
the same bits in the same company, wherever the experts are.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raymoe.engine.messages import GenerateRequest, SamplingParams
from tests.engine.doubles import GREEDY, Answers
from tests.engine.worlds import RecordingEngine, World, world
from tests.tiny import TINY_TYPES, tiny_checkpoint

Folder = Callable[[str], Path]
Bits = dict[str, list[bytes]]
TOKENS = 10
GENERATOR = torch.Generator().manual_seed(5)
LENGTHS = (1, 5, 17, 60, 66, 250)
"""Some cross the border of a tile of keys (64) or of a block (256) while they decode."""
REQUESTS = [
    GenerateRequest(
        str(number),
        tuple(torch.randint(0, 250, (length,), generator=GENERATOR).tolist()),
        TOKENS,
        GREEDY if number % 2 else SamplingParams(temperature=1.0, seed=number),
    )
    for number, length in enumerate(LENGTHS)
]
FEW = settings(
    max_examples=4,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
_ALONE: dict[Path, tuple[dict[str, list[int]], Bits]] = {}


@pytest.fixture(scope="module")
def bf16_folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Tiny checkpoints in bfloat16."""
    written: dict[str, Path] = {}

    def folder(model_type: str) -> Path:
        if model_type not in written:
            target = tmp_path_factory.mktemp(model_type)
            written[model_type] = tiny_checkpoint(model_type, target, dtype=torch.bfloat16)
        return written[model_type]

    return folder


def alone(folder: Path) -> tuple[dict[str, list[int]], Bits]:
    """Tokens and logits of each request computed by itself, in deterministic mode, in whole prompts."""
    if folder not in _ALONE:
        with world(folder, seed=0, groups=1) as here:
            tokens, bits = {}, {}
            for request in REQUESTS:
                engine = new_engine(folder, here, step_tokens=512)
                engine.submit(request)
                tokens |= Answers().drain(engine).tokens
                bits |= engine.bits
        _ALONE[folder] = tokens, bits
    return _ALONE[folder]


def new_engine(folder: Path, here: World, deterministic: bool = True, max_pairs: int = 4096, **limits: int):
    router = here.router(max_pairs)
    router.set_layout(here.layout())
    return RecordingEngine(folder, router, deterministic, **limits)


def run(
    engine: RecordingEngine, rng: random.Random, each: Callable[[int], None] = lambda step: None
) -> Answers:
    """All requests, in an order and with pauses from `rng`; `each` is called before each step."""
    answers, waiting = Answers(), rng.sample(REQUESTS, len(REQUESTS))
    for step in range(2000):
        if waiting and (step == 0 or rng.random() < 0.3):
            engine.submit(waiting.pop())
        if not waiting and not engine.busy:
            return answers
        each(step)
        answers.take(engine.step())
    raise AssertionError(f"the engine is stuck: {engine.stats()}")


def check(engine: RecordingEngine, answers: Answers, folder: Path) -> None:
    tokens, bits = alone(folder)
    assert answers.tokens == tokens
    for name, rows in bits.items():
        for position, (ours, expected) in enumerate(zip(engine.bits[name], rows, strict=True)):
            assert ours == expected, f"request {name}, new token {position}: other bits than alone"


@pytest.mark.parametrize("model_type", TINY_TYPES)
@given(seed=st.integers(0, 1 << 32))
@FEW
def test_deterministic_bits_are_those_of_the_sequence_alone(
    tiny_folder: Folder, model_type: str, seed: int
) -> None:
    in_random_company(tiny_folder(model_type), random.Random(seed))


@pytest.mark.parametrize("model_type", ["olmoe", "gpt_oss", "qwen2_moe"])
@given(seed=st.integers(0, 1 << 32))
@FEW
def test_deterministic_bits_hold_in_bfloat16(bf16_folder: Folder, model_type: str, seed: int) -> None:
    in_random_company(bf16_folder(model_type), random.Random(seed))


def in_random_company(folder: Path, rng: random.Random) -> None:
    with world(folder, rng.getrandbits(32), rng.randint(1, 3), rng.choice([0, 0.3, 1])) as here:
        engine = new_engine(
            folder,
            here,
            max_pairs=rng.choice([3, 16, 4096]),
            step_tokens=rng.choice([3, 17, 64, 200]),
            max_sequences=rng.choice([2, 8]),
            kv_tokens=rng.choice([320, 384, 4096]),
        )
        check(engine, run(engine, rng), folder)


@pytest.mark.parametrize("model_type", ["olmoe", "deepseek_v3"])
def test_preemption_changes_no_bit(tiny_folder: Folder, model_type: str) -> None:
    folder = tiny_folder(model_type)
    with world(folder, seed=3) as here:
        engine = new_engine(folder, here, kv_tokens=320, step_tokens=40)
        check(engine, run(engine, random.Random(1)), folder)
        assert engine.stats()["preemptions"] > 0


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_a_group_replaced_in_mid_request_changes_no_bit(tiny_folder: Folder, model_type: str) -> None:
    folder = tiny_folder(model_type)
    with world(folder, seed=4, groups=3, chance=0.2) as here:
        router = here.router()
        router.set_layout(here.layout())
        engine = RecordingEngine(folder, router)

        def failing(step: int) -> None:
            if step == 8:
                here.lose("g1")
            elif step == 20:
                here.replace("g1")
                router.set_layout(here.layout())
                engine.look()

        check(engine, run(engine, random.Random(2), failing), folder)
        assert engine.stats()["parkings"] + engine.stats()["blocked_steps"] > 0


def test_two_routers_merged_in_one_group_change_no_bit(tiny_folder: Folder) -> None:
    folder = tiny_folder("olmoe")
    alone(folder)
    # Whether requests of both wait for a group at the same moment is chance: about every second time they do.
    assert any(merged_beside_each_other(folder, seed) for seed in range(5, 25))


def merged_beside_each_other(folder: Path, seed: int) -> bool:
    """Two routers at once give the bits that each gives alone; whether a group merged requests of both."""
    with world(folder, seed=seed, groups=2, chance=0) as here:
        engines = [new_engine(folder, here) for _ in range(2)]
        results: list[Answers] = []

        def one(number: int) -> None:
            torch.set_num_threads(1)
            results.append(run(engines[number], random.Random(7)))

        threads = [threading.Thread(target=one, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert len(results) == 2
        for engine, answers in zip(engines, results, strict=True):
            check(engine, answers, folder)
        return any(server.stats()["merged"] for server in here.servers.values())


@pytest.mark.parametrize("model_type", TINY_TYPES)
@given(seed=st.integers(0, 1 << 32))
@FEW
def test_in_the_same_company_bits_are_the_same_wherever_the_experts_are(
    tiny_folder: Folder, model_type: str, seed: int
) -> None:
    folder, rng = tiny_folder(model_type), random.Random(seed)
    company, seen = rng.getrandbits(32), []
    for groups, chance in ((1, 0.0), (rng.randint(2, 4), rng.choice([0, 0.3, 1]))):
        with world(folder, rng.getrandbits(32), groups, chance, deterministic=False) as here:
            engine = new_engine(folder, here, deterministic=False, step_tokens=40)
            seen.append((run(engine, random.Random(company)).tokens, engine.bits))
    assert seen[0] == seen[1]


def test_the_normal_mode_does_depend_on_company(tiny_folder: Folder) -> None:
    """Else the tests above could not fail."""
    folder, seen = tiny_folder("olmoe"), []
    for step_tokens in (3, 200):
        with world(folder, seed=6, deterministic=False) as here:
            engine = new_engine(folder, here, deterministic=False, step_tokens=step_tokens)
            run(engine, random.Random(1))
            seen.append(engine.bits)
    assert seen[0] != seen[1]
