"""The scores: the product q k^T of query and key, its transposes, and the product times the scale a.

a = 1/sqrt(D) as a real number, unless it is given (Vaswani et al. 2017, 3.2.1); each head may have its own. Every score
that is a dot product follows from the product, whose transposes are

    grad_query = ds k,    grad_key = ds^T q, summed over the query heads that share a key head

``docs/numerics.md`` derives the bounds (section 4.1) and says where small integers have to come out exact, by
``Products.grid``. |fl(x.y) - x.y| <= n u |x|.|y| in every order, fused or not: Jeannerod and Rump, SIAM J. Matrix Anal.
Appl. 34 (2013); Higham 2002, Accuracy and Stability of Numerical Algorithms, chapter 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from flint import ctx

from attncheck.attention.balls import Balls
from attncheck.attention.double_words import DoubleWords
from attncheck.attention.errors import (
    ZERO,
    Ball,
    Logits,
    Operand,
    Real,
    add_errors,
    count_heads,
    inner_product_variance,
    mean_subtraction_error,
    quantization_mean,
    quantize_operand,
    relative_sum_error,
    repeat_heads,
    restored_mean_error,
    transposed,
)
from attncheck.attention.exact_array import ExactArray
from attncheck.attention.flags import (
    FlagContext,
    Flags,
    any_in_head_groups,
    any_over_axes,
    make_score_flag_rule,
    pass_through,
)
from attncheck.attention.problem import Computation, lift_per_head
from attncheck.attention.step import ErrorContext, RadiusContext, Step, logits_from_returned
from attncheck.reading.lowering import Factor
from attncheck.spec.rounding import RoundingModel

PerHead = Any
"""What follows from a factor: one for all scores, or one for those of each head, (H, 1, 1)."""
_HEAD_SCALE = "head_scale"
_LARGEST_GRID = 2.0**1000
"""Stands for the grid of products that are all 0, infinity otherwise: divided by a unit roundoff it is still a number
of float64."""


def _compute_product_sums_of_step(at: ErrorContext, query: Operand, key: Operand) -> ProductSums:
    stored = quantize_operand("query", query, at.rounding)
    met = quantize_operand("key", key, at.rounding)
    if query.max_error is not None and met.value is not key.value:  # the mean of the keys meets that as well
        met = replace(met, value=np.maximum(np.abs(met.value), np.abs(key.value)))
    met = met.repeat_heads(count_heads(query.value))
    products, centred = (
        compute_product_sums(stored, met, at.rounding.for_score_product),
        at.rounding.quantization_of("query"),
    )
    products = replace(products, restored_mean_error=restored_mean_error(query, key, at.rounding))
    if centred is None or not centred.subtracts_mean or not query.value.size:
        return products
    # The product of the mean with the keys is given back, in the format of results, by keys that are no codes yet.
    mean, unit = quantization_mean(query.value, centred), at.rounding.output_unit
    lost = add_errors(mean_subtraction_error("key", key, at.rounding), ZERO if key.max_error is None else key.max_error)
    lost = np.broadcast_to(repeat_heads(lost, count_heads(query.value)), met.value.shape)
    carried = np.abs(mean) @ transposed(unit * np.abs(met.value) + lost)
    variance = (unit * mean @ transposed(met.value)) ** 2 + (mean * mean) @ transposed(lost * lost)
    return replace(
        products,
        propagated_error=add_errors(products.propagated_error, carried),
        independent_variance=add_errors(products.independent_variance, variance),
    )


def _product_radius(_: RadiusContext, __: Real, query: Ball, key: Ball) -> Real:
    shared = key.repeat_heads(count_heads(query.value))
    return query.matmul_radius(transposed(shared.value), transposed(shared.radius))


PRODUCT = Step(
    lambda _, query, key: query @ key.repeat_heads_for(query).transposed(),
    _compute_product_sums_of_step,
    _product_radius,
    propagate_flags=make_score_flag_rule(),
)


@dataclass(frozen=True, eq=False)
class ProductSums:
    """The sums that every bound on q k^T needs, (..., Lq, Lk) each, before any scale; or ``ZERO``."""

    head_width: int
    magnitude: Real  # |q||k|^T, errors of q and k included
    squared_products: Real  # (q*q)(k*k)^T
    propagated_error: Real  # how far the errors of q and k move q k^T
    shared_variance: Real  # its variance from q, which the keys of a row share
    independent_variance: Real  # its variance from k
    sum_of_magnitudes: Real  # sum |q_ic| + sum |k_jc|, for underflow
    rounded_operand_count: Real  # 0, 1 or 2: how many of q and k a product changes by rounding them
    computed_operand_count: int  # how many of q and k have errors of their own
    product_grid_step: (
        Real  # g: every q_ic k_jc is a multiple of it; 0 where q or k is computed, or no product can fit it
    )
    restored_mean_error: Real | None = None  # what rounding takes of what log_sum_exp gets back: (..., Lq, 1)


def compute_product_sums(query: Operand, key: Operand, rounding: RoundingModel) -> ProductSums:
    """Prepare the bounds of query (..., Lq, D) times key (..., Lk, D)."""
    size_q, size_k = query.magnitude, key.magnitude
    magnitude = size_q @ transposed(size_k)
    square_k = transposed(key.value * key.value)
    carried = shared = independent = ZERO
    if query.max_error is not None:
        carried = query.max_error @ transposed(np.abs(key.value))
    if key.max_error is not None:
        carried = add_errors(carried, size_q @ transposed(key.max_error))
    if query.variance is not None:
        shared = query.variance @ square_k
    if key.variance is not None:
        independent = (query.value * query.value) @ transposed(key.variance)
    if query.common_relative_variance is not None or key.common_relative_variance is not None:
        square = (query.value @ transposed(key.value)) ** 2
        shared = (
            shared
            if query.common_relative_variance is None
            else add_errors(shared, query.common_relative_variance * square)
        )
        independent = (
            independent
            if key.common_relative_variance is None
            else add_errors(independent, transposed(key.common_relative_variance) * square)
        )
    grid = ZERO
    if (
        query.max_error is None
        and key.max_error is None
        and _may_have_exact_partial_sum(query, size_k, magnitude, rounding)
    ):
        grid = np.minimum(_lowest_bit(query.value) * _lowest_bit(key.value), _LARGEST_GRID)
    return ProductSums(
        head_width=query.value.shape[-1],
        magnitude=magnitude,
        squared_products=(query.value * query.value) @ square_k,
        propagated_error=carried,
        shared_variance=shared,
        independent_variance=independent,
        sum_of_magnitudes=size_q.sum(-1)[..., :, np.newaxis] + size_k.sum(-1)[..., np.newaxis, :],
        product_grid_step=grid,
        rounded_operand_count=add_errors(_has_rounded_elements(query, rounding), _has_rounded_elements(key, rounding)),
        computed_operand_count=(query.max_error is not None) + (key.max_error is not None),
    )


def count_product_roundings(
    products: ProductSums, rounding: RoundingModel, folds_exactly: PerHead
) -> tuple[Real | float, Real | float]:
    """Return the roundings of each product's sum and of its storage: 0 if it is exact in that format, else 1."""
    grid = products.product_grid_step
    if grid is ZERO or not np.any(folds_exactly):
        return 1.0, 1.0
    if rounding.product_unit:
        grid = grid * (products.rounded_operand_count == 0)
    summed = (products.magnitude <= grid / rounding.accumulate_unit) & (grid >= rounding.accumulate_underflow)
    summed = summed & folds_exactly
    if not summed.any():
        return 1.0, 1.0
    stored = (products.magnitude <= grid / rounding.score_unit) & (grid >= rounding.score_underflow)
    return (~summed).astype(np.float64), (~(summed & stored)).astype(np.float64)


