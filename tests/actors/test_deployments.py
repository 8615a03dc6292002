"""The files of deployments/: Serve's schema, raymoe's settings, and the same application as `raymoe serve`."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel
from ray.serve import Application
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from ray.serve._private.build_app import build_app as build
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig, ServeDeploySchema
from typer.testing import CliRunner

from raymoe import cli
from raymoe.actors import cluster
from raymoe.actors.app import application, prepare
from raymoe.actors.spec import Spec
from raymoe.config import Settings
from raymoe.errors import ConfigError
from tests.server_process import ROOT

FILES = sorted((ROOT / "deployments").glob("*.yaml"))


def read(file: Path) -> dict[str, Any]:
    config = yaml.safe_load(file.read_text())
    assert isinstance(config, dict)
    return config


def models_of(annotation: Any) -> Iterator[type[BaseModel]]:
    """The pydantic models in a field's annotation, inside of unions and lists too."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    if get_origin(annotation) in (Union, UnionType, list):
        for part in get_args(annotation):
            yield from models_of(part)


def ignored(value: Any, model: type[BaseModel], path: str = "") -> list[str]:
    """The keys of a Serve file that its schema doesn't know. Serve itself ignores them."""
    if isinstance(value, list):
        return [key for i, part in enumerate(value) for key in ignored(part, model, f"{path}[{i}]")]
    found = []
    for key, part in value.items():
        field = model.model_fields.get(key)
        where = f"{path}.{key}".lstrip(".")
        if field is None:
            found.append(where)
        for inner in models_of(field.annotation) if field else ():
            if isinstance(part, (dict, list)):
                found += ignored(part, inner, where)
    return found


def test_there_is_a_file_for_each_purpose() -> None:
    assert [file.stem for file in FILES] == ["gpu", "local", "two_routers"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_key_is_known_to_serve_or_raymoe(file: Path) -> None:
    config = read(file)
    ServeDeploySchema.model_validate(config)
    assert ignored(config, ServeDeploySchema) == []
    assert config["http_options"]["host"] == "127.0.0.1"
    for each in config["applications"]:
        settings = Settings.build(each["args"])
        # Actors are named after the one, Serve and `raymoe status` know the other.
        assert settings.server.app == each["name"]


@pytest.mark.parametrize(
    "path",
    [
        "proxy_loaction",
        "http_options.hots",
        "logging_config.log_lvel",
        "applications[0].route_perfix",
        "applications[0].logging_config.enable_acces_log",
        "applications[0].deployments[0].num_replica",
        "applications[0].deployments[0].ray_actor_options.num_cpu",
    ],
)
def test_an_unknown_key_is_noticed_at_every_level(path: str) -> None:
    config = read(ROOT / "deployments" / "local.yaml")
    config["logging_config"] = {}
    config["applications"][0]["deployments"] = [{"name": "Router", "ray_actor_options": {"num_cpus": 1}}]
    assert ignored(config, ServeDeploySchema) == []
    place: Any = config
    *parents, last = path.replace("[0]", ".0").split(".")
    for part in parents:
        place = place[0] if part == "0" else place[part]
    place[last] = 1
    assert ignored(config, ServeDeploySchema) == [path]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
@pytest.mark.parametrize("path", ["modle", "model.pth", "groups.conut", "router.kv_byte", "server.prot"])
def test_an_unknown_setting_is_refused_in_every_section(file: Path, path: str) -> None:
    section, _, name = path.partition(".")
    args = read(file)["applications"][0]["args"]
    args[section] = {**args.get(section, {}), name: 1} if name else 1
    with pytest.raises(ConfigError, match=f"unknown setting {path}"):
        Settings.build(args)


def described(built: Application, name: str) -> list[dict[str, Any]]:
    """All that Serve would be told of each deployment, with fixed values for what is drawn anew each time."""

    def plain(argument: Any) -> Any:
        if isinstance(argument, Spec):
            assert argument.generation and argument.token
            return replace(argument, generation="drawn", token="drawn")
        return argument.deployment_name if isinstance(argument, DeploymentHandle) else argument

    return [
        {
            "name": deployment.name,
            "class": deployment.func_or_class.__qualname__,
            "config": deployment._deployment_config.model_dump(),
            "actor": deployment.ray_actor_options,
            "arguments": [plain(argument) for argument in deployment.init_args],
            "named arguments": deployment.init_kwargs,
        }
        for deployment in build(built, name=name, route_prefix="/").deployments
    ]


def by_raymoe_serve(config: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Application, dict[str, Any]]:
    """The application that `raymoe serve --config` gives to Serve, and the options beside it."""
    found: dict[str, Any] = {}
    settings: list[Settings] = []
    monkeypatch.setattr(cli, "_serve", lambda given, address: settings.append(given))
    done = CliRunner().invoke(cli.app, ["serve", "--config", str(config)], catch_exceptions=False)
    assert done.exit_code == 0, done.output

    monkeypatch.setattr(cluster.serve, "start", lambda **options: found.update(options))
    monkeypatch.setattr(cluster.serve, "run", lambda bound, **options: found.update(options, bound=bound))
    monkeypatch.setattr(cluster, "_check_listening", lambda server: None)
    server = settings[0].server
    cluster.deploy(application(prepare(settings[0])), server)
    return found.pop("bound"), found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_raymoe_serve_and_serve_run_make_the_same_application(
    file: Path, tiny_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raymoe.checkpoint.available.available_bytes", lambda: 1 << 40)
    schema = read(file)
    entry = copy.deepcopy(schema["applications"][0])
    entry["args"].setdefault("model", {})["path"] = str(tiny_folder("olmoe"))
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(entry["args"]))
    ours, options = by_raymoe_serve(tmp_path / "settings.yaml", monkeypatch)
    module, _, name = entry["import_path"].partition(":")
    builder = getattr(importlib.import_module(module), name)
    # As Serve's own task does that builds the applications of a file.
    theirs = call_user_app_builder_with_args_if_necessary(builder, entry["args"])

    assert described(ours, entry["name"]) == described(theirs, entry["name"])
    http = {key: value for key, value in options["http_options"].items() if value is not None}
    assert http == schema["http_options"]
    assert options["grpc_options"] is None
    assert (options["name"], options["route_prefix"]) == (entry["name"], entry["route_prefix"])
    assert LoggingConfig(**options["logging_config"]) == LoggingConfig(**entry["logging_config"])


def test_the_comparison_sees_a_setting_that_only_one_of_them_has(tiny_folder: Callable[[str], Path]) -> None:
    values = {"model": {"path": str(tiny_folder("olmoe"))}}
    one, same, other = (
        application(prepare(Settings.build({**values, "router": {"replicas": n}}), available=0))
        for n in (1, 1, 2)
    )
    assert described(one, "raymoe") == described(same, "raymoe")
    assert described(one, "raymoe") != described(other, "raymoe")
