"""Additive scores by the layer ``keras.layers.AdditiveAttention``, which calls itself Bahdanau-style.

The layer returns its output or its weights, never its scores. They are taken from ``_calculate_scores``, the method
that makes it another layer than ``keras.layers.Attention``: masks, softmax and the average of the values are that
layer's. As its users do, dense layers project query and key before it; its weight ``scale`` is the score vector.
https://keras.io/api/layers/attention_layers/additive_attention/
"""

from __future__ import annotations

import keras
import tensorflow as tf

from attncheck.backends.contract import Stages, Tensor
from attncheck.backends.tensorflow_keras import describe, from_numpy, prepare, to_numpy

__all__ = ["additive_scores", "describe", "from_numpy", "prepare", "to_numpy"]


def additive_scores(
    query: Tensor,
    key: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    score_vector: Tensor,
    *,
    score_bias: Tensor | None = None,
) -> Stages:
    """Project query and key, and score them; heads are folded into the batch."""
    batch, heads, queries, _ = query.shape
    query = _project(query, query_weight, score_bias)
    key = _project(key, key_weight, None)
    layer = keras.layers.AdditiveAttention(dtype=query.dtype.name)
    layer.build([query.shape, key.shape])
    layer.scale.assign(score_vector)
    scores = layer._calculate_scores(query, key)
    return {"scores": tf.reshape(scores, (batch, heads, queries, key.shape[1]))}


def _project(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(B, H, L, D) -> (B*H, L, A)."""
    batch, heads, length, width = inputs.shape
    dense = keras.layers.Dense(weight.shape[1], use_bias=bias is not None, dtype=inputs.dtype.name)
    dense.build((batch * heads, length, width))
    dense.set_weights([weight] if bias is None else [weight, bias])
    return dense(tf.reshape(inputs, (batch * heads, length, width)))
