"""Fused attention in Triton, after its tutorial: a block of queries, all blocks of keys, a running maximum and sum.

Tri Dao, FlashAttention-2 (2023), Algorithm 1; https://triton-lang.org/main/getting-started/tutorials/06-fused-attention.html
Without a bias, powers are of 2 and log2(e) is multiplied into the scale, as there. With ``TRITON_INTERPRET=1`` the
kernel runs on a processor, in Triton's interpreter.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from attncheck.backends import torch_backend
from attncheck.backends.contract import CallOptions, Stages, pass_as_options
from attncheck.backends.torch_backend import from_numpy, prepare, to_numpy

__all__ = ["attention", "describe", "from_numpy", "prepare", "to_numpy"]

_QUERIES, _KEYS, _LEAST_WIDTH = 32, 32, 16
"""Rows of a block, and what a product of blocks has at least on every axis."""
_MAX_WIDTH_ON_GPU = 256
"""An H100 has 227 KiB of shared memory for a block; a width of 512 takes 258 KiB in 16 bits."""


def describe() -> dict[str, str]:
    """Return the versions and what may change the numbers."""
    return {**torch_backend.describe(), "triton": triton.__version__}


@triton.jit  # type: ignore[untyped-decorator]
def _attention_kernel(  # type: ignore[no-untyped-def] # Triton's compiler gives every parameter its type
    query, key, value, mask, bias, key_lengths, output, log_sum_exp,
    query_batch, query_head, query_row, query_column,
    key_batch, key_head, key_row, key_column,
    value_batch, value_head, value_row, value_column,
    mask_batch, mask_head, mask_row, mask_column,
    bias_batch, bias_head, bias_row, bias_column,
    heads, group, queries, keys, width, value_width, scale,
    HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LENGTHS: tl.constexpr, IS_CAUSAL: tl.constexpr,
    BASE_TWO: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    shared = head // group
    rows = (tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)).to(tl.int64)
    columns, value_columns = tl.arange(0, WIDTH), tl.arange(0, VALUE_WIDTH)
    query += batch * query_batch + head * query_head
    key += batch * key_batch + shared * key_head
    value += batch * value_batch + shared * value_head
    is_row = (rows < queries)[:, None]
    used = keys
    if HAS_LENGTHS:
        used = tl.load(key_lengths + batch)
    last = used
    if IS_CAUSAL:
        last = tl.minimum(used, (tl.program_id(0) + 1) * QUERIES)
    block = tl.load(
        query + rows[:, None] * query_row + columns[None, :] * query_column,
        mask=is_row & (columns < width)[None, :], other=0.0,
    )  # fmt: skip
    maximum = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mean = tl.zeros([QUERIES, VALUE_WIDTH], tl.float32)
    for first in range(0, last, KEYS):
        places = (first + tl.arange(0, KEYS)).to(tl.int64)
        is_key = places < used
        key_block = tl.load(
            key + places[None, :] * key_row + columns[:, None] * key_column,
            mask=is_key[None, :] & (columns < width)[:, None], other=0.0,
        )  # fmt: skip
        scores = tl.dot(block, key_block, input_precision="ieee") * scale
        allowed = is_key[None, :] & is_row
        if HAS_BIAS:
            at = batch * bias_batch + head * bias_head + rows[:, None] * bias_row + places[None, :] * bias_column
            scores += tl.load(bias + at, mask=allowed, other=0.0).to(tl.float32)
        if IS_CAUSAL:
            allowed = allowed & (places[None, :] <= rows[:, None])
        if HAS_MASK:
            at = batch * mask_batch + head * mask_head + rows[:, None] * mask_row + places[None, :] * mask_column
            allowed = allowed & (tl.load(mask + at, mask=allowed, other=0) != 0)
        scores = tl.where(allowed, scores, float("-inf"))
        higher = tl.maximum(maximum, tl.max(scores, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # of no key yet: -inf minus -inf would be NaN
        if BASE_TWO:
            weights, factor = tl.exp2(scores - shift[:, None]), tl.exp2(maximum - shift)
        else:
            weights, factor = tl.exp(scores - shift[:, None]), tl.exp(maximum - shift)
        value_block = tl.load(
            value + places[:, None] * value_row + value_columns[None, :] * value_column,
            mask=is_key[:, None] & (value_columns < value_width)[None, :], other=0.0,
        )  # fmt: skip
        product = tl.dot(weights.to(value_block.dtype), value_block, input_precision="ieee")
        total, mean, maximum = total * factor + tl.sum(weights, 1), mean * factor[:, None] + product, higher
    mean = mean / tl.where(total == 0, 1.0, total)[:, None]
    start = tl.program_id(1).to(tl.int64) * queries + rows
    at = start[:, None] * value_width + value_columns[None, :]
    tl.store(output + at, mean.to(output.dtype.element_ty), mask=is_row & (value_columns < value_width)[None, :])
    logarithm = tl.log(total) + maximum
    if BASE_TWO:
        logarithm = (tl.log2(total) + maximum) * 0.6931471805599453
    logarithm = tl.where(total == 0, float("-inf"), logarithm)
    tl.store(log_sum_exp + start, logarithm, mask=rows < queries)


@pass_as_options("mask", "bias", "is_causal", "scale", "key_lengths", "past_key", "past_value")
def attention(query: Tensor, key: Tensor, value: Tensor, options: CallOptions) -> Stages:
    """Attend in one kernel."""
    key_lengths, (key, value, _) = options.key_lengths, options.with_past(key, value, torch.cat)
    batch, heads, queries, width = query.shape
    keys, value_width = key.size(2), value.size(3)
    if query.is_cuda and max(width, value_width) > _MAX_WIDTH_ON_GPU:
        raise NotImplementedError(f"its blocks fit into a GPU's shared memory up to a width of {_MAX_WIDTH_ON_GPU}")
    output = query.new_empty((batch, heads, queries, value_width))
    log_sum_exp = query.new_empty((batch, heads, queries), dtype=torch.float32)
    scale = 1 / math.sqrt(width) if options.scale is None else options.scale
    spread = (batch, heads, queries, keys)
    mask = None if options.mask is None else options.mask.to(torch.int8).expand(spread)
    bias = None if options.bias is None else options.bias.expand(spread)
    blank = query  # stands where nothing is read
    if not output.numel():
        return {"log_sum_exp": log_sum_exp, "output": output}
    _attention_kernel[(triton.cdiv(queries, _QUERIES), batch * heads)](
        query, key, value, *(blank if array is None else array for array in (mask, bias, key_lengths)),
        output, log_sum_exp,
        *query.stride(), *key.stride(), *value.stride(),
        *((0, 0, 0, 0) if mask is None else mask.stride()), *((0, 0, 0, 0) if bias is None else bias.stride()),
        heads, heads // key.size(1), queries, keys, width, value_width,
        scale * math.log2(math.e) if bias is None else scale,
        HAS_MASK=mask is not None, HAS_BIAS=bias is not None, HAS_LENGTHS=key_lengths is not None,
        IS_CAUSAL=options.is_causal, BASE_TWO=bias is None,
        QUERIES=_QUERIES, KEYS=_KEYS,
        WIDTH=max(_LEAST_WIDTH, triton.next_power_of_2(width)),
        VALUE_WIDTH=max(_LEAST_WIDTH, triton.next_power_of_2(value_width)),
    )  # fmt: skip
    return {"log_sum_exp": log_sum_exp, "output": output}