def _may_have_exact_partial_sum(query: Operand, size_k: Real, magnitude: Real, rounding: RoundingModel) -> bool:
    """Tell if any partial sum may be representable; this says no without the bits of every element.

    The grid of k is at most max |k|. If all of q would have to be multiples of more than it is, no product fits.
    """
    largest, least = float(size_k.max(initial=0.0)), float(magnitude.min(initial=np.inf)) * rounding.accumulate_unit
    if not 0 < least < math.inf:
        return True
    least /= largest
    multiples = query.value / 2.0 ** math.frexp(least / 2)[1]
    return bool((multiples == np.rint(multiples)).all(axis=(-2, -1)).any())


def _has_rounded_elements(operand: Operand, rounding: RoundingModel) -> Real:
    """Return, per matrix, 1 if a product may change some element by rounding it, else 0: (..., 1, 1)."""
    if not rounding.product_unit:
        return ZERO
    if operand.max_error is not None:
        return np.ones((1, 1))
    fraction, _ = np.frexp(operand.value)
    short = np.ldexp(fraction, rounding.product_precision)
    flushed = (np.abs(operand.value) < rounding.product_underflow) & (operand.value != 0)
    rounded: Real = ((short != np.rint(short)) | flushed).any(axis=(-2, -1), keepdims=True).astype(np.float64)
    return rounded


