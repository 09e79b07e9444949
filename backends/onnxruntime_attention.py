"""Attention by onnxruntime on a CPU, as models of one node, each of which it loads once.

ONNX's Attention: the kernel, which is for opset 24, and the function of opset 25. For an operator without a kernel it
runs the graph that the standard defines the operator by. bfloat16 has neither: it "could not find an implementation for
Expand".

com.microsoft.MultiHeadAttention is what its optimizer makes of a model's attention. What a mask of integers forbids,
the operator's mask_filter_value is added to: -10000, or what it found in the model, which in those of Hugging Face is
the lowest number. float16 is cast to float32 and back, as the kernel is for float32.

com.microsoft.GroupQueryAttention is what onnxruntime-genai and Olive build decoders of. New keys come with new queries,
as many of them, and are appended to a cache: without one they are the first prompt. A sequence without causality behind
a cache is alone in its batch, as the operator wants it.

https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import onnxruntime

from attncheck.backends.contract import CallOptions, Stages, pass_as_options
from attncheck.backends.derived import with_functions
from attncheck.backends.onnx_attention import (
    Array,
    OnnxAttention,
    OnnxNode,
    gather_pages,
    make_model,
    merge_heads,
    split_heads,
)

_threads = {"number": 1}


def prepare(dtype: str, threads: int) -> None:
    """Limit the threads of sessions that are made from now on."""
    _threads["number"] = threads


def describe() -> dict[str, str]:
    """Return the version and what may change the numbers."""
    return {
        "version": onnxruntime.__version__,
        "device": "cpu",
        "threads": str(_threads["number"]),
        "provider": "CPUExecutionProvider",
    }


@lru_cache(maxsize=512)
def _session(node: OnnxNode, threads: int) -> onnxruntime.InferenceSession:
    """Load a model."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = threads
    options.log_severity_level = 4  # errors are raised anyway
    model = make_model(node).SerializeToString()
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _evaluate(node: OnnxNode, inputs: Mapping[str, Array]) -> list[Array]:
    outputs: list[Array] = _session(node, _threads["number"]).run(node.returned_outputs, dict(inputs))
    return outputs


_make_cpu_operator = partial(OnnxAttention, _evaluate, prepare, describe)
KERNEL = _make_cpu_operator(24)
SCORES, CAPPED, MASKED, WEIGHTS = (_make_cpu_operator(24, mode) for mode in range(4))
FUNCTION = _make_cpu_operator(25)


def run_operator(
    operator: str,
    inputs: Mapping[str, Array | None],
    attributes: Mapping[str, float],
    outputs: tuple[str, ...] = ("output", "present_key", "present_value"),
) -> Array:
    """Run the operator on all of its inputs in their order (None for an omitted one), and return its output."""
    dtypes = tuple((name, None if array is None else array.dtype.name) for name, array in inputs.items())
    node = OnnxNode(operator, 21, dtypes, outputs, tuple(sorted(attributes.items())), "com.microsoft")
    feeds = {name: np.ascontiguousarray(array) for name, array in inputs.items() if array is not None}
    results: list[Array] = _session(node, _threads["number"]).run(outputs[:1], feeds)
    return results[0]


def make_attention_bias(
    mask: Array | None, bias: Array | None, dtype: np.dtype[Any], lengths: tuple[int, int]
) -> Array | None:
    """Make the attention_bias, which is added to the scores: minus infinity at forbidden keys."""
    if mask is not None:
        bias = np.where(mask, dtype.type(0) if bias is None else bias, dtype.type(-np.inf))
    # Only the batch and head axes may have the length 1.
    return None if bias is None else np.broadcast_to(bias, (*bias.shape[:2], *lengths))


def drop_unset_attributes(**attributes: float | None) -> dict[str, float]:
    """Return the attributes that are not None. The operator reads 0 as its default, so 0 is refused."""
    for name, number in attributes.items():
        if number == 0:
            raise NotImplementedError(f"a {name} of 0 stands for the operator's default")
    return {name: float(number) for name, number in attributes.items() if number is not None}


