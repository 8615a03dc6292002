"""The standard health service: whether requests will be answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from grpc_health.v1.health_pb2 import (
    HealthCheckRequest,
    HealthCheckResponse,
    HealthListRequest,
    HealthListResponse,
)

from raymoe.api.grpc_methods import SERVICES
from raymoe.api.service import Service
from raymoe.errors import NotFoundError, NotReadyError

WATCH_S = 1.0
"""How often Watch looks."""
_NAMES = ("", *SERVICES)


class Health:
    """The methods of grpc.health.v1.Health. All services are in the same health: that of the application."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def check(self, request: HealthCheckRequest) -> HealthCheckResponse:
        """The state now; a service that there is not is NOT_FOUND."""
        if request.service not in _NAMES:
            raise NotFoundError(f"this service is not served here; served: {', '.join(SERVICES)}", "service")
        return HealthCheckResponse(status=await self._status())

    async def list(self, request: HealthListRequest) -> HealthListResponse:  # noqa: ARG002 - it is empty
        """The state of each service."""
        status = HealthCheckResponse(status=await self._status())
        return HealthListResponse(statuses=dict.fromkeys(_NAMES, status))

    async def watch(self, request: HealthCheckRequest) -> AsyncGenerator[HealthCheckResponse, None]:
        """The state, and each change of it until the client leaves."""
        last = None
        while True:
            # The protocol wants this kept open for a service that is not known: it may come later.
            known = request.service in _NAMES
            status = await self._status() if known else HealthCheckResponse.SERVICE_UNKNOWN
            if status != last:
                yield HealthCheckResponse(status=status)
            last = status
            await asyncio.sleep(WATCH_S)

    async def _status(self) -> HealthCheckResponse.ServingStatus:
        try:
            await self._service.check_ready()
        except NotReadyError:
            return HealthCheckResponse.NOT_SERVING
        return HealthCheckResponse.SERVING