def _lowest_bit(array: Real) -> Real:
    """Return, per matrix, the lowest bit that is set in any element, (..., 1, 1): infinity if there is none."""
    fraction, exponent = np.frexp(array)
    whole = np.ldexp(fraction, 53).astype(np.int64)
    lowest = np.ldexp((whole & -whole).astype(np.float64), exponent - 53)
    least: Real = np.where(array == 0, np.inf, lowest).min(axis=(-2, -1), keepdims=True, initial=np.inf)
    return least


def exact_grad_query(_: Computation, grad_products: ExactArray, key: ExactArray) -> ExactArray:
    """Return (B, H, Lq, D)."""
    return grad_products @ key.repeat_heads_for(grad_products)


def exact_grad_key(_: Computation, grad_products: ExactArray, query: ExactArray, key: ExactArray) -> ExactArray:
    """Return (B, Hkv, Lk, D)."""
    return (grad_products.transposed() @ query).sum_head_groups(key.shape[-3])


def propagate_grad_key_flags(_: FlagContext, grad_products: Flags, __: Flags, key: Flags) -> Flags:
    """Collect all of a head's rows."""
    return any_in_head_groups(any_over_axes(grad_products, -2), key.shape[-3])


def score_scale(problem: Computation) -> Factor:
    """Return the factor of the scores."""
    return problem.score_scale(lambda: problem.head_width)


def multiply_by_scale_exactly(problem: Computation, product: ExactArray) -> ExactArray:
    """Multiply by the scale, forwards or, as its own transpose, backwards."""
    scale = problem.options.get("scale")
    if _HEAD_SCALE in problem.inputs:
        return product * problem.to_exact_array(lift_per_head(problem.input_array(_HEAD_SCALE)))
    if scale is not None:
        return product * problem.magnitude_if_absolute(scale)
    return (
        product
        if problem.score == "dot"
        else product * _exact_inverse_root(problem.arithmetic, problem.head_width, ctx.prec)
    )


@cache
def _exact_inverse_root(arithmetic: type[ExactArray], width: int, _precision: int) -> ExactArray:
    """Return 1 / sqrt(width), in balls as exact as the precision at the time."""
    number = np.full((1, 1), float(width))
    if arithmetic is not DoubleWords:
        return 1 / arithmetic.from_finite_numbers(number).sqrt()
    with ctx.workprec(256):
        return DoubleWords((1 / Balls.from_finite_numbers(number).sqrt()).high_low_radius())


def _scores_radius(around: RadiusContext, _: Real, product: Ball) -> Real:
    radius: Real = product.radius * abs(score_scale(around.problem))
    if _HEAD_SCALE in around.problem.inputs:
        radius += lift_per_head(around.radii[_HEAD_SCALE]) * (np.abs(product.value) + product.radius)
    return radius


