"""The options of Serve's gRPC proxy, and what they do in the process that unpickles them."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
from ray.serve._private import default_impl, grpc_util
from ray.serve._private.proxy_request_response import gRPCStreamingType
from ray.serve.config import gRPCOptions

from raymoe.actors import grpc_proxy
from raymoe.actors.grpc_proxy import GrpcOptions, add_to_server, check_serves, grpc_options, read_ahead
from raymoe.api.grpc_methods import METHODS
from raymoe.config import ServerSettings
from raymoe.errors import ClusterError
from tests.certificate import make_certificate


@pytest.fixture(autouse=True)
def serve_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_impl, "add_grpc_address", default_impl.add_grpc_address)
    monkeypatch.setattr(grpc_util, "DEFAULT_GRPC_SERVER_OPTIONS", grpc_util.DEFAULT_GRPC_SERVER_OPTIONS)


class Server:
    """Where a gRPC server was told to listen."""

    def __init__(self) -> None:
        self.insecure: list[str] = []
        self.secure: list[str] = []

    def add_insecure_port(self, address: str) -> None:
        self.insecure.append(address)

    def add_secure_port(self, address: str, credentials: Any) -> None:
        self.secure.append(address)


def unpickled(**settings: Any) -> GrpcOptions:
    options = grpc_options(ServerSettings(grpc_port=9000, **settings))
    copy = pickle.loads(pickle.dumps(options))
    assert isinstance(copy, GrpcOptions)
    return copy


def bound() -> Server:
    server = Server()
    default_impl.add_grpc_address(server, "[::]:9000")  # type: ignore[arg-type]
    return server


def test_without_a_port_there_is_no_grpc() -> None:
    assert grpc_options(ServerSettings()) is None


def test_serve_finds_our_methods_in_the_options() -> None:
    options = unpickled()
    assert options.grpc_servicer_func_callable == [add_to_server]
    assert options.port == 9000 and options.enable_reflection


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "127.0.0.1:9000"),
        ("0.0.0.0", "0.0.0.0:9000"),
        ("::1", "[::1]:9000"),
        ("::", "[::]:9000"),
    ],
)
def test_the_proxy_listens_where_http_does(host: str, address: str) -> None:
    unpickled(host=host)
    server = bound()
    assert (server.insecure, server.secure) == ([address], [])


def test_messages_are_limited_as_bodies_are() -> None:
    unpickled(max_body_bytes=5000)
    assert dict(grpc_util.DEFAULT_GRPC_SERVER_OPTIONS)["grpc.max_receive_message_length"] == 5000


def test_with_tls_there_is_no_port_without(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    make_certificate(cert, key)
    unpickled(tls_cert=str(cert), tls_key=str(key))
    server = bound()
    assert (server.insecure, server.secure) == ([], ["127.0.0.1:9000"])


def test_a_serve_that_runs_without_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = grpc_options(ServerSettings(grpc_port=9000))
    ours = [grpc_proxy.SERVICER]
    for running in (gRPCOptions(port=9000), gRPCOptions(port=9001, grpc_servicer_functions=ours)):
        monkeypatch.setattr(grpc_proxy, "_running_options", lambda running=running: running)
        with pytest.raises(ClusterError, match="on port 9000"):
            check_serves(wanted)
        check_serves(None)
    monkeypatch.setattr(
        grpc_proxy, "_running_options", lambda: gRPCOptions(port=9000, grpc_servicer_functions=ours)
    )
    check_serves(wanted)


def proxied(handler: Any) -> grpc.aio.Server:
    """A gRPC server whose stream `/test/Stream` has this handler, read ahead."""
    server = grpc.aio.server()
    handlers = {"Stream": grpc.unary_stream_rpc_method_handler(read_ahead(handler))}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    return server


async def called(handler: Any, client: Callable[[Any], Awaitable[None]]) -> None:
    """Have the client call that stream."""
    server = proxied(handler)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with asyncio.timeout(30), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await client(channel.unary_stream("/test/Stream")(b""))
    await server.stop(0)


@pytest.mark.parametrize("size", [1, 1 << 20], ids=["while it waits", "while a message is being sent"])
def test_a_client_that_leaves_cancels_the_handler_where_it_waits(size: int) -> None:
    cancelled = asyncio.Event()

    async def handler(request: bytes, context: Any) -> AsyncIterator[bytes]:
        peer = context.peer()
        yield b"x" * size
        yield b"x" * size
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            # The call is gone by now; Serve's handler still looks at its context.
            assert context.peer() == peer
            context.set_code(grpc.StatusCode.CANCELLED)
            cancelled.set()
            raise

    async def client(call: Any) -> None:
        # Large messages fill the window: the server is sending the second one when the client leaves.
        assert len(await call.read()) == size
        call.cancel()
        await cancelled.wait()

    asyncio.run(called(handler, client))


def test_a_stream_ends_as_its_handler_does() -> None:
    async def handler(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"1"
        context.set_code(grpc.StatusCode.NOT_FOUND)
        context.set_details("gone")
        yield b"2"

    async def broken(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"1"
        raise KeyError("x")

    async def client(call: Any) -> None:
        assert [await call.read(), await call.read()] == [b"1", b"2"]
        assert (await call.code(), await call.details()) == (grpc.StatusCode.NOT_FOUND, "gone")

    async def other(call: Any) -> None:
        assert await call.read() == b"1"
        assert await call.code() is grpc.StatusCode.UNKNOWN

    asyncio.run(called(handler, client))
    asyncio.run(called(broken, other))


def test_only_streams_are_read_ahead_and_others_services_stay_as_they_are() -> None:
    class ServeServer:
        def __init__(self) -> None:
            self.service_handler_factory = self.plain
            self.added: dict[str, Any] = {}

        def plain(self, service_method: str, streaming_type: gRPCStreamingType) -> str:
            return "plain"

        def add_generic_rpc_handlers(self, handlers: Any) -> None:
            for name, handler in handlers[0]._method_handlers.items():
                kind = (
                    gRPCStreamingType.UNARY_STREAM
                    if handler.response_streaming
                    else gRPCStreamingType.UNARY_UNARY
                )
                self.added[name] = self.service_handler_factory(service_method=name, streaming_type=kind)

    server = ServeServer()
    add_to_server(Mock(), server)
    assert {name.split("/")[2] for name, handler in server.added.items() if handler != "plain"} == {
        name for name, method in METHODS.items() if method.streams
    }
    assert server.service_handler_factory == server.plain


def test_what_the_proxy_imports_is_light() -> None:
    heavy = "{'torch', 'transformers', 'fastapi'}"
    code = f"import sys, raymoe.api.grpc_methods; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
