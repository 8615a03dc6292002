"""The standard health service, as grpc-health-probe and load balancers ask it."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse, HealthListRequest

from raymoe.api import grpc_health
from tests.api.grpc_server import channel, method
from tests.api.scripted import ScriptedBackend, make_service, run
from tests.api.test_admission import guarded

NAME = "raymoe.v1.InferenceService"


def ask(service: Any, name: str, request: Any) -> Any:
    async def one() -> Any:
        async with channel(service) as opened:
            return await method(opened, name)(request)

    return run(one())


@pytest.mark.parametrize("service", ["", NAME, "grpc.health.v1.Health"])
def test_check_says_whether_requests_will_be_answered(service: str) -> None:
    backend = ScriptedBackend()
    found = make_service(backend)
    assert ask(found, "Check", HealthCheckRequest(service=service)).status == HealthCheckResponse.SERVING
    backend.reason = "loading"
    assert ask(found, "Check", HealthCheckRequest(service=service)).status == HealthCheckResponse.NOT_SERVING


def test_a_service_that_there_is_not_is_not_found() -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        ask(make_service(ScriptedBackend()), "Check", HealthCheckRequest(service="nope"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND and NAME in caught.value.details()


def test_list_has_every_service() -> None:
    statuses = ask(make_service(ScriptedBackend()), "List", HealthListRequest()).statuses
    assert {name: status.status for name, status in statuses.items()} == dict.fromkeys(
        ("", NAME, "grpc.health.v1.Health"), HealthCheckResponse.SERVING
    )


def test_watch_tells_changes_and_keeps_open_for_a_service_that_may_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grpc_health, "WATCH_S", 0.01)
    backend = ScriptedBackend()

    async def watch() -> None:
        async with channel(make_service(backend)) as opened:
            call = method(opened, "Watch")(HealthCheckRequest())
            assert (await call.read()).status == HealthCheckResponse.SERVING
            backend.reason = "a router is gone"
            assert (await call.read()).status == HealthCheckResponse.NOT_SERVING
            backend.reason = None
            assert (await call.read()).status == HealthCheckResponse.SERVING
            call.cancel()
            other = method(opened, "Watch")(HealthCheckRequest(service="later"))
            assert (await other.read()).status == HealthCheckResponse.SERVICE_UNKNOWN
            assert not other.done()
            other.cancel()

    run(watch())


def test_probes_need_no_key() -> None:
    assert ask(guarded(), "Check", HealthCheckRequest()).status == HealthCheckResponse.SERVING
