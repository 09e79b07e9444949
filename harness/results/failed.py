"""What failed last time: kept beside the results, and brought up to date by every run in the same folder.

An evaluation (a case, in a dtype, on an implementation) that a run judges is replaced by what became of it; one that
the run does not come to stays as it was. So runs of a part of the cases, and runs that are stopped, narrow down to what
still fails.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attncheck.errors import ResultsError
from attncheck.results.coverage import Stop
from attncheck.results.format import FORMAT, Row
from attncheck.results.records import FailedFile, check_record, read_json
from attncheck.verdicts import HARMLESS, Verdict

FAILED_FILE = "failed.json"
CaseInDtype = tuple[str, str]
"""A case's id and a dtype."""
Evaluation = tuple[str, str, str]
"""A case's id, a dtype and an implementation."""


@dataclass(frozen=True)
class FailedEvaluation:
    """One failing evaluation: the verdict at the stage where it goes wrong, empty where the whole of it failed."""

    case: str
    dtype: str
    implementation: str
    verdict: str
    stage: str

    @property
    def key(self) -> Evaluation:
        """What was evaluated."""
        return self.case, self.dtype, self.implementation

    def __str__(self) -> str:
        at = f" at {self.stage}" if self.stage else ""
        return f"{self.implementation}: {self.case} [{self.dtype}]: {self.verdict}{at}"


def failed_evaluations(rows: Iterable[Row]) -> list[FailedEvaluation]:
    """Return the failing evaluations among the rows of a case in a dtype, one for each implementation.

    Two that differ are blamed where neither fails by itself. A record that no longer holds is no failure of the case.
    """
    failing = [row for row in rows if fails(row)]
    found: dict[Evaluation, Row] = {}
    for row in failing:
        if row.comparison != "pair":
            key = (row.case, row.dtype, row.implementation)
            if key not in found or (row.stage and row.stage == row.begins_at != found[key].stage):
                found[key] = row
    for row in failing:
        members = [(row.case, row.dtype, name) for name in (row.implementation, row.other) if name]
        if row.comparison == "pair" and not any(key in found for key in members):
            found |= dict.fromkeys(members, row)
    return [FailedEvaluation(*key, Verdict(row.verdict).value, row.stage) for key, row in found.items()]


def fails(row: Row) -> bool:
    """Whether a row says that its case fails: not as expected, and not for a record that no longer holds alone."""
    return not row.xfail and row.verdict != Verdict.XPASS and row.verdict not in HARMLESS


@dataclass(frozen=True)
class Failed:
    """What a folder says of what failed: the evaluations, and what the run in it was narrowed to, if it was."""

    evaluations: frozenset[Evaluation] = frozenset()
    selected: frozenset[CaseInDtype] | None = None

    def units(self, implementations: Collection[str]) -> frozenset[CaseInDtype]:
        """Return the cases, each with a dtype, that failed on any of some implementations."""
        return frozenset((case, dtype) for case, dtype, name in self.evaluations if name in implementations)


def read_failed(directory: Path) -> Failed | None:
    """Read what failed last time; None where nothing is known. Raises ``ResultsError`` where it is damaged."""
    path = directory / FAILED_FILE
    if not directory.is_dir() or (content := read_json(path)) is None:
        return None
    check_record(content, FailedFile, path)
    if content["format"] != FORMAT:
        raise ResultsError(f"{path} has results format {content['format']}; this version of attncheck reads {FORMAT}")
    selected = content.get("selected")
    return Failed(
        frozenset((case, dtype, name) for case, dtype, name in content["failed"]),
        None if selected is None else frozenset((case, dtype) for case, dtype in selected),
    )


@dataclass
class FailedRecord:
    """What failed before a run, brought up to date as the run judges; ``note`` takes the rows of whole evaluations."""

    earlier: set[Evaluation] = field(default_factory=set)
    now: set[Evaluation] = field(default_factory=set)
    selected: Collection[CaseInDtype] | None = None

    @classmethod
    def begun(cls, directory: Path, selected: Collection[CaseInDtype] | None) -> FailedRecord:
        """Begin with what failed in a folder before; a file that is damaged is forgotten, and written again."""
        try:
            before = read_failed(directory)
        except ResultsError:
            before = None
        return cls(set(before.evaluations) if before else set(), selected=selected)

    def note(self, rows: Sequence[Row]) -> list[FailedEvaluation]:
        """Put what became of some evaluations in the place of what they were; return those that fail."""
        if self.earlier:
            for row in rows:
                self.earlier.difference_update((row.case, row.dtype, name) for name in (row.implementation, row.other))
        failed = failed_evaluations(rows)
        self.now.update(each.key for each in failed)
        return failed

    def as_record(self) -> Mapping[str, Any]:
        """Return what failed.json holds."""
        selected = {} if self.selected is None else {"selected": sorted(self.selected)}
        return {"failed": sorted(self.earlier | self.now), **selected}


@dataclass
class RunWatch:
    """Watches a run as it judges: tells every failure, and says when there were failing cases enough."""

    record: FailedRecord
    max_failures: int | None = None
    on_failure: Callable[[FailedEvaluation], None] = lambda failed: None
    failing: set[str] = field(default_factory=set)
    """The cases that failed, of those that are judged in this run."""
    judged: set[CaseInDtype] = field(default_factory=set)
    """What this run judged; kept where it may be stopped."""

    def see(self, rows: Sequence[Row]) -> bool:
        """Look at the rows of a case in a dtype; return whether the run is to stop."""
        for failed in self.record.note(rows):
            self.failing.add(failed.case)
            self.on_failure(failed)
        if self.max_failures is None:
            return False
        self.judged.update((row.case, row.dtype) for row in rows[:1])
        return len(self.failing) >= self.max_failures

    def stop(self, planned: Iterable[CaseInDtype], finished: Collection[CaseInDtype]) -> Stop | None:
        """Return how the run was stopped before all that was ``planned`` was judged; None where it was not.

        ``finished`` is what an earlier part of the run has judged.
        """
        if self.max_failures is None or len(self.failing) < self.max_failures:
            return None
        missing: set[str] = set()
        begun: set[str] = set()
        for case, dtype in planned:
            done = (case, dtype) in self.judged or (case, dtype) in finished
            (begun if done else missing).add(case)
        return Stop(len(self.failing), len(missing - begun), len(missing & begun)) if missing else None
