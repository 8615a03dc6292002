"""A running server seen from another terminal: its status, and its end."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any

from raymoe.actors import environment, state
from raymoe.errors import ClusterError

STOP_S = 60.0


def status(app: str, address: str | None) -> dict[str, Any]:
    """What runs: `running`, and then `url`, `grpc_url`, `pid`, `model`, `epoch`, `groups`, `routers`, `problems`.

    `address` asks a Ray cluster; None asks the server that was started on this machine.

    Raises:
        ClusterError: Ray can't be reached.
    """
    record = state.read(app)
    if address is None and (record is None or not record.alive):
        return {"app": app, "running": False}
    here = record if record is not None and record.alive else None
    with contextlib.ExitStack() as stack:
        _join(here, address, stack)
        from raymoe.actors.link import controller_status

        told = controller_status(app)
    found = {"app": app, "running": told is not None}
    if here is not None:
        found |= {
            "running": True,
            "url": here.url,
            "grpc_url": here.grpc_url,
            "pid": here.pid,
            "model": here.model,
            "up_s": round(time.time() - here.started),
            "logs": here.logs,
        }
    return found | (
        told or {"epoch": None, "groups": [], "routers": [], "problems": ["no controller answers"]}
    )


def down(app: str, address: str | None) -> str:
    """Stop a server and remove what it left; returns what was done in one sentence.

    Raises:
        ClusterError: it did not stop, or something is still there.
    """
    record = state.read(app)
    done = "nothing is running"
    if record is not None:
        if record.alive:
            os.kill(record.pid, signal.SIGTERM)
            _wait_for_end(record)
            done = f"stopped {app} (process {record.pid})"
        elif record.private:
            ended = state.remove_left_over(record)
            done = f"{app} had ended without cleaning up; {ended} processes of its Ray were ended"
        elif address is None:
            # Its process is gone, but its actors live on in the cluster.
            address = record.address
        record.remove()
    if address is not None:
        with contextlib.ExitStack() as stack:
            _join(None, address, stack)
            from raymoe.actors import cluster

            cluster.remove(app)
        done = f"removed {app} from Ray at {address}"
    return done


def as_text(found: dict[str, Any]) -> str:
    """A status for people."""
    if not found["running"]:
        return f"{found['app']} is not running"
    where = " and ".join(filter(None, (found.get("url", "the cluster"), found.get("grpc_url"))))
    lines = [f"{found['app']}: {found.get('model')} on {where}, layout {found['epoch']}"]
    for group in found["groups"]:
        stats = group["stats"]
        lines.append(
            f"  {group['name']}  {group['state']} for {group['for_s']:.0f} s  pid {group['pid']}"
            f"  slots {stats.get('slots', 0)}  pairs {stats.get('pairs', 0)}  lanes {stats.get('lanes', 0)}"
        )
    for router in found["routers"]:
        lines.append(f"  router {router['id']}  uses layout {router['acked_epoch']}")
    lines.extend(f"  problem: {problem}" for problem in found["problems"])
    return "\n".join(lines)


def _join(record: state.ServerRecord | None, address: str | None, stack: contextlib.ExitStack) -> None:
    if address is None:
        if record is None:
            raise ClusterError("no server is running on this machine")
        if record.private:
            environment.join_private(record.token)
        address = record.address
    from raymoe.actors import cluster

    cluster.connect(address)
    stack.callback(cluster.stop_ray)


def _wait_for_end(record: state.ServerRecord) -> None:
    deadline = time.monotonic() + STOP_S
    while record.alive:
        if time.monotonic() > deadline:
            raise ClusterError(f"process {record.pid} did not stop within {STOP_S:g} s; see {record.logs}")
        time.sleep(0.1)
