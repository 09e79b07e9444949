"""Small computations of the corpus: of every operation, each combination of options and inputs that it has once."""

from __future__ import annotations

from collections import Counter

import pytest

from attncheck.execution.operations import Task
from attncheck.execution.runner import task_of
from attncheck.mutation.unit import count_scores
from attncheck.reading.inputs import convert_inputs, make_exact_inputs
from attncheck.reading.selection import select_cases

_SMALL, _OF_AN_OPERATION = 200, 6


@pytest.fixture(scope="session")
def tasks() -> dict[str, Task]:
    """Return tasks by the ids of their cases, in float64."""
    found: dict[str, Task] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    counts: Counter[str] = Counter()
    for case in select_cases([]).cases:
        given = case.operation, frozenset({*case.options, *case.inputs})
        is_wanted = "float64" in case.dtypes and given not in seen and counts[case.operation] < _OF_AN_OPERATION
        if is_wanted and count_scores(case) <= _SMALL:
            seen.add(given)
            counts[case.operation] += 1
            found[case.id] = task_of(case, convert_inputs(case, make_exact_inputs(case), "float64"))
    return found
