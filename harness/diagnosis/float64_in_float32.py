"""Diagnoses an implementation that computes float64 in float32, one dtype at a time.

Such a kernel is wrong in float64 in almost every case, by a rounding of float32. If it has a fault, too, these many
cases would hide it: the fault explains only some of the failing cases, so ``diagnosis.decision`` would drop it as rare.
The two causes need different evidence. The float64 results of cases that pass in another dtype show how accurate the
kernel is, and the results in the other dtypes show its fault. So:

1. Decide the float64 results of cases that pass in every other dtype of the run. If they are as accurate as float32,
   the implementation computes float64 in float32.
2. Decide the results in the other dtypes without the float64 results.
3. A float64 result that is nearly the same as a diagnosed float32 result of its case has the same diagnosis.
4. Decide the remaining float64 results together with those of step 1.

Without step 1's accuracy, all failing cases decide together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from attncheck.diagnosis.decision import NO_DIAGNOSIS, Decision
from attncheck.diagnosis.failing_evaluations import FailingEvaluation
from attncheck.judging.units import Evaluation
from attncheck.spec import ACCURACY_OF_FLOAT32
from attncheck.spec.rounding import FORMATS

NARROW_DTYPE, WIDE_DTYPE = "float32", "float64"
MIN_CASES = 3
"""Minimum number of cases that pass in other dtypes and whose float64 results are as accurate as float32."""
_MAX_FLOAT32_ROUNDINGS = 64
"""Two float32 results of one problem differ by at most this many roundings of the largest element.

A choice: a kernel that computes float64 in float32 usually returns the same numbers for both, and a library may add
them in another order. A result that differs by more is decided with the other float64 results."""

DecideFunction: TypeAlias = Callable[[Sequence[FailingEvaluation]], Mapping[Evaluation, Decision]]
"""Searches failing evaluations of one implementation for readings, and decides their diagnoses."""


def decide_by_dtype(
    failing: Sequence[FailingEvaluation], in_float32: Collection[str], decide: DecideFunction
) -> dict[Evaluation, Decision]:
    """Decide the diagnoses of all failing evaluations of one implementation.

    Args:
        failing: The failing evaluations.
        in_float32: The cases that the run has in float32.
        decide: Decides for some of the evaluations, from their evidence only.
    """
    wide, narrow = (
        [failure for failure in failing if (failure.unit.dtype == WIDE_DTYPE) == is_wide] for is_wide in (True, False)
    )
    failing_elsewhere = {failure.case.id for failure in narrow}
    only_wide = [
        failure for failure in wide if failure.case.id in in_float32 and failure.case.id not in failing_elsewhere
    ]
    if not narrow or len(only_wide) < MIN_CASES or not _is_as_accurate_as_float32(decide(only_wide)):
        return dict(decide(failing))
    decisions = dict(decide(narrow))
    of_case = {failure.case.id: failure for failure in narrow if failure.unit.dtype == NARROW_DTYPE}
    remaining = []
    for failure in wide:
        same = of_case.get(failure.case.id)
        if same is not None and decisions[same.key] != NO_DIAGNOSIS and _returns_same_numbers(failure, same):
            decisions[failure.key] = decisions[same.key]
        else:
            remaining.append(failure)
    return decisions | dict(decide(remaining))


def is_computed_in_float32(evaluation: Evaluation, decision: Decision) -> bool:
    """Return whether the diagnosis of a float64 evaluation is that it is as accurate as float32."""
    return evaluation[2] == WIDE_DTYPE and decision.match is not None and decision.match.name == ACCURACY_OF_FLOAT32


def _is_as_accurate_as_float32(decisions: Mapping[Evaluation, Decision]) -> bool:
    explained = sum(is_computed_in_float32(evaluation, decision) for evaluation, decision in decisions.items())
    return explained >= MIN_CASES and 2 * explained > len(decisions)


def _returns_same_numbers(wide: FailingEvaluation, narrow: FailingEvaluation) -> bool:
    """Return whether the failing stages of a float64 evaluation are those of the float32 one, except for roundings."""
    if wide.returned is None or narrow.returned is None:
        return False
    stages, others = wide.returned.stages, narrow.returned.stages
    return all(
        _differ_by_few_roundings(stages[row.stage], others.get(row.stage)) for row in wide.rows if row.stage in stages
    )


def _differ_by_few_roundings(wide: np.ndarray, narrow: np.ndarray | None) -> bool:
    if narrow is None or wide.shape != narrow.shape:
        return False
    first, second = (array.astype(np.float64) for array in (wide, narrow))
    largest = np.abs(second[np.isfinite(second)]).max(initial=0.0)
    allowed = _MAX_FLOAT32_ROUNDINGS * FORMATS[NARROW_DTYPE].unit_roundoff * largest
    return bool(np.allclose(first, second, rtol=0.0, atol=allowed, equal_nan=True))
