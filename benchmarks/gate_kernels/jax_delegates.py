"""JAX kernels that call JAX's attention although they are offered as kernels: right numbers, no kernel.

attncheck check --implementation benchmarks/gate_kernels/jax_delegates.py:fused_attention
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import nn as kernels

framework = "jax"
capabilities = {"dtypes": ["float32"]}  # the library computes the softmax in float32


def _with_equal_widths(query, key, value):
    """Return (B, L, H, D) with zeros that give queries, keys and values one width."""
    width = max(query.shape[-1], value.shape[-1])
    arrays = (jnp.pad(array, [(0, 0)] * 3 + [(0, width - array.shape[-1])]) for array in (query, key, value))
    return [array.swapaxes(1, 2) for array in arrays]


@partial(jax.jit, static_argnames=("is_causal", "name"))
def _run(query, key, value, mask, scale, *, is_causal, name):
    """Run a function of the module, and write zeros for queries without a key."""
    arrays = _with_equal_widths(query * scale, key, value)
    output = getattr(kernels, name)(*arrays, mask=mask, scale=1.0, is_causal=is_causal)
    output = output.swapaxes(1, 2)[..., : value.shape[-1]]
    if mask is None:
        return output
    seen = mask & jnp.tri(query.shape[2], key.shape[2], dtype=bool) if is_causal else mask
    return jnp.where(seen.any(axis=-1, keepdims=True), output, 0)


def fused_attention(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Compiles its steps into one program, one step of which is the whole."""
    if not query.size or not key.size:
        raise NotImplementedError("the program needs at least one query and one key")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    name = "_".join(["dot", "product", "attention"])
    return _run(query, key, value, mask, scale, is_causal=is_causal, name=name)


class _Kernels:
    """Kernels by their names."""

    flash = staticmethod(kernels.dot_product_attention)


def flash_attention(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Runs the kernel that its class lists as flash."""
    if not query.size or not key.size:
        raise NotImplementedError("the kernel needs at least one query and one key")
    causal = jnp.tri(query.shape[2], key.shape[2], dtype=bool)[None, None] if is_causal else None
    shown = causal if mask is None else mask if causal is None else mask & causal
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    output = _Kernels.flash(*_with_equal_widths(query * scale, key, value), mask=shown, scale=1.0).swapaxes(1, 2)
    output = output[..., : value.shape[-1]]
    return output if shown is None else jnp.where(shown.any(axis=-1, keepdims=True), output, 0)
