"""Scores before the softmax: a bias, a mask or a fill, and a softcap, each with its transpose.

The transpose of a bias is the sum over the axes along which it was spread, that of the softcap c tanh(s / c) (Gemma
Team 2024, section 2) a product with sech(s / c)^2. A mask or causality (j <= i) puts -inf, or a number that is given,
in the place of a score, and no gradient goes back through it. ``docs/numerics.md``, section 4.1, has the bounds.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.errors import Ball, Logits, Real
from attncheck.attention.exact_array import ExactArray
from attncheck.attention.flags import FlagContext, Flags, any_over_axes, pass_through
from attncheck.attention.problem import Computation
from attncheck.attention.step import (
    ErrorContext,
    RadiusContext,
    Step,
    biased_logits_from_returned,
    logits_from_returned,
)
from attncheck.spec import Shape
from attncheck.spec.rounding import RoundingModel


def _exact_biased_logits(problem: Computation, before: ExactArray) -> ExactArray:
    if "bias" not in problem.inputs:
        return before
    return before + problem.to_exact_array(problem.broadcast_to_scores(problem.inputs["bias"], before.shape))


def _biased_logits_radius(around: RadiusContext, value: Real, before: Ball) -> Real:
    if "bias" not in around.problem.inputs:
        return before.radius
    radius = around.problem.broadcast_to_scores(around.radii["bias"], value.shape)
    return np.where(np.isinf(value), 0, before.radius + radius)


def _biased_logits_with_error(at: ErrorContext, before: Logits) -> Logits:
    return _add_bias_error(before, at.value, at.rounding) if "bias" in at.problem.inputs else before


def _add_bias_error(error: Logits, after: Real, rounding: RoundingModel) -> Logits:
    before, unit = error.value, rounding.score_unit
    size = np.abs(after)
    max_error = error.max_error + unit * (size + error.max_error) + rounding.score_underflow
    independent = error.independent_variance + unit**2 * size * size
    if rounding.folding == "base":
        # Both terms are multiplied by log2(e) first, and may cancel afterwards.
        parts = np.abs(before) + np.abs(after - before)
        max_error = max_error + rounding.compute_unit * (parts + error.max_error)
        independent = independent + rounding.compute_unit**2 * parts * parts
    shared = error.shared_with_proportion(before)
    floor = error.underflow_error + rounding.score_underflow
    return Logits(after, max_error, independent, shared, floor, restored_mean_error=error.restored_mean_error)


def exact_grad_bias(problem: Computation, grad_logits: ExactArray) -> ExactArray:
    """Return the gradient in the shape of the bias, of rank 2 at least."""
    columns = slice(None, grad_logits.shape[-1] - problem.added_keys)
    return exact_sum_of_grad_logits(grad_logits, problem.input_array("bias").shape, columns)


def lift_shape_and_broadcast_axes(shape: Shape, rank: int) -> tuple[Shape, tuple[int, ...]]:
    """Lift a shape to a rank; return it, and the axes of length 1, along which one number was added everywhere."""
    lifted = (1,) * (rank - len(shape)) + shape
    return lifted, tuple(axis for axis, length in enumerate(lifted) if length == 1)


def exact_sum_of_grad_logits(grad_logits: ExactArray, shape: Shape, columns: slice) -> ExactArray:
    """Add up some columns of the logits' gradient over the axes that a shape has not, or has of length 1."""
    _, axes = lift_shape_and_broadcast_axes(shape, len(grad_logits.shape))
    chosen = grad_logits.map_parts(lambda part: part[..., columns])
    return chosen.sum(*axes).reshaped(np.atleast_2d(np.empty(shape)).shape)


def _propagate_bias_flags(known: FlagContext, before: Flags) -> Flags:
    if "bias" not in known.input_flags:
        return before
    flags = known.input_flags["bias"]
    if known.problem.added_keys and flags.shape[-1] > 1:
        flags = known.problem.broadcast_to_scores(
            flags, (*flags.shape[:-1], flags.shape[-1] + known.problem.added_keys)
        )
    return before | flags


