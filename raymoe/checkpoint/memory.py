"""How much memory serving a model takes, computed before anything is loaded."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

from raymoe.checkpoint.moe import MoeModel
from raymoe.errors import MemoryLimitError

PROCESS_BYTES = 300 << 20
"""What one Python process with torch and transformers holds of its own, without weights (measured)."""


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes by part: what one machine needs to hold all routers and all expert groups."""

    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """All parts together, in bytes."""
        return sum(self.parts.values())


def needed_bytes(model: MoeModel, groups: int, kv_bytes: int, lane_bytes: int, routers: int) -> MemoryNeed:
    """Bytes for `routers` routers and `groups` expert groups that hold each expert once.

    `kv_bytes` is each router's cache limit, `lane_bytes` the size of each of a lane's two rings. While it is
    converted, a layer's part is in memory twice; all groups load at once, so that adds up to one whole layer.
    """
    layers = [layer.experts * layer.expert_bytes for layer in model.layers]
    return MemoryNeed(
        {
            "experts": sum(layers),
            "loading": max(layers),
            "routers": routers * model.router_bytes,
            "KV cache": routers * kv_bytes,
            "lanes": routers * groups * 2 * lane_bytes,
            "processes": (routers + groups) * PROCESS_BYTES,
        }
    )


def check_memory(need: MemoryNeed, available: int) -> None:
    """Refuse what doesn't fit into `available` bytes.

    Raises:
        MemoryLimitError: how much each part needs, how much there is, and which settings change it.
    """
    if need.total <= available:
        return
    parts = ", ".join(f"{name} {_size(size)}" for name, size in need.parts.items())
    raise MemoryLimitError(
        f"the model needs {_size(need.total)} of memory ({parts}) and {_size(available)} are available: lower"
        " router.kv_bytes, groups.count, groups.lane_bytes or router.replicas, set model.dtype to bfloat16,"
        " or take a smaller model"
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
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.0f} MiB"
