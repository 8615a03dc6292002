"""OpenAI's HTTP interface: the routes, and how a request's body becomes an answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from raymoe import __version__
from raymoe.api.answers import ChatAnswer, CompletionAnswer
from raymoe.api.body import parse_object
from raymoe.api.envelope import error_response
from raymoe.api.generation import Generation
from raymoe.api.middleware import RequestMiddleware
from raymoe.api.requests import ChatRequest, CompletionRequest, SamplingBody
from raymoe.api.service import Service
from raymoe.api.sse import EventStream
from raymoe.api.streams import ClientGoneError, while_connected


def create_app(service: Service) -> FastAPI:
    """An application that serves nothing but raymoe's routes."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    add_routes(app, lambda: service)
    return app


def add_routes(app: FastAPI, service: Callable[[], Service]) -> None:
    """Add all routes, the middleware and the error envelope. `service` is called for each request."""

    async def chat(request: Request) -> Response:
        here = service()
        body = ChatRequest.parse(await _read_object(request, here.limits.body_bytes))
        generation = await here.chat(body)
        return await _answer(request, body, generation, ChatAnswer(here.model_name, generation))

    async def complete(request: Request) -> Response:
        here = service()
        body = CompletionRequest.parse(await _read_object(request, here.limits.body_bytes))
        generation = await here.complete(body)
        return await _answer(request, body, generation, CompletionAnswer(here.model_name, generation))

    async def models() -> Response:
        await service().check_ready()
        return JSONResponse({"object": "list", "data": [service().model_card()]})

    async def model(model_id: str) -> Response:
        service().check_model(model_id)
        await service().check_ready()
        return JSONResponse(service().model_card())

    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    async def ready() -> Response:
        await service().check_ready()
        return JSONResponse({"status": "ready"})

    async def metrics() -> Response:
        here = service().metrics
        return Response(here.render(), headers={"content-type": here.content_type})

    async def version() -> Response:
        return JSONResponse({"version": __version__})

    for path, endpoint, method in (
        ("/v1/chat/completions", chat, "POST"),
        ("/v1/completions", complete, "POST"),
        ("/v1/models", models, "GET"),
        ("/v1/models/{model_id:path}", model, "GET"),
        ("/health", health, "GET"),
        ("/ready", ready, "GET"),
        ("/metrics", metrics, "GET"),
        ("/version", version, "GET"),
    ):
        app.add_api_route(path, endpoint, methods=[method], response_model=None)
    # A redirect would answer a wrong path outside the envelope.
    app.router.redirect_slashes = False
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(RequestMiddleware, service=service)


async def _answer(
    request: Request, body: SamplingBody, generation: Generation, answer: CompletionAnswer
) -> Response:
    deltas = generation.deltas()
    try:
        if not body.stream:
            return JSONResponse(await while_connected(request.receive, answer.whole(deltas)))
        # The headers wait for the first token, so a failure before it keeps its own status.
        first = await while_connected(request.receive, anext(deltas))
    except BaseException:
        await deltas.aclose()
        raise
    chunks = answer.chunks(first, deltas, body.include_usage)
    return EventStream(chunks, deltas, request.scope["raymoe.request_id"])


async def _read_object(request: Request, limit: int) -> dict[str, Any]:
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    # Browsers send other types across origins without asking; a server on loopback must not obey those.
    if kind != "application/json":
        raise HTTPException(415, "the body must be sent with Content-Type: application/json")
    too_large = HTTPException(413, f"the body is larger than {limit} bytes (server.max_body_bytes)")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and len(length) < 20 and int(length) > limit:
        raise too_large
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > limit:
                raise too_large
    except ClientDisconnect:
        raise ClientGoneError from None
    return parse_object(bytes(body))


async def _http_error(request: Request, error: Exception) -> Response:
    return error_response(error, request.scope["raymoe.request_id"])
