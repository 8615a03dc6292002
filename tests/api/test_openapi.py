"""The OpenAPI document describes every route and every field, and says what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.routing import APIRoute

from raymoe.api.fields import CHAT_NEUTRAL, COMPLETION_NEUTRAL
from raymoe.api.http import create_app
from raymoe.api.openapi import describe, page
from raymoe.api.requests import ChatRequest, CompletionRequest
from tests.api.scripted import ScriptedBackend, call, make_service

SERVICE = make_service(ScriptedBackend())
DOCUMENT = describe()


def test_every_route_is_described_and_no_other() -> None:
    app = create_app(SERVICE)
    served = {
        (route.path.replace(":path}", "}"), method.lower())
        for route in app.routes
        if isinstance(route, APIRoute)
        for method in route.methods
    }
    described = {(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert described == served


@pytest.mark.parametrize(
    ("model", "neutral"), [(ChatRequest, CHAT_NEUTRAL), (CompletionRequest, COMPLETION_NEUTRAL)]
)
def test_every_field_is_described(model: Any, neutral: Any) -> None:
    schema = DOCUMENT["components"]["schemas"][model.__name__]
    assert set(schema["properties"]) == set(model.model_fields) | set(neutral)
    assert schema["additionalProperties"] is False
    for name, value in schema["properties"].items():
        if name in neutral:
            assert value["enum"] == [None, *neutral[name]]
        elif name not in schema["required"]:
            assert {"type": "null"} in value["anyOf"]


def references(value: Any) -> Any:
    if isinstance(value, dict):
        for key, item in value.items():
            if key == "$ref":
                yield item
            else:
                yield from references(item)
    elif isinstance(value, list):
        for item in value:
            yield from references(item)


def test_references_lead_somewhere() -> None:
    found = set(references(DOCUMENT))
    assert found >= {"#/components/schemas/ChatRequest", "#/components/schemas/Message"}
    assert {name.rpartition("/")[2] for name in found} <= set(DOCUMENT["components"]["schemas"])


def test_it_is_served_and_so_is_a_page_of_it_that_loads_nothing() -> None:
    assert call(SERVICE, "GET", "/openapi.json").json() == DOCUMENT
    response = call(SERVICE, "GET", "/docs")
    assert response.headers["content-type"].startswith("text/html")
    assert response.text == page(DOCUMENT)
    assert "repetition_penalty" in response.text and "/v1/chat/completions" in response.text
    assert (
        "http://" not in response.text and "https://" not in response.text and "<script" not in response.text
    )
