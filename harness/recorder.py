"""Where a run's outcomes are judged, marked where a failure is expected, and written down."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from attncheck.errors import ExitCode
from attncheck.execution.implementations import Implementation
from attncheck.execution.worker import Computed, Failure, Outcome
from attncheck.judging.judge import Judged, exact_values, judge, kept_stages, worst_bounds
from attncheck.judging.judge_implementation import OwnEmptyRows
from attncheck.judging.xfail import ExpectedFailureRecord
from attncheck.reading.case import Case
from attncheck.reading.expected_failures import ExpectedFailure, recorded_empty_rows
from attncheck.reading.inputs import Inputs
from attncheck.results.coverage import is_judged
from attncheck.results.format import EXACT, INPUTS, Row, StoredArray, bound_name
from attncheck.results.writer import ResultsWriter
from attncheck.verdicts import Verdict


@dataclass(frozen=True)
class UnitResult:
    """What is to be written of one case in one dtype."""

    rows: tuple[Row, ...]
    arrays: tuple[StoredArray, ...]


@dataclass(frozen=True)
class Judge:
    """Judges one case in one dtype on every implementation; anywhere, in any order.

    Of the ``expected_failures`` only conventions are judged by; what else they excuse is marked later.
    """

    implementations: Sequence[Implementation]
    keep_all_arrays: bool = False
    expected_failures: Sequence[ExpectedFailure] = ()

    def judge(self, case: Case, dtype: str, inputs: Inputs, collected: Mapping[str, Outcome]) -> UnitResult:
        """Return the rows, and the arrays where something disagrees, or all are asked for."""
        outcomes = self._in_order(dtype, collected)
        asked = {item.name: item for item in self.implementations if item.name in outcomes}
        classes = {name: found for name, item in asked.items() if (found := item.rounding_model(dtype))}
        known = {name: own_empty_rows(item, self.expected_failures, case.id, dtype) for name, item in asked.items()}
        judged = judge(case, dtype, inputs, outcomes, classes, known)
        keeps = judged.disagrees or self.keep_all_arrays or case.is_document
        arrays = _arrays(inputs, outcomes, judged, sorted(set(classes.values()))) if keeps else ()
        kept = (StoredArray(case.id, dtype, name, stage, array) for name, stage, array in arrays)
        return UnitResult(judged.rows, tuple(kept))

    def _in_order(self, dtype: str, collected: Mapping[str, Outcome]) -> dict[str, Outcome]:
        """Put the outcomes in order; what declares no such dtype was never asked, and says so."""
        absent = Failure("unsupported", f"declares no {dtype}", (dtype,))
        return {
            item.name: collected.get(item.name, absent)
            for item in self.implementations
            if item.name in collected or not item.rounding_model(dtype)
        }


def own_empty_rows(
    implementation: Implementation, expected_failures: Sequence[ExpectedFailure], case: str, dtype: str
) -> OwnEmptyRows:
    """Return what an implementation is known to give for a query without a key in a case."""
    declared = implementation.declared.conventions.get("empty_rows")
    recorded = recorded_empty_rows(expected_failures, implementation.name, case, dtype)
    if declared is None:
        return OwnEmptyRows(recorded=recorded)
    return OwnEmptyRows(declared.value, recorded, reason=declared.reason, source=declared.source or None)


def _arrays(
    inputs: Inputs, outcomes: Mapping[str, Outcome], judged: Judged, classes: Sequence[str]
) -> Iterator[tuple[str, str, NDArray[Any]]]:
    """Give what the implementations returned, and what it is held against: reports draw and compare it."""
    kept = {name: kept_stages(found.stages) for name, found in outcomes.items() if isinstance(found, Computed)}
    kept |= {INPUTS: inputs.arrays, EXACT: exact_values(judged.truth)}
    kept |= {bound_name(name): worst_bounds(judged.truth, name) for name in classes}
    return ((name, stage, array) for name, stages in kept.items() for stage, array in stages.items())


@dataclass
class ResultRecorder:
    """What a run has come to so far, written down as it comes."""

    writer: ResultsWriter
    expected_failures: ExpectedFailureRecord
    rows_seen: Counter[str] = field(default_factory=Counter)
    failures: list[Row] = field(default_factory=list)
    evaluations: int = 0
    judged: dict[str, set[str]] = field(default_factory=dict)
    """The cases in which each implementation was judged."""
    on_judged: Callable[[Sequence[Row]], bool] = lambda rows: False
    """Is given the rows of every case in a dtype that is judged now; says whether that is enough."""
    is_stopped: bool = False
    """Whether an executor is to leave the rest of its plan."""

    def add(self, found: UnitResult) -> None:
        """Write what was found of one case in one dtype.

        Its arrays go first: once its rows are on disk it is done, and a run that goes on does not come back to it.
        """
        self.writer.add_arrays(found.arrays)
        rows = self.expected_failures.mark(found.rows)
        self.add_rows(rows)
        self.is_stopped = self.on_judged(rows) or self.is_stopped

    def restore(self, rows: Sequence[Row]) -> None:
        """Go on from rows that an earlier part of the run has written."""
        self.expected_failures.remember(rows)
        self._count(rows)

    def add_rows(self, rows: Iterable[Row]) -> None:
        """Write rows, and remember those that fail the run."""
        rows = tuple(rows)
        self.writer.add_rows(rows)
        self._count(rows)

    def _count(self, rows: Sequence[Row]) -> None:
        self.rows_seen.update(row.verdict for row in rows)
        for row in rows:
            if is_judged(row):
                self.judged.setdefault(row.implementation, set()).add(row.case)
        self.failures += [row for row in rows if not row.xfail and Verdict(row.verdict).exit_code is not ExitCode.AGREE]
