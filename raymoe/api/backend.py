"""The seam between the client surface and whatever generates tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from raymoe.engine.messages import GenerateChunk, GenerateRequest


class Backend(Protocol):
    """Generates tokens for requests that have been validated whole."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """Stream the tokens of one sequence; the last chunk carries the finish reason.

        Closing or cancelling the iterator stops the sequence. Failures are raised as `raymoe.errors`.
        """
        ...

    async def readiness(self) -> str | None:
        """None when requests can be answered, else the reason why not. Must be cheap: probes call it."""
        ...
