from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from raymoe.checkpoint import available
from raymoe.checkpoint.available import available_bytes, group_bytes

V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")
NO_LIMIT = {V1: "9223372036854771712", V2: "max"}


def group(folder: Path, names: tuple[str, str, str], limit: str, usage: int = 0, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(limit + "\n")
    (folder / names[1]).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 5\nfile 6\n{names[2]} {cached}\n")


def process(tmp_path: Path, names: tuple[str, str, str], path: str, root: str = "/") -> tuple[Path, Path]:
    """A folder like /proc/self, of a process in the group `path`; and where the hierarchy is mounted."""
    proc, mount = tmp_path / "proc", tmp_path / "cgroup"
    proc.mkdir()
    mounts = ["22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw"]
    if names == V1:
        (proc / "cgroup").write_text(f"9:name=systemd:/other\n4:cpu,cpuacct:/wrong\n3:memory:{path}\n0::/\n")
        mounts.append(f"33 31 0:30 / {tmp_path}/cpu rw - cgroup cgroup rw,cpu,cpuacct")
        mounts.append(f"35 31 0:32 {root} {mount} rw,relatime - cgroup cgroup rw,memory")
    else:
        (proc / "cgroup").write_text(f"0::{path}\n")
        mounts.append(f"35 31 0:32 {root} {mount} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate")
    (proc / "mountinfo").write_text("\n".join(mounts) + "\n")
    return proc, mount


@pytest.mark.parametrize("names", [V1, V2], ids=["v1", "v2"])
def test_each_limit_around_the_process_counts(tmp_path: Path, names: tuple[str, str, str]) -> None:
    proc, mount = process(tmp_path, names, "/pod/main")
    group(mount / "pod" / "main", names, NO_LIMIT[names], 500)
    group(mount / "pod", names, "4000", usage=1500, cached=300)
    group(mount / "other", names, "10")
    # Files that are cached and can be dropped are not in the way.
    assert min(group_bytes(proc)) == 4000 - 1500 + 300


@pytest.mark.parametrize("names", [V1, V2], ids=["v1", "v2"])
@pytest.mark.parametrize(
    ("path", "root"), [("/docker/abc", "/docker/abc"), ("/../host/abc", "/"), ("/", "/")]
)
def test_a_container_that_sees_its_own_part_alone(
    tmp_path: Path, names: tuple[str, str, str], path: str, root: str
) -> None:
    proc, mount = process(tmp_path, names, path, root)
    group(mount, names, "7000", usage=1000)
    assert list(group_bytes(proc)) == [6000]


def test_more_than_the_limit_in_use_leaves_nothing(tmp_path: Path) -> None:
    proc, mount = process(tmp_path, V2, "/a")
    group(mount / "a", V2, "1000", usage=1200)
    assert list(group_bytes(proc)) == [0]


def test_where_nothing_can_be_read_there_is_no_limit(tmp_path: Path) -> None:
    assert list(group_bytes(tmp_path / "nowhere")) == []
    proc, mount = process(tmp_path, V2, "/a")
    (mount / "a").mkdir(parents=True)
    (mount / "a" / "memory.max").write_text("many\n")
    assert list(group_bytes(proc)) == []


def test_the_least_of_machine_and_groups_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < available_bytes() <= psutil.virtual_memory().total
    monkeypatch.setattr(available, "group_bytes", lambda: iter([77, 88]))
    assert available_bytes() == 77
    monkeypatch.setattr(available, "group_bytes", lambda: iter([1 << 62]))
    assert 77 < available_bytes() <= psutil.virtual_memory().total
