"""Faults of the bilinear and the additive score."""

from __future__ import annotations

import numpy as np

from attncheck.mutants import rounding
from attncheck.mutants.mutant import WIDE, Mutant
from attncheck.mutants.rounding import Array, Store
from attncheck.mutants.steps import AdditiveScore, bilinear, dot
from attncheck.mutants.variant import Variant


def _weight(change: Store) -> Variant:
    """Change the bilinear weight; where the change does not fit its shape, a real implementation would refuse."""

    def score(query: Array, key: Array, weight: Array) -> Array:
        changed = change(weight)
        return bilinear(query, key, changed if changed.shape == weight.shape else weight)

    return Variant(bilinear=score)


def _activation(activation: Store) -> Variant:
    return Variant(additive=AdditiveScore(activation=activation))


def _pade_tanh(hidden: Array) -> Array:
    square = hidden * hidden
    return np.asarray(np.clip(hidden * (27 + square) / (27 + 9 * square), -1, 1))


def _ratio_tanh(hidden: Array) -> Array:
    power = np.exp(2 * hidden)
    ratio: Array = (power - 1) / (power + 1)
    return ratio


def _bias_after_tanh(
    query: Array, key: Array, query_weight: Array, key_weight: Array, vector: Array, bias: Array | None
) -> Array:
    right = AdditiveScore()
    scores = right(query, key, query_weight, key_weight, vector, None)
    return scores if bias is None else np.asarray(scores + bias @ vector)


def _bias_ignored(
    query: Array, key: Array, query_weight: Array, key_weight: Array, vector: Array, bias: Array | None
) -> Array:
    return AdditiveScore()(query, key, query_weight, key_weight, vector, None)


MUTANTS = (
    Mutant(
        "bilinear_weight_transposed",
        "other scores",
        "W^T for W, silent where W is square (Luong, general)",
        _weight(np.transpose),
        "scores",
    ),
    Mutant(
        "bilinear_weight_ignored",
        "other scores",
        "the dot score for the general one where W is square",
        Variant(
            bilinear=lambda q, k, weight: dot(q, k) if weight.shape[0] == weight.shape[1] else bilinear(q, k, weight)
        ),
        "scores",
    ),
    Mutant(
        "bilinear_weight_in_bfloat16",
        "other scores",
        "the weight is stored in bfloat16",
        _weight(rounding.bfloat16),
        "scores",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "bilinear_product_in_tf32",
        "other scores",
        "the first of two products in TF32: pytorch#161022",
        Variant(bilinear=lambda query, key, weight: dot(rounding.tf32(query @ weight), key)),
        "scores",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "additive_tanh_of_each_part",
        "other scores",
        "tanh(q Wq) + tanh(k Wk) for tanh(q Wq + k Wk)",
        Variant(additive=AdditiveScore(hidden=lambda q, k, activation: activation(q) + activation(k))),
        "scores",
    ),
    Mutant(
        "additive_parts_multiplied",
        "other scores",
        "tanh(q Wq * k Wk): the parts are mixed by product",
        Variant(additive=AdditiveScore(hidden=lambda q, k, activation: activation(q * k))),
        "scores",
    ),
    Mutant(
        "additive_tanh_missing",
        "other scores",
        "the hidden layer is linear",
        _activation(lambda hidden: hidden),
        "scores",
    ),
    Mutant(
        "additive_tanh_by_pade",
        "other scores",
        "x(27 + x^2)/(27 + 9x^2) for tanh",
        _activation(_pade_tanh),
        "scores",
    ),
    Mutant(
        "additive_tanh_in_float16",
        "other scores",
        "tanh looked up in float16",
        _activation(lambda hidden: rounding.float16(np.tanh(hidden))),
        "scores",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "additive_tanh_off_by_1e_5",
        "other scores",
        "a polynomial tanh of five digits",
        _activation(lambda hidden: np.tanh(hidden) * (1 + 1e-5 * np.sin(97 * hidden))),
        "scores",
        WIDE,
    ),
    Mutant(
        "additive_tanh_by_ratio",
        "other scores",
        "(e^2x - 1)/(e^2x + 1) overflows: vllm#56578",
        _activation(_ratio_tanh),
        "scores",
    ),
    Mutant(
        "additive_bias_ignored",
        "other scores",
        "the hidden layer's bias has no effect",
        Variant(additive=_bias_ignored),
        "scores",
    ),
    Mutant(
        "additive_bias_after_tanh",
        "other scores",
        "v (tanh(q + k) + b) for v tanh(q + k + b)",
        Variant(additive=_bias_after_tanh),
        "scores",
    ),
)
