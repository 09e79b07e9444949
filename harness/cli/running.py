"""The command ``check``: runs cases, judges them, and reports and shows the outcome.

``attncheck run`` is short for it without a report (``app.main``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from threading import Thread, Timer
from typing import TYPE_CHECKING

import typer

from attncheck.cli.app import app, examples_epilog
from attncheck.cli.output import (
    ReportLocation,
    ReportProcess,
    print_case_faults,
    print_report_location,
    read_frames_of_runs,
    write_and_show,
    write_ci_outputs,
    write_frames,
)
from attncheck.cli.parameters import AsJson, Isa, OutputFormats, RunRequest, Watch
from attncheck.common.errors import CaseError, ExitCode, NothingToRerun, UsageError
from attncheck.common.processors import available_processors
from attncheck.settings.options import RunOptions

if TYPE_CHECKING:
    from pathlib import Path

    from attncheck.common.progress import ProgressWatcher
    from attncheck.execution.describing import DescribedWorkers, DescriptionRequest
    from attncheck.execution.implementations import ImplementationSelection
    from attncheck.reading.selection import CaseSelection
    from attncheck.results.last_failed import FailedEvaluation, Subset
    from attncheck.run import RunSummary, Settings


_NEEDED_MODULES = ("run", "settings.config", "common.progress", "execution.implementation_selection")
"""Modules that every run needs."""
_NEEDED_MODULES_TO_PRINT = ("reports.frames", "reports.terminal")
_NEEDED_MODULES_FOR_REPORT = ("reports.write",)
_PROGRESS_DELAY = 0.6
"""Seconds."""


def run_request(
    request: RunRequest,
    on_failure: Callable[[ProgressWatcher, FailedEvaluation], None] = lambda progress, failed: progress.report_failure(
        str(failed)
    ),
) -> RunSummary:
    """Select, run and judge; end the program where nothing can be run.

    ``on_failure`` shows a failing evaluation as it is judged.
    """
    from attncheck.execution.describing import DescribedWorkers

    with DescribedWorkers() as described:
        preload_in_background(request, described)
        return _run_with_workers(request, described, on_failure)


def preload_in_background(request: RunRequest, described: DescribedWorkers) -> None:
    """Start the processes of own implementations, and import what a run needs while they load.

    The user's files are checked first. Raises ``UsageError`` and ``CaseError``.
    """
    from attncheck.execution.user_code import check_function_exists

    options, requests = request.options, _description_requests(request.options)
    for description in requests:
        check_function_exists(description.target)
    described.start_loading(*requests)
    if len(options.implementations) > 1:
        from attncheck.execution.implementation_selection import separate_user_functions, with_distinct_names

        requested, _ = separate_user_functions(options.implementations, options.signature, options.declare)
        with_distinct_names(requested)
    from attncheck.settings.config import check_user_cases

    check_user_cases(options, options.store)
    if _is_long_user_run(options):
        _prestart_judges(options)
    shows_here = requests and request.report_process is None
    needed = [*_NEEDED_MODULES, *(_modules_to_show(options) if shows_here else ())]
    while needed and not described.has_failed:  # which select_implementations reports
        _import_modules([needed.pop(0)])


def _description_requests(options: RunOptions) -> list[DescriptionRequest]:
    from attncheck.execution.describing import DescriptionRequest
    from attncheck.execution.user_code import Target, is_user_target

    user_patterns = [pattern for pattern in options.implementations if is_user_target(pattern)]
    targets = [Target.parse(pattern, options.signature or "", options.declare) for pattern in user_patterns]
    of_run = options.framework, options.threads, options.compilation_cache
    return [DescriptionRequest(target, *of_run) for target in targets]


def _modules_to_show(options: RunOptions) -> tuple[str, ...]:
    to_print = () if options.quiet else _NEEDED_MODULES_TO_PRINT
    return (*_NEEDED_MODULES_TO_PRINT, *_NEEDED_MODULES_FOR_REPORT) if options.report else to_print


def _import_modules(names: Iterable[str]) -> None:
    for name in names:
        import_module(f"attncheck.{name}")


def _run_with_workers(
    request: RunRequest, described: DescribedWorkers, on_failure: Callable[[ProgressWatcher, FailedEvaluation], None]
) -> RunSummary:
    from attncheck.execution.implementation_selection import select_implementations

    options, store = request.options, request.options.store
    patterns = (options.backends or None, options.implementations)
    chosen = select_implementations(*patterns, limits=options.worker_limits, described=described, **options.as_keywords)

    from attncheck.common.progress import ARITHMETIC_COUNTS, show_progress
    from attncheck.run import Settings, run_cases
    from attncheck.settings.commands import shell_command
    from attncheck.settings.config import select_configured_cases

    ARITHMETIC_COUNTS.clear()
    chosen = chosen.restrict_to_standard_cases(options.standard).with_added_dtypes(options.dtypes)
    is_long = not (options.cases or options.quiet or request.is_announced)

    def announce_reading() -> None:
        typer.echo("attncheck: reading the bundled cases", err=True)
        _prestart_judges(options, available_processors())  # new cases have no cached answers

    with request.times.measure("reading cases"), _call_if_slow(announce_reading if is_long else lambda: None):
        selection = select_configured_cases(options, store)
    if selection.faults:  # such as one id in two files; the last results stay as they are
        raise CaseError(list(selection.faults))
    narrowed = _select_cases(request, chosen, selection)
    settings = Settings.of(options, chosen, selection.tags, narrowed.failed_units, store)
    settings = replace(settings, command=["attncheck", *_without_cluster(sys.argv[1:])], times=request.times)
    if request.report_process is not None:
        request.report_process.start()
    else:  # while the first worker imports its framework
        Thread(target=_import_modules, args=[_modules_to_show(options)]).start()
    try:
        with show_progress(visible=not options.quiet) as progress:
            summary = run_cases(
                narrowed.cases,
                chosen,
                settings,
                progress.update,
                lambda failed: on_failure(progress, failed),
                described=described,
                on_begin=progress.watch_executor,
                on_plan=lambda words: None if options.quiet else typer.echo(f"attncheck: {words}", err=True),
            )
            if options.properties:
                summary = _add_property_results(options, chosen, settings, summary)
        if summary.failures:
            from attncheck.repro import write_scripts
            from attncheck.searching.hints import confirm_hints

            if options.cluster is None:
                confirm_hints(options.output, narrowed.cases, chosen.implementations, settings.limits, settings.tags)
            write_scripts(narrowed.cases, chosen.implementations, summary.failures, options.output, settings.limits)
        if options.verbose:
            words, balls = (
                f"{(store.event_counts + ARITHMETIC_COUNTS)[kind]:,} in {kind}" for kind in ("double words", "balls")
            )
            typer.echo(f"attncheck: cache: {store.summary}", err=True)
            typer.echo(f"attncheck: exact answers: {words}, {balls}", err=True)
        return summary
    except KeyboardInterrupt:
        shows = f"`{shell_command(['attncheck', 'report', str(options.output)])}` shows it"
        place = f"what was judged is in {options.output}"
        typer.echo(f"attncheck: interrupted; {place}: {shows}, and the same command with --resume goes on", err=True)
        raise typer.Exit(ExitCode.INTERRUPTED) from None


@contextmanager
def _call_if_slow(begin: Callable[[], None]) -> Iterator[None]:
    """Call ``begin`` if the block takes longer than a moment, so that the user sees progress."""
    timer = Timer(_PROGRESS_DELAY, begin)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


_PRESTARTED_JUDGES = 2
"""Processes that judge as fast as a worker computes small cases, if the store has their exact answers."""


def _prestart_judges(options: RunOptions, max_processes: int = _PRESTARTED_JUDGES) -> None:
    """Start processes for judging while the harness imports its modules, on the processors that no worker takes."""
    from attncheck.execution.user_code import is_user_target
    from attncheck.executors.judging_processes import prestart_judges

    loading = sum(map(is_user_target, options.implementations))  # each in a process
    if options.cluster is None:
        prestart_judges(min(max_processes, available_processors() - loading))


def _prepare_next_run(options: RunOptions) -> None:
    """Start processes that compute and judge, so that a run begins at once when a file is saved."""
    from attncheck.execution.describing import start_spare_worker

    requests = _description_requests(options)
    if len(requests) == 1:
        start_spare_worker(requests[0])
    if requests:
        _prestart_judges(options)


def _add_property_results(
    options: RunOptions, chosen: ImplementationSelection, settings: Settings, summary: RunSummary
) -> RunSummary:
    """Test properties of the chosen implementations, write their rows to the run, and include them in its exit code."""
    from attncheck.properties.run import PropertyRequest, property_questions, run_properties, select_property_cases
    from attncheck.reports.properties import properties_exit_code
    from attncheck.results.writer import update_exit_code, write_property_rows

    lists = options.expected_failure_lists
    asking = PropertyRequest(dtypes=settings.dtypes, limits=settings.limits, store=settings.store)
    selection = select_property_cases((), lists, asking.store)
    print_case_faults(selection)
    questions = property_questions(selection.cases, asking)
    rows = run_properties(chosen.implementations, questions, asking, lists, complete=not asking.dtypes)
    write_property_rows(options.output, rows)
    codes = {summary.exit_code, properties_exit_code(rows)} | ({ExitCode.BAD_INPUT} if selection.faults else set())
    worst = next(code for code in (*_EXIT_CODES_BY_SEVERITY, summary.exit_code) if code in codes)
    update_exit_code(options.output, worst)
    return replace(summary, exit_code=worst)


_EXIT_CODES_BY_SEVERITY = (ExitCode.INTERRUPTED, ExitCode.BAD_INPUT, ExitCode.DISAGREE, ExitCode.NOT_RUN)


def _select_cases(request: RunRequest, chosen: ImplementationSelection, selection: CaseSelection) -> Subset:
    """Print notes before a run, and return the cases that run."""
    from attncheck.reading.selection import describe_unjudged_tiles
    from attncheck.results.last_failed import Subset, order_failed_first, select_failed
    from attncheck.settings.config import tiles_to_run

    options = request.options
    for name in chosen.missing:
        typer.echo(f"attncheck: {name} could not run: asked for by name, not installed", err=True)
    names, narrowed = [item.name for item in chosen.implementations], Subset(selection.cases, None, "")
    if options.failed:
        narrowed = select_failed(selection.cases, options.dtypes, names, options.output, resume=options.resume)
    elif options.failed_first:
        narrowed = order_failed_first(selection.cases, options.dtypes, names, options.output)
    if narrowed.failed_units is not None and not narrowed.failed_units:
        raise NothingToRerun(narrowed.description)
    if not (options.quiet or request.is_announced):
        for hint in filter(None, (*chosen.hints, describe_unjudged_tiles(tiles_to_run(options)), narrowed.description)):
            typer.echo(f"attncheck: {hint}", err=True)
    return narrowed


def _without_cluster(arguments: list[str]) -> list[str]:
    """Leave out ``--cluster``: the report is the same, and so is the command that makes it again."""
    kept = [argument for argument in arguments if not argument.startswith("--cluster=")]
    index = kept.index("--cluster") if "--cluster" in kept else len(kept)
    return [*kept[:index], *kept[index + 2 :]]


@app.command(
    epilog=examples_epilog(
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
    options: RunOptions, outlets: OutputFormats, isa: Isa = None, as_json: AsJson = False, watch: Watch = False
) -> None:
    """Run cases, judge them and write a report."""
    request = RunRequest(options)
    if _is_long_user_run(options) and not (as_json or outlets.has_any):
        request = replace(request, report_process=ReportProcess())
    if outlets.open and not options.report:
        raise UsageError("--open opens the report, and --no-report writes none: give only one of them")
    if watch:
        of_outlets = {f"--{name.replace('_', '-')}": value for name, value in vars(outlets).items()}
        excluded = {"--resume": options.resume, "--properties": options.properties, "--json": as_json, **of_outlets}
        if names := [name for name, value in excluded.items() if value]:
            raise UsageError(f"--watch runs again and again, for people, and does not go with {' or '.join(names)}")
        from attncheck.cli.watching import watch as watch_files

        show = partial(_report_and_show, request)
        outcome = watch_files(
            request, run_request, show, partial(write_page, request), partial(_prepare_next_run, options)
        )
        raise typer.Exit(outcome)
    summary = run_request(request)
    _report_and_show(request, summary, outlets, as_json=as_json)
    raise typer.Exit(summary.exit_code)


def write_page(request: RunRequest, *, shows_causes: bool = False) -> None:
    """Write the report, if one is wanted; print the causes of failures before, if ``shows_causes``."""
    from attncheck.reports.report_process import load_and_list_causes
    from attncheck.reports.terminal import print_lines
    from attncheck.results.format import REPORT_FOLDER

    options, process, frames = request.options, request.report_process, None
    if not (options.report or shows_causes):
        return
    lines = None if process is None else process.call(load_and_list_causes, options.output)
    if lines is None:
        from attncheck.reports.short_form import cause_lines

        frames = read_frames_of_runs([options.output])
        lines = list(cause_lines(frames))
    if shows_causes:
        print_lines(lines)
    folder = options.output / REPORT_FOLDER
    if options.report and (frames or process is None or not _write_in_process(process, folder)):
        write_frames(frames or read_frames_of_runs([options.output]), folder)


def _write_in_process(process: ReportProcess, folder: Path) -> Path | None:
    """Write the report of the results that a process has summarised there; None if it cannot."""
    from attncheck.reports.report_process import write_loaded_report

    return process.call(write_loaded_report, folder)


def _report_and_show(
    request: RunRequest, summary: RunSummary, outlets: OutputFormats | None = None, *, as_json: bool = False
) -> None:
    """Show the answer, and write the report, if one is wanted: people read the answer while the report is written."""
    from attncheck.results.format import REPORT_FOLDER

    options, name, code = request.options, "check" if as_json else "", summary.exit_code
    folder, quiet = options.output / REPORT_FOLDER if options.report else None, options.quiet
    is_silent = quiet and code is ExitCode.AGREE and not (as_json or options.verbose or (outlets and outlets.has_any))
    if is_silent and folder is None:  # without pandas, which takes as long to import as a hundred small cases
        return
    with request.times.measure("report"):
        if request.report_process is None or not _report_in_process(request.report_process, options, folder):
            frames = read_frames_of_runs([options.output])
            announced = frames.announced
            place = write_and_show(frames, options.output, folder, code, as_json=name, quiet=quiet, announced=announced)
            if outlets is not None:
                write_ci_outputs(frames, place, outlets, as_json=as_json)
    if options.verbose:
        typer.echo(f"attncheck: time, of processes side by side added up: {request.times}", err=True)


def _report_in_process(process: ReportProcess, options: RunOptions, folder: Path | None) -> bool:
    """Show the answer and write the report as another process makes them; return False if it cannot."""
    from attncheck.reports.report_process import load_and_summarise
    from attncheck.reports.terminal import print_lines

    lines = process.call(load_and_summarise, options.output, options.quiet)
    if lines is None:
        return False
    print_lines(lines)
    written = None if folder is None else _write_in_process(process, folder)
    if folder is not None and written is None:  # show why
        written = write_frames(read_frames_of_runs([options.output]), folder)
    if not options.quiet:
        print_report_location(ReportLocation(options.output, written))
    return True


def _is_long_user_run(options: RunOptions) -> bool:
    """Return whether a user's function runs on the whole corpus, so that further processes pay off."""
    from attncheck.execution.user_code import is_user_target

    is_of_user = any(map(is_user_target, options.implementations))
    is_long = not (any(options.case_selection.values()) or options.failed)
    return is_of_user and is_long and options.cluster is None and available_processors() > 1
