"""Ray and Serve as raymoe uses them: started or joined, the application deployed and taken away again."""

from __future__ import annotations

import contextlib
import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.exceptions import GetTimeoutError, RayError
from ray.serve.context import _get_global_client

from raymoe.actors.expert_group import living_groups, remove_group
from raymoe.actors.grpc_proxy import check_serves, grpc_options
from raymoe.actors.link import find_controller
from raymoe.actors.ports import check_answers
from raymoe.actors.spec import NAMESPACE
from raymoe.config import ServerSettings
from raymoe.errors import ClusterError

if TYPE_CHECKING:
    from ray.serve import Application

SHUTDOWN_S = 30.0


@dataclass(frozen=True)
class Ray:
    """The Ray that this process is connected to. `private` means that it ends with this process."""

    address: str
    private: bool
    logs: str


def connect(address: str) -> Ray:
    """Join the Ray at `address` (host:port, or "auto").

    Raises:
        ClusterError: nothing answers there, or another version of Ray or Python does.
    """
    check_answers(address)
    return join(False, address=address)


def join(private: bool, **options: Any) -> Ray:
    """`ray.init` with these options, its failures as ClusterError."""
    what = "a private Ray" if private else f"Ray at {options['address']}"
    try:
        # Without Ray's own lines: what concerns the operator is said by raymoe.
        context = ray.init(namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR, **options)
    except Exception as error:  # a node that starts too slowly is a bare Exception to Ray
        text = " ".join(str(error).split())
        if "ersion mismatch" in text:
            raise ClusterError(
                f"{what} runs another version than this one ({_versions()}): {text}"
            ) from error
        raise ClusterError(f"{what} can't be {'started' if private else 'reached'}: {text[:500]}") from error
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    return Ray(context.address_info["address"], private, f"{context.address_info['session_dir']}/logs")


def _versions() -> str:
    import platform

    return f"Ray {ray.__version__}, Python {platform.python_version()}"


def check_unused(app: str, address: str) -> None:
    """Refuse when the application runs in this Ray already, lest one server replaces and removes another's.

    Raises:
        ClusterError: says how to stop it.
    """
    if find_controller(app) is not None:
        raise ClusterError(
            f"{app} runs in Ray at {address} already: stop it with `raymoe down --app {app} --address {address}`,"
            " or set server.app to another name"
        )


def deploy(application: Application, server: ServerSettings) -> None:
    """Start Serve where it doesn't run yet, and the application on it; returns once it is running.

    Raises:
        ClusterError: names what failed to start.
    """
    try:
        grpc = grpc_options(server)
        serve.start(http_options=_http_options(server), grpc_options=grpc)
        _check_listening(server)
        check_serves(grpc)
        serve.run(application, name=server.app, route_prefix="/", logging_config={"enable_access_log": False})
    except (RuntimeError, RayError, ValueError) as error:
        reason = _reason(server.app) or error
        raise ClusterError(f"the application {server.app} did not start: {reason}") from error


def _http_options(server: ServerSettings) -> dict[str, Any]:
    return {
        "host": server.host,
        "port": server.port,
        "ssl_certfile": server.tls_cert,
        "ssl_keyfile": server.tls_key,
    }


def _check_listening(server: ServerSettings) -> None:
    """A Serve that ran before listens as it was told then; what is given now would be ignored."""
    listening = _get_global_client().http_config
    if (listening.ssl_certfile, listening.ssl_keyfile) != (server.tls_cert, server.tls_key):
        raise ClusterError(
            f"Serve runs in this Ray already, with {listening.ssl_certfile or 'no certificate'}:"
            " set server.tls_cert and server.tls_key as they are there, or end it with `serve shutdown`"
        )
    if (listening.host, listening.port) != (server.host, server.port):
        raise ClusterError(
            f"Serve listens on {listening.host}:{listening.port} in this Ray already:"
            f" use --host {listening.host} --port {listening.port}, or end it with `serve shutdown`"
        )


def _reason(app: str) -> str:
    """Why Serve's deployments failed: the last line of each traceback that Serve keeps."""
    with contextlib.suppress(RayError, RuntimeError):
        found = serve.status().applications.get(app)
        if found is not None:
            return "; ".join(
                f"{name}: {_last_line(deployment.message)}"
                for name, deployment in found.deployments.items()
                if deployment.message
            )
    return ""


def _last_line(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return re.sub(r"^[\w.]+\.(\w+Error: )", r"\1", lines[-1])


def remove(app: str) -> None:
    """Take the application away: its Serve deployments, controller and groups. Serve itself stays.

    Raises:
        ClusterError: names what is still there.
    """
    with contextlib.suppress(RayError, RuntimeError):
        serve.delete(app)
    controller = find_controller(app)
    if controller is not None:
        with contextlib.suppress(RayError, GetTimeoutError):
            ray.get(controller.shutdown.remote(), timeout=SHUTDOWN_S)
        ray.kill(controller)
    for name in living_groups(app):
        remove_group(str(name))
    left = living_groups(app)
    if left:
        raise ClusterError(f"still there: {', '.join(map(str, left))}")


def stop_ray() -> None:
    """Leave Ray; a private one ends. Idempotent."""
    ray.shutdown()
