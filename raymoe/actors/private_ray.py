"""A Ray of this process alone: started, watched, and ended with everything that belongs to it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial

import psutil
import ray
from ray._private import services

from raymoe.actors import cluster, state
from raymoe.errors import ClusterError

OBJECT_STORE_BYTES = 80 << 20
"""Little goes through Ray's object store; the lanes have memory of their own."""
LOOK_S = 0.5
CHILDREN_S = 10.0


def start(cpus: float) -> cluster.Ray:
    """Start a Ray for this process alone, with `cpus` logical CPUs. `environment.set_private` comes first.

    Raises:
        ClusterError: Ray did not start.
    """
    with _own_session():
        return cluster.join(
            True,
            num_cpus=cpus,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            # Even with RAY_ADDRESS in the environment: its value was looked at before.
            address="local",
        )


@contextlib.contextmanager
def _own_session() -> Iterator[None]:
    """Ray's processes start in sessions of their own, so that a signal to our process group is ours alone.

    Else they die of it before the application has been taken away.
    """
    popen = services.ConsolePopen
    services.ConsolePopen = partial(popen, start_new_session=True)
    try:
        yield
    finally:
        services.ConsolePopen = popen


def lives() -> bool:
    """Whether its control service and its node's manager, children of this process, still run."""
    return {"gcs_server", "raylet"} <= set(_living_children())


def _living_children() -> Iterator[str]:
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE:
                yield child.name()


def check_lives(logs: str) -> None:
    """Raises ClusterError once it has ended; its logs are in the folder `logs`."""
    if not lives():
        raise ClusterError(f"the private Ray has ended (out of memory, or killed?); its logs: {logs}")


def attempt(call: Callable[[], None], logs: str) -> None:
    """Make a call of Ray's in a thread, while this one looks whether Ray lives, and takes signals.

    Such calls have no deadline, and where Ray has died they wait for a minute or for ever.

    Raises:
        ClusterError: Ray has ended; else what `call` raises.
    """
    failures: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
            failures.append(error)

    thread = threading.Thread(target=run, name="private-ray", daemon=True)
    thread.start()
    while thread.is_alive():
        check_lives(logs)
        thread.join(LOOK_S)
    if failures:
        check_lives(logs)
        raise failures[0]


def end(logs: str | None) -> None:
    """End it, and then whatever process of it is left, by number. `logs` is its folder, if that is known."""
    # Both, since children of processes that have ended are no longer ours, and the first may have no log yet.
    ours = {*state.children(), *(state.processes_of(logs) if logs else ())} - {state.this_process()}
    if lives():
        ray.shutdown()
        state.end_processes(ours, patience_s=CHILDREN_S)
    else:
        state.end_processes(ours)
        ray.shutdown()
