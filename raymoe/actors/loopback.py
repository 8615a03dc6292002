"""Keeps Serve's replicas on loopback: their port for calls from other deployments takes pickles from anyone.

Serve binds it to all interfaces and has no option for that (Ray 2.60), so the one function that binds it is
wrapped, in the replica's own process and before the port is opened.
"""

from __future__ import annotations

import logging

from raymoe.actors import environment

log = logging.getLogger(__name__)


def keep_replica_on_loopback() -> None:
    """Call it in a deployment's constructor. Does nothing where Ray itself listens beyond loopback."""
    if not environment.is_loopback():
        return
    from ray.serve._private import replica

    bind = getattr(replica, "add_port_to_grpc_server", None)
    if bind is None:
        log.warning(
            "this Ray's replicas can't be kept on loopback: their gRPC port listens on all interfaces"
        )
        return

    def bind_loopback(server: object, address: str) -> object:
        return bind(server, address.replace("[::]", "127.0.0.1"))

    replica.add_port_to_grpc_server = bind_loopback
