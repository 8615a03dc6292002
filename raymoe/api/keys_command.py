"""The command `raymoe keys`."""

from __future__ import annotations

from typing import Annotated

import typer

from raymoe.api.keys import new_key

keys = typer.Typer(help="API keys.", no_args_is_help=True)


@keys.command()
def new(
    label: Annotated[str, typer.Argument(help="Whose key it is: letters, digits, '.', '_', '-'.")],
) -> None:
    """Make an API key: its line for the file of server.keys_file on stdout, the key itself on stderr, once."""
    key, line = new_key(label)
    typer.echo(f"the key of {label}, which can't be shown again: {key}", err=True)
    typer.echo(line)
