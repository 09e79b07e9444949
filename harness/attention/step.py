"""A step of attention with all of its rules, as automatic differentiation has rules for every primitive.

Each rule gets the results of the same rule for the steps before, in the order of the graph:

    evaluate_exactly(problem, *arrays)       the proven value, an array of exact numbers
    evaluate_in_float64(problem, *arrays)    the value in float64, if it is not the exact rule in this arithmetic
    propagate_error(at, *states)             the largest error and its statistical scale, from those of the operands
    from_returned(at, array)                 the same of a returned stage: it may have been stored after it was used
    propagate_radius(around, value, *balls)  how far the value moves when every input moves by its radius
    propagate_flags(known, *flags)           the elements that follow from flagged ones, such as ones without a value
    transpose                                another step: its exact rule in the same file, its errors in ``backward_*``

``exact_magnitude`` returns the scale with which a radius is compared, if that is not the sum of absolute terms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from attncheck.attention.balls import Float64Array
from attncheck.attention.errors import ZERO, Ball, Logits, Operand, Real
from attncheck.attention.exact_array import ExactArray
from attncheck.attention.flags import Flags
from attncheck.attention.problem import Computation
from attncheck.spec.rounding import RoundingModel


class NotFiniteError(Exception):
    """A stage that was returned has no value to follow another one from."""


@dataclass(frozen=True, eq=False)
class ErrorContext:
    """The arguments of an error rule in addition to its operands."""

    problem: Computation
    rounding: RoundingModel
    compute_value: Callable[[], Any]
    walk_with_rounding: Callable[[RoundingModel], Any]
    """The walk with the same values from the inputs, in other roundings."""

    @property
    def value(self) -> Any:
        """The value of the step that the rule belongs to, float64."""
        return self.compute_value()

    @property
    def returned_unit_roundoff(self) -> float:
        """The unit roundoff by which a returned stage may differ from the one that was used."""
        return max(self.rounding.score_unit, self.rounding.output_unit)


@dataclass(frozen=True, eq=False)
class RadiusContext:
    """The arguments of a radius rule: a problem, and the radii of its inputs."""

    problem: Computation
    radii: Mapping[str, Real]

    def input_ball(self, name: str) -> Ball:
        """Return an input with its radius."""
        return Ball(self.problem.input_array(name), self.radii[name])


def operand_from_returned(at: ErrorContext, array: Real) -> Operand:
    """Take a returned array, of which all numbers are used, as an operand.

    Raises ``NotFiniteError`` if it holds NaN or infinity.
    """
    if not np.isfinite(array).all():
        raise NotFiniteError
    unit = at.returned_unit_roundoff
    return Operand(array, unit * np.abs(array), (unit * array) ** 2)


def logits_from_returned(at: ErrorContext, value: Real, *, bias: Real | None = None) -> Logits:
    """Take returned logits: a compiler may have handed them on unrounded, or contracted a t + b into one operation.

    Raises ``NotFiniteError`` where they hold NaN or plus infinity.
    """
    attended = value > -np.inf
    allowed = at.problem.flag_allowed(value.shape)
    judged = attended if allowed is None else attended & allowed
    whole = bool(np.isfinite(value).all())
    if not whole and (not np.isfinite(value[judged]).all() or np.isnan(value).any()):
        raise NotFiniteError
    size = np.abs(value) if whole and allowed is None else np.where(judged, np.abs(value), 0.0)
    size = at.returned_unit_roundoff * size  # before it is doubled, or the largest overflow
    # After a bias, a compiler that computes the sum twice may contract only one of the two, and both are rounded.
    size = size * (2 if at.returned_unit_roundoff > at.rounding.accumulate_unit or bias is not None else 1)
    if bias is not None:
        size = size + at.returned_unit_roundoff * np.where(judged, np.abs(np.where(judged, value, 0.0) - bias), 0.0)
    if not whole:
        # What was -inf when it was returned may have been a large number where it was used.
        size = np.where(attended, size, np.inf)
    return Logits(value, size, size * size, ZERO, ZERO)


def biased_logits_from_returned(at: ErrorContext, value: Real) -> Logits:
    """Take returned logits that a bias is part of, and s + b may have been one operation with what was before it."""
    bias = at.problem.inputs.get("bias")
    return logits_from_returned(
        at, value, bias=None if bias is None else at.problem.broadcast_to_scores(bias, value.shape)
    )


def _raise_undefined_rule(*_: Any) -> NoReturn:
    raise NotImplementedError("nothing asks for this rule of this step")


@dataclass(frozen=True)
class Step:
    """The rules of one step."""

    evaluate_exactly: Callable[..., Any]
    propagate_error: Callable[..., Any] = _raise_undefined_rule
    propagate_radius: Callable[..., Any] = _raise_undefined_rule
    from_returned: Callable[[ErrorContext, Real], Any] = operand_from_returned
    propagate_flags: Callable[..., Flags] = _raise_undefined_rule
    evaluate_in_float64: Callable[..., Any] | None = None
    exact_magnitude: Callable[[ExactArray], ExactArray] | None = None

    def value_of(self, problem: Computation, *arrays: Any) -> Any:
        """Evaluate in float64 a problem of ``Float64Array``."""
        if self.evaluate_in_float64 is not None:
            return self.evaluate_in_float64(problem, *arrays)
        return self.evaluate_exactly(problem, *(Float64Array((array,)) for array in arrays)).numbers


@dataclass(frozen=True)
class GraphNode:
    """A step in a graph, and the nodes that it follows from."""

    step: Step
    operands: tuple[str, ...]
