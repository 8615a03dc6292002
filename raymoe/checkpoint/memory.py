"""How much memory serving a model takes, computed before anything is loaded, and which settings make it fit."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

import torch

from raymoe.checkpoint.moe import MoeModel
from raymoe.config import Settings
from raymoe.errors import MemoryLimitError

MIB = 1 << 20
# What processes hold of their own, without weights (measured as proportional set sizes, rounded up).
GROUP_BYTES = 300 * MIB
"""An expert group: Python, torch and transformers."""
ROUTER_BYTES = 380 * MIB
"""A router: its engine process, and the replica beside it."""
SERVER_BYTES = 900 * MIB
"""Once: a private Ray, Serve, the ingress and the controller."""


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes by part: what one machine needs to hold all routers and all expert groups."""

    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """All parts together, in bytes."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        """The parts, largest first."""
        by_size = sorted(self.parts.items(), key=lambda part: -part[1])
        return ", ".join(f"{name} {_size(size)}" for name, size in by_size)


def needed_bytes(model: MoeModel, settings: Settings) -> MemoryNeed:
    """Bytes for all routers, and for expert groups that hold each expert once.

    While it is converted, a layer's part is in memory twice; all groups load at once, so that adds up to one whole
    layer. What an object_store lane has under way is there twice, as Ray's object and as its receiver's copy.
    """
    layers = [layer.experts * layer.expert_bytes for layer in model.layers]
    groups, router = settings.groups, settings.router
    rings = router.replicas * groups.count * 2 * groups.lane_bytes
    return MemoryNeed(
        {
            "experts": sum(layers),
            "loading": max(layers),
            "routers": router.replicas * model.router_bytes,
            "KV cache": router.replicas * router.kv_bytes,
            "lanes": rings if groups.lane == "shm" else 2 * rings,
            "processes": router.replicas * ROUTER_BYTES + groups.count * GROUP_BYTES + SERVER_BYTES,
        }
    )


def check_memory(model: MoeModel, settings: Settings, available: int) -> None:
    """Refuse what doesn't fit into `available` bytes.

    Raises:
        MemoryLimitError: how much each part needs, how much there is, and the values of settings that make it fit;
            or that none do, and the least that is needed.
    """
    need = needed_bytes(model, settings)
    if need.total <= available:
        return
    changes, least = _fitting((model, settings), available)
    if changes:
        advice = f"set {' and '.join(changes)}"
    else:
        advice = f"no settings make it fit, it takes at least {_size(least)}: take a smaller model"
    raise MemoryLimitError(
        f"the model needs {_size(need.total)} of memory ({need}) and {_size(available)} are available: {advice}"
    )


Plan = tuple[MoeModel, Settings]
Change = Callable[[Plan, int], tuple[str, Plan] | None]
"""(a plan, available bytes) → what to set to what, and the plan with that; None where there is nothing to gain."""


def _fitting(plan: Plan, available: int) -> tuple[list[str], int]:
    """The fewest changes that make it fit, with none of them the bytes that are needed with all changes."""
    least = plan
    for count in range(1, len(_CHANGES) + 1):
        for some in combinations(_CHANGES, count):
            texts: list[str] = []
            least = plan
            # The finest last: it needs to make up only for what the others don't.
            for change in reversed(some):
                if (made := change(least, available)) is not None:
                    texts.insert(0, made[0])
                    least = made[1]
            if needed_bytes(*least).total <= available:
                return texts, 0
    return [], needed_bytes(*least).total


def _smaller(section: str, key: str, least: int, unit: int = 1) -> Change:
    """The largest multiple of `unit` that fits, or `least`. All needs grow evenly with a setting."""

    def change(plan: Plan, available: int) -> tuple[str, Plan] | None:
        model, settings = plan

        def with_value(value: int) -> Plan:
            own = getattr(settings, section).model_copy(update={key: value})
            return model, settings.model_copy(update={section: own})

        now: int = getattr(getattr(settings, section), key)
        total = needed_bytes(model, settings).total
        per_unit = total - needed_bytes(*with_value(now - unit)).total
        fits = (now - -(-(total - available) // per_unit) * unit) // unit * unit
        value = max(fits, least)
        return (f"{section}.{key} to {value}", with_value(value)) if value < now else None

    return change


def _half(plan: Plan, _: int) -> tuple[str, Plan] | None:
    """Weights of two bytes instead of four."""
    model, settings = plan
    if model.dtype != torch.float32:
        return None
    layers = tuple(replace(layer, expert_bytes=layer.expert_bytes // 2) for layer in model.layers)
    half = replace(model, layers=layers, router_bytes=model.router_bytes // 2, dtype=torch.bfloat16)
    return "model.dtype to bfloat16", (half, settings)


# In the order in which they cost users the least. A KV cache below 64 MiB holds hardly one conversation.
_CHANGES: tuple[Change, ...] = (
    _smaller("router", "kv_bytes", 64 * MIB, MIB),
    _smaller("groups", "lane_bytes", MIB, MIB),
    _half,
    _smaller("router", "replicas", 1),
    _smaller("groups", "count", 1),
)


def give_back() -> None:
    """Return freed memory to the system; with glibc, else nothing happens.

    Converting leaves holes between the results, up to half the weights' size where that was measured, and
    malloc would keep them. Measured: 4 to 6 ms after a layer of 54 MB, under 1 ms after one expert of 3.5 MB.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _size(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / MIB:.0f} MiB"
