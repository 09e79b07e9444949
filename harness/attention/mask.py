"""The mask: -inf where a mask or causality (j <= i) forbids the key.

Nothing is rounded. A forbidden score has no error, for its weight must be exactly 0.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from attncheck.attention.balls import BallArray
from attncheck.attention.errors import Ball, Logits, Real
from attncheck.attention.flags import handed_on
from attncheck.attention.problem import Problem
from attncheck.attention.step import Around, At, Step, stored_behind_bias


def _exact(problem: Problem, before: BallArray) -> BallArray:
    return before.restricted_to(problem.allowed(before.shape))


def _value(problem: Problem, before: Real) -> Real:
    allowed = problem.allowed(before.shape)
    return before if allowed is None else np.where(allowed, before, -np.inf)


def _radius(around: Around, _: Real, before: Ball) -> Real:
    allowed = around.problem.allowed(before.value.shape)
    return before.radius if allowed is None else np.where(allowed, before.radius, 0)


def _error(at: At, before: Logits) -> Logits:
    return replace(before, value=at.value) if at.problem.is_masked else before


MASK = Step(_exact, _value, _error, _radius, stored_behind_bias, handed_on)