def bound_scaled_scores(products: ProductSums, scale: Factor, exact: Real, rounding: RoundingModel) -> Logits:
    """Bound the scaled scores ``exact`` = a q k^T, with one a, or one for each head.

    Small integers are exact in every order: if all q_ic k_jc are multiples of ``grid`` and |q||k|^T is at most that
    over u_acc. A scale folded into q or k must keep that: it must be a power of 4 (its square root is then a power of
    two as well), or the class must not fold.
    """
    rounding = rounding.for_score_product
    size, constant, room = abs(scale), max_roundings_of_scale(scale), 1 + 8 * rounding.coarsest_unit
    folds_exactly = is_scale_folding_exact(scale, rounding)
    sums, stores = count_product_roundings(products, rounding, folds_exactly)
    prescaled = np.where(folds_exactly, 0.0, rounding.prescale_unit)
    relative = relative_sum_error(rounding, products.head_width) * sums + rounding.prescale_count * prescaled
    stored = rounding.score_unit * (constant + stores) * room
    # A scaled operand has other bits than the one that was given.
    rounded = np.where(folds_exactly, products.rounded_operand_count, 2.0)
    if rounding.product_unit:
        relative = relative + rounded * (rounding.product_error / 2)
    floor = _dot_product_underflow(products, size, rounding)
    max_error = (size * room * relative) * products.magnitude + stored * np.abs(exact) + floor
    if products.propagated_error is not ZERO:
        max_error = max_error + (size * (1 + stored)) * products.propagated_error
    square, squares = exact * exact, size**2 * products.squared_products
    # Of these numbers rows take differences that cancel, so that the order of the sum shows in what is left.
    independent = inner_product_variance(rounding, products.head_width, square, squares)
    independent *= sums
    shared = 2 * prescaled**2 * squares if prescaled.any() else ZERO
    # What cuts take away from a projected query and from a projected key adds up.
    common = 2 * (products.computed_operand_count * rounding.mean_truncation_error) ** 2
    if rounding.product_unit:
        # A query is rounded for all keys of its row at once; partial sums that are cut off err in one direction.
        of_each = (rounded > 0) * rounding.product_spread**2 * squares
        independent, shared = independent + of_each, add_errors(shared, of_each)
        common = (
            (1 + products.computed_operand_count) ** 2 * rounding.common_product_variance
            if bool((rounded > 0).any())
            else 0.0
        )
    independent += rounding.score_unit**2 * (max_roundings_of_constant(constant, folds_exactly) ** 2 + stores) * square
    if products.independent_variance is not ZERO:
        independent += size**2 * products.independent_variance
    if products.shared_variance is not ZERO:
        shared = add_errors(shared, size**2 * products.shared_variance)
    restored_mean_error = None if products.restored_mean_error is None else size * products.restored_mean_error
    return Logits(exact, max_error, independent, shared, floor, common, restored_mean_error=restored_mean_error)


def max_roundings_of_scale(scale: Factor) -> PerHead:
    """Count the roundings of the constant and of the product with it, beyond that of storage."""
    return np.where(is_power_of_two(scale), 0, 2)


def is_scale_folding_exact(scale: Factor, rounding: RoundingModel) -> PerHead:
    """Tell if no rounding comes from folding the scale, or its root, into query and key."""
    return rounding.folding == "none" or (rounding.folding == "scale" and _is_power_of_four(scale))


def max_roundings_of_constant(constant: PerHead, folds_exactly: PerHead) -> PerHead:
    """Count the roundings of the scale in u, at most: one number for all scores, so that nothing averages them out.

    1/sqrt(d) is rounded twice; its square root once more, and folded into both query and key it counts twice.
    """
    return np.where(folds_exactly, constant, np.maximum(2 * constant, 2))


def _dot_product_underflow(products: ProductSums, size: Factor, rounding: RoundingModel) -> Real:
    """Bound what underflow does: in products and sums, scaled before or after, in a scaled operand, in storage."""
    folded = rounding.product_underflow if rounding.folding == "none" else rounding.prescale_underflow
    largest, stored = np.maximum(1.0, size), 2 * (1 + size) * rounding.score_underflow
    floor = np.atleast_2d(largest * 2 * (products.head_width + 2) * rounding.accumulate_underflow + stored)
    return floor + largest * folded * products.sum_of_magnitudes if folded else floor


def is_power_of_two(number: Factor) -> PerHead:
    """Tell if multiplying by a number changes the exponent alone."""
    return np.frexp(np.abs(number))[0] == 0.5


def _is_power_of_four(number: Factor) -> PerHead:
    return is_power_of_two(number) & (np.frexp(np.abs(number))[1] % 2 == 1)


RAW_SCORES = Step(
    pass_through,
    # An implementation that returns q k^T as a separate stage has not folded the scale.
    lambda at, products: bound_scaled_scores(products, 1.0, at.value, at.rounding.without_folding),
    lambda _, __, product: product.radius,
    logits_from_returned,
    pass_through,
)
SCORES = Step(
    multiply_by_scale_exactly,
    lambda at, products: bound_scaled_scores(products, score_scale(at.problem), at.value, at.rounding),
    _scores_radius,
    logits_from_returned,
    lambda known, flags: (
        flags | lift_per_head(known.input_flags[_HEAD_SCALE]) if _HEAD_SCALE in known.input_flags else flags
    ),
)
