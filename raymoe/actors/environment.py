"""Environment that Ray reads when it is imported. Nothing here imports Ray: call it before anything does."""

from __future__ import annotations

import os
import secrets
import sys

from raymoe.errors import ClusterError

LOOPBACK = {
    # Ray's switch for machines without a cluster: with it all its parts listen on 127.0.0.1 only.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # No report to Ray's authors.
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's announcement of a changed default, which does not concern us.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # A call after the end must not start another Ray.
    "RAY_ENABLE_AUTO_CONNECT": "0",
    # An engine process must not outlive its router's worker.
    "RAY_kill_child_processes_on_worker_exit": "1",
}


def set_private() -> str:
    """Settings of a private, local Ray: loopback only, behind a token of its own. Returns the token.

    Raises:
        ClusterError: Ray was imported before, so it has read its environment already.
    """
    if "ray" in sys.modules:
        raise ClusterError("a private Ray can't be started in a process that has imported ray already")
    token = secrets.token_hex(32)
    join_private(token)
    return token


def join_private(token: str) -> None:
    """Settings for joining the private Ray of another process of this user."""
    os.environ.update(LOOPBACK | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token})


def is_loopback() -> bool:
    """Whether this process belongs to a Ray that listens on loopback only."""
    return os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER") == "0"
