"""The gRPC methods behind a real server without Ray, and channels to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from raymoe.api.grpc_methods import METHODS, GrpcMethods, add_to_server
from raymoe.api.grpc_service import GrpcService
from raymoe.api.service import Service
from raymoe.policy.layout import Copy, GroupPlace, Layout
from raymoe.v1 import inference_pb2 as v1
from raymoe.v1.bodies import fill
from tests.api.scripted import run

LAYOUT = Layout(
    7,
    (GroupPlace("a", "@secret-a"), GroupPlace("b", "@secret-b")),
    (((Copy("a", 0, 0),), (Copy("b", 0, 0), Copy("a", 1, 3))),),
)


class Methods(GrpcMethods):
    def __init__(self, service: Service, layout: Layout | None = LAYOUT) -> None:
        async def read() -> Layout | None:
            return layout

        self.grpc = GrpcService(service, read)


@asynccontextmanager
async def serving(service: Service, layout: Layout | None = LAYOUT) -> AsyncIterator[str]:
    """A server around the service; yields its address."""
    server = grpc.aio.server()
    add_to_server(Methods(service, layout), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def channel(service: Service, layout: Layout | None = LAYOUT) -> AsyncIterator[grpc.aio.Channel]:
    async with serving(service, layout) as address, grpc.aio.insecure_channel(address) as opened:
        yield opened


def method(opened: Any, name: str) -> Any:
    """One method of a channel: takes a message or bytes, gives messages."""
    found = METHODS[name]
    make = opened.unary_stream if found.streams else opened.unary_unary
    return make(
        f"/{found.service}/{name}",
        request_serializer=lambda r: r if isinstance(r, bytes) else r.SerializeToString(),
        response_deserializer=found.response.FromString,
    )


def generate(**body: Any) -> v1.GenerateRequest:
    request = v1.GenerateRequest()
    fill(request, {"prompt": "x", **body})
    return request


def chat(**body: Any) -> v1.ChatRequest:
    request = v1.ChatRequest()
    fill(request, {"messages": [{"role": "user", "content": "hi"}], **body})
    return request


def ask(service: Any, name: str, request: Message | bytes, **options: Any) -> Any:
    """The answer of one call: a message, or the list of a stream's messages."""

    async def one() -> Any:
        async with channel(service) as opened:
            call = method(opened, name)(request, **options)
            return [message async for message in call] if hasattr(call, "__aiter__") else await call

    return run(one())


def refused(service: Any, name: str, request: Message | bytes, **options: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        ask(service, name, request, **options)
    return caught.value


def trailing(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    return dict(error.trailing_metadata())
