"""The scores: the product of query and key as a stage of its own, and times the scale.

    raw_scores  q k^T               D = [ d u_acc |q||k|^T + u_s |t| ] (1 + 8u*) + eta
    scores      a q k^T             D = [ A (d u_acc + n_pre u_pre) + n_s u_s |s| ] (1 + 8u*) + eta
                a = 1/sqrt(D) as a real number, unless it is given (Vaswani et al. 2017, 3.2.1)
                A = |a| |q||k|^T;  n_s = 1 if |a| is a power of two, else 3

|fl(x.y) - x.y| <= n u |x|.|y| in every order, fused or not: Jeannerod and Rump, SIAM J. Matrix Anal. Appl. 34 (2013);
Higham 2002, Accuracy and Stability of Numerical Algorithms, chapter 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from attncheck.attention.errors import NOTHING, Ball, Logits, Real, added, summation_variance
from attncheck.attention.exact_array import ExactArray
from attncheck.attention.flags import handed_on
from attncheck.attention.problem import Problem
from attncheck.attention.products import Products, roundings_of_products
from attncheck.attention.rounding import RoundingModel
from attncheck.attention.step import Around, At, Step, stored_logits


def scale_of(problem: Problem) -> float:
    """Return the factor of the scores: that given, else 1/sqrt(D), and 1 for the kinds that have none."""
    return scale_from(problem.options, problem.score, lambda: problem.head_width)


def scale_from(options: Mapping[str, Any], score: str, head_width: Callable[[], int]) -> float:
    """Do the same from an operation's options and its kind of score."""
    if options.get("scale") is not None:
        return float(options["scale"])
    return 1 / math.sqrt(head_width()) if score == "scaled_dot" else 1.0


def exact_scaled(problem: Problem, product: ExactArray) -> ExactArray:
    """Multiply by the scale, forwards or, as its own transpose, backwards."""
    scale = problem.options.get("scale")
    if scale is not None:
        return product * problem.number(scale)
    return product if problem.score == "dot" else product / problem.exact(np.array([[problem.head_width]])).sqrt()


def scaled_value(problem: Problem, product: Real) -> Real:
    """Multiply by the scale in float64."""
    scaled: Real = scale_of(problem) * product
    return scaled


def _handed_on(_: object, node: ExactArray) -> ExactArray:
    return node


def _radius_of_raw(_: Around, __: Real, product: Ball) -> Real:
    return product.radius


def _radius_of_scaled(around: Around, _: Real, product: Ball) -> Real:
    return product.radius * abs(scale_of(around.problem))


def _error_of_raw(at: At, products: Products) -> Logits:
    # An implementation that returns q k^T as a stage of its own has not folded the scale.
    return scaled_products(products, 1.0, at.value, at.rounding.unfolded)


def _error_of_scaled(at: At, products: Products) -> Logits:
    return scaled_products(products, scale_of(at.problem), at.value, at.rounding)


def scaled_products(products: Products, scale: float, exact: Real, rounding: RoundingModel) -> Logits:
    """Bound the scaled scores ``exact`` = a q k^T.

    Small integers are exact in every order: where all q_ic k_jc are multiples of g and |q||k|^T <= g / u_acc, every
    partial sum is representable. A scale folded into q or k must keep that: it must be a power of 4 (its square root is
    then a power of two as well), or the class must not fold. Likewise nothing is lost in storage up to g / u_s.
    """
    size, constant, room = abs(scale), roundings_of_scale(scale), 1 + 8 * rounding.coarsest_unit
    folds_exactly = folds_exactly_into_operands(scale, rounding)
    sums, stores = roundings_of_products(products, rounding, folds_exactly)
    prescaled = 0.0 if folds_exactly else rounding.prescale_unit
    relative = products.width * rounding.accumulate_unit * sums + rounding.prescale_count * prescaled
    stored = rounding.score_unit * (constant + stores) * room
    # A scaled operand has other bits than the one that was given.
    rounded = products.reduced if folds_exactly else 2 * np.ones((1, 1))
    if rounding.product_unit:
        relative = relative + rounded * (rounding.product_error / 2)
    floor = _dot_underflow(products, size, rounding)
    max_error = (size * room * relative) * products.magnitude + stored * np.abs(exact) + floor
    if products.carried is not NOTHING:
        max_error = max_error + (size * (1 + stored)) * products.carried
    square, squares = exact * exact, size**2 * products.squares
    # Of these numbers rows take differences that cancel, so that the order of the sum shows in what is left.
    independent = summation_variance(rounding.accumulate_unit, products.width, square, squares)
    independent *= sums
    shared = 2 * prescaled**2 * squares if prescaled else NOTHING
    # What cuts take away from a projected query and from a projected key adds up.
    common = 2 * (products.computed * rounding.cut_mean) ** 2
    if rounding.product_unit:
        # A query is rounded for all keys of its row at once; partial sums that are cut off err in one direction.
        of_each = (rounded > 0) * rounding.product_spread**2 * squares
        independent, shared = independent * products.width + of_each, added(shared, of_each)
        common = (1 + products.computed) ** 2 * rounding.product_common if bool((rounded > 0).any()) else 0.0
    independent += rounding.score_unit**2 * (constant_roundings(constant, folds_exactly) ** 2 + stores) * square
    if products.independent is not NOTHING:
        independent += size**2 * products.independent
    if products.shared is not NOTHING:
        shared = added(shared, size**2 * products.shared)
    return Logits(exact, max_error, independent, shared, floor, common)


def roundings_of_scale(scale: float) -> int:
    """Count the roundings of the constant and of the product with it, beyond that of storage."""
    return 0 if is_power_of_two(scale) else 2


def folds_exactly_into_operands(scale: float, rounding: RoundingModel) -> bool:
    """Whether no rounding comes from folding the scale, or its root, into query and key."""
    return rounding.folding == "none" or (rounding.folding == "scale" and _is_power_of_four(scale))


def constant_roundings(constant: int, folds_exactly: bool) -> int:
    """Count the roundings of the scale in u, at most: one number for all scores, so that nothing averages them out.

    1/sqrt(d) is rounded twice; its square root once more, and folded into both query and key it counts twice.
    """
    return constant if folds_exactly else max(2 * constant, 2)


def _dot_underflow(products: Products, size: float, rounding: RoundingModel) -> Real:
    """Bound what underflow does: in products and sums, scaled before or after, in a scaled operand, in storage."""
    folded = rounding.product_underflow if rounding.folding == "none" else rounding.prescale_underflow
    largest, stored = max(1.0, size), 2 * (1 + size) * rounding.score_underflow
    floor = np.array([[largest * 2 * (products.width + 2) * rounding.accumulate_underflow + stored]])
    return floor + largest * folded * products.entries if folded else floor


def is_power_of_two(number: float) -> bool:
    """Whether multiplying by a number changes the exponent alone."""
    return math.frexp(abs(number))[0] == 0.5


def _is_power_of_four(number: float) -> bool:
    return is_power_of_two(number) and math.frexp(abs(number))[1] % 2 == 1


RAW_SCORES = Step(_handed_on, _handed_on, _error_of_raw, _radius_of_raw, stored_logits, handed_on)
SCORES = Step(
    exact_scaled,
    lambda problem, product: scale_of(problem) * product,
    _error_of_scaled,
    _radius_of_scaled,
    stored_logits,
    handed_on,
)
