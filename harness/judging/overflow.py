"""Scores that are too large for the format in which a rounding model stores them, though what they become is not.

An implementation that stores the product of query and key in float16 before it scales it makes infinity of 70,000, and
NaN of the row behind it. Its rounding model allows that, as one that keeps scores in float32 does not. What follows
from such a score has no bound: the score itself, its row of weights, and in gradients every sum over the rows of its
head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.errors import Bound
from attncheck.attention.formats import FORMATS
from attncheck.attention.problem import Problem
from attncheck.attention.rounding import RoundingModel
from attncheck.attention.walk import value_walk
from attncheck.judging.undefined import follow_scores

Array = NDArray[Any]
_WIDE_RANGE = 1e30
"""Formats that reach beyond hold the products that others lose."""
_NEARLY = 1 - 2.0**-8
"""A product this near to the largest number may be rounded, or summed up, beyond it."""


def without_overflown(
    operation: str,
    options: Mapping[str, Any],
    inputs: Mapping[str, Array],
    rounding: RoundingModel,
    raw_scores: Array | None,
    bounds: Mapping[str, Bound],
) -> dict[str, Bound]:
    """Return the bounds, infinite where they follow from a score that may have overflowed in storage.

    ``raw_scores`` are the exact ones; without them they are worked out from query and key.
    """
    stored = FORMATS[rounding.dtype]
    if rounding.score_unit != stored.unit_roundoff or stored.largest > _WIDE_RANGE:
        return dict(bounds)
    raw = _raw_scores(operation, inputs) if raw_scores is None else raw_scores
    if raw is None:
        return dict(bounds)
    flags = np.abs(raw) > _NEARLY * stored.largest
    if not flags.any():
        return dict(bounds)
    reached = follow_scores(operation, options, inputs, flags)
    return {stage: _infinite(bound, reached[stage]) if stage in reached else bound for stage, bound in bounds.items()}


def _raw_scores(operation: str, inputs: Mapping[str, Array]) -> Array | None:
    """Return the products of query and key of ``attention_gradients``, in float64."""
    if operation != "attention_gradients":
        return None
    posed = {name: inputs[name] for name in ("query", "key")}
    with np.errstate(all="ignore"):
        raw: Array = value_walk(Problem.of(operation, {}, posed).in_float64()).node("raw_scores")
    return raw


def _infinite(bound: Bound, flags: NDArray[np.bool_]) -> Bound:
    where = np.broadcast_to(flags, bound.max_error.shape)
    return replace(
        bound, max_error=np.where(where, np.inf, bound.max_error), sigma=np.where(where, np.inf, bound.sigma)
    )
