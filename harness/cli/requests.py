"""A run as the command line asks for it: what is selected and chosen, how it runs, and what it comes to.

What the commands offer somebody who changes a kernel and looks again: narrow a run, order it, end it early.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from threading import Thread, Timer
from typing import TYPE_CHECKING

import typer

from attncheck.cli.options import Keep
from attncheck.cli.shared import limits_of, print_faults, select, split, store_of
from attncheck.errors import CaseError, ExitCode, NothingFailed, UsageError
from attncheck.timing import Times

if TYPE_CHECKING:
    from attncheck.execution.describing import DescribedWorkers
    from attncheck.execution.implementations import ImplementationSelection
    from attncheck.execution.limits import Limits
    from attncheck.progress import Watcher
    from attncheck.reading.selection import Selection
    from attncheck.results.last_failed import FailedEvaluation, Narrowed
    from attncheck.run import RunSummary, Settings


_NEEDED = ("run", "config", "progress", "execution.implementation_selection")
"""Modules that every run needs."""
_NEEDED_AFTERWARDS = ("reports.build_frames", "reports.terminal")
_NEEDED_FOR_A_REPORT = ("reports.write",)


_MOMENT = 0.6
"""Seconds."""


@dataclass(frozen=True)
class RunRequest:
    """The options of ``check`` and ``run`` that say what runs, and how; as they were given."""

    report: bool
    patterns: list[str] | None
    backend: list[str] | None
    implementation: list[str] | None
    framework: str | None
    signature: str | None
    expected_failures: list[Path] | None
    dtype: list[str] | None
    tag: list[str] | None
    tile: list[str] | None
    iteration: Iteration
    output: Path
    label: str
    keep_arrays: Keep
    time_limit: float
    memory_limit: float | None
    threads: int
    compilation_cache: bool
    keep_going: bool
    resume: bool
    cluster: str | None
    min_judged: str | None
    quiet: bool
    cache: bool
    cache_size: float
    verbose: bool
    properties: bool = False
    """Whether properties are asked besides."""
    is_announced: bool = False
    """Whether people were told already what they may want to know before a run."""
    times: Times = field(default_factory=Times)

    @property
    def limits(self) -> Limits:
        """What a worker may take."""
        return limits_of(self.time_limit, self.memory_limit, self.threads, self.compilation_cache, self.keep_going)

    @property
    def is_narrowed(self) -> bool:
        """Whether some of the cases are picked, or some of their dtypes."""
        return bool(self.patterns or self.tag or self.dtype or self.iteration.match)


def run_request(
    request: RunRequest,
    on_failure: Callable[[Watcher, FailedEvaluation], None] = lambda progress, failed: progress.fail(str(failed)),
) -> RunSummary:
    """Select, run and judge; print what is wrong with case files; end the program where nothing can be run.

    ``on_failure`` shows a failing evaluation as it is judged.
    """
    from attncheck.execution.describing import DescribedWorkers

    with DescribedWorkers() as described:
        begin_to_load(request, described)
        return _run(request, described, on_failure)


def begin_to_load(request: RunRequest, described: DescribedWorkers) -> None:
    """Start the processes of own implementations, and import what a run needs while they load."""
    begun = False
    from attncheck.execution.describing import Question
    from attncheck.execution.user_code import Target, is_own

    for pattern in split(request.implementation):
        if is_own(pattern):
            try:
                target = Target.of(pattern, request.signature or "")
            except UsageError:
                return  # which is said where the others are looked at
            described.begin(Question(target, request.framework, request.threads, request.compilation_cache))
            begun = True
    _load(_NEEDED)
    if begun:
        _load_what_shows(request)


def _load_what_shows(request: RunRequest) -> None:
    _load((*_NEEDED_AFTERWARDS, *(_NEEDED_FOR_A_REPORT if request.report else ())))


def _load(names: Iterable[str]) -> None:
    for name in names:
        import_module(f"attncheck.{name}")


def _run(
    request: RunRequest, described: DescribedWorkers, on_failure: Callable[[Watcher, FailedEvaluation], None]
) -> RunSummary:
    from attncheck.attention.enclosure import SETTLED
    from attncheck.commands import joined
    from attncheck.execution.implementation_selection import select_implementations
    from attncheck.progress import show_progress
    from attncheck.run import run_cases

    SETTLED.clear()
    own = (split(request.backend) or None, split(request.implementation), request.framework)
    chosen = select_implementations(*own, request.limits, described, request.signature)
    chosen = chosen.with_standard(request.iteration.standard)
    store = store_of(request.cache, request.cache_size)
    with request.times.of("reading cases"), _said_after_a_moment(request, "reading the bundled cases"):
        selection = select(
            *(request.patterns, request.tag, request.dtype, request.expected_failures),
            *(request.tile, request.iteration.match, store),
        )
    if selection.faults and not selection.cases:  # the last results stay as they are
        raise CaseError(list(selection.faults))
    narrowed = _narrowed(request, chosen, selection)
    settings = replace(_settings(request, chosen, selection, narrowed), store=store, times=request.times)
    Thread(target=_load_what_shows, args=(request,)).start()  # while the first worker imports its framework
    try:
        with show_progress(visible=not request.quiet) as progress:
            summary = run_cases(
                narrowed.cases,
                chosen,
                settings,
                selection.faults,
                progress.update,
                lambda failed: on_failure(progress, failed),
                described=described,
                on_plan=lambda words: None if request.quiet else typer.echo(f"attncheck: {words}", err=True),
            )
            if request.properties:
                summary = _with_properties(request, chosen, settings, summary)
        if summary.failures:
            from attncheck.repro import write_scripts

            write_scripts(narrowed.cases, chosen.implementations, summary.failures, request.output, settings.limits)
        if request.verbose:
            settled = store.counts + SETTLED
            typer.echo(f"attncheck: cache: {store.summary}", err=True)
            typer.echo(
                f"attncheck: exact answers: {settled['double words']:,} in double words, {settled['balls']:,} in balls",
                err=True,
            )
        return summary
    except KeyboardInterrupt:
        typer.echo(
            f"attncheck: interrupted; what was judged is in {request.output}: "
            f"`{joined(['attncheck', 'report', str(request.output)])}` shows it, and the same command with --resume "
            "goes on",
            err=True,
        )
        raise typer.Exit(ExitCode.INTERRUPTED) from None


@contextmanager
def _said_after_a_moment(request: RunRequest, words: str) -> Iterator[None]:
    """Say what is going on, where that takes longer than people wait without wondering."""
    said = Timer(_MOMENT, typer.echo, [f"attncheck: {words}"], {"err": True})
    said.daemon = True
    if not (request.patterns or request.quiet or request.is_announced):
        said.start()
    try:
        yield
    finally:
        said.cancel()


def _with_properties(
    request: RunRequest, chosen: ImplementationSelection, settings: Settings, summary: RunSummary
) -> RunSummary:
    """Ask properties of what was chosen, write what was found beside the run's rows, and count it in its exit code."""
    from attncheck.properties.rows import exit_code_of
    from attncheck.properties.run import Asking, ask_all, questions_of, select_property_cases
    from attncheck.results.writer import note_exit_code, write_property_rows

    lists = request.expected_failures or []
    asking = Asking(dtypes=settings.dtypes, limits=settings.limits, store=settings.store)
    selection = select_property_cases((), lists, asking.store)
    print_faults(selection)
    questions = questions_of(selection.cases, asking)
    rows = ask_all(chosen.implementations, questions, asking, lists, complete=not asking.dtypes)
    write_property_rows(request.output, rows)
    codes = {summary.exit_code, exit_code_of(rows)} | ({ExitCode.BAD_INPUT} if selection.faults else set())
    worst = next(code for code in (*_BY_SEVERITY, summary.exit_code) if code in codes)
    note_exit_code(request.output, worst)
    return replace(summary, exit_code=worst)


