"""Requests over gRPC."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from raymoe.client.failures import failure
from raymoe.errors import DeadlineError, NoAnswerError, RaymoeError, TooLargeError
from raymoe.v1 import inference_pb2
from raymoe.v1.bodies import body_of, fill

Body = dict[str, Any]

_SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
"""The server has a limit of what it takes; what it answers, this client has asked for."""


@dataclass(frozen=True)
class Server:
    """Where calls go and what goes with each: host:port, metadata, whether TLS, and whose certificates."""

    address: str
    headers: Mapping[str, str]
    tls: bool = False
    ca_file: str | None = None

    def credentials(self) -> grpc.ChannelCredentials | None:
        """None without TLS."""
        if not self.tls:
            return None
        return grpc.ssl_channel_credentials(Path(self.ca_file).read_bytes() if self.ca_file else None)

    def metadata(self, headers: Mapping[str, str]) -> list[tuple[str, str]]:
        """Of one call."""
        return list({**self.headers, **headers}.items())


class _Methods:
    """The methods of one channel, by name."""

    def __init__(self, channel: Any) -> None:
        self._requests: dict[str, type[Message]] = {}
        self._calls: dict[str, Callable[..., Any]] = {}
        for method in _SERVICE.methods:
            make = channel.unary_stream if method.server_streaming else channel.unary_unary
            self._requests[method.name] = GetMessageClass(method.input_type)
            self._calls[method.name] = make(
                f"/{_SERVICE.full_name}/{method.name}",
                request_serializer=GetMessageClass(method.input_type).SerializeToString,
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )

    def start(self, name: str, body: Body, metadata: list[tuple[str, str]], timeout_s: float) -> Any:
        request = self._requests[name]()
        fill(request, body)
        return self._calls[name](request, metadata=metadata, timeout=timeout_s)


class GrpcTransport:
    """Synchronous calls."""

    def __init__(self, server: Server) -> None:
        credentials = server.credentials()
        self._server = server
        self._channel = (
            grpc.insecure_channel(server.address, _OPTIONS)
            if credentials is None
            else grpc.secure_channel(server.address, credentials, _OPTIONS)
        )
        self._methods = _Methods(self._channel)

    def call(self, name: str, body: Body, headers: Mapping[str, str], timeout_s: float) -> Body:
        """One answer."""
        try:
            return body_of(self._methods.start(name, body, self._server.metadata(headers), timeout_s))
        except grpc.RpcError as error:
            raise _failure(error, self._server, timeout_s) from None

    def stream(
        self, name: str, body: Body, headers: Mapping[str, str], timeout_s: float
    ) -> Generator[Body, None, None]:
        """An answer in pieces; closing the generator ends the call."""
        call = self._methods.start(f"{name}Stream", body, self._server.metadata(headers), timeout_s)
        try:
            for message in call:
                if message.ListFields():
                    yield body_of(message)
        except grpc.RpcError as error:
            raise _failure(error, self._server, timeout_s) from None
        finally:
            call.cancel()

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()


class AsyncGrpcTransport:
    """The same for asyncio."""

    def __init__(self, server: Server) -> None:
        credentials = server.credentials()
        self._server = server
        self._channel = (
            grpc.aio.insecure_channel(server.address, _OPTIONS)
            if credentials is None
            else grpc.aio.secure_channel(server.address, credentials, _OPTIONS)
        )
        self._methods = _Methods(self._channel)

    async def call(self, name: str, body: Body, headers: Mapping[str, str], timeout_s: float) -> Body:
        """One answer."""
        try:
            return body_of(await self._methods.start(name, body, self._server.metadata(headers), timeout_s))
        except grpc.RpcError as error:
            raise _failure(error, self._server, timeout_s) from None

    async def stream(
        self, name: str, body: Body, headers: Mapping[str, str], timeout_s: float
    ) -> AsyncGenerator[Body, None]:
        """An answer in pieces; closing the generator ends the call."""
        call = self._methods.start(f"{name}Stream", body, self._server.metadata(headers), timeout_s)
        try:
            async for message in call:
                if message.ListFields():
                    yield body_of(message)
        except grpc.RpcError as error:
            raise _failure(error, self._server, timeout_s) from None
        finally:
            call.cancel()

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


def _failure(error: Any, server: Server, timeout_s: float) -> RaymoeError:
    trailing = dict(error.trailing_metadata() or ())
    code, details = error.code(), error.details() or ""
    if "raymoe-code" in trailing:
        return failure(
            trailing["raymoe-code"], details, trailing.get("raymoe-param"), trailing.get("retry-after")
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineError(f"{server.address} did not answer within {timeout_s:g} s")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return TooLargeError(f"{server.address} takes no message of this size: {details}")
    return NoAnswerError(f"no answer from {server.address}: {code.name}, {details}")
