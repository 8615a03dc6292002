"""The options of Serve's gRPC proxy, and what they do in the process that unpickles them."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray.serve._private import default_impl, grpc_util
from ray.serve.config import gRPCOptions

from raymoe.actors import grpc_proxy
from raymoe.actors.grpc_proxy import GrpcOptions, check_serves, grpc_options
from raymoe.api.grpc_methods import add_to_server
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


def test_what_the_proxy_imports_is_light() -> None:
    heavy = "{'torch', 'transformers', 'fastapi'}"
    code = f"import sys, raymoe.api.grpc_methods; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
