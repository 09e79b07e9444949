"""Attention in TensorFlow, eager: the modular code that its users write.

Sources: Vaswani et al. 2017; Graves et al. 2014; Luong et al. 2015; Bahdanau et al. 2015; Gemma Team 2024. Shapes and
meanings: ``contract.py``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, Unpack

import tensorflow as tf
from numpy.typing import NDArray

from attncheck.backends import composed
from attncheck.backends.contract import (
    EmptyRows,
    Latent,
    LseBase,
    Norm,
    Scored,
    Stages,
    Tensor,
    Window,
    takes,
)


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


def dot_scores(
    query: Tensor, key: Tensor, *, scale: float | Tensor | None = None, softcap: float | None = None
) -> Stages:
    """Score by scaled dot product."""
    raw_scores = tf.matmul(query, key, transpose_b=True)
    # A Python float takes the tensor's dtype here; tf.cast(scale, tf.float64) would pass it through float32 first.
    scores = raw_scores * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    stages = {"raw_scores": raw_scores, "scores": scores}
    if softcap is not None:
        stages["capped"] = softcap * tf.tanh(scores / softcap)
    return stages


def cosine_scores(query: Tensor, key: Tensor, *, scale: float | None = None) -> Stages:
    """Score by the cosine of the angle between query and key."""
    # Not tf.math.l2_normalize: it takes a squared length below 1e-12 for 1e-12.
    query = query / tf.norm(query, axis=-1, keepdims=True)
    key = key / tf.norm(key, axis=-1, keepdims=True)
    cosine = tf.matmul(query, key, transpose_b=True)
    return {"scores": cosine if scale is None else cosine * scale}


def general_scores(query: Tensor, key: Tensor, weight: Tensor, *, score_bias: Tensor | None = None) -> Stages:
    """Score by a bilinear form."""
    # tensordot, not matmul: TensorFlow 2.21 with oneDNN reads past its buffers in a float32 tf.matmul that spreads a
    # matrix over batch axes, and gives NaN, wrong numbers or a segmentation fault (tensorflow/tensorflow#117700).
    scores = tf.matmul(tf.tensordot(query, weight, axes=1), key, transpose_b=True)
    return {"scores": scores if score_bias is None else scores + score_bias[:, tf.newaxis, tf.newaxis]}


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
    scores: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    is_causal: bool = False,
    window: Window | None = None,
    key_lengths: Tensor | None = None,
    query_offsets: Tensor | None = None,
    mask_fill: float | None = None,
) -> Stages:
    """Add the bias, then set what may not be attended to -inf, or to ``mask_fill``."""
    queries, keys = scores.shape[-2:]
    rules = [] if mask is None else [mask]
    if is_causal:
        rules.append(_band(queries, keys, (None, 0), query_offsets))
    if window is not None:
        rules.append(_band(queries, keys, window, query_offsets))
    if key_lengths is not None:
        rules.append(tf.sequence_mask(key_lengths, keys)[:, tf.newaxis, tf.newaxis, :])
    stages: Stages = {}
    if bias is not None:
        scores = stages["biased"] = scores + bias
    if rules:
        fill = tf.constant(-math.inf if mask_fill is None else mask_fill, scores.dtype)
        stages["masked"] = tf.where(reduce(tf.logical_and, rules), scores, fill)
    return stages


def softmax(scores: Tensor, *, empty_rows: EmptyRows = "zero") -> Stages:
    """Normalise each row over the keys."""
    # TensorFlow's own softmax of a row of -inf is NaN, and so is its gradient: it must not even meet such a row.
    empty = tf.reduce_all(scores == -math.inf, axis=-1, keepdims=True)
    weights = tf.nn.softmax(tf.where(empty, tf.zeros_like(scores), scores), axis=-1)  # equal scores, equal weights
    if empty_rows != "uniform":
        fill = 0.0 if empty_rows == "zero" else math.nan
        weights = tf.where(empty, tf.constant(fill, scores.dtype), weights)
    return {"weights": weights, "log_sum_exp": tf.reduce_logsumexp(scores, axis=-1)}


def _softmax_with_sinks(logits: Tensor, sinks: Tensor, empty_rows: EmptyRows) -> Stages:
    """Normalise each row over the keys and the sink of its head, whose own weight is not returned."""
    column = tf.broadcast_to(sinks[:, tf.newaxis, tf.newaxis], (*logits.shape[:-1], 1))  # (B, H, Lq, 1)
    joined = tf.concat([logits, column], axis=-1)
    stages = softmax(joined)
    weights = stages["weights"][..., :-1]
    if empty_rows != "zero":
        empty = tf.reduce_all(joined == -math.inf, axis=-1, keepdims=True)
        fill = 1 / max(logits.shape[-1], 1) if empty_rows == "uniform" else math.nan
        weights = tf.where(empty, tf.constant(fill, logits.dtype), weights)
    return stages | {"weights": weights}


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    head_scale: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    window: Window | None = None,
    key_lengths: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    query_offsets: Tensor | None = None,
    mask_fill: float | None = None,
    empty_rows: EmptyRows = "zero",
) -> Stages:
    """Rotate, score, mask, normalise and average the values."""
    stages: Stages = {}
    past = 0 if past_key is None else past_key.shape[2]
    if rotary_cos is not None and rotary_sin is not None:
        cos, sin = rotary_cos[past:], rotary_sin[past:]
        key = _rotate(key, cos, sin, rotary_interleaved)
        if query_offsets is not None:
            rows = tf.cast(query_offsets, tf.int32)[:, tf.newaxis, tf.newaxis] + tf.range(query.shape[2])
            cos, sin = tf.gather(rotary_cos, rows), tf.gather(rotary_sin, rows)  # (B, 1, Lq, R)
        query = stages["rotated_query"] = _rotate(query, cos, sin, rotary_interleaved)
    if past_key is not None and past_value is not None:
        key, value = tf.concat([past_key, key], axis=2), tf.concat([past_value, value], axis=2)
        window = window if query_offsets is not None else composed.seen_from_the_first_key(window, past)
    if rotary_cos is not None:
        stages["rotated_key"] = key  # the past comes rotated
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = tf.repeat(key, groups, axis=1), tf.repeat(value, groups, axis=1)
    factor = scale if head_scale is None else head_scale[:, tf.newaxis, tf.newaxis]
    stages |= dot_scores(query, key, scale=factor, softcap=softcap)
    *_, scores = stages.values()  # the last stage that was asked for
    rules: dict[str, Any] = {"is_causal": is_causal, "window": window, "key_lengths": key_lengths}
    rules |= {"query_offsets": query_offsets, "mask_fill": mask_fill}
    stages |= mask_scores(scores, mask=mask, bias=bias, **rules)
    *_, logits = stages.values()
    if sinks is None:
        stages |= softmax(logits, empty_rows=empty_rows)
    else:
        stages |= _softmax_with_sinks(logits, sinks, empty_rows)
    stages["output"] = tf.matmul(stages["weights"], value)
    return stages


def differentiate(
    attend: Callable[..., Stages], inputs: Stages, grad_output: Tensor, options: Mapping[str, Any]
) -> Stages:
    """Differentiate sum(grad_output * output) by the inputs, and by a bias and sinks if given."""
    given = {**inputs, **{name: options.get(name) for name in ("bias", "sinks")}}
    sources = {f"grad_{name}": tensor for name, tensor in given.items() if tensor is not None}
    with tf.GradientTape() as tape:
        tape.watch(sources)
        output = attend(**inputs, **options)["output"]
    gradients: Stages = tape.gradient(output, sources, output_gradients=grad_output)
    return gradients


@takes(Scored)
def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    key_lengths: Tensor | None = None,
    **options: Unpack[Scored],
) -> Stages:
    """Attend under one mask for all sequences."""
    edges = options.pop("is_causal", False), options.pop("window", None)
    key, value, mask = _packed(query, key, value, (cu_seqlens_q, cu_seqlens_k), key_lengths, edges)
    return attention(query, key, value, mask=mask, **options)


@takes(Scored)
def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    key_lengths: Tensor,
    **options: Unpack[Scored],
) -> Stages:
    """Gather the pages of every batch entry, and attend to the keys that are used."""
    edges = options.pop("is_causal", False), options.pop("window", None)
    # What stands behind the last page that is used may be none.
    pages = tf.clip_by_value(block_table, 0, key_pages.shape[0] - 1)
    key, value = (_gathered(each, pages) for each in (key_pages, value_pages))
    used = tf.cast(key_lengths, tf.int32)[:, tf.newaxis]  # (B, 1)
    positions = tf.range(key.shape[2])
    is_used = positions < used  # (B, T)
    key, value = (_without_unused(each, is_used[:, tf.newaxis, :, tf.newaxis]) for each in (key, value))
    query_positions = tf.range(query.shape[2]) + used - query.shape[2]  # (B, Lq)
    mask = is_used[:, tf.newaxis] & _near(query_positions[..., tf.newaxis], positions, *edges)
    mask = mask[:, tf.newaxis]
    return attention(query, key, value, mask=mask, **options)


@takes(Latent)
def latent_attention(
    query: Tensor,
    latent: Tensor,
    key_projection: Tensor,
    value_projection: Tensor,
    *,
    query_rotary: Tensor | None = None,
    key_rotary: Tensor | None = None,
    **options: Unpack[Latent],
) -> Stages:
    """Make the keys and values of every head, and attend to them."""
    # As in _project: of a product over a whole axis, tf.tensordot makes one tf.matmul.
    made = (tf.tensordot(latent, each, axes=[[2], [1]]) for each in (key_projection, value_projection))  # (B, L, H, W)
    key, value = (tf.transpose(each, (0, 2, 1, 3)) for each in made)
    if query_rotary is not None and key_rotary is not None:
        query = tf.concat([query, query_rotary], axis=-1)
        key = tf.concat([key, tf.repeat(key_rotary[:, tf.newaxis], key.shape[1], axis=1)], axis=-1)
    return attention(query, key, value, **options)


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: tuple[Tensor, Tensor],
    key_lengths: Tensor | None,
    edges: tuple[bool, Window | None],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return key and value without what is not used, and one mask for all sequences, (1, 1, Lq, Lk)."""
    limits = [tf.cast(each, tf.int32) for each in cu_seqlens]
    positions = [tf.range(each.shape[2]) for each in (query, key)]
    queries, keys = (  # the number of the sequence of each
        tf.searchsorted(limit, position, side="right") - 1 for limit, position in zip(limits, positions, strict=True)
    )
    lengths = [limit[1:] - limit[:-1] for limit in limits]
    used = lengths[1] if key_lengths is None else tf.cast(key_lengths, tf.int32)
    key_positions = positions[1] - tf.gather(limits[1], keys)
    query_positions = positions[0] - tf.gather(limits[0], queries) + tf.gather(used - lengths[0], queries)
    is_used = key_positions < tf.gather(used, keys)
    mask = (queries[:, tf.newaxis] == keys) & is_used
    mask &= _near(query_positions[:, tf.newaxis], key_positions, *edges)
    key, value = (_without_unused(each, is_used[:, tf.newaxis]) for each in (key, value))
    return key, value, mask[tf.newaxis, tf.newaxis]


