"""The interface of every executor, and the recorder of judged results, which marks expected failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from attncheck.execution.worker import Computed
from attncheck.judging.units import Evaluation, UnitResult, is_undiagnosed
from attncheck.judging.xfail import ExpectedFailureRecord
from attncheck.planning.plan import Plan
from attncheck.results.coverage import is_function_or_dtype_missing, is_judged
from attncheck.results.format import Row
from attncheck.results.writer import ResultsWriter
from attncheck.spec.verdicts import Verdict

_MAX_UNDIAGNOSED_BYTES = 1 << 28
"""The most bytes of failing evaluations that are kept until they are diagnosed."""


@dataclass
class ResultRecorder:
    """The results of a run so far, written as soon as they are judged."""

    writer: ResultsWriter
    expected_failures: ExpectedFailureRecord
    rows_seen: Counter[str] = field(default_factory=Counter)
    failures: list[Row] = field(default_factory=list)
    evaluations: int = 0
    judged_cases: dict[str, set[str]] = field(default_factory=dict)
    """The cases in which each implementation was judged."""
    offered_cases: dict[str, set[str]] = field(default_factory=dict)
    """The cases of which each implementation has the function and a dtype."""
    cases_lacking_function_or_dtype: dict[str, set[str]] = field(default_factory=dict)
    """The cases of which it lacks the function, or a dtype."""
    on_judged: Callable[[Sequence[Row]], bool] = lambda rows: False
    """Called with the rows of every judged case in a dtype; returns whether the run may stop."""
    undiagnosed: dict[Evaluation, Computed] = field(default_factory=dict)
    """Returned stages of failing evaluations that are not diagnosed yet."""
    is_stopped: bool = False
    """True if the executor has to skip the rest of its plan."""
    _undiagnosed_bytes: int = 0

    def record_result(self, result: UnitResult) -> None:
        """Write the result of one case in one dtype.

        Arrays are written first: once the rows are on disk, a resumed run does not repeat the unit.
        """
        self.writer.add_arrays(result.arrays)
        rows = self.expected_failures.mark_expected_rows(result.rows)
        self.add_rows(rows)
        for name, returned in result.undiagnosed.items():
            if any(row.implementation == name and is_undiagnosed(row) for row in rows):
                self._keep_undiagnosed((name, rows[0].case, rows[0].dtype), returned)
        self.is_stopped = self.on_judged(rows) or self.is_stopped

    def restore_rows(self, rows: Sequence[Row]) -> None:
        """Continue from rows that an earlier part of the run has written."""
        self.expected_failures.record_marked_rows(rows)
        self._count_rows(rows)

    def add_rows(self, rows: Iterable[Row]) -> None:
        """Write rows, and remember those that fail the run."""
        rows = tuple(rows)
        self.writer.add_rows(rows)
        self._count_rows(rows)

    def count_cases_not_offered(self, name: str) -> int:
        """Count the cases whose operation, or whose only dtypes, an implementation does not offer."""
        return len(self.cases_lacking_function_or_dtype.get(name, set()) - self.offered_cases.get(name, set()))

    def _keep_undiagnosed(self, evaluation: Evaluation, returned: Computed) -> None:
        size = sum(array.nbytes for array in returned.stages.values())
        if self._undiagnosed_bytes + size <= _MAX_UNDIAGNOSED_BYTES:
            self.undiagnosed[evaluation] = returned
            self._undiagnosed_bytes += size

    def _count_rows(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self.rows_seen[row.verdict] += 1
            if is_judged(row):
                self.judged_cases.setdefault(row.implementation, set()).add(row.case)
            lacks = row.verdict == Verdict.UNSUPPORTED and is_function_or_dtype_missing(row.lacks or "")
            (self.cases_lacking_function_or_dtype if lacks else self.offered_cases).setdefault(
                row.implementation, set()
            ).add(row.case)
            if row.fails_run:
                self.failures.append(row)


class Executor(Protocol):
    """Computes and judges a plan. ``environment_record`` is what environment.json says of it."""

    environment_record: Mapping[str, Any]

    @property
    def descriptions(self) -> Mapping[str, Mapping[str, str]]:
        """Return the descriptions of the frameworks, by group."""

    @property
    def starting_frameworks(self) -> Sequence[str]:
        """Return the names of the frameworks that workers import at the moment."""

    @property
    def calls_left(self) -> Mapping[str, int]:
        """Return how many calls of each implementation have not returned yet; empty if that is not known."""

    def compute_and_judge(self, plan: Plan, recorder: ResultRecorder, on_progress: Callable[[int, int], None]) -> None:
        """Compute and judge every unit of a plan, or until the recorder ``is_stopped``.

        ``on_progress`` hears evaluations done and planned.
        """
