"""Faults of the cosine score: its lengths and its scale."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from attncheck.mutants import rounding
from attncheck.mutants.mutant import WIDE, Mutant
from attncheck.mutants.rounding import Array
from attncheck.mutants.steps import COSINE_SCORE, CosineScore
from attncheck.mutants.variant import Variant


def _norm(change: Callable[[Array], Array]) -> Variant:
    """Change the length that vectors are divided by."""
    return Variant(cosine=CosineScore(norm=lambda vectors: change(COSINE_SCORE.norm(vectors))))


def _undivided(vectors: Array, norm: Array) -> Array:
    return vectors


MUTANTS = (
    Mutant(
        "cosine_of_an_undivided_query",
        "other scores",
        "only the keys are normalised",
        Variant(cosine=CosineScore(unit_query=_undivided)),
        "scores",
    ),
    Mutant(
        "cosine_of_an_undivided_key",
        "other scores",
        "only the queries are normalised",
        Variant(cosine=CosineScore(unit_key=_undivided)),
        "scores",
    ),
    Mutant(
        "cosine_divided_by_squared_lengths",
        "other scores",
        "the root of the squared length is missing",
        _norm(lambda norm: norm * norm),
        "scores",
    ),
    Mutant(
        "cosine_of_lengths_over_the_first_axis",
        "other scores",
        "lengths over the vectors, not over their features",
        Variant(cosine=CosineScore(norm=lambda vectors: np.linalg.norm(vectors, axis=-2, keepdims=True))),
        "scores",
    ),
    Mutant(
        "cosine_with_1e_6_added_to_lengths",
        "other scores",
        "an epsilon against division by zero",
        _norm(lambda norm: norm + np.asarray(1e-6, norm.dtype)),
        "scores",
        WIDE,
    ),
    Mutant(
        "cosine_of_lengths_of_at_least_one",
        "other scores",
        "an epsilon of 1 as the least length",
        _norm(lambda norm: np.maximum(norm, 1)),
        "scores",
    ),
    Mutant(
        "cosine_of_lengths_in_float16",
        "other scores",
        "lengths kept in 16 bits, in which large vectors overflow",
        _norm(rounding.float16),
        "scores",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "cosine_scale_ignored",
        "other scores",
        "the temperature has no effect: tt-metal#33304's kind",
        Variant(cosine=lambda query, key, scale: COSINE_SCORE(query, key, None)),
        "scores",
        diagnosis=("scale-one",),
    ),
    Mutant(
        "cosine_divided_by_the_scale",
        "other scores",
        "a temperature is taken for its inverse",
        Variant(cosine=lambda query, key, scale: COSINE_SCORE(query, key, 1 / scale if scale else scale)),
        "scores",
        diagnosis=("scale-fitted",),
    ),
    Mutant(
        "cosine_scaled_by_the_width",
        "other scores",
        "1/sqrt(d) once more: cntkx#10's kind",
        Variant(cosine=lambda query, key, scale: COSINE_SCORE(query, key, (scale or 1) / query.shape[-1] ** 0.5)),
        "scores",
        diagnosis=("scale-default", "scale-times-default"),
    ),
)
