"""The ingress: OpenAI's HTTP interface as a Serve deployment in front of the routers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException

from raymoe.actors.loopback import keep_replica_on_loopback
from raymoe.actors.spec import Spec
from raymoe.errors import EngineError, NotReadyError, OverloadedError, RaymoeError
from raymoe.observe.log import setup_logging

if TYPE_CHECKING:
    from fastapi import FastAPI
    from ray.serve.handle import DeploymentHandle

    from raymoe.engine.messages import GenerateChunk, GenerateRequest

READINESS_S = 2.0


class RouterBackend:
    """The api's backend over a Serve handle to the routers."""

    def __init__(self, routers: DeploymentHandle) -> None:
        self._generate = routers.generate.options(stream=True)
        self._readiness = routers.readiness

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """Stream one sequence from some router. Closing it cancels the router's call."""
        stream = self._generate.remote(request)
        try:
            async for chunk in stream:
                yield chunk
        except (RayError, RayServeException) as error:
            raise unwrap(error) from error
        finally:
            # Without effect on a stream that has ended.
            with contextlib.suppress(RayError, RayServeException):
                stream.cancel()

    async def readiness(self) -> str | None:
        """None, or what is missing. Serve hands calls only to routers that have a layout."""
        try:
            async with asyncio.timeout(READINESS_S):
                reason: str | None = await self._readiness.remote()
        except TimeoutError:
            return "no router is ready: model and expert groups are being loaded"
        except (RayError, RayServeException) as error:
            return unwrap(error).message
        return reason


def unwrap(error: Exception) -> RaymoeError:
    """The raymoe error that Ray brought along, or the one that says the same."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, RaymoeError):
        return cause
    if isinstance(cause, BackPressureError):
        return OverloadedError("all routers are busy")
    if isinstance(cause, RayActorError):
        return NotReadyError("the router that had this request is gone; send it again")
    return EngineError(f"{type(cause).__name__}: {cause}")


@serve.deployment
@serve.ingress()
class Ingress:
    """Answers HTTP as soon as the tokenizer is read; requests are refused until a router is ready."""

    def __init__(self, spec: Spec, routers: DeploymentHandle) -> None:
        setup_logging("ingress")
        keep_replica_on_loopback()
        # Here and not above: the driver and the controller need no transformers.
        from raymoe.api.http import create_app
        from raymoe.api.service import Service

        service = Service.from_checkpoint(spec.path, RouterBackend(routers), spec.settings)
        self._app = create_app(service)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app


def ingress_options() -> dict[str, Any]:
    """Deployment options: requests are bounded by the routers' queues, not here."""
    return {
        "max_ongoing_requests": 10_000,
        "ray_actor_options": {"num_cpus": 0.1},
        "graceful_shutdown_wait_loop_s": 0.2,
        "graceful_shutdown_timeout_s": 5.0,
    }
