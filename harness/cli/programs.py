"""The command for authors of programs: ``protocol``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from attncheck.cli.app import app, examples
from attncheck.cli.options import AsJson
from attncheck.cli.output import print_document
from attncheck.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from attncheck.protocol_rules import Rule
    from attncheck.reports.machine.other_documents import ProtocolDocument


@app.command(epilog=examples("attncheck protocol ./my_program"))
def protocol(
    program: Annotated[str, typer.Argument(metavar="COMMAND", help="The program, with its arguments.")],
    seconds: Annotated[
        float, typer.Option("--time-limit", metavar="SECONDS", help="Time limit of one answer.", min=0.1)
    ] = 10.0,
    as_json: AsJson = False,
) -> None:
    """Check that a program in any language speaks the protocol.

    Every rule is tried, and what is malformed is said. Numbers are not judged: attncheck check -i COMMAND does that.
    The exit code is 1 where a rule is broken.
    """
    from attncheck.execution.user_code import words_of_program
    from attncheck.protocol_rules import try_rules

    words = words_of_program(program)
    if not words:
        raise UsageError(f"{program}: no program; expected a path to one, such as ./attention, or a command")
    rules = []
    for rule in try_rules(words, seconds):
        rules.append(rule)
        if not as_json:
            typer.echo(f"{'broken' if rule.wrong else '-' if rule.reason else 'ok':6} {rule.says}")
            if rule.wrong or rule.reason:
                typer.echo(f"       {rule.wrong or rule.reason}")
    broken = [rule for rule in rules if rule.wrong]
    code = ExitCode.DISAGREE if broken else ExitCode.AGREE
    if as_json:
        print_document(_document(program, rules, code))
    elif not broken:
        typer.echo(f"It speaks the protocol. Judge its numbers: attncheck check -i {program!r}")
    raise typer.Exit(code)


def _document(program: str, rules: Sequence[Rule], code: ExitCode) -> ProtocolDocument:
    from attncheck.commands import joined
    from attncheck.reports.machine.other_documents import ProtocolDocument, RuleRecord
    from attncheck.reports.machine.text import header

    broken = sum(bool(rule.wrong) for rule in rules)
    return ProtocolDocument(
        attncheck=header("protocol"),
        exit_code=int(code),
        answer=f"{broken:,} of {len(rules):,} rules are broken" if broken else "it speaks the protocol",
        failures=[],
        next=[] if broken else [joined(["attncheck", "check", "-i", program])],
        notes=[],
        program=program,
        rules=[
            RuleRecord(
                rule=rule.says,
                outcome="broken" if rule.wrong else "not tried" if rule.reason else "ok",
                message=rule.wrong or rule.reason,
            )
            for rule in rules
        ],
    )
