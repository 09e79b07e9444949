"""Keys and values that are stored in 8 bits, times their scales.

    k = s c      D = 2u |s c|, u the unit of stored intermediates

A code c is exact in every format in which attention is computed. Its product with a scale may be stored (u |k|), or the
scale may be multiplied into something else that the keys of its block have in common: into the constant that the scores
are multiplied with, the scores, or the output. That is one more rounding or two of a number that is no larger than the
sum of |q| |k|, or of p |v|; the second u is for these. Micikevicius et al. 2022, "FP8 Formats for Deep Learning",
arXiv 2209.05433.
"""

from __future__ import annotations

import numpy as np

from attncheck.attention.errors import Operand, Real
from attncheck.attention.exact_array import ExactArray
from attncheck.attention.flags import Flags, Reach
from attncheck.attention.problem import Problem
from attncheck.attention.step import At, Step


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
