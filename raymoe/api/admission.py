"""Who is let in, and how much at once: the same for every protocol."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from raymoe.api.callers import Caller, set_caller
from raymoe.api.keys import KeyRing
from raymoe.api.limits import BUSY_S, Account
from raymoe.config import ClientSettings, Settings
from raymoe.engine.messages import ANONYMOUS
from raymoe.errors import OverloadedError


class Admission:
    """Keys, and each client's account. Without keys all requests are one client's."""

    def __init__(
        self,
        keys: KeyRing | None = None,
        allowed: ClientSettings = ClientSettings(),
        max_requests: int = 1000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`allowed` is what that one client may do; keys say it for theirs."""
        self._keys, self._allowed, self._max_requests, self._clock = keys, allowed, max_requests, clock
        # As many as there are labels: they come from the operator, not from clients.
        self._accounts: dict[str, Account] = {}
        self._running = 0

    @classmethod
    def of(cls, settings: Settings) -> Admission:
        """As the settings say.

        Raises:
            ConfigError: there is something wrong with the keys.
        """
        return cls(KeyRing.of(settings), settings.clients, settings.server.max_requests)

    def identify(self, authorization: str | None) -> Caller:
        """Whose request it is, by its Authorization header or metadata.

        Raises:
            AuthenticationError: a key is needed, and there is none that is valid.
        """
        label, allowed = ANONYMOUS, self._allowed
        if self._keys is not None:
            key = self._keys.find(authorization)
            label, allowed = key.label, key.allowed
        now = self._clock()
        account = self._accounts.setdefault(label, Account(allowed, now))
        account.allow(allowed, now)
        return Caller(label, account, self._clock)

    @contextmanager
    def enter(self, caller: Caller) -> Iterator[None]:
        """While the context is open, a request of `caller` is worked on. It belongs into the request's own task.

        Raises:
            RateLimitError: the client has reached a limit.
            OverloadedError: too many requests are being answered.
        """
        if self._running >= self._max_requests:
            raise OverloadedError(f"{self._running} requests are being answered; try again later", BUSY_S)
        caller.account.enter(self._clock())
        self._running += 1
        set_caller(caller)
        try:
            yield
        finally:
            self._running -= 1
            caller.account.leave()
