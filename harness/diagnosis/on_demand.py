"""The diagnosis as the judge calls it; the first case that needs the catalogue of readings imports it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attncheck.execution.worker import Computed
from attncheck.judging.xfail import KnownEmptyRows
from attncheck.reading.case import Case
from attncheck.results.format import Row

if TYPE_CHECKING:
    from attncheck.judging.truth import Truth


@dataclass(frozen=True)
class LazyDiagnoser:
    """A ``judging.judge.Diagnoser`` that can be pickled, and imports the catalogue when it is first used."""

    def truth_under_declared_conventions(self, truth: Truth, conventions: Mapping[str, str]) -> Truth:
        """Return the exact answer of a case under the conventions that an implementation declares."""
        from attncheck.diagnosis.declared import truth_under_declared_conventions

        return truth_under_declared_conventions(truth, conventions)

    def judge_and_diagnose_rows(
        self, blank: Row, case: Case, truth: Truth, outcome: Computed, rounding_model: str, known: KnownEmptyRows
    ) -> list[Row]:
        """Judge the stages of one implementation and diagnose them."""
        from attncheck.diagnosis.examine import judge_and_diagnose_outcome

        return list(judge_and_diagnose_outcome(blank, case, truth, outcome, rounding_model, known).rows)


LAZY_DIAGNOSER = LazyDiagnoser()
