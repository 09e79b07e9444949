"""Keys and values of a cache in front of those that are projected.

    joined = [cached, new]      nothing is rounded: the cached ones are inputs, the new ones bring their errors along

A cache holds what the projections gave before, rotated where there is a rotary embedding: the rotation behind this step
has the cosine 1 and the sine 0 there. Without projections the past is joined before anything is computed
(``reading/lowering.py``).

Keys and values that are stored in 8 bits, times their scales.

    k = s c      D = 2u |s c|, u the unit of stored intermediates

A code c is exact in every format in which attention is computed. Its product with a scale may be stored (u |k|), or the
scale may be multiplied into something else that the keys of its block have in common: into the constant that the scores
are multiplied with, the scores, or the output. That is one more rounding or two of a number that is no larger than the
sum of |q| |k|, or of p |v|; the second u is for these. Micikevicius et al. 2022, "FP8 Formats for Deep Learning",
arXiv 2209.05433.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.errors import Ball, Operand, Real
from attncheck.attention.exact_array import ExactArray, joined
from attncheck.attention.flags import Flags, Reach
from attncheck.attention.problem import Problem
from attncheck.attention.step import Around, At, Step


def joined_of(name: str) -> Step:
    """Return the step that puts what is cached in front of the projected key or value: (B, Hkv, P + Lk, D)."""
    cached = f"cached_{name}"

    def exact(problem: Problem, new: ExactArray) -> ExactArray:
        return joined([problem.exact(problem.array(cached)), new], axis=-2)

    def value(problem: Problem, new: Real) -> Real:
        return _joined(problem.array(cached), new)

    def error(at: At, new: Operand) -> Operand:
        none = np.zeros(at.problem.array(cached).shape)
        own = (new.max_error, new.variance)
        return Operand(at.value, *(None if part is None else _joined(none, part) for part in own))

    def radius(around: Around, _: Real, new: Ball) -> Real:
        return _joined(around.radii[cached], new.radius)

    def reach(known: Reach, new: Flags) -> Flags:
        problem = known.problem
        past = known.flags.get(cached, np.zeros((1, 1, 1, 1), np.bool_))
        lengths = problem.array(cached).shape[-2], problem.array(name).shape[-2] + problem.added_keys
        leading = np.broadcast_shapes(past.shape[:-2], new.shape[:-2])
        width = max(past.shape[-1], new.shape[-1])
        parts = zip((past, new), lengths, strict=True)
        return _joined(*(np.broadcast_to(each, (*leading, length, width)) for each, length in parts))

    return Step(exact, value, error, radius, reach=reach)


def _joined(past: NDArray[Any], new: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([past, new], axis=-2)


def dequantization_of(name: str) -> Step:
    """Return the product of keys or values with their factors, (B, Hkv, T, 1)."""

    def exact(problem: Problem, codes: ExactArray) -> ExactArray:
        return codes * problem.exact(problem.array(f"{name}_factor"))

    def value(problem: Problem, codes: Real) -> Real:
        multiplied: Real = codes * problem.array(f"{name}_factor")
        return multiplied

    def error(at: At, codes: Operand) -> Operand:
        size = np.abs(at.value)
        unit = max(at.rounding.output_unit, at.rounding.compute_unit)
        underflow = max(at.rounding.output_underflow, at.rounding.accumulate_underflow)
        return Operand(at.value, 2 * unit * size + underflow, 2 * (unit * size) ** 2)

    def reach(known: Reach, flags: Flags) -> Flags:
        factor = known.flags.get(f"{name}_factor")
        return flags if factor is None else flags | factor

    return Step(exact, value, error, reach=reach)
