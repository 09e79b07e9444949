"""Linear layers: the projections of query, key and value, the merge of the heads, and the output projection.

``docs/numerics.md`` has the bound of a layer (section 4.2). The errors of one context row have common causes, its
weights: in the output projection their scales add up as if all of one sign (5); those of different heads are
independent. Vaswani et al. 2017, section 3.2.2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.errors import (
    SUMMATION_ORDER_FACTOR,
    Ball,
    BoundedStage,
    Operand,
    Real,
    matmul_variance,
    relative_sum_error,
)
from attncheck.attention.exact_array import ExactArray, concatenate
from attncheck.attention.flags import FlagContext, Flags, any_over_axes
from attncheck.attention.problem import Computation
from attncheck.attention.step import ErrorContext, RadiusContext, Step
from attncheck.spec.rounding import RoundingModel

Scalar = TypeVar("Scalar", bound=np.generic)


def projection_step(name: str) -> Step:
    """Return the projection of query, key or value into heads: (B, L, E) -> (B, H, L, D), and the key that is added."""

    def exact(problem: Computation) -> ExactArray:
        projected = exact_projection(problem)
        if name == "query" or not problem.added_keys:
            return projected
        zeros = np.zeros((*projected.shape[:-2], problem.added_keys, projected.shape[-1]))
        return concatenate([projected, projected.from_finite_numbers(zeros)], axis=-2)

    def exact_projection(problem: Computation) -> ExactArray:
        inputs, weight = problem.input_array(name), problem.input_array(f"{name}_weight")
        heads = problem.count_heads_of_projection(name)
        per_head = weight.reshape(weight.shape[0], heads, -1).swapaxes(0, 1)  # (E, H*D) -> (H, E, D)
        projected = problem.to_exact_array(inputs[:, np.newaxis]) @ problem.to_exact_array(per_head)  # (B, H, L, D)
        if f"{name}_bias" not in problem.inputs:
            return projected
        bias = problem.input_array(f"{name}_bias").reshape(heads, 1, -1)  # (H*D,) -> (H, 1, D)
        return projected + problem.to_exact_array(bias, projected.shape)

    def value(problem: Computation) -> Real:
        projected: Real = problem.input_array(name) @ problem.input_array(f"{name}_weight")
        if f"{name}_bias" in problem.inputs:
            projected = projected + problem.inputs[f"{name}_bias"]
        return problem.with_added_key(name, split_heads(projected, problem.count_heads_of_projection(name)))

    def error(at: ErrorContext) -> Operand:
        inputs, bias = at.problem.inputs, at.problem.inputs.get(f"{name}_bias")
        weight, merged = inputs[f"{name}_weight"], merge_heads(at.problem.without_added_key(name, at.value))
        flat, heads = bound_linear_layer(Operand(inputs[name]), weight, bias, merged, at.rounding), at.value.shape[1]
        return Operand(
            at.value,
            *(at.problem.with_added_key(name, split_heads(part, heads)) for part in flat.max_error_and_variance),
        )

    def radius(around: RadiusContext, _: Real) -> Real:
        per_head = split_heads(
            _linear_layer_radius(around, around.input_ball(name), name), around.problem.count_heads_of_projection(name)
        )
        return around.problem.with_added_key(name, per_head)

    def reach(known: FlagContext) -> Flags:
        flags = split_heads(
            _propagate_linear_layer_flags(known, known.input_flags[name], name),
            known.problem.count_heads_of_projection(name),
        )
        return known.problem.with_added_key(name, flags)

    return Step(exact, error, radius, propagate_flags=reach, evaluate_in_float64=value)


def _exact_output_projection(problem: Computation, context: ExactArray) -> ExactArray:
    merged = context.map_parts(merge_heads)
    if "output_weight" not in problem.inputs:
        return merged
    output = merged @ problem.to_exact_array(problem.input_array("output_weight"))
    if "output_bias" not in problem.inputs:
        return output
    return output + problem.to_exact_array(problem.input_array("output_bias"), output.shape)


def _output_projection_radius(around: RadiusContext, _: Real, context: Ball) -> Real:
    merged = context.map_arrays(merge_heads)
    return _linear_layer_radius(around, merged, "output") if "output_weight" in around.problem.inputs else merged.radius


def _output_projection_with_error(at: ErrorContext, context: BoundedStage | Operand) -> BoundedStage | Operand:
    exact, weight, bias = at.value, at.problem.inputs.get("output_weight"), at.problem.inputs.get("output_bias")
    if isinstance(context, Operand):
        merged = context.map_arrays(merge_heads)
        if weight is None:
            return replace(merged, value=exact)
        return bound_linear_layer(merged, weight, bias, exact, at.rounding)
    bound = context.final_bound
    if weight is None:
        return BoundedStage(exact, bound.map_arrays(merge_heads))
    heads, width = context.value.shape[1], context.value.shape[-1]
    per_head = bound.sigma @ np.abs(weight).reshape(heads, width, -1)  # (B, H, Lq, Eo)
    inputs = Operand(merge_heads(context.value), merge_heads(bound.max_error))
    return bound_linear_layer(inputs, weight, bias, exact, at.rounding, (per_head**2).sum(axis=1))


def _propagate_output_projection_flags(known: FlagContext, context: Flags) -> Flags:
    merged = merge_heads(context)
    return _propagate_linear_layer_flags(known, merged, "output") if "output_weight" in known.input_flags else merged


OUTPUT_PROJECTION = Step(
    _exact_output_projection,
    _output_projection_with_error,
    _output_projection_radius,
    propagate_flags=_propagate_output_projection_flags,
)


def _linear_layer_radius(around: RadiusContext, inputs: Ball, name: str) -> Real:
    weight = around.input_ball(f"{name}_weight")
    radius = inputs.matmul_radius(weight.value, weight.radius)
    return radius + around.radii[f"{name}_bias"] if f"{name}_bias" in around.problem.inputs else radius


def _propagate_linear_layer_flags(known: FlagContext, inputs: Flags, name: str) -> Flags:
    flags: Flags = any_over_axes(inputs, -1) | any_over_axes(known.input_flags[f"{name}_weight"], -2)
    return flags | known.input_flags[f"{name}_bias"] if f"{name}_bias" in known.input_flags else flags


def merge_heads(array: NDArray[Scalar]) -> NDArray[Scalar]:
    """Lay the heads side by side: (B, H, L, D) -> (B, L, H*D).

    Example:
        >>> merge_heads(np.arange(8).reshape(1, 2, 2, 2)).tolist()  # 2 heads of 2 positions and 2 elements
        [[[0, 1, 4, 5], [2, 3, 6, 7]]]
    """
    batch, heads, length, width = array.shape
    return array.swapaxes(1, 2).reshape(batch, length, heads * width)


def split_heads(array: NDArray[Scalar], heads: int) -> NDArray[Scalar]:
    """Take the heads apart: (B, L, H*D) -> (B, H, L, D)."""
    batch, length, width = array.shape
    return array.reshape(batch, length, heads, width // heads).swapaxes(1, 2)


def bound_linear_layer(
    inputs: Operand, weight: Real, bias: Real | None, exact: Real, rounding: RoundingModel, carried: Real | None = None
) -> Operand:
    """Bound inputs (..., L, E) times weight (E, F) plus bias (F,); returns ``exact`` (..., L, F) with its error.

    There may be a weight for each head: inputs (B, H, L, E) or (B, 1, L, E), weight (H, E, F), exact (B, H, L, F).
    ``carried`` is what the inputs' own variance adds, if they are not independent of each other.
    """
    length, u_acc, size = weight.shape[-2], rounding.accumulate_unit, np.abs(weight)
    offset = np.zeros(weight.shape[-1]) if bias is None else bias
    product = exact - offset
    magnitude = inputs.magnitude @ size + np.abs(offset)
    max_error = relative_sum_error(rounding, length + 1) * magnitude * (1 + 8 * rounding.coarsest_unit)
    if rounding.product_unit:
        max_error = (
            max_error
            + rounding.product_error * (inputs.magnitude @ size)
            + flushed_factor_error(inputs.magnitude, size, rounding)
        )
    if inputs.max_error is not None:
        max_error = max_error + inputs.max_error @ size
    squares = (inputs.value * inputs.value) @ (weight * weight)
    variance = matmul_variance(rounding, length, product * product, squares)
    cut = length if rounding.cuts_sums else 1
    # The bias is added last, or the sum starts from it (as in a fused linear layer of few rows).
    variance = np.maximum(
        variance + u_acc**2 * exact * exact,
        variance + SUMMATION_ORDER_FACTOR * u_acc**2 * length * np.maximum(offset * offset + offset * product, 0) * cut,
    )
    if carried is None and inputs.variance is not None:
        carried = inputs.variance @ (weight * weight)
    if carried is not None:
        variance = variance + carried
    stored = 1 if bias is None else 2
    if rounding.output_unit > u_acc:
        unit = rounding.output_unit
        max_error = max_error + unit * ((np.abs(product) + max_error) * (stored - 1))
        max_error = max_error + unit * (np.abs(exact) + max_error)
        variance = variance + unit**2 * (exact * exact + (stored - 1) * product * product)
    lost, flushed = 2 * (length + 2) * rounding.accumulate_underflow, stored * rounding.output_underflow
    # What underflows is rounded like anything else, by at most eta.
    return Operand(exact, max_error + lost + flushed, variance + lost**2 + flushed**2)


def flushed_factor_error(left: Real, right: Real, rounding: RoundingModel) -> Real:
    """Bound the error of a product of two matrices of magnitudes by factors that are flushed to zero."""
    lost: Real = rounding.product_underflow * (left.sum(axis=-1, keepdims=True) + right.sum(axis=-2, keepdims=True))
    return lost
