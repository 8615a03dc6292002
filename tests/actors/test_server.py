"""The whole server on a tiny checkpoint: two routers, two expert groups, and what happens when parts die."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from raymoe.actors.ports import free_port
from raymoe.client import AsyncClient, Client
from raymoe.errors import ContextLengthError, DeadlineError, ModelNotFoundError, TooLargeError
from tests.server_process import RAYMOE, ROOT, Server, left_over, raymoe
from tests.tiny import tiny_checkpoint

pytestmark = pytest.mark.server

PROMPTS = [[n, n + 1, n + 2, 7] for n in range(10, 90, 10)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    model = tiny_checkpoint("qwen3_moe", folder / "tiny-qwen3")
    grpc_port = str(free_port("127.0.0.1"))
    server = Server.serve(folder, model, "--routers", "2", "--groups", "2", "--grpc-port", grpc_port)
    yield server
    family = server.family()
    assert server.stop() == 130, server.log.read_text()
    assert left_over(family) == []
    assert not [name for name in os.listdir("/dev/shm") if "ray" in name]
    assert not (folder / "raymoe" / "raymoe.json").exists()


def texts(server: Server, tokens: int) -> list[str]:
    """The greedy texts of all prompts, asked at once."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(lambda p: server.complete(p, tokens), PROMPTS))
    assert {answer.status_code for answer in answers} == {200}, [answer.text for answer in answers]
    return [answer.json()["choices"][0]["text"] for answer in answers]


def eventually(condition: Callable[[], Any], within_s: float = 60.0) -> Any:
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.2)
    return value


def test_status_from_another_process_shows_groups_and_routers(server: Server) -> None:
    status = server.status()
    assert status["running"] and status["url"] == server.url and status["model"] == "tiny-qwen3"
    assert [group["state"] for group in status["groups"]] == ["serving", "serving"]
    assert [router["acked_epoch"] for router in status["routers"]] == [1, 1]
    # Both routers have a lane to both groups.
    assert [group["stats"]["lanes"] for group in status["groups"]] == [2, 2]


def test_everything_listens_on_loopback_only(server: Server) -> None:
    for process in server.family():
        for place in process.net_connections("tcp"):
            if place.status == psutil.CONN_LISTEN:
                assert place.laddr.ip in {"127.0.0.1", "::ffff:127.0.0.1", "::1"}, (process.cmdline(), place)


def test_stream_and_whole_answer_have_the_same_text(server: Server) -> None:
    whole = server.complete(PROMPTS[0], 20).json()["choices"][0]["text"]
    body = {"prompt": PROMPTS[0], "max_tokens": 20, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    streamed = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1])
    assert streamed == whole and whole


def test_refusals_come_in_the_envelope_and_the_next_request_works(server: Server) -> None:
    for body, status, code in (
        ({"model": "other", "prompt": "x"}, 404, "model_not_found"),
        ({"prompt": ""}, 400, "invalid_request"),
        ({"prompt": [1] * 600}, 400, "context_length_exceeded"),
        ({"prompt": [100000]}, 400, "token_out_of_vocabulary"),
    ):
        response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert server.complete(PROMPTS[0], 2).status_code == 200


def pairs(server: Server) -> int:
    """What all expert groups have computed so far."""
    return sum(group["stats"]["pairs"] for group in server.status()["groups"])


def test_client_that_leaves_stops_its_sequence(server: Server) -> None:
    before = pairs(server)
    body = {"prompt": PROMPTS[1], "max_tokens": 400, "temperature": 1.5, "stream": True, "seed": 3}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        next(response.iter_lines())
    time.sleep(3)
    settled = pairs(server)
    a_token = 3 * 2  # layers, experts of each
    assert settled - before < 200 * a_token, "it went on after its client had left"
    time.sleep(2)
    # Idle routers try their experts now and then, with two tokens.
    assert pairs(server) - settled <= 2 * 2 * 2 * a_token