_BY_SEVERITY = (ExitCode.INTERRUPTED, ExitCode.BAD_INPUT, ExitCode.DISAGREE, ExitCode.NOT_RUN)


def _narrowed(request: RunRequest, chosen: ImplementationSelection, selection: Selection) -> Narrowed:
    """Print what people may want to know before a run, and return the cases that run."""
    from attncheck.reading.tiles import left_out

    print_faults(selection)
    for name in chosen.missing:
        typer.echo(f"attncheck: {name} could not run: asked for by name, not installed", err=True)
    names = [item.name for item in chosen.implementations]
    narrowed = narrow(selection, request.iteration, split(request.dtype), names, request.output, resume=request.resume)
    if narrowed.only is not None and not narrowed.only:
        raise NothingFailed(narrowed.note)
    if not (request.quiet or request.is_announced):
        for hint in filter(None, (*chosen.hints, left_out(_tiles(request)), narrowed.note)):
            typer.echo(f"attncheck: {hint}", err=True)
    return narrowed


def _tiles(request: RunRequest) -> tuple[int, ...]:
    from attncheck.config import tiles_of
    from attncheck.reading.tiles import read_tiles

    return tiles_of(read_tiles(split(request.tile), "--tile"), complete=not request.patterns)


def _settings(
    request: RunRequest, chosen: ImplementationSelection, selection: Selection, narrowed: Narrowed
) -> Settings:
    from attncheck.config import expected_failures_of, minimum_of
    from attncheck.run import Settings

    complete = not request.is_narrowed and narrowed.only is None
    return Settings(
        output=request.output,
        label=request.label,
        dtypes=tuple(split(request.dtype)),
        keep_all_arrays=request.keep_arrays is Keep.ALL,
        limits=request.limits,
        command=["attncheck", *_without_cluster(sys.argv[1:])],
        expected_failures=expected_failures_of(
            [item.entry.name for item in chosen.implementations], request.expected_failures or ()
        ),
        complete=complete,
        tags=selection.tags,
        resume=request.resume,
        cluster=request.cluster,
        picked={
            "cases": request.patterns or [],
            "tags": split(request.tag),
            "dtypes": split(request.dtype),
            "match": [request.iteration.match] if request.iteration.match else [],
            "failed": [str(request.output)] if narrowed.only is not None else [],
        },
        tiles=_tiles(request),
        minimum=minimum_of(request.min_judged, complete=complete),
        only=narrowed.only,
        max_failures=request.iteration.max_failures,
        all_cases=request.iteration.all_cases,
        documents_first=not request.iteration.failed_first,
    )


