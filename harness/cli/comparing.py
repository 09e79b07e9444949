"""The command that compares two results with each other: ``diff``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attncheck.cli.app import app, examples
from attncheck.cli.options import AsJson, Quiet
from attncheck.cli.output import print_document

_A_SIDE = "a results directory, or a folder of results directories, which are matched by label."


@app.command(
    epilog=examples(
        "attncheck diff results/before results/after",
        "attncheck diff results/before results/after --output results/difference",
    )
)
def diff(
    before: Annotated[Path, typer.Argument(metavar="A", help=f"Before: {_A_SIDE}")],
    after: Annotated[Path, typer.Argument(metavar="B", help="After: the same.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FOLDER", help="Write diff.md and its frames (CSV and Parquet) to this folder."
        ),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compare two results. The exit code is 1 if something got worse, and 0 if nothing did."""
    from attncheck.merge import merge_runs
    from attncheck.reports.diff.difference import make_difference
    from attncheck.reports.diff.text import print_difference, write_difference
    from attncheck.reports.making import make_frames
    from attncheck.results.reader import find_runs, matched_runs, read_runs

    sides = matched_runs(read_runs(find_runs([before])), read_runs(find_runs([after])))
    frames = [make_frames(merge_runs(runs, across=False)) for runs in sides]
    difference = make_difference(frames[0], frames[1], (str(before), str(after)))
    path = write_difference(difference, output) if output else None
    if as_json:
        from attncheck.reports.machine.of_differences import difference_document

        print_document(difference_document(difference, frames[1]))
    else:
        print_difference(difference, quiet=quiet)
        if path and not quiet:
            typer.echo(f"Difference: {path}")
    raise typer.Exit(difference.exit_code)
