"""What a query without a key may give.

Every implementation has a convention for such a row, so that judging needs it. All other readings of a
case are the diagnosis's (``diagnosis.readings``).
"""

from __future__ import annotations

from collections.abc import Iterator

from attncheck.judging.alternatives import Alternative, Change, Form, convention
from attncheck.judging.undefined import empty_rows, empty_rows_convention
from attncheck.reading.problem import Problem
from attncheck.spec import EMPTY_ROWS, without_a_key


def _empty_rows(value: str) -> Change:
    def change(problem: Problem) -> Form | None:
        own = empty_rows_convention(problem)
        return None if value == own else Form(problem.with_options(empty_rows=value), {"own": own})

    return change


OTHER_EMPTY_ROWS = tuple(
    convention(f"empty-rows-{value}", without_a_key(value, "{own}"), _empty_rows(value), stage="weights")
    for value in EMPTY_ROWS
)


def other_empty_rows(problem: Problem) -> Iterator[Alternative]:
    """Yield a problem with each other convention of what a query without a key gives; nothing where there is none."""
    if empty_rows(problem).any():
        yield from (found for reading in OTHER_EMPTY_ROWS for found in reading.of_problem(problem))
