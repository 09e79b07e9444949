"""Faults of keys and values in 8 bits: scales left out, taken twice or of another; and right ways to apply them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from attncheck.backends.contract import Stages
from attncheck.backends.numpy_backend import attention, quantized_attention
from attncheck.mutation.arithmetic import Array
from attncheck.mutation.kernel import NEVER_RETURNED
from attncheck.mutation.mutant import control, mutant
from attncheck.mutation.variant import Steps

_faulty_scales = partial(mutant, "8 bits", at="raw_scores")

Scales = tuple[Array, Array]


def _scales_read_as(change: Callable[[Array, Array], Scales]) -> Steps:
    """Take the scales of keys and values for other ones."""

    def quantized(key_scale: Array, value_scale: Array, **given: Any) -> Stages:
        key, value = change(key_scale, value_scale)
        return quantized_attention(key_scale=key, value_scale=value, **given)

    return {"quantized_attention": quantized}


@_faulty_scales(
    "quantized_attention", at="raw_scores", defect="the bits are read in the other format of 8 bits: jax#34375's kind"
)
def codes_read_in_the_other_format(key: Array, value: Array, **given: Any) -> Stages:
    other = {"float8_e4m3fn": ml_dtypes.float8_e5m2, "float8_e5m2": ml_dtypes.float8_e4m3fn}
    key = key.view(other[key.dtype.name]) if key.dtype.name in other else key * 2
    return quantized_attention(key=key, value=value, **given)


@_faulty_scales(
    "quantized_attention", at="raw_scores", defect="codes below the least normal number are flushed to zero"
)
def small_codes_flushed_to_zero(key: Array, **given: Any) -> Stages:
    least = float(ml_dtypes.finfo(key.dtype).smallest_normal)
    return quantized_attention(key=np.where(np.abs(key.astype(np.float64)) < least, np.zeros_like(key), key), **given)


@_faulty_scales(
    "quantized_attention",
    at="output",
    defect="the scale of the values is not applied by the path that masks",
    diagnosis="value-scale-ignored",
)
def values_unscaled_behind_a_mask(value: Array, value_scale: Array, **given: Any) -> Stages:
    if given.get("mask") is None and given.get("key_lengths") is None:
        return quantized_attention(value=value, value_scale=value_scale, **given)
    return quantized_attention(value=value, value_scale=np.ones_like(value_scale), **given)


def _multiplied_later(stages: Callable[..., Stages]) -> Callable[..., Stages]:
    """Multiply the scales of heads into the scores and the output, where keys of a head have one in common."""

    def quantized(query: Array, key: Array, value: Array, key_scale: Array, value_scale: Array, **given: Any) -> Stages:
        one_for_all = key_scale.shape[-1] == value_scale.shape[-1] == 1 and key_scale.shape[0] == 1
        if not one_for_all or given.get("softcap") is not None:
            return quantized_attention(query, key, value, key_scale, value_scale, **given)
        return stages(query, key.astype(query.dtype), value.astype(query.dtype), key_scale, value_scale, **given)

    return quantized


@control(
    lambda stages: {"quantized_attention": _multiplied_later(stages)},
    why="the scale of the keys is multiplied into the queries, that of the values into the output",
    hidden=NEVER_RETURNED,
)
def scales_multiplied_into_queries_and_output(
    query: Array, key: Array, value: Array, key_scale: Array, value_scale: Array, **given: Any
) -> Stages:
    shared = query.shape[1] // key.shape[1]
    of_keys, of_values = (
        np.repeat(np.broadcast_to(each, (1, key.shape[1], 1)), shared, axis=1)[..., np.newaxis]
        for each in (key_scale, value_scale)
    )
    stages = attention(query * of_keys, key, value, **given)
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
