"""The gRPC methods by name: which messages they take, and how they are added to a server.

All is read from the descriptors, so a method in a .proto file can't be forgotten here. Requests arrive as bytes:
whoever accepts connections needs no tokenizer to pass them on, and all refusals are made in one place.

Serve's proxy imports this module, so it imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from raymoe.v1 import inference_pb2

if TYPE_CHECKING:
    from raymoe.api.grpc_call import Context
    from raymoe.api.grpc_service import GrpcService

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
SERVICES = (INFERENCE.full_name, HEALTH.full_name)


@dataclass(frozen=True)
class Method:
    """One method: the service that has it, what it takes and gives, and whether that is a stream."""

    service: str
    request: type[Message]
    response: type[Message]
    streams: bool


METHODS: dict[str, Method] = {
    method.name: Method(
        service.full_name,
        GetMessageClass(method.input_type),
        GetMessageClass(method.output_type),
        method.server_streaming,
    )
    for service in (INFERENCE, HEALTH)
    for method in service.methods
}


class GrpcMethods:
    """A method of this class for each gRPC method, as Serve's proxy and `grpc.aio` servers call it."""

    grpc: GrpcService


def _unary(name: str) -> Any:
    async def call(self: GrpcMethods, request: bytes, grpc_context: Context) -> Message:
        return await self.grpc.unary(name, request, grpc_context)

    return call


def _stream(name: str) -> Any:
    async def call(self: GrpcMethods, request: bytes, grpc_context: Context) -> AsyncIterator[Message]:
        async with aclosing(self.grpc.stream(name, request, grpc_context)) as messages:
            async for message in messages:
                yield message

    return call


for _name, _method in METHODS.items():
    _call = (_stream if _method.streams else _unary)(_name)
    _call.__name__ = _name
    _call.__qualname__ = f"GrpcMethods.{_name}"
    setattr(GrpcMethods, _name, _call)


def add_to_server(servicer: Any, server: Any) -> None:
    """Add all methods to a gRPC server."""
    for service in SERVICES:
        handlers = {
            name: (
                grpc.unary_stream_rpc_method_handler
                if method.streams
                else grpc.unary_unary_rpc_method_handler
            )(getattr(servicer, name), response_serializer=_serialize)
            for name, method in METHODS.items()
            if method.service == service
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))


def _serialize(message: Message) -> bytes:
    data: bytes = message.SerializeToString()
    return data
