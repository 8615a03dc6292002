"""What a step computes, by counting alone."""

from __future__ import annotations

import contextlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymoe.engine.messages import ANONYMOUS, GenerateRequest
from raymoe.engine.scheduler import Chunk, Limits, Scheduler
from raymoe.engine.sequence import Sequence
from raymoe.errors import ContextLengthError, OverloadedError


def scheduler(step_tokens=64, max_sequences=8, max_waiting=100, kv_tokens=4096) -> Scheduler:
    return Scheduler(Limits(step_tokens, max_sequences, max_waiting, kv_tokens))


def sequence(name: object, prompt: int, tokens: int = 4, client: str = ANONYMOUS) -> Sequence:
    return Sequence(GenerateRequest(str(name), (1,) * prompt, tokens, client=client), 0.0)


def run(planner: Scheduler, chunks: list[Chunk]) -> list[Sequence]:
    """Do what a step does to the books; returns who has ended."""
    sampled = [chunk.sequence for chunk in chunks if chunk.samples]
    for chunk in chunks:
        chunk.sequence.cache.advance(chunk.rows)
    ended = []
    for one in sampled:
        one.tokens.append(1)
        if one.generated == one.request.max_tokens:
            planner.remove(one)
            ended.append(one)
    return ended


def plan(planner: Scheduler) -> list[tuple[str, int]]:
    """One step's (name, rows), and its effect."""
    chunks = planner.schedule()
    named = [(chunk.sequence.id, chunk.rows) for chunk in chunks]
    run(planner, chunks)
    return named


def test_decodes_come_first_then_prefills_share_the_budget_oldest_first() -> None:
    planner = scheduler(step_tokens=10)
    planner.add(sequence("a", 4))
    assert plan(planner) == [("a", 4)]
    planner.add(sequence("b", 25))
    planner.add(sequence("c", 3))
    assert plan(planner) == [("a", 1), ("b", 9)]
    assert plan(planner) == [("a", 1), ("b", 9)]
    # a is done; b's last 7 and c's prompt fit one step.
    assert plan(planner) == [("a", 1), ("b", 7), ("c", 2)]
    assert plan(planner) == [("b", 1), ("c", 1)]


def test_only_the_chunk_with_the_last_known_token_samples() -> None:
    planner = scheduler(step_tokens=10)
    planner.add(sequence("a", 15))
    first = planner.schedule()
    assert [chunk.samples for chunk in first] == [False]
    run(planner, first)
    assert [chunk.samples for chunk in planner.schedule()] == [True]


def test_no_more_run_than_a_step_has_rows() -> None:
    planner = scheduler(step_tokens=3, max_sequences=8)
    for name in range(6):
        planner.add(sequence(name, 1, 50))
    for _ in range(10):
        assert len(plan(planner)) <= 3
    assert [one.generated for one in planner.running] == [10, 10, 10]


def test_the_youngest_gives_way_and_comes_back_first_and_computes_all_its_tokens_again() -> None:
    planner = scheduler(kv_tokens=128)
    old, young, late = sequence("old", 60, 40), sequence("young", 58, 40), sequence("late", 1, 1)
    for one in (old, young, late):
        planner.add(one)
    while not planner.preemptions:
        run(planner, planner.schedule())
    assert list(planner.waiting) == [young, late]
    assert (young.cache.length, young.cache.capacity) == (0, 0)
    known = len(young.tokens)
    while young.cache.length == 0:
        chunks = planner.schedule()
        run(planner, chunks)
    assert chunks[0] == Chunk(young, known)
    assert old.generated == 40


def test_what_can_never_fit_is_refused_with_both_numbers() -> None:
    planner = scheduler(kv_tokens=128)
    with pytest.raises(ContextLengthError, match=r"100 prompt tokens and 30 new ones .*192.*128"):
        planner.add(sequence("a", 100, 30))
    planner.add(sequence("b", 100, 29))


def test_a_full_queue_refuses() -> None:
    planner = scheduler(max_sequences=2, max_waiting=1)
    for name in range(3):
        planner.add(sequence(name, 5))
    with pytest.raises(OverloadedError):
        planner.add(sequence("more", 5))
    planner.schedule()
    with pytest.raises(OverloadedError):
        planner.add(sequence("more", 5))
    for queue in (planner.running, planner.waiting):
        # Who leaves frees a place, in the queue as well.
        planner.remove(queue[0])
        planner.add(sequence("more", 5))
        with pytest.raises(OverloadedError):
            planner.add(sequence("too many", 5))


