"""Where other terminals find a running server: a small file per application, in a folder of the user."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from raymoe.errors import ClusterError

END_S = 10.0


@dataclass(frozen=True)
class ServerRecord:
    """A server that `raymoe serve` started.

    `token` authenticates to its Ray, `private` says that this Ray ends with process `pid`, and `born` is that
    process's start time in seconds, which tells it from a later one with the same number.
    """

    app: str
    pid: int
    born: float
    address: str
    private: bool
    host: str
    port: int
    model: str
    logs: str
    tls_cert: str | None = None
    grpc_port: int | None = None
    token: str = field(default="", repr=False)
    started: float = field(default_factory=time.time)

    @property
    def scheme(self) -> str:
        """Of its address."""
        return "https" if self.tls_cert else "http"

    @property
    def url(self) -> str:
        """Where clients on this machine reach the server."""
        return f"{self.scheme}://{self._local_host}:{self.port}"

    @property
    def grpc_url(self) -> str | None:
        """The same for gRPC, None without it."""
        if self.grpc_port is None:
            return None
        return f"{'grpcs' if self.tls_cert else 'grpc'}://{self._local_host}:{self.grpc_port}"

    @property
    def _local_host(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"[{host}]" if ":" in host else host

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return _born(self.pid) == self.born

    def write(self) -> None:
        """Keep it for other terminals, readable by this user only."""
        folder = state_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = folder.lstat()
        if not stat.S_ISDIR(owner.st_mode) or owner.st_uid != os.getuid() or owner.st_mode & 0o077:
            raise ClusterError(f"{folder} must be a folder of this user alone (mode 700)")
        part = folder / f".{self.app}.{os.getpid()}"
        part.touch(mode=0o600)
        part.write_text(json.dumps(asdict(self)), encoding="utf-8")
        part.rename(folder / f"{self.app}.json")

    def remove(self) -> None:
        """Idempotent. Another server's record of the same application stays."""
        if read(self.app) == self:
            (state_folder() / f"{self.app}.json").unlink(missing_ok=True)


def this_process() -> tuple[int, float]:
    """`pid` and `born` of the calling process."""
    return os.getpid(), _born(os.getpid()) or 0.0


def read(app: str) -> ServerRecord | None:
    """The record of an application's server, alive or not; None when there is none."""
    try:
        values: dict[str, Any] = json.loads((state_folder() / f"{app}.json").read_text(encoding="utf-8"))
        return ServerRecord(**values)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise ClusterError(f"{state_folder()}/{app}.json can't be read: {error}; remove it") from error


def state_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """`XDG_RUNTIME_DIR/raymoe`, else `/tmp/raymoe-UID`."""
    if environ.get("XDG_RUNTIME_DIR"):
        return Path(environ["XDG_RUNTIME_DIR"]) / "raymoe"
    return Path(f"/tmp/raymoe-{os.getuid()}")


def children() -> list[tuple[int, float]]:
    """`pid` and `born` of every process below the calling one."""
    return [(p.pid, _born(p.pid) or 0.0) for p in psutil.Process().children(recursive=True)]


def processes_of(logs: str) -> list[tuple[int, float]]:
    """Every process of the Ray session whose logs are in the folder `logs`, engines included.

    They are known by the log files that they hold open: after a crash nothing else ties them together.
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            files = Path(f"/proc/{process.pid}/fd").iterdir()
            if any(os.readlink(file).startswith(f"{logs}/") for file in files):
                found.append((process.pid, process.create_time()))
    return found


def remove_left_over(record: ServerRecord) -> int:
    """End what a killed server with a private Ray has left, and its record; returns how many processes."""
    ended = end_processes(processes_of(record.logs))
    record.remove()
    return ended


def end_processes(processes: Iterable[tuple[int, float]], patience_s: float = 0.0) -> int:
    """Kill those that still live after `patience_s`; returns how many there were."""
    found = []
    for pid, born in processes:
        if _born(pid) == born:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
    _, alive = psutil.wait_procs(found, timeout=patience_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=END_S)
    return len(alive)


def _born(pid: int) -> float | None:
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None
