"""JAX's attention for TPUs, ``jax.experimental.pallas.ops.tpu``: two kernels, in Pallas' interpreter of those.

``flash_attention`` has causality from the top left, a bias ``ab``, and segments of queries and of keys: what lies
beyond the length of the keys has a segment of its own. Its scale is 1 unless it is given.

``splash_attention`` is made for one mask of each head, by which blocks are left out: causal, local, or written out.
Besides it has segments, a softcap, sinks and grouped heads. It has no scale: its callers multiply the query by theirs.

Blocks have the 128 rows of the default. https://github.com/jax-ml/jax/tree/jax-v0.10.2/jax/experimental/pallas/ops/tpu
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import reduce, wraps
from operator import and_
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu
from jax.experimental.pallas.ops.tpu.flash_attention import SegmentIds, flash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from attncheck.backends import jax_backend
from attncheck.backends.contract import CallOptions, Stages, Tensor, pass_as_options
from attncheck.backends.derived import make_gradients, with_functions

_LANES = 128


@pass_as_options("bias", "is_causal", "scale", "key_lengths", "past_key", "past_value")
def _flash_attention(query: Tensor, key: Tensor, value: Tensor, options: CallOptions) -> Stages:
    """Average the values; a past is a cache that the keys and values are appended to."""
    key, value, _ = options.with_past(key, value, jnp.concatenate)
    if query.shape[1] != key.shape[1]:
        raise NotImplementedError("flash_attention takes as many heads of keys as of queries")
    if not query.shape[2] or not key.shape[2]:
        raise NotImplementedError("flash_attention takes one block of 128 queries and keys or more")
    if query.shape[3] > _LANES and query.shape[3] % _LANES:
        raise NotImplementedError("flash_attention takes widths of up to 128, and multiples of it")
    lengths, bias, scale = options.key_lengths, options.bias, options.scale
    return {
        "output": flash_attention(
            query,
            key,
            value,
            # It is written out for every score: the call takes no other.
            None if bias is None else jnp.broadcast_to(bias, (*query.shape[:3], key.shape[2])),
            causal=options.is_causal,
            sm_scale=1 / math.sqrt(query.shape[-1]) if scale is None else scale,
            segment_ids=None if lengths is None else SegmentIds(*_segment_ids(query, key, lengths)),
        )
    }


def _segment_ids(query: Tensor, key: Tensor, key_lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return segments of queries and keys: what lies beyond the length of the keys has another."""
    unused = jnp.arange(key.shape[2]) >= key_lengths[:, None]
    return jnp.zeros((query.shape[0], query.shape[2]), jnp.int32), unused.astype(jnp.int32)


def _interpret_off_tpu(function: Callable[..., Stages]) -> Callable[..., Stages]:
    """Return a function that is interpreted where there is no TPU, with the backward pass in it."""

    @wraps(function)
    def called(*tensors: Tensor, **options: Any) -> Stages:
        with tpu.force_tpu_interpret_mode() if jax.default_backend() == "cpu" else nullcontext():
            return function(*tensors, **options)

    return called


def _make_splash_attention(*, has_residuals: bool) -> Callable[..., Stages]:
    """Return attention by the kernel; with residuals, which have no gradients, it has a log-sum-exp."""

    @pass_as_options(
        "mask", "sinks", "is_causal", "scale", "softcap", "window", "key_lengths", "past_key", "past_value"
    )
    def attention(query: Tensor, key: Tensor, value: Tensor, options: CallOptions) -> Stages:
        """Average the values; after a past, the masks are shifted by its length."""
        lengths, scale = options.key_lengths, options.scale
        key, value, past = options.with_past(key, value, jnp.concatenate)
        kernel = splash.make_splash_mha_single_device(
            mask=_make_head_masks(options, past, query.shape[1], (query.shape[2], key.shape[2])),
            save_residuals=has_residuals,
            attn_logits_soft_cap=options.softcap,
            interpret=jax.default_backend() == "cpu",
        )
        query = query * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        if lengths is None:
            returned = jax.vmap(lambda *inputs: kernel(*inputs, None, options.sinks))(query, key, value)
        else:
            segments = splash.SegmentIds(*_segment_ids(query, key, lengths))
            returned = jax.vmap(lambda *inputs: kernel(*inputs, options.sinks))(query, key, value, segments)
        if not has_residuals:
            return {"output": returned}
        output, (log_sum_exp,) = returned
        return {"log_sum_exp": log_sum_exp, "output": output}

    return attention


def _make_head_masks(options: CallOptions, past: int, heads: int, shape: tuple[int, int]) -> masks.MultiHeadMask:
    if not all(shape):
        raise NotImplementedError("splash attention takes one block of 128 queries and keys or more")
    mask, is_causal, window = options.mask, options.is_causal, options.window
    rules: list[masks.Mask] = [masks.FullMask(shape)] if mask is None and not is_causal and window is None else []
    if is_causal:
        rules.append(masks.CausalMask(shape))
    if window is not None:
        rules.append(masks.LocalMask(shape, window, past))
    if mask is None:
        return masks.MultiHeadMask([reduce(and_, rules)] * heads)
    allowed = np.asarray(mask)
    if (allowed != allowed[:1]).any():
        raise NotImplementedError("splash attention has one mask for all entries of a batch")
    head_masks = np.broadcast_to(allowed[0], (heads, *shape))
    return masks.MultiHeadMask([reduce(and_, [*rules, masks.NumpyMask(head_mask)]) for head_mask in head_masks])


_flash_gradients = make_gradients(_flash_attention, jax_backend.gradients)
FLASH = with_functions(
    jax_backend,
    {"attention": _interpret_off_tpu(_flash_attention), "attention_gradients": _interpret_off_tpu(_flash_gradients)},
)
_splash_gradients = make_gradients(_make_splash_attention(has_residuals=False), jax_backend.gradients)
SPLASH = with_functions(
    jax_backend, {"attention": _make_splash_attention(has_residuals=True), "attention_gradients": _splash_gradients}
)
