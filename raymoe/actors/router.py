"""A router replica: the engine process beside it, its controller's layouts, and requests passed through."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from ray import serve

from raymoe.actors.callers import Callers
from raymoe.actors.link import ControllerLink, controller_status, start_controller
from raymoe.actors.loopback import keep_replica_on_loopback
from raymoe.actors.spec import Spec
from raymoe.errors import ClusterError, EngineError, NotReadyError
from raymoe.observe.log import setup_logging
from raymoe.policy.layout import Layout
from raymoe.policy.threads import thread_environment

if TYPE_CHECKING:
    from raymoe.config import Settings
    from raymoe.engine.messages import EngineConfig, GenerateChunk, GenerateRequest

log = logging.getLogger(__name__)

START_S = 1800.0
"""Until model and groups must be loaded; then the replica gives up and Serve starts another."""
LOOK_S = 1.0
HOPELESS = 3
"""So many failed starts of expert groups end a router that has never had a layout."""
STEP_S = 20.0
"""The longest that one step may take, besides what it waits for expert groups."""
HEALTH_CHECK_S = 1.0
"""How soon Serve notices that a replica is dead, and starts another."""


@serve.deployment
class Router:
    """Its constructor returns once it can generate, so that Serve hands requests to ready routers only."""

    async def __init__(self, spec: Spec) -> None:  # type: ignore[misc]  # Serve awaits it
        self._id = secrets.token_hex(4)
        setup_logging(f"router {self._id}")
        keep_replica_on_loopback()
        self._spec = spec
        # First of all the groups, so that they load while the engine does.
        await asyncio.to_thread(start_controller, spec)
        from raymoe.engine.client import EngineClient

        self._engine = await EngineClient.spawn(engine_config(spec, self._id))
        self._callers = Callers(self._abandon)
        self._link = ControllerLink(spec, self._id, self._set_layout)
        self._following = asyncio.create_task(self._link.run())
        try:
            async with asyncio.timeout(START_S):
                await self._until_ready()
        except BaseException as error:
            self._following.cancel()
            await self._engine.close()
            if isinstance(error, TimeoutError):
                why = self._link.problem or "engine or expert groups are still loading"
                raise ClusterError(f"no router after {START_S:g} s: {why}") from None
            raise
        self._leaving = asyncio.create_task(self._leave_with_engine())

    async def generate(self, request: GenerateRequest, caller: str) -> AsyncIterator[GenerateChunk]:
        """Stream one sequence to the actor called `caller`, first a chunk that says who has it.

        Closing or cancelling stops it in the engine, and so does the caller's death.
        """
        from raymoe.engine.messages import GenerateChunk

        with self._callers.serving(caller, request.request_id):
            async with aclosing(self._engine.generate(request)) as stream:  # type: ignore[type-var]
                yield GenerateChunk(())
                async for chunk in stream:
                    yield chunk

    async def readiness(self) -> str | None:
        """None when requests can be answered, else why not."""
        return self._engine.blocked

    async def stats(self) -> dict[str, Any]:
        """The engine's counters, and which layout is in use."""
        return {"router": self._id, "epoch": self._link.epoch, **await self._engine.stats(self._patience_s)}

    async def check_health(self) -> None:
        """Serve replaces this replica when it fails. One whose engine no longer answers between two steps leaves.

        Raises:
            EngineError: the task that follows the controller has ended.
        """
        if self._following.done():
            raise EngineError(f"the controller is no longer followed: {self._following.exception()}")
        try:
            await self._engine.stats(self._patience_s)
        except TimeoutError:
            log.error("the engine does not answer for %g s", self._patience_s)
            self._engine.process.kill()

    @property
    def _patience_s(self) -> float:
        # A step may wait for an expert group that long.
        return self._spec.settings.groups.reply_timeout_s + STEP_S

    async def _leave_with_engine(self) -> None:
        # Its requests are replayed as soon as this process is seen to be dead; a health check takes longer.
        log.error("leaving: %s", await self._engine.wait_ended())
        os._exit(1)

    def _abandon(self, request_id: str) -> None:
        self._engine.abandon(request_id, NotReadyError("the ingress that had this request is gone"))

    async def _set_layout(self, wire: dict[str, Any]) -> None:
        await self._engine.set_layout(Layout.from_wire(wire))

    async def _until_ready(self) -> None:
        ready = asyncio.ensure_future(self._engine.wait_ready())
        while not ready.done():
            await asyncio.wait({ready, self._following}, timeout=LOOK_S)
            if self._following.done():
                self._following.result()
            status = await asyncio.to_thread(controller_status, self._spec.app)
            if status and status["problems"] and status["replaced"] >= HOPELESS:
                ready.cancel()
                raise ClusterError("; ".join(status["problems"]))
        log.info("engine ready: %s", ready.result())


def engine_config(spec: Spec, router_id: str) -> EngineConfig:
    """What the engine process is started with."""
    from raymoe.engine.messages import EngineConfig

    groups, router = spec.settings.groups, spec.settings.router
    return EngineConfig(
        checkpoint=spec.path,
        router=router_id,
        token=spec.token,
        dtype=spec.dtype,
        threads=router.threads,
        lane_bytes=groups.lane_bytes,
        silence_s=groups.reply_timeout_s,
        replace_timeout_s=groups.replace_timeout_s,
        kv_bytes=router.kv_bytes,
        step_tokens=router.step_tokens,
        max_sequences=router.max_sequences,
        max_waiting=router.max_waiting,
        deterministic=spec.settings.model.deterministic,
    )


def router_options(settings: Settings) -> dict[str, Any]:
    """Deployment options. The engine has a queue of its own and refuses what is too much for it."""
    router = settings.router
    return {
        "num_replicas": router.replicas,
        # The engine's queue takes twice `max_waiting` if one client alone fills it.
        "max_ongoing_requests": router.max_sequences + 2 * router.max_waiting + 100,
        "max_queued_requests": 2 * router.max_waiting + 100,
        "ray_actor_options": {
            "num_cpus": router.cpus,
            "runtime_env": {"env_vars": thread_environment(router.threads)},
        },
        "graceful_shutdown_wait_loop_s": 0.2,
        "graceful_shutdown_timeout_s": 5.0,
        "health_check_period_s": HEALTH_CHECK_S,
        "health_check_timeout_s": settings.groups.reply_timeout_s + 2 * STEP_S,
        "max_constructor_retry_count": 2,
    }
