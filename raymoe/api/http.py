"""OpenAI's HTTP interface: the routes, and how a request's body becomes an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, Response

from raymoe import __version__
from raymoe.api.answers import ChatAnswer, CompletionAnswer
from raymoe.api.body import read_object
from raymoe.api.cors import Cors
from raymoe.api.envelope import error_response
from raymoe.api.generation import Generation
from raymoe.api.middleware import RequestMiddleware
from raymoe.api.openapi import describe, page
from raymoe.api.requests import ChatRequest, CompletionRequest
from raymoe.api.responses import ResponsesAnswer
from raymoe.api.responses_request import ResponsesRequest
from raymoe.api.service import Service
from raymoe.api.sse import EventStream
from raymoe.api.streams import while_connected
from raymoe.api.tokenizing import DetokenizeRequest, TokenizeRequest
from raymoe.errors import RequestError


def create_app(service: Service, cors_origins: Sequence[str] = ()) -> FastAPI:
    """An application that serves nothing but raymoe's routes; pages of `cors_origins` may use them."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    add_routes(app, lambda: service, cors_origins)
    return app


def add_routes(app: FastAPI, service: Callable[[], Service], cors_origins: Sequence[str] = ()) -> None:
    """Add all routes, the middleware and the error envelope. `service` is called for each request."""

    async def chat(request: Request) -> Response:
        here = service()
        body = ChatRequest.parse(await read_object(request, here.limits))
        generation = await here.chat(body)
        answer = ChatAnswer(here.model_name, generation)
        return await _answer(request, generation, answer, body.stream, body.include_usage)

    async def complete(request: Request) -> Response:
        here = service()
        body = CompletionRequest.parse(await read_object(request, here.limits))
        generation = await here.complete(body)
        answer = CompletionAnswer(here.model_name, generation)
        return await _answer(request, generation, answer, body.stream, body.include_usage)

    async def respond(request: Request) -> Response:
        here = service()
        body = ResponsesRequest.parse(await read_object(request, here.limits))
        try:
            generation = await here.chat(body.to_chat())
        except RequestError as error:
            error.param = ResponsesRequest.own_name(error.param)
            raise
        return await _answer(
            request, generation, ResponsesAnswer(here.model_name, generation, body), body.stream
        )

    async def tokenize(request: Request) -> Response:
        here = service()
        body = TokenizeRequest.parse(await read_object(request, here.limits))
        return JSONResponse(await here.tokenize(body))

    async def detokenize(request: Request) -> Response:
        here = service()
        body = DetokenizeRequest.parse(await read_object(request, here.limits))
        return JSONResponse(await here.detokenize(body))

    async def description() -> Response:
        return JSONResponse(describe())

    async def docs() -> Response:
        return HTMLResponse(page(describe()))

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
        ("/v1/responses", respond, "POST"),
        ("/v1/models", models, "GET"),
        ("/v1/models/{model_id:path}", model, "GET"),
        ("/tokenize", tokenize, "POST"),
        ("/detokenize", detokenize, "POST"),
        ("/openapi.json", description, "GET"),
        ("/docs", docs, "GET"),
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
    if cors_origins:
        # Outside of the other one, so that browsers may read its refusals too.
        app.add_middleware(Cors, origins=cors_origins)


async def _answer(
    request: Request,
    generation: Generation,
    answer: CompletionAnswer | ResponsesAnswer,
    stream: bool,
    include_usage: bool = False,
) -> Response:
    deltas = generation.deltas()
    try:
        if not stream:
            return JSONResponse(await while_connected(request.receive, answer.whole(deltas)))
        # The headers wait for the first token, so a failure before it keeps its own status.
        first = await while_connected(request.receive, anext(deltas))
    except BaseException:
        await deltas.aclose()
        raise
    chunks = answer.chunks(first, deltas, include_usage)
    return EventStream(chunks, deltas, request.scope["raymoe.request_id"], answer)


async def _http_error(request: Request, error: Exception) -> Response:
    return error_response(error, request.scope["raymoe.request_id"])
