"""Turns by service had: who has had the least is next."""

from __future__ import annotations

from raymoe.policy.shares import Shares


def test_the_least_served_is_next_and_the_first_of_equals() -> None:
    shares = Shares()
    for client in "ab":
        shares.join(client, set("ab"[: "ab".index(client)]))
    assert shares.least("ab") == "a"
    assert shares.least("ba") == "b"
    shares.charge("a", 1)
    assert shares.least("ab") == "b"


def test_a_pause_saves_nothing_up_and_forgives_nothing_while_others_are_present() -> None:
    shares = Shares()
    shares.join("a", ())
    shares.charge("a", 100)
    shares.join("b", {"a"})
    # Level: one row decides.
    shares.charge("b", 1)
    assert shares.least("ba") == "a"
    shares.charge("b", 49)
    # b goes and comes back with the 150 it had.
    shares.join("b", {"a"})
    assert shares.least("ba") == "a"
    shares.charge("a", 49)
    assert shares.least("ba") == "a"


def test_when_nobody_is_present_all_is_forgotten() -> None:
    shares = Shares()
    shares.join("a", ())
    shares.charge("a", 100)
    shares.join("a", ())
    shares.join("b", {"a"})
    shares.charge("b", 1)
    assert shares.least("ba") == "a"
