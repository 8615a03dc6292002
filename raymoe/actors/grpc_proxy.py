"""Serve's gRPC proxy: where it listens, what it serves, and how large a message may be.

Serve binds its gRPC port on all interfaces, takes messages of 2 GiB and knows no TLS, and has no option for any of
it (Ray 2.60). So the options are of a class of ours, which the proxy unpickles before it opens its port.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import ray
from ray.serve._private import default_impl, grpc_util
from ray.serve.config import gRPCOptions
from ray.serve.context import _get_global_client

from raymoe.config import ServerSettings
from raymoe.errors import ClusterError

SERVICER = "raymoe.api.grpc_methods:add_to_server"
ANSWER_S = 10.0
_bind = default_impl.add_grpc_address


class GrpcOptions(gRPCOptions):
    """Serve's own options, and what it has none for. `tls` are the files of certificate and private key."""

    host: str
    max_message_bytes: int
    tls: tuple[str, str] | None = None

    def __setstate__(self, state: dict[Any, Any]) -> None:
        super().__setstate__(state)
        self.take_effect()

    def take_effect(self) -> None:
        """Make a gRPC server that this process starts from now on keep to them."""
        default_impl.add_grpc_address = self._bind
        grpc_util.DEFAULT_GRPC_SERVER_OPTIONS = [
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", -1),
        ]

    def _bind(self, server: Any, address: str) -> None:
        host = f"[{self.host}]" if ":" in self.host else self.host
        address = address.replace("[::]", host)
        if self.tls is None:
            _bind(server, address)
            return
        cert, key = (Path(file).read_bytes() for file in self.tls)
        server.add_secure_port(address, grpc.ssl_server_credentials([(key, cert)]))


def grpc_options(server: ServerSettings) -> GrpcOptions | None:
    """For `serve.start`; None: no gRPC."""
    if server.grpc_port is None:
        return None
    return GrpcOptions(
        port=server.grpc_port,
        grpc_servicer_functions=[SERVICER],
        enable_reflection=True,
        host=server.host,
        max_message_bytes=server.max_body_bytes,
        tls=(server.tls_cert, server.tls_key) if server.tls_cert and server.tls_key else None,
    )


def check_serves(wanted: GrpcOptions | None) -> None:
    """A Serve that ran before has the options that it was started with; those given now would be ignored.

    Raises:
        ClusterError: it does not serve our gRPC interface on that port.
    """
    if wanted is None:
        return
    found = _running_options()
    if found.port != wanted.port or SERVICER not in found.grpc_servicer_functions:
        raise ClusterError(
            f"Serve runs in this Ray already, and without raymoe's gRPC interface on port {wanted.port}:"
            " leave server.grpc_port away, or end it with `serve shutdown`"
        )


def _running_options() -> gRPCOptions:
    found: gRPCOptions = ray.get(_get_global_client()._controller.get_grpc_config.remote(), timeout=ANSWER_S)
    return found
