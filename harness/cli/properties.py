"""The command that asks what holds between two calls: ``properties``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attncheck.cli.app import app, examples
from attncheck.cli.completion import complete_implementation, complete_properties
from attncheck.cli.output import print_document
from attncheck.cli.parameters import AsJson, JunitXml
from attncheck.cli.shared import print_faults, split
from attncheck.errors import ExitCode, UsageError
from attncheck.options import (
    DEFAULT_CACHE_SIZE,
    DtypeNames,
    ExpectedFailureLists,
    FunctionOptions,
    LimitOptions,
    Quiet,
    store_of,
)
from attncheck.wording import expected

if TYPE_CHECKING:
    from attncheck.properties.run import Question
    from attncheck.results.format import Row


@app.command(
    epilog=examples(
        "attncheck properties my_kernel.py:attention",
        "attncheck properties my_kernel.py:attention --property batch_invariant",
        "attncheck properties numpy --property repeated,decoding --explain",
    )
)
def properties(
    implementations: Annotated[
        list[str],
        typer.Argument(
            metavar="IMPLEMENTATION...",
            help="Implementations, such as torch.sdpa, globs such as 'torch.*', or your own as file.py:function.",
            autocompletion=complete_implementation,
        ),
    ],
    cases: Annotated[
        list[str] | None,
        typer.Option(
            "--cases",
            metavar="CASES",
            help="Cases with properties: files, folders or globs. Default: the bundled ones and your project's.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(
            "--property",
            "-p",
            metavar="NAMES",
            help="Ask only these properties.",
            show_default=False,
            autocompletion=complete_properties,
        ),
    ] = None,
    dtypes: DtypeNames = (),
    *,
    function: FunctionOptions,
    expected_failures: ExpectedFailureLists = (),
    explain: Annotated[
        bool, typer.Option("--explain", help="For each call that is not bitwise identical, show its result.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER",
            help="Write the rows, and properties.csv, to this folder.",
            show_default=False,
        ),
    ] = None,
    junit_xml: JunitXml = None,
    allowed: LimitOptions,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Test properties across calls, such as determinism.

    The same call twice, in a batch of one or of many, padded or packed, prefilled or decoded, with other threads,
    layouts and memory: bitwise the same, within the error bounds of both, or broken. The exit code is 1 if a property
    is broken, or less than the implementation claims, and 3 if a call failed.
    """
    from attncheck.commands import words_again
    from attncheck.execution.implementation_selection import select_implementations
    from attncheck.properties.run import Asking, ask_all, questions_of, select_property_cases
    from attncheck.reports.properties import exit_code_of

    limits = allowed.limits()
    chosen = select_implementations(None, implementations, function.framework, limits, signature=function.signature)
    for missing in chosen.missing:
        typer.echo(f"attncheck: {missing} is not installed", err=True)
    asking = Asking(_known_names(name), dtypes, limits, store_of(cache=True, size=DEFAULT_CACHE_SIZE))
    selection = select_property_cases(cases or (), expected_failures, asking.store)
    print_faults(selection)
    questions = questions_of(selection.cases, asking)
    if not questions:
        raise UsageError("no case asks for these properties in these dtypes")
    complete = not (cases or asking.names or asking.dtypes)
    rows = ask_all(chosen.implementations, questions, asking, expected_failures, complete=complete)
    if output is not None:
        from attncheck.reports.write import write_property_table
        from attncheck.results.writer import write_property_rows

        write_property_rows(output, rows)
        write_property_table(rows, output)
    if junit_xml is not None:
        from attncheck.reports.write import write_property_junit

        write_property_junit(rows, words_again(chosen.implementations, limits, None), junit_xml)
    code = exit_code_of(rows)
    code = ExitCode.NOT_RUN if chosen.missing and code is ExitCode.AGREE else code
    code = ExitCode.BAD_INPUT if selection.faults else code
    again = words_again(chosen.implementations, limits, None)
    if as_json:
        from attncheck.reports.machine.outcome import properties_document

        notes = [*map(str, selection.faults), *(f"{missing} is not installed" for missing in chosen.missing)]
        print_document(properties_document(rows, again, code, notes))
    else:
        _print(rows, questions, again, explain=explain, quiet=quiet)
    raise typer.Exit(code)


def _print(
    rows: Sequence[Row],
    questions: Sequence[Question],
    again: dict[str, list[str]],
    *,
    explain: bool,
    quiet: bool,
) -> None:
    from attncheck.properties.run import described_call
    from attncheck.reports.terminal import explanation_of, print_properties

    print_properties(rows, again, quiet=quiet)
    if explain:
        calls = {(each.name, each.case.id, each.dtype): described_call(each) for each in questions}
        for row in rows:
            if row.verdict not in ("bitwise", "unsupported"):
                lines = explanation_of(row, calls[row.property_name, row.case, row.dtype])
                typer.echo("\n" + "\n".join(lines))


def _known_names(given: list[str] | None) -> list[str]:
    from attncheck.spec.properties import PROPERTIES

    names = split(given)
    for each in names:
        if each not in PROPERTIES:
            raise UsageError(f"unknown property {each!r}; {expected(each, PROPERTIES, one_of=False)}")
    return names
