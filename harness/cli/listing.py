"""Commands about the harness itself: ``list``, ``schema`` and ``mutants``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from attncheck.cli.app import app, examples
from attncheck.cli.options import (
    DEFAULT_CACHE_SIZE,
    AsJson,
    CacheSize,
    Listed,
    Match,
    Patterns,
    TagNames,
    Tiles,
    UseCache,
    Verbose,
)
from attncheck.cli.shared import print_faults, select, split, store_of
from attncheck.errors import ExitCode
from attncheck.processors import available_processors


@app.command(epilog=examples("attncheck mutants my_cases/ --topic softmax"))
def mutants(
    cases: Patterns = None,
    seeds: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of seeds: the case's own, then fresh ones.")
    ] = 1,
    topic: Annotated[
        list[str] | None, typer.Option(metavar="TOPICS", help="Select the faults of these topics.")
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Number of processes that share the cases. Default: one per core.",
            show_default=False,
        ),
    ] = None,
    cache: UseCache = True,
    cache_size: CacheSize = DEFAULT_CACHE_SIZE,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Run mutants of attention, and report what catches them.

    The exit code is 1 if a fault survives, if a control is flagged, or if more than 1 % of the faults get a
    wrong name.
    """
    from attncheck.mutation.score import run_mutants, subjects_of
    from attncheck.mutation.workers import in_processes
    from attncheck.reports.mutation import as_record, print_mutation

    store = store_of(cache, cache_size)
    selection = select(cases, None, None, store=store)
    print_faults(selection)
    subjects = subjects_of(split(topic))
    with in_processes(processes or available_processors(), store) as scorers:
        frames = run_mutants(selection.cases, tuple(range(seeds)), scorers=scorers, subjects=subjects)
    if verbose:
        typer.echo(f"attncheck: cache: {store.summary}", err=True)
    if as_json:
        typer.echo(json.dumps(as_record(frames), indent=2, ensure_ascii=False))
    else:
        print_mutation(frames)
    if selection.faults:
        raise typer.Exit(ExitCode.BAD_INPUT)
    is_good = frames.survivors.empty and frames.flagged.empty and frames.names_well
    raise typer.Exit(ExitCode.AGREE if is_good else ExitCode.DISAGREE)


@app.command(
    "list",
    epilog=examples(
        "attncheck list cases",
        "attncheck list cases 'documents/*'",
        "attncheck list cases -k 'Lq!=Lk and causal'",
        "attncheck list implementations",
    ),
)
def list_(
    what: Annotated[Listed, typer.Argument(metavar="WHAT", help="cases, backends, implementations or tags.")],
    cases: Patterns = None,
    tag: TagNames = None,
    match: Match = None,
    tile: Tiles = None,
    as_json: AsJson = False,
) -> None:
    """List cases, backends, implementations or tags."""
    from attncheck import listings

    of_code = {Listed.BACKENDS: listings.list_backends, Listed.IMPLEMENTATIONS: listings.list_implementations}
    if what in of_code:
        records = of_code[what]()
    else:
        selection = select(cases, tag, None, tile=tile, match=match)
        records = listings.list_cases(selection) if what is Listed.CASES else listings.list_tags(selection)
        print_faults(selection)
    if as_json:
        typer.echo(json.dumps(records, indent=2, ensure_ascii=False))
    elif what is Listed.CASES:
        for line in listings.case_lines(records):
            typer.echo(line)
    else:
        for record in records:
            typer.echo("  ".join(str(value) for value in record.values()))
    if what not in of_code and selection.faults:
        raise typer.Exit(ExitCode.BAD_INPUT)


@app.command(epilog=examples("attncheck schema > my_cases/schema.json", "attncheck schema --tags"))
def schema(
    tags: Annotated[bool, typer.Option("--tags", help="Print the schema of tags.yaml instead.")] = False,
) -> None:
    """Print the JSON Schema of case files, for editors."""
    from attncheck.reading.schema import case_schema, tag_schema

    typer.echo(tag_schema() if tags else case_schema(), nl=False)
