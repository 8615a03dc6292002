"""Errors as they come out of Ray, and the backend over a Serve handle that is played by a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from raymoe.actors.ingress import RouterBackend, unwrap
from raymoe.engine.messages import GenerateChunk, GenerateRequest
from raymoe.errors import (
    ContextLengthError,
    EngineError,
    ExpertUnavailableError,
    NotReadyError,
    OverloadedError,
    RaymoeError,
    RouterLostError,
)

REQUEST = GenerateRequest("r", (1, 2), 4)


def from_ray(error: Exception) -> RayTaskError:
    """An exception of a remote call, the way Ray raises it here."""
    return RayTaskError("generate", "Traceback ...", error).as_instanceof_cause()


@pytest.mark.parametrize(
    "error",
    [
        ExpertUnavailableError(3, ("g0", "g1"), "end of file"),
        ContextLengthError("too long", "prompt"),
        OverloadedError("full", 7),
    ],
)
def test_typed_errors_come_out_as_they_went_in(error: RaymoeError) -> None:
    out = unwrap(from_ray(error))
    assert type(out) is type(error)
    assert (str(out), vars(out)) == (str(error), vars(error))


def test_other_errors_become_the_raymoe_error_that_says_the_same() -> None:
    assert isinstance(unwrap(ActorDiedError()), RouterLostError)
    assert type(unwrap(DeploymentUnavailableError(DeploymentID("Router", "a")))) is NotReadyError
    assert isinstance(unwrap(from_ray(KeyError("x"))), EngineError)
    assert isinstance(
        unwrap(BackPressureError(num_queued_requests=1, max_queued_requests=1)), OverloadedError
    )


class Handle:
    """A Serve handle's method whose stream is played by `play`."""

    def __init__(self, play: Any) -> None:
        self._play = play
        self.cancelled = False
        self.generate, self.readiness = self, self

    def options(self, **options: Any) -> Handle:
        assert options == {"stream": True}
        return self

    def remote(self, *_: Any) -> Any:
        return Stream(self)


def backend(handle: Handle) -> RouterBackend:
    return RouterBackend(cast(Any, handle), wait_s=30, caller="ingress")


class Stream:
    def __init__(self, handle: Handle) -> None:
        self._handle, self._played = handle, handle._play()

    def __aiter__(self) -> AsyncIterator[GenerateChunk]:
        return self._played

    def __await__(self) -> Any:
        return self._played.__await__()

    def cancel(self) -> None:
        self._handle.cancelled = True


def test_closing_the_backends_stream_cancels_the_routers_call() -> None:
    async def play() -> AsyncIterator[GenerateChunk]:
        yield GenerateChunk((5,))
        await asyncio.Event().wait()

    async def run() -> None:
        handle = Handle(play)
        stream = backend(handle).generate(REQUEST)
        assert await anext(stream) == GenerateChunk((5,))
        assert not handle.cancelled
        await stream.aclose()
        assert handle.cancelled

    asyncio.run(run())


def test_error_in_the_middle_of_a_stream_keeps_its_type() -> None:
    async def play() -> AsyncIterator[GenerateChunk]:
        yield GenerateChunk((5,))
        raise from_ray(ExpertUnavailableError(1, ("g0",)))

    async def run() -> None:
        stream = backend(Handle(play)).generate(REQUEST)
        assert await anext(stream) == GenerateChunk((5,))
        with pytest.raises(ExpertUnavailableError, match="MoE layer 1"):
            await anext(stream)

    asyncio.run(run())


def test_readiness_without_a_router_is_a_reason_and_not_a_wait() -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    reason = asyncio.run(backend(Handle(never)).readiness())
    assert reason is not None and "loaded" in reason
