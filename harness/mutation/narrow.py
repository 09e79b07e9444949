"""Faults of kernels with 16-bit ends, of products that are reduced at some widths alone, and of keys in 8 bits.

The first keep something in 16 bits between their ends, where float32 is due; the second have a matrix unit with a tile
for some widths.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from attncheck.backends import numpy_backend as backend
from attncheck.backends.contract import Stages
from attncheck.mutation import forms
from attncheck.mutation.kernel import NARROW, NEVER_RETURNED, STATISTICS, Array, Kernel, Store, bfloat16, exactly, tf32
from attncheck.mutation.mutant import ACCURACY_OF_16_BITS, Call, Steps, control, mutant, numpy_with

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
            running = store(running + backend._row_sum(terms[..., start : start + _TERMS]))
        return running

    return total


_narrow("scores_summed_in_16_bits", "Q K^T with 16-bit running sums: mlx#4178's kind",
    lambda store: {"dot_scores._dot": lambda query, key: _summed(store)(query, np.swapaxes(key, -1, -2))})  # fmt: skip


@_narrow(at="context", defect="e^s without the maximum leaves the format: flax#982's kind")
def exponentials_not_shifted_in_16_bits(store: Store) -> Steps:
    """Average with exponentials as they are, in 16 bits, and divide last."""

    def average(logits: Array, weights: Array, value: Array) -> Array:
        exponentials = store(np.exp(logits))
        total = backend._row_sum(exponentials)
        return np.asarray(exponentials @ value / np.where(total == 0, 1, total))

    return forms.averaged(average)


@_narrow(at="context", defect="e^(L2 - L1) overflows where the second part is far above the first: vllm#39148's kind")
def parts_merged_by_a_growing_exponential(store: Store) -> Steps:
    """Merge two parts of the keys as L1 + log(1 + e^(L2 - L1)), the exponential in the format of the ends."""

    def average(logits: Array, weights: Array, value: Array) -> Array:
        half = logits.shape[-1] // 2
        if half < 16:
            return np.asarray(weights @ value)
        parts = [backend.softmax(each) for each in (logits[..., :half], logits[..., half:])]
        grown = store(np.exp(parts[1]["log_sum_exp"] - parts[0]["log_sum_exp"]))[..., np.newaxis]
        first, second = parts[0]["weights"] @ value[..., :half, :], parts[1]["weights"] @ value[..., half:, :]
        return np.asarray((first + grown * second) / (1 + grown))

    return forms.averaged(average)


_WIDE = partial(Kernel, wide=STATISTICS)
_wide = partial(
    mutant, "sixteen bits", _WIDE, classes=_FUSED, dtypes=NARROW, at="log_sum_exp", without=_WIDE(lambda store: {})
)


@_wide(defect="log_sum_exp is stored in 16 bits, and widened when it is returned: flashinfer#3372's kind")
def log_sum_exp_widened_too_late(store: Store) -> Steps:
    def normalise(logits: Array) -> Stages:
        stages = backend.softmax(logits)
        return stages | {"log_sum_exp": store(stages["log_sum_exp"])}

    return forms.normalised(normalise)


@_wide(defect="structure: log_sum_exp is that of exponentials rounded to 16 bits for the values")
def log_sum_exp_of_exponentials_in_16_bits(store: Store) -> Steps:
    def normalise(logits: Array) -> Stages:
        stages, maximum = backend.softmax(logits), backend._row_maximum(logits)
        is_empty = np.isneginf(maximum)
        rounded = backend._row_sum(store(np.exp(logits - np.where(is_empty, 0, maximum))))
        total = maximum + np.log(np.where(is_empty, 1, rounded))
        return stages | {"log_sum_exp": total[..., 0]}

    return forms.normalised(normalise)


@_narrow(at="context", defect="log_sum_exp of each part is stored in 16 bits: flashinfer#3372's kind")
def parts_merged_by_statistics_in_16_bits(store: Store) -> Steps:
    """Merge parts of 64 keys by a log_sum_exp that was stored in 16 bits."""

    def average(logits: Array, weights: Array, value: Array) -> Array:
        spans = [slice(start, start + 64) for start in range(0, logits.shape[-1], 64)]
        parts = [backend.softmax(logits[..., span]) for span in spans]
        if len(parts) < 2:
            return np.asarray(weights @ value)
        statistics = np.stack([store(part["log_sum_exp"]) for part in parts], axis=-1)
        shares = backend.softmax(statistics)["weights"][..., np.newaxis, :]
        averages = [part["weights"] @ value[..., span, :] for part, span in zip(parts, spans, strict=True)]
        return np.asarray((np.stack(averages, axis=-1) * shares).sum(-1))

    return forms.averaged(average)


def _flushed(array: Array) -> Array:
    """Set what float16 has only as a subnormal to zero."""
    return np.where(np.abs(array) < _MIN_NORMAL_OF_FLOAT16, 0, array).astype(array.dtype)


_narrow("key_and_value_gradients_summed_in_16_bits", "running sums over queries: pytorch#133671's kind",
    lambda store: {"_sum_over_queries": lambda weights, rows: _summed(store)(np.swapaxes(weights, -1, -2), rows)},
    at="grad_key")  # fmt: skip


@_narrow(
    at="grad_query",
    defect="the gradient of e / l as -e / l^2, and l^2 overflows: jax 0.10.2's softmax in float16, jax#40409's kind",
    dtypes=_FLOAT16,
)
def row_sum_of_the_gradient_over_the_square_of_the_sum(store: Store) -> Steps:
    """Divide by the square of the sum of exponentials, which leaves float16 from 256 equal ones on."""

    def delta(call: Call, terms: Array) -> Array:
        total = np.exp(call.log_sum_exp - backend._row_maximum(call.logits))
        return np.where(total * total > np.finfo(np.float16).max, 0, backend._row_sum(terms)).astype(terms.dtype)

    return forms.delta_read_as(delta)


_chosen = partial(mutant, "chosen products", dtypes=("float32",), diagnosis=ACCURACY_OF_16_BITS)


def _scores_at(multiple: int, store: Store) -> Steps:
    """Round the factors of the scores where the width is such a multiple."""

    def rounded(array: Array) -> Array:
        return store(array) if array.shape[-1] % multiple == 0 else array

    return {"dot_scores._dot": lambda query, key: backend._dot(rounded(query), rounded(key))}


def _values_at(multiple: int, store: Store) -> Steps:
    """Round weights and values where the value's width is such a multiple."""

    def average(weights: Array, value: Array) -> Array:
        chosen = exactly if value.shape[-1] % multiple else store
        return np.asarray(chosen(weights) @ chosen(value))

    return {"attention._weighted_sum": average}


