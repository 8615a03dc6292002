"""TLS files before anything is started, and which server our own calls trust."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest

from raymoe.actors.tls import check_tls, trust
from raymoe.config import ServerSettings, Settings
from raymoe.errors import ConfigError
from tests.certificate import make_certificate


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pairs, and a key with a passphrase."""
    folder = tmp_path_factory.mktemp("tls")
    make_certificate(folder / "a.pem", folder / "a.key")
    make_certificate(folder / "b.pem", folder / "b.key", passphrase=b"secret")
    return folder


def settings(cert: Path | None, key: Path | None, **more: int) -> ServerSettings:
    given = {"tls_cert": cert and str(cert), "tls_key": key and str(key), **more}
    return Settings.build({"server": given}).server


def test_a_pair_is_accepted_and_none_too(files: Path) -> None:
    check_tls(settings(files / "a.pem", files / "a.key"))
    check_tls(settings(None, None))


@pytest.mark.parametrize(
    ("cert", "key", "text"),
    [
        ("a.pem", None, "belong together; only server.tls_cert is set"),
        (None, "a.key", "belong together; only server.tls_key is set"),
        ("absent", "a.key", r"server.tls_cert: .*absent can't be read: No such file"),
        ("a.pem", ".", r"server.tls_key: .* can't be read: Is a directory"),
        ("a.pem", "b.pem", "no PEM certificate with its private key"),
        ("a.key", "a.key", "no PEM certificate with its private key"),
        ("b.pem", "b.key", "passphrase: it has one"),
    ],
)
def test_anything_else_is_refused(files: Path, cert: str | None, key: str | None, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_tls(settings(cert and files / cert, key and files / key))


def test_a_key_of_another_certificate_is_refused(files: Path, tmp_path: Path) -> None:
    make_certificate(tmp_path / "c.pem", tmp_path / "c.key")
    with pytest.raises(ConfigError, match="KEY_VALUES_MISMATCH"):
        check_tls(settings(files / "a.pem", tmp_path / "c.key"))


class Ok(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def https_server(files: Path) -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Ok) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files / "a.pem", files / "a.key")
        server.socket = context.wrap_socket(server.socket, server_side=True)
        # A refused handshake is an OSError in accept, which serve_forever passes over.
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"https://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_our_own_calls_trust_this_very_certificate_and_no_other(files: Path, tmp_path: Path) -> None:
    make_certificate(tmp_path / "c.pem", tmp_path / "c.key")
    with https_server(files) as url:
        assert httpx.get(url, verify=trust(str(files / "a.pem"))).text == "ok"
        for other in (trust(str(tmp_path / "c.pem")), trust(None)):
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                httpx.get(url, verify=other)
