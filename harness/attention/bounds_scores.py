"""Error bounds from the product of query and key to the masked scores.

With A = |a| |q| |k|^T, Q = a^2 (q*q)(k*k)^T, u* the coarsest unit of the class and eta its underflows:

    raw_scores  D = [ d u_acc |q||k|^T + u_s |t| ] (1 + 8u*) + eta
    scores      D = [ A (d u_acc + n_pre u_pre) + n_s u_s |s| ] (1 + 8u*) + eta
                n_s = 1 if |a| is a power of two, else 3
    capped      z = s/c, h = tanh z:  dz = D/|c| + (2u_c + u_s)(|z| + D/|c|);  dh = min(1, sech(z)^2 + 0.77 dz) dz
                D <- [ |c| dh + (eps_tanh + u_c + 2u_s)(|c h| + |c| dh) ] (1 + 8u*) + 2 eta_s (1 + |c|)
    biased      D <- D + u_s (|s + b| + D) + eta_s
    masked      D as it is; a masked entry has no error, its weight must be 0
    cosine      A_c = |a| |q||k|^T / (|q|_2 |k|_2):
                D = [ A_c (d u_acc + 2(u_c + u_s)) + |s| ((d + 2) u_acc + 3u_c + n_s u_s) ] (1 + 8u* + 2d u_acc) + eta

|fl(x.y) - x.y| <= n u |x|.|y| in every order, fused or not: Jeannerod and Rump, SIAM J. Matrix Anal. Appl. 34 (2013);
Higham 2002, Accuracy and Stability of Numerical Algorithms, chapter 3. 0.77 > max |d sech^2 / dz| = 4 / (3 sqrt 3).
The cosine's D covers: normalise first; divide last; multiply by reciprocals.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.errors import (
    LogitError,
    Operand,
    Real,
    product_variance,
    summation_variance,
    transposed,
)
from attncheck.attention.rounding import RoundingModel

_ZERO_EXPONENT = 5000
"""Stands for the lowest bit of 0: above that of every number."""


@dataclass(frozen=True, eq=False)
class Products:
    """What every bound on q k^T needs, (..., Lq, Lk) each, before any scale."""

    width: int
    magnitude: Real  # |q||k|^T, errors of q and k included
    squares: Real  # (q*q)(k*k)^T
    carried: Real  # how far the errors of q and k move q k^T
    shared: Real  # its variance from q, which the keys of a row share
    independent: Real  # its variance from k
    entries: Real  # sum |q_ic| + sum |k_jc|, for underflow
    reduced: Real  # 0, 1 or 2: how many of q and k a product changes by rounding them
    computed: int  # how many of q and k have errors of their own
    grid: Real  # g: every q_ic k_jc is a multiple of it; 0 where q or k is computed


def products_of(query: Operand, key: Operand, rounding: RoundingModel) -> Products:
    """Prepare the bounds of query (..., Lq, D) times key (..., Lk, D)."""
    size_q, size_k = query.magnitude, key.magnitude
    magnitude = size_q @ transposed(size_k)
    square_k = transposed(key.value * key.value)
    carried = shared = independent = np.zeros((1, 1))
    if query.worst is not None:
        carried = query.worst @ transposed(np.abs(key.value))
    if key.worst is not None:
        carried = carried + size_q @ transposed(key.worst)
    if query.variance is not None:
        shared = query.variance @ square_k
    if key.variance is not None:
        independent = (query.value * query.value) @ transposed(key.variance)
    return Products(
        width=query.value.shape[-1],
        magnitude=magnitude,
        squares=(query.value * query.value) @ square_k,
        carried=carried,
        shared=shared,
        independent=independent,
        entries=size_q.sum(-1)[..., :, np.newaxis] + size_k.sum(-1)[..., np.newaxis, :],
        grid=_grid(query, key),
        reduced=_is_rounded(query, rounding) + _is_rounded(key, rounding),
        computed=(query.worst is not None) + (key.worst is not None),
    )


def raw_scores(products: Products, exact: Real, rounding: RoundingModel) -> LogitError:
    """Bound q k^T as a stage of its own: an implementation that returns it has not folded the scale."""
    return scores(products, 1.0, exact, replace(rounding, folding="none"))


def scores(products: Products, scale: float, exact: Real, rounding: RoundingModel) -> LogitError:
    """Bound the scaled scores ``exact`` = a q k^T.

    Small integers are exact in every order: where all q_ic k_jc are multiples of g and |q||k|^T <= g / u_acc, every
    partial sum is representable. A scale folded into q or k must keep that: it must be a power of 4 (its square root is
    then a power of two as well), or the class must not fold. Likewise nothing is lost in storage up to g / u_s.
    """
    size, constant = abs(scale), roundings_of_scale(scale)
    folds_exactly = folds_exactly_into_operands(scale, rounding)
    fits, stored_exactly = _representable(products, rounding, folds_exactly)
    summed = products.width * rounding.accumulate_unit * ~fits
    prescaled = 0.0 if folds_exactly else rounding.prescale_unit
    # A scaled operand has other bits than the one that was given.
    rounded = products.reduced if folds_exactly else 2 * np.ones((1, 1))
    stored = rounding.score_unit * (constant + ~stored_exactly)
    carried = size * products.carried
    relative = size * products.magnitude * (summed + rounding.prescale_count * prescaled)
    if rounding.product_unit:
        relative = relative + size * products.magnitude * rounded * (rounding.product_error / 2)
    floor = _dot_underflow(products, size, rounding)
    worst = (relative + stored * (np.abs(exact) + carried)) * (1 + 8 * rounding.coarsest_unit) + carried + floor
    square, squares = exact * exact, size**2 * products.squares
    independent = (
        summation_variance(rounding.accumulate_unit, products.width, square, squares) * ~fits
        + rounding.score_unit**2 * (constant_roundings(constant, folds_exactly) ** 2 + ~stored_exactly) * square
        + size**2 * products.independent
    )
    shared = 2 * prescaled**2 * squares + size**2 * products.shared
    if not rounding.product_unit:
        return LogitError(worst, independent, shared, floor)
    # A query is rounded for all keys of its row at once; partial sums that are cut off err in one direction.
    cut = summation_variance(rounding.accumulate_unit, products.width, square, squares) * (products.width - 1) * ~fits
    of_each = (rounded > 0) * rounding.product_spread**2 * squares
    common = (1 + products.computed) ** 2 * rounding.product_common if bool((rounded > 0).any()) else 0.0
    return LogitError(worst, independent + cut + of_each, shared + of_each, floor, common)


def roundings_of_scale(scale: float) -> int:
    """Count the roundings of the constant and of the product with it, beyond that of storage."""
    return 0 if _is_power_of_two(scale) else 2


def folds_exactly_into_operands(scale: float, rounding: RoundingModel) -> bool:
    """Whether no rounding comes from folding the scale, or its root, into query and key."""
    return rounding.folding == "none" or (rounding.folding == "scale" and _is_power_of_four(scale))


def constant_roundings(constant: int, folds_exactly: bool) -> int:
    """Count the roundings of the scale in u, at most: one number for all scores, so that nothing averages them out.

    1/sqrt(d) is rounded twice; its square root once more, and folded into both query and key it counts twice.
    """
    return constant if folds_exactly else max(2 * constant, 2)


def capped(before: Real, error: LogitError, cap: float, rounding: RoundingModel) -> LogitError:
    """Bound c tanh(s / c), ``before`` being s."""
    size, unit = abs(cap), rounding.score_unit
    ratio = before / cap
    height, slope = np.abs(np.tanh(ratio)), slope_of_tanh(ratio)
    rise = rise_of_tanh(ratio, error.worst / size, rounding)
    relative = rounding.tanh_error + rounding.compute_unit + 2 * unit
    floor = np.asarray(2 * rounding.score_underflow * (1 + size))
    worst = size * (rise + relative * (height + rise)) * (1 + 8 * rounding.coarsest_unit) + floor
    spread = error.independent + (2 * rounding.compute_unit**2 + unit**2) * before * before
    functional = (rounding.tanh_error**2 + 2 * unit**2) * (size * height) ** 2
    shared = _with_proportion(error, before)
    steep = np.minimum(1, slope + 0.77 * np.sqrt(spread + shared) / size) ** 2
    return LogitError(worst, steep * spread + functional, steep * shared, floor + np.sqrt(steep) * error.floor)


def rise_of_tanh(argument: Real, moved: Real, rounding: RoundingModel) -> Real:
    """Return dh: how far tanh can move where its argument s / c does, ``moved`` being what the error of s moves it."""
    moved = moved + (2 * rounding.compute_unit + rounding.score_unit) * (np.abs(argument) + moved)
    rise: Real = np.minimum(1, slope_of_tanh(argument) + 0.77 * moved) * moved
    return rise


def biased(before: Real, after: Real, error: LogitError, rounding: RoundingModel) -> LogitError:
    """Bound s + b; ``before`` is s and ``after`` s + b, the bias exact as stored."""
    unit = rounding.score_unit
    size = np.abs(after)
    worst = error.worst + unit * (size + error.worst) + rounding.score_underflow
    independent = error.independent + unit**2 * size * size
    if rounding.folding == "base":
        # Both terms are multiplied by log2(e) first, and may cancel afterwards.
        parts = np.abs(before) + np.abs(after - before)
        worst = worst + rounding.compute_unit * (parts + error.worst)
        independent = independent + rounding.compute_unit**2 * parts * parts
    return LogitError(worst, independent, _with_proportion(error, before), error.floor + rounding.score_underflow)


def _with_proportion(error: LogitError, scores: Real) -> Real:
    """Return what keys share, were it in proportion to the scores before: behind another step it is so no longer."""
    return error.shared + error.proportion * scores * scores if error.proportion else error.shared


def cosine_scores(query: Operand, key: Operand, scale: float, exact: Real, rounding: RoundingModel) -> LogitError:
    """Bound a q.k / (|q| |k|), for |q|^2 and |k|^2 that are normal numbers of the accumulation format.

    A square root halves the relative error of a sum of squares; two lengths have together that of one.
    """
    width, size, u_acc, u_c = query.value.shape[-1], abs(scale), rounding.accumulate_unit, rounding.compute_unit
    unit_q, unit_k = _unit_rows(query.value), _unit_rows(key.value)
    storing = rounding.score_unit * (1 if _is_power_of_two(scale) else 3)
    reduced = rounding.product_error  # of the product, and of the two lengths, whose squares may be products too
    stored = 2 * (u_c + rounding.score_unit)
    elements = size * np.abs(unit_q) @ transposed(np.abs(unit_k)) * (width * u_acc + stored + reduced)
    lengths = np.abs(exact) * ((width + 2) * u_acc + 3 * u_c + storing + reduced)
    floor = np.asarray((1 + size) * 2 * (width + 4) * (rounding.accumulate_underflow + rounding.score_underflow))
    floor = floor + (1 + size) * 2 * width * rounding.product_underflow
    worst = (elements + lengths) * (1 + 8 * rounding.coarsest_unit + 2 * width * u_acc) + floor
    square, squares = exact * exact, size**2 * (unit_q * unit_q) @ transposed(unit_k * unit_k)
    independent = (
        product_variance(rounding, width, square, squares)
        + 2 * (u_c**2 + rounding.score_unit**2) * squares
        + square * ((width / 2 + 1) * u_acc**2 + 3 * u_c**2 + rounding.score_unit * storing)
        + square * rounding.product_common
    )
    return LogitError(worst, independent, np.zeros((1, 1)), floor)


def _representable(
    products: Products, rounding: RoundingModel, folds_exactly: bool
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return where a product is exact in the accumulation format, and where in the format of the scores as well."""
    grid = products.grid
    if rounding.product_unit:
        grid = grid * (products.reduced == 0)
    if not folds_exactly or not grid.any():
        never = np.zeros((1, 1), dtype=np.bool_)
        return never, never
    summed = (products.magnitude <= grid / rounding.accumulate_unit) & (grid >= rounding.accumulate_underflow)
    stored = (products.magnitude <= grid / rounding.score_unit) & (grid >= rounding.score_underflow)
    return summed, summed & stored


