"""``keras.ops.dot_product_attention`` on PyTorch and on JAX: the same call, computed by another library.

Which one is the environment's to say (``KERAS_BACKEND``), once for a process. Its arrays are (B, L, H, D), its mask is
boolean with True = may attend. A softcap is for JAX on TPUs alone, so it is left out here.
https://keras.io/api/ops/nn/#dot_product_attention-function
"""

from __future__ import annotations

import keras

from attncheck.backends.contract import Tensor


def require(backend: str) -> None:
    """Raise ``RuntimeError`` where Keras computes by another library."""
    if keras.backend.backend() != backend:
        raise RuntimeError(f"Keras computes by {keras.backend.backend()}; expected {backend}")


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    bias: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Average the values, (B, H, L, D)."""
    query, key, value = (keras.ops.swapaxes(each, 1, 2) for each in (query, key, value))  # (B, H, L, D) -> (B, L, H, D)
    output = keras.ops.dot_product_attention(query, key, value, bias=bias, mask=mask, scale=scale, is_causal=is_causal)
    return keras.ops.swapaxes(output, 1, 2)


def with_lengths(mask: Tensor | None, key_lengths: Tensor, keys: int) -> Tensor:
    """Return a mask that leaves out what is behind the lengths."""
    lengths = keras.ops.reshape(keras.ops.cast(key_lengths, "int32"), (-1, 1, 1, 1))
    kept = keras.ops.arange(keys, dtype="int32") < lengths
    return kept if mask is None else keras.ops.logical_and(mask, kept)