def _near(queries: Tensor, keys: Tensor, is_causal: bool, window: Window | None) -> Tensor:
    """Return who may attend to whom by position."""
    behind = keys - queries
    allowed = behind <= 0 if is_causal else tf.ones_like(behind, tf.bool)
    left, right = window or (None, None)
    if left is not None:
        allowed &= behind >= -left
    if right is not None:
        allowed &= behind <= right
    return allowed


def _gathered(pages: Tensor, table: Tensor) -> Tensor:
    """Put the pages of every batch entry one after the other: (Np, Lp, Hkv, D), (B, W) -> (B, Hkv, W Lp, D)."""
    read = tf.gather(pages, table)
    rows = tf.reshape(read, (read.shape[0], -1, *read.shape[3:]))
    return tf.transpose(rows, (0, 2, 1, 3))


def _without_unused(rows: Tensor, is_used: Tensor) -> Tensor:
    """Set what is not used to 0: a weight of 0 times NaN is NaN."""
    return tf.where(is_used, rows, tf.zeros_like(rows))


def _band(queries: int, keys: int, window: Window, offsets: Tensor | None = None) -> Tensor:
    """Return (Lq, T), or (B, 1, Lq, T) with offsets: whether key j lies in the window of query i."""
    # tf.linalg.band_part knows no negative side.
    positions = tf.range(queries)[:, tf.newaxis]
    if offsets is not None:
        positions = positions + tf.cast(offsets, tf.int32)[:, tf.newaxis, tf.newaxis, tf.newaxis]
    return _near(positions, tf.range(keys), is_causal=False, window=window)


