"""``keras.ops.dot_product_attention`` on JAX, in jax.jit: see ``keras_dpa.py``."""

from __future__ import annotations

import jax
import keras

from attncheck.backends import jax_backend
from attncheck.backends.contract import Stages, Tensor
from attncheck.backends.jax_backend import from_numpy, to_numpy
from attncheck.backends.keras_dpa import attend, require, with_lengths

__all__ = ["attention", "describe", "from_numpy", "prepare", "to_numpy"]


def prepare(dtype: str, threads: int) -> None:
    """Prepare the framework. Raises ``RuntimeError`` where Keras computes by another."""
    require("jax")
    jax_backend.prepare(dtype, threads)


def describe() -> dict[str, str]:
    """Return the versions and what may change the numbers."""
    return {**jax_backend.describe(), "keras": keras.__version__}


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    key_lengths: Tensor | None = None,
) -> Stages:
    """Attend; lengths become a mask."""
    if key_lengths is not None:
        mask = with_lengths(mask, key_lengths, key.shape[2])
    call = jax.jit(attend, static_argnames=("is_causal", "scale"))
    output = call(query, key, value, mask=mask, bias=bias, is_causal=is_causal, scale=scale)
    return {"output": output}