def test_grpc_has_the_answers_and_the_refusals_of_http(server: Server) -> None:
    status, wanted = server.status(), texts(server, 20)
    with Client(status["grpc_url"], timeout_s=60) as client:
        answers = [client.generate(prompt, max_tokens=20, temperature=0) for prompt in PROMPTS]
        assert [answer.text for answer in answers] == wanted
        pieces = list(client.generate_stream(PROMPTS[0], max_tokens=20, temperature=0))
        assert "".join(piece.text for piece in pieces) == wanted[0] and len(pieces) > 2
        assert pieces[-1].usage == answers[0].usage
        assert client.models() == [status["model"]]
        layout = client.layout()
        assert layout["epoch"] == status["epoch"]
        assert [group["name"] for group in layout["groups"]] == [group["name"] for group in status["groups"]]
        assert [len(layer["experts"]) for layer in layout["layers"]] == [8, 8, 8]
        for prompt, options, kind in (
            ([1], {"model": "other"}, ModelNotFoundError),
            ([1] * 600, {}, ContextLengthError),
            ("x" * (9 << 20), {}, TooLargeError),
        ):
            for ask in (client.generate, lambda *a, **k: list(client.generate_stream(*a, **k))):
                with pytest.raises(kind):
                    ask(prompt, **options)


def test_grpc_tools_find_services_and_health(server: Server) -> None:
    address = server.status()["grpc_url"].removeprefix("grpc://")
    with grpc.insecure_channel(address) as channel:
        found = ProtoReflectionDescriptorDatabase(channel)
        service = "raymoe.v1.InferenceService"
        assert {service, "grpc.health.v1.Health"} <= set(found.get_services())
        assert found.FindFileContainingSymbol(service).name == "raymoe/v1/inference.proto"
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_grpc_client_that_leaves_or_has_no_time_left_stops_its_sequence(server: Server) -> None:
    url, before = server.status()["grpc_url"], pairs(server)
    long: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}

    async def leave(client: AsyncClient, number: int) -> None:
        if number % 4 == 3:
            with pytest.raises(DeadlineError):
                await client.generate(PROMPTS[0], timeout_s=0.2, **long)
        else:
            # At any moment: a message may be on its way.
            stream = client.generate_stream(PROMPTS[0], **long)
            for _ in range(1 + number % 4):
                await anext(stream)
            await stream.aclose()

    async def leave_all() -> None:
        async with AsyncClient(url, timeout_s=60) as client:
            for _ in range(4):
                await asyncio.gather(*(leave(client, number) for number in range(10)))

    asyncio.run(leave_all())
    with Client(url) as client, pytest.raises(DeadlineError):
        list(client.generate_stream(PROMPTS[1], n=20, timeout_s=0.3, **long))
    eventually(
        lambda: "raymoe_grpc_requests_in_flight 0.0" in httpx.get(f"{server.url}/metrics", timeout=60).text
    )
    a_token = 3 * 2
    assert pairs(server) - before < 60 * 400 * a_token / 4, "some went on to their end"


def test_group_killed_under_load_is_replaced_and_the_texts_are_right(server: Server) -> None:
    wanted = texts(server, 400)
    victim = server.status()["groups"][0]
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(texts, server, 400)
        time.sleep(0.5)
        os.kill(victim["pid"], signal.SIGKILL)
        assert not load.done()
        assert load.result() == wanted
    status = eventually(lambda: (s := server.status())["epoch"] == 2 and s)
    assert [group["name"][-4:] for group in status["groups"]] == ["g0r1", "g1r0"]
    assert status["problems"] == []
    assert texts(server, 20) == [
        text[: len(short)] for text, short in zip(wanted, texts(server, 20), strict=True)
    ]


def test_controller_killed_is_started_anew_and_adopts_the_groups(server: Server) -> None:
    before = server.status()
    os.kill(before["controller_pid"], signal.SIGKILL)
    assert server.complete(PROMPTS[0], 20).status_code == 200
    after = eventually(lambda: (s := server.status()).get("controller_pid") and len(s["groups"]) == 2 and s)
    assert after["controller_pid"] != before["controller_pid"]
    assert [g["pid"] for g in after["groups"]] == [g["pid"] for g in before["groups"]]
    # Above what the routers had, and they use it.
    eventually(lambda: {r["acked_epoch"] for r in server.status()["routers"]} == {before["epoch"] + 1})


