"""Prometheus metrics of the client surface. Label values come from fixed sets, whatever clients send."""

from __future__ import annotations

from typing import Literal

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

PATHS = (
    "/detokenize",
    "/docs",
    "/health",
    "/metrics",
    "/openapi.json",
    "/ready",
    "/tokenize",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/v1/models/{id}",
    "/v1/responses",
    "/version",
    "other",
)
Outcome = Literal["completed", "refused", "failed", "cancelled"]

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class ApiMetrics:
    """The metrics of one ingress, in a registry of their own: no process-wide state."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "raymoe_http_requests", "Answered HTTP requests.", ("path", "outcome"), registry=self.registry
        )
        self.in_flight = Gauge(
            "raymoe_http_requests_in_flight", "HTTP requests being answered.", registry=self.registry
        )
        self._seconds = Histogram(
            "raymoe_http_request_seconds",
            "From the request's first byte to the answer's last.",
            ("path",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._grpc_requests = Counter(
            "raymoe_grpc_requests",
            "Answered gRPC calls by method and status.",
            ("method", "code"),
            registry=self.registry,
        )
        self.grpc_in_flight = Gauge(
            "raymoe_grpc_requests_in_flight", "gRPC calls being answered.", registry=self.registry
        )
        self._grpc_seconds = Histogram(
            "raymoe_grpc_request_seconds",
            "From a gRPC call's arrival at the ingress to the end of its answer.",
            ("method",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._first_token = Histogram(
            "raymoe_first_token_seconds",
            "From the validated request to its first token.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._models = Counter(
            "raymoe_model_requests",
            "Requests by the model they name; any that is not served counts as other.",
            ("model",),
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "raymoe_prompt_tokens", "Prompt tokens accepted.", registry=self.registry
        )
        self.completion_tokens = Counter(
            "raymoe_completion_tokens", "Tokens generated for clients.", registry=self.registry
        )
        self.normalised = Counter(
            "raymoe_normalised_texts",
            "Texts of prompts and messages that server.normalise_text changed.",
            registry=self.registry,
        )
        self.replays = Counter(
            "raymoe_replays", "Sequences that went on at another router.", registry=self.registry
        )

    def answered(self, path: str, outcome: Outcome, seconds: float) -> None:
        """Count one HTTP request; a path outside `PATHS` counts as other."""
        path = path if path in PATHS else "other"
        self._requests.labels(path, outcome).inc()
        self._seconds.labels(path).observe(seconds)

    def grpc_answered(self, method: str, code: str, seconds: float) -> None:
        """Count one gRPC call of a method that there is, by the name of its status."""
        self._grpc_requests.labels(method, code).inc()
        self._grpc_seconds.labels(method).observe(seconds)

    def asked_for(self, model: str | None) -> None:
        """Count one request by the model it names; None means the one that is served."""
        self._models.labels(self.model_name if model in (None, self.model_name) else "other").inc()

    def first_token(self, seconds: float) -> None:
        """Observe the time to one request's first token."""
        self._first_token.observe(seconds)

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)
