"""Attention by the layer ``keras.layers.MultiHeadAttention``.

Its inputs come in the order query, value, key; its weights are (E, H, D), and (H, Dv, Eo) at the output. It always
scales by 1/sqrt(D) and always projects the output. https://keras.io/api/layers/attention_layers/multi_head_attention/
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from inspect import signature
from types import SimpleNamespace
from typing import Any

import keras
import tensorflow as tf

from attncheck.backends.contract import Stages, Tensor, Window
from attncheck.backends.tensorflow_keras import describe, from_numpy, prepare, to_numpy

__all__ = ["WITH_WEIGHTS", "describe", "from_numpy", "multi_head_attention", "prepare", "to_numpy"]


_LAYER = "keras.layers.MultiHeadAttention"


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
        asked = {**_masks(mask, key_lengths, key.shape[1]), "use_causal_mask": is_causal}
        if not return_attention_scores:
            return {"output": layer(query, value, key, **asked)}
        output, weights = layer(query, value, key, **asked, return_attention_scores=True)
        return {"weights": weights, "output": output}

    return multi_head_attention


def _masks(mask: Tensor | None, key_lengths: Tensor | None, keys: int) -> dict[str, Tensor]:
    """Return the call's masks: of keys, (B, Lk), and of all, (B, Lq, Lk) as documented, with H where heads differ."""
    padding = None if key_lengths is None else tf.sequence_mask(key_lengths, keys)
    if mask is None or mask.shape[1] == 1:
        return {"value_mask": padding, "attention_mask": None if mask is None else tf.squeeze(mask, 1)}
    if padding is not None:
        # The layer aligns a mask of keys with the last three axes of this one: with heads, not with the batch.
        mask = tf.logical_and(mask, padding[:, tf.newaxis, tf.newaxis, :])
    return {"attention_mask": mask}


def _causality_and_window(is_causal: bool, window: Window | None) -> tuple[bool, int | None]:
    """Return use_causal_mask and sliding_window: of a window the layer knows equal sides, cut off by causality."""
    if window is None:
        return is_causal, None
    left, right = window
    if is_causal or right == 0:
        return True, None if left is None else left + 1
    if left != right:
        raise NotImplementedError("keras.layers.MultiHeadAttention has windows that are causal or alike on both sides")
    return False, None if left is None else left + 1


# Building a layer takes as long as many calls; weights are set anew for each.
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
    """Set kernels (E, H, D) and biases (H, D); a bias that is not given is zero, as in a new layer."""
    for name, weight in weights.items():
        dense = getattr(layer, f"{name}_dense")
        dense.kernel.assign(tf.reshape(weight, dense.kernel.shape))
        if dense.bias is not None:
            bias = biases[name]
            dense.bias.assign(tf.zeros_like(dense.bias) if bias is None else tf.reshape(bias, dense.bias.shape))


multi_head_attention = _layer_call(return_attention_scores=False)
WITH_WEIGHTS = SimpleNamespace(
    prepare=prepare,
    describe=describe,
    from_numpy=from_numpy,
    to_numpy=to_numpy,
    multi_head_attention=_layer_call(return_attention_scores=True),
)
