"""Serve's gRPC proxy: where it listens, what it serves, how large a message may be, and clients that leave.

Serve binds its gRPC port on all interfaces, takes messages of 2 GiB and knows no TLS, and has no option for any of
it (Ray 2.60). So the options are of a class of ours, which the proxy unpickles before it opens its port.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import grpc
import ray
from ray.serve._private import default_impl, grpc_util
from ray.serve._private.proxy_request_response import gRPCStreamingType
from ray.serve.config import gRPCOptions
from ray.serve.context import _get_global_client

from raymoe.api import grpc_methods
from raymoe.config import ServerSettings
from raymoe.errors import ClusterError

SERVICER = "raymoe.actors.grpc_proxy:add_to_server"
ANSWER_S = 10.0

Handler = Callable[[Any, Any], Any]
_END = object()
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


def add_to_server(servicer: Any, server: Any) -> None:
    """Add our methods to Serve's gRPC server. This is the function that `grpc_servicer_functions` names."""
    make_handler = server.service_handler_factory

    def make(service_method: str, streaming_type: gRPCStreamingType) -> Handler:
        handler: Handler = make_handler(service_method=service_method, streaming_type=streaming_type)
        return read_ahead(handler) if streaming_type is gRPCStreamingType.UNARY_STREAM else handler

    server.service_handler_factory = make
    try:
        grpc_methods.add_to_server(servicer, server)
    finally:
        # Of the services that others add.
        server.service_handler_factory = make_handler


def read_ahead(handler: Handler) -> Handler:
    """The handler of a stream, read by a task of its own, which a client that leaves always finds waiting.

    Serve's handler cancels the call of the ingress when it is cancelled while it waits for the next message. But
    if a client leaves while a message is being sent, the handler is only dropped, and the ingress goes on to the
    end of its answer (Ray 2.60; 6 of 40 streams that were left at random). What is read ahead is no more than
    what Serve would hold anyway.
    """

    async def stream(request: Any, context: Any) -> AsyncGenerator[Any, None]:
        messages: asyncio.Queue[Any] = asyncio.Queue()
        apart = _ContextApart(context)

        async def read() -> None:
            try:
                async for message in handler(request, apart):
                    messages.put_nowait(message)
            finally:
                messages.put_nowait(_END)

        task = asyncio.create_task(read())
        # However the call ends: nobody may close this generator.
        context.add_done_callback(lambda _: task.cancel())
        try:
            while (message := await messages.get()) is not _END:
                yield message
            await task
            apart.apply(context)
        finally:
            task.cancel()

    return stream


class _ContextApart:
    """A call's context for a task that may outlive the call: then the real one can't be touched without a crash."""

    def __init__(self, context: Any) -> None:
        self._said = {
            name: getattr(context, name)()
            for name in (
                "auth_context",
                "invocation_metadata",
                "peer",
                "peer_identities",
                "peer_identity_key",
            )
        }
        self._told: dict[str, Any] = {
            name: getattr(context, name)() for name in ("code", "details", "trailing_metadata")
        }

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in self._said:
            return lambda: self._said[name]
        if name in self._told:
            return lambda: self._told[name]
        if name.startswith("set_"):
            return lambda value: self._told.update({name.removeprefix("set_"): value})
        raise AttributeError(name)

    def apply(self, context: Any) -> None:
        """Tell the call itself, while it lasts, what was set."""
        for name, value in self._told.items():
            if value:
                getattr(context, f"set_{name}")(value)


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
