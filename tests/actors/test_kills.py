"""kill -9 of each process of a server in turn, and what is left 90 s later: `scripts/test -m long`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.server_process import Server, environment, left_over, raymoe
from tests.tiny import tiny_checkpoint

pytestmark = [pytest.mark.server, pytest.mark.long]

GONE_S = 90.0
VITAL = ["raymoe.cli", "gcs_server", "raylet/raylet", "ray::DashboardAgent", "ray::RuntimeEnvAgent"]
"""The server itself, and the parts without which Ray's node ends. All others are replaced: test_server.py."""


@pytest.mark.parametrize("part", VITAL)
def test_what_can_not_be_replaced_ends_the_server_and_nothing_is_left(tmp_path: Path, part: str) -> None:
    model = tiny_checkpoint("qwen3_moe", tmp_path / "tiny-qwen3")
    server = Server.serve(tmp_path, model, "--routers", "2", "--groups", "2")
    family = server.family()
    (victim,) = server.called(part)
    victim.kill()
    code = server.process.wait(timeout=GONE_S)
    assert left_over(family, within_s=GONE_S) == []
    if part == "raymoe.cli":
        assert raymoe(tmp_path, "status").returncode == 1
    else:
        assert code == 1 and "the private Ray has ended" in server.log.read_text()
    assert raymoe(tmp_path, "down").returncode == 0
    assert not (tmp_path / "raymoe" / "raymoe.json").exists()


DELETE = """
from raymoe.actors import environment, state
record = state.read("raymoe")
environment.join_private(record.token)
import ray
from ray import serve
ray.init(address=record.address, namespace="serve", log_to_driver=False)
serve.delete("raymoe")
"""


def test_deleting_the_application_leaves_neither_controller_nor_groups(tmp_path: Path) -> None:
    model = tiny_checkpoint("qwen3_moe", tmp_path / "tiny-qwen3")
    server = Server.serve(tmp_path, model)
    ours = [process for part in ("Controller", "ExpertGroup", "engine") for process in server.called(part)]
    ours = [process for process in ours if "ServeController" not in " ".join(process.cmdline())]
    assert len(ours) == 1 + 2 + 1
    try:
        subprocess.run([sys.executable, "-c", DELETE], env=environment(tmp_path), check=True, timeout=60)
        assert left_over(ours, within_s=GONE_S) == []
    finally:
        assert server.stop() == 130, server.log.read_text()
