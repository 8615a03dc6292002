"""Whose requests run in a router. A caller that dies closes no stream: Ray tells the callee nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator

import ray
from ray.exceptions import ActorUnavailableError, RayActorError

from raymoe.actors.spec import NAMESPACE
from raymoe.actors.watch import PING_S, answer, sentence

log = logging.getLogger(__name__)


class Callers:
    """Pings each caller once a second, and calls `abandon` for every request of one that is dead."""

    def __init__(self, abandon: Callable[[str], object]) -> None:
        self._abandon = abandon
        self._requests: dict[str, set[str]] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}

    @contextlib.contextmanager
    def serving(self, caller: str, request_id: str) -> Iterator[None]:
        """While the context is open, the request runs for the actor called `caller`."""
        requests = self._requests.setdefault(caller, set())
        requests.add(request_id)
        if caller not in self._watches:
            self._watches[caller] = asyncio.create_task(self._watch(caller))
        try:
            yield
        finally:
            requests.discard(request_id)

    async def _watch(self, caller: str) -> None:
        reason = await until_dead(caller)
        requests = self._requests.pop(caller, set())
        log.warning("%s is dead (%s); %d of its requests are abandoned", caller, reason, len(requests))
        for request_id in list(requests):
            self._abandon(request_id)
        del self._watches[caller]


async def until_dead(name: str) -> str:
    """Wait until Ray says that the actor called `name` is dead; returns why. Silence is no death."""
    try:
        actor = await asyncio.to_thread(ray.get_actor, name, NAMESPACE)
    except ValueError as error:
        return sentence(error)
    while True:
        try:
            await answer(actor.__ray_ready__.remote())
        except ActorUnavailableError:
            log.info("%s does not answer at present", name)
        except RayActorError as error:
            return sentence(error)
        await asyncio.sleep(PING_S)
