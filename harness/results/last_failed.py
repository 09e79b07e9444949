"""The failures of the last run in a folder: recorded during a run, rerun alone or first, and looked up by case.

A run replaces the record of each evaluation (a case, in a dtype, on an implementation) that it judges, and keeps the
record of others. So runs of some cases, and runs that are stopped, narrow the record down to the remaining failures.
``--failed`` and ``--failed-first`` use it; ``explain`` looks up the result of one case in a check, and the calls before
it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attncheck.common.errors import ResultsError, UsageError
from attncheck.common.wording import format_at_stage, join_words
from attncheck.reading.case import Case, PackedCases
from attncheck.reading.selection import format_case_address
from attncheck.results.coverage import EarlyStop
from attncheck.results.format import Row
from attncheck.results.parts import read_rows
from attncheck.results.reader import read_environment, require_format_version
from attncheck.results.records import CaseRecords, FailedFile, read_cases, read_json, require_valid_record
from attncheck.spec.verdicts import Verdict

FAILED_FILE = "failed.json"
CaseInDtype = tuple[str, str]
"""A case's id and a dtype."""
Evaluation = tuple[str, str, str]
"""A case's id, a dtype and an implementation."""


@dataclass(frozen=True)
class FailedEvaluation:
    """One failing evaluation: its verdict and the first wrong stage, empty if the whole evaluation failed."""

    case: str
    dtype: str
    implementation: str
    verdict: str
    stage: str

    @property
    def key(self) -> Evaluation:
        """The case, dtype and implementation."""
        return self.case, self.dtype, self.implementation

    def __str__(self) -> str:
        return f"{self.implementation}: {self.case} [{self.dtype}]: {format_at_stage(self.verdict, self.stage)}"


def failed_evaluations(rows: Iterable[Row]) -> list[FailedEvaluation]:
    """Return the failing evaluations among the rows of a case in a dtype, one for each implementation.

    Both members of a differing pair count as failing if neither fails separately. An expected failure that no longer
    happens is no failure of the case.
    """
    failing = [row for row in rows if is_case_failure(row)]
    failing_rows: dict[Evaluation, Row] = {}
    for row in failing:
        if row.comparison != "pair":
            key = (row.case, row.dtype, row.implementation)
            if key not in failing_rows or (row.stage and row.stage == row.begins_at != failing_rows[key].stage):
                failing_rows[key] = row
    for row in failing:
        members = [(row.case, row.dtype, name) for name in (row.implementation, row.other) if name]
        if row.comparison == "pair" and not any(key in failing_rows for key in members):
            failing_rows |= dict.fromkeys(members, row)
    return [FailedEvaluation(*key, Verdict(row.verdict).value, row.stage) for key, row in failing_rows.items()]


def is_case_failure(row: Row) -> bool:
    """Return whether a row is a failure of its case, which an expected failure that no longer happens is not."""
    return row.fails_run and row.verdict != Verdict.XPASS


@dataclass(frozen=True)
class LastFailures:
    """The failed evaluations of a folder, and the cases that the run in it was narrowed to, if it was."""

    failed_evaluations: frozenset[Evaluation] = frozenset()
    selected_units: frozenset[CaseInDtype] | None = None

    def failed_units(self, implementations: Collection[str]) -> frozenset[CaseInDtype]:
        """Return the cases, each with a dtype, that failed on any of these implementations."""
        return frozenset((case, dtype) for case, dtype, name in self.failed_evaluations if name in implementations)


def read_last_failures(directory: Path) -> LastFailures | None:
    """Read the failures of the last run; None if there is no record. Raises ``ResultsError`` if it is damaged."""
    path = directory / FAILED_FILE
    if not directory.is_dir() or (content := read_json(path)) is None:
        return None
    require_valid_record(content, FailedFile, path)
    require_format_version(content["format"], path)
    selected = content.get("selected")
    return LastFailures(
        frozenset((case, dtype, name) for case, dtype, name in content["failed"]),
        None if selected is None else frozenset((case, dtype) for case, dtype in selected),
    )


