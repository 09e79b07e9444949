"""The product of query and key, and its transposes: what every score that is a dot product follows from.

    q k^T,    grad_query = ds k,    grad_key = ds^T q, summed over the query heads that share a key head

Small integers are exact in every order: where all q_ic k_jc are multiples of g and |q||k|^T <= g / u_acc, every partial
sum is representable. ``Products.grid`` is g.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.errors import Ball, Operand, Real, for_query_heads, heads_of, transposed
from attncheck.attention.exact_array import ExactArray
from attncheck.attention.flags import Flags, Reach, any_of, flags_per_group, reach_of_scores
from attncheck.attention.problem import Problem
from attncheck.attention.rounding import RoundingModel
from attncheck.attention.step import Around, At, Step

_ZERO_EXPONENT = 5000
"""Stands for the lowest bit of 0: above that of every number."""


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
    if query.max_error is not None:
        carried = query.max_error @ transposed(np.abs(key.value))
    if key.max_error is not None:
        carried = carried + size_q @ transposed(key.max_error)
    if query.variance is not None:
        shared = query.variance @ square_k
    if key.variance is not None:
        independent = (query.value * query.value) @ transposed(key.variance)
    if query.common is not None or key.common is not None:
        square = (query.value @ transposed(key.value)) ** 2
        shared = shared if query.common is None else shared + query.common * square
        independent = independent if key.common is None else independent + transposed(key.common) * square
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
        computed=(query.max_error is not None) + (key.max_error is not None),
    )


def representable(
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


def _grid(query: Operand, key: Operand) -> Real:
    if query.max_error is not None or key.max_error is not None:
        return np.zeros((1, 1))
    exponent = _lowest_bit(query.value) + _lowest_bit(key.value)
    grid: Real = np.ldexp(1.0, np.clip(exponent, -2000, 1000))
    return grid


def _is_rounded(operand: Operand, rounding: RoundingModel) -> Real:
    """Return, per matrix, 1 where a product may change some element by rounding it, else 0: (..., 1, 1)."""
    if not rounding.product_unit:
        return np.zeros((1, 1))
    if operand.max_error is not None:
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


def exact_grad_query(_: Problem, grad_products: ExactArray, key: ExactArray) -> ExactArray:
    """Return (B, H, Lq, D)."""
    return grad_products @ key.for_heads_of(grad_products)


def exact_grad_key(_: Problem, grad_products: ExactArray, query: ExactArray, key: ExactArray) -> ExactArray:
    """Return (B, Hkv, Lk, D)."""
    return (grad_products.transposed() @ query).summed_in_groups(key.shape[-3])


def reach_of_grad_key(_: Reach, grad_products: Flags, __: Flags, key: Flags) -> Flags:
    """Collect all of a head's rows."""
    return flags_per_group(any_of(grad_products, -2), key.shape[-3])
