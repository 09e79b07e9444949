"""``jax.experimental.pallas.ops.gpu.attention.mha``, JAX's fused attention for GPUs, in Pallas' interpreter.

It has causality from the top left, a scale (1 unless it is given) and ``segment_ids``, which queries and keys share:
one attends to the other where both have the same. The log-sum-exp that ``return_residuals`` adds is of base 2. Blocks
have 16 rows, the least that a product takes on a GPU; a sequence of another length is one block, as the default makes
of every sequence of up to 128.
https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/experimental/pallas/ops/gpu/attention.py
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha

from attncheck.backends.contract import Stages, Tensor
from attncheck.backends.jax_backend import describe, from_numpy, prepare, to_numpy

__all__ = [
    "attention",
    "attention_gradients",
    "describe",
    "from_numpy",
    "packed_attention",
    "packed_attention_gradients",
    "prepare",
    "to_numpy",
]

_BLOCK, _LONGEST = 16, 128


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
) -> Stages:
    """Average the values; a past is a cache that the keys and values are appended to."""
    if past_key is not None and past_value is not None:
        key, value = (jnp.concatenate(each, axis=-2) for each in ((past_key, key), (past_value, value)))
    return _attend(query, key, value, None, is_causal, scale)


def attention_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_output: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Stages:
    """Differentiate through the call by reverse mode, for which it has a kernel of its own."""
    return _differentiate(query, key, value, grad_output, None, is_causal=is_causal, scale=scale)


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Stages:
    """Give every sequence a segment of its own."""
    return _attend(query, key, value, _segments(cu_seqlens_q, cu_seqlens_k), is_causal, scale)


def packed_attention_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_output: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Stages:
    """Differentiate the same."""
    segments = _segments(cu_seqlens_q, cu_seqlens_k)
    return _differentiate(query, key, value, grad_output, segments, is_causal=is_causal, scale=scale)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, segments: Tensor | None, is_causal: bool, scale: float | None
) -> Stages:
    options = _options(query, key, is_causal, scale)
    output, log_sum_exp = mha(*_rows_first(query, key, value), segments, return_residuals=True, **options)
    return {"log_sum_exp": log_sum_exp * math.log(2), "output": output.swapaxes(1, 2)}


def _differentiate(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_output: Tensor,
    segments: Tensor | None,
    *,
    is_causal: bool,
    scale: float | None,
) -> Stages:
    options = _options(query, key, is_causal, scale)

    def output_of(*tensors: Tensor) -> Tensor:
        return mha(*_rows_first(*tensors), segments, **options).swapaxes(1, 2)

    _, pull_back = jax.vjp(output_of, query, key, value)
    return dict(zip(("grad_query", "grad_key", "grad_value"), pull_back(grad_output), strict=True))


def _rows_first(*tensors: Tensor) -> list[Tensor]:
    return [each.swapaxes(1, 2) for each in tensors]  # (B, H, L, D) -> (B, L, H, D)


def _options(query: Tensor, key: Tensor, is_causal: bool, scale: float | None) -> dict[str, Any]:
    if query.shape[1] != key.shape[1]:
        raise NotImplementedError("mha takes as many heads of keys as of queries")
    queries, keys = _block(query.shape[2]), _block(key.shape[2])
    if query.shape[2] // queries != key.shape[2] // keys:  # its backward pass needs as many blocks of each
        queries, keys = _whole(query.shape[2]), _whole(key.shape[2])
    return {
        "sm_scale": 1 / math.sqrt(query.shape[-1]) if scale is None else scale,
        "causal": is_causal,
        "block_sizes": BlockSizes(queries, keys, queries, keys, queries, keys),
        "interpret": jax.default_backend() == "cpu",
    }


def _block(length: int) -> int:
    return _BLOCK if length and length % _BLOCK == 0 else _whole(length)


def _whole(length: int) -> int:
    if not 0 < length <= _LONGEST:
        raise NotImplementedError("mha takes up to 128 queries and keys, or as many blocks of both")
    return length


def _segments(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Tensor:
    """Return the number of each position's sequence: (1, L)."""
    first, same = np.asarray(cu_seqlens_q), np.asarray(cu_seqlens_k)
    if not np.array_equal(first, same):
        raise NotImplementedError("the segments of mha are those of queries and keys alike")
    return jnp.asarray(np.repeat(np.arange(len(first) - 1, dtype=np.int32), np.diff(first))[None])
