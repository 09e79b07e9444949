"""The command that compares two results with each other: ``diff``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from attncheck.cli.app import app
from attncheck.cli.options import AsJson, Quiet

_A_SIDE = "A results directory, or a folder of results directories, matched by label."


@app.command()
def diff(
    before: Annotated[Path, typer.Argument(metavar="A", help=f"Before. {_A_SIDE}")],
    after: Annotated[Path, typer.Argument(metavar="B", help="After: the same.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for diff.md and its frames as CSV and Parquet.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Say what changed between two results; ends with 1 where something got worse, with 0 where nothing did."""
    from attncheck.merge import merge_runs
    from attncheck.reports.diff.difference import make_difference
    from attncheck.reports.diff.text import as_record, print_difference
    from attncheck.reports.diff.write import write_difference
    from attncheck.reports.making import make_frames
    from attncheck.results.reader import find_runs, matched_runs, read_runs

    sides = matched_runs(read_runs(find_runs([before])), read_runs(find_runs([after])))
    frames = [make_frames(merge_runs(runs, across=False)) for runs in sides]
    difference = make_difference(frames[0], frames[1], (str(before), str(after)))
    path = write_difference(difference, output) if output else None
    if as_json:
        typer.echo(json.dumps(as_record(difference), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        print_difference(difference, quiet=quiet)
        if path and not quiet:
            typer.echo(f"Difference: {path}")
    raise typer.Exit(difference.exit_code)
