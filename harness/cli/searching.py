"""Commands that look for failures: ``search`` and ``reduce``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attncheck.cli.app import app, examples
from attncheck.cli.output import print_document
from attncheck.cli.parameters import AsJson, CaseName, DtypeName, ImplementationName
from attncheck.cli.shared import dtype_of, select_one
from attncheck.errors import ExitCode, UsageError
from attncheck.options import DtypeNames, FunctionOptions, LimitOptions
from attncheck.verdicts import Verdict
from attncheck.wording import expected

if TYPE_CHECKING:
    from attncheck.execution.call import Limits
    from attncheck.execution.implementations import Implementation
    from attncheck.searching.search import Search


@app.command(
    epilog=examples(
        "attncheck search my_kernel.py:attention --problems 20",
        "attncheck search numpy --problems 10 --operation softmax --dtype float32",
    )
)
def search(
    implementation: ImplementationName,
    minutes: Annotated[float, typer.Option(metavar="N", min=0, help="Stop after so many minutes.")] = 5.0,
    problems: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Stop after so many problems, whatever time it takes."),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="What the problems are drawn from.")] = 1,
    operation: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Draw problems of one operation. Default: of all.", show_default=False),
    ] = None,
    dtypes: DtypeNames = (),
    *,
    function: FunctionOptions,
    allowed: LimitOptions,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER",
            help="Folder for what is found. A search goes on with what is there. Default: results/search/NAME, by the "
            "implementation's name.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draw problems at random until one breaks an implementation.

    Each problem is judged against the exact answer. One that fails is reduced to the smallest that fails in the same
    way, and written as a case file and a script. The same number of problems of the same seed is the same search. The
    exit code is 1 if something was found, and 3 if nothing could be judged.
    """
    from attncheck.explain import find_implementation
    from attncheck.searching.findings import SearchFolder, WorkerJudge
    from attncheck.searching.problems import OPERATIONS
    from attncheck.searching.search import Search, SearchRequest

    if operation is not None and operation not in OPERATIONS:
        raise UsageError(f"--operation: unknown {operation!r}; {expected(operation, OPERATIONS)}")
    chosen = find_implementation(implementation, function.framework, function.signature)
    limits = allowed.limits(keep_going=True)
    judge = WorkerJudge.of(chosen, limits)
    folder = SearchFolder.of(output or Path("results/search") / chosen.name, chosen.name)
    seconds = 60 * minutes if problems is None else math.inf
    title = f"attncheck search {implementation} --seed {seed}"
    request = SearchRequest(seed, operation, _dtypes(judge.dtypes, dtypes, chosen.name), problems, seconds, title)
    found = Search(request, judge, folder, lambda line: typer.echo(f"attncheck: {line}", err=True))
    try:
        found.run()
        _write_scripts(found, chosen, limits)
    finally:
        judge.close()
    code = ExitCode.NOT_RUN if found.refused == found.asked else ExitCode.AGREE
    code = ExitCode.DISAGREE if folder.findings else code
    _show(found, chosen, limits, code, as_json=as_json)
    raise typer.Exit(code)


def _dtypes(declared: tuple[str, ...], wanted: tuple[str, ...], name: str) -> tuple[str, ...]:
    from attncheck.spec import DTYPES

    asked = wanted or [each for each in DTYPES if each in declared]
    for each in asked:
        if each not in declared:
            raise UsageError(f"--dtype: {name} declares no {each!r}; expected {', '.join(declared) or 'none'}")
    return tuple(asked)


def _write_scripts(found: Search, implementation: Implementation, limits: Limits) -> None:
    """Write a script for every finding that has none."""
    from dataclasses import replace

    from attncheck.commands import joined
    from attncheck.errors import AttncheckError
    from attncheck.explain import explain_case
    from attncheck.reading.selection import select_one
    from attncheck.repro import compact_script, repro_script

    for position, finding in enumerate(found.folder.findings):
        path = found.folder.path / finding.file
        script = path.with_suffix(".py")
        if finding.script or finding.needs_calls:
            continue
        try:
            case, _ = select_one(str(path))
            explained = explain_case(case, implementation, finding.dtype, limits)
            command = joined(["python", str(script)])
            posed = (case, implementation, finding.dtype, explained.judgements, finding.element)
            text = compact_script(*posed, command) or repro_script(*posed, command=command)
            script.write_text(text, encoding="utf-8")
        except (AttncheckError, OSError):  # some modules cannot be taken apart: the case file is enough
            continue
        found.folder.findings[position] = replace(finding, script=script.name)
    found.folder.write()


def _show(found: Search, implementation: Implementation, limits: Limits, code: ExitCode, *, as_json: bool) -> None:
    from attncheck.commands import command, words_again
    from attncheck.reports.search import print_search, search_document

    again = words_again([implementation], limits, None).get(implementation.name, [implementation.name])
    commands = {
        each.file: [
            command(name, {"id": "", "path": ""} | {"id": str(found.folder.path / each.file)}, again, each.dtype)
            for name in ("explain", "repro")
        ]
        for each in found.folder.findings
    }
    if as_json:
        print_document(search_document(found, commands, code))
    else:
        print_search(found, commands)


@app.command(
    epilog=examples(
        "attncheck reduce 'attention/a-causal-row-sees-*' numpy",
        "attncheck reduce my_cases/first.yaml::share my_kernel.py:attention",
    )
)
def reduce(
    case: CaseName,
    implementation: ImplementationName,
    dtype: DtypeName = None,
    *,
    function: FunctionOptions,
    allowed: LimitOptions,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="File for the reduced case. Default: reduced_ and the case's name.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the smallest case that fails the same way.

    Options, elements and digits are left out as long as the verdict and its first stage stay. The exit code is 1 if the
    case fails, and 0 if there is nothing to reduce.
    """
    from attncheck.commands import command, words_again
    from attncheck.explain import find_implementation
    from attncheck.reports.search import reduction_document, reduction_lines
    from attncheck.searching.findings import write_case
    from attncheck.searching.search import reduce_case

    found, _ = select_one(case)
    chosen_dtype = dtype_of(found, dtype)
    chosen = find_implementation(implementation, function.framework, function.signature)
    limits = allowed.limits(keep_going=True)
    reduced = reduce_case(found, chosen, chosen_dtype, limits)
    if reduced.explanation.failure.startswith(Verdict.UNSUPPORTED):
        raise UsageError(f"{chosen.name}, {found.id} in {chosen_dtype}: {reduced.explanation.failure}")
    if reduced.problem is None:
        if as_json:
            print_document(reduction_document(found, reduced, None, []))
        else:
            typer.echo(f"{found.id}: {chosen.name} does not fail it in {chosen_dtype}; there is nothing to reduce")
        raise typer.Exit(ExitCode.AGREE)
    path = output or Path(f"reduced_{found.id.rpartition('/')[2][:60]}.yaml")
    write_case(reduced.problem, path, f"{found.name[:180]} (reduced)", f"attncheck reduce {found.id}"[:4000])
    again = words_again([chosen], limits, None).get(chosen.name, [chosen.name])
    commands = [command(name, {"id": str(path)}, again, chosen_dtype) for name in ("explain", "repro")]
    if as_json:
        print_document(reduction_document(found, reduced, path, commands))
    else:
        for line in reduction_lines(reduced, path, commands):
            typer.echo(line)
    raise typer.Exit(ExitCode.DISAGREE)
