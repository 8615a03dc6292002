"""OpenAI's error envelope, the only shape in which errors leave the HTTP surface."""

from __future__ import annotations

import logging
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from raymoe.errors import OverloadedError, status_of

logger = logging.getLogger(__name__)

_MAX_MESSAGE_CHARS = 1000
_RETRY_AFTER_S = "1"
"""Of what is missing nobody knows when it is back."""
_HTTP_CODES = {
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    415: "unsupported_media_type",
}


def error_body(error: Exception, request_id: str) -> dict[str, Any]:
    """The envelope of any exception. Text that is not for clients goes to the log, under the request's id."""
    if isinstance(error, HTTPException):
        code = _HTTP_CODES.get(error.status_code, "invalid_request")
        return _envelope(str(error.detail), "invalid_request_error", None, code)
    status = status_of(error)
    message = str(error)
    if not status.public:
        logger.error("request %s failed", request_id, exc_info=error)
        message = f"internal error; the server's log has the details of request {request_id}"
    return _envelope(message, status.type, getattr(error, "param", None), status.code)


def error_response(error: Exception, request_id: str) -> JSONResponse:
    """The HTTP answer of any exception."""
    headers: dict[str, str] = {}
    if isinstance(error, HTTPException):
        status, headers = error.status_code, dict(error.headers or {})
    else:
        status = status_of(error).http
    if isinstance(error, OverloadedError):
        headers["retry-after"] = str(error.retry_after_s)
    elif status == 503:
        headers["retry-after"] = _RETRY_AFTER_S
    elif status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error_body(error, request_id), status, headers)


def _envelope(message: str, kind: str, param: str | None, code: str) -> dict[str, Any]:
    return {"error": {"message": message[:_MAX_MESSAGE_CHARS], "type": kind, "param": param, "code": code}}
