"""The rotary embedding: pairs of elements of queries and keys rotated by their position, and its transpose.

    x' = x c - y s,   y' = y c + x s

The transpose is the rotation by -s. If c is 0, 1 or -1 and s is 0, or the other way round, nothing is rounded; so it
is at position 0, in a past, which comes rotated, and in the key that an input adds. ``docs/numerics.md``, section 4.1,
has the bound; Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding", section 3.4.2;
``contract.py`` says which elements are pairs.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.errors import Ball, Bound, BoundedStage, Operand, Real
from attncheck.attention.exact_array import ExactArray
from attncheck.attention.flags import FlagContext, Flags, any_over_axes
from attncheck.attention.problem import Computation
from attncheck.attention.step import ErrorContext, RadiusContext, Step

Pairs = tuple[NDArray[np.intp], NDArray[np.intp]]


def rotation_step(name: str, sign: int = 1) -> Step:
    """Return the rotation of query or key; backwards with a sign of -1."""

    def exact(problem: Computation, array: ExactArray) -> ExactArray:
        cos, sin = (problem.to_exact_array(problem.input_array(f"{name}_{part}")) for part in ("cos", "sin"))
        first, second = rotary_pair_indices(problem, name)
        x, y = (array.map_parts(partial(np.take, indices=elements, axis=-1)) for elements in (first, second))
        # In an absolute problem a difference is a sum.
        signs = (1, 1) if problem.uses_magnitudes else (-sign, sign)
        turned = array.replace_at((..., first), x * cos + y * sin * signs[0])
        return turned.replace_at((..., second), y * cos + x * sin * signs[1])

    def error(at: ErrorContext, operand: Operand) -> Operand:
        problem = at.problem
        max_error, variance = operand.max_error_and_variance
        moved = _rotated_max_error(at, name, operand.value, max_error)
        cos, sin = (np.abs(table) for table in cos_sin_tables(problem, name))
        pairs = rotary_pair_indices(problem, name)
        carried = _mix_pairs(variance, cos**2, sin**2, pairs)
        return Operand(
            at.value,
            moved,
            carried + _rotation_rounding(at, name, operand.value).variance,
            operand.common_relative_variance,
        )

    def error_of_gradient(at: ErrorContext, finished: BoundedStage) -> BoundedStage:
        cos, sin = (np.abs(table) for table in cos_sin_tables(at.problem, name))
        # The errors of a pair may have causes in common.
        sigma = _mix_pairs(finished.final_bound.sigma, cos, sin, rotary_pair_indices(at.problem, name))
        rounded = np.sqrt(_rotation_rounding(at, name, finished.value).variance)
        max_error = _rotated_max_error(at, name, finished.value, finished.final_bound.max_error)
        return BoundedStage(at.value, Bound(max_error, np.minimum(sigma + rounded, max_error)))

    def radius(around: RadiusContext, _: Real, ball: Ball) -> Real:
        pairs = rotary_pair_indices(around.problem, name)
        cos, sin = (around.input_ball(f"{name}_{part}") for part in ("cos", "sin"))
        moved = _mix_pairs(ball.radius, np.abs(cos.value), np.abs(sin.value), pairs)
        rest = np.abs(ball.value) + ball.radius
        turned = _mix_pairs(rest, cos.radius, sin.radius, pairs)
        unrotated = np.ones(ball.value.shape[-1], dtype=np.bool_)
        unrotated[np.concatenate(pairs)] = False
        turned[..., unrotated] = 0
        return moved + turned

    def reach(known: FlagContext, flags: Flags) -> Flags:
        pairs = rotary_pair_indices(known.problem, name)
        tables = [
            known.input_flags[f"{name}_{part}"] for part in ("cos", "sin") if f"{name}_{part}" in known.input_flags
        ]
        if flags.shape[-1] == 1:
            return flags | any_over_axes(tables[0] | tables[1], -1) if tables else flags
        return _propagate_pair_flags(flags, tables, pairs)

    return Step(exact, error if sign > 0 else error_of_gradient, radius, propagate_flags=reach)


def rotary_pair_indices(problem: Computation, name: str) -> Pairs:
    """Return the indices of the first and of the second elements of all pairs."""
    count = problem.input_array(f"{name}_cos").shape[-1]
    if problem.options.get("rotary_interleaved"):
        return 2 * np.arange(count), 2 * np.arange(count) + 1
    return np.arange(count), np.arange(count) + count


def cos_sin_tables(problem: Computation, name: str) -> tuple[Real, Real]:
    """Return cos and sin of each row, (L, R) or (B, 1, L, R), as they are stored."""
    return problem.input_array(f"{name}_cos"), problem.input_array(f"{name}_sin")


def _mix_pairs(array: Real, own_factor: Real, partner_factor: Real, pairs: Pairs) -> Real:
    """Return a x + b y and a y + b x for every pair; other elements stay."""
    first, second = (array[..., elements] for elements in pairs)
    turned = array.copy()
    turned[..., pairs[0]] = first * own_factor + second * partner_factor
    turned[..., pairs[1]] = second * own_factor + first * partner_factor
    return turned


class _RotationRounding(NamedTuple):
    largest: Real
    variance: Real


def _rotation_rounding(at: ErrorContext, name: str, value: Real) -> _RotationRounding:
    """Return u (|x c| + |y s| + |x'|) plus underflow, and its variance; 0 for elements that are not rounded."""
    problem, pairs = at.problem, rotary_pair_indices(at.problem, name)
    cos, sin = (np.abs(table) for table in cos_sin_tables(problem, name))
    size = np.abs(value)
    terms, result = _mix_pairs(size, cos, sin, pairs), np.abs(at.value)
    underflow = 3 * max(at.rounding.score_underflow, at.rounding.output_underflow)
    rounds = np.zeros(np.broadcast_shapes(value.shape, at.value.shape), dtype=np.bool_)
    some = ~(np.isin(cos, (0, 1)) & np.isin(sin, (0, 1)) & (cos + sin <= 1))
    for elements in pairs:
        rounds[..., elements] = some
    rounds &= terms > 0
    rounded = at.returned_unit_roundoff * (terms + result) + underflow
    variance = at.returned_unit_roundoff**2 * (_mix_pairs(size**2, cos**2, sin**2, pairs) + result**2) + underflow**2
    return _RotationRounding(np.where(rounds, rounded, 0.0), np.where(rounds, variance, 0.0))


def _rotated_max_error(at: ErrorContext, name: str, value: Real, max_error: Real) -> Real:
    cos, sin = (np.abs(table) for table in cos_sin_tables(at.problem, name))
    carried, rounded = (
        _mix_pairs(max_error, cos, sin, rotary_pair_indices(at.problem, name)),
        _rotation_rounding(at, name, value).largest,
    )
    # Roundings of what has an error already: of products and of their difference.
    moved: Real = rounded + carried * np.where(rounded > 0, 1 + 2 * at.returned_unit_roundoff, 1.0)
    return moved * (1 + 8 * at.rounding.coarsest_unit)


def _propagate_pair_flags(flags: Flags, tables: list[Flags], pairs: Pairs) -> Flags:
    reached = flags.copy()
    both: Flags = flags[..., pairs[0]] | flags[..., pairs[1]]
    for table in tables:
        both = both | table
    for elements in pairs:
        reached[..., elements] = both
    return reached