def _dot_underflow(products: Products, size: float, rounding: RoundingModel) -> Real:
    """Bound what underflow does: in products and sums, scaled before or after, in a scaled operand, in storage."""
    folded = rounding.product_underflow if rounding.folding == "none" else rounding.prescale_underflow
    in_sum = 2 * (products.width + 2) * rounding.accumulate_underflow + folded * products.entries
    floor: Real = max(1.0, size) * in_sum + 2 * (1 + size) * rounding.score_underflow
    return floor


def _grid(query: Operand, key: Operand) -> Real:
    if query.worst is not None or key.worst is not None:
        return np.zeros((1, 1))
    exponent = _lowest_bit(query.value) + _lowest_bit(key.value)
    grid: Real = np.ldexp(1.0, np.clip(exponent, -2000, 1000))
    return grid


def _is_rounded(operand: Operand, rounding: RoundingModel) -> Real:
    """Return, per matrix, 1 where a product may change some element by rounding it, else 0: (..., 1, 1)."""
    if not rounding.product_unit:
        return np.zeros((1, 1))
    if operand.worst is not None:
        return np.ones((1, 1))
    fraction, _ = np.frexp(operand.value)
    short = np.ldexp(fraction, rounding.product_precision)
    flushed = (np.abs(operand.value) < rounding.product_underflow) & (operand.value != 0)
    rounded: Real = ((short != np.rint(short)) | flushed).any(axis=(-2, -1), keepdims=True).astype(np.float64)
    return rounded


