"""Pages of other origins: nothing for them unless they are named."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from raymoe.api.admission import Admission
from raymoe.api.http import create_app
from raymoe.api.keys import KeyRing, digest_of
from raymoe.config import Settings
from raymoe.errors import ConfigError
from tests.api.scripted import ScriptedBackend, error_of, make_service, run

CHAT = "https://chat.example.org"
ASKS = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-own"}


def call(origins: list[str], method: str, path: str = "/v1/completions", **options: Any) -> httpx.Response:
    service = make_service(ScriptedBackend(), admission=Admission(KeyRing(None, {"a": digest_of("key")})))

    async def one() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(service, origins))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            return await http.request(method, path, **options)

    return run(one())


def cors_headers(response: httpx.Response) -> list[str]:
    return [name for name in response.headers if name.startswith("access-control")]


def test_by_default_no_answer_lets_a_page_in() -> None:
    for method, headers in (("OPTIONS", ASKS), ("POST", {"authorization": "Bearer key"}), ("GET", {})):
        response = call([], method, headers={"origin": CHAT, **headers})
        assert cors_headers(response) == []


def test_a_named_origin_may_ask_and_read_answers_and_refusals() -> None:
    asked = call([CHAT], "OPTIONS", headers={"origin": CHAT, **ASKS})
    assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, CHAT)
    assert asked.headers["access-control-allow-headers"] == "authorization,x-own"
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert "access-control-allow-credentials" not in asked.headers
    for key, status in (("key", 200), ("wrong", 401)):
        headers = {"origin": CHAT, "authorization": f"Bearer {key}"}
        response = call([CHAT], "POST", headers=headers, json={"prompt": "x"})
        assert (response.status_code, response.headers["access-control-allow-origin"]) == (status, CHAT)
        assert "x-request-id" in response.headers["access-control-expose-headers"]
        assert "Origin" in response.headers["vary"]


@pytest.mark.parametrize("origin", ["https://evil.example.org", "null", "http://chat.example.org"])
def test_another_origin_is_refused_in_the_envelope(origin: str) -> None:
    response = call([CHAT], "OPTIONS", headers={"origin": origin, **ASKS})
    assert (response.status_code, error_of(response)["code"]) == (403, "forbidden")
    assert "access-control-allow-origin" not in response.headers
    response = call([CHAT], "GET", "/v1/models", headers={"origin": origin})
    assert "access-control-allow-origin" not in response.headers


def test_a_star_is_all_origins() -> None:
    response = call(["*"], "GET", "/health", headers={"origin": "https://any.example.org"})
    assert response.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("origin", ["chat.example.org", "https://chat.example.org/", "ftp://x", "", "null"])
def test_what_is_no_origin_is_refused_as_a_setting(origin: str) -> None:
    with pytest.raises(ConfigError, match="is no origin"):
        Settings.build({"server": {"cors_origins": [CHAT, origin]}})
