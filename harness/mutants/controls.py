"""Right implementations that compute in another way: none of them may be flagged."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from attncheck.backends.contract import Stages
from attncheck.mutants.backward import backward_by
from attncheck.mutants.mutant import WIDE, Control
from attncheck.mutants.online import NEVER_HELD, Online
from attncheck.mutants.products import (
    by_rows,
    by_transposes,
    einsum,
    fused_multiply_add,
    pairwise_matmul,
    pairwise_sum,
    reversed_matmul,
    wider,
)
from attncheck.mutants.rounding import Array, sequential_matmul, sequential_sum
from attncheck.mutants.steps import AdditiveScore, DotScore, Softmax, dot
from attncheck.mutants.variant import Variant
from attncheck.spec import LOGITS


def _matmul(product: Callable[[Array, Array], Array], total: Callable[[Array], Array] | None = None) -> Variant:
    """Use another matrix product throughout, and another row sum."""
    return Variant(
        score=DotScore(dot=lambda query, key: product(query, np.swapaxes(key, -1, -2))),
        bilinear=lambda query, key, weight: product(product(query, weight), np.swapaxes(key, -1, -2)),
        normalise=Softmax() if total is None else Softmax(total=total),
        average=lambda logits, weights, value: product(weights, value),
        backward=backward_by(product),
        project=lambda inputs, weight, bias: _plus(product(inputs, weight), bias),
        project_output=lambda context, merged, weight, bias: _plus(product(merged, weight), bias),
    )


def _plus(product: Array, bias: Array | None) -> Array:
    return product if bias is None else np.asarray(product + bias)


def _reversed_sum(exponentials: Array) -> Array:
    return sequential_sum(exponentials[..., ::-1])


def _sorted_sum(exponentials: Array) -> Array:
    return sequential_sum(np.sort(exponentials, axis=-1))


def _prescaled(query: Array, key: Array, scale: float) -> Stages:
    return {"scores": dot(query * scale, key)}


def _both_prescaled(query: Array, key: Array, scale: float) -> Stages:
    root = math.sqrt(abs(scale))
    return {"scores": dot(query * math.copysign(root, scale), key * root)}


_EXP2 = Softmax(
    exponential=lambda shifted: np.exp2(shifted * math.log2(math.e)),
    log_sum_exp=lambda maximum, total: maximum + np.log2(total) * math.log(2),
)


def _divide_last(logits: Array, weights: Array, value: Array) -> Array:
    maximum = logits.max(axis=-1, keepdims=True, initial=-np.inf)
    empty = maximum == -np.inf
    exponentials = np.exp(logits - np.where(empty, 0, maximum))
    total = np.where(empty, 1, exponentials.sum(axis=-1, keepdims=True))
    return np.asarray((exponentials @ value) / total)


def _online(block: int) -> Variant:
    online = Online(block)
    return Variant(normalise=online.normalise, average=online.average, hidden=NEVER_HELD)


def _key_bias_dropped(given: dict[str, Any]) -> dict[str, Any]:
    return given | {"key": (*given["key"][:2], None)}


_REFERENCE = Variant()
_BEFORE_SHIFT_INVARIANCE = frozenset({"key", *LOGITS, "log_sum_exp"}) - {"capped"}

CONTROLS = (
    Control("reference", "the reference itself", _REFERENCE),
    # Running sums of float16 are kept in float16 here, as einsum may, and so is a scaled query: these are of other
    # classes than the reference.
    Control("keys_reversed", "sums from the last term to the first", _matmul(reversed_matmul, _reversed_sum), WIDE),
    Control(
        "sum_sorted",
        "the row sum from the smallest term to the largest",
        Variant(normalise=Softmax(total=_sorted_sum)),
        WIDE,
    ),
    Control("sums_sequential", "one running sum each", _matmul(sequential_matmul, sequential_sum), WIDE),
    Control("sums_pairwise", "sums by halves", _matmul(pairwise_matmul, pairwise_sum), WIDE),
    # What runs over blocks is kept in the arrays' own format: in float16, over thousands of keys, that is a fault.
    Control("online_softmax_in_blocks_of_16", "one pass over the keys, rescaled", _online(16), WIDE),
    Control("online_softmax_in_blocks_of_64", "one pass over the keys, rescaled", _online(64), WIDE),
    Control("query_prescaled", "the scale is folded into the query", Variant(score=_prescaled), WIDE),
    Control(
        "query_and_key_prescaled",
        "the scale's root is folded into query and key",
        Variant(score=_both_prescaled),
        WIDE,
    ),
    Control("exp2_for_exp", "exp(x) = exp2(x log2(e)), and log likewise", Variant(normalise=_EXP2)),
    Control("divided_last", "the values are averaged before the division by the sum", Variant(average=_divide_last)),
    Control(
        "reciprocal_multiplied",
        "e (1/l) for e/l",
        Variant(normalise=Softmax(divide=lambda exponentials, total: exponentials * (1 / total))),
    ),
    Control("products_transposed", "A B = (B^T A^T)^T, with copies in other layouts", _matmul(by_transposes)),
    Control("products_by_einsum", "einsum for matmul", _matmul(einsum), WIDE),
    Control("products_row_by_row", "matrix times vector, one query at a time", _matmul(by_rows)),
    Control(
        "accumulated_in_float64",
        "sums and exponentials in float64, rounded once",
        replace(
            _matmul(wider(np.matmul)),
            normalise=Softmax(exponential=wider(np.exp), total=wider(lambda terms: terms.sum(axis=-1, keepdims=True))),
            additive=AdditiveScore(activation=wider(np.tanh)),
        ),
        ("float32", "float16"),
    ),
    Control(
        "fused_multiply_add",
        "one rounding per multiplication and addition",
        _matmul(fused_multiply_add),
        ("float32",),
    ),
    Control(
        "bilinear_key_first",
        "q (W k) for (q W) k",
        Variant(bilinear=lambda query, key, weight: dot(query, key @ weight.T)),
    ),
    Control(
        "bilinear_by_einsum",
        "the bilinear score in one einsum",
        Variant(bilinear=lambda query, key, weight: np.asarray(np.einsum("...qd,de,...ke->...qk", query, weight, key))),
        WIDE,
    ),
    Control(
        "key_bias_dropped",
        "softmax is shift invariant: q b is the same for every key of a row",
        Variant(arguments=_key_bias_dropped, hidden=_BEFORE_SHIFT_INVARIANCE),
    ),
)
