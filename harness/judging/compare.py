"""One comparison of two arrays, and the verdict on one tensor of errors.

The idea. Rounding errors are not all equal: some errors are impossible under the declared rounding model, others are
possible and so unlikely that no correct kernel has them. A single tolerance cannot distinguish these. So the errors of
a tensor of N elements get one of four tiers, from two numbers for each element: its bound B and its scale sigma.

    ratio = error / B          z = error / sigma          rms = sqrt(mean of z^2)

| tier | rule | result |
| --- | --- | --- |
| proven | some ratio > 1 | impossible under the rounding model: the result is wrong |
| statistical | some z > lambda(N), or rms > 1 | wrong: its probability by chance is below 1e-6 per tensor |
| warning | N >= 256, and some z > max(3, lambda(N) / 2) or rms > 0.6 | noisier than rounding; does not fail |
| within | otherwise | right |

lambda(N) = sqrt(2 ln(2N / 1e-6)) is the z that one of N elements exceeds with that probability (``z_failure_limit``).
The radius of the exact value is subtracted from an error first: the exact value may be anywhere in its enclosure.

The statistical tiers apply only if roundings behave like noise:

* Inputs must be continuous and unstructured. With small integers or equal keys, many elements round the same way.
* rms needs enough elements (``MIN_ELEMENTS_FOR_MEAN``) and enough independent causes (``MIN_INDEPENDENT_CAUSES``). The
  elements of a row share the errors of its query, its maximum and its sum: 300 scores of one query are one cause.

The alternatives. Without the statistical tier, a kernel with exponentials that are off by a few units passes,
because the bound must allow for the worst order of summation. Without the proven tier, a single wrong element in a
large tensor needs an error above lambda(N) sigma, and structured inputs have no verdict at all.

Before any error is measured, shapes are compared, then dtypes, then the positions of NaN and infinity.
``docs/numerics.md``, section 7, derives the rules.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.reading.shapes import format_shape
from attncheck.spec.rounding import FORMATS
from attncheck.spec.verdicts import Verdict

Index = tuple[int, ...]
Array = NDArray[Any]


@dataclass(frozen=True)
class Comparison:
    """The comparison of two arrays, with the element that differs most.

    ``value`` and ``reference`` are the first and second array's number at ``index``, ``difference`` is absolute,
    ``allowed`` the largest difference that agrees, and ``ratio`` their quotient; None if there is no value to subtract,
    or no known bound. ``unjudged`` counts elements that differ and were not compared, because they have no bound.
    """

    verdict: Verdict
    message: str = ""
    index: Index | None = None
    value: float | None = None
    reference: float | None = None
    difference: float | None = None
    allowed: float | None = None
    ratio: float | None = None
    unjudged: int = 0


def compare_arrays(first: Array, second: Array, allowed: NDArray[np.float64] | None) -> Comparison:
    """Compare two implementations' arrays of one stage.

    ``allowed`` is the sum of both bounds per element. Without bounds, because there is no exact answer, arrays that
    differ are unverified. Arrays without a difference always agree. For elements whose bound is NaN any value is right,
    including NaN; if no bound is finite, arrays that differ are unverified.

    Example:
        >>> first, allowed = np.array([1.0, 2.0, 3.0]), np.array([0.25, 0.25, np.nan])
        >>> comparison = compare_arrays(first, np.array([1.0, 2.5, 9.0]), allowed)
        >>> str(comparison.verdict), comparison.index, comparison.ratio, comparison.unjudged
        ('numeric', (1,), 2.0, 1)
    """
    anything = np.isnan(allowed) if allowed is not None and allowed.shape == first.shape else None
    return compare_shapes_and_nonfinite(first, second, anything) or _compare_values(first, second, allowed)


def compare_shapes_and_nonfinite(
    first: Array, second: Array, unconstrained: NDArray[np.bool_] | None = None
) -> Comparison | None:
    """Compare shape, dtype and the places of NaN and infinity, except ``unconstrained`` elements; None if equal."""
    if first.shape != second.shape:
        return Comparison(Verdict.SHAPE, f"shape {format_shape(first.shape)} against {format_shape(second.shape)}")
    if first.dtype != second.dtype:
        return Comparison(Verdict.DTYPE, f"dtype {first.dtype} against {second.dtype}")
    if not has_floating_dtype(first):
        return Comparison(Verdict.DTYPE, f"dtype {first.dtype} is not a floating one")
    odd = flag_differing_nonfinite(first, second)
    if unconstrained is not None:
        odd &= ~unconstrained
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
        return _agree_exactly_or_unverified(first, second, difference, allowed)
    open_ = np.isnan(allowed)  # infinity stands in rows that were not judged
    unjudged = int((open_ & ~((first == second) | (np.isnan(first) & np.isnan(second)))).sum())
    if unjudged and not np.isfinite(allowed).any():
        return replace(_agree_exactly_or_unverified(first, second, difference, None), unjudged=unjudged)
    difference = np.where(open_, 0.0, difference)
    ratio = error_ratio(difference, allowed)
    index = index_of_largest(ratio)
    comparison = Comparison(
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
    if comparison.verdict is Verdict.NUMERIC or not unjudged:
        return comparison
    message = f"{unjudged} elements differ and were not compared: there is no exact answer there"
    return replace(comparison, message=message)


def _agree_exactly_or_unverified(
    first: Array, second: Array, difference: NDArray[np.float64], allowed: NDArray[np.float64] | None
) -> Comparison:
    """Return if values without bounds of their shape agree exactly; otherwise they are unverified."""
    odd = flag_differing_nonfinite(first, second)
    if not difference.any() and not odd.any():
        return Comparison(Verdict.AGREE)
    index = index_of_largest(np.where(odd, np.inf, difference))
    reason = "there is no exact answer, and so no bound"
    if allowed is not None:
        reason = f"shape {format_shape(first.shape)}, where the exact answer has {format_shape(allowed.shape)}"
    values = float(first[index]), float(second[index]), float(difference[index])
    return Comparison(Verdict.UNVERIFIED, f"values not compared: {reason}", index, *values)


def has_floating_dtype(array: Array) -> bool:
    """Return whether an array has a floating dtype; NumPy does not count bfloat16 as one."""
    return np.issubdtype(array.dtype, np.floating) or str(array.dtype) in FORMATS


def error_ratio(error: NDArray[np.float64], allowed: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return error / allowed: infinite if only ``allowed`` is 0; 0 for no error, or if ``allowed`` is inf or NaN.

    Example:
        >>> error_ratio(np.array([1.0, 1.0, 0.0, 1.0]), np.array([4.0, 0.0, 0.0, np.nan])).tolist()
        [0.25, inf, 0.0, 0.0]
    """
    if allowed.size and allowed.min() > 0 and allowed.max() < np.inf:
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(error / allowed)
    divided = np.full(error.shape, np.inf)
    with np.errstate(over="ignore", invalid="ignore"):
        np.divide(error, allowed, out=divided, where=allowed > 0)
    divided[(error == 0) | np.isposinf(allowed) | np.isnan(allowed)] = 0.0
    return divided


