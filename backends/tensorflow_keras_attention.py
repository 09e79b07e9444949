"""Attention by the layer ``keras.layers.Attention``, which calls itself Luong-style.

It has no heads: they are folded into the batch. Its inputs come in the order query, value, key; its scale is 1 unless
it gets a weight for it; its masks are those of queries and of keys.
https://keras.io/api/layers/attention_layers/attention/
"""

from __future__ import annotations

import math
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
    is_causal: bool = False,
    scale: float | None = None,
    key_lengths: Tensor | None = None,
) -> Stages:
    """Fold the heads into the batch and call the layer."""
    batch, heads, queries, width = query.shape
    if key.shape[1] != heads:
        raise NotImplementedError("keras.layers.Attention has no grouped heads")
    if key_lengths is not None:
        padding = tf.sequence_mask(key_lengths, key.shape[2])[:, tf.newaxis, tf.newaxis, :]
        mask = padding if mask is None else tf.logical_and(mask, padding)
    value_mask = None if mask is None else _mask_of_keys(mask, (batch, heads, 1, key.shape[2]))
    scale = 1 / math.sqrt(width) if scale is None else scale
    layer = keras.layers.Attention(use_scale=scale != 1, dtype=query.dtype.name)
    inputs = [_fold_heads(each) for each in (query, value, key)]
    layer.build([each.shape for each in inputs])
    if scale != 1:
        layer.scale.assign(scale)
    output = layer(inputs, mask=None if value_mask is None else [None, value_mask], use_causal_mask=is_causal)
    return {"output": tf.reshape(output, (batch, heads, queries, value.shape[-1]))}


def attention_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_output: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    key_lengths: Tensor | None = None,
) -> Stages:
    """Differentiate through the layer."""

    def attend(query: Tensor, key: Tensor, value: Tensor, _: Tensor | None) -> Tensor:
        options: dict[str, Any] = {"mask": mask, "is_causal": is_causal, "scale": scale, "key_lengths": key_lengths}
        return attention(query, key, value, **options)["output"]

    return gradients_of(attend, query, key, value, None, grad_output)


def _mask_of_keys(mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return (B*H, Lk)."""
    if mask.shape[2] != 1:
        raise NotImplementedError("keras.layers.Attention takes a mask of keys, not one of its own for every query")
    return tf.reshape(tf.broadcast_to(mask, shape), (shape[0] * shape[1], shape[3]))


def _fold_heads(inputs: Tensor) -> Tensor:
    batch, heads, length, width = inputs.shape
    return tf.reshape(inputs, (batch * heads, length, width))  # (B, H, L, D) -> (B*H, L, D)
