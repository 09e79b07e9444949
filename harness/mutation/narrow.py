"""Faults of kernels with 16-bit ends, and of float32 attention that takes reduced products at some widths alone.

The first keep something in 16 bits between their ends, where float32 is due; the second have a matrix unit with a tile
for some widths.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from attncheck.backends.contract import Stages
from attncheck.backends.numpy_backend import _dot, _row_maximum, _row_sum, _sum_over_queries, dot_scores, softmax
from attncheck.mutation import arithmetic
from attncheck.mutation.arithmetic import Array, Store
from attncheck.mutation.backward_forms import delta_read_as, weights_remembered
from attncheck.mutation.forward_forms import averaged, inputs_changed, normalised, outputs_read_as, scored
from attncheck.mutation.kernel import NARROW, STATISTICS, Kernel
from attncheck.mutation.mask_forms import bias_added
from attncheck.mutation.mutant import ACCURACY_OF_16_BITS, mutant
from attncheck.mutation.online import Online
from attncheck.mutation.variant import Call, Steps, numpy_with

_TERMS = 16
"""Products that a matrix unit adds up before the running sum is stored."""
_MIN_NORMAL_OF_FLOAT16 = 2.0**-14
_FLOAT16 = ("float16",)

RIGHT = Kernel(lambda store: {})
_FUSED = {"bfloat16": "fused", "float16": "fused"}
_narrow = partial(mutant, "sixteen bits", Kernel, classes=_FUSED, without=RIGHT, dtypes=NARROW, at="context")


def _summed(store: Store) -> Callable[[Array, Array], Array]:
    """Multiply matrices, the running sum stored after every few terms."""

    def product(left: Array, right: Array) -> Array:
        total = np.zeros((), left.dtype)
        for start in range(0, left.shape[-1], _TERMS):
            span = slice(start, start + _TERMS)
            total = store(total + left[..., span] @ right[..., span, :])
        return np.asarray(total)

    return product


def _row_summed(store: Store) -> Callable[[Array], Array]:
    """Add the terms of a row up, the running sum stored after every few of them."""

    def total(terms: Array) -> Array:
        running = np.zeros((*terms.shape[:-1], 1), terms.dtype)
        for start in range(0, terms.shape[-1], _TERMS):
            running = store(running + _row_sum(terms[..., start : start + _TERMS]))
        return running

    return total


@_narrow(at="context", defect="Q K^T with 16-bit running sums: mlx#4178's kind")
def scores_summed_in_16_bits(store: Store) -> Steps:
    product = _summed(store)
    return {"dot_scores._dot": lambda query, key: product(query, np.swapaxes(key, -1, -2))}


@_narrow(at="context", defect="e^s without the maximum leaves the format: flax#982's kind")
def exponentials_not_shifted_in_16_bits(store: Store) -> Steps:
    """Average with exponentials as they are, in 16 bits, and divide last."""

    def average(logits: Array, weights: Array, value: Array) -> Array:
        exponentials = store(np.exp(logits))
        total = _row_sum(exponentials)
        return np.asarray(exponentials @ value / np.where(total == 0, 1, total))

    return averaged(average)


@_narrow(at="context", defect="e^(L2 - L1) overflows where the second part is far above the first: vllm#39148's kind")
def parts_merged_by_a_growing_exponential(store: Store) -> Steps:
    """Merge two parts of the keys as L1 + log(1 + e^(L2 - L1)), the exponential in the format of the ends."""

    def average(logits: Array, weights: Array, value: Array) -> Array:
        half = logits.shape[-1] // 2
        if half < 16:
            return np.asarray(weights @ value)
        parts = [softmax(each) for each in (logits[..., :half], logits[..., half:])]
        grown = store(np.exp(parts[1]["log_sum_exp"] - parts[0]["log_sum_exp"]))[..., np.newaxis]
        first, second = parts[0]["weights"] @ value[..., :half, :], parts[1]["weights"] @ value[..., half:, :]
        return np.asarray((first + grown * second) / (1 + grown))

    return averaged(average)


_WIDE = partial(Kernel, wide=STATISTICS)
_wide = partial(
    mutant, "sixteen bits", _WIDE, classes=_FUSED, dtypes=NARROW, at="log_sum_exp", without=_WIDE(lambda store: {})
)


@_wide(defect="log_sum_exp is stored in 16 bits, and widened when it is returned: flashinfer#3372's kind")
def log_sum_exp_widened_too_late(store: Store) -> Steps:
    def normalise(logits: Array) -> Stages:
        stages = softmax(logits)
        return stages | {"log_sum_exp": store(stages["log_sum_exp"])}

    return normalised(normalise)


@_wide(defect="structure: log_sum_exp is that of exponentials rounded to 16 bits for the values")
def log_sum_exp_of_exponentials_in_16_bits(store: Store) -> Steps:
    def normalise(logits: Array) -> Stages:
        stages, maximum = softmax(logits), _row_maximum(logits)
        is_empty = np.isneginf(maximum)
        rounded = _row_sum(store(np.exp(logits - np.where(is_empty, 0, maximum))))
        total = maximum + np.log(np.where(is_empty, 1, rounded))
        return stages | {"log_sum_exp": total[..., 0]}

    return normalised(normalise)


@_narrow(at="context", defect="log_sum_exp of each part is stored in 16 bits: flashinfer#3372's kind")
def parts_merged_by_statistics_in_16_bits(store: Store) -> Steps:
    """Merge parts of 64 keys by a log_sum_exp that was stored in 16 bits."""

    def average(logits: Array, weights: Array, value: Array) -> Array:
        spans = [slice(start, start + 64) for start in range(0, logits.shape[-1], 64)]
        parts = [softmax(logits[..., span]) for span in spans]
        if len(parts) < 2:
            return np.asarray(weights @ value)
        statistics = np.stack([store(part["log_sum_exp"]) for part in parts], axis=-1)
        shares = softmax(statistics)["weights"][..., np.newaxis, :]
        averages = [part["weights"] @ value[..., span, :] for part, span in zip(parts, spans, strict=True)]
        return np.asarray((np.stack(averages, axis=-1) * shares).sum(-1))

    return averaged(average)


def _flushed(array: Array) -> Array:
    """Set what float16 has only as a subnormal to zero."""
    return np.where(np.abs(array) < _MIN_NORMAL_OF_FLOAT16, 0, array).astype(array.dtype)


@_narrow(at="grad_key", defect="running sums over queries: pytorch#133671's kind")
def key_and_value_gradients_summed_in_16_bits(store: Store) -> Steps:
    product = _summed(store)
    return {"_sum_over_queries": lambda weights, rows: product(np.swapaxes(weights, -1, -2), rows)}


@_narrow(
    at="grad_query",
    defect="the gradient of e / l as -e / l^2, and l^2 overflows: jax 0.10.2's softmax in float16, jax#40409's kind",
    dtypes=_FLOAT16,
)
def row_sum_of_the_gradient_over_the_square_of_the_sum(store: Store) -> Steps:
    """Divide by the square of the sum of exponentials, which leaves float16 from 256 equal ones on."""

    def delta(call: Call, terms: Array) -> Array:
        total = np.exp(call.log_sum_exp - _row_maximum(call.logits))
        return np.where(total * total > np.finfo(np.float16).max, 0, _row_sum(terms)).astype(terms.dtype)

    return delta_read_as(delta)


_chosen = partial(mutant, "chosen products", dtypes=("float32",), diagnosis=ACCURACY_OF_16_BITS)


def _scores_at(multiple: int, store: Store) -> Steps:
    """Round the factors of the scores where the width is such a multiple."""

    def rounded(array: Array) -> Array:
        return store(array) if array.shape[-1] % multiple == 0 else array

    return {"dot_scores._dot": lambda query, key: _dot(rounded(query), rounded(key))}


def _values_at(multiple: int, store: Store) -> Steps:
    """Round weights and values where the value's width is such a multiple."""

    def average(weights: Array, value: Array) -> Array:
        is_chosen = value.shape[-1] % multiple == 0
        return np.asarray(store(weights) @ store(value) if is_chosen else weights @ value)

    return {"attention._weighted_sum": average}