def flag_differing_nonfinite(first: NDArray[Any], second: NDArray[Any]) -> NDArray[np.bool_]:
    """Flag elements of which at least one is NaN, inf or -inf and the other is not the same.

    Example:
        >>> flag_differing_nonfinite(np.array([np.nan, np.nan, np.inf, 1]), np.array([np.nan, 1, -np.inf, 2])).tolist()
        [False, True, True, False]
    """
    both_nan = np.isnan(first) & np.isnan(second)
    nonfinite = ~np.isfinite(first) | ~np.isfinite(second)
    differing: NDArray[np.bool_] = nonfinite & ~both_nan & ~(first == second)
    return differing


def absolute_difference(first: NDArray[Any], second: NDArray[Any]) -> NDArray[np.float64]:
    """Return |first - second| in float64, and 0 for elements that are not both finite."""
    finite = np.isfinite(first) & np.isfinite(second)
    difference = np.zeros(first.shape)
    with np.errstate(over="ignore"):  # beyond float64's range, infinity says enough
        np.subtract(first, second, out=difference, where=finite, dtype=np.float64, casting="unsafe")
    return np.abs(difference)


def index_of_largest(values: NDArray[np.float64] | NDArray[np.bool_]) -> Index:
    """Return the index of the largest element, the first in row order; of flags, the first that is set.

    Example:
        >>> index_of_largest(np.array([[1.0, 3.0], [3.0, 2.0]]))
        (0, 1)
    """
    return tuple(int(axis) for axis in np.unravel_index(int(np.argmax(values)), values.shape))


FALSE_ALARM_PROBABILITY = 1e-6
"""Probability of a false statistical failure per tensor. A choice: at 1e-6, a run with 100,000 tensors has one in ten
runs; a tenth of it raises the threshold of z for 1,000 elements by 0.35 (docs/numerics.md, section 7)."""
MIN_ELEMENTS_FOR_MEAN = 256
"""Elements from which a root mean square is judged. A choice: fewer elements say little about a mean; with more, small
cases have no statistical test."""
MIN_INDEPENDENT_CAUSES = 25
"""A rounding error that is uniform in [-u, u] has a third of the variance u^2 that sigma counts for it, so that z^2 has
a mean of at most 1/3; with k normal causes their mean exceeds 1 with P(chi^2_k > 3 k), below 1e-6 from k = 25."""

