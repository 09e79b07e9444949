"""Faults of the softmax's denominator."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from attncheck.mutants import rounding
from attncheck.mutants.mutant import EVERY, WIDE, Equivalent, Mutant
from attncheck.mutants.rounding import Array
from attncheck.mutants.steps import Softmax
from attncheck.mutants.variant import Variant


def _total(total: Callable[[Array], Array]) -> Variant:
    return Variant(normalise=Softmax(total=total))


def _sum(exponentials: Array) -> Array:
    return np.asarray(exponentials.sum(axis=-1, keepdims=True))


def _plus(epsilon: float) -> Variant:
    return _total(lambda exponentials: _sum(exponentials) + epsilon)


MUTANTS = (
    Mutant("one_added_to_the_sum", "denominator", "1 for exp(-max): AttentionIsOFFByOne#5", _plus(1.0), "weights"),
    Mutant("sum_plus_1e_9", "denominator", "an epsilon against division by zero", _plus(1e-9), "weights", ("float64",)),
    Mutant("sum_plus_1e_6", "denominator", "an epsilon against division by zero", _plus(1e-6), "weights", WIDE),
    Mutant("sum_plus_1e_3", "denominator", "an epsilon against division by zero", _plus(1e-3), "weights", WIDE),
    Mutant(
        "sum_accumulated_in_float16",
        "denominator",
        "the row sum sticks at 2048: tract#2586",
        _total(lambda exponentials: rounding.sequential_sum(exponentials, rounding.float16)),
        "weights",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "sum_accumulated_in_bfloat16",
        "denominator",
        "the row sum sticks at 256: executorch#20090, mlx#4178",
        _total(lambda exponentials: rounding.sequential_sum(exponentials, rounding.bfloat16)),
        "weights",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "sum_stored_in_bfloat16",
        "denominator",
        "the finished sum is stored in bfloat16: tt-metal#52045",
        _total(lambda exponentials: rounding.bfloat16(_sum(exponentials))),
        "weights",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "sum_in_float32",
        "denominator",
        "float64 in, float32 statistics: jax#37422, jax#34114",
        _total(lambda exponentials: rounding.float32(_sum(rounding.float32(exponentials)))),
        "weights",
        ("float64",),
        diagnosis=("accuracy-of-float32",),
    ),
    Mutant(
        "reciprocal_in_tf32",
        "denominator",
        "an approximate reciprocal without a Newton step",
        Variant(normalise=Softmax(divide=lambda exponentials, total: exponentials * rounding.tf32(1 / total))),
        "weights",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "sum_without_its_smallest_terms",
        "denominator",
        "terms below 1e-4 are skipped as negligible",
        _total(lambda exponentials: _sum(np.where(exponentials < 1e-4, 0, exponentials))),
        "weights",
        WIDE,
    ),
)

EQUIVALENT = (
    Equivalent(
        "sum_plus_1e_9_below_the_last_place",
        "an epsilon against division by zero",
        "The largest term is exp(0) = 1 exactly, so the sum is at least 1, where half a unit in the last place is "
        "6e-8 in float32 and more in 16 bits: adding 1e-9 to it rounds to the sum itself, bit for bit.",
        _plus(1e-9),
        ("float32", "float16"),
    ),
    Equivalent(
        "weights_clipped_at_one",
        "a clamp that has nothing to clamp",
        "All terms are at least 0, so every rounded partial sum is at least each of its terms (rounding is monotone), "
        "and a quotient of two numbers of which the divisor is not smaller does not round above 1. NaN stays NaN.",
        Variant(normalise=Softmax(divide=lambda exponentials, total: np.minimum(exponentials / total, 1))),
        EVERY,
    ),
    Equivalent(
        "exponent_clipped_at_zero",
        "a clamp against overflow that has nothing to clamp",
        "A difference s - m with s <= m is at most 0, and rounding keeps its sign: min(s - m, 0) is s - m, bit for "
        "bit. NaN stays NaN.",
        Variant(normalise=Softmax(exponential=lambda shifted: np.exp(np.minimum(shifted, 0)))),
        EVERY,
    ),
)