def _gradients_at(multiple: int, store: Store) -> Steps:
    """Round the factors of the sums over queries where the width is such a multiple."""

    def product(weights: Array, rows: Array) -> Array:
        is_chosen = rows.shape[-1] % multiple == 0
        return _sum_over_queries(store(weights), store(rows)) if is_chosen else _sum_over_queries(weights, rows)

    return {"_sum_over_queries": product}


for _name, _defect, _form, _multiple, _store, _at in (
    (
        "tf32_scores_at_widths_of_8",
        "tensor cores take the product where the width is a multiple of 8: pytorch#161022",
        _scores_at,
        8,
        arithmetic.tf32,
        "raw_scores",
    ),
    (
        "tf32_scores_at_widths_of_32",
        "the same where the width is a multiple of 32: triton#3498",
        _scores_at,
        32,
        arithmetic.tf32,
        "raw_scores",
    ),
    (
        "bfloat16_scores_at_widths_of_16",
        "a matrix unit of bfloat16 where the width is a multiple of 16: openvino#31630's kind",
        _scores_at,
        16,
        arithmetic.bfloat16,
        "raw_scores",
    ),
    (
        "tf32_values_at_widths_of_16",
        "P V in TF32 where the value's width is a multiple of 16: mlx#3860",
        _values_at,
        16,
        arithmetic.tf32,
        "context",
    ),
    (
        "bfloat16_values_at_widths_of_32",
        "P V in bfloat16 where the value's width is a multiple of 32: openvino#31630's kind",
        _values_at,
        32,
        arithmetic.bfloat16,
        "context",
    ),
    (
        "tf32_gradients_at_widths_of_8",
        "dk and dv in TF32 where the width is a multiple of 8: pytorch#161022",
        _gradients_at,
        8,
        arithmetic.tf32,
        "grad_key",
    ),
):
    _chosen(at=_at, defect=_defect, name=_name)(_form(_multiple, _store))


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
_narrow("values_summed_in_16_bits", "P V with 16-bit running sums: metal-flash-attention#8",
    lambda store: {"attention._weighted_sum": _summed(store)})
