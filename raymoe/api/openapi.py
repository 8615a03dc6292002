"""The OpenAPI description of the HTTP interface, made from the models that check requests, and a page of it.

The page is made here, since the usual ones load scripts from other hosts.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import BaseModel

from raymoe import __version__
from raymoe.api.fields import CHAT_NEUTRAL, COMPLETION_NEUTRAL, Neutral
from raymoe.api.requests import ChatRequest, CompletionRequest
from raymoe.api.responses_request import RESPONSES_NEUTRAL, ResponsesRequest
from raymoe.api.tokenizing import TOKENIZE_NEUTRAL, DetokenizeRequest, TokenizeRequest

_SCHEMAS = "#/components/schemas/"
_STREAM = {"text/event-stream": {"schema": {"type": "string"}}}


class _Route(NamedTuple):
    path: str
    summary: str
    body: type[BaseModel] | None = None
    neutral: Neutral = MappingProxyType({})
    streams: bool = False
    media: str = "application/json"


ROUTES = (
    _Route("/v1/chat/completions", "Answer a chat.", ChatRequest, CHAT_NEUTRAL, True),
    _Route("/v1/completions", "Continue prompts.", CompletionRequest, COMPLETION_NEUTRAL, True),
    _Route("/v1/responses", "Answer a response's input.", ResponsesRequest, RESPONSES_NEUTRAL, True),
    _Route("/v1/models", "The served model."),
    _Route("/v1/models/{model_id}", "The same, by its id."),
    _Route("/tokenize", "Token ids of a prompt or a chat.", TokenizeRequest, TOKENIZE_NEUTRAL),
    _Route("/detokenize", "The text of token ids.", DetokenizeRequest),
    _Route("/health", "The process answers."),
    _Route("/ready", "Requests will be answered."),
    _Route("/metrics", "Metrics for Prometheus.", media="text/plain"),
    _Route("/version", "The version of raymoe."),
    _Route("/openapi.json", "This description."),
    _Route("/docs", "This description as a page.", media="text/html"),
)


def describe() -> dict[str, Any]:
    """The OpenAPI 3.1 document. It says everything of requests, and of answers only their media types."""
    schemas: dict[str, Any] = {"Error": _error_schema()}
    paths = {route.path: _operation(route, schemas) for route in ROUTES}
    return {
        "openapi": "3.1.0",
        "info": {"title": "raymoe", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(route: _Route, schemas: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {route.media: {"schema": {}}}
    if route.streams:
        content |= _STREAM
    failed = {"application/json": {"schema": {"$ref": f"{_SCHEMAS}Error"}}}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
        ],
        "responses": {
            "200": {"description": "Done.", "content": content},
            "default": {"description": "An error.", "content": failed},
        },
    }
    if route.body is None:
        return {"get": operation}
    schemas |= _schemas(route.body, route.neutral)
    schema = {"$ref": f"{_SCHEMAS}{route.body.__name__}"}
    operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"post": operation}


def _schemas(model: type[BaseModel], neutral: Neutral) -> dict[str, Any]:
    """The model's own and those that it names. A null field counts as absent, and so does a neutral value."""
    schema = model.model_json_schema(ref_template=f"{_SCHEMAS}{{model}}")
    others: dict[str, Any] = schema.pop("$defs", {})
    properties = schema["properties"]
    for name, value in properties.items():
        if name not in schema.get("required", ()):
            properties[name] = _nullable(value)
    for name, values in neutral.items():
        properties[name] = {
            "enum": [None, *values],
            "description": "Not supported: these values change nothing.",
        }
    return {**others, model.__name__: schema}


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    kinds = schema.get("anyOf", [])
    if {"type": "null"} in kinds:
        return schema
    kept: dict[str, Any] = {key: schema[key] for key in ("description", "default", "title") if key in schema}
    own = {key: value for key, value in schema.items() if key not in kept}
    return {"anyOf": [own, {"type": "null"}], **kept}


def _error_schema() -> dict[str, Any]:
    text = {"type": "string"}
    error = {"message": text, "type": text, "param": {"type": ["string", "null"]}, "code": text}
    envelope = {"type": "object", "properties": error, "required": list(error)}
    return {"type": "object", "properties": {"error": envelope}, "required": ["error"]}


def page(document: Mapping[str, Any]) -> str:
    """The document as HTML, which loads nothing."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>raymoe</title>",
        "<style>body{font:15px sans-serif;max-width:60em;margin:2em auto}td{padding:.1em 1em .1em 0;"
        "vertical-align:top}code{white-space:pre-wrap}</style>",
        f"<h1>raymoe {escape(document['info']['version'])}</h1>",
        "<p>As a document for programs: <a href=openapi.json>openapi.json</a></p>",
    ]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2>")
            parts.append(f"<p>{escape(operation['summary'])}</p>")
    for name, schema in document["components"]["schemas"].items():
        parts.append(f"<h2 id={escape(name)}>{escape(name)}</h2>")
        parts.append(f"<p>{escape(schema.get('description', ''))}</p><table>")
        for field, value in schema.get("properties", {}).items():
            required = " (required)" if field in schema.get("required", ()) else ""
            parts.append(
                f"<tr><td><code>{escape(field)}</code>{required}<td><code>{escape(_in_words(value))}</code>"
            )
        parts.append("</table>")
    return "".join(parts)


def _in_words(schema: Mapping[str, Any]) -> str:
    said = []
    for key, value in schema.items():
        if key == "title":
            continue
        if key == "$ref":
            said.append(value.rpartition("/")[2])
        elif key == "anyOf":
            said.append(" or ".join(_in_words(one) for one in value))
        elif key == "items":
            said.append(f"of ({_in_words(value)})")
        else:
            said.append(str(value) if key == "type" else f"{key} {value}")
    return ", ".join(said)
