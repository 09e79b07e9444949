"""Commands that run cases: ``check`` and ``run``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import typer

from attncheck.cli.app import app, examples
from attncheck.cli.options import (
    DEFAULT_CACHE_SIZE,
    AllCases,
    Annotations,
    AsJson,
    BackendNames,
    Badges,
    CacheSize,
    CiSummary,
    Cluster,
    CompilationCache,
    DtypeNames,
    ExitFirst,
    ExpectedFailures,
    Failed,
    FailedFirst,
    Framework,
    ImplementationNames,
    Isa,
    JunitXml,
    Keep,
    KeepArrays,
    KeepGoing,
    Label,
    Match,
    MaxFail,
    MemoryLimit,
    MinJudged,
    NoReport,
    Output,
    Patterns,
    Quiet,
    Resume,
    Sarif,
    Signature,
    Standard,
    TagNames,
    Threads,
    Tiles,
    TimeLimit,
    UseCache,
    VerboseRun,
    Watch,
    WithProperties,
)
from attncheck.cli.requests import Iteration, RunRequest, run_request
from attncheck.cli.shared import (
    Outlets,
    ReportPlace,
    frames_of,
    show_answer,
    split,
    write_ci_outputs,
    write_frames,
)
from attncheck.errors import UsageError
from attncheck.results import DEFAULT_RESULTS

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
    cases: Patterns = None,
    backend: BackendNames = None,
    implementation: ImplementationNames = None,
    framework: Framework = None,
    signature: Signature = None,
    expected_failures: ExpectedFailures = None,
    dtype: DtypeNames = None,
    tag: TagNames = None,
    match: Match = None,
    tile: Tiles = None,
    failed: Failed = False,
    failed_first: FailedFirst = False,
    exitfirst: ExitFirst = False,
    maxfail: MaxFail = None,
    output: Output = DEFAULT_RESULTS,
    label: Label = "local",
    keep_arrays: KeepArrays = Keep.DISAGREEING,
    time_limit: TimeLimit = 60.0,
    memory_limit: MemoryLimit = None,
    threads: Threads = 1,
    isa: Isa = None,
    compilation_cache: CompilationCache = True,
    cache: UseCache = True,
    cache_size: CacheSize = DEFAULT_CACHE_SIZE,
    keep_going: KeepGoing = False,
    all_cases: AllCases = False,
    standard: Standard = None,
    properties: WithProperties = False,
    resume: Resume = False,
    cluster: Cluster = None,
    min_judged: MinJudged = None,
    junit_xml: JunitXml = None,
    ci_summary: CiSummary = None,
    annotations: Annotations = False,
    sarif: Sarif = None,
    badge: Badges = None,
    as_json: AsJson = False,
    no_report: NoReport = False,
    watch: Watch = False,
    quiet: Quiet = False,
    verbose: VerboseRun = False,
) -> None:
    """Run cases, judge them and write a report."""
    request = RunRequest(
        report=not no_report,
        properties=properties,
        patterns=cases,
        backend=backend,
        implementation=implementation,
        framework=framework,
        signature=signature,
        expected_failures=expected_failures,
        dtype=dtype,
        tag=tag,
        tile=tile,
        iteration=Iteration(match, failed, failed_first, exitfirst, maxfail, all_cases, split(standard)),
        output=output,
        label=label,
        keep_arrays=keep_arrays,
        time_limit=time_limit,
        memory_limit=memory_limit,
        threads=threads,
        compilation_cache=compilation_cache,
        keep_going=keep_going,
        resume=resume,
        cluster=cluster,
        min_judged=min_judged,
        quiet=quiet,
        cache=cache,
        cache_size=cache_size,
        verbose=verbose,
    )
    if watch:
        _refuse_with_watch(
            {
                "--resume": resume,
                "--properties": properties,
                "--json": as_json,
                "--junit-xml": junit_xml,
                "--ci-summary": ci_summary,
                "--annotations": annotations,
                "--sarif": sarif,
                "--badge": badge,
            }
        )
        from attncheck.cli.watching import watch as watch_files

        raise typer.Exit(
            watch_files(request, lambda summary: _finish(request, summary), lambda summary: _write(request))
        )
    outlets = Outlets(junit_xml, ci_summary, annotations, sarif, badge or ())
    summary = run_request(request)
    _finish(request, summary, outlets, as_json=as_json)
    raise typer.Exit(summary.exit_code)


def _refuse_with_watch(given: Mapping[str, object]) -> None:
    if names := [name for name, value in given.items() if value]:
        raise UsageError(f"--watch runs again and again, for people, and does not go with {' or '.join(names)}")


def _write(request: RunRequest) -> None:
    """Write the report, if one is wanted."""
    from attncheck.results.format import REPORT_FOLDER

    if request.report:
        write_frames(frames_of([request.output]), request.output / REPORT_FOLDER)


def _finish(request: RunRequest, summary: RunSummary, outlets: Outlets | None = None, *, as_json: bool = False) -> None:
    """Write the report, if one is wanted, and show the answer."""
    from attncheck.results.format import REPORT_FOLDER

    with request.times.of("report"):
        frames = frames_of([request.output])
        path = write_frames(frames, request.output / REPORT_FOLDER) if request.report else None
    place = ReportPlace(request.output, path)
    name = "check" if as_json else ""
    show_answer(frames, place, summary.exit_code, as_json=name, quiet=request.quiet, announced=frames.announced)
    _show_times(request)
    if outlets is not None:
        write_ci_outputs(frames, place, outlets, as_json=as_json)


def _show_times(request: RunRequest) -> None:
    """Say what took the time, where that is asked for."""
    if request.verbose:
        typer.echo(f"attncheck: time, of processes side by side added up: {request.times}", err=True)
