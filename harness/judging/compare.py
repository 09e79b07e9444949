"""One comparison of two arrays: shape, then dtype, then the places of NaN and inf, then values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.rounding import FORMATS
from attncheck.reading.shapes import show
from attncheck.verdicts import Verdict

Index = tuple[int, ...]
Array = NDArray[Any]


@dataclass(frozen=True)
class Comparison:
    """How two arrays compare, and where they differ most.

    ``difference`` is absolute, ``allowed`` the largest that agrees and ``ratio`` their quotient; all are those of the
    element at ``index``, and None where there is no value to subtract, or none that is known to be allowed.
    ``unjudged`` counts elements that differ and were not compared, because nothing is known of what is allowed there.
    """

    verdict: Verdict
    message: str = ""
    index: Index | None = None
    first: float | None = None
    second: float | None = None
    difference: float | None = None
    allowed: float | None = None
    ratio: float | None = None
    unjudged: int = 0


def compare_arrays(first: Array, second: Array, allowed: NDArray[np.float64] | None) -> Comparison:
    """Compare two implementations' arrays of one stage.

    ``allowed`` is the sum of both bounds per element. Where there are none, because there is no exact answer, arrays
    that differ are unverified; those without a difference agree whatever is allowed. Where it is NaN anything is right,
    NaN too; where nothing else is allowed anywhere, arrays that differ are unverified as well.
    """
    anything = np.isnan(allowed) if allowed is not None and allowed.shape == first.shape else None
    return compare_forms(first, second, anything) or _compare_values(first, second, allowed)


def compare_forms(first: Array, second: Array, anything: NDArray[np.bool_] | None = None) -> Comparison | None:
    """Compare shape, dtype and the places of NaN and infinity, but where ``anything`` is right; None if the same."""
    if first.shape != second.shape:
        return Comparison(Verdict.SHAPE, f"shape {show(first.shape)} against {show(second.shape)}")
    if first.dtype != second.dtype:
        return Comparison(Verdict.DTYPE, f"dtype {first.dtype} against {second.dtype}")
    if not is_floating(first):
        return Comparison(Verdict.DTYPE, f"dtype {first.dtype} is not a floating one")
    odd = differing_nonfinite(first, second)
    if anything is not None:
        odd &= ~anything
    if odd.any():
        index = index_of_largest(odd)
        values = float(first[index]), float(second[index])
        return Comparison(Verdict.NONFINITE, "NaN or infinity at different indices", index, *values)
    return None


def _compare_values(first: Array, second: Array, allowed: NDArray[np.float64] | None) -> Comparison:
    if first.size == 0:
        return Comparison(Verdict.AGREE)
    difference = absolute_difference(first, second)
    if allowed is None or allowed.shape != first.shape:
        return _unbounded(first, second, difference, allowed)
    open_ = np.isnan(allowed)  # infinity stands in rows that were not judged
    unjudged = int((open_ & ~((first == second) | (np.isnan(first) & np.isnan(second)))).sum())
    if unjudged and not np.isfinite(allowed).any():
        return replace(_unbounded(first, second, difference, None), unjudged=unjudged)
    difference = np.where(open_, 0.0, difference)
    ratio = quotient(difference, allowed)
    index = index_of_largest(ratio)
    found = Comparison(
        Verdict.NUMERIC if bool((difference > allowed).any()) else Verdict.AGREE,
        "",
        index,
        float(first[index]),
        float(second[index]),
        float(difference[index]),
        float(allowed[index]),
        float(ratio[index]),
        unjudged,
    )
    if found.verdict is Verdict.NUMERIC or not unjudged:
        return found
    return replace(found, message=f"{unjudged} elements differ and were not compared: there is no exact answer there")


def _unbounded(
    first: Array, second: Array, difference: NDArray[np.float64], allowed: NDArray[np.float64] | None
) -> Comparison:
    """Say of values without bounds of their shape whether they are the same: more is not known."""
    odd = differing_nonfinite(first, second)
    if not difference.any() and not odd.any():
        return Comparison(Verdict.AGREE)
    index = index_of_largest(np.where(odd, np.inf, difference))
    reason = "there is no exact answer, and so no bound"
    if allowed is not None:
        reason = f"shape {show(first.shape)}, where the exact answer has {show(allowed.shape)}"
    values = float(first[index]), float(second[index]), float(difference[index])
    return Comparison(Verdict.UNVERIFIED, f"values not compared: {reason}", index, *values)


def is_floating(array: Array) -> bool:
    """Whether an array holds floating numbers; NumPy does not count bfloat16 among them."""
    return np.issubdtype(array.dtype, np.floating) or str(array.dtype) in FORMATS


def quotient(error: NDArray[np.float64], allowed: NDArray[np.float64]) -> NDArray[np.float64]:
    """Divide; an error over no allowance is infinite; none, or any over an allowance of infinity or NaN, is nothing."""
    if allowed.size and allowed.min() > 0 and allowed.max() < np.inf:
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(error / allowed)
    divided = np.full(error.shape, np.inf)
    with np.errstate(over="ignore", invalid="ignore"):
        np.divide(error, allowed, out=divided, where=allowed > 0)
    divided[(error == 0) | np.isposinf(allowed) | np.isnan(allowed)] = 0.0
    return divided


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


def index_of_largest(values: NDArray[np.float64] | NDArray[np.bool_]) -> Index:
    """Return the index of the largest element, the first in row order: of flags the first that is set."""
    return tuple(int(axis) for axis in np.unravel_index(int(np.argmax(values)), values.shape))
