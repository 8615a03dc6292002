"""`raymoe generate` and `raymoe chat`: ask a running server, from this machine or another."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raymoe.errors import NoAnswerError, RequestError

if TYPE_CHECKING:
    from raymoe.client import Answer, Client, Message

Url = Annotated[
    str | None,
    typer.Option(
        "--url", help="http://HOST:PORT or grpc://HOST:PORT; by default the server that runs on this machine."
    ),
]
AppName = Annotated[str, typer.Option("--app", help="Which server, if several run on this machine.")]
Key = Annotated[
    str | None, typer.Option("--api-key", envvar="RAYMOE_API_KEY", help="For servers that want one.")
]
CaFile = Annotated[
    str | None, typer.Option("--ca-file", help="PEM file of authorities, or of the server's own certificate.")
]
Model = Annotated[str | None, typer.Option(help="Model id; by default the one that is served.")]
MaxTokens = Annotated[int | None, typer.Option(help="New tokens at most.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy; by default 1.")]
Seed = Annotated[int | None, typer.Option(help="Draw the same tokens again.")]
System = Annotated[str | None, typer.Option(help="A system message in front.")]


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from standard input.")],
    url: Url = None,
    app_name: AppName = "raymoe",
    api_key: Key = None,
    ca_file: CaFile = None,
    model: Model = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
) -> None:
    """Continue a text, printed as it comes."""
    options = _given(max_tokens=max_tokens, temperature=temperature, seed=seed)
    with _client(url, app_name, api_key, ca_file) as client:
        _print(client.generate_stream(_text(prompt), model=model, **options))


def chat(
    message: Annotated[
        str | None, typer.Argument(help="One question; without it a conversation, a line a turn.")
    ] = None,
    url: Url = None,
    app_name: AppName = "raymoe",
    api_key: Key = None,
    ca_file: CaFile = None,
    model: Model = None,
    system: System = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
) -> None:
    """Ask one question, or talk until end-of-file (Ctrl-D)."""
    options = _given(max_tokens=max_tokens, temperature=temperature, seed=seed)
    turns: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    with _client(url, app_name, api_key, ca_file) as client:
        for asked in _questions(message):
            turns.append({"role": "user", "content": asked})
            try:
                said = _print(client.chat_stream(turns, model=model, **options))
            except RequestError as error:
                if message is not None:
                    raise
                # A conversation goes on without the turn that was refused.
                typer.echo(f"raymoe: {error.message}", err=True)
                turns.pop()
            else:
                turns.append({"role": "assistant", "content": said})


def _client(url: str | None, app_name: str, api_key: str | None, ca_file: str | None) -> Client:
    from raymoe.actors import state
    from raymoe.client import Client

    if url is None:
        here = state.read(app_name)
        if here is None or not here.alive:
            raise NoAnswerError(
                f"{app_name} is not running on this machine: start it, or say where it is (--url)"
            )
        url = here.url
        ca_file = ca_file or here.tls_cert
    return Client(url, api_key=api_key, ca_file=ca_file)


def _questions(message: str | None) -> Iterator[str]:
    if message is not None:
        yield _text(message)
        return
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        typer.echo(prompt, nl=False, err=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def _text(argument: str) -> str:
    return sys.stdin.read() if argument == "-" else argument


def _print(pieces: Iterator[Answer]) -> str:
    """Print the text as it comes; returns it."""
    said = ""
    for piece in pieces:
        said += piece.text
        typer.echo(piece.text, nl=False)
        sys.stdout.flush()
    typer.echo()
    return said


def _given(**options: Any) -> Any:
    return {name: value for name, value in options.items() if value is not None}
