"""Attention by Keras on TensorFlow: three layers.

``keras.layers.Attention``, which calls itself Luong-style, has no heads: they are folded into the batch. Its inputs
come in the order query, value, key; its scale is 1 unless it gets a weight for it; its masks are those of queries and
of keys. https://keras.io/api/layers/attention_layers/attention/

``keras.layers.AdditiveAttention``, which calls itself Bahdanau-style, returns its output or its weights, never its
scores. They are taken from ``_calculate_scores``, the method that makes it another layer than
``keras.layers.Attention``: masks, softmax and the average of the values are that layer's. As its users do, dense layers
project query and key before it; its weight ``scale`` is the score vector.
https://keras.io/api/layers/attention_layers/additive_attention/

``keras.layers.MultiHeadAttention`` takes its inputs in the order query, value, key; its weights are (E, H, D), and
(H, Dv, Eo) at the output. It always scales by 1/sqrt(D) and always projects the output.
https://keras.io/api/layers/attention_layers/multi_head_attention/
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from inspect import signature
from typing import Any

import keras
import tensorflow as tf

from attncheck.backends import tensorflow_backend
from attncheck.backends.contract import CallOptions, Stages, Tensor, Window, pass_as_options
from attncheck.backends.derived import with_functions, with_gradients
from attncheck.backends.library_arrays import FrameworkArrays, KerasArrays

LIBRARY = KerasArrays(FrameworkArrays(tensorflow_backend), "tensorflow")


def _mask_beyond_lengths(mask: Tensor | None, key_lengths: Tensor | None, keys: int) -> Tensor | None:
    """Return a mask without the keys after the lengths; the mask itself if there are no lengths."""
    if key_lengths is None:
        return mask
    padding = tf.sequence_mask(key_lengths, keys)[:, tf.newaxis, tf.newaxis, :]
    return padding if mask is None else tf.logical_and(mask, padding)


@pass_as_options("mask", "is_causal", "scale", "key_lengths")
def _layer_attention(query: Tensor, key: Tensor, value: Tensor, options: CallOptions) -> Stages:
    """Fold the heads into the batch and call the layer."""
    batch, heads, queries, width = query.shape
    if key.shape[1] != heads:
        raise NotImplementedError("keras.layers.Attention has no grouped heads")
    scale = 1 / math.sqrt(width) if options.scale is None else options.scale
    keys = key.shape[2]
    value_mask = _mask_beyond_lengths(options.mask, options.key_lengths, keys)
    if value_mask is not None:  # (B*H, Lk)
        if value_mask.shape[2] != 1:
            raise NotImplementedError("keras.layers.Attention takes a mask of keys, not one of its own for every query")
        value_mask = tf.reshape(tf.broadcast_to(value_mask, (batch, heads, 1, keys)), (batch * heads, keys))
    layer = keras.layers.Attention(use_scale=scale != 1, dtype=query.dtype.name)
    inputs = [_fold_heads(tensor) for tensor in (query, value, key)]
    layer.build([tensor.shape for tensor in inputs])
    if scale != 1:
        layer.scale.assign(scale)
    output = layer(inputs, mask=None if value_mask is None else [None, value_mask], use_causal_mask=options.is_causal)
    return {"output": tf.reshape(output, (batch, heads, queries, value.shape[-1]))}


def _fold_heads(inputs: Tensor) -> Tensor:
    batch, heads, length, width = inputs.shape
    return tf.reshape(inputs, (batch * heads, length, width))  # (B, H, L, D) -> (B*H, L, D)


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


def _layer_call(*, return_attention_scores: bool) -> Callable[..., Stages]:
    """Return the operation; with its attention scores, the layer computes one operation after the other."""

    def multi_head_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        heads: int,
        kv_heads: int | None = None,
        query_weight: Tensor,
        key_weight: Tensor,
        value_weight: Tensor,
        output_weight: Tensor | None = None,
        query_bias: Tensor | None = None,
        key_bias: Tensor | None = None,
        value_bias: Tensor | None = None,
        output_bias: Tensor | None = None,
        mask: Tensor | None = None,
        is_causal: bool = False,
        window: Window | None = None,
        key_lengths: Tensor | None = None,
    ) -> Stages:
        """Set the layer's weights and call it."""
        if output_weight is None:
            raise NotImplementedError(
                "keras.layers.MultiHeadAttention always projects the output: it needs output_weight"
            )
        if kv_heads not in (None, heads):
            raise NotImplementedError(
                "keras.layers.MultiHeadAttention needs as many key and value heads as query heads"
            )
        is_causal, sliding_window = _causality_and_window(is_causal, window)
        kernels = {"query": query_weight, "key": key_weight, "value": value_weight, "output": output_weight}
        biases = {"query": query_bias, "key": key_bias, "value": value_bias, "output": output_bias}
        layer = _build_layer(
            heads,
            tuple(tuple(inputs.shape) for inputs in (query, value, key)),
            tuple(tuple(weight.shape) for weight in kernels.values()),
            any(bias is not None for bias in biases.values()),
            sliding_window,
            query.dtype.name,
        )
        _set_weights(layer, kernels, biases)
        asked = {**_mask_arguments(mask, key_lengths, key.shape[1]), "use_causal_mask": is_causal}
        if not return_attention_scores:
            return {"output": layer(query, value, key, **asked)}
        output, weights = layer(query, value, key, **asked, return_attention_scores=True)
        return {"weights": weights, "output": output}

    return multi_head_attention


