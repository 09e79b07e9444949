"""Commands that run cases: ``check`` and ``run``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import typer

from attncheck.cli.app import app, examples
from attncheck.cli.parameters import AsJson, Isa, Outlets, Watch
from attncheck.cli.requests import RunRequest, run_request
from attncheck.cli.shared import ReportPlace, frames_of, show_answer, write_ci_outputs, write_frames
from attncheck.errors import UsageError
from attncheck.options import RunOptions

if TYPE_CHECKING:
    from attncheck.run import RunSummary


@app.command(
    epilog=examples(
        "attncheck check",
        "attncheck check 'documents/*' --backend numpy --dtype float32",
        "attncheck check --implementation my_kernel.py:attention",
        "attncheck check --implementation my_kernel.py:attention --failed -x",
        "attncheck check --no-report -b numpy --label before -o results/before",
        "attncheck check --no-report -b numpy --label after -o results/after",
        "attncheck check --implementation my_kernel.py:attention -k 'Lk>64'",
        "attncheck check --implementation my_kernel.py:attention --tile 48",
        "attncheck check my_cases/ --tag uniform",
        "attncheck check attention -i my_kernel.py:attention --properties",
        "attncheck check my_cases/ --output results/mine --resume",
    )
)
def check(
    options: RunOptions, outlets: Outlets, isa: Isa = None, as_json: AsJson = False, watch: Watch = False
) -> None:
    """Run cases, judge them and write a report."""
    request = RunRequest(options)
    if watch:
        of_outlets = {f"--{name.replace('_', '-')}": value for name, value in vars(outlets).items()}
        _refuse_with_watch(
            {"--resume": options.resume, "--properties": options.properties, "--json": as_json, **of_outlets}
        )
        from attncheck.cli.watching import watch as watch_files

        raise typer.Exit(
            watch_files(request, lambda summary: _finish(request, summary), lambda summary: _write(options))
        )
    summary = run_request(request)
    _finish(request, summary, outlets, as_json=as_json)
    raise typer.Exit(summary.exit_code)


def _refuse_with_watch(given: Mapping[str, object]) -> None:
    if names := [name for name, value in given.items() if value]:
        raise UsageError(f"--watch runs again and again, for people, and does not go with {' or '.join(names)}")


def _write(options: RunOptions) -> None:
    """Write the report, if one is wanted."""
    from attncheck.results.format import REPORT_FOLDER

    if options.report:
        write_frames(frames_of([options.output]), options.output / REPORT_FOLDER)


def _finish(request: RunRequest, summary: RunSummary, outlets: Outlets | None = None, *, as_json: bool = False) -> None:
    """Write the report, if one is wanted, and show the answer."""
    from attncheck.results.format import REPORT_FOLDER

    options = request.options
    with request.times.of("report"):
        frames = frames_of([options.output])
        path = write_frames(frames, options.output / REPORT_FOLDER) if options.report else None
    place = ReportPlace(options.output, path)
    name = "check" if as_json else ""
    show_answer(frames, place, summary.exit_code, as_json=name, quiet=options.quiet, announced=frames.announced)
    if options.verbose:
        typer.echo(f"attncheck: time, of processes side by side added up: {request.times}", err=True)
    if outlets is not None:
        write_ci_outputs(frames, place, outlets, as_json=as_json)
