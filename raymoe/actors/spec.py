"""What every actor of one deployed application is told at its start, and the names they go by."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from raymoe.config import Settings

NAMESPACE = "serve"
"""Ray namespace of our actors. Serve's own, because `serve run` connects with it and placement groups
can only be looked up by name in the namespace of the process that asks."""

_GROUP = re.compile(r"raymoe:(?P<app>[^:]+):(?P<generation>[^:]+):g(?P<index>\d+)r(?P<incarnation>\d+)")


@dataclass(frozen=True)
class Spec:
    """One deployment of one application.

    `generation` tells it from earlier deployments of the same application, `token` is what its lanes ask for.
    `dtype` is torch's name of it; `experts_per_layer` counts the logical experts of each MoE layer,
    `expert_bytes` is what all of them take on disk. `orphan_s` is how long a part outlives those that need
    it: a group without controller and lanes, a controller without routers.
    """

    generation: str
    token: str = field(repr=False)
    path: str
    model_name: str
    fingerprint: str
    dtype: str
    hidden_size: int
    experts_per_layer: tuple[int, ...]
    expert_bytes: int
    settings: Settings
    orphan_s: float = 60.0

    @property
    def app(self) -> str:
        """The application's name."""
        return self.settings.server.app

    def shape(self) -> str:
        """The model's size in a few words."""
        counts = sorted(set(self.experts_per_layer))
        experts = "/".join(map(str, counts))
        return f"{len(self.experts_per_layer)} MoE layers of {experts} experts, {self.dtype}"


@dataclass(frozen=True)
class GroupName:
    """The name of one incarnation of an expert group: of its actor, its placement group and in the layout."""

    app: str
    generation: str
    index: int
    incarnation: int

    def __str__(self) -> str:
        return f"raymoe:{self.app}:{self.generation}:g{self.index}r{self.incarnation}"

    @classmethod
    def parse(cls, text: str) -> GroupName | None:
        """The inverse of `str`; None for any other name."""
        match = _GROUP.fullmatch(text)
        if match is None:
            return None
        return cls(match["app"], match["generation"], int(match["index"]), int(match["incarnation"]))


def controller_name(app: str) -> str:
    """The controller's actor name."""
    return f"raymoe:{app}:controller"