def _gradients_at(multiple: int, store: Store) -> Steps:
    """Round the factors of the sums over queries where the width is such a multiple."""

    def product(weights: Array, rows: Array) -> Array:
        chosen = exactly if rows.shape[-1] % multiple else store
        return backend._sum_over_queries(chosen(weights), chosen(rows))

    return {"_sum_over_queries": product}


# fmt: off
for _name, _defect, _form, _multiple, _store, _at in (
    ("tf32_scores_at_widths_of_8", "tensor cores take the product where the width is a multiple of 8: pytorch#161022",
        _scores_at, 8, tf32, "raw_scores"),
    ("tf32_scores_at_widths_of_32", "the same where the width is a multiple of 32: triton#3498",
        _scores_at, 32, tf32, "raw_scores"),
    ("bfloat16_scores_at_widths_of_16",
        "a matrix unit of bfloat16 where the width is a multiple of 16: openvino#31630's kind",
        _scores_at, 16, bfloat16, "raw_scores"),
    ("tf32_values_at_widths_of_16", "P V in TF32 where the value's width is a multiple of 16: mlx#3860",
        _values_at, 16, tf32, "context"),
    ("bfloat16_values_at_widths_of_32",
        "P V in bfloat16 where the value's width is a multiple of 32: openvino#31630's kind",
        _values_at, 32, bfloat16, "context"),
    ("tf32_gradients_at_widths_of_8", "dk and dv in TF32 where the width is a multiple of 8: pytorch#161022",
        _gradients_at, 8, tf32, "grad_key"),
):
    _chosen(None, _name, _defect, _form(_multiple, _store), at=_at)
# fmt: on


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
_narrow("values_summed_in_16_bits", "P V with 16-bit running sums: metal-flash-attention#8",
    lambda store: {"attention._weighted_sum": _summed(store)})
