"""A run: cases are planned, computed in workers side by side, judged as soon as they are complete, and written.

A request becomes results in these steps:

1. ``run_cases`` makes the plan: every case in every dtype, in the order in which they run. Some implementations run
   only the standard cases by default; the plan marks these cases.
2. Implementations are grouped by the process in which they can run. Modes of one framework share a process.
3. ``_open_executor`` opens the workers of this machine, or a Dask cluster. Both are an ``Executor``, so no other step
   depends on where a case is computed.
4. ``_CaseRun.execute`` writes environment.json and cases.json first. So a run that is killed afterwards can be resumed
   and reported.
5. The executor computes and judges. It passes the rows of a case in a dtype to the recorder as soon as all of its
   implementations are judged. The recorder passes them to the writer, which writes them in parts.
6. When all cases are finished, the failures are diagnosed. A cause is decided from all failures of an implementation
   together, so this step cannot run earlier. Rows on disk whose verdict or message changes are replaced.
7. summary.json is written last. A directory without it is an interrupted run.

Judged rows are on disk while the run continues, and not only at its end. This costs a rewrite of the changed parts
after the diagnosis. In return, ``--resume`` reads the finished cases from disk and computes only the others. The
requests must be equal: ``results.resume`` compares environments and cases, because rows of different code, versions
or inputs cannot be mixed.

A run that stops early, after ``--maxfail`` failing cases, still ends with these steps. After each judged case,
``FailureLimit`` decides whether to stop, and the summary counts the cases that did not run.

Three further steps call an implementation again, only if they can help. Conventions are measured if the failures of a
user's function have no cause. A few of these failures are repeated in new processes (``asking.earlier_calls``).
Requirements are suggested if it was judged in hardly any case.
"""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from attncheck.common.errors import ExitCode
from attncheck.common.processors import available_processors
from attncheck.common.progress import ActivityTimes
from attncheck.common.store import NO_STORE, Store
from attncheck.common.wording import count_noun
from attncheck.diagnosis.on_demand import LAZY_DIAGNOSER
from attncheck.execution.call import Limits, divide_memory_between_workers, kill_orphans
from attncheck.execution.describing import DescribedWorkers
from attncheck.execution.environment import describe_environment
from attncheck.execution.implementations import ImplementationSelection, UserImplementation, source_location
from attncheck.execution.runner import GroupRunner, WorkerGroup, group_by_process, group_runners
from attncheck.executors.base import ResultRecorder
from attncheck.executors.local import LocalExecutor, runs_several_frameworks
from attncheck.judging.units import Judge
from attncheck.judging.xfail import ExpectedFailureRecord, describe_similar_failures, unit_sort_key
from attncheck.planning.plan import Plan, Unit
from attncheck.reading.case import Case, make_case_records
from attncheck.reading.expected_failures import ExpectedFailure, load_bundled_expected_failures
from attncheck.reading.model import TagEntry
from attncheck.results.coverage import EarlyStop, MinimumJudged, RequestedRun, shortfall_sentences
from attncheck.results.format import Row
from attncheck.results.last_failed import FAILED_FILE, CaseInDtype, FailedEvaluation, FailedRecord, FailureLimit
from attncheck.results.resume import ResumeState, read_resume_state
from attncheck.results.writer import ResultsWriter
from attncheck.settings.commands import command_words_by_name
from attncheck.settings.config import load_expected_failures_of, minimum_to_be_judged, tiles_to_run
from attncheck.settings.options import RecordedOptions, RunOptions
from attncheck.spec import DTYPES
from attncheck.spec.verdicts import Verdict

if TYPE_CHECKING:
    from attncheck.executors.base import Executor

_SHARE_OF_QUESTIONS, _LEAST_OF_QUESTIONS = 0.1, 0.5
"""Of the time of a run, for questions to a user's function whose failures have no name; in seconds, the least."""
_SECONDS_BETWEEN_TRIMS = 300.0
"""The least time between two trims of the store, unless a run adds many entries."""
_MAX_SIMILAR = 8
"""Workers of the same modes side by side: each holds a framework of its own."""


