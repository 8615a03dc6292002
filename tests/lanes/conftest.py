"""One Ray and one actor for the tests of object_store lanes. Ray is imported when the first of them runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.doubles import HELLO


@pytest.fixture(scope="session")
def host() -> Iterator[tuple[Any, str]]:
    """An actor with the group's ends of lanes to `g0`, and its address."""
    from tests.ray_fixture import private

    with private():
        from tests.lanes.hosted import start_host

        yield start_host("g0", HELLO)
