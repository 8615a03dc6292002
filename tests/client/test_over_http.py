"""Answers over HTTP that no raymoe gives, and streams that break off."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from raymoe.client.over_http import AsyncHttpTransport, HttpTransport, Server, answer_of
from raymoe.errors import NoAnswerError

SERVER = Server("http://test", {"authorization": "Bearer k"})
PIECE = b'data: {"choices": [{"text": "a"}]}\n\n'


def handler(body: bytes) -> httpx.MockTransport:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer k"
        return httpx.Response(200, content=body)

    return httpx.MockTransport(answer)


def pieces(body: bytes) -> list[object]:
    """Those that come before the stream ends or fails, by the sync transport and by the other one."""
    transport = HttpTransport(SERVER)
    transport._http = httpx.Client(**SERVER.options(), transport=handler(body))
    found = list(transport.stream("Generate", {}, {}, 5))

    async def again() -> list[object]:
        other = AsyncHttpTransport(SERVER)
        other._http = httpx.AsyncClient(**SERVER.options(), transport=handler(body))
        return [piece async for piece in other.stream("Generate", {}, {}, 5)]

    assert asyncio.run(again()) == found
    return list(found)


def test_comments_and_other_fields_of_events_are_passed_over() -> None:
    assert pieces(b": ping\n\nevent: x\nid: 1\n" + PIECE + b"data: [DONE]\n\n") == [
        {"choices": [{"text": "a"}]}
    ]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (PIECE, "broke off"),
        (b"", "broke off"),
        (b"data: {\n\n", "not JSON"),
        (b"data: []\n\n", "not JSON"),
        (b'data: {"error": "x"}\n\n', "as no raymoe would"),
    ],
)
def test_a_stream_that_breaks_off_or_is_none_is_no_answer(body: bytes, text: str) -> None:
    with pytest.raises(NoAnswerError, match=text):
        pieces(body)


@pytest.mark.parametrize(
    ("status", "body"), [(200, "<html>"), (502, "<html>"), (200, "[]"), (500, '{"error": "x"}')]
)
def test_whoever_answers_otherwise_is_no_server_of_ours(status: int, body: str) -> None:
    request = httpx.Request("GET", "http://test/v1/models")
    with pytest.raises(NoAnswerError, match=f"http://test/v1/models answered {status}"):
        answer_of(httpx.Response(status, text=body, request=request))


def test_the_environments_proxies_are_left_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.invalid:1")
    transport = HttpTransport(SERVER)
    assert not transport._http._mounts
    transport.close()