def test_a_removed_sequence_leaves_nothing() -> None:
    planner = scheduler()
    one, two = sequence("one", 5), sequence("two", 5)
    planner.add(one)
    planner.schedule()
    planner.add(two)
    for gone in (one, two, two):
        planner.remove(gone)
    assert planner.kv_tokens == 0
    assert planner.schedule() == []


def test_parked_sequences_get_no_rows_and_keep_their_place() -> None:
    planner = scheduler(step_tokens=10, max_sequences=3)
    one, two, three, four = (sequence(name, 2) for name in ("one", "two", "three", "four"))
    for each in (one, two, three, four):
        planner.add(each)
    assert plan(planner) == [("one", 2), ("two", 2), ("three", 2)]
    two.parked = four.parked = True
    assert plan(planner) == [("one", 1), ("three", 1)]
    planner.remove(one)
    assert plan(planner) == [("three", 1)]
    four.parked = False
    assert plan(planner) == [("three", 1), ("four", 2)]
    two.parked = False
    assert plan(planner) == [("two", 1), ("four", 1)]


def test_a_parked_sequence_at_the_head_of_the_queue_lets_the_next_one_in() -> None:
    planner = scheduler(step_tokens=10, max_sequences=1)
    first, second = sequence("first", 2), sequence("second", 2)
    planner.add(first)
    planner.add(second)
    first.parked = True
    assert plan(planner) == [("second", 2)]


def test_stepwise_computes_a_prompt_at_once_and_all_later_tokens_alone_also_again() -> None:
    planner = Scheduler(Limits(4, 8, 8, 256, fixed_tokens=20, stepwise=True))
    one = sequence("one", 11, 20)
    planner.add(one)
    for rows in (11, 1, 1):
        assert plan(planner) == [("one", rows)]
    assert planner.kv_tokens == 64 + 20
    planner.running.remove(one)
    planner.waiting.appendleft(one)
    one.cache.release()
    assert [plan(planner) for _ in range(4)] == [[("one", rows)] for rows in (11, 1, 1, 1)]
    assert one.generated == 4


def test_what_a_sequence_holds_besides_counts() -> None:
    planner = Scheduler(Limits(64, 8, 8, 250, fixed_tokens=70))
    for name in "ab":
        planner.add(sequence(name, 5))
    assert plan(planner) == [("a", 5)]
    with pytest.raises(ContextLengthError):
        planner.add(sequence("c", 190))


def steps_of_short_prompts(client: str, tokens: int, count: int) -> list[int]:
    """Steps from arrival to end of `count` short prompts, one at a time, beside 100 long ones of client "heavy"."""
    planner = scheduler(step_tokens=512, max_sequences=64, max_waiting=256, kv_tokens=100_000)
    for name in range(100):
        planner.add(sequence(name, 2000, tokens, "heavy"))
    for _ in range(200 if tokens > 1 else 5):
        run(planner, planner.schedule())
    lasted = []
    for name in range(count):
        short = sequence(f"short {name}", 20, 4, client)
        planner.add(short)
        for step in range(1, 10_000):
            if short in run(planner, planner.schedule()):
                lasted.append(step)
                break
        # Until the next one comes.
        for _ in range(7):
            run(planner, planner.schedule())
    assert len(lasted) == count
    return lasted


@pytest.mark.parametrize("tokens", [1, 1000])
def test_a_hundred_long_prompts_of_one_client_do_not_hold_up_anothers_short_ones(tokens: int) -> None:
    # Four tokens are four steps at best.
    assert max(steps_of_short_prompts("light", tokens, 20)) <= 5
    # The control: as requests of the same client they wait behind its others.
    assert steps_of_short_prompts("heavy", tokens, 1)[0] > 100


def test_clients_with_prompts_to_compute_take_turns_by_rows_and_each_keeps_its_order() -> None:
    planner = scheduler(step_tokens=10)
    for client in "ab":
        for number in range(2):
            planner.add(sequence(f"{client}{number}", 10 if client == "a" else 5, 1, client))
    assert [plan(planner) for _ in range(4)] == [
        [("a0", 10)],
        [("b0", 5), ("b1", 5)],
        [("a1", 10)],
        [],
    ]


def test_who_comes_later_starts_level_with_those_present() -> None:
    planner = scheduler(step_tokens=10)
    planner.add(sequence("a0", 100, 1, "a"))
    for _ in range(5):
        plan(planner)
    planner.add(sequence("b0", 100, 1, "b"))
    # Both have had 50 rows as far as turns go: they alternate, instead of b catching up for 5 steps.
    assert [name for _ in range(6) for name, _ in plan(planner)] == ["a0", "b0"] * 3