@dataclass(frozen=True)
class Settings(RecordedOptions):
    """The way cases are run: the options given, and what the selection and the project's configuration add.

    Attributes:
        limits: Limits of the worker processes.
        command: The command line, for the report.
        expected_failures: Failures that do not fail the run; None means those bundled for the backends that run.
        complete: Whether the cases are all that there are: an expected failure that shows in none of them is outdated.
        tags: What tags mean.
        picked: What the cases were narrowed by (of ``results.coverage.PICKED``), for the report.
        minimum: In how many cases every implementation has to be judged.
        keeps_results: Whether ``output`` stays, so that commands in reports may name it.
        only: The cases, each with a dtype, that failed last time, where they alone run; None runs all.
        store: Where exact answers, bounds and rows of earlier runs are.
        documents_first: Whether documents are judged before the other cases, or all in their order.
        max_seconds: The seconds after which no further case is judged; None for no limit.
        times: Gets the seconds that everything takes.
    """

    limits: Limits = field(default_factory=Limits)
    command: Sequence[str] = ()
    expected_failures: tuple[ExpectedFailure, ...] | None = None
    complete: bool = False
    tags: Mapping[str, TagEntry] = field(default_factory=dict)
    picked: Mapping[str, Sequence[str]] = field(default_factory=dict)
    minimum: MinimumJudged | None = None
    keeps_results: bool = True
    only: Collection[CaseInDtype] | None = None
    store: Store = NO_STORE
    documents_first: bool = True
    max_seconds: float | None = None
    times: ActivityTimes = field(default_factory=ActivityTimes)

    @classmethod
    def of(
        cls,
        options: RunOptions,
        chosen: ImplementationSelection,
        tags: Mapping[str, TagEntry],
        only: Collection[CaseInDtype] | None,
        store: Store,
    ) -> Settings:
        """Return how these implementations are run as the options say. Raises ``CaseError`` for a list of failures."""
        picked = options.case_selection | {"failed": [str(options.output)] if only is not None else []}
        complete = not any(picked.values())
        recorded = {field.name: getattr(options, field.name) for field in fields(RecordedOptions)}
        recorded |= {"tiles": tiles_to_run(options), "max_failures": 1 if options.exitfirst else options.max_failures}
        backends = [item.entry.name for item in chosen.implementations]
        return cls(
            **recorded,
            limits=options.worker_limits,
            expected_failures=load_expected_failures_of(backends, options.expected_failure_lists),
            complete=complete,
            tags=tags,
            picked=picked,
            minimum=minimum_to_be_judged(options, complete=complete),
            only=only,
            store=store,
            documents_first=not options.failed_first,
        )


@dataclass(frozen=True)
class RunSummary:
    """The outcome of a run.

    Attributes:
        exit_code: The exit code of the command line.
        cases: How many cases ran.
        evaluations: How many evaluations were made.
        verdicts: How many comparisons had each verdict.
        failures: The rows that fail the run.
        judged: In how many cases each implementation was judged.
        shortfalls: Where too little was judged, a line each.
        stopped: How the run was stopped before everything was judged; None where it was not.
    """

    exit_code: ExitCode
    cases: int
    evaluations: int
    verdicts: Mapping[str, int]
    failures: tuple[Row, ...]
    judged: Mapping[str, int] = field(default_factory=dict)
    shortfalls: tuple[str, ...] = ()
    stopped: EarlyStop | None = None

    @property
    def record(self) -> dict[str, Any]:
        """The content of summary.json."""
        counts = {name: getattr(self, name) for name in ("cases", "evaluations", "judged", "shortfalls", "verdicts")}
        stopped = {} if self.stopped is None else {"stopped": asdict(self.stopped)}
        return {"exit_code": int(self.exit_code), **counts, **stopped, "failures": len(self.failures)}


