"""Whether a printed number is wrong or the exact answer rounded; what else would explain it, and how to say so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.judging.compare import absolute_difference, differing_nonfinite
from attncheck.judging.number_targets import Reference, Target
from attncheck.reading.case import Expected
from attncheck.reading.printed import PrintedArray

Flags = NDArray[np.bool_]

_PRECISIONS = ("float64", "float32")
"""In these a document's rounding explains last digits alone; that of 16 bits explains most wrong digits, too."""


def misses(target: Target, numbers: PrintedArray) -> Flags:
    """Return where the exact answer itself is not what is printed; nowhere that nothing can be compared."""
    slack = numbers.open_towards(target.exact) + target.moved
    # The exact numbers are rounded to float64 here, and so are the printed ones.
    rounding = 2 * np.spacing(np.abs(numbers.value))
    missed: Flags = absolute_difference(target.exact, numbers.value) > slack + rounding
    return missed | (differing_nonfinite(target.exact, numbers.value) & np.isfinite(slack))


def hints_of(reference: Reference, expected: Expected, numbers: PrintedArray) -> NDArray[Any]:
    """Say of every misprint what would explain it, and how a case says that it is so; empty where nothing would."""
    hints = np.full(numbers.shape, "", dtype=object)
    if reference.case.computed_in is None:
        for precision in _PRECISIONS:
            target = reference.target(expected, precision)
            explained = ~misses(target, numbers) & np.isfinite(target.moved)
            hints[explained & (hints == "")] = (
                f"rounding in {precision} would explain it: if the document was computed in {precision}, say "
                f"`computed_in: {precision}` in its `source` or in the case"
            )
    target = reference.target(expected, reference.case.computed_in)
    if numbers.half_unit.any() and not misses(target, replace(numbers, truncated=True))[numbers.given].any():
        hints[...] = "all of these numbers hold if digits were cut off and not rounded: `digits: truncated` says so"
    return hints
