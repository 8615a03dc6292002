"""The client, sync and async. A URL says which protocol: http, https, grpc or grpcs (with TLS)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from typing import Any, Protocol, Self, Unpack
from urllib.parse import urlsplit

from raymoe.client import over_grpc, over_http
from raymoe.client.answers import Answer
from raymoe.client.options import ChatOptions, GenerateOptions, Message, Prompt
from raymoe.errors import ConfigError

URL = "http://127.0.0.1:8000"
TIMEOUT_S = 600.0
Body = dict[str, Any]


class Transport(Protocol):
    """How requests travel. Bodies are those of the HTTP interface, methods named as those of gRPC."""

    def call(self, name: str, body: Body, headers: Mapping[str, str], timeout_s: float) -> Body: ...

    def stream(
        self, name: str, body: Body, headers: Mapping[str, str], timeout_s: float
    ) -> Generator[Body, None, None]: ...

    def close(self) -> None: ...


class AsyncTransport(Protocol):
    """The same for asyncio."""

    async def call(self, name: str, body: Body, headers: Mapping[str, str], timeout_s: float) -> Body: ...

    def stream(
        self, name: str, body: Body, headers: Mapping[str, str], timeout_s: float
    ) -> AsyncGenerator[Body, None]: ...

    async def close(self) -> None: ...


class Client:
    """Asks a raymoe server. Whatever goes wrong is an error of `raymoe.errors`: the one that the server had,
    NoAnswerError if none came, or DeadlineError."""

    def __init__(
        self,
        url: str = URL,
        *,
        api_key: str | None = None,
        timeout_s: float = TIMEOUT_S,
        ca_file: str | None = None,
        application: str | None = None,
    ) -> None:
        """
        Args:
            url: `http://HOST:PORT` or `grpc://HOST:PORT`, with TLS `https://` or `grpcs://`.
            timeout_s: how long each request may take, unless it says otherwise.
            ca_file: PEM file of the authorities to trust; by default those of the system.
            application: for gRPC, which Serve application, if several run behind the port.

        Raises:
            ConfigError: the URL is none of these.
        """
        self.timeout_s = timeout_s
        server = _server(url, api_key, ca_file, application)
        self._transport: Transport = (
            over_grpc.GrpcTransport(server)
            if isinstance(server, over_grpc.Server)
            else over_http.HttpTransport(server)
        )

    def generate(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Answer:
        """Continue one prompt or several. `request_id` is a label for the server's log."""
        return Answer.of(self._call("Generate", _generate(prompt, model, options), timeout_s, request_id))

    def generate_stream(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generator[Answer, None, None]:
        """As `generate`, in pieces. Closing the generator stops the request."""
        yield from self._stream("Generate", _generate(prompt, model, options), timeout_s, request_id)

    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> Answer:
        """Answer a conversation; a text is one user's turn."""
        return Answer.of(self._call("Chat", _chat(messages, model, options), timeout_s, request_id))

    def chat_stream(
        self,
        messages: str | Sequence[Message],
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> Generator[Answer, None, None]:
        """As `chat`, in pieces. Closing the generator stops the request."""
        yield from self._stream("Chat", _chat(messages, model, options), timeout_s, request_id)

    def tokenize(self, prompt: str | Sequence[Message], *, model: str | None = None) -> list[int]:
        """Token ids of a text or a conversation, as the model would get them."""
        return list(self._call("Tokenize", _tokenize(prompt, model), None, None).get("tokens", []))

    def detokenize(self, tokens: Sequence[int], *, model: str | None = None) -> str:
        """The text of token ids."""
        body = _with_model({"tokens": list(tokens)}, model)
        return str(self._call("Detokenize", body, None, None).get("prompt", ""))

    def models(self) -> list[str]:
        """The ids of the models that are served."""
        return [model["id"] for model in self._call("ListModels", {}, None, None)["data"]]

    def layout(self) -> Body:
        """Which expert group holds which expert, as `GetLayoutResponse`; over gRPC only."""
        return self._call("GetLayout", {}, None, None)

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, name: str, body: Body, timeout_s: float | None, request_id: str | None) -> Body:
        return self._transport.call(name, body, _headers(request_id), timeout_s or self.timeout_s)

    def _stream(
        self, name: str, body: Body, timeout_s: float | None, request_id: str | None
    ) -> Generator[Answer, None, None]:
        pieces = self._transport.stream(name, body, _headers(request_id), timeout_s or self.timeout_s)
        try:
            for piece in pieces:
                yield Answer.of(piece)
        finally:
            pieces.close()


class AsyncClient:
    """The same for asyncio; `close` it, or use it in `async with`."""

    def __init__(
        self,
        url: str = URL,
        *,
        api_key: str | None = None,
        timeout_s: float = TIMEOUT_S,
        ca_file: str | None = None,
        application: str | None = None,
    ) -> None:
        """As `Client`. Make it where the event loop runs."""
        self.timeout_s = timeout_s
        server = _server(url, api_key, ca_file, application)
        self._transport: AsyncTransport = (
            over_grpc.AsyncGrpcTransport(server)
            if isinstance(server, over_grpc.Server)
            else over_http.AsyncHttpTransport(server)
        )

    async def generate(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Answer:
        """As `Client.generate`."""
        return Answer.of(
            await self._call("Generate", _generate(prompt, model, options), timeout_s, request_id)
        )

    def generate_stream(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerator[Answer, None]:
        """As `Client.generate_stream`."""
        return self._stream("Generate", _generate(prompt, model, options), timeout_s, request_id)

    async def chat(
        self,
        messages: str | Sequence[Message],
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> Answer:
        """As `Client.chat`."""
        return Answer.of(await self._call("Chat", _chat(messages, model, options), timeout_s, request_id))

    def chat_stream(
        self,
        messages: str | Sequence[Message],
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncGenerator[Answer, None]:
        """As `Client.chat_stream`."""
        return self._stream("Chat", _chat(messages, model, options), timeout_s, request_id)

    async def tokenize(self, prompt: str | Sequence[Message], *, model: str | None = None) -> list[int]:
        """As `Client.tokenize`."""
        return list((await self._call("Tokenize", _tokenize(prompt, model), None, None)).get("tokens", []))

    async def detokenize(self, tokens: Sequence[int], *, model: str | None = None) -> str:
        """As `Client.detokenize`."""
        body = _with_model({"tokens": list(tokens)}, model)
        return str((await self._call("Detokenize", body, None, None)).get("prompt", ""))

    async def models(self) -> list[str]:
        """As `Client.models`."""
        return [model["id"] for model in (await self._call("ListModels", {}, None, None))["data"]]

    async def layout(self) -> Body:
        """As `Client.layout`."""
        return await self._call("GetLayout", {}, None, None)

    async def close(self) -> None:
        """Close the connection."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _call(self, name: str, body: Body, timeout_s: float | None, request_id: str | None) -> Body:
        return await self._transport.call(name, body, _headers(request_id), timeout_s or self.timeout_s)

    async def _stream(
        self, name: str, body: Body, timeout_s: float | None, request_id: str | None
    ) -> AsyncGenerator[Answer, None]:
        pieces = self._transport.stream(name, body, _headers(request_id), timeout_s or self.timeout_s)
        try:
            async for piece in pieces:
                yield Answer.of(piece)
        finally:
            await pieces.aclose()


def _server(
    url: str, api_key: str | None, ca_file: str | None, application: str | None
) -> over_http.Server | over_grpc.Server:
    parts = urlsplit(url)
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    if parts.scheme in {"http", "https"} and parts.netloc:
        return over_http.Server(url.rstrip("/"), headers, ca_file)
    if parts.scheme in {"grpc", "grpcs"} and parts.netloc and parts.path in {"", "/"}:
        if application is not None:
            headers["application"] = application
        return over_grpc.Server(parts.netloc, headers, parts.scheme == "grpcs", ca_file)
    raise ConfigError(f"{url!r} is no URL of a server: http://HOST:PORT, https://…, grpc://… or grpcs://…")


def _headers(request_id: str | None) -> dict[str, str]:
    return {} if request_id is None else {"x-request-id": request_id}


def _generate(prompt: Prompt, model: str | None, options: GenerateOptions) -> Body:
    return _with_model({"prompt": prompt, **options}, model)


def _chat(messages: str | Sequence[Message], model: str | None, options: ChatOptions) -> Body:
    turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    return _with_model({"messages": turns, **options}, model)


def _tokenize(prompt: str | Sequence[Message], model: str | None) -> Body:
    return _with_model({"prompt": prompt} if isinstance(prompt, str) else {"messages": list(prompt)}, model)


def _with_model(body: Body, model: str | None) -> Body:
    return body if model is None else {"model": model, **body}
