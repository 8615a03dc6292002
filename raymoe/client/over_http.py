"""Requests over HTTP."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from raymoe.client.failures import failure
from raymoe.errors import DeadlineError, NoAnswerError, RaymoeError, RequestError

Body = dict[str, Any]

PATHS = {
    "Generate": ("POST", "/v1/completions"),
    "Chat": ("POST", "/v1/chat/completions"),
    "Tokenize": ("POST", "/tokenize"),
    "Detokenize": ("POST", "/detokenize"),
    "ListModels": ("GET", "/v1/models"),
}
"""By the name of the gRPC method that does the same."""
CONNECT_S = 10.0


@dataclass(frozen=True)
class Server:
    """Where requests go and what goes with each: base URL, headers, and who vouches for its certificate."""

    url: str
    headers: Mapping[str, str]
    ca_file: str | None = None

    def options(self) -> dict[str, Any]:
        """Of an httpx client. The environment's proxies and credentials are left aside: the URL is enough."""
        options: dict[str, Any] = {"base_url": self.url, "headers": dict(self.headers), "trust_env": False}
        if self.ca_file is not None:
            options["verify"] = context = ssl.create_default_context(cafile=self.ca_file)
            # The file may hold the server's own certificate, and no root.
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        return options


def request_of(
    name: str, body: Body, stream: bool, headers: Mapping[str, str], timeout_s: float
) -> dict[str, Any]:
    """The arguments of one request.

    Raises:
        RequestError: the HTTP interface has nothing of the kind.
    """
    if name not in PATHS:
        raise RequestError(f"{name} is not there over HTTP; use gRPC")
    method, path = PATHS[name]
    if stream:
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    timeout = httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s))
    request: dict[str, Any] = {"method": method, "url": path, "headers": headers, "timeout": timeout}
    return request | ({"json": body} if method == "POST" else {})


def answer_of(response: httpx.Response) -> Body:
    """The body of an answer that has been read.

    Raises:
        RaymoeError: the one that the server answered with; NoAnswerError if no raymoe can have.
    """
    try:
        body = response.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise NoAnswerError(f"{response.url} answered {response.status_code}, and that as no raymoe would")
    if response.status_code >= 400:
        raise _failure(body, response)
    return body


def event_of(line: str, response: httpx.Response) -> Body | None:
    """What a line of a stream says; None if nothing. `{}` is the end.

    Raises:
        RaymoeError: the one that ended the stream.
    """
    if not line.startswith("data: "):
        return None
    data = line.removeprefix("data: ")
    if data == "[DONE]":
        return {}
    try:
        body = json.loads(data)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise NoAnswerError(f"{response.url} streams what is not JSON, or no object")
    if "error" in body:
        raise _failure(body, response)
    return body


def _failure(body: Body, response: httpx.Response) -> RaymoeError:
    error = body.get("error")
    if not isinstance(error, dict):
        return NoAnswerError(f"{response.url} answered {response.status_code}, and that as no raymoe would")
    return failure(
        str(error.get("code")),
        str(error.get("message")),
        error.get("param"),
        response.headers.get("retry-after"),
    )


@contextmanager
def _trouble(server: Server, timeout_s: float) -> Generator[None, None, None]:
    """What goes wrong on the way, as an error of ours."""
    try:
        yield
    except (httpx.TimeoutException, TimeoutError) as error:
        if isinstance(error, httpx.ConnectTimeout):
            raise NoAnswerError(f"nothing answers at {server.url}") from None
        raise DeadlineError(f"{server.url} did not answer within {timeout_s:g} s") from None
    except httpx.HTTPError as error:
        raise NoAnswerError(f"no answer from {server.url}: {error or type(error).__name__}") from None


class HttpTransport:
    """Synchronous requests."""

    def __init__(self, server: Server) -> None:
        self._server, self._http = server, httpx.Client(**server.options())

    def call(self, name: str, body: Body, headers: Mapping[str, str], timeout_s: float) -> Body:
        """One answer."""
        with _trouble(self._server, timeout_s):
            return answer_of(self._http.request(**request_of(name, body, False, headers, timeout_s)))

    def stream(
        self, name: str, body: Body, headers: Mapping[str, str], timeout_s: float
    ) -> Generator[Body, None, None]:
        """An answer in pieces; closing the generator ends the request."""
        deadline = time.monotonic() + timeout_s
        with (
            _trouble(self._server, timeout_s),
            self._http.stream(**request_of(name, body, True, headers, timeout_s)) as response,
        ):
            if response.status_code >= 400:
                response.read()
                answer_of(response)
            for line in response.iter_lines():
                event = event_of(line, response)
                if event == {}:
                    return
                if event is not None:
                    yield event
                if time.monotonic() > deadline:
                    raise TimeoutError
            raise NoAnswerError(f"the stream from {self._server.url} broke off")

    def close(self) -> None:
        """Close all connections."""
        self._http.close()


class AsyncHttpTransport:
    """The same for asyncio."""

    def __init__(self, server: Server) -> None:
        self._server, self._http = server, httpx.AsyncClient(**server.options())

    async def call(self, name: str, body: Body, headers: Mapping[str, str], timeout_s: float) -> Body:
        """One answer."""
        with _trouble(self._server, timeout_s):
            async with asyncio.timeout(timeout_s):
                request = request_of(name, body, False, headers, timeout_s)
                return answer_of(await self._http.request(**request))

    async def stream(
        self, name: str, body: Body, headers: Mapping[str, str], timeout_s: float
    ) -> AsyncGenerator[Body, None]:
        """An answer in pieces; closing the generator ends the request."""
        deadline = time.monotonic() + timeout_s
        with _trouble(self._server, timeout_s):
            async with self._http.stream(**request_of(name, body, True, headers, timeout_s)) as response:
                if response.status_code >= 400:
                    await response.aread()
                    answer_of(response)
                async for line in response.aiter_lines():
                    event = event_of(line, response)
                    if event == {}:
                        return
                    if event is not None:
                        yield event
                    if time.monotonic() > deadline:
                        raise TimeoutError
                raise NoAnswerError(f"the stream from {self._server.url} broke off")

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()
