"""``jax.nn.dot_product_attention``, by its implementation that runs everywhere, ``xla``, and its gradients; ``JIT`` is
both inside ``jax.jit``, as models call them.

JAX's own documentation: https://docs.jax.dev/en/latest/_autosummary/jax.nn.dot_product_attention.html. A key that may
not be attended gets a large negative score, so that a row without any other key attends to all of them alike.
Values have to be as wide as queries and keys.
"""

from __future__ import annotations

from inspect import signature
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from attncheck.backends.contract import Stages, Tensor, Window
from attncheck.backends.jax_backend import describe, from_numpy, prepare, to_numpy
from attncheck.backends.jax_jit import compiled

# Versions up to 0.8.0 return the output alone, without the log_sum_exp.
_HAS_RESIDUAL = "return_residual" in signature(jax.nn.dot_product_attention).parameters

__all__ = ["JIT", "attention", "attention_gradients", "describe", "from_numpy", "prepare", "to_numpy"]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    key_lengths: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
) -> Stages:
    """Average the values; a past is a cache that the keys and values are appended to."""
    if past_key is not None and past_value is not None:
        if window is not None:
            raise NotImplementedError("the local window of jax.nn.dot_product_attention does not count a past")
        key, value = (jnp.concatenate(each, axis=-2) for each in ((past_key, key), (past_value, value)))
    options = _options(query, key, mask=mask, is_causal=is_causal, scale=scale, window=window, key_lengths=key_lengths)
    if not _HAS_RESIDUAL:
        return {"output": _call(query, key, value, bias, **options).swapaxes(1, 2)}
    output, log_sum_exp = _call(query, key, value, bias, return_residual=True, **options)
    return {"log_sum_exp": log_sum_exp.swapaxes(1, 2), "output": output.swapaxes(1, 2)}  # back to (B, H, Lq, ...)


def attention_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_output: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    key_lengths: Tensor | None = None,
) -> Stages:
    """Differentiate through the call by reverse mode."""
    options = _options(query, key, mask=mask, is_causal=is_causal, scale=scale, window=window, key_lengths=key_lengths)

    def output_of(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        return _call(query, key, value, bias, **options).swapaxes(1, 2)

    _, pull_back = jax.vjp(output_of, query, key, value, bias)
    names = ("grad_query", "grad_key", "grad_value", "grad_bias")
    gradients = zip(names, pull_back(grad_output), strict=True)
    return {name: gradient for name, gradient in gradients if gradient is not None}


def _call(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, **options: Any) -> Any:
    query, key, value = (each.swapaxes(1, 2) for each in (query, key, value))  # (B, H, L, D) -> (B, L, H, D)
    return jax.nn.dot_product_attention(query, key, value, bias, implementation="xla", **options)


def _options(
    query: Tensor,
    key: Tensor,
    *,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    window: Window | None,
    key_lengths: Tensor | None,
) -> dict[str, Any]:
    """Return what the call takes besides the arrays that it is differentiated by."""
    options = {"mask": mask, "is_causal": is_causal, "scale": scale}
    if window is not None:
        # The call has no unbounded side, but no key is further away than the longer of the two sequences.
        furthest = max(query.shape[-2], key.shape[-2])
        options["local_window_size"] = tuple(furthest if side is None else side for side in window)
    if key_lengths is not None:
        options["key_value_seq_lengths"] = key_lengths.astype(jnp.int32)
    return options


JIT = SimpleNamespace(
    prepare=prepare,
    describe=describe,
    from_numpy=from_numpy,
    to_numpy=to_numpy,
    attention=compiled(attention),
    attention_gradients=compiled(attention_gradients),
)
