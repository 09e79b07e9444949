"""Attention in TensorFlow, eager: the modular code that its users write.

Sources: Vaswani et al. 2017; Luong et al. 2015; Bahdanau et al. 2015. Shapes and meanings: ``contract.py``.
"""

from __future__ import annotations

import math
import os
from typing import Any

import tensorflow as tf
from numpy.typing import NDArray

from attncheck.backends.contract import Stages, Tensor


def prepare(dtype: str, threads: int) -> None:
    """Limit the threads of this process."""
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)


def describe() -> dict[str, str]:
    """Return the version and what may change the numbers."""
    return {
        "version": tf.__version__,
        "device": ", ".join(sorted({device.device_type.lower() for device in tf.config.list_logical_devices()})),
        "threads": str(tf.config.threading.get_intra_op_parallelism_threads()),
        # With oneDNN, float32 softmax confines a NaN score to its own weight; without it the whole row is NaN.
        "onednn": os.environ.get("TF_ENABLE_ONEDNN_OPTS", "default"),
        "tensor_float_32": str(tf.config.experimental.tensor_float_32_execution_enabled()),
    }


def from_numpy(array: NDArray[Any]) -> Tensor:
    """Copy into a tensor."""
    return tf.constant(array)


def to_numpy(tensor: Tensor) -> NDArray[Any]:
    """Return the tensor's numbers as an array."""
    array: NDArray[Any] = tensor.numpy()
    return array


def dot_scores(query: Tensor, key: Tensor, *, scale: float | None = None) -> Stages:
    """Score by scaled dot product."""
    raw_scores = tf.matmul(query, key, transpose_b=True)
    # A Python float takes the tensor's dtype here; tf.cast(scale, tf.float64) would pass it through float32 first.
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return {"raw_scores": raw_scores, "scores": raw_scores * scale}


def general_scores(query: Tensor, key: Tensor, weight: Tensor) -> Stages:
    """Score by a bilinear form."""
    # tensordot, not matmul: TensorFlow 2.21 with oneDNN reads past its buffers in a float32 tf.matmul that spreads a
    # matrix over batch axes, and gives NaN, wrong numbers or a segmentation fault (tensorflow/tensorflow#117700).
    return {"scores": tf.matmul(tf.tensordot(query, weight, axes=1), key, transpose_b=True)}


def additive_scores(
    query: Tensor,
    key: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    score_vector: Tensor,
    *,
    score_bias: Tensor | None = None,
) -> Stages:
    """Score by a small feed-forward network."""
    query_part = tf.expand_dims(tf.tensordot(query, query_weight, axes=1), -2)  # (B, H, Lq, 1, A)
    key_part = tf.expand_dims(tf.tensordot(key, key_weight, axes=1), -3)  # (B, H, 1, Lk, A)
    hidden = query_part + key_part
    if score_bias is not None:
        hidden = hidden + score_bias
    return {"scores": tf.tensordot(tf.tanh(hidden), score_vector, axes=1)}


def mask_scores(
    scores: Tensor, *, mask: Tensor | None = None, bias: Tensor | None = None, is_causal: bool = False
) -> Stages:
    """Add the bias, then set what may not be attended to -inf."""
    stages: Stages = {}
    if bias is not None:
        scores = stages["biased"] = scores + bias
    if is_causal:
        causal = tf.linalg.band_part(tf.ones(scores.shape[-2:], dtype=tf.int8), -1, 0) == 1
        mask = causal if mask is None else tf.logical_and(mask, causal)
    if mask is not None:
        stages["masked"] = tf.where(mask, scores, tf.constant(-math.inf, scores.dtype))
    return stages


def softmax(scores: Tensor) -> Stages:
    """Normalise each row over the keys."""
    # TensorFlow's own softmax of a row of -inf is NaN.
    empty = tf.reduce_all(scores == -math.inf, axis=-1, keepdims=True)
    return {
        "weights": tf.where(empty, tf.zeros_like(scores), tf.nn.softmax(scores, axis=-1)),
        "log_sum_exp": tf.reduce_logsumexp(scores, axis=-1),
    }


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Stages:
    """Score, mask, normalise and average the values."""
    stages = dot_scores(query, key, scale=scale)
    stages |= mask_scores(stages["scores"], mask=mask, bias=bias, is_causal=is_causal)
    *_, logits = stages.values()  # the last stage that was asked for
    stages |= softmax(logits)
    stages["output"] = tf.matmul(stages["weights"], value)
    return stages


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    heads: int,
    query_weight: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    output_weight: Tensor | None = None,
    query_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    value_bias: Tensor | None = None,
    output_bias: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Stages:
    """Project, attend in every head, merge the heads and project once more."""
    if output_weight is None and output_bias is not None:
        raise ValueError("output_bias needs output_weight")
    stages: Stages = {
        "query": _split_heads(_project(query, query_weight, query_bias), heads),
        "key": _split_heads(_project(key, key_weight, key_bias), heads),
        "value": _split_heads(_project(value, value_weight, value_bias), heads),
    }
    stages |= attention(**stages, mask=mask, bias=bias, is_causal=is_causal, scale=scale)
    stages["context"] = stages.pop("output")
    merged = _merge_heads(stages["context"])
    stages["output"] = merged if output_weight is None else _project(merged, output_weight, output_bias)
    return stages


def _project(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    projected = tf.einsum("ble,ef->blf", inputs, weight)
    return projected if bias is None else projected + bias


def _split_heads(inputs: Tensor, heads: int) -> Tensor:
    batch, length, width = inputs.shape
    # (B, L, H*D) -> (B, H, L, D)
    return tf.transpose(tf.reshape(inputs, (batch, length, heads, width // heads)), (0, 2, 1, 3))


def _merge_heads(context: Tensor) -> Tensor:
    batch, heads, length, width = context.shape
    # (B, H, L, D) -> (B, L, H*D)
    return tf.reshape(tf.transpose(context, (0, 2, 1, 3)), (batch, length, heads * width))
