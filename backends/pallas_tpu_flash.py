"""``jax.experimental.pallas.ops.tpu.flash_attention``, JAX's fused attention for TPUs, in Pallas' interpreter of those.

It has causality from the top left, a bias ``ab``, and segments of queries and of keys: what lies beyond the length of
the keys has a segment of its own. Its scale is 1 unless it is given. Blocks have the 128 rows of the default.
https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/experimental/pallas/ops/tpu/flash_attention.py
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu
from jax.experimental.pallas.ops.tpu.flash_attention import SegmentIds, flash_attention

from attncheck.backends.contract import Stages, Tensor
from attncheck.backends.jax_backend import describe, from_numpy, prepare, to_numpy

__all__ = ["attention", "attention_gradients", "describe", "from_numpy", "prepare", "to_numpy"]

_LANES = 128


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bias: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    key_lengths: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
) -> Stages:
    """Average the values; a past is a cache that the keys and values are appended to."""
    if past_key is not None and past_value is not None:
        key, value = (jnp.concatenate(each, axis=-2) for each in ((past_key, key), (past_value, value)))
    options = _options(query, key, is_causal, scale, key_lengths)
    with _interpreted():
        return {"output": flash_attention(query, key, value, _spread(bias, query, key), **options)}


def attention_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_output: Tensor,
    *,
    bias: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    key_lengths: Tensor | None = None,
) -> Stages:
    """Differentiate through the call by reverse mode, for which it has kernels of its own."""
    options = _options(query, key, is_causal, scale, key_lengths)

    def output_of(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        return flash_attention(query, key, value, _spread(bias, query, key), **options)

    with _interpreted():
        _, pull_back = jax.vjp(output_of, query, key, value, bias)
        gradients = pull_back(grad_output)
    names = ("grad_query", "grad_key", "grad_value", "grad_bias")
    return {name: gradient for name, gradient in zip(names, gradients, strict=True) if gradient is not None}


def _interpreted() -> AbstractContextManager[Any]:
    return tpu.force_tpu_interpret_mode() if jax.default_backend() == "cpu" else nullcontext()


def _spread(bias: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Write the bias out for every score: the call takes no other."""
    return None if bias is None else jnp.broadcast_to(bias, (*query.shape[:3], key.shape[2]))


def _options(
    query: Tensor, key: Tensor, is_causal: bool, scale: float | None, key_lengths: Tensor | None
) -> dict[str, Any]:
    if query.shape[1] != key.shape[1]:
        raise NotImplementedError("flash_attention takes as many heads of keys as of queries")
    if not query.shape[2] or not key.shape[2]:
        raise NotImplementedError("flash_attention takes one block of 128 queries and keys or more")
    if query.shape[3] > _LANES and query.shape[3] % _LANES:
        raise NotImplementedError("flash_attention takes widths of up to 128, and multiples of it")
    segments = None
    if key_lengths is not None:
        unused = jnp.arange(key.shape[2]) >= key_lengths[:, None]
        segments = SegmentIds(jnp.zeros((query.shape[0], query.shape[2]), jnp.int32), unused.astype(jnp.int32))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return {"causal": is_causal, "sm_scale": scale, "segment_ids": segments}
