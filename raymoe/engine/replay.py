"""Replay: a sequence whose router is lost goes on at another one, behind the tokens that the client has.

Draws are keyed by (seed, position), so the text goes on as it would have: the client sees a pause.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace

from raymoe.engine.messages import GenerateChunk, GenerateRequest
from raymoe.errors import NotReadyError, OverloadedError, RouterLostError

log = logging.getLogger(__name__)

MOST = 4
"""Replays of one sequence. One that ends every router it comes to must not go round for ever."""
PAUSE_S = 0.2
"""Before a sequence comes to a router again: whoever hands it out may not know yet which one is lost."""

Attempt = Callable[[GenerateRequest], AsyncGenerator[GenerateChunk, None]]


async def replaying(
    attempt: Attempt, request: GenerateRequest, *, wait_s: float, on_replay: Callable[[], None]
) -> AsyncIterator[GenerateChunk]:
    """The chunks of one sequence, from as many routers as it takes; no token comes twice.

    Args:
        attempt: streams a request from some router. Its first chunk says that a router has it, and the loss of
            that router is a RouterLostError.
        wait_s: how long the sequence may be without a router.
        on_replay: called before each replay.

    Raises:
        NotReadyError: no router took it within `wait_s`, or within its own deadline.
        RouterLostError: it has lost too many.
        RaymoeError: whatever else `attempt` raises; an overloaded router is waited for in a replay.
    """
    run = _Run(request, wait_s)
    while True:
        stream = attempt(run.next())
        try:
            async with asyncio.timeout(run.patience_s()):
                chunk = await anext(stream)
            while True:
                run.got(chunk)
                if not chunk.empty:
                    yield chunk
                chunk = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise NotReadyError("no router is ready or free, and none was in time") from None
        except RouterLostError as error:
            run.lost(error)
            on_replay()
        except OverloadedError as error:
            if not run.replays:
                raise
            log.info("request %s waits for its replay: %s", request.request_id, error)
        finally:
            await stream.aclose()
        await asyncio.sleep(PAUSE_S)


class _Run:
    """What a sequence has so far. Times are those of `time.monotonic`."""

    def __init__(self, request: GenerateRequest, wait_s: float) -> None:
        self._request, self._wait_s = request, wait_s
        self._ends = time.monotonic() + request.deadline_s
        self._alone_since = time.monotonic()
        self._tokens: list[int] = []
        self._scored = request.prompt_scored
        self._attempts = 0
        self.replays = 0

    def next(self) -> GenerateRequest:
        """The request as the next router gets it, under a new id: the last router may still hold the old one."""
        self._attempts += 1
        if self._attempts == 1:
            return self._request
        return replace(
            self._request,
            request_id=f"{self._request.request_id}~{self._attempts - 1}",
            deadline_s=self._ends - time.monotonic(),
            generated_ids=(*self._request.generated_ids, *self._tokens),
            prompt_scored=self._scored,
        )

    def patience_s(self) -> float:
        """How long it may still be without a router."""
        return min(self._alone_since + self._wait_s, self._ends) - time.monotonic()

    def got(self, chunk: GenerateChunk) -> None:
        """A router has it, and has sent this."""
        self._alone_since = time.monotonic()
        self._tokens.extend(chunk.token_ids)
        self._scored += len(chunk.prompt_logprobs)

    def lost(self, error: RouterLostError) -> None:
        """Count a lost router."""
        if self.replays == MOST:
            raise error
        self.replays += 1
        self._alone_since = time.monotonic()
        log.warning(
            "request %s is replayed behind %d tokens: %s", self._request.request_id, len(self._tokens), error
        )
