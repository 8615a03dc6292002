"""The command line. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from raymoe import __version__
from raymoe.actors import signals
from raymoe.api.keys_command import keys
from raymoe.commands import ask
from raymoe.config import Settings
from raymoe.errors import ConfigError, RaymoeError

app = typer.Typer(
    help="Serve Mixture-of-Experts models on Ray, one actor per expert group.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(keys, name="keys")

app.command()(ask.chat)
app.command()(ask.generate)

Config = Annotated[Path | None, typer.Option("--config", help="YAML file of settings.")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any setting: section.key=value. May be given several times."),
]
AppName = Annotated[str, typer.Option("--app", help="Which server, if several run.")]
Address = Annotated[
    str | None, typer.Option(help="A Ray cluster to join (host:port or auto).", envvar="RAY_ADDRESS")
]


@app.command()
def serve(
    path: Annotated[str | None, typer.Argument(help="Model folder or Hugging Face id.")] = None,
    config: Config = None,
    groups: Annotated[int | None, typer.Option(help="Expert groups.")] = None,
    routers: Annotated[int | None, typer.Option(help="Router replicas.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    grpc_port: Annotated[
        int | None, typer.Option(help="Port of the gRPC interface; none without it.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or auto.")] = None,
    name: Annotated[str | None, typer.Option(help="Model id that clients use.")] = None,
    deterministic: Annotated[
        bool | None,
        typer.Option("--deterministic/--no-deterministic", help="Bits that no other request can change."),
    ] = None,
    address: Address = None,
    sets: Sets = None,
) -> None:
    """Serve a model until Ctrl-C. Without PATH the small embedded model is built once and served."""
    overrides = _overrides(
        sets,
        {
            "model.path": path,
            "model.name": name,
            "model.dtype": dtype,
            "model.deterministic": deterministic,
            "groups.count": groups,
            "router.replicas": routers,
            "server.host": host,
            "server.port": port,
            "server.grpc_port": grpc_port,
        },
    )
    _serve(Settings.load(config, overrides=overrides), address)


@app.command()
def demo(config: Config = None, sets: Sets = None) -> None:
    """Serve the embedded model on a free port, ask it one question, show who computed what, and stop."""
    settings = Settings.load(config, overrides=_overrides(sets, {}))
    _serve(settings, None, demo=True)


@app.command()
def status(
    app_name: AppName = "raymoe",
    address: Address = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show a running server: where it listens, its groups and routers. Exit code 1 if there is none."""
    from raymoe.actors import remote

    found = remote.status(app_name, address)
    if as_json:
        typer.echo(json.dumps(found))
    else:
        typer.echo(remote.as_text(found))
    if not found["running"]:
        raise typer.Exit(1)


@app.command()
def down(app_name: AppName = "raymoe", address: Address = None) -> None:
    """Stop a server that was started elsewhere, and remove whatever is left of one that crashed."""
    from raymoe.actors import remote

    typer.echo(remote.down(app_name, address))


@app.command()
def version() -> None:
    """Show the version."""
    typer.echo(__version__)


def _serve(settings: Settings, address: str | None, demo: bool = False) -> None:
    from raymoe.actors import environment
    from raymoe.actors.ports import check_free, free_port

    if demo:
        if settings.server.guarded:
            raise ConfigError("raymoe demo asks without a key: leave out server.keys_file and server.keys")
        port = free_port(settings.server.host)
        settings = settings.model_copy(
            update={"server": settings.server.model_copy(update={"port": port, "app": f"demo-{os.getpid()}"})}
        )
    check_free(settings, private=address is None)
    # Before anything imports Ray, which reads its environment once.
    token = environment.set_private() if address is None else ""
    from raymoe.actors import demonstration
    from raymoe.actors.app import prepare
    from raymoe.actors.server import running, url, wait_for_end

    # A cluster's memory is not this machine's.
    spec = prepare(settings, _show_progress, available=None if address is None else 0)
    _say(f"model {spec.model_name} ({spec.path}): {spec.shape()}")
    with running(spec, address, token, _say) as record:
        _say(f"listening on {url(record)} (logs in {record.logs})")
        if record.grpc_url:
            _say(f"gRPC on {record.grpc_url}")
        if demo:
            demonstration.show(record, typer.echo)
        else:
            _say(demonstration.curl_line(record, keys=settings.server.guarded))
            wait_for_end(record)


def _overrides(sets: list[str] | None, options: dict[str, Any]) -> dict[str, Any]:
    """Options over `--set`: the more particular wins."""
    import yaml

    result: dict[str, Any] = {}
    for pair in sets or []:
        key, equals, value = pair.partition("=")
        if not equals or key.count(".") != 1:
            raise ConfigError(f"--set takes section.key=value, such as groups.count=4; got {pair!r}")
        try:
            result[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ConfigError(f"--set {key}: the value {value!r} is not YAML") from None
    result.update({key: value for key, value in options.items() if value is not None})
    return result


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _show_progress(stage: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        end = "\n" if total and done >= total else ""
        typer.echo(
            f"\r\x1b[Kbuilding the embedded model: {stage} {100 * done // max(total, 1)} %{end}",
            err=True,
            nl=False,
        )
    elif done == 0:
        _say(f"building the embedded model: {stage}")


def main() -> None:
    """The command `raymoe`. Whatever is wrong ends as one sentence and exit code 1, Ctrl-C as 130, SIGTERM as 0."""
    signals.catch()
    try:
        app()
    except RaymoeError as error:
        _say(f"raymoe: {error.message}")
        sys.exit(1)
    except (KeyboardInterrupt, SystemExit):
        # Typer makes an exit of its own of an interrupt.
        if signals.exit_code() is None:
            raise
        _say("stopped")
        sys.exit(signals.exit_code())


if __name__ == "__main__":
    main()
