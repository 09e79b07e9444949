"""What numbers are compared with: the exact ones, and how far from them a document's own may lie.

A document's number was computed from inputs that it may print rounded, in a precision that it may declare
(``computed_in``), and then printed. The first is what ``attention.radii`` allows for, and inputs that were rounded to
that precision belong to it. The second has a bound like that of any implementation: the bound of the widest rounding
model in the dtype, from the document's inputs as that dtype stores them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.errors import Ball
from attncheck.attention.radii import propagate
from attncheck.judging.compare import index_of_largest
from attncheck.judging.truth import Truth, is_open, truth_of_case
from attncheck.quantities import QUANTITIES
from attncheck.reading.canonical import AttentionProblem, canonical_form
from attncheck.reading.case import Case, Expected
from attncheck.reading.dtypes import rounded_once
from attncheck.reading.inputs import Inputs, convert_inputs, make_exact_inputs
from attncheck.reading.lowered import lowered

Array = NDArray[Any]
Real = NDArray[np.float64]

CLASS_OF_DOCUMENT = {"float64": "native", "float32": "native", "bfloat16": "eager_pre", "float16": "eager_pre"}
"""The class that holds all others in a dtype: nobody knows how a document's code was run."""


@dataclass(frozen=True, eq=False)
class Target:
    """What one expectation is compared with; each is NaN where there is no such number.

    ``exact`` are the exact numbers, ``propagated`` is what the inputs' rounding can move them by, ``document`` the
    largest error of the precision that the document was computed in, and 0 where none is declared.
    """

    exact: Real
    propagated: Real
    document: Real

    @property
    def moved(self) -> Real:
        """How far the number may lie from the exact one before it was printed."""
        return self.propagated + self.document


@dataclass(frozen=True, eq=False)
class Reference:
    """A case in a dtype as the reference for numbers; what is worked out for a precision is kept."""

    case: Case
    inputs: Inputs
    truth: Truth
    _balls: dict[str | None, tuple[Mapping[str, Ball], Inputs]] = field(default_factory=dict)
    _documents: dict[str, tuple[Truth, Inputs]] = field(default_factory=dict)

    def target(self, expected: Expected, computed_in: str | None) -> Target:
        """Return what an expectation is compared with, computed in a precision; None for the exact answer itself."""
        nothing = np.full(expected.shape, np.nan)
        if expected.of not in self.truth.exact:
            return Target(nothing, nothing, nothing)
        exact = self.truth.exact[expected.of]
        values = np.where(np.isfinite(exact.radius), exact.high, np.nan)
        document = np.zeros(expected.shape) if computed_in is None else self._document(expected, computed_in)
        propagated = self._propagated(expected, computed_in)
        return Target(derived(expected, values, self.inputs), propagated, document)

    def why_open(self, expected: Expected, target: Target, index: tuple[int, ...]) -> str:
        """Say why a number cannot be compared with anything."""
        truth = self.truth
        if expected.of in truth.exact and np.isfinite(target.exact[index]):
            if np.isnan(target.propagated[index]):
                return "the rounding of the inputs can move it by any amount"
            if np.isnan(target.document[index]):
                return f"no finite bound is known for its error in {self.case.computed_in}"
        if expected.of not in truth.exact:
            return f"there is no exact answer: {truth.outside}"
        at = index if expected.name == expected.of else index_of_largest(~np.isfinite(truth.exact[expected.of].radius))
        return f"there is no exact answer: {truth.why_open(expected.of, at)}"

    def _propagated(self, expected: Expected, computed_in: str | None) -> Real:
        if computed_in not in self._balls:
            case, inputs = self.case, self.inputs
            if computed_in is not None:
                inputs = convert_inputs(case, make_exact_inputs(case), self.truth.dtype, computed_in)
            # Of a canonical form the radii of what became the mask say nothing; all numbers' are laid out alike.
            counts = {name: array for name, array in inputs.arrays.items() if case.input_specs[name].whole}
            around = AttentionProblem(dict(case.options), {**inputs.radius, **counts})
            operation, around = lowered(case.operation, around)
            radius = canonical_form(operation, around.options, around.inputs).inputs
            found = propagate(self.truth.operation, self.truth.options, Inputs(self.truth.inputs, radius))
            self._balls[computed_in] = found, inputs
        balls, inputs = self._balls[computed_in]
        ball = balls[expected.of]
        value, radius_of_stage = ball.value, ball.radius
        if expected.name != expected.of:
            with np.errstate(all="ignore"):
                radius_of_stage = QUANTITIES[expected.name].radius(ball.radius, value, inputs.arrays, inputs.radius)
            value = derived(expected, value, inputs)
        # Where the value is infinite or NaN no radius applies: it has to be the same.
        open_ = np.isfinite(value) & ~np.isfinite(radius_of_stage)
        return np.where(open_, np.nan, np.where(np.isfinite(radius_of_stage), radius_of_stage, 0.0))

    def _document(self, expected: Expected, computed_in: str) -> Real:
        """Return the largest error of a document that was computed in a precision."""
        if computed_in not in self._documents:
            truth, inputs = self.truth, self.inputs
            if computed_in != truth.dtype:
                inputs = convert_inputs(self.case, make_exact_inputs(self.case), computed_in)
                truth = truth_of_case(self.case, computed_in, inputs, store=truth.store)
            self._documents[computed_in] = truth, inputs
        truth, inputs = self._documents[computed_in]
        value = np.full(expected.shape, np.nan)
        if expected.of in truth.exact:
            value = derived(expected, truth.exact[expected.of].high, Inputs(_as_float64(inputs), {}))
        rounded = rounded_once(value, computed_in)
        return largest_error(expected, truth, CLASS_OF_DOCUMENT[computed_in], inputs, rounded)


def derived(expected: Expected, stage: Array, inputs: Inputs) -> Array:
    """Return the quantity that is expected: the stage itself, or what is derived from it."""
    if expected.name == expected.of:
        return stage
    with np.errstate(all="ignore"):
        return QUANTITIES[expected.name].compute(stage, inputs.arrays)


def largest_error(expected: Expected, truth: Truth, rounding_model: str, inputs: Inputs, value: Array) -> Real:
    """Return the largest error of a class, NaN where nothing is known of it.

    A derived quantity inherits its stage's, and rounds once more: ``value``, in its own dtype.
    """
    if expected.of not in truth.exact:
        return np.full(expected.shape, np.nan)
    exact, bound = truth.exact[expected.of], truth.bounds(rounding_model)[expected.of]
    max_error = np.where(is_open(exact, bound, truth.dtype_of(expected.of)), np.nan, bound.max_error)
    if expected.name == expected.of:
        return max_error
    exact_inputs = {name: np.zeros(array.shape) for name, array in inputs.arrays.items()}
    with np.errstate(all="ignore"):
        moved = QUANTITIES[expected.name].radius(max_error, exact.high, _as_float64(inputs), exact_inputs)
        return moved + np.where(np.isfinite(value), np.spacing(np.abs(value)).astype(np.float64), 0.0)


def _as_float64(inputs: Inputs) -> dict[str, Array]:
    return {name: array.astype(np.float64) for name, array in inputs.arrays.items()}
