"""com.microsoft.GroupQueryAttention by onnxruntime on a CPU: what onnxruntime-genai and Olive build decoders of.

New keys come with new queries, as many of them, and are appended to a cache: without one they are the first prompt. A
sequence without causality behind a cache is alone in its batch, as the operator wants it.
"""

from __future__ import annotations

from dataclasses import dataclass

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

__all__ = ["attention", "describe", "from_numpy", "paged_attention", "prepare", "to_numpy"]


def from_numpy(array: Array) -> Array:
    """Take the array as it is."""
    return array


def to_numpy(tensor: Array) -> Array:
    """Take the array as it is."""
    return tensor


@dataclass(frozen=True)
class _Step:
    """What one call adds: the node's attributes, its inputs besides query, key and value, and the cache of all keys.

    ``starts`` (B,) says at which key of the cache the queries stand; without a cache the keys are all there are.
    """

    attributes: dict[str, float]
    bias: Array | None = None
    sinks: Array | None = None
    rotary: tuple[Array, Array] | None = None
    starts: Array | None = None

    @property
    def is_causal(self) -> bool:
        """Whether queries may attend to what is before them alone."""
        return "causal" not in self.attributes


def attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Array | None = None,
    bias: Array | None = None,
    sinks: Array | None = None,
    rotary_cos: Array | None = None,
    rotary_sin: Array | None = None,
    rotary_interleaved: bool = False,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    window: Window | None = None,
    key_lengths: Array | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
    query_offsets: Array | None = None,
) -> Stages:
    """Attend in one step. A mask, and lengths of keys, are part of the bias, as the operator has no other mask."""
    past = 0
    if past_key is not None and past_value is not None:
        past = past_key.shape[2]
        key, value = np.concatenate([past_key, key], axis=2), np.concatenate([past_value, value], axis=2)
    lengths = query.shape[2], key.shape[2]
    if key_lengths is not None:
        used = np.arange(lengths[1]) < key_lengths.reshape(-1, 1, 1, 1)
        mask = used if mask is None else mask & used
    attributes = _attributes(query, key, is_causal, scale, softcap, window)
    starts = _starts(len(query), lengths, past, query_offsets, "causal" not in attributes)
    rotary = None if rotary_cos is None or rotary_sin is None else (rotary_cos, rotary_sin)
    if rotary is not None:
        _check_rotary(rotary[0], query.shape[-1], query_offsets is None and lengths[1] == past + lengths[0])
        attributes |= {"do_rotary": 1, "rotary_interleaved": int(rotary_interleaved)}
    step = _Step(attributes, bias_of(mask, bias, query.dtype, lengths), sinks, rotary, starts)
    return {"output": _attend(query, key, value, step)}


def paged_attention(
    query: Array,
    key_pages: Array,
    value_pages: Array,
    block_table: Array,
    key_lengths: Array,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    window: Window | None = None,
) -> Stages:
    """Gather the pages into a cache. Its lengths are seqlens_k: the last query stands at the last key that is used."""
    queries = query.shape[2]
    if queries > 1 and not is_causal and (window is None or window[1] != 0):
        raise NotImplementedError("GroupQueryAttention has lengths of its cache for causal attention, or one query")
    if (key_lengths < queries).any():
        raise NotImplementedError("GroupQueryAttention has at least as many keys as queries")
    pages = np.clip(block_table, 0, len(key_pages) - 1)  # what stands behind the last page that is used may be none
    gathered = (each[pages] for each in (key_pages, value_pages))  # (B, W, Lp, Hkv, D)
    key, value = (each.reshape(len(pages), -1, *each.shape[3:]).transpose(0, 2, 1, 3) for each in gathered)
    attributes = _attributes(query, key, is_causal or queries == 1, scale, softcap, window)
    return {"output": _attend(query, key, value, _Step(attributes, starts=key_lengths - queries))}


