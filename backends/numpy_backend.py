"""Attention in NumPy alone: the plainest statement of every operation.

Sources: Vaswani et al. 2017, "Attention Is All You Need"; Luong et al. 2015, "Effective Approaches to Attention-based
Neural Machine Translation"; Bahdanau et al. 2015, "Neural Machine Translation by Jointly Learning to Align and
Translate". Shapes and meanings: ``contract.py``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.backends.contract import Stages

Array = NDArray[Any]


def prepare(dtype: str, threads: int) -> None:
    """Nothing to do: NumPy's BLAS took its threads from the environment when it was loaded."""


def describe() -> dict[str, str]:
    """Return NumPy's version and the BLAS it was built with."""
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return {"version": np.__version__, "device": "cpu", "blas": f"{blas['name']} {blas['version']}"}


def from_numpy(array: Array) -> Array:
    """Return the array itself."""
    return array


def to_numpy(tensor: Array) -> Array:
    """Return the array itself."""
    return tensor


def dot_scores(query: Array, key: Array, *, scale: float | None = None) -> Stages:
    """Score by scaled dot product."""
    raw_scores = query @ np.swapaxes(key, -1, -2)
    # math.sqrt gives a Python float; 1 / np.sqrt(D) would be a float64 scalar and turn float32 scores into float64.
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return {"raw_scores": raw_scores, "scores": raw_scores * scale}


def general_scores(query: Array, key: Array, weight: Array) -> Stages:
    """Score by a bilinear form."""
    return {"scores": query @ weight @ np.swapaxes(key, -1, -2)}


def additive_scores(
    query: Array,
    key: Array,
    query_weight: Array,
    key_weight: Array,
    score_vector: Array,
    *,
    score_bias: Array | None = None,
) -> Stages:
    """Score by a small feed-forward network."""
    query_part = (query @ query_weight)[..., :, np.newaxis, :]  # (B, H, Lq, 1, A)
    key_part = (key @ key_weight)[..., np.newaxis, :, :]  # (B, H, 1, Lk, A)
    hidden = query_part + key_part
    if score_bias is not None:
        hidden = hidden + score_bias
    return {"scores": np.tanh(hidden) @ score_vector}


def mask_scores(
    scores: Array, *, mask: Array | None = None, bias: Array | None = None, is_causal: bool = False
) -> Stages:
    """Add the bias, then set what may not be attended to -inf."""
    stages: Stages = {}
    if bias is not None:
        scores = stages["biased"] = scores + bias
    if is_causal:
        causal = np.tri(scores.shape[-2], scores.shape[-1], dtype=bool)
        mask = causal if mask is None else mask & causal
    if mask is not None:
        stages["masked"] = np.where(mask, scores, -np.inf)
    return stages


def softmax(scores: Array) -> Stages:
    """Normalise each row over the keys."""
    maximum = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    empty = maximum == -np.inf
    exponentials = np.exp(scores - np.where(empty, 0, maximum))
    total = np.where(empty, 1, exponentials.sum(axis=-1, keepdims=True))
    return {
        "weights": np.where(empty, 0, exponentials / total),
        # An infinite maximum, of either sign, is the answer itself: inf + log(inf - inf) would be NaN.
        "log_sum_exp": np.where(np.isinf(maximum), maximum, maximum + np.log(total))[..., 0],
    }


def attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Array | None = None,
    bias: Array | None = None,
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
    query: Array,
    key: Array,
    value: Array,
    *,
    heads: int,
    query_weight: Array,
    key_weight: Array,
    value_weight: Array,
    output_weight: Array | None = None,
    query_bias: Array | None = None,
    key_bias: Array | None = None,
    value_bias: Array | None = None,
    output_bias: Array | None = None,
    mask: Array | None = None,
    bias: Array | None = None,
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


def _project(inputs: Array, weight: Array, bias: Array | None) -> Array:
    projected: Array = inputs @ weight
    return projected if bias is None else projected + bias


def _split_heads(inputs: Array, heads: int) -> Array:
    batch, length, width = inputs.shape
    return inputs.reshape(batch, length, heads, width // heads).swapaxes(1, 2)  # (B, L, H*D) -> (B, H, L, D)


def _merge_heads(context: Array) -> Array:
    batch, heads, length, width = context.shape
    return context.swapaxes(1, 2).reshape(batch, length, heads * width)  # (B, H, L, D) -> (B, L, H*D)
