"""One small private Ray for all tests that need one. Import this module before anything imports Ray."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from raymoe.actors import environment

ROOT = Path(__file__).parents[1]
if "ray" not in sys.modules:
    environment.set_private()
# Workers import the tests' own actor classes.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
with warnings.catch_warnings():
    # Serve's own use of deprecated pydantic options.
    warnings.simplefilter("ignore")
    import ray.serve


@contextlib.contextmanager
def private() -> Iterator[None]:
    """A running Ray with a few logical CPUs and no dashboard. Whoever asks first starts and ends it."""
    from raymoe.actors import private_ray

    if ray.is_initialized():
        yield
        return
    private_ray.start(cpus=8)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """`private` for all tests."""
    with private():
        yield
