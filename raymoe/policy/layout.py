"""The layout: which slot of which expert group holds each logical expert. Immutable, numbered by epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from raymoe.errors import ConfigError


class Copy(NamedTuple):
    """One physical expert: `slot` of `group` for one layer. `generation` tells reuses of a slot apart."""

    group: str
    slot: int
    generation: int


@dataclass(frozen=True)
class GroupPlace:
    """Where one expert group is reached.

    `name` is unique per incarnation; `address` is what a lane connects to; `kind` names the lane.
    """

    name: str
    address: str
    kind: str = "shm"


@dataclass(frozen=True)
class Layout:
    """`copies[layer][expert]` lists the physical experts of a logical one, at least one each."""

    epoch: int
    groups: tuple[GroupPlace, ...]
    copies: tuple[tuple[tuple[Copy, ...], ...], ...]

    def __post_init__(self) -> None:
        known = {group.name for group in self.groups}
        if len(known) != len(self.groups):
            raise ConfigError(f"layout {self.epoch}: two expert groups share a name")
        for layer, experts in enumerate(self.copies):
            for expert, copies in enumerate(experts):
                if not copies:
                    raise ConfigError(
                        f"layout {self.epoch}: expert {expert} of MoE layer {layer} has no copy"
                    )
                for copy in copies:
                    if copy.group not in known:
                        raise ConfigError(f"layout {self.epoch}: unknown expert group {copy.group}")

    def to_wire(self) -> dict[str, Any]:
        """As plain lists and dicts, for msgpack."""
        return {
            "epoch": self.epoch,
            "groups": [[g.name, g.address, g.kind] for g in self.groups],
            "copies": [[[list(c) for c in copies] for copies in experts] for experts in self.copies],
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Layout:
        """The inverse of `to_wire`."""
        return cls(
            epoch=int(wire["epoch"]),
            groups=tuple(GroupPlace(*g) for g in wire["groups"]),
            copies=tuple(tuple(tuple(Copy(*c) for c in cs) for cs in experts) for experts in wire["copies"]),
        )


def even_slices(experts: int, groups: int) -> list[range]:
    """Contiguous slices of `range(experts)` whose sizes differ by at most one.

    >>> [len(s) for s in even_slices(30, 8)]
    [4, 4, 4, 4, 4, 4, 3, 3]
    """
    if groups < 1 or groups > experts:
        raise ConfigError(
            f"{experts} experts can't be spread over {groups} expert groups: set groups.count to 1..{experts}"
        )
    base, extra = divmod(experts, groups)
    starts = [i * base + min(i, extra) for i in range(groups + 1)]
    return [range(a, b) for a, b in pairwise(starts)]


def even_layout(epoch: int, groups: Sequence[GroupPlace], experts_per_layer: Sequence[int]) -> Layout:
    """Layout without copies: group i holds the i-th slice of every layer, slot = position in the slice."""
    layers = []
    for experts in experts_per_layer:
        layer: list[tuple[Copy, ...]] = []
        for place, part in zip(groups, even_slices(experts, len(groups)), strict=True):
            layer.extend((Copy(place.name, slot, 0),) for slot in range(len(part)))
        layers.append(tuple(layer))
    return Layout(epoch, tuple(groups), tuple(layers))