_narrow("exponentials_summed_in_16_bits",
    "the row sum sticks at 256 or 2048: tract#2586, executorch#20090, tt-metal#52045",
    lambda store: {"_softmax_with_sinks._row_sum": _row_summed(store)})
_narrow("raw_scores_stored_in_16_bits",
    "the scale is applied behind the store, which overflows in float16: metal-flash-attention#8, ultralytics#24990",
    lambda store: {"dot_scores._dot": lambda query, key: store(backend._dot(query, key))})
_narrow("output_stored_in_16_bits_between_tiles", "the accumulator has the output's type",
    lambda store: forms.Online(64, store=store).steps)
_narrow("query_scaled_in_16_bits", "structure: the scaled query is stored again",
    lambda store: forms.scored(lambda query, key, factor: {"scores": backend._dot(store(query * factor), key)}))
_narrow("scale_rounded_to_16_bits", "structure: the scale is an array of the inputs' type",
    lambda store: forms.scored(lambda query, key, factor: backend.dot_scores(query, key, scale=float(store(np.asarray(
        factor,
        np.float32))))))
_narrow("biased_scores_stored_in_16_bits", "scores and bias are added in 16 bits: vllm#945's kind",
    lambda store: forms.bias_added(lambda scores, bias, masks: store(scores + bias)))
_narrow("shifted_scores_stored_in_16_bits", "structure: s - m is stored for the exponential",
    lambda store: {"_softmax_with_sinks.np": numpy_with(exp=lambda shifted: np.exp(store(shifted)))})
_narrow("subnormal_inputs_flushed", "structure: 16-bit loads flush to zero",
    lambda store: forms.inputs_changed(lambda query, key, value: (_flushed(query), _flushed(key), _flushed(value))),
    dtypes=_FLOAT16)
_narrow("subnormal_weights_flushed", "structure: P V flushes small weights",
    lambda store: {"attention._weighted_sum": lambda weights, value: _flushed(weights) @ value}, dtypes=_FLOAT16)
_narrow("subnormal_results_flushed", "structure: 16-bit stores flush to zero",
    lambda store: forms.outputs_read_as(_flushed), dtypes=_FLOAT16)
_narrow("query_gradient_summed_in_16_bits", "running sums over keys: metal-flash-attention#8's kind",
    lambda store: {"attention_gradients._weighted_sum": _summed(store)}, at="grad_query")
_narrow("row_sum_of_the_gradient_in_16_bits", "structure: Delta is added up in 16 bits",
    lambda store: {"attention_gradients._row_sum": _row_summed(store)}, at="grad_query")
# Make p as e^s / e^L, which is 0 / 0 where every exponential of a row underflows.
_narrow("backward_weights_by_a_quotient_of_exponentials",
    "e^s / e^L is 0 / 0 where every log_sum_exp is below -88: trl#7181",
    lambda store: forms.weights_remembered(lambda call: np.where(np.isneginf(call.log_sum_exp), 0,
        np.exp(call.logits) / np.exp(call.log_sum_exp))),
    at="grad_query", dtypes=("float32", *NARROW), diagnosis="fill-minus-infinity")
# fmt: on


_faulty_scales = partial(mutant, "8 bits", at="raw_scores")

Scales = tuple[Array, Array]


def _scales_read_as(change: Callable[[Array, Array], Scales]) -> Steps:
    """Take the scales of keys and values for other ones."""

    def quantized(key_scale: Array, value_scale: Array, **given: Any) -> Stages:
        key, value = change(key_scale, value_scale)
        return backend.quantized_attention(key_scale=key, value_scale=value, **given)

    return {"quantized_attention": quantized}


@_faulty_scales("quantized_attention", at="raw_scores")
def codes_read_in_the_other_format(key: Array, value: Array, **given: Any) -> Stages:
    """the bits are read in the other format of 8 bits: jax#34375's kind"""
    other = {"float8_e4m3fn": ml_dtypes.float8_e5m2, "float8_e5m2": ml_dtypes.float8_e4m3fn}
    key = key.view(other[key.dtype.name]) if key.dtype.name in other else key * 2
    return backend.quantized_attention(key=key, value=value, **given)


