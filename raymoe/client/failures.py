"""A refused or failed request as the exception that the server had."""

from __future__ import annotations

from raymoe.errors import STATUS, OverloadedError, RaymoeError, RequestError


def failure(
    code: str, message: str, param: str | None = None, retry_after_s: str | None = None
) -> RaymoeError:
    """The error whose `code` in the table of errors is this; RaymoeError for one that a client can't tell apart."""
    kind = next((cls for cls, status in STATUS.items() if status.code == code), RaymoeError)
    if issubclass(kind, RequestError):
        return kind(message, param)
    if issubclass(kind, OverloadedError):
        return kind(message, _seconds(retry_after_s))
    # Others have arguments of their own, such as the layer and the groups, which the text names.
    return kind(message) if kind.__init__ is RaymoeError.__init__ else RaymoeError(message)


def _seconds(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() and len(text) < 10 else 1
