"""How much memory may still be taken: what the machine has, within what its control groups allow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil


class _Names(NamedTuple):
    """The files of a control group, and the line of `memory.stat` with the cached files that can be dropped."""

    limit: str
    usage: str
    cached: str


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Names("memory.max", "memory.current", "inactive_file")


def available_bytes() -> int:
    """The machine's available memory, or what this process's control groups (v1 and v2) leave, if that is less."""
    machine: int = psutil.virtual_memory().available
    return min([machine, *group_bytes()])


def group_bytes(proc: Path = Path("/proc/self")) -> Iterator[int]:
    """Bytes left below each limit of the control groups that the process of `proc` is in, and of those around them.

    Files that are absent or that can't be read limit nothing: so it is outside of containers, and without Linux.
    """
    for names, mount, folder in _groups(proc):
        while True:
            left = _left(folder, names)
            if left is not None:
                yield left
            if folder == mount:
                break
            folder = folder.parent


def _groups(proc: Path) -> Iterator[tuple[_Names, Path, Path]]:
    """(names, where the hierarchy is mounted, the process's folder in it) of each that controls memory."""
    try:
        memberships = [line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines()]
        mounts = [line.split() for line in (proc / "mountinfo").read_text().splitlines()]
    except OSError:
        return
    for fields in mounts:
        # ... root of the mount, mount point, options ..., "-", type, source, options of the hierarchy
        kind, options = fields[fields.index("-") + 1], fields[-1].split(",")
        if kind != "cgroup2" and not (kind == "cgroup" and "memory" in options):
            continue
        root, mount = Path(fields[3]), Path(fields[4])
        for _, controllers, path in memberships:
            if ("memory" in controllers.split(",")) if kind == "cgroup" else not controllers:
                # A container may see its own part of the hierarchy alone, and yet its path in the whole.
                inside = Path(path).relative_to(root) if Path(path).is_relative_to(root) else Path()
                yield (_V1 if kind == "cgroup" else _V2), mount, mount / inside


def _left(folder: Path, names: _Names) -> int | None:
    try:
        # "max", or a number beyond all memory: no limit.
        limit = int((folder / names.limit).read_text())
        usage = int((folder / names.usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return max(limit - usage + int(stat.get(names.cached, 0)), 0)