def _mask_arguments(mask: Tensor | None, key_lengths: Tensor | None, keys: int) -> dict[str, Tensor]:
    """Return the call's masks: of keys, (B, Lk), and of all, (B, Lq, Lk), or (B, H, Lq, Lk) if heads differ."""
    padding = None if key_lengths is None else tf.sequence_mask(key_lengths, keys)
    if mask is None or mask.shape[1] == 1:
        return {"value_mask": padding, "attention_mask": None if mask is None else tf.squeeze(mask, 1)}
    if padding is not None:
        # The layer aligns a mask of keys with the last three axes of this one: with heads, not with the batch.
        mask = tf.logical_and(mask, padding[:, tf.newaxis, tf.newaxis, :])
    return {"attention_mask": mask}


def _causality_and_window(is_causal: bool, window: Window | None) -> tuple[bool, int | None]:
    """Return use_causal_mask and sliding_window: the layer's windows have equal sides, or end at the query."""
    if window is None:
        return is_causal, None
    left, right = window
    if is_causal or right == 0:
        return True, None if left is None else left + 1
    if left != right:
        raise NotImplementedError("keras.layers.MultiHeadAttention has windows that are causal or alike on both sides")
    return False, None if left is None else left + 1


# Building a layer takes as long as many calls; its weights are set for each call.
@lru_cache(maxsize=64)
def _build_layer(
    heads: int,
    input_shapes: tuple[tuple[int, ...], ...],
    weight_shapes: tuple[tuple[int, ...], ...],
    use_bias: bool,
    sliding_window: int | None,
    dtype: str,
) -> Any:
    (_, query_width), _, (_, value_width), (_, output_width) = weight_shapes
    window = {} if sliding_window is None else {"sliding_window": sliding_window}
    if window.keys() - signature(keras.layers.MultiHeadAttention).parameters.keys():
        raise NotImplementedError(f"keras.layers.MultiHeadAttention of Keras {keras.__version__} has no windows")
    layer = keras.layers.MultiHeadAttention(
        heads,
        key_dim=query_width // heads,
        value_dim=value_width // heads,
        use_bias=use_bias,
        output_shape=output_width,
        dtype=dtype,
        **window,
    )
    layer.build(*input_shapes)
    return layer


def _set_weights(layer: Any, weights: dict[str, Tensor], biases: dict[str, Tensor | None]) -> None:
    """Set kernels (E, H, D) and biases (H, D); a missing bias is zero, as in a new layer."""
    for name, weight in weights.items():
        dense = getattr(layer, f"{name}_dense")
        dense.kernel.assign(tf.reshape(weight, dense.kernel.shape))
        if dense.bias is not None:
            bias = biases[name]
            dense.bias.assign(tf.zeros_like(dense.bias) if bias is None else tf.reshape(bias, dense.bias.shape))


ATTENTION = with_gradients(LIBRARY, attention=_layer_attention)
ADDITIVE = with_functions(LIBRARY, {"additive_scores": additive_scores})
MHA = with_functions(LIBRARY, {"multi_head_attention": _layer_call(return_attention_scores=False)})
MHA_WITH_WEIGHTS = with_functions(LIBRARY, {"multi_head_attention": _layer_call(return_attention_scores=True)})