def test_the_client_that_holds_most_memory_gives_way() -> None:
    planner = scheduler(kv_tokens=64 * 5)
    for number in range(3):
        planner.add(sequence(f"a{number}", 20, 90, "a"))
    run(planner, planner.schedule())
    planner.add(sequence("b0", 20, 90, "b"))
    run(planner, planner.schedule())
    while not planner.preemptions:
        run(planner, planner.schedule())
    assert [one.id for one in planner.waiting] == ["a2"]
    assert [one.id for one in planner.running] == ["a0", "a1", "b0"]


def test_the_last_eighth_of_the_places_is_for_named_clients_that_run_nothing() -> None:
    planner = scheduler(max_sequences=8)
    for number in range(10):
        planner.add(sequence(f"a{number}", 2, 50, "a"))
    plan(planner)
    assert len(planner.running) == 7
    for client in "bb":
        planner.add(sequence("b", 2, 50, client))
    plan(planner)
    assert [one.request.client for one in planner.running] == ["a"] * 7 + ["b"]
    alone = scheduler(max_sequences=8)
    for number in range(10):
        alone.add(sequence(number, 2, 50))
    plan(alone)
    assert len(alone.running) == 8


def test_memory_is_kept_for_others_but_a_client_alone_can_have_all_of_it() -> None:
    planner = scheduler(step_tokens=2000, kv_tokens=64 * 16)
    planner.add(sequence("a0", 64 * 13, 1, "a"))
    planner.add(sequence("a1", 64 * 2, 1, "a"))
    planner.add(sequence("b0", 64 * 2, 1, "b"))
    assert plan(planner) == [("a0", 64 * 13), ("b0", 64 * 2)]
    planner.add(sequence("a2", 64 * 16, 1, "a"))
    assert plan(planner) == [("a1", 64 * 2)]
    assert plan(planner) == [("a2", 64 * 16)]


def test_a_queue_that_one_client_has_filled_takes_others_up_to_an_equal_part() -> None:
    planner = scheduler(max_sequences=1, max_waiting=10)
    for number in range(11):
        planner.add(sequence(number, 5, 4, "a"))
    with pytest.raises(OverloadedError):
        planner.add(sequence("more", 5, 4, "a"))
    for number in range(5):
        planner.add(sequence(f"b{number}", 5, 4, "b"))
    with pytest.raises(OverloadedError):
        planner.add(sequence("more", 5, 4, "b"))
    for client in range(100):
        with contextlib.suppress(OverloadedError):
            planner.add(sequence(client, 5, 4, f"c{client}"))
    assert len(planner.waiting) == 21


@given(
    st.lists(
        st.tuples(st.integers(1, 150), st.integers(1, 60), st.integers(0, 20), st.sampled_from("ab?")),
        min_size=1,
        max_size=20,
    ),
    st.integers(1, 40),
    st.integers(1, 9),
    st.sampled_from([256, 320, 512, 2048]),
    st.sampled_from([0, 30]),
    st.booleans(),
    st.integers(0, 2**16),
)
@settings(max_examples=150, deadline=None)
def test_all_end_whatever_comes_when(
    requests, step_tokens, max_sequences, kv_tokens, fixed, stepwise, seed
) -> None:
    chance = random.Random(seed).random
    planner = Scheduler(Limits(step_tokens, max_sequences, 100, kv_tokens + fixed, fixed, stepwise))
    arrivals = sorted(
        (when, n, prompt, tokens, client) for n, (prompt, tokens, when, client) in enumerate(requests)
    )
    ended: list[Sequence] = []
    for step in range(100_000):
        while arrivals and arrivals[0][0] <= step:
            _, n, prompt, tokens, client = arrivals.pop(0)
            planner.add(sequence(n, prompt, tokens, client))
        for one in planner.all():
            one.parked = chance() < (0.7 if one.parked else 0.1)
        chunks = planner.schedule()
        assert stepwise or sum(chunk.rows for chunk in chunks) <= step_tokens
        assert len({chunk.sequence.id for chunk in chunks}) == len(chunks)
        assert len(planner.running) <= max_sequences
        assert planner.kv_tokens <= planner.limits.kv_tokens
        assert not any(chunk.sequence.parked for chunk in chunks)
        # Whoever could run does, unless those before it hold all places or all memory.
        able = [one for one in planner.all() if not one.parked]
        assert chunks or not able or any(one.parked for one in planner.running)
        for chunk in chunks:
            assert chunk.sequence.cache.capacity >= chunk.sequence.cache.length + chunk.rows
        decoding = [chunk.sequence.decoding for chunk in chunks]
        assert decoding == sorted(decoding, reverse=True)
        ended += run(planner, chunks)
        if not arrivals and not planner.running and not planner.waiting:
            break
    assert len(ended) == len(requests)
    assert all(one.cache.capacity == 0 for one in ended)
