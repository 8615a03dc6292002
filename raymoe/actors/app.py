"""From settings to a Serve application, for `raymoe serve` and for plain `serve run` alike."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from raymoe.actors.spec import Spec
from raymoe.actors.tls import check_tls
from raymoe.config import Settings
from raymoe.errors import ConfigError

if TYPE_CHECKING:
    from ray.serve import Application

Progress = Callable[[str, int, int], None]

_OF_SERVE = {
    "host": "http_options.host",
    "port": "http_options.port",
    "tls_cert": "http_options.ssl_certfile",
    "tls_key": "http_options.ssl_keyfile",
    "grpc_port": "grpc_options.port",
}


def build_app(args: Mapping[str, Any]) -> Application:
    """The application for `serve run FILE` and `serve deploy FILE`; `args` are nested settings.

    Raises:
        ConfigError: an unknown key, or one that belongs elsewhere in a Serve file.
        CheckpointError, MemoryLimitError: as `prepare`.
    """
    for key, place in _OF_SERVE.items():
        if key in (args.get("server") or {}):
            raise ConfigError(f"server.{key} can't be set in a Serve file's args: set {place} there")
    return application(prepare(Settings.build(args, "args of the Serve file")))


def application(spec: Spec) -> Application:
    """Ingress in front of routers. Controller and expert groups are started by the routers."""
    from raymoe.actors.ingress import Ingress, ingress_options
    from raymoe.actors.router import Router, router_options

    # mypy sees the classes, Serve's decorator made deployments of them.
    router_deployment: Any = Router
    ingress_deployment: Any = Ingress
    router = router_deployment.options(**router_options(spec.settings)).bind(spec)
    bound: Application = ingress_deployment.options(**ingress_options(spec.settings)).bind(spec, router)
    return bound


def prepare(settings: Settings, progress: Progress | None = None, available: int | None = None) -> Spec:
    """Check everything that can be checked before anything is started, and draw the deployment's secrets.

    Args:
        progress: called as (stage, done, total) while the embedded default is built.
        available: bytes of memory; by default what this machine and its control group have left. Zero or less
            skips the check.

    Raises:
        CheckpointError: the folder is missing or broken; NotMoeError if it is no Mixture-of-Experts model.
        MemoryLimitError: it will not fit.
        ConfigError: more expert groups than experts, a model that can't be deterministic, or something is wrong
            with the files of API keys or of TLS.
    """
    import torch

    from raymoe.api.keys import KeyRing
    from raymoe.checkpoint.available import available_bytes
    from raymoe.checkpoint.folder import Checkpoint
    from raymoe.checkpoint.memory import check_memory
    from raymoe.checkpoint.moe import describe
    from raymoe.checkpoint.resolve import resolve
    from raymoe.model.invariant_check import check_can_be_invariant
    from raymoe.policy.layout import even_slices

    settings = _with_absolute_paths(settings)
    check_tls(settings.server)
    KeyRing.of(settings)
    if settings.model.path is None:
        from raymoe.checkpoint.embedded import embedded_model

        path = embedded_model(progress)
    else:
        path = resolve(settings.model.path)
    path = path.resolve()
    checkpoint = Checkpoint.open(path)
    wanted = settings.model.dtype
    if settings.model.deterministic:
        check_can_be_invariant(checkpoint.config)
    model = describe(checkpoint, None if wanted == "auto" else getattr(torch, wanted))
    for layer in model.layers:
        even_slices(layer.experts, settings.groups.count)
    if available is None:
        available = available_bytes()
    if available > 0:
        check_memory(model, settings, available)
    name = settings.model.name or path.name
    settings = settings.model_copy(
        update={"model": settings.model.model_copy(update={"path": str(path), "name": name})}
    )
    return Spec(
        generation=secrets.token_hex(4),
        token=secrets.token_hex(16),
        path=str(path),
        model_name=name,
        fingerprint=checkpoint.fingerprint,
        dtype=str(model.dtype).removeprefix("torch."),
        hidden_size=model.hidden_size,
        experts_per_layer=tuple(layer.experts for layer in model.layers),
        expert_bytes=sum(t.nbytes for t in checkpoint.tensors.values()) - model.router_file_bytes,
        settings=settings,
    )


def _with_absolute_paths(settings: Settings) -> Settings:
    """Ray's processes have other working directories than whoever wrote the settings."""
    server = settings.server
    files = {name: getattr(server, name) for name in ("keys_file", "tls_cert", "tls_key")}
    # Links stay: secrets of Kubernetes change by them.
    absolute = {name: os.path.abspath(file) for name, file in files.items() if file is not None}
    return settings.model_copy(update={"server": server.model_copy(update=absolute)})
