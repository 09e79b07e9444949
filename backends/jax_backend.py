"""Attention in JAX: the modular code that its users write, op by op or inside ``jax.jit`` (``jax_jit.py``).

Sources: Vaswani et al. 2017; Luong et al. 2015; Bahdanau et al. 2015; Graves et al. 2014. Shapes and meanings:
``contract.py``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from functools import reduce
from operator import and_
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
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
    """Switch 64-bit types on where they are asked for, and limit the threads, both for this process."""
    jax.config.update("jax_enable_x64", dtype == "float64")
    # The size of each of XLA's two pools (1: no second thread computes), read when the first array is made.
    # The flag --xla_cpu_multi_thread_eigen=false, which many set, no longer limits anything.
    os.environ["PJRT_NPROC"] = str(threads)


def describe() -> dict[str, str]:
    """Return the version and what may change the numbers."""
    return {
        "version": jax.__version__,
        "device": jax.default_backend(),
        "threads": os.environ.get("PJRT_NPROC", "all"),
        "enable_x64": str(jax.config.jax_enable_x64),
        "default_matmul_precision": str(jax.config.jax_default_matmul_precision),
        "xla_flags": os.environ.get("XLA_FLAGS", "none"),
    }


def from_numpy(array: NDArray[Any]) -> Tensor:
    """Copy into an array on the default device."""
    # jax.numpy.array would compile a program for every shape. What is put may keep the memory that it is given.
    return jax.device_put(array.copy())


def to_numpy(tensor: Tensor) -> NDArray[Any]:
    """Return the array's numbers as a NumPy array."""
    return np.asarray(tensor)


def dot_scores(
    query: Tensor, key: Tensor, *, scale: float | Tensor | None = None, softcap: float | None = None
) -> Stages:
    """Score by scaled dot product."""
    raw_scores = query @ key.mT
    scores = raw_scores * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    stages = {"raw_scores": raw_scores, "scores": scores}
    if softcap is not None:
        stages["capped"] = softcap * jnp.tanh(scores / softcap)
    return stages


def cosine_scores(query: Tensor, key: Tensor, *, scale: float | None = None) -> Stages:
    """Score by the cosine of the angle between query and key."""
    query = query / jnp.linalg.norm(query, axis=-1, keepdims=True)
    key = key / jnp.linalg.norm(key, axis=-1, keepdims=True)
    cosine = query @ key.mT
    return {"scores": cosine if scale is None else cosine * scale}


def general_scores(query: Tensor, key: Tensor, weight: Tensor, *, score_bias: Tensor | None = None) -> Stages:
    """Score by a bilinear form."""
    scores = query @ weight @ key.mT
    return {"scores": scores if score_bias is None else scores + score_bias[:, None, None]}


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
    query_part = (query @ query_weight)[..., :, None, :]  # (B, H, Lq, 1, A)
    key_part = (key @ key_weight)[..., None, :, :]  # (B, H, 1, Lk, A)
    hidden = query_part + key_part
    if score_bias is not None:
        hidden = hidden + score_bias
    return {"scores": jnp.tanh(hidden) @ score_vector}


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
    # Positions are known before anything is computed: in NumPy none of their operations is compiled.
    key_position = np.arange(keys)
    distance = key_position - np.arange(queries)[:, None]  # from a query on to a key
    if query_offsets is not None:
        distance = distance - query_offsets[:, None, None, None]  # (B, 1, Lq, T)
    rules = [] if mask is None else [mask]
    if is_causal:
        rules.append(distance <= 0)
    left, right = window or (None, None)
    if left is not None:
        rules.append(distance >= -left)
    if right is not None:
        rules.append(distance <= right)
    if key_lengths is not None:
        rules.append(key_position < key_lengths[:, None, None, None])  # (B, 1, 1, T)
    stages: Stages = {}
    if bias is not None:
        scores = stages["biased"] = scores + bias
    if rules:
        stages["masked"] = jnp.where(reduce(and_, rules), scores, -jnp.inf if mask_fill is None else mask_fill)
    return stages


def softmax(scores: Tensor, *, empty_rows: EmptyRows = "zero") -> Stages:
    """Normalise each row over the keys."""
    empty, logits = jnp.isneginf(scores).all(axis=-1, keepdims=True), scores
    if empty_rows == "uniform":
        logits = jnp.where(empty, 0.0, scores)  # equal scores have equal weights
    # Without ``where`` a row of -inf is NaN, and so is its gradient, whatever is put in its place afterwards.
    weights = jax.nn.softmax(logits, axis=-1, where=~jnp.isneginf(logits))
    if empty_rows == "nan":
        weights = jnp.where(empty, jnp.nan, weights)
    return {"weights": weights, "log_sum_exp": jax.nn.logsumexp(scores, axis=-1)}


