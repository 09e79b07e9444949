"""``jax.nn.dot_product_attention`` and its gradients inside ``jax.jit``, as models call it."""

from __future__ import annotations

from attncheck.backends import jax_dpa
from attncheck.backends.jax_backend import describe, from_numpy, prepare, to_numpy
from attncheck.backends.jax_jit import compiled

__all__ = ["attention", "attention_gradients", "describe", "from_numpy", "prepare", "to_numpy"]

attention = compiled(jax_dpa.attention)
attention_gradients = compiled(jax_dpa.attention_gradients)
