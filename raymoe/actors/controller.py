"""The controller: starts expert groups, watches them, replaces lost ones and publishes the layout.

It is not on the token path: while it is away, routers and groups go on with the layout they have, and a new
controller adopts the living groups.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from raymoe.actors.expert_group import ExpertGroupActor, living_groups, remove_group, start_group
from raymoe.actors.spec import NAMESPACE, GroupName, Spec
from raymoe.actors.watch import answer, seen, sentence, until_lost
from raymoe.errors import ClusterError, RaymoeError
from raymoe.observe.log import setup_logging
from raymoe.policy.layout import Copy, GroupPlace, Layout

if TYPE_CHECKING:
    from ray.actor import ActorHandle

log = logging.getLogger(__name__)

POLL_S = 10.0
"""How long `sync` holds a router's question open."""
PLACEMENT_S = 60.0
"""How long Ray may take to find room for a group."""
RETRY_S = (0.0, 1.0, 2.0, 5.0, 15.0)
"""Pause before the n-th replacement in a row; the last one repeats."""
STEADY_S = 60.0
"""A group that lived this long starts the pauses anew."""


@dataclass
class Group:
    """One incarnation of an expert group."""

    name: GroupName
    handle: ActorHandle
    state: str = "loading"
    told: dict[str, Any] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)
    since: float = field(default_factory=time.monotonic)