def _softmax_with_sinks(logits: Tensor, sinks: Tensor, empty_rows: EmptyRows) -> Stages:
    """Normalise each row over the keys and the sink of its head, whose own weight is not returned."""
    column = jnp.broadcast_to(sinks[:, None, None], (*logits.shape[:-1], 1))  # (B, H, Lq, 1)
    joined = jnp.concatenate([logits, column], axis=-1)
    stages = softmax(joined)
    weights = stages["weights"][..., :-1]
    if empty_rows != "zero":
        empty = jnp.isneginf(joined).all(axis=-1, keepdims=True)
        weights = jnp.where(empty, 1 / max(logits.shape[-1], 1) if empty_rows == "uniform" else jnp.nan, weights)
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
    past = 0 if past_key is None else past_key.shape[-2]
    if rotary_cos is not None and rotary_sin is not None:
        cos, sin = rotary_cos[past:], rotary_sin[past:]
        key = _rotate(key, cos, sin, rotary_interleaved)
        if query_offsets is not None:
            rows = query_offsets[:, None, None] + np.arange(query.shape[-2])  # (B, 1, Lq)
            cos, sin = rotary_cos[rows], rotary_sin[rows]
        query = stages["rotated_query"] = _rotate(query, cos, sin, rotary_interleaved)
    if past_key is not None and past_value is not None:
        key, value = (jnp.concatenate(each, axis=-2) for each in ((past_key, key), (past_value, value)))
        window = window if query_offsets is not None else composed.seen_from_the_first_key(window, past)
    if rotary_cos is not None:
        stages["rotated_key"] = key  # the past comes rotated
    group = query.shape[1] // key.shape[1]
    key, value = (jnp.repeat(each, group, axis=1) for each in (key, value))  # (B, Hkv, T, D) -> (B, H, T, D)
    factor = scale if head_scale is None else head_scale[:, None, None]
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
    stages["output"] = stages["weights"] @ value
    return stages


def differentiate(
    attend: Callable[..., Stages], inputs: Stages, grad_output: Tensor, options: Mapping[str, Any]
) -> Stages:
    """Pull grad_output back to the inputs, and to a bias and sinks if given."""
    given = {**inputs, **{name: options[name] for name in ("bias", "sinks") if options.get(name) is not None}}
    rest = {name: option for name, option in options.items() if name not in given}

    def output_of(*arrays: Tensor) -> Tensor:
        return attend(**dict(zip(given, arrays, strict=True)), **rest)["output"]

    _, pull_back = jax.vjp(output_of, *given.values())
    return {f"grad_{name}": gradient for name, gradient in zip(given, pull_back(grad_output), strict=True)}


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
    pages = jnp.clip(block_table, 0, key_pages.shape[0] - 1)
    key, value = (
        each[pages].reshape(len(pages), -1, *each.shape[2:]).swapaxes(1, 2) for each in (key_pages, value_pages)
    )  # (Np, Lp, Hkv, D) -> (B, Hkv, T, D)
    used, positions = key_lengths[:, None], np.arange(key.shape[2])
    is_used = positions < used  # (B, T)
    # A weight of 0 times NaN is NaN.
    key, value = (jnp.where(is_used[:, None, :, None], each, 0) for each in (key, value))
    query_positions = np.arange(query.shape[2]) + used - query.shape[2]  # (B, Lq)
    mask = is_used[:, None] & _near(query_positions[..., None], positions, *edges)
    mask = mask[:, None]
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
    key, value = (jnp.einsum("blc,hcw->bhlw", latent, each) for each in (key_projection, value_projection))
    if query_rotary is not None and key_rotary is not None:
        shared = jnp.broadcast_to(key_rotary[:, None], (*key.shape[:-1], key_rotary.shape[-1]))
        query, key = jnp.concatenate([query, query_rotary], axis=-1), jnp.concatenate([key, shared], axis=-1)
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
    limits, positions = cu_seqlens, [np.arange(each.shape[2]) for each in (query, key)]
    queries, keys = (  # the number of the sequence of each
        jnp.searchsorted(limit, position, side="right") - 1 for limit, position in zip(limits, positions, strict=True)
    )
    lengths = [jnp.diff(limit) for limit in limits]
    used = lengths[1] if key_lengths is None else key_lengths
    key_positions = positions[1] - limits[1][keys]
    query_positions = positions[0] - limits[0][queries] + (used - lengths[0])[queries]
    is_used = key_positions < used[keys]
    mask = (queries[:, None] == keys) & is_used
    mask &= _near(query_positions[:, None], key_positions, *edges)
    key, value = (jnp.where(is_used[:, None], each, 0) for each in (key, value))  # a weight of 0 times NaN is NaN
    return key, value, mask[None, None]


