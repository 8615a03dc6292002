"""What the gRPC methods do: a message becomes the body of the HTTP interface, and its answer becomes messages."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager, nullcontext
from typing import Any

from google.protobuf.message import Message

from raymoe.api.answers import ChatAnswer, CompletionAnswer
from raymoe.api.generation import Generation
from raymoe.api.grpc_call import Call, Context, measured
from raymoe.api.grpc_health import Health
from raymoe.api.grpc_methods import HEALTH, METHODS
from raymoe.api.requests import ChatRequest, CompletionRequest
from raymoe.api.service import Service
from raymoe.api.tokenizing import DetokenizeRequest, TokenizeRequest
from raymoe.errors import NotReadyError, TooLargeError
from raymoe.policy.layout import Layout
from raymoe.v1 import inference_pb2 as v1
from raymoe.v1.bodies import body_of, fill, parse

Body = CompletionRequest | ChatRequest

_COUNTED = frozenset({"Generate", "GenerateStream", "Chat", "ChatStream", "Tokenize", "Detokenize"})


class GrpcService:
    """All methods over one `Service`. `layout` reads the layout in use, None while there is none."""

    def __init__(self, service: Service, layout: Callable[[], Awaitable[Layout | None]]) -> None:
        self._service, self._layout = service, layout
        health = Health(service)
        self._unary: dict[str, Callable[[Any], Awaitable[Message]]] = {
            "Generate": self._generate,
            "Chat": self._chat,
            "Tokenize": self._tokenize,
            "Detokenize": self._detokenize,
            "ListModels": self._list_models,
            "GetLayout": self._get_layout,
            "Check": health.check,
            "List": health.list,
        }
        self._streams: dict[str, Callable[[Any], AsyncGenerator[Message, None]]] = {
            "GenerateStream": self._generate_stream,
            "ChatStream": self._chat_stream,
            "Watch": health.watch,
        }

    async def unary(self, name: str, data: bytes, context: Context) -> Message:
        """Answer a call of a method without a stream. What goes wrong is the context's status."""
        with measured(name, context, self._service.metrics) as call:
            try:
                with self._admitted(name, call):
                    return await self._unary[name](self._read(name, data))
            except Exception as error:  # noqa: BLE001 - answered as a status, and logged if it is ours
                call.fail(error)
        return METHODS[name].response()

    async def stream(self, name: str, data: bytes, context: Context) -> AsyncGenerator[Message, None]:
        """Answer a call of a method with a stream. Closing it, or cancelling its task, ends the request."""
        with measured(name, context, self._service.metrics) as call:
            try:
                with self._admitted(name, call):
                    async with aclosing(self._streams[name](self._read(name, data))) as messages:
                        async for message in messages:
                            yield message
            except Exception as error:  # noqa: BLE001 - as above
                call.fail(error)
                # Serve passes a status on with a message. It would take an exception too, but would log a
                # traceback of each request that a client got wrong.
                yield METHODS[name].response()

    @contextmanager
    def _admitted(self, name: str, call: Call) -> Iterator[None]:
        """As over HTTP: probes need no key, and only what asks the model for something counts."""
        if METHODS[name].service == HEALTH.full_name:
            yield
            return
        admission = self._service.admission
        caller = admission.identify(call.metadata("authorization"))
        with admission.enter(caller) if name in _COUNTED else nullcontext():
            call.admitted(caller)
            yield

    def _read(self, name: str, data: bytes) -> Message:
        limit = self._service.limits.body_bytes
        if len(data) > limit:
            raise TooLargeError(f"the message is larger than {limit} bytes (server.max_body_bytes)")
        return parse(METHODS[name].request, data)

    async def _generate(self, request: v1.GenerateRequest) -> Message:
        return await self._whole(CompletionRequest.parse(body_of(request)), v1.GenerateResponse())

    async def _chat(self, request: v1.ChatRequest) -> Message:
        return await self._whole(ChatRequest.parse(body_of(request)), v1.ChatResponse())

    def _generate_stream(self, request: v1.GenerateRequest) -> AsyncGenerator[Message, None]:
        body = CompletionRequest.parse({**body_of(request), "stream": True})
        return self._pieces(body, v1.GenerateResponse)

    def _chat_stream(self, request: v1.ChatRequest) -> AsyncGenerator[Message, None]:
        return self._pieces(ChatRequest.parse({**body_of(request), "stream": True}), v1.ChatStreamResponse)

    async def _accept(self, body: Body) -> tuple[Generation, CompletionAnswer]:
        here = self._service
        if isinstance(body, ChatRequest):
            generation = await here.chat(body)
            return generation, ChatAnswer(here.model_name, generation)
        generation = await here.complete(body)
        return generation, CompletionAnswer(here.model_name, generation)

    async def _whole(self, body: Body, response: Message) -> Message:
        generation, answer = await self._accept(body)
        async with aclosing(generation.deltas()) as deltas:
            fill(response, await answer.whole(deltas))
        return response

    async def _pieces(self, body: Body, kind: type[Message]) -> AsyncGenerator[Message, None]:
        generation, answer = await self._accept(body)
        async with aclosing(generation.deltas()) as deltas:
            first = await anext(deltas)
            async with aclosing(answer.chunks(first, deltas, include_usage=True)) as chunks:
                async for chunk in chunks:
                    piece = kind()
                    fill(piece, chunk)
                    yield piece

    async def _tokenize(self, request: v1.TokenizeRequest) -> Message:
        response = v1.TokenizeResponse()
        fill(response, await self._service.tokenize(TokenizeRequest.parse(body_of(request))))
        return response

    async def _detokenize(self, request: v1.DetokenizeRequest) -> Message:
        response = v1.DetokenizeResponse()
        body = DetokenizeRequest.parse({"tokens": [], **body_of(request)})
        fill(response, await self._service.detokenize(body))
        return response

    async def _list_models(self, request: v1.ListModelsRequest) -> Message:  # noqa: ARG002 - it is empty
        await self._service.check_ready()
        response = v1.ListModelsResponse()
        fill(response, {"data": [self._service.model_card()]})
        return response

    async def _get_layout(self, request: v1.GetLayoutRequest) -> Message:  # noqa: ARG002 - it is empty
        layout = await self._layout()
        if layout is None:
            raise NotReadyError("there is no layout: model and expert groups are being loaded")
        response = v1.GetLayoutResponse(epoch=layout.epoch)
        response.groups.extend(v1.ExpertGroup(name=group.name, lane=group.kind) for group in layout.groups)
        indices = {group.name: index for index, group in enumerate(layout.groups)}
        for experts in layout.copies:
            layer = response.layers.add()
            for copies in experts:
                expert = layer.experts.add()
                expert.copies.extend(v1.Copy(group=indices[copy.group], slot=copy.slot) for copy in copies)
        return response
