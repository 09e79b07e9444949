"""Commands about the harness itself: ``list``, ``show``, ``schema`` and ``mutants``."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer

from attncheck.cli.app import app, examples_epilog
from attncheck.cli.output import (
    make_document,
    print_case_faults,
    print_document,
    read_earlier_check,
    select_one,
    split_names,
)
from attncheck.cli.parameters import AsJson, CaseName, ListKind, Verbose, dtype_option
from attncheck.common.errors import ExitCode, UsageError
from attncheck.settings.options import (
    DEFAULT_CACHE_SIZE,
    CacheSize,
    Match,
    Patterns,
    RunOptions,
    TagNames,
    Tiles,
    UseCache,
    open_store,
)

if TYPE_CHECKING:
    from attncheck.reading.selection import CaseSelection
ListRecord = dict[str, str | list[str]]

_MUTATION_MODULE = "attncheck.mutation.score"
_MAX_LINE_WIDTH = 100
_INDENT = "  "
_MAX_SHAPE_WIDTH = 30
"""Columns of most shapes; a longer one moves what follows it."""
_MIN_TAGS_WIDTH = 18
"""Columns for tags, whatever stands before them."""


@app.command(epilog=examples_epilog("attncheck mutants my_cases/ --topic softmax"))
def mutants(
    cases: Patterns = (),
    seeds: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of seeds: the seed of the case, then new ones.")
    ] = 1,
    topic: Annotated[
        list[str] | None, typer.Option(metavar="TOPICS", help="Select the faults of these topics.")
    ] = None,
    all_cases: Annotated[
        bool,
        typer.Option(
            "--all-cases",
            help="Run every variant on every small case, and report what other tolerances catch. Takes minutes. "
            "Default: each fault runs until enough cases caught and named it, each right variant on some of the cases.",
        ),
    ] = False,
    processes: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Number of processes that share the cases. Default: one per core."),
    ] = None,
    cache: UseCache = True,
    cache_size: CacheSize = DEFAULT_CACHE_SIZE,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Run mutants of attention, and report what catches them.

    The exit code is 1 if a fault survives, if a control is flagged, or if more than 1 in 500 faults get a
    wrong name.
    """
    from attncheck.settings.config import select_configured_cases

    command = _import_mutants_command()
    store = open_store(cache, cache_size)
    selection = select_configured_cases(RunOptions(cases=cases), store)
    print_case_faults(selection)
    code, document = command.run_mutants_command(
        selection, split_names(topic), range(seeds), processes, exhaustive=all_cases, as_json=as_json
    )
    if verbose:
        typer.echo(f"attncheck: cache: {store.summary}", err=True)
    if as_json:
        print_document(document)
    raise typer.Exit(code)


def _import_mutants_command() -> ModuleType:
    """Import the command ``mutants``, which only a checkout has. Raises ``UsageError``."""
    try:
        return import_module(_MUTATION_MODULE)
    except ModuleNotFoundError as error:
        if not _MUTATION_MODULE.startswith(error.name or " "):
            raise
        raise UsageError(
            "the faults are no part of the installed package: attncheck mutants needs a checkout of the repository, "
            "installed by pip install --editable ."
        ) from error


@app.command(
    "list",
    epilog=examples_epilog(
        "attncheck list cases",
        "attncheck list cases 'documents/*'",
        "attncheck list cases -k 'Lq!=Lk and causal'",
        "attncheck list implementations",
    ),
)
def list_(
    what: Annotated[ListKind, typer.Argument(metavar="WHAT", help="cases, backends, implementations or tags.")],
    cases: Patterns = (),
    tags: TagNames = (),
    match: Match = None,
    tiles: Tiles = (),
    as_json: AsJson = False,
) -> None:
    """List cases, backends, implementations or tags."""
    from attncheck.settings.config import select_configured_cases

    faults: list[str] = []
    of_code = {ListKind.BACKENDS: list_backends, ListKind.IMPLEMENTATIONS: list_implementations}
    if what in of_code:
        records = of_code[what]()
    else:
        selection = select_configured_cases(RunOptions(cases=cases, tags=tags, match=match, tiles=tiles))
        records = list_cases(selection) if what is ListKind.CASES else describe_tags(selection)
        print_case_faults(selection)
        faults = list(map(str, selection.faults))
    code = ExitCode.BAD_INPUT if faults else ExitCode.AGREE
    if as_json:
        answer = f"{len(records):,} {what.value}"
        print_document(make_document("list", code, answer, notes=faults, listed=what.value, items=records))
    elif what is ListKind.CASES:
        for line in case_lines(records):
            typer.echo(line)
    else:
        for record in records:
            typer.echo("  ".join(str(value) for value in record.values()))
    raise typer.Exit(code)


def list_cases(selection: CaseSelection) -> list[ListRecord]:
    """Return every selected case: its id, name, operation, the lengths of its axes, its dtypes and its tags."""
    from attncheck.reading.shapes import axis_lengths, format_lengths

    return [
        {
            "id": case.id,
            "name": case.name,
            "operation": case.operation,
            "shape": format_lengths(axis_lengths(case.operation, case.options, case.input_shapes)),
            "dtypes": list(case.dtypes),
            "tags": list(case.tags),
        }
        for case in selection.cases
    ]


