"""One client's limits, with a clock that is a number."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymoe.api.limits import Account, Bucket, duration
from raymoe.config import ClientSettings
from raymoe.errors import RateLimitError


def account(requests: int | None = None, tokens: int | None = None, at_once: int | None = None) -> Account:
    return Account(
        ClientSettings(requests_per_minute=requests, tokens_per_minute=tokens, concurrent_requests=at_once),
        0.0,
    )


def served(one: Account, now: float) -> int:
    """How many requests are let in, one after the other."""
    count = 0
    while count < 1000:
        try:
            one.enter(now)
        except RateLimitError:
            break
        one.leave()
        count += 1
    return count


def test_a_minutes_requests_at_once_then_one_each_time_that_another_is_due() -> None:
    one = account(requests=6)
    assert served(one, 0.0) == 6
    with pytest.raises(RateLimitError, match="at most 6 requests a minute") as refused:
        one.enter(2.5)
    assert refused.value.retry_after_s == 8
    assert [served(one, now) for now in (9.99, 10.0, 10.0, 31.0, 200.0)] == [0, 1, 0, 2, 6]


def test_who_comes_when_told_is_let_in() -> None:
    for size in (1, 7, 60, 1000):
        one = account(requests=size)
        served(one, 0.0)
        with pytest.raises(RateLimitError) as refused:
            one.enter(0.0)
        one.enter(float(refused.value.retry_after_s))


def test_tokens_may_be_owed_and_debts_are_refilled_first() -> None:
    one = account(tokens=600)
    one.enter(0.0)
    one.spend(900, 0.0)
    with pytest.raises(RateLimitError, match="600 tokens a minute") as refused:
        one.enter(0.0)
    assert refused.value.retry_after_s == 31
    assert served(one, 30.0) == 0
    assert served(one, 30.2) == 1000


def test_so_many_at_once() -> None:
    one = account(at_once=2)
    one.enter(0.0)
    one.enter(0.0)
    with pytest.raises(RateLimitError, match="at most 2 requests at once"):
        one.enter(0.0)
    one.leave()
    one.enter(0.0)


def test_a_refused_request_costs_nothing() -> None:
    one = account(requests=5, at_once=1)
    one.enter(0.0)
    for _ in range(10):
        with pytest.raises(RateLimitError):
            one.enter(0.0)
    assert one.headers(0.0)["x-ratelimit-remaining-requests"] == "4"


def test_other_limits_start_anew_and_requests_that_run_still_count() -> None:
    one = account(requests=1, at_once=5)
    one.enter(0.0)
    one.allow(ClientSettings(requests_per_minute=1, concurrent_requests=5), 0.0)
    with pytest.raises(RateLimitError):
        one.enter(0.0)
    one.allow(ClientSettings(concurrent_requests=2), 0.0)
    one.enter(0.0)
    with pytest.raises(RateLimitError, match="2 requests at once"):
        one.enter(0.0)


def test_the_headers_are_those_that_openai_sends() -> None:
    assert account().headers(0.0) == {}
    one = account(requests=60, tokens=6000)
    one.enter(0.0)
    one.spend(150, 0.0)
    assert one.headers(0.0) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "5850",
        "x-ratelimit-reset-tokens": "1.5s",
    }


def test_durations_are_written_as_openai_does() -> None:
    written = [duration(s) for s in (0, 0.0004, 0.25, 1.5, 61, 3600.5)]
    assert written == ["0s", "1ms", "250ms", "1.5s", "1m1s", "60m0.5s"]


@given(st.integers(1, 1000), st.lists(st.tuples(st.floats(0, 30), st.integers(1, 2000)), max_size=30))
def test_over_any_time_a_bucket_gives_no_more_than_its_size_and_what_was_refilled(
    size: int, takes: list[tuple[float, int]]
) -> None:
    bucket, now, taken = Bucket(size, 0.0), 0.0, 0
    for pause, wanted in takes:
        now += pause
        amount = min(wanted, bucket.left(now))
        bucket.take(amount, now)
        taken += amount
        assert taken <= size + now * size / 60 + 1e-6


def test_a_clock_that_stands_still_or_steps_back_fills_nothing() -> None:
    bucket = Bucket(10, 100.0)
    bucket.take(10, 100.0)
    assert [bucket.left(now) for now in (100.0, 40.0, 106.0)] == [0, 0, 1]
