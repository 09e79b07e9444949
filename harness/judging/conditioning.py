"""How well the inputs determine a number: its error bound beside the number itself.

The condition number of an element x with the bound B is B / (u |x|): so many units of its own size may rounding move it
by, u the unit roundoff of its format. Where B exceeds |x| not even the sign is sure, and an implementation that agrees
there is not for that accurate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.bounds import Bound
from attncheck.attention.enclosure import Enclosure
from attncheck.attention.rounding import FORMATS
from attncheck.judging.truth import Truth, is_measured


@dataclass(frozen=True)
class Conditioning:
    """The condition numbers of the elements of a stage that are measured.

    ``ill`` counts those whose bound exceeds the value, of so many ``elements``.
    """

    median: float
    largest: float
    ill: int
    elements: int
    unit_roundoff: float

    def of(self, bound: float, exact: float) -> float:
        """Return the condition number of one element."""
        return float(condition_numbers(np.array(exact), np.array(bound), self.unit_roundoff))


def condition_numbers(
    exact: NDArray[np.float64], bound: NDArray[np.float64], unit_roundoff: float
) -> NDArray[np.float64]:
    """Return B / (u |x|): 0 where no error is possible, infinity where that of a zero is."""
    with np.errstate(all="ignore"):
        found: NDArray[np.float64] = np.where(bound == 0, 0.0, bound / (unit_roundoff * np.abs(exact)))
    return found


def conditioning_of(truth: Truth, stage: str, array: NDArray[np.generic], rounding_model: str) -> Conditioning | None:
    """Return the condition numbers of a returned stage; None where nothing of it is measured."""
    bounds = truth.bounds(rounding_model)
    if stage not in truth.exact or stage not in bounds:
        return None
    exact, bound, dtype = truth.exact_for(stage, array), bounds[stage], truth.dtype_of(stage)
    return _of_measured(exact, bound, dtype)


def _of_measured(exact: Enclosure, bound: Bound, dtype: str) -> Conditioning | None:
    measured, unit_roundoff = is_measured(exact, bound, dtype), FORMATS[dtype].unit_roundoff
    if not measured.any():
        return None
    values, errors = exact.high[measured], bound.max_error[measured]
    numbers = condition_numbers(values, errors, unit_roundoff)
    ill = int((errors > np.abs(values)).sum())
    return Conditioning(float(np.median(numbers)), float(numbers.max()), ill, int(numbers.size), unit_roundoff)
