"""JAX's attention for GPUs, ``jax.experimental.pallas.ops.gpu``: three kernels, in Pallas' interpreter.

``attention.mha`` has causality from the top left, a scale (1 unless it is given) and ``segment_ids``, which queries and
keys share: one attends to the other where both have the same. The log-sum-exp that ``return_residuals`` adds is of base
2. Blocks have 16 rows, the least that a product takes on a GPU; a sequence of another length is one block, as the
default makes of every sequence of up to 128.

``decode_attention.gqa`` takes one query of each sequence. ``start_idx`` and ``kv_seq_len`` name the first key and the
end. The keys are split, each part is attended to by itself, and the parts are merged: in as many parts as there are
blocks of 16 keys, at most 16, the default. The residuals are the sum of the exponentials and their maximum.

``paged_attention`` takes one query, too. It has no scale: the query is multiplied by it and stored. The pages of a
sequence are split into as many parts as its default allows, up to 16; each part is attended to by itself, in one block.
https://github.com/jax-ml/jax/tree/jax-v0.10.2/jax/experimental/pallas/ops/gpu
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha
from jax.experimental.pallas.ops.gpu.decode_attention import gqa
from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention as paged

from attncheck.backends import jax_backend
from attncheck.backends.contract import CallOptions, Stages, Tensor, pass_as_options
from attncheck.backends.derived import make_gradients, with_functions

_BLOCK, _LONGEST = 16, 128
_MOST_PARTS, _MOST_PAGES_OF_A_BLOCK = 16, 8


def _mha_attention(*, has_residuals: bool) -> Callable[..., Stages]:
    """Return attention by mha; with residuals, which have no gradients, it has a log-sum-exp."""

    @pass_as_options("is_causal", "scale", "past_key", "past_value")
    def attention(query: Tensor, key: Tensor, value: Tensor, options: CallOptions) -> Stages:
        """Average the values; a past is a cache that the keys and values are appended to."""
        key, value, _ = options.with_past(key, value, jnp.concatenate)
        return _call_mha(query, key, value, None, options, has_residuals=has_residuals)

    return attention


def _mha_packed(*, has_residuals: bool) -> Callable[..., Stages]:
    """Return the same for sequences that lie one after the other."""

    @pass_as_options("is_causal", "scale")
    def packed_attention(
        query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, options: CallOptions
    ) -> Stages:
        """Attend with one segment per sequence."""
        segments = _segment_ids(cu_seqlens_q, cu_seqlens_k)
        return _call_mha(query, key, value, segments, options, has_residuals=has_residuals)

    return packed_attention


def _call_mha(
    query: Tensor, key: Tensor, value: Tensor, segments: Tensor | None, options: CallOptions, *, has_residuals: bool
) -> Stages:
    arguments = _arguments(query, key, options.is_causal, options.scale)
    rows_first = [tensor.swapaxes(1, 2) for tensor in (query, key, value)]  # (B, H, L, D) -> (B, L, H, D)
    if not has_residuals:
        return {"output": mha(*rows_first, segments, **arguments).swapaxes(1, 2)}
    output, log_sum_exp = mha(*rows_first, segments, return_residuals=True, **arguments)
    return {"log_sum_exp": log_sum_exp * math.log(2), "output": output.swapaxes(1, 2)}


def _arguments(query: Tensor, key: Tensor, is_causal: bool, scale: float | None) -> dict[str, Any]:
    if query.shape[1] != key.shape[1]:
        raise NotImplementedError("mha takes as many heads of keys as of queries")
    queries, keys = _block_size(query.shape[2]), _block_size(key.shape[2])
    if query.shape[2] // queries != key.shape[2] // keys:  # its backward pass needs as many blocks of each
        queries, keys = _pad_to_block(query.shape[2]), _pad_to_block(key.shape[2])
    return {
        "sm_scale": 1 / math.sqrt(query.shape[-1]) if scale is None else scale,
        "causal": is_causal,
        "block_sizes": BlockSizes(queries, keys, queries, keys, queries, keys),
        "interpret": jax.default_backend() == "cpu",
    }


def _block_size(length: int) -> int:
    return _BLOCK if length and length % _BLOCK == 0 else _pad_to_block(length)


def _pad_to_block(length: int) -> int:
    if not 0 < length <= _LONGEST:
        raise NotImplementedError("mha takes up to 128 queries and keys, or as many blocks of both")
    return length


def _segment_ids(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Tensor:
    """Return the number of each position's sequence: (1, L)."""
    first, same = np.asarray(cu_seqlens_q), np.asarray(cu_seqlens_k)
    if not np.array_equal(first, same):
        raise NotImplementedError("the segments of mha are those of queries and keys alike")
    return jnp.asarray(np.repeat(np.arange(len(first) - 1, dtype=np.int32), np.diff(first))[None])