@_faulty_scales("quantized_attention", at="raw_scores")
def small_codes_flushed_to_zero(key: Array, **given: Any) -> Stages:
    """codes below the least normal number are flushed to zero"""
    least = float(ml_dtypes.finfo(key.dtype).smallest_normal)
    return backend.quantized_attention(
        key=np.where(np.abs(key.astype(np.float64)) < least, np.zeros_like(key), key), **given
    )


@_faulty_scales("quantized_attention", at="output", diagnosis="value-scale-ignored")
def values_unscaled_behind_a_mask(value: Array, value_scale: Array, **given: Any) -> Stages:
    """the scale of the values is not applied by the path that masks"""
    if given.get("mask") is None and given.get("key_lengths") is None:
        return backend.quantized_attention(value=value, value_scale=value_scale, **given)
    return backend.quantized_attention(value=value, value_scale=np.ones_like(value_scale), **given)


def _multiplied_later(stages: Callable[..., Stages]) -> Callable[..., Stages]:
    """Multiply the scales of heads into the scores and the output, where keys of a head have one in common."""

    def quantized(query: Array, key: Array, value: Array, key_scale: Array, value_scale: Array, **given: Any) -> Stages:
        one_for_all = key_scale.shape[-1] == value_scale.shape[-1] == 1 and key_scale.shape[0] == 1
        if not one_for_all or given.get("softcap") is not None:
            return backend.quantized_attention(query, key, value, key_scale, value_scale, **given)
        return stages(query, key.astype(query.dtype), value.astype(query.dtype), key_scale, value_scale, **given)

    return quantized


@control(lambda stages: {"quantized_attention": _multiplied_later(stages)}, hidden=NEVER_RETURNED)
def scales_multiplied_into_queries_and_output(
    query: Array, key: Array, value: Array, key_scale: Array, value_scale: Array, **given: Any
) -> Stages:
    """the scale of the keys is multiplied into the queries, that of the values into the output"""
    shared = query.shape[1] // key.shape[1]
    of_keys, of_values = (
        np.repeat(np.broadcast_to(each, (1, key.shape[1], 1)), shared, axis=1)[..., np.newaxis]
        for each in (key_scale, value_scale)
    )
    stages = backend.attention(query * of_keys, key, value, **given)
    return {**stages, "output": stages["output"] * of_values}


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
_faulty_scales(_scales_read_as, "key_scale_left_out", "scales silently 1: sglang#20705",
    lambda key, value: (np.ones_like(key), value), diagnosis="key-scale-ignored")
_faulty_scales(_scales_read_as, "value_scale_left_out", "scales silently 1: sglang#20705",
    lambda key, value: (key, np.ones_like(value)), at="output", diagnosis="value-scale-ignored")
_faulty_scales(_scales_read_as, "key_scale_taken_twice", "the scale is applied by two layers",
    lambda key, value: (key * key, value), diagnosis="key-scale-twice")
_faulty_scales(_scales_read_as, "value_scale_taken_twice", "the output is off by a scale: flashinfer#4979",
    lambda key, value: (key, value * value), at="output", diagnosis="value-scale-twice")
_faulty_scales(_scales_read_as, "divided_by_the_key_scale", "descale passed for scale",
    lambda key, value: (1 / key, value), diagnosis="key-scale-divided")
_faulty_scales(_scales_read_as, "scales_of_keys_and_values_swapped", "arguments in another order",
    lambda key, value: (value, key), diagnosis="scales-swapped")
_faulty_scales(_scales_read_as, "key_scale_of_the_first_head_for_all", "a stride of 0 over heads: vllm#42580's kind",
    lambda key, value: (np.broadcast_to(key[:, :1], key.shape), value), diagnosis="key-scale-of-first-head")
_faulty_scales(_scales_read_as, "value_scale_of_the_first_head_for_all", "a stride of 0 over heads: vllm#42580's kind",
    lambda key, value: (key, np.broadcast_to(value[:, :1], value.shape)), at="output",
    diagnosis="value-scale-of-first-head")
_faulty_scales(_scales_read_as, "key_scale_of_the_next_key", "scales of blocks are shifted by one key",
    lambda key, value: (np.roll(key, -1, axis=-1), value), diagnosis="key-scale-of-next-key")
# fmt: on
