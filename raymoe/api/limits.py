"""What one client has had, against what it may have. Pure bookkeeping: time, in seconds, is an argument."""

from __future__ import annotations

import math

from raymoe.config import ClientSettings
from raymoe.errors import RateLimitError

MINUTE_S = 60.0
BUSY_S = 1
"""When to come again while too many requests are running: nobody knows when one ends."""


class Bucket:
    """A token bucket: holds `size`, is full at first, and refills evenly within a minute.

    More can be taken than it holds; the debt is refilled first. So what something costs may turn out later.
    """

    def __init__(self, size: int, now: float) -> None:
        self.size, self._level, self._at = size, float(size), now

    def take(self, amount: int, now: float) -> None:
        """Take `amount`, whether it is there or not."""
        self._level = self._at_time(now) - amount
        self._at = max(self._at, now)

    def left(self, now: float) -> int:
        """What can be taken without debt."""
        return max(0, math.floor(self._at_time(now)))

    def wait_s(self, now: float, wanted: float = 1.0) -> float:
        """Until so much is in it."""
        return max(0.0, (wanted - self._at_time(now)) * MINUTE_S / self.size)

    def _at_time(self, now: float) -> float:
        passed = max(0.0, now - self._at)
        return min(float(self.size), self._level + passed * self.size / MINUTE_S)


class Account:
    """One client's requests and tokens."""

    def __init__(self, allowed: ClientSettings, now: float) -> None:
        self.running = 0
        self.allow(allowed, now)

    def allow(self, allowed: ClientSettings, now: float) -> None:
        """Other limits than before: buckets start anew. The same ones change nothing."""
        if allowed == getattr(self, "allowed", None):
            return
        self.allowed = allowed
        self._buckets = {
            kind: Bucket(size, now)
            for kind, size in (
                ("requests", allowed.requests_per_minute),
                ("tokens", allowed.tokens_per_minute),
            )
            if size is not None
        }

    def enter(self, now: float) -> None:
        """A request begins; `leave` ends it.

        Raises:
            RateLimitError: says which limit was reached, and when to come again.
        """
        most = self.allowed.concurrent_requests
        if most is not None and self.running >= most:
            raise RateLimitError(f"at most {most} requests at once are accepted from this client", BUSY_S)
        for kind, bucket in self._buckets.items():
            if not bucket.left(now):
                wait_s = max(1, math.ceil(bucket.wait_s(now)))
                raise RateLimitError(
                    f"at most {bucket.size} {kind} a minute are accepted from this client;"
                    f" try again in {wait_s} s",
                    wait_s,
                )
        if "requests" in self._buckets:
            self._buckets["requests"].take(1, now)
        self.running += 1

    def leave(self) -> None:
        """A request has ended."""
        self.running -= 1

    def spend(self, tokens: int, now: float) -> None:
        """So many tokens were computed."""
        if "tokens" in self._buckets:
            self._buckets["tokens"].take(tokens, now)

    def headers(self, now: float) -> dict[str, str]:
        """The limits that there are and what is left, in the headers that OpenAI's API uses."""
        found = {}
        for kind, bucket in self._buckets.items():
            found[f"x-ratelimit-limit-{kind}"] = str(bucket.size)
            found[f"x-ratelimit-remaining-{kind}"] = str(bucket.left(now))
            found[f"x-ratelimit-reset-{kind}"] = duration(bucket.wait_s(now, bucket.size))
        return found


def duration(seconds: float) -> str:
    """As OpenAI's headers write one.

    >>> [duration(s) for s in (0, 0.0004, 0.25, 1.5, 61, 3600.5)]
    ['0s', '1ms', '250ms', '1.5s', '1m1s', '60m0.5s']
    """
    milliseconds = math.ceil(seconds * 1000)
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return (f"{minutes}m" if minutes else "") + f"{rest / 1000:g}s"
