"""The command line's frame: what every command shares, and how a failure is told."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from attncheck.errors import AttncheckError

app = typer.Typer(
    name="attncheck",
    help="The conformance harness for attention: the same cases through every framework, number by number.",
    epilog="Exit codes: 0 agree, 1 disagree, 2 bad usage or bad case, 3 something could not be run, or too little was "
    "judged.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        from importlib.metadata import version as installed_version

        typer.echo(f"attncheck {installed_version('attncheck')}")
        raise typer.Exit


def main() -> None:
    """Run the command line; every failure of the user's is one line, and its exit code."""
    try:
        app(standalone_mode=True)
    except AttncheckError as error:
        typer.echo(f"attncheck: {error}", err=True)
        sys.exit(error.exit_code)