_WARNING_Z_FACTOR = 3.0
"""A choice: of normal errors, 0.3 percent exceed three sigma. A lower number warns of correct kernels."""
_WARNING_MEAN_Z = 0.6
"""Single roundings of numbers just above a power of two are off by up to u times the number, uniformly: their root mean
square is 1/sqrt(3) = 0.577 sigma, and they are no noise."""

Real = NDArray[np.float64]


class ErrorTier(StrEnum):
    """The tiers of errors of one tensor, from harmless to proven wrong."""

    WITHIN = "within"
    WARNING = "warning"
    STATISTICAL = "statistical"
    PROVEN = "proven"

    @property
    def is_failure(self) -> bool:
        """True if this is a failure."""
        return self in (ErrorTier.STATISTICAL, ErrorTier.PROVEN)


@dataclass(frozen=True)
class MeasuredErrors:
    """The errors of one tensor against its bounds.

    ``ratio`` is the largest error over its bound B, ``index`` its element, and ``error`` the error there; ``largest_z``
    and ``mean_z`` (root mean square) are in units of sigma; ``elements`` counts the judged elements, and ``causes``
    their rows, or their columns if these are fewer.
    """

    tier: ErrorTier
    ratio: float
    index: Index | None
    largest_z: float
    mean_z: float
    elements: int
    error: float | None = None
    causes: int = 0


def z_failure_limit(elements: int) -> float:
    """Return lambda(N): the z that one of N elements exceeds with a probability below ``FALSE_ALARM_PROBABILITY``.

    Example:
        >>> round(z_failure_limit(1), 2), round(z_failure_limit(1_000_000), 2)
        (5.39, 7.53)
    """
    return math.sqrt(2 * math.log(2 * max(elements, 1) / FALSE_ALARM_PROBABILITY))


def z_warning_limit(elements: int) -> float:
    """Return the z above which one of N errors is noisier than rounding is: a warning."""
    return max(_WARNING_Z_FACTOR, z_failure_limit(elements) / 2)


def rate_errors(
    error: Real, radius: Real, max_error: Real, sigma: Real, judged: NDArray[np.bool_], *, supports_statistics: bool
) -> MeasuredErrors:
    """Judge one tensor.

    ``error`` is the distance to the exact value, infinite if only the exact value is finite; ``radius`` is the
    uncertainty of the exact value. ``judged`` flags the elements inside the domain. If inputs are continuous and
    unstructured (``supports_statistics``), the tiers ``statistical`` and ``warning`` apply.
    """
    count = int(np.count_nonzero(judged))
    if not count:
        return MeasuredErrors(ErrorTier.WITHIN, 0.0, None, 0.0, 0.0, 0)
    # The exact value may be anywhere in its enclosure: the point nearest to the computed value counts.
    with np.errstate(invalid="ignore", over="ignore"):  # unjudged elements may have an infinite error and radius
        least = np.maximum(error - radius, 0.0)
        if count < judged.size:
            least = np.where(judged, least, 0.0)
        ratio, z = error_ratio(least, max_error), error_ratio(least, sigma)
        mean_z = math.sqrt(float(np.square(z).sum()) / count)
    place = int(ratio.argmax())
    index = tuple(map(int, np.unravel_index(place, ratio.shape)))
    largest_z = float(z.max())
    tier = ErrorTier.WITHIN
    if ratio.flat[place] > 1 - 2.0**-50 and bool((least > max_error).any()):
        tier = ErrorTier.PROVEN
    causes = _count_independent_causes(judged, count)
    if tier is ErrorTier.WITHIN and supports_statistics:
        has_mean = count >= MIN_ELEMENTS_FOR_MEAN
        mean = mean_z if causes >= MIN_INDEPENDENT_CAUSES else 0.0
        if largest_z > z_failure_limit(count) or (has_mean and mean > 1):
            tier = ErrorTier.STATISTICAL
        elif has_mean and (largest_z > z_warning_limit(count) or mean > _WARNING_MEAN_Z):
            tier = ErrorTier.WARNING
    return MeasuredErrors(tier, float(ratio[index]), index, largest_z, mean_z, count, float(error[index]), causes)


def _count_independent_causes(judged: NDArray[np.bool_], count: int) -> int:
    """Count the rows with judged elements, or the columns if these are fewer.

    log_sum_exp (B, H, Lq) has a row per head: its queries share their keys.
    """
    axes = (-1, -2)[: judged.ndim]
    if count == judged.size:
        return min((count // judged.shape[axis] for axis in axes), default=1)
    return min((int(judged.any(axis=axis).sum()) for axis in axes), default=1)
