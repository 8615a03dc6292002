"""One server from start to end, as the command line runs it: Ray, Serve, application, and nothing left."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import httpx

from raymoe.actors import cluster, state
from raymoe.actors.app import application
from raymoe.actors.link import controller_status
from raymoe.actors.spec import Spec
from raymoe.actors.tls import trust
from raymoe.config import Settings
from raymoe.errors import ClusterError
from raymoe.observe.progress import ByteProgress

Say = Callable[[str], None]

READY_S = 120.0
"""After the application runs, until it says that it is ready."""
CHILDREN_S = 10.0


class StopServer(BaseException):
    """A signal asked for the end. No Exception, so that no handler on the way takes it for a failure."""


@contextlib.contextmanager
def running(spec: Spec, address: str | None, token: str, say: Say) -> Iterator[state.ServerRecord]:
    """Serve while the context is open. `address` is a Ray cluster's, None starts a private Ray.

    Raises:
        ClusterError: says which part did not start, or what is still there afterwards.
        StopServer: SIGINT or SIGTERM came, at any time.
    """
    server = spec.settings.server
    _catch_signals()
    try:
        say("starting Ray" if address is None else f"joining Ray at {address}")
        ray = cluster.start_private(_cpus(spec.settings)) if address is None else cluster.connect(address)
        cluster.check_unused(server.app, ray.address)
        # Ray has put its own handler in place, which would leave our actors behind.
        _catch_signals()
        pid, born = state.this_process()
        record = state.ServerRecord(
            app=server.app,
            pid=pid,
            born=born,
            address=ray.address,
            private=ray.private,
            host=server.host,
            port=server.port,
            model=spec.model_name,
            logs=ray.logs,
            tls_cert=server.tls_cert,
            token=token,
        )
        record.write()
        try:
            say(f"loading {spec.model_name} into a router and {spec.settings.groups.count} expert groups")
            with _loading(spec):
                cluster.deploy(application(spec), server)
            _wait_ready(record)
            yield record
        finally:
            _ignore_signals()
            say("stopping")
            try:
                cluster.remove(server.app)
            finally:
                record.remove()
    finally:
        _ignore_signals()
        ours = state.children()
        cluster.stop_ray()
        if address is None:
            state.end_processes(ours, patience_s=CHILDREN_S)


def wait_for_signal() -> None:
    """Sleep until SIGINT or SIGTERM raises StopServer."""
    while True:
        signal.pause()


def _cpus(settings: Settings) -> float:
    """Logical CPUs for Ray: all that are reserved, and one to spare. They limit nothing."""
    groups, router = settings.groups, settings.router
    reserved = groups.count * groups.cpus + router.replicas * router.cpus
    return max(os.cpu_count() or 1, math.ceil(reserved) + 1)


def _wait_ready(record: state.ServerRecord) -> None:
    deadline = time.monotonic() + READY_S
    reason = "no answer"
    while time.monotonic() < deadline:
        try:
            response = httpx.get(url(record) + "/ready", timeout=10, verify=trust(record.tls_cert))
            if response.status_code == 200:
                return
            reason = response.text
        except httpx.HTTPError as error:
            reason = str(error)
        time.sleep(0.2)
    raise ClusterError(f"the server is not ready after {READY_S:g} s: {reason}")


def url(record: state.ServerRecord) -> str:
    """Where clients on this machine reach the server."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(record.host, record.host)
    return f"{record.scheme}://{host}:{record.port}"


@contextlib.contextmanager
def _loading(spec: Spec) -> Iterator[None]:
    """A progress bar of what the expert groups have read so far."""
    done = threading.Event()

    def follow(bar: ByteProgress) -> None:
        while not done.wait(0.5):
            status = controller_status(spec.app)
            if status is not None:
                read = sum(group["stats"].get("loaded_bytes", 0) for group in status["groups"])
                bar.advance(max(0, read - bar.done))

    with ByteProgress("experts", spec.expert_bytes) as bar:
        thread = threading.Thread(target=follow, args=(bar,), name="loading-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join(timeout=15)


def _catch_signals() -> None:
    def stop(number: int, _frame: object) -> None:
        raise StopServer(signal.Signals(number).name)

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)


def _ignore_signals() -> None:
    """Stopping has deadlines of its own, and half of it would leave processes behind."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
