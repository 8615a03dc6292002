"""The ingress: OpenAI's HTTP interface, and gRPC, as a Serve deployment in front of the routers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.config import BackpressureConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException

from raymoe.actors.link import ANSWER_S, find_controller
from raymoe.actors.loopback import keep_replica_on_loopback
from raymoe.actors.router import HEALTH_CHECK_S
from raymoe.actors.spec import Spec
from raymoe.actors.watch import answer
from raymoe.api.grpc_methods import GrpcMethods
from raymoe.errors import EngineError, NotReadyError, OverloadedError, RaymoeError, RouterLostError
from raymoe.observe.log import setup_logging
from raymoe.policy.layout import Layout

if TYPE_CHECKING:
    from fastapi import FastAPI
    from ray.serve.handle import DeploymentHandle

    from raymoe.config import Settings
    from raymoe.engine.messages import GenerateChunk, GenerateRequest

SPARE_REQUESTS = 1000
"""For probes, and requests that are about to be refused."""
READINESS_S = 2.0
PAUSE_S = 0.1


class RouterBackend:
    """The api's backend over a Serve handle to the routers.

    Args:
        wait_s: how long a request may be without a router.
        caller: this actor's name. Routers watch it, and abandon its requests when it dies.
    """

    def __init__(self, routers: DeploymentHandle, wait_s: float, caller: str) -> None:
        self._generate = routers.generate.options(stream=True)
        self._readiness = routers.readiness
        self._wait_s, self._caller = wait_s, caller
        self.on_replay: Callable[[], None] = lambda: None

    def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """Stream one sequence from some router, and from another one when that is lost. Closing it cancels."""
        from raymoe.engine.replay import replaying

        return replaying(self._attempt, request, wait_s=self._wait_s, on_replay=lambda: self.on_replay())

    async def readiness(self) -> str | None:
        """None, or what is missing. Serve hands calls only to routers that have a layout."""
        try:
            async with asyncio.timeout(READINESS_S):
                while True:
                    try:
                        reason: str | None = await self._readiness.remote()
                        return reason
                    except RayActorError:
                        # One that just died: ask another one, or wait for its replacement.
                        await asyncio.sleep(PAUSE_S)
        except TimeoutError:
            return "no router is ready: model and expert groups are being loaded"
        except (RayError, RayServeException) as error:
            return unwrap(error).message

    async def _attempt(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        stream = self._generate.remote(request, self._caller)
        try:
            async for chunk in stream:
                yield chunk
        except (RayError, RayServeException) as error:
            raise unwrap(error) from error
        finally:
            # Without effect on a stream that has ended.
            with contextlib.suppress(RayError, RayServeException):
                stream.cancel()


def unwrap(error: Exception) -> RaymoeError:
    """The raymoe error that Ray brought along, or the one that says the same."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, RaymoeError):
        return cause
    if isinstance(cause, BackPressureError):
        return OverloadedError("all routers are busy")
    if isinstance(cause, RayActorError):
        return RouterLostError("the router that had this request is gone; send it again")
    if isinstance(cause, DeploymentUnavailableError):
        return NotReadyError("no router could be started")
    return EngineError(f"{type(cause).__name__}: {cause}")


async def read_layout(app: str) -> Layout | None:
    """The layout that the application's controller has published; None while there is none, or no controller."""
    controller = await asyncio.to_thread(find_controller, app)
    if controller is None:
        return None
    try:
        wire = await asyncio.wait_for(answer(controller.layout.remote()), ANSWER_S)
    except (RayError, TimeoutError):
        return None
    return Layout.from_wire(wire) if wire else None


@serve.deployment
@serve.ingress()
class Ingress(GrpcMethods):
    """Answers as soon as the tokenizer is read; requests are refused until a router is ready."""

    def __init__(self, spec: Spec, routers: DeploymentHandle) -> None:
        setup_logging("ingress")
        keep_replica_on_loopback()
        # Here and not above: the driver and the controller need no transformers.
        from raymoe.api.grpc_service import GrpcService
        from raymoe.api.http import create_app
        from raymoe.api.service import Service

        name = ray.get_runtime_context().get_actor_name()
        backend = RouterBackend(routers, spec.settings.groups.replace_timeout_s, name)
        service = Service.from_checkpoint(spec.path, backend, spec.settings)
        backend.on_replay = service.metrics.replays.inc
        self._app = create_app(service, spec.settings.server.cors_origins)
        self.grpc = GrpcService(service, lambda: read_layout(spec.app))

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app


def ingress_options(settings: Settings) -> dict[str, Any]:
    """Deployment options. The ingress counts its requests itself and refuses in the envelope what is too much.

    What comes faster than it refuses, Serve's proxy refuses.
    """
    return {
        "max_ongoing_requests": settings.server.max_requests + SPARE_REQUESTS,
        "max_queued_requests": SPARE_REQUESTS,
        "backpressure_config": BackpressureConfig(status_code=429, retry_after_s=1),
        "ray_actor_options": {"num_cpus": 0.1},
        "health_check_period_s": HEALTH_CHECK_S,
        "graceful_shutdown_wait_loop_s": 0.2,
        "graceful_shutdown_timeout_s": 5.0,
    }