def run_cases(
    cases: Sequence[Case],
    chosen: ImplementationSelection,
    settings: Settings,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_failure: Callable[[FailedEvaluation], None] = lambda failed: None,
    *,
    described: DescribedWorkers | None = None,
    on_plan: Callable[[str], None] = lambda words: None,
    on_begin: Callable[[Executor], None] = lambda executor: None,
) -> RunSummary:
    """Run every case in every dtype on every implementation and write the results directory.

    What is judged is on disk even if the run is interrupted.

    Args:
        cases: The cases, as ``select_cases`` returns them.
        chosen: The implementations.
        settings: How to run.
        on_progress: Is called with the numbers of evaluations done and planned.
        on_failure: Is called with every failing evaluation as it is judged.
        on_plan: Is called with who is asked for which cases, where that is not the same for all.
        on_begin: Is called once with the executor, which knows the frameworks that start and the calls that are left.
        described: The processes in which implementations were described; workers on this machine are taken from them.

    Returns:
        Counts, failures and the exit code.

    Raises:
        OutputError: If the directory cannot be written.
        ClusterError: If a cluster is lost.
    """
    plan = Plan.of(cases, settings.dtypes, documents_first=settings.documents_first)
    plan = plan if settings.only is None else plan.keep_units(settings.only)
    if not settings.all_cases and (standard := _names_with_standard_cases(chosen)):
        from attncheck.planning.plan import choose_standard_units

        with settings.times.measure("choosing standard cases"):
            plan = choose_standard_units(plan)
        if count := plan.standard_case_count:
            on_plan(_plan_sentence(cases, chosen, standard, count))
    record = FailedRecord.from_folder(settings.output, settings.only)
    deadline = None if settings.max_seconds is None else time.monotonic() + settings.max_seconds
    watch = FailureLimit(record, settings.max_failures, on_failure, deadline)
    groups = [
        group
        for implementation in chosen.implementations
        for group in group_by_process(implementation, list(filter(implementation.rounding_model, plan.dtypes)))
    ]
    known = settings.expected_failures
    if known is None:
        known = load_bundled_expected_failures([item.entry.name for item in chosen.implementations])
    judge = Judge(chosen.implementations, settings.keep_all_arrays, known, settings.store, LAZY_DIAGNOSER)
    with _open_executor(groups, judge, settings, described) as means:
        on_begin(means)
        summary = _CaseRun(plan, groups, chosen, settings, judge, watch, on_progress).execute(means)
    settings.store.trim(min_interval=_SECONDS_BETWEEN_TRIMS)
    return summary


