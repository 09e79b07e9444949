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

from attncheck.attention.backward import GradLogits
from attncheck.attention.backward_sums import bound_of_summed_logits, value_of_summed_logits
from attncheck.attention.errors import Ball, BoundedStage, Logits, Real, finite
from attncheck.attention.exact_array import ExactArray
from attncheck.attention.flags import Flags, Reach, any_of
from attncheck.attention.logits import exact_sum_of_logits
from attncheck.attention.problem import Computation, per_head
from attncheck.attention.step import ErrorContext, RadiusContext, Step

Scalar = TypeVar("Scalar", bound=np.generic)
_ADDED = slice(-1, None)


def _exact(problem: Computation, before: ExactArray) -> ExactArray:
    column = per_head(problem.array("sinks"))
    return before.with_part((..., _ADDED), problem.exact(column, (*before.shape[:-1], 1)))


def _radius(around: RadiusContext, value: Real, before: Ball) -> Real:
    column = np.where(np.isinf(value[..., _ADDED]), 0, per_head(around.radii["sinks"]))
    return _with_column(before.radius + np.zeros_like(value), column)


def _error(at: ErrorContext, before: Logits) -> Logits:
    value, sinks = at.value, np.abs(finite(per_head(at.problem.array("sinks"))))
    unit = at.rounding.compute_unit if at.rounding.folding == "base" else 0.0
    whole, nothing = np.zeros_like(value), np.zeros((1, 1))
    return Logits(
        value,
        _with_column(before.max_error + whole, unit * sinks),
        _with_column(before.independent + whole, (unit * sinks) ** 2),
        _with_column(before.shared_with_proportion(finite(before.value)) + whole, nothing),
        _with_column(before.floor + whole, nothing),
        constant=None if before.constant is None else _with_column(before.constant, np.zeros((1, 1), np.bool_)),
        given_back=before.given_back,
    )


def _reach(known: Reach, before: Flags) -> Flags:
    keys = known.problem.own_keys + known.problem.added_keys  # a row that is reached as a whole has one flag for all
    whole = np.broadcast_to(before, (*before.shape[:-1], keys))
    return _with_column(whole, per_head(known.flags["sinks"]) if "sinks" in known.flags else np.zeros((1, 1), np.bool_))


SINKS = Step(_exact, _error, _radius, reach=_reach)


def _exact_gradient(problem: Computation, grad_logits: ExactArray) -> ExactArray:
    return exact_sum_of_logits(grad_logits, (*problem.array("sinks").shape, 1, 1), _ADDED)


def _value_of_gradient(problem: Computation, logits: Real) -> Real:
    shape = problem.array("sinks").shape
    return value_of_summed_logits(logits, (*shape, 1, 1), _ADDED).reshape(shape)


def _error_of_gradient(at: ErrorContext, logits: GradLogits) -> BoundedStage:
    return bound_of_summed_logits(at, logits, (*at.value.shape, 1, 1), _ADDED)


def _reach_of_gradient(_: Reach, grad_logits: Flags) -> Flags:
    return any_of(grad_logits[..., _ADDED], (0, 2))[0, :, 0, 0]


GRAD_SINKS = Step(_exact_gradient, _error_of_gradient, reach=_reach_of_gradient, value=_value_of_gradient)


def _with_column(array: NDArray[Scalar], column: NDArray[Scalar]) -> NDArray[Scalar]:
    """Replace the column of the key that is added."""
    return np.concatenate([array[..., :-1], np.broadcast_to(column, (*array.shape[:-1], 1))], axis=-1)