_narrow("exponentials_summed_in_16_bits",
    "the row sum sticks at 256 or 2048: tract#2586, executorch#20090, tt-metal#52045",
    lambda store: {"_softmax_with_sinks._row_sum": _row_summed(store)})
_narrow("raw_scores_stored_in_16_bits",
    "the scale is applied behind the store, which overflows in float16: metal-flash-attention#8, ultralytics#24990",
    lambda store: {"dot_scores._dot": lambda query, key: store(_dot(query, key))})
_narrow("output_stored_in_16_bits_between_tiles", "the accumulator has the output's type",
    lambda store: Online(64, store=store).steps)
_narrow("query_scaled_in_16_bits", "structure: the scaled query is stored again",
    lambda store: scored(lambda query, key, factor: {"scores": _dot(store(query * factor), key)}))
_narrow("scale_rounded_to_16_bits", "structure: the scale is an array of the inputs' type",
    lambda store: scored(lambda query, key, factor: dot_scores(query, key, scale=float(store(np.asarray(factor,
        np.float32))))))
_narrow("biased_scores_stored_in_16_bits", "scores and bias are added in 16 bits: vllm#945's kind",
    lambda store: bias_added(lambda scores, bias, masks: store(scores + bias)))
_narrow("shifted_scores_stored_in_16_bits", "structure: s - m is stored for the exponential",
    lambda store: {"_softmax_with_sinks.np": numpy_with(exp=lambda shifted: np.exp(store(shifted)))})
_narrow("subnormal_inputs_flushed", "structure: 16-bit loads flush to zero",
    lambda store: inputs_changed(lambda query, key, value: (_flushed(query), _flushed(key), _flushed(value))),
    dtypes=_FLOAT16)
_narrow("subnormal_weights_flushed", "structure: P V flushes small weights",
    lambda store: {"attention._weighted_sum": lambda weights, value: _flushed(weights) @ value}, dtypes=_FLOAT16)
_narrow("subnormal_results_flushed", "structure: 16-bit stores flush to zero",
    lambda store: outputs_read_as(_flushed), dtypes=_FLOAT16)
_narrow("query_gradient_summed_in_16_bits", "running sums over keys: metal-flash-attention#8's kind",
    lambda store: {"attention_gradients._weighted_sum": _summed(store)}, at="grad_query")
_narrow("row_sum_of_the_gradient_in_16_bits", "structure: Delta is added up in 16 bits",
    lambda store: {"attention_gradients._row_sum": _row_summed(store)}, at="grad_query")
# Make p as e^s / e^L, which is 0 / 0 where every exponential of a row underflows.
_narrow("backward_weights_by_a_quotient_of_exponentials",
    "e^s / e^L is 0 / 0 where every log_sum_exp is below -88: trl#7181",
    lambda store: weights_remembered(lambda call: np.where(np.isneginf(call.log_sum_exp), 0,
        np.exp(call.logits) / np.exp(call.log_sum_exp))),
    at="grad_query", dtypes=("float32", *NARROW), diagnosis="fill-minus-infinity")
