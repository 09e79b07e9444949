"""com.microsoft.MultiHeadAttention by onnxruntime on a CPU: what its optimizer makes of a model's attention.

What a mask of integers forbids, the operator's mask_filter_value is added to: -10000, or what it found in the model,
which in those of Hugging Face is the lowest number. float16 is cast to float32 and back, as the kernel is for float32.
"""

from __future__ import annotations

import numpy as np

from attncheck.backends.contract import Stages, Window
from attncheck.backends.onnxruntime_contrib import (
    Array,
    bias_of,
    describe,
    heads_of,
    number_or_default,
    packed,
    prepare,
    run,
)

__all__ = ["attention", "describe", "from_numpy", "prepare", "to_numpy"]


def from_numpy(array: Array) -> Array:
    """Take the array as it is."""
    return array


def to_numpy(tensor: Array) -> Array:
    """Take the array as it is."""
    return tensor


def attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Array | None = None,
    bias: Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    key_lengths: Array | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
) -> Stages:
    """Attend in one node. A mask that heads share is the key_padding_mask, any other is part of the bias."""
    if window not in (None, (None, 0)):
        raise NotImplementedError("MultiHeadAttention has no window")
    heads = query.shape[1]
    if key.shape[1] != heads:
        raise NotImplementedError("MultiHeadAttention has as many heads of keys as of queries")
    if past_value is not None and past_value.shape[-1] != query.shape[-1]:
        raise NotImplementedError("MultiHeadAttention has a past of values that are as wide as queries")
    lengths = query.shape[2], key.shape[2] + (0 if past_key is None else past_key.shape[2])
    if mask is not None and key_lengths is not None:
        mask, key_lengths = mask & (np.arange(lengths[1]) < key_lengths.reshape(-1, 1, 1, 1)), None
    per_head = mask if mask is not None and mask.shape[1] != 1 else None
    padding = _padding_mask(mask if per_head is None else None, key_lengths, len(query), lengths)
    inputs = {
        "query": packed(query),
        "key": packed(key),
        "value": packed(value),
        "bias": None,  # that of the projections
        "key_padding_mask": padding,
        "attention_bias": bias_of(per_head, bias, query.dtype, lengths),
        "past_key": past_key,
        "past_value": past_value,
    }
    attributes = number_or_default(scale=scale) | {"num_heads": heads}
    if padding is not None:
        attributes["mask_filter_value"] = float(np.finfo(np.float32).min)
    if is_causal or window is not None:
        attributes["unidirectional"] = 1
    outputs = ("output",) if past_key is None else ("output", "present_key", "present_value")
    return {"output": heads_of(run("MultiHeadAttention", inputs, attributes, outputs), heads)}


def _padding_mask(mask: Array | None, key_lengths: Array | None, batch: int, lengths: tuple[int, int]) -> Array | None:
    """Return lengths (B,), keys (B, T), or keys of each query (B, Lq, T), in integers."""
    if mask is None:
        return None if key_lengths is None else key_lengths.astype(np.int32)
    if mask.shape[2] == 1:
        return np.broadcast_to(mask[:, 0, 0], (batch, lengths[1])).astype(np.int32)
    return np.broadcast_to(mask[:, 0], (batch, *lengths)).astype(np.int32)