@pass_as_options("mask", "bias", "is_causal", "scale", "window", "key_lengths", "past_key", "past_value")
def _multi_head(query: Array, key: Array, value: Array, options: CallOptions) -> Stages:
    """Attend in one node. A mask that heads share is the key_padding_mask, any other is part of the bias."""
    mask, bias, window, key_lengths = options.mask, options.bias, options.window, options.key_lengths
    past_key, past_value = options.past_key, options.past_value
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
        "query": merge_heads(query),
        "key": merge_heads(key),
        "value": merge_heads(value),
        "bias": None,  # the bias of the projections
        "key_padding_mask": padding,
        "attention_bias": make_attention_bias(per_head, bias, query.dtype, lengths),
        "past_key": past_key,
        "past_value": past_value,
    }
    attributes = drop_unset_attributes(scale=options.scale) | {"num_heads": heads}
    if padding is not None:
        attributes["mask_filter_value"] = float(np.finfo(np.float32).min)
    if options.is_causal or window is not None:
        attributes["unidirectional"] = 1
    outputs = ("output",) if past_key is None else ("output", "present_key", "present_value")
    return {"output": split_heads(run_operator("MultiHeadAttention", inputs, attributes, outputs), heads)}


def _padding_mask(mask: Array | None, key_lengths: Array | None, batch: int, lengths: tuple[int, int]) -> Array | None:
    """Return the key_padding_mask in integers: lengths (B,), keys (B, T), or keys of each query (B, Lq, T)."""
    if mask is None:
        return None if key_lengths is None else key_lengths.astype(np.int32)
    if mask.shape[2] == 1:
        return np.broadcast_to(mask[:, 0, 0], (batch, lengths[1])).astype(np.int32)
    return np.broadcast_to(mask[:, 0], (batch, *lengths)).astype(np.int32)


@dataclass(frozen=True)
class _NodeArguments:
    """One call's node: attributes, inputs besides query, key and value, and the cache of all keys.

    ``starts`` (B,) are the positions of the first queries in the cache; None without a cache.
    """

    attributes: dict[str, float]
    bias: Array | None = None
    sinks: Array | None = None
    rotary: tuple[Array, Array] | None = None
    starts: Array | None = None

    @property
    def is_causal(self) -> bool:
        """Return whether queries may attend only to keys up to their position."""
        return "causal" not in self.attributes


@pass_as_options(
    *("mask", "bias", "sinks", "rotary_cos", "rotary_sin", "rotary_interleaved", "is_causal", "scale", "softcap"),
    *("window", "key_lengths", "past_key", "past_value", "query_offsets"),
)
def _group_query(query: Array, key: Array, value: Array, options: CallOptions) -> Stages:
    """Attend in one step. A mask, and lengths of keys, are part of the bias, as the operator has no other mask."""
    mask, key_lengths, query_offsets = options.mask, options.key_lengths, options.query_offsets
    key, value, past = options.with_past(key, value, np.concatenate)
    lengths = query.shape[2], key.shape[2]
    if key_lengths is not None:
        used = np.arange(lengths[1]) < key_lengths.reshape(-1, 1, 1, 1)
        mask = used if mask is None else mask & used
    attributes = _attributes(query, key, options)
    starts = _first_query_positions(len(query), lengths, past, query_offsets, "causal" not in attributes)
    cos, sin = options.rotary_cos, options.rotary_sin
    rotary = None if cos is None or sin is None else (cos, sin)
    if rotary is not None:
        if query_offsets is not None or lengths[1] != past + lengths[0]:
            raise NotImplementedError("GroupQueryAttention rotates new keys, of which there are as many as queries")
        if query.shape[-1] % 16 or rotary[0].shape[1] % 8:
            raise NotImplementedError("GroupQueryAttention rotates multiples of 8 pairs, in widths that 16 divides")
        attributes |= {"do_rotary": 1, "rotary_interleaved": int(options.rotary_interleaved)}
    step = _NodeArguments(
        attributes, make_attention_bias(mask, options.bias, query.dtype, lengths), options.sinks, rotary, starts
    )
    return {"output": _attend_with_cache(query, key, value, step)}


