"""An output gate: attention's output times the sigmoid of a gate, element by element, and its transposes.

    y = o s,   s = 1 / (1 + e^-x)                 o the context, x the gate
    gradients, with g = grad_output and k = s (1 - s):      of the context g s,      of the gate g o k

``docs/numerics.md``, section 4.7, derives the bounds: which sigmoids and which orders of the products they have room
for. Qiu et al. 2025, "Gated Attention for Large Language Models", arXiv 2505.06708.
"""

from __future__ import annotations

import numpy as np

from attncheck.attention.backward import gradient_storage_rounding
from attncheck.attention.errors import BoundedStage, Operand, Real, make_bound
from attncheck.attention.exact_array import ExactArray
from attncheck.attention.flags import FlagContext, Flags, pass_through
from attncheck.attention.problem import Computation
from attncheck.attention.step import ErrorContext, Step
from attncheck.spec.rounding import RoundingModel

_STORED_PRODUCTS = 5
"""Roundings of g o k before it is returned: 1 - s, the products, and twice that of y."""


def _exact_exp_minus_abs(gate: ExactArray) -> ExactArray:
    """Return e^-|x|, which never overflows."""
    return (-abs(gate)).exp()


def _exact_sigmoid(problem: Computation, gate: ExactArray) -> ExactArray:
    power = _exact_exp_minus_abs(gate)
    return power.select_where(problem.input_array("gate") < 0, 1.0) / (power + 1)


def _sigmoid(gate: Real) -> Real:
    value: Real = np.exp(np.minimum(gate, 0)) / (1 + np.exp(-np.abs(gate)))
    return value


def _sigmoid_with_error(at: ErrorContext, gate: Operand) -> Operand:
    value, rounding = at.value, at.rounding
    exponent = 2 * rounding.sum_unit * np.abs(gate.value) * _sigmoid(-gate.value)
    stored, floor = max(2 * rounding.compute_unit, rounding.output_unit), 2 * _storage_underflow(rounding)
    relative = rounding.tanh_error + stored + exponent
    variance = (value * (rounding.tanh_error + exponent)) ** 2 + (value * stored) ** 2 + floor**2
    return Operand(value, value * relative * (1 + 8 * rounding.coarsest_unit) + floor, variance)


def _storage_underflow(rounding: RoundingModel) -> float:
    return max(rounding.score_underflow, rounding.output_underflow)


def _exact_sigmoid_slope(_: Computation, gate: ExactArray) -> ExactArray:
    power = _exact_exp_minus_abs(gate)
    return power / ((power + 1) * (power + 1))


def _sigmoid_slope_value(_: Computation, gate: Real) -> Real:
    return _sigmoid(gate) * _sigmoid(-gate)


def _sigmoid_slope_with_error(at: ErrorContext, gate: Operand) -> Operand:
    rounding, steep = at.rounding, np.abs(np.tanh(gate.value / 2))  # |1 - 2s|
    sigmoid = _sigmoid_with_error(
        ErrorContext(at.problem, rounding, lambda: _sigmoid(gate.value), at.walk_with_rounding), gate
    )
    of_sigmoid, variance = sigmoid.max_error_and_variance
    unit, floor = 4 * rounding.compute_unit, 2 * _storage_underflow(rounding)
    moved = steep * of_sigmoid + of_sigmoid**2
    variance = steep**2 * variance + variance**2 + (unit * at.value) ** 2 + floor**2
    return Operand(at.value, moved + unit * (at.value + moved) + floor, variance)


def _grad_context_with_error(at: ErrorContext, grad_output: Operand, sigmoid: Operand) -> Operand:
    (unit, underflow), size = gradient_storage_rounding(at.rounding), np.abs(at.value)
    max_error, variance = _product_error_and_variance(grad_output, sigmoid)
    max_error = max_error + unit * (size + max_error) + underflow
    return Operand(at.value, max_error, variance + (unit * size) ** 2 + underflow**2)


def _bound_grad_gate(
    at: ErrorContext, grad_output: Operand, context: BoundedStage | Operand, slope: Operand
) -> BoundedStage:
    (unit, underflow), size, gradient = (
        gradient_storage_rounding(at.rounding),
        np.abs(at.value),
        np.abs(grad_output.value),
    )
    max_error, variance = _product_error_and_variance(_add_storage_error(at, context), slope)
    max_error, variance = gradient * max_error, gradient**2 * variance
    floor = (
        _STORED_PRODUCTS * underflow * (1 + gradient) * (1 + np.abs(context.value) + context.max_error_and_variance[0])
    )
    max_error = max_error + _STORED_PRODUCTS * unit * (size + max_error) * (1 + 8 * at.rounding.coarsest_unit) + floor
    return _bound_stored_result(at, max_error, variance + _STORED_PRODUCTS * (unit * size) ** 2, floor)


def _add_storage_error(at: ErrorContext, context: BoundedStage | Operand) -> BoundedStage | Operand:
    """Add the rounding of storage to a returned context: the gate may multiply it before it is stored."""
    if isinstance(context, BoundedStage):
        return context
    moved = at.rounding.output_unit * np.abs(context.value) + at.rounding.output_underflow
    return Operand(context.value, moved, moved**2)


def _product_error_and_variance(first: BoundedStage | Operand, second: Operand) -> tuple[Real, Real]:
    """Return the largest error of a product, element by element, before it is rounded, and its variance."""
    of_first, variance_of_first = first.max_error_and_variance
    of_second, variance_of_second = second.max_error_and_variance
    first_size, second_size = np.abs(first.value), np.abs(second.value)
    variance = variance_of_first * (second_size**2 + variance_of_second) + first_size**2 * variance_of_second
    return of_first * second_size + (first_size + of_first) * of_second, variance


def _bound_stored_result(at: ErrorContext, max_error: Real, variance: Real, floor: Real | float) -> BoundedStage:
    """Return a result with its bound, after the roundings of its storage."""
    count, unit, underflow = at.rounding.output_count, at.rounding.output_unit, at.rounding.output_underflow
    size = np.abs(at.value)
    max_error = max_error + count * unit * (size + max_error) + underflow
    return BoundedStage(
        at.value, make_bound(at.value, max_error, variance + count * (unit * size) ** 2, floor + underflow)
    )


def _propagate_product_flags(_: FlagContext, *flags: Flags) -> Flags:
    reached: Flags = np.logical_or.reduce(np.broadcast_arrays(*flags))
    return reached


SIGMOID = Step(
    _exact_sigmoid,
    _sigmoid_with_error,
    propagate_flags=pass_through,
    exact_magnitude=abs,
)
SIGMOID_SLOPE = Step(
    _exact_sigmoid_slope,
    _sigmoid_slope_with_error,
    propagate_flags=pass_through,
    evaluate_in_float64=_sigmoid_slope_value,
    exact_magnitude=abs,
)
GATED_OUTPUT = Step(
    lambda _, context, sigmoid: context * sigmoid,
    lambda at, context, sigmoid: _bound_stored_result(
        at, *_product_error_and_variance(_add_storage_error(at, context), sigmoid), 0.0
    ),
    propagate_flags=_propagate_product_flags,
)
GRAD_CONTEXT = Step(
    lambda _, grad_output, sigmoid: grad_output * sigmoid,
    _grad_context_with_error,
    propagate_flags=_propagate_product_flags,
)
GRAD_GATE = Step(
    lambda _, grad_output, context, slope: grad_output * context * slope,
    _bound_grad_gate,
    propagate_flags=_propagate_product_flags,
)