def _attributes(
    query: Array, key: Array, is_causal: bool, scale: float | None, softcap: float | None, window: Window | None
) -> dict[str, float]:
    left, right = window or (None, None)
    if left is not None or right is not None:
        if not (is_causal or right == 0):
            raise NotImplementedError("GroupQueryAttention has windows of what comes before a query alone")
        is_causal = True
    attributes = number_or_default(scale=scale, softcap=softcap)
    attributes |= {"num_heads": query.shape[1], "kv_num_heads": key.shape[1]}
    if not is_causal:
        attributes["causal"] = 0  # 1 by default; releases that have always been causal do not know the attribute
    if left is not None:
        attributes["local_window_size"] = left + 1  # with the query's own key
    return attributes


def _starts(
    batch: int, lengths: tuple[int, int], past: int, query_offsets: Array | None, is_causal: bool
) -> Array | None:
    """Say at which key the queries stand; None for the first prompt, of as many queries as keys."""
    queries, keys = lengths
    if query_offsets is None and past == 0 and queries == keys:
        return None
    if not is_causal:
        starts = np.full(batch, keys - queries)  # where they stand makes no difference
    else:
        starts = np.full(batch, past) if query_offsets is None else query_offsets
    if (starts < 0).any() or (starts + queries > keys).any():
        raise NotImplementedError("GroupQueryAttention has a key at the place of every query")
    return starts


def _check_rotary(cos: Array, width: int, are_new: bool) -> None:
    if not are_new:
        raise NotImplementedError("GroupQueryAttention rotates new keys, of which there are as many as queries")
    if width % 16 or cos.shape[1] % 8:
        raise NotImplementedError("GroupQueryAttention rotates multiples of 8 pairs, in widths that 16 divides")


def _attend(query: Array, key: Array, value: Array, step: _Step) -> Array:
    if step.starts is None:
        return _call(query, key, value, None, step)
    if step.is_causal or len(query) == 1 or query.shape[2] == 1:
        return _call(query, key, value, step.starts, step)
    outputs = []
    for entry in range(len(query)):
        own = slice(entry, entry + 1)
        bias = step.bias[own] if step.bias is not None and len(step.bias) > 1 else step.bias
        alone = _Step(step.attributes, bias, step.sinks, step.rotary)
        outputs.append(_call(query[own], key[own], value[own], step.starts[own], alone))
    return np.concatenate(outputs)


def _call(query: Array, key: Array, value: Array, starts: Array | None, step: _Step) -> Array:
    """Run the node: on the first prompt, or on the chunk of each sequence that is appended to its cache."""
    queries, keys = query.shape[2], key.shape[2]
    new, lengths, chunk = (key, value), np.full(len(query), keys), None
    if starts is not None:
        places = (starts[:, np.newaxis] + np.arange(queries))[:, np.newaxis, :, np.newaxis]
        new = np.take_along_axis(key, places, axis=2), np.take_along_axis(value, places, axis=2)
        lengths = starts + queries
        chunk = np.full(len(query), queries, dtype=np.int32) if step.is_causal else None
    inputs = {
        "query": packed(query),
        "key": packed(new[0]),
        "value": packed(new[1]),
        "past_key": None if starts is None else key,
        "past_value": None if starts is None else value,
        "seqlens_k": (lengths - 1).astype(np.int32),
        "total_sequence_length": np.array(keys, dtype=np.int32),
        "cos_cache": None if step.rotary is None else step.rotary[0],
        "sin_cache": None if step.rotary is None else step.rotary[1],
        "position_ids": None,
        "attention_bias": step.bias,
        "head_sink": step.sinks,
    }
    if chunk is not None:
        unused: dict[str, Array | None] = dict.fromkeys(("k_scale", "v_scale", "q_norm_weight", "k_norm_weight"))
        inputs |= unused | {"query_seqlens": chunk}
    return heads_of(run("GroupQueryAttention", inputs, step.attributes), query.shape[1])