def merge_states(outputs: Tensor, log_sum_exps: Tensor, *, lse_base: LseBase = "e") -> Stages:
    """Merge what attention gave for parts of the keys."""
    scores = tf.transpose(log_sum_exps, (1, 2, 3, 0))  # (B, H, Lq, N)
    stages = softmax(scores if lse_base == "e" else scores * math.log(2))
    if lse_base == "2":
        stages["log_sum_exp"] = stages["log_sum_exp"] / math.log(2)
    empty = (log_sum_exps == -math.inf)[..., tf.newaxis]
    parts = tf.where(empty, tf.zeros_like(outputs), outputs)  # 0 times NaN would be NaN
    shares = tf.transpose(stages["weights"], (3, 0, 1, 2))[..., tf.newaxis]  # (N, B, H, Lq, 1)
    merged = tf.reduce_sum(shares * tf.cast(parts, scores.dtype), axis=0)  # in float32 at least
    stages["output"] = tf.cast(merged, outputs.dtype)
    return stages


def _normalize(inputs: Tensor, weight: Tensor | None, norm: Norm, epsilon: float, is_full: bool) -> Tensor:
    """Normalise each head's vector, or those of all heads of a position side by side: (B, H, L, D)."""
    batch, heads, length, width = inputs.shape
    rows = tf.reshape(tf.transpose(inputs, [0, 2, 1, 3]), [batch, length, heads * width]) if is_full else inputs
    wide = rows if rows.dtype.size > 2 else tf.cast(rows, tf.float32)
    if norm == "rms":
        normalized = wide * tf.math.rsqrt(tf.reduce_mean(tf.square(wide), axis=-1, keepdims=True) + epsilon)
    else:
        # tf.math.l2_normalize takes its epsilon for the smallest square, and tf.norm divides by 0 nowhere.
        normalized = wide / tf.maximum(tf.norm(wide, axis=-1, keepdims=True), epsilon)
    normalized = tf.cast(normalized, rows.dtype)
    normalized = normalized if weight is None else normalized * weight
    if not is_full:
        return normalized
    return tf.transpose(tf.reshape(normalized, [batch, length, heads, width]), [0, 2, 1, 3])


