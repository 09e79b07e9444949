"""Back through the weighted mean: dp = g v^T, with g = grad_output.

    E_dp = Dv u_acc |g||v|^T + u_dp |dp| + eta
    V_dp = f u_acc^2 [ Dv (dp^2/3 + Q/6) + Q ] + u_dp^2 dp^2,    Q = g^2 v^2

Where products round their factors, a rounded g is met by every key of a row, and rounded values by every query.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attncheck.attention.errors import Operand, Real, every_head, product_variance, transposed
from attncheck.attention.problem import Problem
from attncheck.attention.rounding import RoundingModel
from attncheck.attention.step import At, Step
from attncheck.attention.weighted_mean import exact_grad_weights, reach_of_grad_weights


@dataclass(frozen=True, eq=False)
class GradWeights:
    """The gradient of the weights, (B, H, Lq, Lk), and what it is made of, the values those of every query head."""

    value: Real  # dp
    grad_output: Real  # g
    values: Real  # v
    max_error: Real  # E_dp
    variance: Real  # V_dp
    of_factors: Real  # of what rounding g, or v, does to dp: for all keys, or for all queries, at once


def _value(_: Problem, grad_output: Real, value: Real) -> Real:
    gradient: Real = grad_output @ transposed(every_head(value, grad_output.shape[1]))
    return gradient


def _error(at: At, grad_output: Operand, value: Operand) -> GradWeights:
    gradient, rounding, dp = grad_output.value, at.rounding, at.value
    values = every_head(value.value, gradient.shape[1])
    square, squares = dp**2, gradient**2 @ transposed(values**2)
    variance = product_variance(rounding, values.shape[-1], square, squares)
    return GradWeights(
        value=dp,
        grad_output=gradient,
        values=values,
        max_error=_worst(gradient, values, np.abs(dp), rounding),
        variance=variance + rounding.weight_gradient_unit**2 * square,
        of_factors=rounding.product_spread**2 * squares,
    )


def _worst(gradient: Real, values: Real, size: Real, rounding: RoundingModel) -> Real:
    """Return E_dp."""
    width, u_acc = values.shape[-1], rounding.accumulate_unit
    underflow = rounding.weight_underflow if rounding.weight_gradient_unit > u_acc else rounding.accumulate_underflow
    relative = width * u_acc + rounding.product_error
    summed = relative * (np.abs(gradient) @ transposed(np.abs(values)))
    error: Real = summed + rounding.weight_gradient_unit * (size + summed)
    error += 2 * (width + 2) * rounding.accumulate_underflow + underflow
    if rounding.product_unit:  # a factor that is flushed to zero
        of_query, of_key = (np.abs(each).sum(axis=-1, keepdims=True) for each in (gradient, values))
        error += rounding.product_underflow * (of_query + transposed(of_key))
    return error


GRAD_WEIGHTS = Step(exact_grad_weights, _value, _error, reach=reach_of_grad_weights)
