"""Conventions for the result of a query without a key.

Judging needs them, since every implementation has one. All other readings of a case belong to the diagnosis
(``diagnosis.readings``).
"""

from __future__ import annotations

from collections.abc import Iterator

from attncheck.judging.alternatives import AppliedReading, Change, ReadingForm, convention_reading
from attncheck.judging.undefined import find_empty_rows_convention, flag_empty_rows
from attncheck.reading.problem import Problem
from attncheck.spec import EMPTY_ROWS, empty_row_message


def _set_empty_rows(value: str) -> Change:
    def change(problem: Problem) -> ReadingForm | None:
        declared = find_empty_rows_convention(problem)
        return None if value == declared else ReadingForm(problem.with_options(empty_rows=value), {"own": declared})

    return change


OTHER_EMPTY_ROWS = tuple(
    convention_reading(
        f"empty-rows-{value}", empty_row_message(value, "{own}"), _set_empty_rows(value), first_stage="weights"
    )
    for value in EMPTY_ROWS
)


def other_empty_rows(problem: Problem) -> Iterator[AppliedReading]:
    """Yield the problem under each other convention for a query without a key; nothing if every query has a key."""
    if flag_empty_rows(problem).any():
        yield from (alternative for reading in OTHER_EMPTY_ROWS for alternative in reading.apply_to_problem(problem))