def _rotate(inputs: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate pairs of elements of (B, H, L, D) by the first L rows of cos and sin, (L, R) or (B, 1, L, R)."""
    length, pairs = inputs.shape[-2], cos.shape[-1]
    cos, sin = cos[..., :length, :], sin[..., :length, :]
    rotated, rest = inputs[..., : 2 * pairs], inputs[..., 2 * pairs :]
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
        turned = tf.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
        turned = tf.reshape(turned, rotated.shape)
    else:
        first, second = rotated[..., :pairs], rotated[..., pairs:]
        turned = tf.concat([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return tf.concat([turned, rest], axis=-1)


def _project(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # tf.einsum adds float16 products up in float16 on CPUs without float16 arithmetic; tf.matmul does nowhere.
    projected = tf.matmul(inputs, weight)  # (B, L, E) @ (E, F) -> (B, L, F)
    return projected if bias is None else projected + bias


def _split_heads(inputs: Tensor, heads: int) -> Tensor:
    batch, length, width = inputs.shape
    # (B, L, H*D) -> (B, H, L, D)
    return tf.transpose(tf.reshape(inputs, (batch, length, heads, width // heads)), (0, 2, 1, 3))


def _merge_heads(context: Tensor) -> Tensor:
    batch, heads, length, width = context.shape
    # (B, H, L, D) -> (B, L, H*D)
    return tf.reshape(tf.transpose(context, (0, 2, 1, 3)), (batch, length, heads * width))


_attend = composed.make_attend(mask_scores, softmax)
general_attention = composed.make_attention_by(general_scores, _attend)
additive_attention = composed.make_attention_by(additive_scores, _attend)
cosine_attention = composed.make_attention_by(cosine_scores, _attend)
attention_gradients = composed.make_gradients(attention, differentiate)
gated_attention = composed.make_gated_attention(attention, tf.sigmoid)
gated_attention_gradients = composed.make_gradients(gated_attention, differentiate)
packed_attention_gradients = composed.make_gradients(packed_attention, differentiate)
quantized_attention = composed.make_quantized_attention(attention, tf.cast)
normalized_attention = composed.make_normalized_attention(attention, _normalize, _rotate)
multi_head_attention = composed.make_multi_head_attention(attention, _project, _split_heads, _merge_heads)