@dataclass
class FailedRecord:
    """The failures before a run, updated during the run; ``note`` takes the rows of whole evaluations."""

    earlier_failures: set[Evaluation] = field(default_factory=set)
    new_failures: set[Evaluation] = field(default_factory=set)
    selected_units: Collection[CaseInDtype] | None = None

    @classmethod
    def from_folder(cls, directory: Path, selected: Collection[CaseInDtype] | None) -> FailedRecord:
        """Begin with the earlier failures in a folder; a damaged file is ignored and overwritten."""
        try:
            before = read_last_failures(directory)
        except ResultsError:
            before = None
        return cls(set(before.failed_evaluations) if before else set(), selected_units=selected)

    def record(self, rows: Sequence[Row]) -> list[FailedEvaluation]:
        """Replace the records of evaluations; return those that fail."""
        if self.earlier_failures:
            for row in rows:
                self.earlier_failures.difference_update(
                    (row.case, row.dtype, name) for name in (row.implementation, row.other)
                )
        failed = failed_evaluations(rows)
        self.new_failures.update(evaluation.key for evaluation in failed)
        return failed

    def as_record(self) -> Mapping[str, Any]:
        """Return the content of failed.json."""
        selected = {} if self.selected_units is None else {"selected": sorted(self.selected_units)}
        return {"failed": sorted(self.earlier_failures | self.new_failures), **selected}


@dataclass
class FailureLimit:
    """Watches a run: reports every failure, and stops the run after enough failing cases."""

    record: FailedRecord
    max_failures: int | None = None
    on_failure: Callable[[FailedEvaluation], None] = lambda failed: None
    deadline: float | None = None
    """When the run has to stop, by ``time.monotonic``."""
    failing_cases: set[str] = field(default_factory=set)
    """The cases that failed in this run."""
    judged_units: set[CaseInDtype] = field(default_factory=set)
    """The cases and dtypes that this run judged; recorded only if the run may be stopped."""

    def record_rows(self, rows: Sequence[Row]) -> bool:
        """Record the rows of a case in a dtype; return whether the run has to stop."""
        for failed in self.record.record(rows):
            self.failing_cases.add(failed.case)
            self.on_failure(failed)
        if self.max_failures is None and self.deadline is None:
            return False
        self.judged_units.update((row.case, row.dtype) for row in rows[:1])
        return self._is_reached

    @property
    def _is_reached(self) -> bool:
        has_failed = self.max_failures is not None and len(self.failing_cases) >= self.max_failures
        return has_failed or (self.deadline is not None and time.monotonic() > self.deadline)

    def early_stop(self, planned: Iterable[CaseInDtype], finished: Collection[CaseInDtype]) -> EarlyStop | None:
        """Return the stop of the run if it did not judge all ``planned`` cases and dtypes; None if it did.

        ``finished`` are those that an earlier part of the run judged.
        """
        if not self._is_reached:
            return None
        missing, begun = set[str](), set[str]()
        for case, dtype in planned:
            done = (case, dtype) in self.judged_units or (case, dtype) in finished
            (begun if done else missing).add(case)
        return EarlyStop(len(self.failing_cases), len(missing - begun), len(missing & begun)) if missing else None


@dataclass(frozen=True)
class Subset:
    """The cases to run, in order; ``failed_units`` are the failed ones, each with a dtype, if only they run.

    ``note`` describes the selection for people.
    """

    cases: Sequence[Case]
    failed_units: frozenset[CaseInDtype] | None
    description: str


def select_failed(
    cases: Sequence[Case],
    dtypes: Collection[str],
    implementations: Collection[str],
    directory: Path,
    *,
    resume: bool = False,
) -> Subset:
    """Keep the cases and ``dtypes`` (all if empty) that failed in the last run on one of these implementations.

    All cases are kept if the last run did not finish. If the run in the ``directory`` continues (``resume``), it keeps
    the cases that it was narrowed to.

    Raises:
        UsageError: The directory has no results that say what failed.
    """
    failed, reason = _read_failures_or_reason(directory)
    if failed is None:
        raise UsageError(f"--failed: {reason}; check without --failed first")
    wanted = failed.selected_units if resume else failed.failed_units(implementations)
    if wanted is None:
        return Subset(cases, None, f"the run in {directory} was of everything that was selected, and goes on")
    only = _keep_declared_units(wanted, cases, dtypes)
    kept = {case for case, _ in only}
    # Only the summary of a complete run names the implementations that were judged.
    judged = (read_json(directory / "summary.json") or {}).get("implementations", ()) if not kept else ()
    if not kept and (unknown := sorted(set(implementations).difference(judged))):
        return Subset(cases, None, f"{directory} has no whole run of {join_words(unknown)}: every selected case runs")
    if not kept:
        note = f"nothing {'selected ' if wanted else ''}failed last time in {directory}: nothing runs"
        return Subset(PackedCases(()), only, note)
    note = _selection_note(kept, cases, directory, "alone")
    return Subset(PackedCases(case for case in cases if case.id in kept), only, note)


