"""A router's tie to its controller: finds or starts it, and follows the layouts that it publishes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from raymoe.actors.controller import POLL_S, Controller
from raymoe.actors.spec import NAMESPACE, Spec, controller_name
from raymoe.actors.watch import answer, sentence
from raymoe.errors import ClusterError, SupersededError

if TYPE_CHECKING:
    from ray.actor import ActorHandle

log = logging.getLogger(__name__)

ANSWER_S = 30.0
"""How long a controller may take to answer beyond what its long poll holds a question open."""
PAUSE_S = 0.5
SHUTDOWN_S = 30.0


class ControllerLink:
    """`run` never ends by itself. `problem` says why there is no controller, None while there is one."""

    def __init__(
        self,
        spec: Spec,
        router_id: str,
        on_layout: Callable[[dict[str, Any]], Awaitable[None]],
        controller_class: type = Controller,
    ) -> None:
        self._spec, self._router_id, self._on_layout = spec, router_id, on_layout
        self._controller_class = controller_class
        self.epoch = -1
        self.problem: str | None = None

    async def run(self) -> None:
        """Follow the controller for ever; a dead one is replaced by whoever notices first."""
        takes_over = True
        while True:
            try:
                controller = await self._find_or_start(takes_over)
                # Only a router that just started replaces another deployment's controller: two would fight.
                takes_over = False
                await self._follow(controller)
            except (RayError, ValueError, TimeoutError, ClusterError) as error:
                reason = sentence(error)
                if reason != self.problem:
                    log.warning("controller: %s", reason)
                self.problem = reason
                await asyncio.sleep(PAUSE_S)

    async def _follow(self, controller: ActorHandle) -> None:
        while True:
            ref = controller.sync.remote(self._router_id, self.epoch)
            wire = await asyncio.wait_for(answer(ref), POLL_S + ANSWER_S)
            self.problem = None
            if wire is not None:
                await self._on_layout(wire)
                self.epoch = wire["epoch"]

    async def _find_or_start(self, takes_over: bool) -> ActorHandle:
        name = controller_name(self._spec.app)
        # This finds a dying actor at times, or loses the race to create one: then the first call to it fails
        # and `run` comes again.
        controller: ActorHandle = await asyncio.to_thread(
            start_controller, self._spec, self._controller_class
        )
        generation = await asyncio.wait_for(answer(controller.generation.remote()), ANSWER_S)
        if generation == self._spec.generation:
            return controller
        if not takes_over:
            raise SupersededError(f"{name} belongs to another deployment of {self._spec.app}")
        log.info("taking over from deployment %s", generation)
        try:
            await asyncio.wait_for(answer(controller.shutdown.remote()), SHUTDOWN_S)
        finally:
            ray.kill(controller)
        raise ClusterError(f"{name} of an earlier deployment was shut down")


def start_controller(spec: Spec, controller_class: type = Controller) -> ActorHandle:
    """The application's controller: the living one of any deployment, else a new one of this."""
    return (
        ray.remote(controller_class)
        .options(
            name=controller_name(spec.app),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=0,
            max_concurrency=1000,
            enable_task_events=False,
            # Never inside the placement group of the replica that happens to start it.
            scheduling_strategy="DEFAULT",
        )
        .remote(spec)
    )


def find_controller(app: str) -> ActorHandle | None:
    """The application's controller, if there is one."""
    try:
        return ray.get_actor(controller_name(app), namespace=NAMESPACE)
    except ValueError:
        return None


def controller_status(app: str, timeout_s: float = 10.0) -> dict[str, Any] | None:
    """The controller's status, or None when there is none or it is dying."""
    controller = find_controller(app)
    if controller is None:
        return None
    try:
        status: dict[str, Any] = ray.get(controller.status.remote(), timeout=timeout_s)
    except (RayError, GetTimeoutError):
        return None
    return status