def test_engine_killed_is_replaced_with_its_router(server: Server) -> None:
    wanted = texts(server, 20)
    victim = server.engines()[0]
    victim.kill()
    eventually(lambda: len([p for p in server.engines() if p.pid != victim.pid]) == 2)
    eventually(lambda: len(server.status()["routers"]) >= 2)
    eventually(lambda: {server.complete(p, 2).status_code for p in PROMPTS} == {200})
    assert texts(server, 20) == wanted


@pytest.mark.parametrize("part", ["Router", "Ingress", "ProxyActor", "ServeController"])
def test_other_part_killed_is_replaced_and_nothing_is_left_over(server: Server, part: str) -> None:
    wanted = texts(server, 20)
    (victim, *others) = server.called(part)
    victim.kill()
    # Serve's own parts: until they are back a client may get no answer, but never a wrong one.
    eventually(lambda: victim not in (now := server.called(part)) and len(now) == 1 + len(others))
    eventually(lambda: answers(server))
    assert texts(server, 20) == wanted
    eventually(lambda: len(server.engines()) == 2)


def answers(server: Server) -> bool:
    """Whether every prompt is answered at present."""
    try:
        return {server.complete(prompt, 2).status_code for prompt in PROMPTS} == {200}
    except httpx.TransportError:
        return False


def start_loading(folder: Path, port: int | None = None) -> tuple[Server, list[psutil.Process]]:
    """A server that has started Ray and now loads its model, and all its processes."""
    model = tiny_checkpoint("mixtral", folder / "tiny-mixtral")
    port = port or free_port("127.0.0.1")
    server = Server(folder, [*RAYMOE, "serve", str(model), "--port", str(port)], port)
    eventually((folder / "raymoe" / "raymoe.json").exists)
    time.sleep(2)
    assert server.process.poll() is None, server.log.read_text()
    return server, server.family()


def test_down_in_another_terminal_stops_a_server_that_still_loads(tmp_path: Path) -> None:
    server, family = start_loading(tmp_path)
    assert "stopped raymoe" in raymoe(tmp_path, "down").stdout
    assert server.process.wait(timeout=10) == 0, server.log.read_text()
    assert left_over(family) == []


def test_server_whose_ray_dies_while_it_loads_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    server, family = start_loading(tmp_path)
    for process in server.called("raylet/raylet"):
        process.kill()
    assert server.process.wait(timeout=90) == 1, server.log.read_text()
    assert "raymoe: the private Ray has ended" in server.log.read_text()
    assert left_over(family) == []
    assert not (tmp_path / "raymoe" / "raymoe.json").exists()


def test_sigterm_to_every_process_of_a_service_is_a_clean_end(tmp_path: Path) -> None:
    server, family = start_loading(tmp_path)
    server.wait_ready()
    family = server.family()
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    assert server.process.wait(timeout=90) == 0, server.log.read_text()
    assert left_over(family) == []
    assert not (tmp_path / "raymoe" / "raymoe.json").exists()


def test_after_a_killed_server_down_or_the_next_server_leaves_nothing(tmp_path: Path) -> None:
    server, family = start_loading(tmp_path)
    server.process.kill()
    server.process.wait()
    assert not server.status()["running"]
    # On the same port, which what is left of the first may hold.
    server, second = start_loading(tmp_path, server.port)
    assert left_over(family, within_s=0) == []
    server.process.kill()
    server.process.wait()
    done = raymoe(tmp_path, "down")
    assert done.returncode == 0, done.stderr
    assert left_over(second, within_s=30) == []
    assert not (tmp_path / "raymoe" / "raymoe.json").exists()


def test_serve_run_with_the_file_of_deployments_serves(tmp_path: Path) -> None:
    model = tiny_checkpoint("mixtral", tmp_path / "tiny-mixtral")
    port = free_port("127.0.0.1")
    config = yaml.safe_load((ROOT / "deployments" / "local.yaml").read_text())
    config["http_options"]["port"] = port
    config["applications"][0]["args"]["model"] = {"path": str(model)}
    (tmp_path / "local.yaml").write_text(yaml.safe_dump(config))
    serve_run = Path(sys.executable).with_name("serve")
    server = Server(tmp_path, [str(serve_run), "run", str(tmp_path / "local.yaml")], port)
    try:
        server.wait_ready()
        assert server.complete([1, 2, 3], 5).status_code == 200
        family = server.family()
    finally:
        server.stop()
    assert left_over(family, within_s=90) == []