@pass_as_options("scale", "window", "key_lengths", "past_key", "past_value")
def _decode_attention(query: Tensor, key: Tensor, value: Tensor, options: CallOptions) -> Stages:
    """Attend with a single query; a window becomes the first and the last key."""
    if query.shape[2] != 1:
        raise NotImplementedError("gqa takes one query of each sequence")
    key, value, past = options.with_past(key, value, jnp.concatenate)
    keys = key.shape[2]
    if not keys:
        raise NotImplementedError("gqa takes one key or more")
    start, end = _first_and_last_keys(past, keys, options)
    output, (total, maximum) = gqa(
        query[:, :, 0], key.swapaxes(1, 2), value.swapaxes(1, 2), start, end,
        sm_scale=options.scale, block_k=_BLOCK, k_splits=_largest_divisor(keys // _BLOCK, _MOST_PARTS),
        return_residuals=True, interpret=jax.default_backend() == "cpu",
    )  # fmt: skip
    log_sum_exp = maximum + jnp.log(total)
    return {"log_sum_exp": log_sum_exp[..., None], "output": output[:, :, None]}


def _first_and_last_keys(past: int, keys: int, options: CallOptions) -> tuple[Tensor | None, Tensor | None]:
    before, after = options.window or (None, None)
    start = None if before is None else jnp.int32(max(past - before, 0))
    end = None if options.key_lengths is None else options.key_lengths.astype(jnp.int32)
    if after is not None:
        end = jnp.minimum(keys if end is None else end, jnp.int32(min(past + after + 1, keys)))
    return start, end


def _paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    key_lengths: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
) -> Stages:
    """Attend with a single query, to which causality allows all used keys."""
    if query.shape[2] != 1:
        raise NotImplementedError("paged_attention takes one query of each sequence")
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    pages = block_table.shape[1]
    parts = _largest_divisor(pages, _MOST_PARTS)
    by_head = (cache.transpose(2, 0, 1, 3) for cache in (key_pages, value_pages))
    output = paged(
        query[:, :, 0] * jnp.asarray(factor, query.dtype), *by_head,
        block_table.astype(jnp.int32), key_lengths.astype(jnp.int32),
        pages_per_compute_block=_largest_divisor(pages // parts, _MOST_PAGES_OF_A_BLOCK), k_splits=parts,
        attn_logits_soft_cap=softcap, interpret=jax.default_backend() == "cpu",
    )  # fmt: skip
    return {"output": output[:, :, None]}


def _largest_divisor(number: int, most: int) -> int:
    return max((divisor for divisor in range(1, most + 1) if number % divisor == 0), default=1)


_mha = {"attention": _mha_attention(has_residuals=True), "packed_attention": _mha_packed(has_residuals=True)}
_mha_gradients = {
    f"{forward.__name__}_gradients": make_gradients(forward, jax_backend.gradients)
    for forward in (_mha_attention(has_residuals=False), _mha_packed(has_residuals=False))
}
MHA = with_functions(jax_backend, {**_mha, **_mha_gradients})
DECODE = with_functions(jax_backend, {"attention": _decode_attention})
PAGED = with_functions(jax_backend, {"paged_attention": _paged_attention})