def _lowest_bit(array: Real) -> NDArray[np.int64]:
    """Return, per matrix, the exponent of the lowest bit that is set in any element: (..., L, D) -> (..., 1, 1)."""
    fraction, exponent = np.frexp(array)
    whole = np.ldexp(fraction, 53).astype(np.int64)
    lowest = np.frexp((whole & -whole).astype(np.float64))[1] - 1
    each = np.where(array == 0, _ZERO_EXPONENT, lowest + exponent - 53).astype(np.int64)
    least: NDArray[np.int64] = each.min(axis=(-2, -1), keepdims=True, initial=_ZERO_EXPONENT)
    return least


def _is_power_of_two(number: float) -> bool:
    return math.frexp(abs(number))[0] == 0.5


def _is_power_of_four(number: float) -> bool:
    return _is_power_of_two(number) and math.frexp(abs(number))[1] % 2 == 1


def slope_of_tanh(argument: Real) -> Real:
    """sech^2 without the cancellation of 1 - tanh^2, nor the overflow of cosh."""
    decay = np.exp(-2 * np.abs(argument))
    slope: Real = 4 * decay / (1 + decay) ** 2
    return slope


def _unit_rows(matrix: Real) -> Real:
    # Scaled first: the squares of a row may under- or overflow where its length does not.
    largest = np.abs(matrix).max(axis=-1, keepdims=True, initial=0)
    scaled = matrix / np.where(largest > 0, largest, 1)
    length = np.sqrt((scaled * scaled).sum(axis=-1, keepdims=True))
    unit: Real = scaled / np.where(length > 0, length, 1)
    return unit
