"""Attention sinks: one more logit per head in the denominator of the softmax, and its gradient.

    p_j = e^(s_j) / ( e^(sink) + sum_l e^(s_l) ),    grad_sink = - sum over batch and queries of p_sink sum_j p_j dp_j

The key that is added (``Computation.added_keys``) is of zeros and has a value of zeros, so that its weight adds nothing
to the output. Its logit is the sink itself, behind scale, softcap, bias and mask; only a factor log2(e) rounds it.
OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", arXiv 2508.10925.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.backward_sums import bound_summed_grad_logits, sum_grad_logits
from attncheck.attention.errors import Ball, Logits, Real, zero_nonfinite
from attncheck.attention.exact_array import ExactArray
from attncheck.attention.flags import FlagContext, Flags, any_over_axes
from attncheck.attention.logits import exact_sum_of_grad_logits
from attncheck.attention.problem import Computation, lift_per_head
from attncheck.attention.step import ErrorContext, RadiusContext, Step

Scalar = TypeVar("Scalar", bound=np.generic)
_ADDED_COLUMN = slice(-1, None)


def _exact_logits_with_sinks(problem: Computation, before: ExactArray) -> ExactArray:
    column = lift_per_head(problem.input_array("sinks"))
    return before.replace_at((..., _ADDED_COLUMN), problem.to_exact_array(column, (*before.shape[:-1], 1)))


def _logits_with_sinks_radius(around: RadiusContext, value: Real, before: Ball) -> Real:
    column = np.where(np.isinf(value[..., _ADDED_COLUMN]), 0, lift_per_head(around.radii["sinks"]))
    return _replace_last_column(before.radius + np.zeros_like(value), column)


def _logits_with_sinks_and_error(at: ErrorContext, before: Logits) -> Logits:
    value, sinks = at.value, np.abs(zero_nonfinite(lift_per_head(at.problem.input_array("sinks"))))
    unit = at.rounding.compute_unit if at.rounding.folding == "base" else 0.0
    whole, nothing = np.zeros_like(value), np.zeros((1, 1))
    return Logits(
        value,
        _replace_last_column(before.max_error + whole, unit * sinks),
        _replace_last_column(before.independent_variance + whole, (unit * sinks) ** 2),
        _replace_last_column(before.shared_with_proportion(zero_nonfinite(before.value)) + whole, nothing),
        _replace_last_column(before.underflow_error + whole, nothing),
        constant_elements=None
        if before.constant_elements is None
        else _replace_last_column(before.constant_elements, np.zeros((1, 1), np.bool_)),
        restored_mean_error=before.restored_mean_error,
    )


def _propagate_sink_flags(known: FlagContext, before: Flags) -> Flags:
    keys = (
        known.problem.key_count_of_case + known.problem.added_keys
    )  # a row that is reached as a whole has one flag for all
    whole = np.broadcast_to(before, (*before.shape[:-1], keys))
    return _replace_last_column(
        whole, lift_per_head(known.input_flags["sinks"]) if "sinks" in known.input_flags else np.zeros((1, 1), np.bool_)
    )


SINKS = Step(
    _exact_logits_with_sinks,
    _logits_with_sinks_and_error,
    _logits_with_sinks_radius,
    propagate_flags=_propagate_sink_flags,
)


def _sum_grad_logits_to_sinks(problem: Computation, logits: Real) -> Real:
    shape = problem.input_array("sinks").shape
    return sum_grad_logits(logits, (*shape, 1, 1), _ADDED_COLUMN).reshape(shape)


GRAD_SINKS = Step(
    lambda problem, grad_logits: exact_sum_of_grad_logits(
        grad_logits, (*problem.input_array("sinks").shape, 1, 1), _ADDED_COLUMN
    ),
    lambda at, logits: bound_summed_grad_logits(at, logits, (*at.value.shape, 1, 1), _ADDED_COLUMN),
    propagate_flags=lambda _, grad_logits: any_over_axes(grad_logits[..., _ADDED_COLUMN], (0, 2))[0, :, 0, 0],
    evaluate_in_float64=_sum_grad_logits_to_sinks,
)


def _replace_last_column(array: NDArray[Scalar], column: NDArray[Scalar]) -> NDArray[Scalar]:
    """Replace the column of the key that is added."""
    return np.concatenate([array[..., :-1], np.broadcast_to(column, (*array.shape[:-1], 1))], axis=-1)
