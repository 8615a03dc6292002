"""A group without a model: everything that the controller sees of one."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import ray

from raymoe.actors.controller import Controller
from raymoe.actors.spec import GroupName, Spec
from raymoe.config import Settings
from raymoe.errors import CheckpointError
from raymoe.policy.layout import even_slices


def make_spec(
    app: str, generation: str = "one", groups: int = 2, orphan_s: float = 60.0, path: str = "", **server: Any
) -> Spec:
    settings = Settings.build({"groups": {"count": groups, "reply_timeout_s": 2}, "server": {"app": app}})
    return Spec(
        generation=generation,
        token="secret",
        path=path,
        model_name="stub",
        fingerprint="f",
        dtype="float32",
        hidden_size=8,
        experts_per_layer=(4, 4),
        expert_bytes=0,
        settings=settings,
        orphan_s=orphan_s,
    )


class StubGroup:
    def __init__(self, spec: Spec, name: str) -> None:
        self._spec, self._name, self._failed = spec, name, None

    async def load(self) -> dict[str, Any]:
        if self._spec.path and Path(self._spec.path).exists():
            raise CheckpointError(Path(self._spec.path).read_text())
        parsed = GroupName.parse(self._name)
        assert parsed is not None
        copies = [
            [
                (e, slot, 0)
                for slot, e in enumerate(even_slices(n, self._spec.settings.groups.count)[parsed.index])
            ]
            for n in self._spec.experts_per_layer
        ]
        return {"address": f"@{self._name}", "pid": os.getpid(), "node": "here", "copies": copies}

    async def ping(self) -> dict[str, Any]:
        return {"failed": self._failed, "lanes": 0}

    async def wait(self) -> None:
        await asyncio.Event().wait()

    async def fail(self, why: str) -> None:
        self._failed = why


class StubbedController(Controller):
    def __init__(self, spec: Spec) -> None:
        super().__init__(spec, StubGroup)


def group(name: str) -> Any:
    return ray.get_actor(name, namespace="serve")
