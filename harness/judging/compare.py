"""One comparison of two arrays: shape, then dtype, then the places of NaN and inf, then values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.harness.judging.interim_rule import UNITS, unit_of_rows
from attncheck.harness.reading.shapes import show
from attncheck.harness.verdicts import Verdict

Index = tuple[int, ...]


@dataclass(frozen=True)
class Comparison:
    """How two arrays compare, and where they differ most.

    ``difference`` is absolute, ``units`` the same in units of the interim rule; both are those of the element at
    ``index``, and None where there is no value to subtract.
    """

    verdict: Verdict
    message: str = ""
    index: Index | None = None
    first: float | None = None
    second: float | None = None
    difference: float | None = None
    units: float | None = None


def compare_stage(
    stage: str, first_stages: Mapping[str, NDArray[Any]], second_stages: Mapping[str, NDArray[Any]]
) -> Comparison:
    """Compare what two implementations returned for one stage."""
    first, second = first_stages[stage], second_stages[stage]
    if first.shape != second.shape:
        return Comparison(Verdict.SHAPE, f"shape {show(first.shape)} against {show(second.shape)}")
    if first.dtype != second.dtype:
        return Comparison(Verdict.DTYPE, f"dtype {first.dtype} against {second.dtype}")
    if not np.issubdtype(first.dtype, np.floating):
        # There is no rule for whole numbers or objects, and no operation returns them.
        return Comparison(Verdict.DTYPE, f"dtype {first.dtype} is not a floating one")
    odd = differing_nonfinite(first, second)
    if odd.any():
        index = first_index(odd)
        return Comparison(
            Verdict.NONFINITE,
            "NaN or infinity in different places",
            index,
            float(first[index]),
            float(second[index]),
        )
    if first.size == 0:
        return Comparison(Verdict.AGREE)
    difference = absolute_difference(first, second)
    units = difference / unit_of_rows(stage, first_stages, second_stages)
    index = tuple(int(axis) for axis in np.unravel_index(np.argmax(units), units.shape))
    worst_units = float(units[index])
    return Comparison(
        Verdict.NUMERIC if worst_units > UNITS else Verdict.AGREE,
        "",
        index,
        float(first[index]),
        float(second[index]),
        float(difference[index]),
        worst_units,
    )


def differing_nonfinite(first: NDArray[Any], second: NDArray[Any]) -> NDArray[np.bool_]:
    """Return where one array has NaN, inf or -inf and the other has not the same."""
    both_nan = np.isnan(first) & np.isnan(second)
    nonfinite = ~np.isfinite(first) | ~np.isfinite(second)
    differing: NDArray[np.bool_] = nonfinite & ~both_nan & ~(first == second)
    return differing


def absolute_difference(first: NDArray[Any], second: NDArray[Any]) -> NDArray[np.float64]:
    """Return |first - second| in float64, 0 where both are the same NaN or infinity."""
    finite = np.isfinite(first) & np.isfinite(second)
    difference = np.zeros(first.shape)
    with np.errstate(over="ignore"):  # beyond float64's range, infinity says enough
        np.subtract(first, second, out=difference, where=finite, dtype=np.float64, casting="unsafe")
    return np.abs(difference)


def first_index(flags: NDArray[np.bool_]) -> Index:
    """Return the first place, in row order, at which a flag is set."""
    return tuple(int(axis) for axis in np.unravel_index(int(np.argmax(flags)), flags.shape))