def _near(queries: Tensor, keys: Tensor, is_causal: bool, window: Window | None) -> Tensor:
    """Return who may attend to whom by position."""
    behind = keys - queries
    allowed = behind <= 0 if is_causal else jnp.ones_like(behind, bool)
    left, right = window or (None, None)
    if left is not None:
        allowed &= behind >= -left
    if right is not None:
        allowed &= behind <= right
    return allowed


def merge_states(outputs: Tensor, log_sum_exps: Tensor, *, lse_base: LseBase = "e") -> Stages:
    """Merge what attention gave for parts of the keys."""
    scores = jnp.moveaxis(log_sum_exps, 0, -1)  # (B, H, Lq, N)
    stages = softmax(scores if lse_base == "e" else scores * math.log(2))
    if lse_base == "2":
        stages["log_sum_exp"] = stages["log_sum_exp"] / math.log(2)
    parts = jnp.where(jnp.isneginf(log_sum_exps)[..., None], 0, outputs)  # 0 times NaN would be NaN
    merged = jnp.einsum("bhqn,nbhqd->bhqd", stages["weights"], parts.astype(scores.dtype))  # float32 at least
    stages["output"] = merged.astype(outputs.dtype)
    return stages


def _normalize(inputs: Tensor, weight: Tensor | None, norm: Norm, epsilon: float, is_full: bool) -> Tensor:
    """Normalise each head's vector, or those of all heads of a position side by side: (B, H, L, D)."""
    batch, heads, length, width = inputs.shape
    rows = inputs.swapaxes(1, 2).reshape(batch, length, heads * width) if is_full else inputs
    wide = rows if rows.dtype.itemsize > 2 else rows.astype(jnp.float32)
    if norm == "rms":
        normalized = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    else:
        normalized = wide / jnp.maximum(jnp.linalg.norm(wide, axis=-1, keepdims=True), epsilon)
    normalized = normalized.astype(rows.dtype)
    normalized = normalized if weight is None else normalized * weight
    return normalized.reshape(batch, length, heads, width).swapaxes(1, 2) if is_full else normalized


def _rotate(inputs: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate pairs of elements of (B, H, L, D) by the first L rows of cos and sin, (L, R) or (B, 1, L, R)."""
    length, pairs = inputs.shape[-2], cos.shape[-1]
    cos, sin = cos[..., :length, :], sin[..., :length, :]
    rotated, rest = inputs[..., : 2 * pairs], inputs[..., 2 * pairs :]
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
        turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(rotated.shape)
    else:
        first, second = rotated[..., :pairs], rotated[..., pairs:]
        turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([turned, rest], axis=-1)


def _project(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    projected = jnp.einsum("ble,ef->blf", inputs, weight)
    return projected if bias is None else projected + bias


def _split_heads(inputs: Tensor, heads: int) -> Tensor:
    batch, length, width = inputs.shape
    return inputs.reshape(batch, length, heads, width // heads).swapaxes(1, 2)  # (B, L, H*D) -> (B, H, L, D)


def _merge_heads(context: Tensor) -> Tensor:
    batch, heads, length, width = context.shape
    return context.swapaxes(1, 2).reshape(batch, length, heads * width)  # (B, H, L, D) -> (B, L, H*D)


_attend = composed.make_attend(mask_scores, softmax)
general_attention = composed.make_attention_by(general_scores, _attend)
additive_attention = composed.make_attention_by(additive_scores, _attend)
cosine_attention = composed.make_attention_by(cosine_scores, _attend)
attention_gradients = composed.make_gradients(attention, differentiate)
gated_attention = composed.make_gated_attention(attention, jax.nn.sigmoid)
gated_attention_gradients = composed.make_gradients(gated_attention, differentiate)
packed_attention_gradients = composed.make_gradients(packed_attention, differentiate)
quantized_attention = composed.make_quantized_attention(attention, jax.lax.convert_element_type)
normalized_attention = composed.make_normalized_attention(attention, _normalize, _rotate)
multi_head_attention = composed.make_multi_head_attention(attention, _project, _split_heads, _merge_heads)
