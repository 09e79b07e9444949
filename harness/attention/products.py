"""The product of query and key, and its transposes: what every score that is a dot product follows from.

    q k^T,    grad_query = ds k,    grad_key = ds^T q, summed over the query heads that share a key head

Small integers are exact in every order: where all q_ic k_jc are multiples of g and |q||k|^T <= g / u_acc, every partial
sum is representable. ``Products.grid`` is g.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from attncheck.attention.errors import NOTHING, Ball, Operand, Real, added, for_query_heads, heads_of, transposed
from attncheck.attention.exact_array import ExactArray
from attncheck.attention.flags import Flags, Reach, any_of, flags_per_group, reach_of_scores
from attncheck.attention.problem import Problem
from attncheck.attention.rounding import RoundingModel
from attncheck.attention.step import Around, At, Step

_LARGEST_GRID = 2.0**1000
"""Stands for the grid of products that are all 0."""


def _exact(_: Problem, query: ExactArray, key: ExactArray) -> ExactArray:
    return query @ key.for_heads_of(query).transposed()


def _value(_: Problem, query: Real, key: Real) -> Real:
    return query @ transposed(for_query_heads(key, heads_of(query)))


def _error(at: At, query: Operand, key: Operand) -> Products:
    return products_of(query, key.for_query_heads(heads_of(query.value)), at.rounding)


def _radius(_: Around, __: Real, query: Ball, key: Ball) -> Real:
    shared = key.for_query_heads(heads_of(query.value))
    return query.radius_of_product(transposed(shared.value), transposed(shared.radius))


PRODUCT = Step(_exact, _value, _error, _radius, reach=reach_of_scores())


@dataclass(frozen=True, eq=False)
class Products:
    """What every bound on q k^T needs, (..., Lq, Lk) each, before any scale; or ``NOTHING``."""

    width: int
    magnitude: Real  # |q||k|^T, errors of q and k included
    squares: Real  # (q*q)(k*k)^T
    carried: Real  # how far the errors of q and k move q k^T
    shared: Real  # its variance from q, which the keys of a row share
    independent: Real  # its variance from k
    entries: Real  # sum |q_ic| + sum |k_jc|, for underflow
    reduced: Real  # 0, 1 or 2: how many of q and k a product changes by rounding them
    computed: int  # how many of q and k have errors of their own
    grid: Real  # g: every q_ic k_jc is a multiple of it; 0 where q or k is computed, or no product can fit it


def products_of(query: Operand, key: Operand, rounding: RoundingModel) -> Products:
    """Prepare the bounds of query (..., Lq, D) times key (..., Lk, D)."""
    size_q, size_k = query.magnitude, key.magnitude
    magnitude = size_q @ transposed(size_k)
    square_k = transposed(key.value * key.value)
    carried = shared = independent = NOTHING
    if query.max_error is not None:
        carried = query.max_error @ transposed(np.abs(key.value))
    if key.max_error is not None:
        carried = added(carried, size_q @ transposed(key.max_error))
    if query.variance is not None:
        shared = query.variance @ square_k
    if key.variance is not None:
        independent = (query.value * query.value) @ transposed(key.variance)
    if query.common is not None or key.common is not None:
        square = (query.value @ transposed(key.value)) ** 2
        shared = shared if query.common is None else added(shared, query.common * square)
        independent = independent if key.common is None else added(independent, transposed(key.common) * square)
    is_exact = query.max_error is None and key.max_error is None
    return Products(
        width=query.value.shape[-1],
        magnitude=magnitude,
        squares=(query.value * query.value) @ square_k,
        carried=carried,
        shared=shared,
        independent=independent,
        entries=size_q.sum(-1)[..., :, np.newaxis] + size_k.sum(-1)[..., np.newaxis, :],
        grid=_grid(query, key) if is_exact and _may_fit(query, size_k, magnitude, rounding) else NOTHING,
        reduced=added(_is_rounded(query, rounding), _is_rounded(key, rounding)),
        computed=(query.max_error is not None) + (key.max_error is not None),
    )


def roundings_of_products(
    products: Products, rounding: RoundingModel, folds_exactly: bool
) -> tuple[Real | float, Real | float]:
    """Return 0 where a product is exact in the accumulation format, and where in that of the scores as well; else 1."""
    grid = products.grid
    if not folds_exactly or grid is NOTHING:
        return 1.0, 1.0
    if rounding.product_unit:
        grid = grid * (products.reduced == 0)
    summed = (products.magnitude <= grid / rounding.accumulate_unit) & (grid >= rounding.accumulate_underflow)
    if not summed.any():
        return 1.0, 1.0
    stored = (products.magnitude <= grid / rounding.score_unit) & (grid >= rounding.score_underflow)
    return (~summed).astype(np.float64), (~(summed & stored)).astype(np.float64)


def _may_fit(query: Operand, size_k: Real, magnitude: Real, rounding: RoundingModel) -> bool:
    """Whether any partial sum may be representable; this says no without the bits of every element.

    The grid of k is at most max |k|. Where all of q would have to be multiples of more than it is, no product fits.
    """
    largest, least = float(size_k.max(initial=0.0)), float(magnitude.min(initial=np.inf)) * rounding.accumulate_unit
    if not 0 < least < math.inf:
        return True
    least /= largest
    multiples = query.value / 2.0 ** math.frexp(least / 2)[1]
    return bool((multiples == np.rint(multiples)).all(axis=(-2, -1)).any())


def _grid(query: Operand, key: Operand) -> Real:
    grid: Real = np.minimum(_lowest_bit(query.value) * _lowest_bit(key.value), _LARGEST_GRID)
    return grid


def _is_rounded(operand: Operand, rounding: RoundingModel) -> Real:
    """Return, per matrix, 1 where a product may change some element by rounding it, else 0: (..., 1, 1)."""
    if not rounding.product_unit:
        return NOTHING
    if operand.max_error is not None:
        return np.ones((1, 1))
    fraction, _ = np.frexp(operand.value)
    short = np.ldexp(fraction, rounding.product_precision)
    flushed = (np.abs(operand.value) < rounding.product_underflow) & (operand.value != 0)
    rounded: Real = ((short != np.rint(short)) | flushed).any(axis=(-2, -1), keepdims=True).astype(np.float64)
    return rounded


def _lowest_bit(array: Real) -> Real:
    """Return, per matrix, the lowest bit that is set in any element, (..., 1, 1): infinity where there is none."""
    fraction, exponent = np.frexp(array)
    whole = np.ldexp(fraction, 53).astype(np.int64)
    lowest = np.ldexp((whole & -whole).astype(np.float64), exponent - 53)
    least: Real = np.where(array == 0, np.inf, lowest).min(axis=(-2, -1), keepdims=True, initial=np.inf)
    return least


def exact_grad_query(_: Problem, grad_products: ExactArray, key: ExactArray) -> ExactArray:
    """Return (B, H, Lq, D)."""
    return grad_products @ key.for_heads_of(grad_products)


def exact_grad_key(_: Problem, grad_products: ExactArray, query: ExactArray, key: ExactArray) -> ExactArray:
    """Return (B, Hkv, Lk, D)."""
    return (grad_products.transposed() @ query).summed_in_groups(key.shape[-3])


def reach_of_grad_key(_: Reach, grad_products: Flags, __: Flags, key: Flags) -> Flags:
    """Collect all of a head's rows."""
    return flags_per_group(any_of(grad_products, -2), key.shape[-3])
