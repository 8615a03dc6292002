"""Ray's environment is set here, before any test module of this folder imports it."""

from __future__ import annotations

from tests.ray_fixture import ray_session

__all__ = ["ray_session"]
