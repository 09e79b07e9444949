"""The command that asks implementations what they mean: ``conventions``."""

from __future__ import annotations

from typing import Annotated

import typer

from attncheck.cli.app import app, examples
from attncheck.cli.completion import complete_implementation
from attncheck.cli.options import AsJson, Framework, MemoryLimit, Signature, Threads, TimeLimit
from attncheck.cli.output import print_document
from attncheck.cli.shared import limits_of
from attncheck.errors import ExitCode


@app.command(
    epilog=examples(
        "attncheck conventions my_kernel.py:attention",
        "attncheck conventions numpy torch.sdpa --dtype float32",
    )
)
def conventions(
    implementations: Annotated[
        list[str],
        typer.Argument(
            metavar="IMPLEMENTATION...",
            help="Implementations, such as torch.sdpa, globs such as 'torch.*', or your own as file.py:function.",
            autocompletion=complete_implementation,
        ),
    ],
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            "-d",
            metavar="DTYPE",
            help="Dtype of the calls. Default: the most exact one declared.",
            show_default=False,
        ),
    ] = None,
    framework: Framework = None,
    signature: Signature = None,
    time_limit: TimeLimit = 60.0,
    memory_limit: MemoryLimit = None,
    threads: Threads = 1,
    as_json: AsJson = False,
) -> None:
    """Measure which conventions an implementation follows.

    Which corner causality starts from, what a query without a key gives, where a softcap stands: each question is a
    call whose exact answer is another one for each meaning. The exit code is 1 if an implementation declares
    otherwise, and 3 if nothing could be measured.
    """
    from attncheck.conventions import ask_all
    from attncheck.execution.implementation_selection import select_implementations
    from attncheck.reports.conventions import conventions_document, print_conventions

    limits = limits_of(time_limit, memory_limit, threads, compilation_cache=True, keep_going=False)
    chosen = select_implementations(None, implementations, framework, limits, signature=signature)
    for name in chosen.missing:
        typer.echo(f"attncheck: {name} is not installed", err=True)
    measured = {each.name: ask_all(each, dtype, limits) for each in chosen.implementations}
    answers = [answer for each in measured.values() for answer in each]
    code = ExitCode.DISAGREE if any(answer.contradicts for answer in answers) else ExitCode.AGREE
    if not any(answer.kind in ("measured", "open") for answer in answers):
        code = ExitCode.NOT_RUN
    if as_json:
        print_document(conventions_document(measured, code, chosen.missing))
    else:
        print_conventions(measured)
    raise typer.Exit(code)
