"""Where a run's outcomes are judged, marked with what is known beforehand, and written down."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from attncheck.harness.errors import ExitCode
from attncheck.harness.judging.judge import Judged, exact_values, judge, kept_stages, worst_bounds
from attncheck.harness.judging.known import DivergenceRecord
from attncheck.harness.reading.case import Case
from attncheck.harness.reading.inputs import Inputs
from attncheck.harness.results.format import EXACT, INPUTS, Row, StoredArray, bound_name
from attncheck.harness.results.writer import ResultsWriter
from attncheck.harness.running.implementations import Implementation
from attncheck.harness.running.worker import Computed, Failure, Outcome
from attncheck.harness.verdicts import Verdict


@dataclass(frozen=True)
class Unit:
    """One case in one dtype: what is judged at once."""

    case: Case
    dtype: str


@dataclass
class Bench:
    """The judge of a run, and what the run has come to so far."""

    implementations: Sequence[Implementation]
    writer: ResultsWriter
    known: DivergenceRecord
    keep_all_arrays: bool = False
    rows_seen: Counter[str] = field(default_factory=Counter)
    failures: list[Row] = field(default_factory=list)
    evaluations: int = 0

    def judge(self, unit: Unit, inputs: Inputs, collected: Mapping[str, Outcome]) -> None:
        """Judge one unit on every implementation, and write its rows and, where asked, its arrays."""
        outcomes = self._in_order(unit, collected)
        asked = {item.name: item for item in self.implementations if item.name in outcomes}
        classes = {name: found for name, item in asked.items() if (found := item.numerical_class(unit.dtype))}
        conventions = {name: item.declared.conventions for name, item in asked.items()}
        judged = judge(unit.case, unit.dtype, inputs, outcomes, classes, conventions)
        # Its arrays first: once its rows are on disk, it is done, and a run that goes on does not come back to it.
        if judged.disagrees or self.keep_all_arrays or unit.case.is_document:
            self._keep(unit, inputs, outcomes, judged, sorted(set(classes.values())))
        self.add_rows(self.known.mark(judged.rows))

    def restore(self, rows: Sequence[Row]) -> None:
        """Go on from rows that an earlier part of the run has written."""
        self.known.remember(rows)
        self._count(rows)

    def add_rows(self, rows: Iterable[Row]) -> None:
        """Write rows, and remember those that fail the run."""
        rows = tuple(rows)
        self.writer.add_rows(rows)
        self._count(rows)

    def _count(self, rows: Sequence[Row]) -> None:
        self.rows_seen.update(row.verdict for row in rows)
        self.failures += [row for row in rows if not row.known and Verdict(row.verdict).exit_code is not ExitCode.AGREE]

    def _in_order(self, unit: Unit, collected: Mapping[str, Outcome]) -> dict[str, Outcome]:
        """Put the outcomes in order; what declares no such dtype was never asked, and says so."""
        absent = Failure("unsupported", f"declares no {unit.dtype}")
        return {
            item.name: collected.get(item.name, absent)
            for item in self.implementations
            if item.name in collected or not item.numerical_class(unit.dtype)
        }

    def _keep(
        self, unit: Unit, inputs: Inputs, outcomes: Mapping[str, Outcome], judged: Judged, classes: Sequence[str]
    ) -> None:
        """Keep what the implementations returned, and what it is held against: reports draw and compare it."""
        kept = {name: kept_stages(found.stages) for name, found in outcomes.items() if isinstance(found, Computed)}
        kept |= {INPUTS: inputs.arrays, EXACT: exact_values(judged.truth)}
        kept |= {bound_name(name): worst_bounds(judged.truth, name) for name in classes}
        self.writer.add_arrays(
            StoredArray(unit.case.id, unit.dtype, name, stage, array)
            for name, stages in kept.items()
            for stage, array in stages.items()
        )