@dataclass
class _CaseRun:
    """A run while it lasts: its plan, whom it asks, and who judges and hears of it."""

    plan: Plan
    groups: Sequence[WorkerGroup]
    chosen: ImplementationSelection
    settings: Settings
    judge: Judge
    watch: FailureLimit
    on_progress: Callable[[int, int], None]
    begun: float = field(default_factory=time.monotonic)

    def execute(self, means: Executor) -> RunSummary:
        """Compute and judge what an earlier part of the run has not, diagnose what fails, and write all down."""
        plan, settings, watch = self.plan, self.settings, self.watch
        environment = {**environment_record(self.chosen, settings), **means.environment_record}
        resumed, records = ResumeState.empty(), partial(make_case_records, plan.cases, settings.tags)
        if settings.resume:
            again = {"untried": settings.limits.keep_going, "left_out": settings.all_cases}
            resumed = read_resume_state(settings.output, environment, records, **again)
        writer = ResultsWriter(settings.output, resume=not resumed.is_empty)
        environment |= {**resumed.kept_environment, "backends": resumed.backend_descriptions}
        writer.write_json("environment.json", environment)
        writer.write_cases(records())
        writer.write_json(FAILED_FILE, watch.record.as_record())
        recorder = ResultRecorder(
            writer, ExpectedFailureRecord(self.judge.expected_failures), on_judged=watch.record_rows
        )
        for rows in resumed.rows():
            recorder.restore_rows(rows)
            watch.record.record(rows)

        def describe_backends() -> None:
            # What was not needed any more has said it earlier.
            said = {
                name: text
                for name, text in means.descriptions.items()
                if text or name not in resumed.backend_descriptions
            }
            if (backends := {**resumed.backend_descriptions, **said}) != environment["backends"]:
                environment["backends"] = backends
                writer.write_json("environment.json", environment)

        writer.before_rows = describe_backends

        def report_progress(done: int, total: int) -> None:
            describe_backends()
            self.on_progress(done, total)

        try:
            finished = resumed.finished_units
            means.compute_and_judge(plan.drop_units(finished), recorder, report_progress)
            recorder.evaluations += sum(dtype in group.dtypes for _, dtype in finished for group in self.groups)
            stopped = watch.early_stop(((plan.case(unit).id, unit.dtype) for unit in plan), finished)
            if settings.complete and stopped is None:
                messages = {row.message for row in recorder.failures}
                in_part = set() if settings.all_cases else _names_with_standard_cases(self.chosen)
                recorder.add_rows(
                    row
                    for row in recorder.expected_failures.make_xpass_rows()
                    if row.message not in messages and row.implementation not in in_part
                )
        finally:
            writer.flush()
            writer.write_json(FAILED_FILE, watch.record.as_record())
            describe_backends()
        failing = self._diagnose_failures(recorder)
        if advice := self._advice(
            recorder, failing, RequestedRun.from_environment(environment, len(plan.cases), stopped)
        ):
            environment["asked"] |= advice
            writer.write_json("environment.json", environment)
        asked = RequestedRun.from_environment(environment, len(plan.cases), stopped)
        summary = summarise(self.chosen, recorder, failing, asked)
        names = [item.name for item in self.chosen.implementations]
        writer.write_json("summary.json", {**summary.record, "implementations": names, "faults": 0})
        return summary

    def _measure_conventions(self, name: str) -> Sequence[str]:
        """Ask one that fails what it means, for a share of the time of the run, if it is a user's and runs here."""
        seconds = _SHARE_OF_QUESTIONS * (time.monotonic() - self.begun)
        if self.settings.cluster is not None or seconds < _LEAST_OF_QUESTIONS:
            return ()
        from attncheck.asking.conventions import measure_conventions_within

        item = next(known for known in self.chosen.implementations if known.name == name)
        return measure_conventions_within(item, seconds, self.settings.limits)

    def _diagnose_failures(self, recorder: ResultRecorder) -> list[Row]:
        """Return the failing rows with what implementations do instead, as the results have them from now on."""
        if not recorder.failures:
            return []
        from attncheck.diagnosis.failing_evaluations import ReturnedStagesLookup
        from attncheck.diagnosis.run import diagnose_rows
        from attncheck.results.resume import replace_rows, row_key

        returned = ReturnedStagesLookup(self.settings.output, recorder.undiagnosed)
        failing = diagnose_rows(
            recorder.failures, self.plan, self.judge, returned, self._measure_conventions, recorder.judged_cases
        )
        if self.settings.cluster is None:
            from attncheck.asking.earlier_calls import mark_results_of_earlier_calls

            cases = {case.id: case for case in self.plan.cases}
            failing = mark_results_of_earlier_calls(
                recorder.failures, failing, self.chosen.implementations, cases, self.judge, self.settings.limits
            )
        replace_rows(self.settings.output, dict(zip(map(row_key, recorder.failures), failing, strict=True)))
        return failing

    def _advice(
        self, recorder: ResultRecorder, failing: Sequence[Row], asked: RequestedRun
    ) -> dict[str, dict[str, str]]:
        """Return sentences of advice about users' functions that fail, by kind and name."""
        axes = self._axes_advice(recorder, failing)
        advice = {
            "widens": self._suggest_requirements(recorder, asked, axes.keys()),
            "alike": self._find_similar_failures(failing) | axes,
        }
        return {kind: sentences for kind, sentences in advice.items() if sentences}

    def _axes_advice(self, recorder: ResultRecorder, failing: Sequence[Row]) -> dict[str, str]:
        """Return what to change of users' functions that fail in most cases because their axes have another order."""
        if self.settings.cluster is not None:
            return {}
        advice = {}
        for item in self.chosen.implementations:
            failed = {row.case for row in failing if row.implementation == item.name and row.fails_run}
            right = set(recorder.judged_cases.get(item.name, ())) - failed
            if isinstance(item.entry, UserImplementation) and len(failed) > len(right):
                from attncheck.asking.axes import axes_advice

                advice[item.name] = axes_advice(item, self.settings.limits)
        return {name: words for name, words in advice.items() if words}

    def _suggest_requirements(
        self, recorder: ResultRecorder, asked: RequestedRun, excluded: Collection[str]
    ) -> dict[str, str]:
        """Return what would let users' functions be judged in more cases, of those that were judged in hardly any.

        ``excluded`` are functions for which other advice is more important.
        """
        judged = recorder.judged_cases
        few = [
            item
            for item in self.chosen.implementations
            if item.name not in excluded
            and asked.is_hardly_judged(
                item.name, len(judged.get(item.name, ())), recorder.count_cases_not_offered(item.name)
            )
        ]
        if not few or self.settings.cluster is not None:
            return {}
        from attncheck.execution.suggested_requirements import suggest_requirements
        from attncheck.results.parts import read_rows

        table, _ = read_rows(self.settings.output)
        rows = list(table.records(("case", "implementation", "verdict", "lacks")))
        suggestions = {}
        for item in few:
            of_item = (row for row in rows if row["implementation"] == item.name and not row["lacks"])
            refused = {row["case"] for row in of_item if row["verdict"] in (Verdict.UNSUPPORTED, Verdict.ERROR)}
            refused -= judged.get(item.name, set())
            cases = [case for case in self.plan.cases if case.id in refused]
            if suggestion := suggest_requirements(item, cases, self.settings.limits):
                suggestions[item.name] = suggestion.advice(item)
        return suggestions

    def _find_similar_failures(self, failing: Sequence[Row]) -> dict[str, str]:
        """Return by users' functions that fail the functions of their framework that are recorded to fail alike."""
        sentences = {}
        for item in self.chosen.implementations:
            rows = [row for row in failing if row.implementation == item.name and row.fails_run]
            if rows and isinstance(item.entry, UserImplementation):
                sentences[item.name] = describe_similar_failures(
                    rows, load_bundled_expected_failures([item.entry.framework])
                )
        return {name: words for name, words in sentences.items() if words}