class Controller:
    """One asyncio task for each expert group, and one that looks for routers."""

    def __init__(self, spec: Spec, group_class: type = ExpertGroupActor) -> None:
        setup_logging(f"controller {spec.generation}")
        self._spec, self._group_class = spec, group_class
        self._groups: dict[int, Group] = {}
        self._problems: dict[int, str] = {}
        self._replaced = 0
        self._incarnations: dict[int, int] = {}
        self._layout: Layout | None = None
        self._epoch = 0
        self._changed = asyncio.Condition()
        self._routers: dict[str, tuple[int, float]] = {}
        self._heard = time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []
        self._run = asyncio.ensure_future(self._start())

    async def generation(self) -> str:
        """Which deployment this controller belongs to."""
        return self._spec.generation

    async def sync(self, router_id: str, acked_epoch: int) -> dict[str, Any] | None:
        """The layout's wire form as soon as its epoch differs from what the router uses; None after POLL_S.

        `acked_epoch` is the layout in use, -1 for none. An epoch newer than ours comes from an
        earlier controller, so the layout is published again above it.
        """
        self._hear(router_id, acked_epoch)
        if acked_epoch > self._epoch:
            self._epoch = acked_epoch
            await self._publish()
        async with self._changed:
            try:
                await asyncio.wait_for(
                    self._changed.wait_for(
                        lambda: self._layout is not None and self._layout.epoch != acked_epoch
                    ),
                    POLL_S,
                )
            except TimeoutError:
                return None
            finally:
                self._hear(router_id, acked_epoch)
            return self._layout.to_wire() if self._layout else None

    async def layout(self) -> dict[str, Any] | None:
        """The present layout's wire form, None while there is none."""
        return self._layout.to_wire() if self._layout else None

    async def status(self) -> dict[str, Any]:
        """What an operator wants to see: groups, routers, epoch, and every present problem."""
        now = time.monotonic()
        return {
            "app": self._spec.app,
            "generation": self._spec.generation,
            "controller_pid": os.getpid(),
            "model": self._spec.model_name,
            "epoch": self._layout.epoch if self._layout else None,
            "replaced": self._replaced,
            "groups": [
                {
                    "name": str(group.name),
                    "state": group.state,
                    "pid": group.told.get("pid"),
                    "node": group.told.get("node"),
                    "for_s": round(now - group.since, 1),
                    "stats": group.stats,
                }
                for _, group in sorted(self._groups.items())
            ],
            "routers": [
                {"id": name, "acked_epoch": epoch, "heard_s": round(now - heard, 1)}
                for name, (epoch, heard) in self._routers.items()
            ],
            "problems": [f"expert group {index}: {why}" for index, why in sorted(self._problems.items())],
        }

    async def shutdown(self) -> None:
        """End all expert groups. The caller then kills this actor."""
        log.info("shutting down")
        # First the tasks, or they would replace what is being removed.
        for task in (self._run, *self._tasks):
            if task is not asyncio.current_task():
                task.cancel()
        for name in await asyncio.to_thread(living_groups, self._spec.app):
            await asyncio.to_thread(remove_group, str(name))
        self._groups.clear()

    async def _start(self) -> None:
        living = await asyncio.to_thread(living_groups, self._spec.app)
        adopted: dict[int, GroupName] = {}
        wanted = range(self._spec.settings.groups.count)
        for name in sorted(living, key=lambda n: n.incarnation):
            index = name.index
            if name.generation != self._spec.generation or index not in wanted:
                log.warning("removing %s of another deployment", name)
                await asyncio.to_thread(remove_group, str(name))
                continue
            if index in adopted:
                await asyncio.to_thread(remove_group, str(adopted[index]))
            adopted[index] = name
            self._incarnations[index] = name.incarnation
        self._tasks = [asyncio.ensure_future(self._keep(i, adopted.get(i))) for i in wanted]
        self._tasks.append(asyncio.ensure_future(self._leave_without_routers()))
        for task in self._tasks:
            task.add_done_callback(_report)

    async def _keep(self, index: int, adopt: GroupName | None) -> None:
        """Have one living incarnation of group `index`, for ever."""
        failures = 0
        while True:
            if adopt is None:
                await asyncio.sleep(RETRY_S[min(failures, len(RETRY_S) - 1)])
            reason = await self._live(index, adopt)
            adopt = None
            group = self._groups.pop(index, None)
            self._problems[index] = reason
            log.warning("expert group %d is lost: %s", index, reason)
            lived = (
                group is not None and group.state == "serving" and time.monotonic() - group.since > STEADY_S
            )
            failures = 1 if lived else failures + 1
            if group is not None:
                await asyncio.to_thread(remove_group, str(group.name))
            self._replaced += 1

    async def _live(self, index: int, adopt: GroupName | None) -> str:
        """One incarnation from its start, or from being found, to its end; returns why it ended."""
        try:
            group = await self._adopt(adopt) if adopt else await self._create(index)
        except (RaymoeError, RayActorError, ValueError) as error:
            return str(error)
        self._groups[index] = group
        lost = asyncio.ensure_future(
            until_lost(group.handle, self._spec.settings.groups.reply_timeout_s, group.stats.update)
        )
        load = asyncio.ensure_future(answer(group.handle.load.remote()))
        try:
            await asyncio.wait({lost, load}, return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                return lost.result()
            try:
                group.told = load.result()
            except RayTaskError as error:
                return str(error.cause)
            except RayActorError as error:
                return sentence(error)
            group.state, group.since = "serving", time.monotonic()
            self._problems.pop(index, None)
            await self._publish()
            return await lost
        finally:
            for task in (lost, load):
                task.cancel()
                task.add_done_callback(seen)

    async def _create(self, index: int) -> Group:
        incarnation = self._incarnations.get(index, -1) + 1
        self._incarnations[index] = incarnation
        name = GroupName(self._spec.app, self._spec.generation, index, incarnation)
        log.info("starting %s", name)
        handle, place = await asyncio.to_thread(start_group, self._spec, str(name), self._group_class)
        group = Group(name, handle)
        self._groups[index] = group
        if not await asyncio.to_thread(place.wait, PLACEMENT_S):
            raise ClusterError(f"Ray has no node with {place.bundle_specs[0]} free for an expert group")
        return group

    async def _adopt(self, name: GroupName) -> Group:
        log.info("adopting %s", name)
        return Group(name, await asyncio.to_thread(ray.get_actor, str(name), NAMESPACE))

    async def _publish(self) -> None:
        """A layout of the next epoch, once every group serves."""
        groups = [self._groups.get(index) for index in range(self._spec.settings.groups.count)]
        serving = [group for group in groups if group is not None and group.state == "serving"]
        if len(serving) < len(groups):
            return
        copies: list[list[list[Copy]]] = [[[] for _ in range(n)] for n in self._spec.experts_per_layer]
        for group in serving:
            for layer, places in enumerate(group.told["copies"]):
                for expert, slot, generation in places:
                    copies[layer][expert].append(Copy(str(group.name), slot, generation))
        self._epoch += 1
        kind = self._spec.settings.groups.lane
        self._layout = Layout(
            self._epoch,
            tuple(GroupPlace(str(group.name), group.told["address"], kind) for group in serving),
            tuple(tuple(tuple(expert) for expert in layer) for layer in copies),
        )
        log.info("layout %d: %s", self._epoch, ", ".join(str(group.name) for group in serving))
        async with self._changed:
            self._changed.notify_all()

    def _hear(self, router_id: str, acked_epoch: int) -> None:
        self._heard = time.monotonic()
        self._routers[router_id] = (acked_epoch, self._heard)
        for name, (_, heard) in list(self._routers.items()):
            if self._heard - heard > self._spec.orphan_s:
                del self._routers[name]

    async def _leave_without_routers(self) -> None:
        while time.monotonic() - self._heard < self._spec.orphan_s:
            await asyncio.sleep(1)
        log.warning("no router was heard of for %g s, leaving", self._spec.orphan_s)
        await self.shutdown()
        ray.kill(ray.get_runtime_context().current_actor)


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("a task of the controller ended", exc_info=task.exception())