def order_failed_first(
    cases: Sequence[Case], dtypes: Collection[str], implementations: Collection[str], directory: Path
) -> Subset:
    """Put the cases first that failed in the last run on one of these implementations; all run."""
    failed, reason = _read_failures_or_reason(directory)
    if failed is None:
        return Subset(cases, None, f"{reason}: the cases run in their order")
    ahead = {case for case, _ in _keep_declared_units(failed.failed_units(implementations), cases, dtypes)}
    if not ahead:
        return Subset(cases, None, f"nothing selected failed last time in {directory}: the cases run in their order")
    order = sorted(range(len(cases)), key=lambda number: cases[number].id not in ahead)  # stable
    return Subset(
        PackedCases(cases[number] for number in order), None, _selection_note(ahead, cases, directory, "first")
    )


def _selection_note(failed: Collection[str], cases: Sequence[Case], directory: Path, how: str) -> str:
    count = f"{len(failed):,} of {len(cases):,} cases"
    return f"{count} failed last time in {directory} and {'runs' if len(failed) == 1 else 'run'} {how}"


def _read_failures_or_reason(directory: Path) -> tuple[LastFailures | None, str]:
    """Read the failures; return None and the reason if that is not possible."""
    try:
        failed = read_last_failures(directory)
    except ResultsError as error:
        return None, f"what failed last time is not known: {error}"
    return failed, "" if failed else f"there are no earlier results in {directory}"


def _keep_declared_units(
    units: Collection[CaseInDtype], cases: Sequence[Case], dtypes: Collection[str]
) -> frozenset[CaseInDtype]:
    """Keep the units that these cases declare, in these dtypes."""
    named = {case for case, _ in units}
    declared = ((case.id, dtype) for case in cases if case.id in named for dtype in case.dtypes)
    return frozenset(unit for unit in declared if unit in units and (not dtypes or unit[1] in dtypes))


@dataclass(frozen=True)
class CheckRecord:
    """A check's results: its case records in the order of its plan, and when they were written."""

    directory: Path
    cases: CaseRecords
    command_words: Mapping[str, list[str]]
    written_at: float

    def case_address(self, identity: str) -> str | None:
        """Return the address of a case of the check for a command; None if it had no case with that id."""
        record = self.cases.get(identity)
        return None if record is None else format_case_address(identity, record.get("path", ""))

    def outcomes_of_calls(self, implementation: str) -> dict[CaseInDtype, str]:
        """Return the first failure of every call, in the plan's order; empty text if nothing is wrong."""
        table, _ = read_rows(self.directory)
        kept = (table["implementation"].array == implementation) & (table["comparison"].array == "stage")
        planned = ((identity, dtype) for identity, record in self.cases.items() for dtype in record["dtypes"])
        return call_outcomes(planned, table.take(kept.astype(bool)).records())


def read_check_record(directory: Path, *, needed: bool) -> CheckRecord | None:
    """Read the check in a folder; None if there is none, unless it is ``needed``. Raises ``ResultsError``."""
    try:
        environment = read_environment(directory)
    except ResultsError:
        if needed:
            raise
        return None
    cases, _ = read_cases(directory / "cases.json")
    return CheckRecord(directory, cases, environment.get("again", {}), (directory / "environment.json").stat().st_mtime)


def has_killed_worker(message: str) -> bool:
    """Return whether a call ended its process, so that the next call had a new one."""
    return message.startswith((Verdict.CRASH, Verdict.TIMEOUT))


def call_outcomes(planned: Iterable[CaseInDtype], rows: Iterable[Mapping[Any, Any]]) -> dict[CaseInDtype, str]:
    """Return the first failure of calls, given the rows of their stages, in the plan's order; empty if none."""
    rows_by_call: dict[CaseInDtype, list[Mapping[Any, Any]]] = {}
    for row in rows:
        rows_by_call.setdefault((row["case"], row["dtype"]), []).append(row)
    return {where: call_outcome(rows_by_call[where]) for where in planned if where in rows_by_call}


def call_outcome(rows: Sequence[Mapping[str, Any]]) -> str:
    """Describe the first failure of a call, given the rows of its stages; empty if none fails."""
    failing = [row for row in rows if Verdict(row["verdict"]).exit_code]
    first = next((row for row in failing if row["stage"] == row["begins_at"]), failing[0] if failing else None)
    return "" if first is None else failure_text(first["verdict"], first["stage"], first["message"])


def failure_text(verdict: str, stage: str, message: str) -> str:
    """Describe a failure in a few words.

    Example:
        >>> failure_text("numeric", "weights", "")
        'numeric at weights'
        >>> failure_text("crashed", "", "exit code 139")
        'crashed: exit code 139'
    """
    return f"{format_at_stage(verdict, stage)}{f': {message}' if message else ''}"