def _names_with_standard_cases(chosen: ImplementationSelection) -> set[str]:
    """Return the names of those that are asked, by default, for the standard cases alone."""
    return {item.name for item in chosen.implementations if item.runs_only_standard_cases}


def _plan_sentence(
    cases: Sequence[Case], chosen: ImplementationSelection, standard: Collection[str], count: int
) -> str:
    """Describe which implementations are asked for all cases, and which for the standard ones."""
    every, some = (
        ", ".join(item.short_name for item in chosen.implementations if (item.name in standard) == in_part)
        for in_part in (False, True)
    )
    whole = f"{every}: {len(cases):,} of {count_noun(len(cases), 'case')}; " if every else ""
    return f"{whole}{some}: the {count_noun(count, 'standard case')}, which cover the rest"


@contextmanager
def _open_executor(
    groups: Sequence[WorkerGroup], judge: Judge, settings: Settings, described: DescribedWorkers | None
) -> Iterator[Executor]:
    """Return what computes: workers on this machine, or a cluster for as long as this lasts."""
    if settings.cluster is None:
        kill_orphans()
        limits = divide_memory_between_workers(settings.limits, len({group.process_key for group in groups}))
        logs = settings.output / "logs"
        runners: list[list[GroupRunner[Unit]]] = group_runners(groups, limits, logs, described)
        bundled = [group for group in groups if group.is_bundled]  # whose outcomes do not depend on those before
        helpers: list[list[GroupRunner[Unit]]] = []
        for number in range(2, min(settings.limits.workers, available_processors(), _MAX_SIMILAR) + 1):
            helpers += group_runners(bundled, limits, logs, number=number)
        yield LocalExecutor(runners, judge, _max_workers(groups, settings.limits), helpers, settings.times)
        return
    from attncheck.executors.dask.connection import connect_for_run  # Dask is an extra
    from attncheck.executors.dask.driver import DaskExecutor

    with connect_for_run(settings.cluster, groups, judge, settings.limits) as cluster:
        yield DaskExecutor(cluster)


