"""The command for authors of programs: ``protocol``."""

from __future__ import annotations

from typing import Annotated

import typer

from attncheck.cli.app import app, examples
from attncheck.errors import ExitCode, UsageError


@app.command(epilog=examples("attncheck protocol ./my_program"))
def protocol(
    program: Annotated[str, typer.Argument(metavar="COMMAND", help="The program, with its arguments.")],
    seconds: Annotated[
        float, typer.Option("--time-limit", metavar="SECONDS", help="Time limit of one answer.", min=0.1)
    ] = 10.0,
) -> None:
    """Try whether a program in any language speaks the protocol.

    Every rule is tried, and what is malformed is said. Numbers are not judged: attncheck check -i COMMAND does that.
    The exit code is 1 where a rule is broken.
    """
    from attncheck.execution.user_code import words_of_program
    from attncheck.protocol_rules import try_rules

    words = words_of_program(program)
    if not words:
        raise UsageError(f"{program}: no program; expected a path to one, such as ./attention, or a command")
    broken = 0
    for rule in try_rules(words, seconds):
        broken += bool(rule.wrong)
        typer.echo(f"{'broken' if rule.wrong else '-' if rule.reason else 'ok':6} {rule.says}")
        if rule.wrong or rule.reason:
            typer.echo(f"       {rule.wrong or rule.reason}")
    if broken:
        raise typer.Exit(ExitCode.DISAGREE)
    typer.echo(f"It speaks the protocol. Judge its numbers: attncheck check -i {program!r}")