def case_lines(records: Sequence[ListRecord]) -> Iterator[str]:
    """Yield the lines of cases: the id, and below it what is computed, in columns.

    An id is never truncated, so that it can be copied. The lines below it fit into 100 columns; tags may take several.
    """
    cells = [
        (str(case["operation"]), str(case["shape"]), _abbreviate_dtypes(" ".join(case["dtypes"]))) for case in records
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    widths[1:2] = [min(width, _MAX_SHAPE_WIDTH) for width in widths[1:2]]  # of no case there is none
    for record, row in zip(records, cells, strict=True):
        yield str(record["id"])
        columns = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        start = len(columns) + len(_INDENT) + 2
        tags = textwrap.wrap(
            ", ".join(record["tags"]),
            max(_MAX_LINE_WIDTH - start, _MIN_TAGS_WIDTH),
            break_on_hyphens=False,
            break_long_words=False,
        ) or [""]
        yield f"{_INDENT}{columns}  {tags[0]}".rstrip()
        yield from (" " * start + more for more in tags[1:])


def _abbreviate_dtypes(dtypes: str) -> str:
    return dtypes.replace("bfloat", "bf").replace("float", "f")


def list_backends() -> list[ListRecord]:
    """Return every backend, with its version or that it is not installed."""
    from attncheck.backends import BACKENDS
    from attncheck.execution.environment import package_version

    versions = {
        entry.name: package_version(entry.packages[0]) or "" for entry in BACKENDS.values() if entry.is_installed
    }
    return [{"name": name, "version": versions.get(name, "not installed")} for name in BACKENDS]


def list_implementations() -> list[ListRecord]:
    """Return every implementation with dtypes, rounding models and what it is; on devices, and published ones, too."""
    from attncheck.backends import published_entry_points
    from attncheck.execution.environment import package_version
    from attncheck.execution.implementations import device_implementations, processor_implementations

    records: list[ListRecord] = [
        {
            "name": item.name,
            "version": (package_version(item.package) or "") if item.entry.is_installed else "not installed",
            "classes": ", ".join(f"{dtype} {name}" for dtype, name in item.mode_declarations.classes.items()),
            "is": item.mode_declarations.description,
        }
        for item in (*processor_implementations(), *device_implementations())
    ]
    for name, point in sorted(published_entry_points().items()):
        version = point.dist.version if point.dist else ""
        records.append({"name": name, "version": version, "classes": "", "is": f"published as {point.value}"})
    return records


def describe_tags(selection: CaseSelection) -> list[ListRecord]:
    """Return every tag with what it probes and the bug that it is meant to catch."""
    return [{"tag": name, "probes": tag.probes, "defect": tag.defect} for name, tag in sorted(selection.tags.items())]


@app.command(
    epilog=examples_epilog(
        "attncheck schema > my_cases/schema.json", "attncheck schema --tags", "attncheck schema --results"
    )
)
def schema(
    tags: Annotated[bool, typer.Option("--tags", help="Print the schema of tags.yaml instead.")] = False,
    results: Annotated[
        bool,
        typer.Option("--results", help="Print the schema of the output of commands with --json instead."),
    ] = False,
) -> None:
    """Print the JSON Schema of case files, or of results."""
    if tags and results:
        raise UsageError("--tags and --results are two schemas: give only one of them")
    if results:
        from attncheck.showing.json_schema import results_schema

        typer.echo(results_schema(), nl=False)
        return
    from attncheck.reading.schema import case_file_schema, tag_file_schema

    typer.echo(tag_file_schema() if tags else case_file_schema(), nl=False)


@app.command(
    epilog=examples_epilog(
        "attncheck show 'documents/base_r_vignette/four-words-*'",
        "attncheck show 'attention/a-causal-row-sees-*' -s weights --save case.png",
    )
)
def show(
    case: CaseName,
    dtype: Annotated[str | None, dtype_option("One dtype of the case. Default: its first.")] = None,
    stage: Annotated[
        list[str] | None,
        typer.Option("--stage", "-s", metavar="NAMES", help="Show only these stages and inputs, comma-separated."),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw the case into this file instead: .png, .svg or .pdf. A large case continues on further pages, "
            "FILE-2.png and so on.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a case with its inputs and its exact stages.

    If a document prints numbers of the case, they are shown next to the exact numbers.
    """
    from attncheck.showing.show import evaluate_case, parse_image_format, print_case, save_case

    if save is not None:
        parse_image_format(save)  # before anything takes time
    from attncheck.reading.selection import choose_dtype

    chosen_case, selection = select_one(case, read_earlier_check(None))
    shown = evaluate_case(chosen_case, choose_dtype(chosen_case, dtype or chosen_case.dtypes[0]), split_names(stage))
    written = [] if save is None else save_case(shown, save)
    if as_json:
        from attncheck.showing.show import case_document

        print_document(case_document(shown, [str(path) for path in written]))
    elif save is None:
        print_case(shown, selection.tags)
    else:
        for path in written:
            typer.echo(f"{path}: {chosen_case.name}")