def _max_workers(groups: Sequence[WorkerGroup], limits: Limits) -> int:
    """Return how many workers may be alive.

    These are half of the processors where every group is served soon; the rest is for what judges. What compiles takes
    all of them. So do more groups than processors, at first: a unit is complete, and judged, only when the last ones
    answer. Frameworks that are compared keep a worker each, as far as memory allows.
    """
    processors, processes = available_processors(), {group.process_key for group in groups}
    if runs_several_frameworks(groups, limits.workers):
        frameworks = {group.process_key for group in groups if group.imports_framework}
        return min(limits.workers, max(processors, len(frameworks)))
    compiles = any(group.implementation.runs_only_standard_cases for group in groups)
    takes_all = compiles or len(processes) > processors
    return min(limits.workers, processors if takes_all else max(1, processors // 2))


def environment_record(chosen: ImplementationSelection, settings: Settings) -> dict[str, Any]:
    """Return what environment.json says of a run before anything was computed."""
    entries = [implementation.entry for implementation in chosen.implementations]
    user_entries = {
        item.name: item.entry for item in chosen.implementations if isinstance(item.entry, UserImplementation)
    }
    conventions = {name: dict(entry.conventions) for name, entry in user_entries.items() if entry.conventions}
    kept = settings.output if settings.keeps_results else None
    return {
        "label": settings.label,
        "command": shlex.join(settings.command),
        "started": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S"),
        "asked": {
            **{name: list(values) for name, values in settings.picked.items()},
            "by_name": list(chosen.requested_by_name),
            "own": [*user_entries],
            **({"conventions": conventions} if conventions else {}),
            **({"tiles": list(settings.tiles)} if settings.tiles else {}),
            "min_judged": None if settings.minimum is None else str(settings.minimum),
        },
        **describe_environment(entries, settings.limits.threads),
        "compilation_cache": settings.limits.compilation_cache,
        "implementations": {item.name: item.package for item in chosen.implementations},
        "sources": {
            item.name: dict(source) for item in chosen.implementations if (source := source_location(item.entry))
        },
        "classes": {
            item.name: {dtype: item.rounding_model(dtype) for dtype in DTYPES} for item in chosen.implementations
        },
        "again": command_words_by_name(chosen.implementations, settings.limits, kept),
        "left_out": dict.fromkeys(chosen.not_requested, "not installed"),
        "missing": dict.fromkeys(chosen.missing, "asked for by name, not installed"),
        "faults": [],  # of results of earlier releases, which ran the cases of other files where one had a fault
    }


def summarise(
    chosen: ImplementationSelection,
    recorder: ResultRecorder,
    failing: Sequence[Row],
    asked: RequestedRun,
) -> RunSummary:
    """Return what a run came to, of which these rows fail."""
    codes = {Verdict(row.verdict).exit_code for row in failing}
    judged = {item.name: len(recorder.judged_cases.get(item.name, ())) for item in chosen.implementations}
    absent = {name: recorder.count_cases_not_offered(name) for name in judged}
    short = shortfall_sentences(judged, asked, absent)
    if ExitCode.DISAGREE in codes:
        code = ExitCode.DISAGREE
    elif ExitCode.NOT_RUN in codes or chosen.missing or short:
        code = ExitCode.NOT_RUN
    else:
        code = ExitCode.AGREE
    seen = Counter(recorder.rows_seen)
    seen.subtract(row.verdict for row in recorder.failures)
    seen.update(row.verdict for row in failing)
    counts = {verdict.value: seen[verdict] for verdict in Verdict if seen[verdict]}
    # Workers side by side answer in any order; who reads the failures, finds the same ones first.
    failures = sorted(failing, key=unit_sort_key)
    return RunSummary(
        code, asked.cases, recorder.evaluations, counts, tuple(failures), judged, tuple(short), stopped=asked.stopped
    )
