"""Ports, looked at before anything is started."""

from __future__ import annotations

import socket

from raymoe.actors import state
from raymoe.config import Settings
from raymoe.errors import ClusterError

CONNECT_S = 5.0


def check_free(settings: Settings, private: bool) -> None:
    """Refuse before anything is loaded when the application's name or, for a private Ray, the port is taken.

    A cluster's Serve may listen on the port already, and rightly.

    Raises:
        ClusterError: says by what.
    """
    server = settings.server
    other = state.read(server.app)
    if other is not None and other.alive:
        raise ClusterError(
            f"{server.app} is running already (process {other.pid}, {other.scheme}://{other.host}:{other.port}):"
            " stop it with `raymoe down`, or set server.app to another name"
        )
    if other is not None and other.private:
        # It was killed; what it left may hold the port.
        state.remove_left_over(other)
    if not private:
        return
    _check_port(server.host, server.port, "--port")
    if server.grpc_port is not None:
        _check_port(server.host, server.grpc_port, "--grpc-port")


def _check_port(host: str, port: int, option: str) -> None:
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ClusterError(f"server.host {host} is no address to listen on: {error.strerror}") from None
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(where)
        except OSError as error:
            raise ClusterError(
                f"port {port} on {host} can't be used ({error.strerror}): choose another ({option})"
            ) from None


def free_port(host: str) -> int:
    """A port that nothing listens on at the moment."""
    with socket.create_server((host, 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


def check_answers(address: str) -> None:
    """Refuse a Ray address where nothing listens; Ray itself would try for minutes.

    Raises:
        ClusterError: names the address.
    """
    host, colon, port = address.rpartition(":")
    # "auto", and other schemes that Ray resolves by itself.
    if not colon or not port.isdecimal() or "/" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except OSError as error:
        raise ClusterError(f"no Ray answers at {address}: {error.strerror or error}") from None
