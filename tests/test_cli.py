"""The command line as an operator meets it: one sentence for each mistake, and servers found from elsewhere."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from raymoe.actors.ports import free_port
from tests.server_process import environment, raymoe
from tests.tiny import tiny_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("olmoe", tmp_path_factory.mktemp("cli") / "tiny-olmoe")


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The one sentence of a command that failed."""
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("raymoe: ")
    return last.removeprefix("raymoe: ")


def serve(runtime: Path, *args: str, **more: str) -> subprocess.CompletedProcess[str]:
    return raymoe(runtime, "serve", "--port", str(free_port("127.0.0.1")), *args, **more)


def test_missing_folder_is_named(tmp_path: Path) -> None:
    assert "/no/such/folder" in refused(serve(tmp_path, "/no/such/folder"))


def test_dense_model_is_refused_as_not_an_moe(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "dense")
    said = refused(serve(tmp_path, str(tmp_path / "dense")))
    assert "llama" in said.lower() and ("expert" in said.lower() or "moe" in said.lower())


def test_taken_port_is_named_before_anything_is_loaded(tmp_path: Path, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused(raymoe(tmp_path, "serve", str(model), "--port", str(port)))
    assert str(port) in said and "--port" in said


def test_too_little_memory_says_how_much_is_needed_and_how_much_there_is(tmp_path: Path, model: Path) -> None:
    said = refused(serve(tmp_path, str(model), "--set", f"router.kv_bytes={1 << 50}"))
    assert "KV cache 1048576.0 GiB" in said and "are available" in said and "router.kv_bytes" in said


def test_more_groups_than_experts_are_refused(tmp_path: Path, model: Path) -> None:
    assert "1..8" in refused(serve(tmp_path, str(model), "--groups", "9"))


def test_unknown_settings_are_refused_wherever_they_come_from(tmp_path: Path, model: Path) -> None:
    (tmp_path / "c.yaml").write_text("groups:\n  cuont: 3\n")
    for args, more, name in (
        (["--config", str(tmp_path / "c.yaml")], {}, "groups.cuont"),
        (["--set", "router.replica=2"], {}, "router.replica"),
        ([], {"RAYMOE_SERVER__PROT": "1"}, "server.prot"),
    ):
        said = refused(serve(tmp_path, str(model), *args, **more))
        assert name in said and "accepted here" in said
    assert "section.key=value" in refused(serve(tmp_path, str(model), "--set", "replicas"))


def test_cluster_that_does_not_answer_is_named(tmp_path: Path, model: Path) -> None:
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    assert address in refused(serve(tmp_path, str(model), "--address", address))


CLUSTER = """
import json, sys, time
from raymoe.actors.environment import set_private
set_private()
import os
import ray
ray.init(num_cpus=1, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False)
from ray._common.usage import usage_constants
from ray._private import ray_constants, worker
gcs = worker.global_worker.gcs_client
key, space = usage_constants.CLUSTER_METADATA_KEY, ray_constants.KV_NAMESPACE_CLUSTER
metadata = json.loads(gcs.internal_kv_get(key, namespace=space))
metadata["ray_version"] = "2.9.0"
gcs.internal_kv_put(key, json.dumps(metadata).encode(), True, namespace=space)
print(json.dumps([gcs.address, os.environ["RAY_AUTH_TOKEN"]]), flush=True)
sys.stdin.read()
"""


def test_ray_of_another_version_is_refused_with_both_versions(tmp_path: Path, model: Path) -> None:
    cluster = subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        env=environment(tmp_path),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert cluster.stdin is not None and cluster.stdout is not None
    try:
        address, token = json.loads(cluster.stdout.readline())
        said = refused(
            serve(tmp_path, str(model), "--address", address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token,
                  RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0")
        )  # fmt: skip
        assert "2.9.0" in said and "2.60.0" in said
    finally:
        cluster.stdin.close()
        cluster.stdout.close()
        cluster.wait(timeout=60)


def test_without_a_server_status_says_so_and_down_is_content(tmp_path: Path) -> None:
    done = raymoe(tmp_path, "status")
    assert (done.returncode, done.stdout.strip()) == (1, "raymoe is not running")
    assert json.loads(raymoe(tmp_path, "status", "--json").stdout) == {"app": "raymoe", "running": False}
    done = raymoe(tmp_path, "down")
    assert (done.returncode, done.stdout.strip()) == (0, "nothing is running")


def test_help_names_the_commands(tmp_path: Path) -> None:
    said = raymoe(tmp_path, "--help").stdout
    assert all(command in said for command in ("serve", "status", "down", "demo"))
