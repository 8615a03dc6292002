"""Which web pages may use the server from a browser: none, unless the operator names their origins."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from raymoe.api.envelope import error_response

_EXPOSED = (
    "retry-after",
    "x-ratelimit-limit-requests",
    "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-remaining-tokens",
    "x-ratelimit-reset-requests",
    "x-ratelimit-reset-tokens",
    "x-request-id",
)


class Cors(CORSMiddleware):
    """Starlette's, with refusals in the envelope. Keys are sent by pages themselves, so no cookies are allowed."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=("GET", "POST"),
            # OpenAI's client for browsers sends a dozen of its own.
            allow_headers=("*",),
            expose_headers=_EXPOSED,
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        """Whether the request that the browser asks about may be made."""
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        refusal = error_response(
            HTTPException(403, "this origin or method is not allowed (server.cors_origins)"), uuid.uuid4().hex
        )
        refusal.headers["vary"] = response.headers["vary"]
        return refusal