def propagate_grad_bias_flags(known: FlagContext, grad_logits: Flags) -> Flags:
    """Collect the logits over which the bias was broadcast; a row is reached as a whole."""
    shape = known.input_flags["bias"].shape[:-1]
    reached = any_over_axes(grad_logits, tuple(axis for axis, length in enumerate(shape) if length == 1))
    return reached if reached.shape[-1] == 1 else reached[..., : known.problem.key_count_of_case]


BIAS = Step(
    _exact_biased_logits,
    _biased_logits_with_error,
    _biased_logits_radius,
    biased_logits_from_returned,
    _propagate_bias_flags,
)


def _exact_masked_logits(problem: Computation, before: ExactArray) -> ExactArray:
    kept = problem.flag_unmasked_scores(before.shape)
    if problem.mask_fill is None or kept is None:
        return before.mask_forbidden(kept)
    filled = before.select_where(kept, problem.magnitude_if_absolute(problem.mask_fill))
    return filled.with_attended(None if before.attended is None else before.attended | ~kept)


def _masked_logits_radius(around: RadiusContext, _: Real, before: Ball) -> Real:
    kept = around.problem.flag_unmasked_scores(before.value.shape)
    return before.radius if kept is None else np.where(kept, before.radius, 0)


def _masked_logits_with_error(at: ErrorContext, before: Logits) -> Logits:
    replaced = flag_filled_scores(at.problem, before.value.shape)
    return replace(before, value=at.value) if replaced is None else _insert_fill_errors(at, before, at.value, replaced)


def _masked_logits_from_returned(at: ErrorContext, value: Real) -> Logits:
    """Take returned logits; a returned fill is the number that was used."""
    logits, replaced = biased_logits_from_returned(at, value), flag_filled_scores(at.problem, value.shape)
    return (
        logits
        if replaced is None
        else _insert_fill_errors(at, logits, value, replaced & (value == at.problem.mask_fill))
    )


def _insert_fill_errors(at: ErrorContext, logits: Logits, value: Real, replaced: NDArray[np.bool_]) -> Logits:
    assert at.problem.mask_fill is not None
    error = at.rounding.compute_unit * abs(at.problem.mask_fill) if at.rounding.folding == "base" else 0.0
    of_score = np.broadcast_to(logits.value, value.shape)
    return Logits(
        value,
        np.where(replaced, error, logits.max_error),
        np.where(replaced, error**2, logits.independent_variance),
        np.where(replaced, 0.0, logits.shared_with_proportion(np.where(np.isinf(of_score), 0.0, of_score))),
        np.where(replaced, 0.0, logits.underflow_error),
        constant_elements=replaced,
        restored_mean_error=logits.restored_mean_error,
    )


def flag_filled_scores(problem: Computation, shape: Shape) -> NDArray[np.bool_] | None:
    """Return which scores the fill replaces; None without a fill."""
    kept = None if problem.mask_fill is None else problem.flag_unmasked_scores(shape)
    return None if kept is None else ~kept


def zero_filled_gradients(problem: Computation, array: Real) -> Real:
    """Set gradients of scores that a fill replaced to 0, in the scores' shape."""
    replaced = flag_filled_scores(problem, array.shape)
    return array if replaced is None else np.where(replaced, 0.0, array)


def exact_zero_filled_gradients(problem: Computation, gradients: ExactArray) -> ExactArray:
    """Do the same with exact numbers."""
    replaced = flag_filled_scores(problem, gradients.shape)
    return gradients if replaced is None else gradients.select_where(~replaced, 0.0)


def _propagate_mask_flags(known: FlagContext, before: Flags) -> Flags:
    problem = known.problem
    if problem.mask_fill is None or known.attended is None:  # by addition NaN would stay
        return before
    replaced = flag_filled_scores(problem, known.attended.shape)
    return before if replaced is None else before & ~replaced


