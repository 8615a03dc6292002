"""An expert group as a Ray actor: loads its slice, serves lanes, and leaves when nobody needs it any more."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raymoe.actors.spec import NAMESPACE, GroupName, Spec
from raymoe.errors import LaneClosedError
from raymoe.observe.log import setup_logging
from raymoe.policy.threads import thread_environment

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from raymoe.experts.serve import GroupServer
    from raymoe.lanes.object_store_door import Door

log = logging.getLogger(__name__)


class ExpertGroupActor:
    """Everything heavy happens in `load`, in a thread of its own: `ping` answers all the time."""

    def __init__(self, spec: Spec, name: str) -> None:
        setup_logging(name)
        self._spec, self._name = spec, name
        self._server: GroupServer | None = None
        self._door: Door | None = None
        self._loading: asyncio.Task[dict[str, Any]] | None = None
        self._loaded_bytes = 0
        self._heard = time.monotonic()
        threading.Thread(target=self._leave_when_orphaned, name="orphan-watch", daemon=True).start()

    async def load(self) -> dict[str, Any]:
        """Load this group's slice of every MoE layer, then serve; asked again, tell it again.

        Returns `address`, `pid`, `node` and `copies`: a list per MoE layer of (expert, slot, generation).

        Raises:
            CheckpointError: names the file and tensor.
        """
        if self._loading is None:
            self._loading = asyncio.ensure_future(asyncio.to_thread(self._load))
        return await asyncio.shield(self._loading)

    async def ping(self) -> dict[str, Any]:
        """Counters of the group. `failed` is why its serve thread ended; `loaded_bytes` grows in `load`."""
        self._heard = time.monotonic()
        server = self._server
        stats = {} if server is None else server.stats()
        return {**stats, "loaded_bytes": self._loaded_bytes, "failed": server.failed if server else None}

    async def wait(self) -> None:
        """Never returns: a pending call shows this process's death to the caller at once."""
        await asyncio.Event().wait()

    async def lane(self, name: str, lane: str, *args: Any) -> Any:
        """A call of an object_store lane; see `Door.call`."""
        if self._door is None:
            raise LaneClosedError(self._name, "it serves no object_store lanes")
        return await self._door.call(name, lane, *args)

    def _load(self) -> dict[str, Any]:
        # Imported here, so that the actor answers pings while torch and transformers are loaded.
        import torch

        from raymoe.checkpoint.folder import Checkpoint
        from raymoe.checkpoint.slices import ExpertLoader
        from raymoe.experts.group import ExpertGroup
        from raymoe.experts.serve import GroupServer
        from raymoe.lanes.hello import Hello
        from raymoe.lanes.object_store_door import Door
        from raymoe.policy.layout import even_slices

        spec, settings = self._spec, self._spec.settings.groups
        start = time.monotonic()
        loader = ExpertLoader(Checkpoint.open(spec.path), getattr(torch, spec.dtype))
        deterministic = spec.settings.model.deterministic
        group = ExpertGroup(loader, self._name, deterministic)
        parsed = GroupName.parse(self._name)
        if parsed is None:
            raise ValueError(f"{self._name!r} is not an expert group's name")
        copies = []
        for layer, experts in enumerate(spec.experts_per_layer):
            part = even_slices(experts, settings.count)[parsed.index]
            places = group.load_slice(layer, part, self._count_bytes)
            copies.append([(e, slot, generation) for e, (slot, generation) in zip(part, places, strict=True)])
        hello = Hello(spec.token, spec.fingerprint, spec.dtype, spec.hidden_size, deterministic)
        self._server = GroupServer(group, hello, settings.threads)
        self._server.start()
        context = ray.get_runtime_context()
        address = self._server.address
        if settings.lane == "object_store":
            self._door = Door(self._name, hello, self._server.add_lane)
            address = f"{context.gcs_address}/{NAMESPACE}/{self._name}"
        log.info("%d bytes loaded in %.1f s", self._loaded_bytes, time.monotonic() - start)
        return {
            "address": address,
            "pid": os.getpid(),
            "node": context.get_node_id(),
            "copies": copies,
        }

    def _count_bytes(self, count: int) -> None:
        self._loaded_bytes += count

    def _leave_when_orphaned(self) -> None:
        """The controller pings; routers hold lanes. Without both for `orphan_s` the application is gone."""
        while time.monotonic() - self._heard < self._spec.orphan_s:
            time.sleep(1)
            if self._server is not None and self._server.stats()["lanes"]:
                self._heard = time.monotonic()
        log.warning("neither controller nor router was heard of for %g s, leaving", self._spec.orphan_s)
        # Removing the placement group ends this process too; the exit is for when there is none any more.
        with contextlib.suppress(ValueError):
            remove_placement_group(ray.util.get_placement_group(self._name))
            time.sleep(5)
        os._exit(0)


def start_group(
    spec: Spec, name: str, actor_class: type = ExpertGroupActor
) -> tuple[ActorHandle, PlacementGroup]:
    """Ask Ray for a detached placement group and a detached actor in it, both called `name`. Doesn't wait."""
    settings = spec.settings.groups
    bundle = {"CPU": settings.cpus} | ({"GPU": settings.gpus} if settings.gpus else {})
    place = ray.util.placement_group([bundle], name=name, lifetime="detached")
    handle = (
        ray.remote(actor_class)
        .options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=settings.cpus,
            num_gpus=settings.gpus,
            # Lanes and slots can't be restarted in place: the controller starts another incarnation.
            max_restarts=0,
            enable_task_events=False,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                place, 0, placement_group_capture_child_tasks=False
            ),
            runtime_env={"env_vars": thread_environment(settings.threads)},
        )
        .remote(spec, name)
    )
    return handle, place


def remove_group(name: str) -> None:
    """Kill the actor and remove the placement group called `name`, whichever is still there."""
    with contextlib.suppress(ValueError):
        ray.kill(ray.get_actor(name, namespace=NAMESPACE))
    with contextlib.suppress(ValueError):
        remove_placement_group(ray.util.get_placement_group(name))


def living_groups(app: str) -> set[GroupName]:
    """The expert groups of an application, of any generation, that have an actor or a placement group."""
    names = {entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True)}
    for entry in ray.util.placement_group_table().values():
        if entry["state"] != "REMOVED":
            names.add(entry["name"])
    parsed = (GroupName.parse(name) for name in names)
    return {name for name in parsed if name is not None and name.app == app}
