"""Faults of norms of queries and keys: left out, of other elements, elsewhere, another epsilon, other weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from attncheck.backends.contract import Norm, Stages
from attncheck.backends.numpy_backend import (
    _length,
    _merge_heads,
    _normalize,
    _rms,
    _split_heads,
    _squares,
    normalized_attention,
)
from attncheck.mutation.arithmetic import Array
from attncheck.mutation.mutant import control, mutant
from attncheck.mutation.variant import Steps, within

_faulty_norm = partial(mutant, "norms", at="normalized_query")
Normalize = Callable[..., Array]


def _told_apart(change: Callable[..., Array]) -> Steps:
    """Normalise query and key in different ways: ``change`` gets the name of what is normalised first."""

    def attend(*arrays: Array, **given: Any) -> Stages:
        names = iter(("query", "key"))

        def normalize(*arguments: Any) -> Array:
            return change(next(names), *arguments)

        stages: Stages = within(normalized_attention, _normalize=normalize)(*arrays, **given)
        return stages

    return {"normalized_attention": attend}


@_faulty_norm("_normalize", defect="the norm behind the split: vllm-metal#767, mlxcel#316", diagnosis="norm-width")
def a_head_for_the_full_width(inputs: Array, weight: Array | None, norm: Norm, epsilon: float, is_full: bool) -> Array:
    normalized = _normalize(inputs, None if is_full else weight, norm, epsilon, is_full=False)
    if not is_full or weight is None:
        return normalized
    return np.asarray(normalized * weight.reshape(inputs.shape[1], 1, -1))


def _in_order(*, behind: bool) -> Callable[..., Stages]:
    def attend(*arrays: Array, norm_after_rotation: bool = False, **given: Any) -> Stages:
        is_late = behind if given.get("rotary_cos") is not None else norm_after_rotation
        found = normalized_attention(*arrays, norm_after_rotation=is_late, **given)
        order = normalized_attention(*arrays, norm_after_rotation=norm_after_rotation, **given)
        return {stage: found[stage] for stage in order}

    return attend


def _divided_by(root: Callable[[Array, float], Array]) -> Steps:
    """Divide by another root, of the mean of squares or of their sum."""
    return {
        "_rms": lambda squares, epsilon: root(squares.mean(axis=-1, keepdims=True), epsilon),
        "_length": lambda squares, epsilon: root(squares.sum(axis=-1, keepdims=True), epsilon),
    }


@_faulty_norm(_divided_by, defect="epsilon is lost: microsoft/DeepSpeed#581", diagnosis="norm-epsilon-ignored")
def epsilon_left_out(square: Array, epsilon: float) -> Array:
    with np.errstate(invalid="ignore"):
        return np.asarray(np.sqrt(square))


@_faulty_norm(
    "normalized_attention", defect="q_norm is loaded as k_norm, and k_norm as q_norm", diagnosis="norm-weights-swapped"
)
def norm_weights_swapped(
    query: Array,
    key: Array,
    value: Array,
    query_norm_weight: Array | None = None,
    key_norm_weight: Array | None = None,
    **given: Any,
) -> Stages:
    if given.get("norm_over") != "full" or query.shape[1] == key.shape[1]:
        query_norm_weight, key_norm_weight = key_norm_weight, query_norm_weight
    weights: dict[str, Any] = {"query_norm_weight": query_norm_weight, "key_norm_weight": key_norm_weight}
    return normalized_attention(query, key, value, **weights, **given)


@_faulty_norm(
    "_squares",
    defect="squares overflow in float16: pytorch#133085, LeetCUDA#335, nntrainer#3935",
    dtypes=("float16",),
)
def squares_in_sixteen_bits(rows: Array) -> Array:
    with np.errstate(over="ignore"):
        return np.asarray(rows * rows)


def _by_rows(change: Callable[..., Array]) -> Steps:
    """Normalise rows, of a head or of all heads, in another right way, in float32 where they have 16 bits."""

    def normalize(inputs: Array, weight: Array | None, norm: Norm, epsilon: float, is_full: bool) -> Array:
        rows = _merge_heads(inputs) if is_full else inputs
        wide = rows if rows.dtype.itemsize > 2 else rows.astype(np.float32)
        divisor = _rms(_squares(rows), epsilon) if norm == "rms" else _length(_squares(rows), epsilon)
        found = change(wide, divisor, weight).astype(inputs.dtype)
        return _split_heads(found, inputs.shape[1]) if is_full else found

    return {"_normalize": normalize}


@control(_by_rows, why="the reciprocal of the root is multiplied")
def norm_by_reciprocal_root(rows: Array, divisor: Array, weight: Array | None) -> Array:
    return np.asarray(rows * (1 / divisor) * (1 if weight is None else weight))


@control(_by_rows, why="weights are multiplied before anything is rounded to 16 bits, as in Gemma")
def norm_weighted_before_it_is_rounded(rows: Array, divisor: Array, weight: Array | None) -> Array:
    return np.asarray(rows / divisor if weight is None else rows * weight / divisor)


@control("_squares", why="squares in float64, rounded once behind the root", dtypes=("float32", "float16"))
def squares_in_float64(rows: Array) -> Array:
    wide = rows.astype(np.float64)
    return wide * wide


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
_faulty_norm("_normalize", "norm_left_out", "the norm is never called: Cerebras/modelzoo#85",
    lambda inputs, *_: inputs, diagnosis="norm-ignored")
_faulty_norm(_told_apart, "norm_of_keys_alone", "keys and values are normalised: kyegomez/MegaVIT#17",
    lambda name, inputs, *rest: inputs if name == "query" else _normalize(inputs, *rest), diagnosis="norm-of-key-alone")
mutant("norms", _told_apart, "norm_of_queries_alone",
    "one of two norms is missed: huggingface/transformers#37620's kind",
    lambda name, inputs, *rest: inputs if name == "key" else _normalize(inputs, *rest), at="normalized_key",
    diagnosis="norm-of-query-alone")
_faulty_norm("_normalize", "full_width_for_a_head", "the model's width for a head's: PaddleFormers#2998",
    lambda inputs, weight, norm, epsilon, is_full: _normalize(inputs, weight if is_full or weight is None
        else np.tile(weight, inputs.shape[1]), norm, epsilon, is_full=True),
    diagnosis="norm-width")
_faulty_norm("normalized_attention", "norm_behind_the_rotation",
    "queries and keys are normalised behind the rotation: torchtune#2809",
    _in_order(behind=True), diagnosis="norm-order")
_faulty_norm("normalized_attention", "norm_before_the_rotation",
    "Llama 4's and HunYuan's norm behind the rotation taken before it: torchtune#2809, the other way round",
    _in_order(behind=False), diagnosis="norm-order")
_faulty_norm("_rms", "epsilon_outside_the_root", "sqrt(mean) + epsilon, as in layers of other libraries",
    lambda squares, epsilon: np.asarray(np.sqrt(squares.mean(axis=-1, keepdims=True)) + epsilon),
    diagnosis="norm-epsilon-outside")
_faulty_norm("_length", "epsilon_as_the_least_square", "sqrt(max(x.x, epsilon)), as tf.math.l2_normalize has it",
    lambda squares, epsilon: np.asarray(np.sqrt(np.maximum(squares.sum(axis=-1, keepdims=True), epsilon))),
    diagnosis="norm-epsilon-least-square")
_faulty_norm("_length", "epsilon_under_the_root_of_a_length", "sqrt(x.x + epsilon) for max(|x|, epsilon)",
    lambda squares, epsilon: np.asarray(np.sqrt(squares.sum(axis=-1, keepdims=True) + epsilon)),
    diagnosis="norm-epsilon-inside")
_faulty_norm("_rms", "epsilon_of_another_model", "epsilon is fixed at 1e-5: amd/IRON#139",
    lambda squares, epsilon: _rms(squares, 1e-05), diagnosis="norm-epsilon-of-1e-5")
_faulty_norm("_rms", "epsilon_no_less_than_one_in_ten_thousand",
    "epsilon is at least 1e-4, so that float16 has it: nntrainer#4318",
    lambda squares, epsilon: _rms(squares, max(epsilon, 1e-4)), diagnosis="norm-epsilon-at-least-1e-4")
_faulty_norm("_rms", "epsilon_times_the_largest_square",
    "epsilon is added behind a division by the largest element: apple/coremltools#2821",
    lambda squares, epsilon: np.asarray(np.sqrt(squares.mean(axis=-1, keepdims=True) + epsilon * squares.max(axis=-1,
        keepdims=True, initial=0))))
_faulty_norm("_rms", "length_for_root_mean_square", "unit vectors where the model has RMSNorm",
    lambda squares, epsilon: _length(squares, epsilon), diagnosis="norm-kind")
_faulty_norm("_length", "root_mean_square_for_length", "Llama 4's L2Norm is a root mean square: a name for two",
    lambda squares, epsilon: _rms(squares, epsilon), diagnosis="norm-kind")
_faulty_norm("_weighted", "weight_plus_one", "Gemma's weights are 1 + w, others' w",
    lambda normalized, weight: np.asarray(normalized * (1 + weight)), diagnosis="norm-weight-plus-one")
_faulty_norm("_weighted", "norm_weights_left_out", "the weights of the norms are not loaded",
    lambda normalized, weight: normalized, diagnosis="norm-weight-ignored")
_faulty_norm("_normalize", "mean_subtracted", "LayerNorm for RMSNorm: the mean is subtracted",
    lambda inputs, weight, norm, epsilon, is_full: _normalize(inputs - inputs.mean(axis=(1, 3) if is_full else 3,
        keepdims=True), weight, norm, epsilon, is_full), diagnosis="norm-of-differences")
