"""Rows of evaluations that failed: they say what became of them, which is known without anything that judges."""

from __future__ import annotations

from dataclasses import replace

from attncheck.execution.worker import Failure
from attncheck.reading.case import Case
from attncheck.results.format import Row
from attncheck.verdicts import Verdict


def blank_row(case: Case, dtype: str) -> Row:
    """Return a row that says nothing yet of a case in a dtype."""
    return Row(case.id, case.operation, dtype, "", "stage", "", Verdict.AGREE)


def failure_row(blank: Row, implementation: str, failure: Failure) -> Row:
    """Return the one row of an evaluation that failed."""
    return replace(
        blank,
        implementation=implementation,
        verdict=Verdict(failure.verdict),
        message=failure.message,
        lacks=", ".join(failure.lacks) or None,
        padded=failure.padded or None,
    )
