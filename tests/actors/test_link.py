"""How routers find, follow and replace controllers, with groups that have no model."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import ray

from raymoe.actors.expert_group import living_groups
from raymoe.actors.link import ControllerLink, controller_status, find_controller
from raymoe.actors.spec import Spec
from tests.actors.stubs import StubbedController, make_spec

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]


class Router:
    """What a router does with layouts: it keeps them."""

    def __init__(self, spec: Spec, name: str) -> None:
        self.layouts: list[dict[str, Any]] = []
        self.link = ControllerLink(spec, name, self._keep, StubbedController)

    async def _keep(self, wire: dict[str, Any]) -> None:
        self.layouts.append(wire)


@asynccontextmanager
async def following(*routers: Router) -> AsyncIterator[None]:
    """The routers' links run; afterwards nothing of their application is left."""
    tasks = [asyncio.create_task(router.link.run()) for router in routers]
    try:
        yield
        assert not [task for task in tasks if task.done()]
    finally:
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def eventually(condition: Callable[[], Any], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.1)


def remove(app: str) -> None:
    controller = find_controller(app)
    if controller is not None:
        ray.get(controller.shutdown.remote())
        ray.kill(controller)
    assert living_groups(app) == set()


def test_two_routers_that_start_at_once_share_one_controller_and_its_groups() -> None:
    async def run() -> None:
        a, b = (Router(make_spec("share"), name) for name in "ab")
        async with following(a, b):
            await eventually(lambda: a.link.epoch == b.link.epoch == 1)
            assert a.layouts == b.layouts
            # The acknowledgement goes with the next question.
            await eventually(
                lambda: (
                    sorted((r["id"], r["acked_epoch"]) for r in controller_status("share")["routers"])
                    == [("a", 1), ("b", 1)]
                )
            )
            assert len(living_groups("share")) == 2

    asyncio.run(run())
    remove("share")


def test_router_starts_a_new_controller_when_its_own_dies_and_keeps_the_groups() -> None:
    async def run() -> None:
        router = Router(make_spec("again"), "r")
        async with following(router):
            await eventually(lambda: router.link.epoch == 1)
            ray.kill(find_controller("again"))
            await eventually(lambda: router.link.epoch == 2)
            assert router.link.problem is None
            assert [w["groups"] for w in router.layouts] == [router.layouts[0]["groups"]] * 2

    asyncio.run(run())
    remove("again")


def test_new_deployment_takes_over_and_the_old_one_does_not_take_back() -> None:
    async def run() -> None:
        old = Router(make_spec("turn", generation="old"), "o")
        new = Router(make_spec("turn", generation="new"), "n")
        async with following(old):
            await eventually(lambda: old.link.epoch == 1)
            async with following(new):
                await eventually(lambda: new.link.epoch == 1)
                await eventually(lambda: "another deployment" in (old.link.problem or ""))
                assert {name.generation for name in living_groups("turn")} == {"new"}
                assert new.link.problem is None

    asyncio.run(run())
    remove("turn")
