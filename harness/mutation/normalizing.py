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


@_faulty_norm("_normalize", defect="the norm is never called: Cerebras/modelzoo#85", diagnosis="norm-ignored")
def norm_left_out(inputs: Array, *_: Any) -> Array:
    return inputs


@_faulty_norm(_told_apart, defect="keys and values are normalised: kyegomez/MegaVIT#17", diagnosis="norm-of-key-alone")
def norm_of_keys_alone(name: str, inputs: Array, *rest: Any) -> Array:
    return inputs if name == "query" else _normalize(inputs, *rest)


@mutant(
    "norms",
    _told_apart,
    at="normalized_key",
    defect="one of two norms is missed: huggingface/transformers#37620's kind",
    diagnosis="norm-of-query-alone",
)
def norm_of_queries_alone(name: str, inputs: Array, *rest: Any) -> Array:
    return inputs if name == "key" else _normalize(inputs, *rest)


@_faulty_norm("_normalize", defect="the model's width for a head's: PaddleFormers#2998", diagnosis="norm-width")
def full_width_for_a_head(inputs: Array, weight: Array | None, norm: Norm, epsilon: float, is_full: bool) -> Array:
    spread = weight if is_full or weight is None else np.tile(weight, inputs.shape[1])
    return _normalize(inputs, spread, norm, epsilon, is_full=True)


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


_faulty_norm(
    "normalized_attention",
    defect="queries and keys are normalised behind the rotation: torchtune#2809",
    diagnosis="norm-order",
    name="norm_behind_the_rotation",
)(_in_order(behind=True))
_faulty_norm(
    "normalized_attention",
    defect="Llama 4's and HunYuan's norm behind the rotation taken before it: torchtune#2809, the other way round",
    diagnosis="norm-order",
    name="norm_before_the_rotation",
)(_in_order(behind=False))


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


@_faulty_norm("_rms", defect="sqrt(mean) + epsilon, as in layers of other libraries", diagnosis="norm-epsilon-outside")
def epsilon_outside_the_root(squares: Array, epsilon: float) -> Array:
    return np.asarray(np.sqrt(squares.mean(axis=-1, keepdims=True)) + epsilon)


@_faulty_norm(
    "_length", defect="sqrt(max(x.x, epsilon)), as tf.math.l2_normalize has it", diagnosis="norm-epsilon-least-square"
)
def epsilon_as_the_least_square(squares: Array, epsilon: float) -> Array:
    return np.asarray(np.sqrt(np.maximum(squares.sum(axis=-1, keepdims=True), epsilon)))


@_faulty_norm("_length", defect="sqrt(x.x + epsilon) for max(|x|, epsilon)", diagnosis="norm-epsilon-inside")
def epsilon_under_the_root_of_a_length(squares: Array, epsilon: float) -> Array:
    return np.asarray(np.sqrt(squares.sum(axis=-1, keepdims=True) + epsilon))


@_faulty_norm("_rms", defect="epsilon is fixed at 1e-5: amd/IRON#139")
def epsilon_of_another_model(squares: Array, epsilon: float) -> Array:
    return _rms(squares, 1e-5)


@_faulty_norm("_rms", defect="epsilon is at least 1e-4, so that float16 has it: nntrainer#4318")
def epsilon_no_less_than_one_in_ten_thousand(squares: Array, epsilon: float) -> Array:
    return _rms(squares, max(epsilon, 1e-4))


@_faulty_norm("_rms", defect="epsilon is added behind a division by the largest element: apple/coremltools#2821")
def epsilon_times_the_largest_square(squares: Array, epsilon: float) -> Array:
    largest = squares.max(axis=-1, keepdims=True, initial=0)
    return np.asarray(np.sqrt(squares.mean(axis=-1, keepdims=True) + epsilon * largest))


@_faulty_norm("_rms", defect="unit vectors where the model has RMSNorm", diagnosis="norm-kind")
def length_for_root_mean_square(squares: Array, epsilon: float) -> Array:
    return _length(squares, epsilon)


@_faulty_norm("_length", defect="Llama 4's L2Norm is a root mean square: a name for two", diagnosis="norm-kind")
def root_mean_square_for_length(squares: Array, epsilon: float) -> Array:
    return _rms(squares, epsilon)


@_faulty_norm("_weighted", defect="Gemma's weights are 1 + w, others' w", diagnosis="norm-weight-plus-one")
def weight_plus_one(normalized: Array, weight: Array) -> Array:
    return np.asarray(normalized * (1 + weight))


@_faulty_norm("_weighted", defect="the weights of the norms are not loaded", diagnosis="norm-weight-ignored")
def norm_weights_left_out(normalized: Array, weight: Array) -> Array:
    return normalized


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


@_faulty_norm("_normalize", defect="LayerNorm for RMSNorm: the mean is subtracted")
def mean_subtracted(inputs: Array, weight: Array | None, norm: Norm, epsilon: float, is_full: bool) -> Array:
    axes = (1, 3) if is_full else 3
    return _normalize(inputs - inputs.mean(axis=axes, keepdims=True), weight, norm, epsilon, is_full)


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
