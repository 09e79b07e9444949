"""Faults of the bilinear, the additive and the cosine score."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from attncheck.backends.contract import Stages
from attncheck.backends.numpy_backend import _dot, additive_scores, cosine_scores, general_scores
from attncheck.mutation import arithmetic
from attncheck.mutation.arithmetic import Array
from attncheck.mutation.forward_forms import with_score_bias
from attncheck.mutation.mutant import ACCURACY_OF_16_BITS, WIDE, mutant
from attncheck.mutation.variant import Steps, numpy_with, within

_faulty_other_scores = partial(mutant, "other scores", at="scores")


def _weight(change: Callable[[Array], Array]) -> Steps:
    """Change the bilinear weight; where the change does not fit its shape, a real implementation would refuse."""

    def score(query: Array, key: Array, weight: Array, *, score_bias: Array | None = None) -> Stages:
        changed = change(weight)
        right = changed if changed.shape == weight.shape else weight
        return general_scores(query, key, right, score_bias=score_bias)

    return {"general_scores": score}


def _of_parts(hidden: Callable[[Array, Array, Array | float], Array]) -> Steps:
    """Make the hidden layer in another way, by ``hidden(query_part, key_part, bias)``."""

    def score(
        query: Array,
        key: Array,
        query_weight: Array,
        key_weight: Array,
        score_vector: Array,
        *,
        score_bias: Array | None = None,
    ) -> Stages:
        query_part = (query @ query_weight)[..., :, np.newaxis, :]  # (B, H, Lq, 1, A)
        key_part = (key @ key_weight)[..., np.newaxis, :, :]  # (B, H, 1, Lk, A)
        bias = np.zeros((), query_part.dtype) if score_bias is None else score_bias
        return {"scores": hidden(query_part, key_part, bias) @ score_vector}

    return {"additive_scores": score}


@_faulty_other_scores(_of_parts, defect="tanh(q Wq) + tanh(k Wk) for tanh(q Wq + k Wk)")
def additive_tanh_of_each_part(query_part: Array, key_part: Array, bias: Array) -> Array:
    hidden: Array = np.tanh(query_part + bias) + np.tanh(key_part + bias)
    return hidden


def _activation(tanh: Callable[[Array], Array]) -> Steps:
    """Use another hyperbolic tangent."""
    return {"additive_scores.np": numpy_with(tanh=tanh)}


@_faulty_other_scores("additive_scores", defect="v (tanh(q + k) + b) for v tanh(q + k + b)")
def additive_bias_after_tanh(
    query: Array,
    key: Array,
    query_weight: Array,
    key_weight: Array,
    score_vector: Array,
    *,
    score_bias: Array | None = None,
) -> Stages:
    stages = additive_scores(query, key, query_weight, key_weight, score_vector)
    return stages if score_bias is None else {"scores": stages["scores"] + score_bias @ score_vector}


def _lengths(norm: Callable[..., Array]) -> Steps:
    """Divide by other lengths than those of the vectors."""
    return {"cosine_scores.np": numpy_with(linalg=SimpleNamespace(norm=norm))}


def _lengths_read_as(change: Callable[[Array], Array]) -> Steps:
    """Change the length that vectors are divided by."""
    return _lengths(lambda vectors, **axes: change(np.asarray(np.linalg.norm(vectors, **axes))))


def _divided(is_divided: Callable[[str], bool]) -> Steps:
    """Divide only one of the two by their lengths: ``is_divided`` of its name, ``query`` or ``key``."""

    def score(query: Array, key: Array, *, scale: float | None = None) -> Stages:
        names = iter(("query", "key"))  # In the order in which the backend takes their lengths.

        def norm(vectors: Array, **axes: Any) -> Array:
            lengths = np.asarray(np.linalg.norm(vectors, **axes))
            return lengths if is_divided(next(names)) else np.ones_like(lengths)

        library = numpy_with(linalg=SimpleNamespace(norm=norm))
        stages: Stages = within(cosine_scores, np=library)(query, key, scale=scale)
        return stages

    return {"cosine_scores": score}


@_faulty_other_scores(
    _lengths_read_as, defect="the root of the squared length is missing", diagnosis="cosine-times-inverse-lengths"
)
def cosine_divided_by_squared_lengths(lengths: Array) -> Array:
    squares: Array = lengths * lengths
    return squares


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
_faulty_other_scores(_weight, "bilinear_weight_transposed", "W^T for W, silent where W is square (Luong, general)",
    lambda weight: weight.T, diagnosis="score-weight-transposed")
_faulty_other_scores("general_scores", "bilinear_weight_ignored", "the dot score for the general one where W is square",
    lambda query, key, weight, *, score_bias=None: with_score_bias(_dot(query, key), score_bias)
        if weight.shape[0] == weight.shape[1] else general_scores(query, key, weight, score_bias=score_bias),
    diagnosis="score-weight-ignored")
_faulty_other_scores("general_scores", "bilinear_bias_ignored",
    "structure: the bias of the bilinear layer has no effect",
    lambda query, key, weight, *, score_bias=None: general_scores(query, key, weight), diagnosis="score-bias-missing")
_faulty_other_scores("general_scores", "bilinear_bias_subtracted",
    "structure: the bias is subtracted, as one of the other side",
    lambda query, key, weight, *, score_bias=None: general_scores(query, key, weight, score_bias=None
        if score_bias is None else -score_bias), diagnosis="score-bias-negated")
_faulty_other_scores("general_scores", "bilinear_bias_of_the_first_head",
    "structure: the bias of the first head serves all",
    lambda query, key, weight, *, score_bias=None: general_scores(query, key, weight, score_bias=None
        if score_bias is None else score_bias[:1]), diagnosis="score-bias-of-first-head")
_faulty_other_scores("general_scores", "bilinear_bias_added_to_the_weight",
    "structure: q (W + b) k^T: the bias is added to the weight",
    lambda query, key, weight, *, score_bias=None: general_scores(query, key, weight if score_bias is None
        else weight + score_bias[0]))
_faulty_other_scores(_weight, "bilinear_weight_in_bfloat16", "the weight is stored in bfloat16",
    lambda weight: arithmetic.bfloat16(weight), dtypes=WIDE, diagnosis=ACCURACY_OF_16_BITS)
_faulty_other_scores("general_scores._dot", "bilinear_product_in_tf32",
    "the first of two products in TF32: pytorch#161022",
    lambda projected, key: _dot(arithmetic.tf32(projected), key), dtypes=WIDE, diagnosis=ACCURACY_OF_16_BITS)
_faulty_other_scores(_of_parts, "additive_parts_multiplied", "tanh(q Wq * k Wk): the parts are mixed by product",
    lambda query_part, key_part, bias: np.asarray(np.tanh(query_part * key_part + bias)))
_faulty_other_scores(_activation, "additive_tanh_missing", "the hidden layer is linear", lambda hidden: hidden)
_faulty_other_scores(_activation, "additive_tanh_by_pade", "x(27 + x^2)/(27 + 9x^2) for tanh", arithmetic.tanh_by_pade)
_faulty_other_scores(_activation, "additive_tanh_in_float16", "tanh looked up in float16",
    lambda hidden: arithmetic.float16(np.tanh(hidden)), dtypes=WIDE, diagnosis=ACCURACY_OF_16_BITS)
_faulty_other_scores(_activation, "additive_tanh_off_by_1e_5", "a polynomial tanh of five digits",
    lambda hidden: np.asarray(np.tanh(hidden) * (1 + 1e-05 * np.sin(97 * hidden))), dtypes=WIDE)
_faulty_other_scores(_activation, "additive_tanh_by_ratio", "(e^2x - 1)/(e^2x + 1) overflows: vllm#56578",
    arithmetic.tanh_by_ratio)
_faulty_other_scores("additive_scores", "additive_bias_ignored", "the hidden layer's bias has no effect",
    lambda *arrays, score_bias=None, **named: additive_scores(*arrays, **named), diagnosis="score-bias-missing")
_faulty_other_scores(_divided, "cosine_of_an_undivided_query", "only the keys are normalised",
    lambda name: name != "query", diagnosis="cosine-times-length-of-query")
_faulty_other_scores(_divided, "cosine_of_an_undivided_key", "only the queries are normalised",
    lambda name: name != "key", diagnosis="cosine-times-length-of-key")
_faulty_other_scores(_lengths, "cosine_of_lengths_over_the_first_axis",
    "lengths over the vectors, not over their features",
    lambda vectors, **axes: np.asarray(np.linalg.norm(vectors, axis=-2, keepdims=True)))
_faulty_other_scores(_lengths_read_as, "cosine_with_1e_6_added_to_lengths", "an epsilon against division by zero",
    lambda lengths: np.asarray(lengths + np.asarray(1e-06, lengths.dtype)), dtypes=WIDE)
_faulty_other_scores(_lengths_read_as, "cosine_of_lengths_of_at_least_one", "an epsilon of 1 as the least length",
    lambda lengths: np.maximum(lengths, 1))
_faulty_other_scores(_lengths_read_as, "cosine_of_lengths_in_float16", "lengths kept in 16 bits",
    lambda lengths: arithmetic.float16(lengths), dtypes=WIDE, diagnosis=ACCURACY_OF_16_BITS)
_faulty_other_scores("cosine_scores", "cosine_scale_ignored", "the temperature has no effect: tt-metal#33304's kind",
    lambda query, key, *, scale=None: cosine_scores(query, key), diagnosis="scale-one")
_faulty_other_scores("cosine_scores", "cosine_divided_by_the_scale", "a temperature is taken for its inverse",
    lambda query, key, *, scale=None: cosine_scores(query, key, scale=1 / scale if scale else scale),
    diagnosis="scale-fitted")
_faulty_other_scores("cosine_scores", "cosine_scaled_by_the_width", "1/sqrt(d) once more: cntkx#10's kind",
    lambda query, key, *, scale=None: cosine_scores(query, key, scale=(scale or 1) / query.shape[-1] ** 0.5),
    diagnosis=("scale-default", "scale-times-default"))
