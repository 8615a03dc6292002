"""From a code to the error that the server had."""

from __future__ import annotations

import pytest

from raymoe.client.failures import failure
from raymoe.errors import STATUS, OverloadedError, RateLimitError, RaymoeError, RequestError


@pytest.mark.parametrize("kind", STATUS, ids=lambda kind: kind.__name__)
def test_every_code_of_the_table_becomes_an_error_with_the_same_text(kind: type[RaymoeError]) -> None:
    status = STATUS[kind]
    error = failure(status.code, "text", "field", "7")
    assert str(error) == "text"
    if issubclass(kind, RequestError):
        assert type(error) is kind and error.param == "field"
    if issubclass(kind, OverloadedError):
        assert type(error) is kind and error.retry_after_s == 7


def test_what_is_not_in_the_table_is_an_error_all_the_same() -> None:
    assert type(failure("new_code", "text")) is RaymoeError


@pytest.mark.parametrize("said", [None, "", "soon", "-1", "9" * 20, "1.5"])
def test_a_retry_time_that_is_none_is_one_second(said: str | None) -> None:
    error = failure("rate_limit_exceeded", "text", None, said)
    assert isinstance(error, RateLimitError) and error.retry_after_s == 1
