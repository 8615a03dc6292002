"""One server from start to end, as the command line runs it: Ray, Serve, application, and nothing left."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import httpx

from raymoe.actors import cluster, private_ray, signals, state
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


@contextlib.contextmanager
def running(spec: Spec, address: str | None, token: str, say: Say) -> Iterator[state.ServerRecord]:
    """Serve while the context is open. `address` is a Ray cluster's, None starts a private Ray.

    Raises:
        ClusterError: says which part did not start, or what is still there afterwards.
        StopServer: a signal came, at any time.
    """
    server = spec.settings.server
    logs = None
    try:
        say("starting Ray" if address is None else f"joining Ray at {address}")
        ray = private_ray.start(_cpus(spec.settings)) if address is None else cluster.connect(address)
        cluster.check_unused(server.app, ray.address)
        # Ray has put its own handler in place, which would leave our actors behind.
        signals.catch()
        logs = ray.logs
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
            grpc_port=server.grpc_port,
            token=token,
        )
        record.write()
        try:
            say(f"loading {spec.model_name} into a router and {spec.settings.groups.count} expert groups")
            with _loading(spec):
                deploy = partial(cluster.deploy, application(spec), server)
                private_ray.attempt(deploy, ray.logs) if record.private else deploy()
            _wait_ready(record)
            yield record
        finally:
            signals.ignore()
            say("stopping")
            try:
                _remove(record)
            finally:
                record.remove()
    finally:
        signals.ignore()
        if address is None:
            private_ray.end(logs)
        else:
            cluster.stop_ray()


def wait_for_end(record: state.ServerRecord) -> None:
    """Sleep until a signal raises StopServer.

    Raises:
        ClusterError: the private Ray has ended. Whoever started this server may start it again.
    """
    while True:
        if record.private:
            private_ray.check_lives(record.logs)
        time.sleep(private_ray.LOOK_S)


def _remove(record: state.ServerRecord) -> None:
    """Take the application away. A private Ray may have died, or be dying.

    Service managers send SIGTERM to every process of a service, Ray's own included.
    """
    remove = partial(cluster.remove, record.app)
    if not record.private:
        remove()
        return
    try:
        private_ray.attempt(remove, record.logs)
    except ClusterError:
        # Without a living Ray nothing is left to be removed but its processes.
        if private_ray.lives():
            raise


def _cpus(settings: Settings) -> float:
    """Logical CPUs for Ray: all that are reserved, and one to spare. They limit nothing."""
    groups, router = settings.groups, settings.router
    reserved = groups.count * groups.cpus + router.replicas * router.cpus
    return max(os.cpu_count() or 1, math.ceil(reserved) + 1)


def _wait_ready(record: state.ServerRecord) -> None:
    deadline = time.monotonic() + READY_S
    reason = "no answer"
    while time.monotonic() < deadline:
        if record.private:
            private_ray.check_lives(record.logs)
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
    return record.url


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
