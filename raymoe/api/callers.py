"""Whose request is being answered: carried in a context variable from the protocol's door to the backend.

So every endpoint of every protocol counts its tokens and tells the scheduler its client without a thought of it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace

from raymoe.api.backend import Backend
from raymoe.api.limits import Account
from raymoe.api.streams import closing
from raymoe.engine.messages import GenerateChunk, GenerateRequest


@dataclass(frozen=True)
class Caller:
    """One request's client: its label, its account, and the clock (in seconds) that this is kept by."""

    label: str
    account: Account
    clock: Callable[[], float]

    def headers(self) -> dict[str, str]:
        """Its limits and what is left of them, for the answer."""
        return self.account.headers(self.clock())


_caller: ContextVar[Caller | None] = ContextVar("raymoe_caller", default=None)


def set_caller(caller: Caller) -> None:
    """The rest of this task, and the tasks that it starts, work for `caller`."""
    _caller.set(caller)


class CallersBackend:
    """A backend that generates for the caller: under its label, and on its account.

    Each sequence counts with its whole prompt and all its tokens, since that is what is computed.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """As the backend does."""
        caller = _caller.get()
        return self._backend.generate(request) if caller is None else self._generate(request, caller)

    async def readiness(self) -> str | None:
        """As the backend says."""
        return await self._backend.readiness()

    async def _generate(
        self, request: GenerateRequest, caller: Caller
    ) -> AsyncGenerator[GenerateChunk, None]:
        caller.account.spend(len(request.prompt_ids), caller.clock())
        async with closing(self._backend.generate(replace(request, client=caller.label))) as chunks:
            async for chunk in chunks:
                caller.account.spend(len(chunk.token_ids), caller.clock())
                yield chunk
