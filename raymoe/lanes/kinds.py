"""Opens a lane of the kind that a layout names."""

from __future__ import annotations

from raymoe.errors import HelloRefusedError
from raymoe.lanes import shm
from raymoe.lanes.base import RouterLane
from raymoe.lanes.hello import Hello

KINDS = ("shm", "object_store")


def connect(
    kind: str, group: str, address: str, hello: Hello, *, ring_bytes: int, router: str, timeout_s: float
) -> RouterLane:
    """Open a lane to the expert group at `address`.

    Raises:
        LaneClosedError: nobody listens there.
        LaneTimeoutError: no answer within `timeout_s` seconds.
        HelloRefusedError: the two sides don't fit together, or this version has no such lanes.
    """
    if kind == "shm":
        return shm.connect(group, address, hello, ring_bytes=ring_bytes, router=router, timeout_s=timeout_s)
    if kind == "object_store":
        # Imported for this kind alone: the data plane runs without Ray.
        from raymoe.lanes import object_store

        return object_store.connect(
            group, address, hello, ring_bytes=ring_bytes, router=router, timeout_s=timeout_s
        )
    raise HelloRefusedError(group, f"lanes of kind {kind!r} are unknown here; known: {', '.join(KINDS)}")
