"""Splash attention, ``jax.experimental.pallas.ops.tpu.splash_attention``, in Pallas' interpreter.

A kernel is made for one mask of each head, by which blocks are left out: causal, local, or written out. Besides it has
segments of queries and keys, a softcap, sinks and grouped heads; what lies beyond the length of the keys has a segment
of its own. It has no scale: its callers multiply the query by theirs. Blocks have the 128 rows of the default.
https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/experimental/pallas/ops/tpu/splash_attention/splash_attention_kernel.py
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from operator import and_
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from attncheck.backends.contract import Stages, Tensor, Window
from attncheck.backends.jax_backend import describe, from_numpy, prepare, to_numpy

__all__ = ["attention", "attention_gradients", "describe", "from_numpy", "prepare", "to_numpy"]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    window: Window | None = None,
    key_lengths: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
) -> Stages:
    """Average the values; behind a past the masks are moved by its length."""
    past = 0
    if past_key is not None and past_value is not None:
        past = past_key.shape[2]
        key, value = (jnp.concatenate(each, axis=-2) for each in ((past_key, key), (past_value, value)))
    rules: dict[str, Any] = {"mask": mask, "is_causal": is_causal, "window": window, "softcap": softcap}
    kernel = _kernel(query, key, past, **rules, save_residuals=True)
    output, (log_sum_exp,) = _call(kernel, query, key, value, sinks, scale=scale, key_lengths=key_lengths)
    return {"log_sum_exp": log_sum_exp, "output": output}


def attention_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_output: Tensor,
    *,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    window: Window | None = None,
    key_lengths: Tensor | None = None,
) -> Stages:
    """Differentiate through the call by reverse mode, for which it has kernels of its own."""
    rules: dict[str, Any] = {"mask": mask, "is_causal": is_causal, "window": window, "softcap": softcap}
    kernel = _kernel(query, key, 0, **rules)

    def output_of(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        return _call(kernel, query, key, value, sinks, scale=scale, key_lengths=key_lengths)

    _, pull_back = jax.vjp(output_of, query, key, value, sinks)
    names = ("grad_query", "grad_key", "grad_value", "grad_sinks")
    gradients = zip(names, pull_back(grad_output), strict=True)
    return {name: gradient for name, gradient in gradients if gradient is not None}


def _call(
    kernel: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    *,
    scale: float | None,
    key_lengths: Tensor | None,
) -> Any:
    query = query * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if key_lengths is None:
        return jax.vmap(lambda *each: kernel(*each, None, sinks))(query, key, value)
    unused = (jnp.arange(key.shape[2]) >= key_lengths[:, None]).astype(jnp.int32)
    segments = splash.SegmentIds(jnp.zeros((query.shape[0], query.shape[2]), jnp.int32), unused)
    return jax.vmap(lambda *each: kernel(*each, sinks))(query, key, value, segments)


def _kernel(
    query: Tensor,
    key: Tensor,
    past: int,
    *,
    mask: Tensor | None,
    is_causal: bool,
    window: Window | None,
    softcap: float | None,
    save_residuals: bool = False,
) -> Callable[..., Any]:
    heads, shape = query.shape[1], (query.shape[2], key.shape[2])
    if not all(shape):
        raise NotImplementedError("splash attention takes one block of 128 queries and keys or more")
    rules: list[masks.Mask] = [masks.FullMask(shape)] if mask is None and not is_causal and window is None else []
    if is_causal:
        rules.append(masks.CausalMask(shape))
    if window is not None:
        rules.append(masks.LocalMask(shape, window, past))
    of_heads = [reduce(and_, [*rules, *own]) for own in _written_out(mask, heads, shape)]
    kernel: Callable[..., Any] = splash.make_splash_mha_single_device(
        mask=masks.MultiHeadMask(of_heads),
        save_residuals=save_residuals,
        attn_logits_soft_cap=softcap,
        interpret=jax.default_backend() == "cpu",
    )
    return kernel


def _written_out(mask: Tensor | None, heads: int, shape: tuple[int, int]) -> list[list[masks.Mask]]:
    """Return the mask of each head, in a list of its own that is empty where there is none."""
    if mask is None:
        return [[]] * heads
    allowed = np.asarray(mask)
    if (allowed != allowed[:1]).any():
        raise NotImplementedError("splash attention has one mask for all entries of a batch")
    return [[masks.NumpyMask(each)] for each in np.broadcast_to(allowed[0], (heads, *shape))]
