"""Attention in JAX, op by op: the modular code that its users write.

Sources: Vaswani et al. 2017; Luong et al. 2015; Bahdanau et al. 2015. Shapes and meanings: ``contract.py``.
"""

from __future__ import annotations

import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from attncheck.backends.contract import Stages, Tensor


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
    return jnp.array(array)


def to_numpy(tensor: Tensor) -> NDArray[Any]:
    """Return the array's numbers as a NumPy array."""
    return np.asarray(tensor)


def dot_scores(query: Tensor, key: Tensor, *, scale: float | None = None) -> Stages:
    """Score by scaled dot product."""
    raw_scores = query @ key.mT
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return {"raw_scores": raw_scores, "scores": raw_scores * scale}


def general_scores(query: Tensor, key: Tensor, weight: Tensor) -> Stages:
    """Score by a bilinear form."""
    return {"scores": query @ weight @ key.mT}


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
    scores: Tensor, *, mask: Tensor | None = None, bias: Tensor | None = None, is_causal: bool = False
) -> Stages:
    """Add the bias, then set what may not be attended to -inf."""
    stages: Stages = {}
    if bias is not None:
        scores = stages["biased"] = scores + bias
    if is_causal:
        causal = jnp.tri(scores.shape[-2], scores.shape[-1], dtype=bool)
        mask = causal if mask is None else mask & causal
    if mask is not None:
        stages["masked"] = jnp.where(mask, scores, -jnp.inf)
    return stages


def softmax(scores: Tensor) -> Stages:
    """Normalise each row over the keys."""
    # JAX's own softmax of a row of -inf is NaN.
    empty = jnp.isneginf(scores).all(axis=-1, keepdims=True)
    return {
        "weights": jnp.where(empty, 0, jax.nn.softmax(scores, axis=-1)),
        "log_sum_exp": jax.nn.logsumexp(scores, axis=-1),
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
    stages["output"] = stages["weights"] @ value
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
    projected = jnp.einsum("ble,ef->blf", inputs, weight)
    return projected if bias is None else projected + bias


def _split_heads(inputs: Tensor, heads: int) -> Tensor:
    batch, length, width = inputs.shape
    return inputs.reshape(batch, length, heads, width // heads).swapaxes(1, 2)  # (B, L, H*D) -> (B, H, L, D)


def _merge_heads(context: Tensor) -> Tensor:
    batch, heads, length, width = context.shape
    return context.swapaxes(1, 2).reshape(batch, length, heads * width)  # (B, H, L, D) -> (B, L, H*D)
