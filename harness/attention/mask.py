"""The mask: -inf, or a number that is given, where a mask or causality (j <= i) forbids the key.

Nothing is rounded. A forbidden score has no error, for its weight must be exactly 0. With a fill f it is the number f
itself, whatever the score was:

    D = 0          base 2: u_c |f|, for it is multiplied by log2(e)

and no gradient goes back through it: the slope of the logit by the score is 0 there, and 1 elsewhere.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.errors import Ball, Logits, Real
from attncheck.attention.exact_array import ExactArray
from attncheck.attention.flags import Flags, Reach
from attncheck.attention.problem import Problem
from attncheck.attention.step import Around, At, Step, stored_behind_bias
from attncheck.spec import Shape


def _exact(problem: Problem, before: ExactArray) -> ExactArray:
    kept = problem.kept(before.shape)
    if problem.fill is None or kept is None:
        return before.restricted_to(kept)
    filled = before.where(kept, problem.number(problem.fill))
    return filled.with_attended(None if before.attended is None else before.attended | ~kept)


def _value(problem: Problem, before: Real) -> Real:
    kept = problem.kept(before.shape)
    return before if kept is None else np.where(kept, before, -np.inf if problem.fill is None else problem.fill)


def _radius(around: Around, _: Real, before: Ball) -> Real:
    kept = around.problem.kept(before.value.shape)
    return before.radius if kept is None else np.where(kept, before.radius, 0)


def _error(at: At, before: Logits) -> Logits:
    replaced = filled(at.problem, before.value.shape)
    return replace(before, value=at.value) if replaced is None else _with_fill(at, before, at.value, replaced)


def _stored(at: At, value: Real) -> Logits:
    """Take what was returned; a fill that was returned is the number that was used."""
    logits, replaced = stored_behind_bias(at, value), filled(at.problem, value.shape)
    return logits if replaced is None else _with_fill(at, logits, value, replaced & (value == at.problem.fill))


def _with_fill(at: At, logits: Logits, value: Real, replaced: NDArray[np.bool_]) -> Logits:
    assert at.problem.fill is not None
    error = at.rounding.compute_unit * abs(at.problem.fill) if at.rounding.folding == "base" else 0.0
    of_score = np.broadcast_to(logits.value, value.shape)
    return Logits(
        value,
        np.where(replaced, error, logits.max_error),
        np.where(replaced, error**2, logits.independent),
        np.where(replaced, 0.0, logits.shared_with_proportion(np.where(np.isinf(of_score), 0.0, of_score))),
        np.where(replaced, 0.0, logits.floor),
        constant=replaced,
    )


def filled(problem: Problem, shape: Shape) -> NDArray[np.bool_] | None:
    """Return where the fill stands in the place of a score; None where there is none."""
    kept = None if problem.fill is None else problem.kept(shape)
    return None if kept is None else ~kept


def through_mask(problem: Problem, array: Real) -> Real:
    """Set to 0, in the scores' shape, what goes back through a score that a fill took the place of."""
    replaced = filled(problem, array.shape)
    return array if replaced is None else np.where(replaced, 0.0, array)


def exact_through_mask(problem: Problem, gradients: ExactArray) -> ExactArray:
    """Do the same with exact numbers."""
    replaced = filled(problem, gradients.shape)
    return gradients if replaced is None else gradients.where(~replaced, 0.0)


def _reach(known: Reach, before: Flags) -> Flags:
    problem = known.problem
    if problem.fill is None or known.attended is None:  # by addition NaN would stay
        return before
    replaced = filled(problem, known.attended.shape)
    return before if replaced is None else before & ~replaced


MASK = Step(_exact, _value, _error, _radius, _stored, _reach)
