"""The controller against groups without a model, on a real Ray."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

from raymoe.actors.cluster import check_unused
from raymoe.actors.expert_group import living_groups
from raymoe.actors.link import find_controller, start_controller
from raymoe.actors.spec import GroupName, Spec, controller_name
from raymoe.errors import ClusterError
from raymoe.policy.layout import Layout
from tests.actors.stubs import StubbedController, group, make_spec

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]


@pytest.fixture
def start() -> Iterator[Callable[[Spec], Any]]:
    """Start a controller with stub groups; all of it is removed afterwards."""
    apps = set()

    def start(spec: Spec) -> Any:
        apps.add(spec.app)
        return start_controller(spec, StubbedController)

    yield start
    for app in apps:
        controller = find_controller(app)
        if controller is not None:
            ray.get(controller.shutdown.remote())
            ray.kill(controller)
        assert living_groups(app) == set()


def sync(controller: Any, epoch: int = -1, router: str = "r") -> Layout:
    """The next layout, which must come before the long poll ends."""
    wire = ray.get(controller.sync.remote(router, epoch), timeout=60)
    assert wire is not None, ray.get(controller.status.remote())
    return Layout.from_wire(wire)


def eventually(condition: Callable[[], Any], within_s: float = 30.0) -> Any:
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)
    return value


def test_layout_names_every_expert_and_where_its_group_listens(start: Callable[[Spec], Any]) -> None:
    layout = sync(start(make_spec("lay", groups=3)))
    assert layout.epoch == 1
    assert [(g.name, g.address) for g in layout.groups] == [
        (f"raymoe:lay:one:g{i}r0", f"@raymoe:lay:one:g{i}r0") for i in range(3)
    ]
    # 4 experts over 3 groups: 2, 1, 1.
    for layer in layout.copies:
        assert [[(c.group[-4:], c.slot) for c in copies] for copies in layer] == [
            [("g0r0", 0)], [("g0r0", 1)], [("g1r0", 0)], [("g2r0", 0)],
        ]  # fmt: skip


def test_killed_group_is_replaced_and_published_under_a_new_name_and_epoch(
    start: Callable[[Spec], Any],
) -> None:
    controller = start(make_spec("kill"))
    first = sync(controller)
    status = ray.get(controller.status.remote())
    os.kill(status["groups"][1]["pid"], signal.SIGKILL)
    second = sync(controller, first.epoch)
    assert second.epoch > first.epoch
    assert [g.name for g in second.groups] == ["raymoe:kill:one:g0r0", "raymoe:kill:one:g1r1"]
    assert living_groups("kill") == {GroupName("kill", "one", 0, 0), GroupName("kill", "one", 1, 1)}
    status = ray.get(controller.status.remote())
    assert (status["problems"], status["replaced"]) == ([], 1)
    assert status["routers"][0]["id"] == "r"


def test_stopped_group_is_replaced_after_its_silence(start: Callable[[Spec], Any]) -> None:
    controller = start(make_spec("silent"))
    first = sync(controller)
    pid = ray.get(controller.status.remote())["groups"][0]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        assert sync(controller, first.epoch).groups[0].name == "raymoe:silent:one:g0r1"
    finally:
        # It may be dead already: that's what is wanted.
        if os.path.exists(f"/proc/{pid}"):
            os.kill(pid, signal.SIGKILL)


def test_group_whose_serve_thread_ended_is_replaced(start: Callable[[Spec], Any]) -> None:
    controller = start(make_spec("thread"))
    first = sync(controller)
    ray.get(group("raymoe:thread:one:g1r0").fail.remote("ValueError: a fault"))
    assert sync(controller, first.epoch).groups[1].name == "raymoe:thread:one:g1r1"


def test_load_failure_is_told_in_its_own_words_and_tried_again(
    start: Callable[[Spec], Any], tmp_path: Any
) -> None:
    reason = tmp_path / "reason"
    reason.write_text("model.safetensors is truncated")
    controller = start(make_spec("load", groups=1, path=str(reason)))
    problems = eventually(lambda: ray.get(controller.status.remote())["problems"])
    assert problems == ["expert group 0: model.safetensors is truncated"]
    reason.unlink()
    layout = sync(controller)
    assert layout.groups[0].name != "raymoe:load:one:g0r0"


def test_new_controller_adopts_living_groups_and_publishes_above_what_routers_have(
    start: Callable[[Spec], Any],
) -> None:
    spec = make_spec("adopt")
    controller = start(spec)
    layout = sync(controller)
    pids = {g["name"]: g["pid"] for g in ray.get(controller.status.remote())["groups"]}
    ray.kill(controller)
    eventually(lambda: find_controller("adopt") is None)
    controller = start(spec)
    again = sync(controller, 7)
    assert again.epoch > 7
    assert again.groups == layout.groups
    assert {g["name"]: g["pid"] for g in ray.get(controller.status.remote())["groups"]} == pids


def test_groups_of_an_earlier_deployment_are_removed(start: Callable[[Spec], Any]) -> None:
    old = start(make_spec("reap", generation="old"))
    sync(old)
    ray.kill(old)
    eventually(lambda: find_controller("reap") is None)
    sync(start(make_spec("reap", generation="new", groups=1)))
    assert living_groups("reap") == {GroupName("reap", "new", 0, 0)}


def test_controller_without_routers_removes_its_groups_and_leaves(start: Callable[[Spec], Any]) -> None:
    controller = start(make_spec("alone", groups=1, orphan_s=3))
    sync(controller)
    assert living_groups("alone")
    eventually(lambda: not living_groups("alone"))
    eventually(lambda: find_controller("alone") is None)


def test_application_that_runs_already_is_not_deployed_over(start: Callable[[Spec], Any]) -> None:
    sync(start(make_spec("taken")))
    with pytest.raises(ClusterError, match="raymoe down --app taken --address here:1"):
        check_unused("taken", "here:1")
    check_unused("other", "here:1")


def test_names_are_read_back() -> None:
    name = GroupName("my-app", "a1b2", 3, 14)
    assert GroupName.parse(str(name)) == name
    assert GroupName.parse(controller_name("my-app")) is None
