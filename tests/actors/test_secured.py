"""A server with TLS, keys, limits and short queues, as clients on the network meet it."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from raymoe.actors.ports import free_port
from raymoe.actors.tls import trust
from raymoe.api.keys import new_key
from raymoe.client import Client
from raymoe.errors import NoAnswerError
from raymoe.v1 import inference_pb2 as v1
from tests.api.grpc_server import method
from tests.certificate import make_certificate
from tests.server_process import RAYMOE, Server, left_over
from tests.tiny import tiny_checkpoint

pytestmark = pytest.mark.server


class Secured:
    """The server, and clients of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cert = folder, folder / "cert.pem"
        make_certificate(self.cert, folder / "key.pem")
        self.file = folder / "keys"
        self.file.touch(0o600)
        self.keys = {label: new_key(label) for label in ("alice", "bob")}
        self.write_keys(*self.keys)
        port = free_port("127.0.0.1")
        settings = {
            # As its own working directory would have it.
            "server.keys_file": "keys",
            "server.tls_cert": "cert.pem",
            "server.tls_key": "key.pem",
            "server.grpc_port": free_port("127.0.0.1"),
            "router.max_sequences": 1,
            "router.max_waiting": 1,
        }
        command = [*RAYMOE, "serve", str(tiny_checkpoint("olmoe", folder / "tiny")), "--port", str(port)]
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        self.server = Server(folder, command, port, cwd=folder, scheme="https", verify=trust(str(self.cert)))
        self.http = httpx.Client(base_url=self.server.url, verify=trust(str(self.cert)), timeout=60)

    def write_keys(self, *labels: str) -> None:
        lines = [f"{self.keys[label][1]} requests_per_minute=1000" for label in labels]
        self.file.write_text("\n".join(lines) + "\n")

    def complete(self, label: str, **body: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.keys[label][0]}"}
        body = {"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True, **body}
        return self.http.post("/v1/completions", json=body, headers=headers)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    one = Secured(tmp_path_factory.mktemp("secured"))
    with one.http:
        one.server.wait_ready()
        yield one
        family = one.server.family()
        one.server.stop()
        assert left_over(family) == []


def test_it_answers_over_tls_alone_with_the_certificate_that_it_was_given(secured: Secured) -> None:
    assert secured.http.get("/health").status_code == 200
    plain = secured.server.url.replace("https", "http")
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{plain}/health", timeout=10)
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{secured.server.url}/health", timeout=10)
    by_name = ssl.create_default_context(cafile=secured.cert)
    with pytest.raises(httpx.ConnectError, match="IP address mismatch"):
        httpx.get(f"{secured.server.url}/health", verify=by_name, timeout=10)
    assert secured.server.status()["url"] == secured.server.url
    assert f"listening on {secured.server.url}" in secured.server.log.read_text()


def test_a_key_is_needed_and_ends_when_its_line_is_taken_out(secured: Secured) -> None:
    refused = secured.http.post("/v1/completions", json={"prompt": "x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    answer = secured.complete("bob")
    assert (answer.status_code, answer.headers["x-ratelimit-limit-requests"]) == (200, "1000")
    secured.write_keys("alice")
    assert secured.complete("bob").status_code == 401
    assert secured.complete("alice").status_code == 200
    secured.write_keys("alice", "bob")
    assert secured.complete("bob").status_code == 200


def test_grpc_has_the_same_certificate_and_keys(secured: Secured) -> None:
    url = secured.server.status()["grpc_url"]
    assert url.startswith("grpcs://")
    address = url.removeprefix("grpcs://")
    credentials = grpc.ssl_channel_credentials(secured.cert.read_bytes())
    named = [("grpc.ssl_target_name_override", "raymoe.example.org")]
    with grpc.secure_channel(address, credentials, named) as channel:
        models = method(channel, "ListModels")
        key = [("authorization", f"Bearer {secured.keys['alice'][0]}")]
        assert len(models(v1.ListModelsRequest(), metadata=key, timeout=60).data) == 1
        with pytest.raises(grpc.RpcError) as caught:
            models(v1.ListModelsRequest(), timeout=60)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    for other in (f"grpc://{address}", url):
        # Without TLS; and with it, but the certificate is another name's.
        with Client(other, ca_file=str(secured.cert), timeout_s=60) as client, pytest.raises(NoAnswerError):
            client.models()


@pytest.mark.parametrize("stream", [False, True])
def test_overload_is_429_with_retry_after_and_one_answer_each_and_passes(
    secured: Secured, stream: bool
) -> None:
    with ThreadPoolExecutor(10) as pool:
        asked = [pool.submit(secured.complete, "alice", max_tokens=100, stream=stream) for _ in range(10)]
        answers = [one.result() for one in asked]
    good = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code != 200]
    # One runs and one waits at any time.
    assert good and refused
    for answer in refused:
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert answer.json()["error"]["code"] == "overloaded"
    for answer in good:
        assert not stream or answer.text.count("[DONE]") == 1
    assert secured.complete("alice").status_code == 200
