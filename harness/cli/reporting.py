"""Commands that make something of results, and run nothing: ``report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attncheck.cli.app import app, examples
from attncheck.cli.options import Annotations, AsJson, Badges, CiSummary, JunitXml, MinJudged, Quiet, RunFolders, Sarif
from attncheck.cli.shared import Outlets, ReportPlace, frames_of, show_answer, write_ci_outputs, write_frames
from attncheck.errors import UsageError


@app.command(
    epilog=examples(
        "attncheck report results/latest",
        "attncheck report results/before results/after --output results/compared",
    )
)
def report(
    runs: RunFolders,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FOLDER", help="Folder for the report. Default, for a single run: RUN/report."
        ),
    ] = None,
    min_judged: MinJudged = None,
    junit_xml: JunitXml = None,
    ci_summary: CiSummary = None,
    annotations: Annotations = False,
    sarif: Sarif = None,
    badge: Badges = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Write the report of one or several runs. Nothing is computed again."""
    from attncheck.results.format import REPORT_FOLDER
    from attncheck.results.reader import find_runs

    outlets = Outlets(junit_xml, ci_summary, annotations, sarif, badge or ())
    runs = find_runs(runs)
    if output is None:
        if len(runs) > 1:
            raise UsageError("several runs are compared into a folder of their own: name it with --output")
        output = runs[0] / REPORT_FOLDER
    frames = frames_of(runs, min_judged)
    from attncheck.reports.answer import exit_code_of

    code = exit_code_of(frames)
    place = ReportPlace(runs[0], write_frames(frames, output))
    show_answer(frames, place, code, as_json="report" if as_json else "", quiet=quiet)
    write_ci_outputs(frames, place, outlets, as_json=as_json)
    raise typer.Exit(code)