def _without_cluster(arguments: list[str]) -> list[str]:
    """Leave out where it was computed: the report is the same, and says the same of how to make it again."""
    kept = [each for each in arguments if not each.startswith("--cluster=")]
    index = kept.index("--cluster") if "--cluster" in kept else len(kept)
    return [*kept[:index], *kept[index + 2 :]]


@dataclass(frozen=True)
class Iteration:
    """How a run is narrowed, ordered and ended for somebody who changes a kernel and looks again."""

    match: str | None = None
    failed: bool = False
    failed_first: bool = False
    exitfirst: bool = False
    maxfail: int | None = None
    all_cases: bool = False
    standard: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.all_cases and self.standard:
            raise UsageError("--all-cases leaves no case out, --standard runs some alone: give one")
        if self.failed and self.failed_first:
            raise UsageError("--failed runs what failed last time alone, --failed-first before the rest: give one")

    @property
    def max_failures(self) -> int | None:
        """After how many failing cases a run is stopped."""
        return 1 if self.exitfirst else self.maxfail


def narrow(
    selection: Selection, iteration: Iteration, dtypes: list[str], names: list[str], output: Path, *, resume: bool
) -> Narrowed:
    """Return the cases that run: all that are selected, or what failed last time alone or before the rest."""
    from attncheck.results.last_failed import Narrowed, failed_alone, failed_first

    if iteration.failed:
        return failed_alone(selection.cases, dtypes, names, output, resume=resume)
    if iteration.failed_first:
        return failed_first(selection.cases, dtypes, names, output)
    return Narrowed(selection.cases, None, "")