@pass_as_options("is_causal", "scale", "softcap", "window")
def _group_query_paged(
    query: Array,
    key_pages: Array,
    value_pages: Array,
    block_table: Array,
    key_lengths: Array,
    options: CallOptions,
) -> Stages:
    """Gather the pages into a cache with the lengths seqlens_k: the last query is at the last used key."""
    queries = query.shape[2]
    if queries > 1 and not options.is_causal and (options.window is None or options.window[1] != 0):
        raise NotImplementedError("GroupQueryAttention has lengths of its cache for causal attention, or one query")
    if (key_lengths < queries).any():
        raise NotImplementedError("GroupQueryAttention has at least as many keys as queries")
    key, value = gather_pages(key_pages, value_pages, block_table)
    attributes = _attributes(query, key, replace(options, is_causal=options.is_causal or queries == 1))
    return {"output": _attend_with_cache(query, key, value, _NodeArguments(attributes, starts=key_lengths - queries))}


def _attributes(query: Array, key: Array, options: CallOptions) -> dict[str, float]:
    is_causal, (left, right) = options.is_causal, options.window or (None, None)
    if left is not None or right is not None:
        if not (is_causal or right == 0):
            raise NotImplementedError("GroupQueryAttention has windows of what comes before a query alone")
        is_causal = True
    attributes = drop_unset_attributes(scale=options.scale, softcap=options.softcap)
    attributes |= {"num_heads": query.shape[1], "kv_num_heads": key.shape[1]}
    if not is_causal:
        attributes["causal"] = 0  # 1 by default; releases that have always been causal do not know the attribute
    if left is not None:
        attributes["local_window_size"] = left + 1  # including the key at the query's position
    return attributes


def _first_query_positions(
    batch: int, lengths: tuple[int, int], past: int, query_offsets: Array | None, is_causal: bool
) -> Array | None:
    """Return the position of each entry's first query; None for a first prompt with as many queries as keys."""
    queries, keys = lengths
    if query_offsets is None and past == 0 and queries == keys:
        return None
    if not is_causal:
        starts = np.full(batch, keys - queries)  # any position gives the same result
    else:
        starts = np.full(batch, past) if query_offsets is None else query_offsets
    if (starts < 0).any() or (starts + queries > keys).any():
        raise NotImplementedError("GroupQueryAttention has a key at the place of every query")
    return starts


def _attend_with_cache(query: Array, key: Array, value: Array, step: _NodeArguments) -> Array:
    if step.starts is None:
        return _call(query, key, value, None, step)
    if step.is_causal or len(query) <= 1 or query.shape[2] == 1:
        return _call(query, key, value, step.starts, step)
    outputs = []
    for entry in range(len(query)):
        of_entry = slice(entry, entry + 1)
        bias = step.bias[of_entry] if step.bias is not None and len(step.bias) > 1 else step.bias
        alone = _NodeArguments(step.attributes, bias, step.sinks, step.rotary)
        outputs.append(_call(query[of_entry], key[of_entry], value[of_entry], step.starts[of_entry], alone))
    return np.concatenate(outputs)


def _call(query: Array, key: Array, value: Array, starts: Array | None, step: _NodeArguments) -> Array:
    """Run the node on the first prompt, or on the chunk that is appended to each sequence's cache."""
    queries, keys = query.shape[2], key.shape[2]
    new, lengths, chunk = (key, value), np.full(len(query), keys), None
    if starts is not None:
        places = (starts[:, np.newaxis] + np.arange(queries))[:, np.newaxis, :, np.newaxis]
        new = np.take_along_axis(key, places, axis=2), np.take_along_axis(value, places, axis=2)
        lengths = starts + queries
        chunk = np.full(len(query), queries, dtype=np.int32) if step.is_causal else None
    inputs = {
        "query": merge_heads(query),
        "key": merge_heads(new[0]),
        "value": merge_heads(new[1]),
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
    return split_heads(run_operator("GroupQueryAttention", inputs, step.attributes), query.shape[1])


MHA = with_functions(KERNEL, {"attention": _multi_head})
GQA = with_functions(KERNEL, {"attention": _group_query, "paged_attention": _group_query_paged})
