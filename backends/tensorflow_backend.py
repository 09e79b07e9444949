"""Attention in TensorFlow, eager: the modular code that its users write.

Sources: Vaswani et al. 2017; Graves et al. 2014; Luong et al. 2015; Bahdanau et al. 2015; Gemma Team 2024. Shapes and
meanings: ``contract.py``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import tensorflow as tf
from numpy.typing import NDArray

from attncheck.backends import codes, composed, derived
from attncheck.backends.contract import EmptyRows, Norm, Scored, Stages, Tensor


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


def _where(condition: Tensor, if_true: Any, if_false: Any) -> Tensor:
    # If one of the two is a number, it gets the dtype of the tensor.
    dtype = if_true.dtype if tf.is_tensor(if_true) else if_false.dtype
    branches = (value if tf.is_tensor(value) else tf.constant(value, dtype) for value in (if_true, if_false))
    return tf.where(condition, *branches)


_ARRAYS = composed.ArrayFunctions(
    arange=lambda length, like: tf.range(length),
    astype=tf.cast,
    broadcast_to=tf.broadcast_to,
    concat=tf.concat,
    # tensordot, not matmul: TensorFlow 2.21 with oneDNN reads past its buffers in a float32 tf.matmul that spreads a
    # matrix over batch axes, and gives NaN, wrong numbers or a segmentation fault (tensorflow/tensorflow#117700).
    linear=partial(tf.tensordot, axes=1),
    # Not tf.math.l2_normalize, in place of a division: it takes a squared length below 1e-12 for 1e-12.
    norm=partial(tf.norm, axis=-1, keepdims=True),
    permute=tf.transpose,
    repeat=tf.repeat,
    reshape=tf.reshape,
    stack=tf.stack,
    take=tf.gather,
    tanh=tf.tanh,
    transposed_product=partial(tf.matmul, transpose_b=True),
    where=_where,
    to_index_dtype=lambda integers: tf.cast(integers, tf.int32),
)


def softmax(scores: Tensor, *, empty_rows: EmptyRows = "zero") -> Stages:
    """Normalise each row over the keys."""
    # TensorFlow's own softmax of a row of -inf is NaN, and so is its gradient: it must not even meet such a row.
    empty = tf.reduce_all(scores == -math.inf, axis=-1, keepdims=True)
    weights = tf.nn.softmax(tf.where(empty, tf.zeros_like(scores), scores), axis=-1)  # equal scores, equal weights
    if empty_rows != "uniform":
        fill = 0.0 if empty_rows == "zero" else math.nan
        weights = tf.where(empty, tf.constant(fill, scores.dtype), weights)
    return {"weights": weights, "log_sum_exp": tf.reduce_logsumexp(scores, axis=-1)}


def gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], grad_output: Tensor, others: Mapping[str, Any]
) -> Any:
    """Differentiate sum(grad_output * function(*inputs)) by GradientTape."""
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        output = function(*inputs, **others)
    return tape.gradient(output, inputs, output_gradients=grad_output)


def _normalize(vectors: Tensor, weight: Tensor | None, norm: Norm, epsilon: float) -> Tensor:
    wide = vectors if vectors.dtype.size > 2 else tf.cast(vectors, tf.float32)
    if norm == "rms":
        normalized = wide * tf.math.rsqrt(tf.reduce_mean(tf.square(wide), axis=-1, keepdims=True) + epsilon)
    else:
        # tf.math.l2_normalize takes its epsilon for the smallest square, and tf.norm divides by 0 nowhere.
        normalized = wide / tf.maximum(tf.norm(wide, axis=-1, keepdims=True), epsilon)
    normalized = tf.cast(normalized, vectors.dtype)
    return normalized if weight is None else normalized * weight


def _project(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # tf.einsum adds float16 products up in float16 on CPUs without float16 arithmetic; tf.matmul does nowhere.
    projected = tf.matmul(inputs, weight)  # (B, L, E) @ (E, F) -> (B, L, F)
    return projected if bias is None else projected + bias


def _of_latents(latent: Tensor, projection: Tensor) -> Tensor:
    # As in _project: of a product over a whole axis, tf.tensordot makes one tf.matmul.
    return tf.transpose(tf.tensordot(latent, projection, axes=[[2], [1]]), (0, 2, 1, 3))


def _add_up(weights: Tensor, parts: Tensor) -> Tensor:
    shares = tf.transpose(weights, (3, 0, 1, 2))[..., tf.newaxis]  # (N, B, H, Lq, 1)
    return tf.reduce_sum(shares * parts, axis=0)


def _numbers_of_codes(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> list[Tensor]:
    """Widen keys and values of 8 bits, and multiply them with their scales: there are no other codes."""
    scales = options.pop("key_scale"), options.pop("value_scale")
    pairs = zip((key, value), scales, strict=True)
    return [query, *(tf.cast(array, query.dtype) * scale[..., None] for array, scale in pairs)]


dot_scores = composed.make_dot_scores(_ARRAYS)
cosine_scores = composed.make_cosine_scores(_ARRAYS)
general_scores = composed.make_general_scores(_ARRAYS)
additive_scores = composed.make_additive_scores(_ARRAYS)
mask_scores = composed.make_mask_scores(_ARRAYS)
attention = composed.make_attention(_ARRAYS, dot_scores, mask_scores, softmax)
_attend = composed.make_attend(mask_scores, softmax)
general_attention = composed.make_attention_with_scores(general_scores, _attend)
additive_attention = composed.make_attention_with_scores(additive_scores, _attend)
cosine_attention = composed.make_attention_with_scores(cosine_scores, _attend)
attention_gradients = derived.make_gradients(attention, gradients)
gated_attention = composed.make_gated_attention(attention, tf.sigmoid)
gated_attention_gradients = derived.make_gradients(gated_attention, gradients)
packed_attention = composed.make_packed_attention(_ARRAYS, attention, tf.searchsorted)
packed_attention_gradients = derived.make_gradients(packed_attention, gradients)
paged_attention = composed.make_paged_attention(_ARRAYS, attention, tf.clip_by_value)
ragged_paged_attention = composed.make_ragged_paged_attention(_ARRAYS, packed_attention, tf.clip_by_value)
quantized_attention = codes.make_quantized_attention(_numbers_of_codes, attention, Scored)
normalized_attention = composed.make_normalized_attention(_ARRAYS, attention, _normalize)
latent_attention = composed.make_latent_attention(_ARRAYS, attention, _of_latents)
sparse_attention = composed.make_sparse_attention(_ARRAYS, attention, tf.reduce_any)
multi_head_attention = composed.make_multi_head_attention(_ARRAYS, attention, _project)
merge_states = composed.make_merge_states(_ARRAYS, softmax, _add_up)
