"""Attention by ``keras.ops.dot_product_attention``.

Its arrays are (B, L, H, D), its mask is boolean with True = may attend. A softcap is for JAX on TPU alone, so it is
left out here. https://keras.io/api/ops/nn/#dot_product_attention-function
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from attncheck.backends.contract import Stages, Tensor
from attncheck.backends.tensorflow_keras import describe, from_numpy, gradients_of, prepare, to_numpy

__all__ = ["attention", "attention_gradients", "describe", "from_numpy", "prepare", "to_numpy"]


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
        padding = tf.sequence_mask(key_lengths, key.shape[2])[:, tf.newaxis, tf.newaxis, :]
        mask = padding if mask is None else tf.logical_and(mask, padding)
    query, key, value = (_swap_heads_and_length(each) for each in (query, key, value))
    output = keras.ops.dot_product_attention(query, key, value, bias=bias, mask=mask, scale=scale, is_causal=is_causal)
    return {"output": _swap_heads_and_length(output)}


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
    key_lengths: Tensor | None = None,
) -> Stages:
    """Differentiate through the call."""

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        options: dict[str, Any] = {"mask": mask, "is_causal": is_causal, "scale": scale, "key_lengths": key_lengths}
        return attention(query, key, value, bias=bias, **options)["output"]

    return gradients_of(attend, query, key, value, bias, grad_output)


def _swap_heads_and_length(inputs: Tensor) -> Tensor:
    return tf.transpose(inputs, (0, 2, 1, 3))  # (B, H, L, D) -> (B, L, H, D), and back
