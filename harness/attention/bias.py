"""A bias on the scores, s + b, and its transpose: the sum over the axes along which it was spread.

D <- D + u_s (|s + b| + D) + eta_s          base 2: + u_c (|s| + |b| + D)
"""

from __future__ import annotations

import numpy as np

from attncheck.attention.errors import Ball, Logits, Real
from attncheck.attention.exact_array import ExactArray
from attncheck.attention.flags import Flags, Reach, any_of
from attncheck.attention.problem import Problem
from attncheck.attention.rounding import RoundingModel
from attncheck.attention.step import Around, At, Step, stored_behind_bias
from attncheck.spec import Shape


def _exact(problem: Problem, before: ExactArray) -> ExactArray:
    if "bias" not in problem.inputs:
        return before
    return before + problem.exact(problem.on_scores(problem.inputs["bias"], before.shape))


def _value(problem: Problem, before: Real) -> Real:
    return before + problem.on_scores(problem.inputs["bias"], before.shape) if "bias" in problem.inputs else before


def _radius(around: Around, value: Real, before: Ball) -> Real:
    if "bias" not in around.problem.inputs:
        return before.radius
    radius = around.problem.on_scores(around.radii["bias"], value.shape)
    return np.where(np.isinf(value), 0, before.radius + radius)


def _error(at: At, before: Logits) -> Logits:
    return _biased(before, at.value, at.rounding) if "bias" in at.problem.inputs else before


def _biased(error: Logits, after: Real, rounding: RoundingModel) -> Logits:
    before, unit = error.value, rounding.score_unit
    size = np.abs(after)
    max_error = error.max_error + unit * (size + error.max_error) + rounding.score_underflow
    independent = error.independent + unit**2 * size * size
    if rounding.folding == "base":
        # Both terms are multiplied by log2(e) first, and may cancel afterwards.
        parts = np.abs(before) + np.abs(after - before)
        max_error = max_error + rounding.compute_unit * (parts + error.max_error)
        independent = independent + rounding.compute_unit**2 * parts * parts
    shared = error.shared_with_proportion(before)
    return Logits(after, max_error, independent, shared, error.floor + rounding.score_underflow)


def exact_grad_bias(problem: Problem, grad_logits: ExactArray) -> ExactArray:
    """Return the gradient in the shape of the bias, of rank 2 at least."""
    own = slice(None, grad_logits.shape[-1] - problem.added_keys)
    return exact_sum_of_logits(grad_logits, problem.array("bias").shape, own)


def spread_over(shape: Shape, rank: int) -> tuple[Shape, tuple[int, ...]]:
    """Lift a shape to a rank; return it, and the axes of length 1, along which one number was added everywhere."""
    lifted = (1,) * (rank - len(shape)) + shape
    return lifted, tuple(axis for axis, length in enumerate(lifted) if length == 1)


def exact_sum_of_logits(grad_logits: ExactArray, shape: Shape, columns: slice) -> ExactArray:
    """Add up some columns of the logits' gradient over the axes that a shape has not, or has of length 1."""
    _, axes = spread_over(shape, len(grad_logits.shape))
    chosen = grad_logits.rearranged(lambda part: part[..., columns])
    return chosen.sum(*axes).reshaped(np.atleast_2d(np.empty(shape)).shape)


def _reach(known: Reach, before: Flags) -> Flags:
    if "bias" not in known.flags:
        return before
    flags = known.flags["bias"]
    if known.problem.added_keys and flags.shape[-1] > 1:
        flags = known.problem.on_scores(flags, (*flags.shape[:-1], flags.shape[-1] + known.problem.added_keys))
    return before | flags


def reach_of_grad_bias(known: Reach, grad_logits: Flags) -> Flags:
    """Collect what the bias was spread over; a row is reached as a whole."""
    shape = known.flags["bias"].shape[:-1]
    reached = any_of(grad_logits, tuple(axis for axis, length in enumerate(shape) if length == 1))
    return reached if reached.shape[-1] == 1 else reached[..., : known.problem.own_keys]


BIAS = Step(_exact, _value, _error, _radius, stored_behind_bias, _reach)