MASK = Step(
    _exact_masked_logits,
    _masked_logits_with_error,
    _masked_logits_radius,
    _masked_logits_from_returned,
    _propagate_mask_flags,
)


def softcap_of(problem: Computation) -> float | None:
    """Return c; None without a softcap."""
    softcap = problem.options.get("softcap")
    return None if softcap is None else float(softcap)


def _exact_capped_scores(problem: Computation, scores: ExactArray) -> ExactArray:
    if softcap_of(problem) is None:
        return scores
    cap = problem.magnitude_if_absolute(problem.options["softcap"])
    capped = (scores / cap).tanh() * cap
    if capped.attended is None:
        return capped
    return capped.select_where(capped.attended, -cap).with_attended()  # the tanh of -inf is -1


def _capped_scores_radius(around: RadiusContext, _: Real, scores: Ball) -> Real:
    cap = softcap_of(around.problem)
    return scores.radius if cap is None else np.minimum(scores.radius, 2 * cap)


def _capped_scores_with_error(at: ErrorContext, scores: Logits) -> Logits:
    cap = softcap_of(at.problem)
    return scores if cap is None else _add_softcap_error(scores, cap, at.value, at.rounding)


def _add_softcap_error(error: Logits, cap: float, value: Real, rounding: RoundingModel) -> Logits:
    # tanh(-inf) is -1 without any error
    before = np.where(error.value == -np.inf, 0.0, error.value)
    size, unit = abs(cap), rounding.score_unit
    ratio = before / cap
    height, slope = np.abs(np.tanh(ratio)), tanh_derivative(ratio)
    rise = max_tanh_change(ratio, error.max_error / size, rounding)
    relative = rounding.tanh_error + rounding.compute_unit + 2 * unit
    floor = np.asarray(2 * rounding.score_underflow * (1 + size))
    max_error = size * (rise + relative * (height + rise)) * (1 + 8 * rounding.coarsest_unit) + floor
    spread = error.independent_variance + (2 * rounding.compute_unit**2 + unit**2) * before * before
    functional = (rounding.tanh_error**2 + 2 * unit**2) * (size * height) ** 2
    shared = error.shared_with_proportion(before)
    steep = np.minimum(1, slope + 0.77 * np.sqrt(spread + shared) / size) ** 2
    return Logits(
        value, max_error, steep * spread + functional, steep * shared, floor + np.sqrt(steep) * error.underflow_error
    )


def max_tanh_change(argument: Real, moved: Real, rounding: RoundingModel) -> Real:
    """Return dh: how far tanh can move where its argument s / c does, ``moved`` being what the error of s moves it."""
    moved = moved + (2 * rounding.compute_unit + rounding.score_unit) * (np.abs(argument) + moved)
    return np.minimum(1, tanh_derivative(argument) + 0.77 * moved) * moved


def tanh_derivative(argument: Real) -> Real:
    """sech^2 without the cancellation of 1 - tanh^2, nor the overflow of cosh."""
    decay = np.exp(-2 * np.abs(argument))
    slope: Real = 4 * decay / (1 + decay) ** 2
    return slope


def exact_softcap_slope(problem: Computation, scores: ExactArray) -> ExactArray:
    """Return the derivative of the softcap: 1 without one."""
    if softcap_of(problem) is None:
        return scores.from_finite_numbers(np.ones(scores.shape))
    decay = (
        abs(scores / problem.magnitude_if_absolute(problem.options["softcap"])) * -2
    ).exp()  # sech(x) = 2 e^-|x| / (1 + e^-2|x|)
    return decay * 4 / ((decay + 1) * (decay + 1))


def exact_grad_scores(problem: Computation, grad_logits: ExactArray, slope: ExactArray) -> ExactArray:
    """Go back through the softcap."""
    if softcap_of(problem) is None:
        return grad_logits
    return grad_logits * slope


SOFTCAP = Step(
    _exact_capped_scores, _capped_scores_with_error, _capped_scores_radius, logits_from_returned, pass_through
)
