"""Attention in NumPy alone: the plainest statement of every operation.

Sources: Vaswani et al. 2017, "Attention Is All You Need"; Luong et al. 2015, "Effective Approaches to Attention-based
Neural Machine Translation"; Bahdanau et al. 2015, "Neural Machine Translation by Jointly Learning to Align and
Translate"; Graves et al. 2014, "Neural Turing Machines". Shapes and meanings: ``contract.py``.
"""

from __future__ import annotations

import math
from functools import reduce
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from attncheck.backends.codes import make_dequantize, make_numbers_of_codes
from attncheck.backends.composed import causal_and_window_conditions, window_from_first_key
from attncheck.backends.contract import (
    Attended,
    Chosen,
    Differentiated,
    EmptyRows,
    Latent,
    LseBase,
    MaskedRows,
    Norm,
    Normalized,
    NormOver,
    Projected,
    Scored,
    Stages,
    Stored,
    StoredPages,
    Window,
    show_keywords_of,
)
from attncheck.backends.derived import make_absorbed_backend

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


def dot_scores(query: Array, key: Array, *, scale: float | None = None, softcap: float | None = None) -> Stages:
    """Score by scaled dot product."""
    raw_scores = _dot(query, key)
    scores = raw_scores * _scale_of(query, scale)
    stages = {"raw_scores": raw_scores, "scores": scores}
    if softcap is not None:
        stages["capped"] = _cap(scores, softcap)
    return stages


def cosine_scores(query: Array, key: Array, *, scale: float | None = None) -> Stages:
    """Score by the cosine of the angle between query and key."""
    query, key = _scale_near_one(query), _scale_near_one(key)
    query = query / np.linalg.norm(query, axis=-1, keepdims=True)
    key = key / np.linalg.norm(key, axis=-1, keepdims=True)
    cosine = _dot(query, key)
    return {"scores": cosine if scale is None else cosine * scale}


def _scale_near_one(vectors: Array) -> Array:
    # Powers of two round nothing, and then no square of a small number underflows and none of a large one overflows.
    _, exponents = np.frexp(np.max(np.abs(vectors), axis=-1, keepdims=True, initial=0))
    return np.asarray(np.ldexp(vectors, -exponents))


def general_scores(query: Array, key: Array, weight: Array, *, score_bias: Array | None = None) -> Stages:
    """Score by a bilinear form."""
    scores = _dot(query @ weight, key)
    return {"scores": scores if score_bias is None else scores + score_bias[:, np.newaxis, np.newaxis]}


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
    scores: Array,
    *,
    mask: Array | None = None,
    bias: Array | None = None,
    is_causal: bool = False,
    window: Window | None = None,
    key_lengths: Array | None = None,
    query_offsets: Array | None = None,
    mask_fill: float | None = None,
) -> Stages:
    """Add the bias, then set what may not be attended to -inf, or to ``mask_fill``."""
    allowed = _allowed_keys(scores, mask, is_causal, window, key_lengths, query_offsets)
    stages: Stages = {}
    if bias is not None:
        scores = stages["biased"] = scores + bias
    if allowed is not None:
        fill = -np.inf if mask_fill is None else scores.dtype.type(mask_fill)
        stages["masked"] = np.where(allowed, scores, fill)
    return stages


def _allowed_keys(
    scores: Array,
    mask: Array | None,
    is_causal: bool,
    window: Window | None,
    key_lengths: Array | None,
    query_offsets: Array | None = None,
) -> Array | None:
    """Return who may attend to whom, broadcasting to the scores; None where nothing is forbidden."""
    query_position = np.arange(scores.shape[-2])[:, np.newaxis]
    if query_offsets is not None:
        query_position = query_position + query_offsets[:, np.newaxis, np.newaxis, np.newaxis]  # (B, 1, Lq, 1)
    key_position = np.arange(scores.shape[-1])
    rules = [
        *([] if mask is None else [mask]),
        *causal_and_window_conditions(key_position - query_position, is_causal, window),
    ]
    if key_lengths is not None:
        rules.append(key_position < key_lengths[:, np.newaxis, np.newaxis, np.newaxis])  # (B, 1, 1, T)
    return reduce(np.logical_and, rules) if rules else None


def softmax(scores: Array, *, empty_rows: EmptyRows = "zero") -> Stages:
    """Normalise each row over the keys."""
    return _softmax_with_sinks(scores, None, empty_rows)


def _softmax_with_sinks(scores: Array, sinks: Array | None, empty_rows: EmptyRows) -> Stages:
    """Normalise each row over the keys and the sink of its head, whose own weight is not returned."""
    scores = _fill_empty_rows(scores, sinks, empty_rows)
    maximum = _row_maximum(scores)
    if sinks is not None:
        maximum = np.maximum(maximum, sinks[:, np.newaxis, np.newaxis])  # (H, 1, 1)
    empty = maximum == -np.inf
    shift = np.where(empty, 0, maximum)
    exponentials = np.exp(scores - shift)
    total = _row_sum(exponentials)
    if sinks is not None:
        total = total + np.exp(sinks[:, np.newaxis, np.newaxis] - shift)
    total = np.where(empty, 1, total)
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
    sinks: Array | None = None,
    head_scale: Array | None = None,
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
            cos, sin = (_rows_at(table, query_offsets, query.shape[-2]) for table in (rotary_cos, rotary_sin))
        query = stages["rotated_query"] = _rotate(query, cos, sin, rotary_interleaved)
    if past_key is not None and past_value is not None:
        key, value = (np.concatenate(pair, axis=-2) for pair in ((past_key, key), (past_value, value)))
        window = window if query_offsets is not None else window_from_first_key(window, past)
    if rotary_cos is not None:
        stages["rotated_key"] = key  # the past comes rotated
    key, value = _repeat_heads(key, value, query.shape[1])
    if head_scale is None:
        stages |= dot_scores(query, key, scale=scale, softcap=softcap)
    else:
        stages |= _scale_by_head(dot_scores(query, key, scale=1.0, softcap=None), head_scale, softcap)
    *_, scores = stages.values()  # the last stage that was asked for
    rules: dict[str, Any] = {"is_causal": is_causal, "window": window, "key_lengths": key_lengths}
    rules |= {"query_offsets": query_offsets, "mask_fill": mask_fill}
    stages |= mask_scores(scores, mask=mask, bias=bias, **rules)
    *_, logits = stages.values()
    stages |= _softmax_with_sinks(logits, sinks, empty_rows)
    stages["output"] = _weighted_sum(stages["weights"], value)
    return stages


@show_keywords_of(MaskedRows)
def general_attention(
    query: Array,
    key: Array,
    value: Array,
    weight: Array,
    *,
    score_bias: Array | None = None,
    **masks: Unpack[MaskedRows],
) -> Stages:
    """Attend with a bilinear score."""
    empty_rows = masks.pop("empty_rows", "zero")
    return _attend(general_scores(query, key, weight, score_bias=score_bias), value, masks, empty_rows)


@show_keywords_of(MaskedRows)
def additive_attention(
    query: Array,
    key: Array,
    value: Array,
    query_weight: Array,
    key_weight: Array,
    score_vector: Array,
    *,
    score_bias: Array | None = None,
    **masks: Unpack[MaskedRows],
) -> Stages:
    """Attend with an additive score."""
    empty_rows = masks.pop("empty_rows", "zero")
    scores = additive_scores(query, key, query_weight, key_weight, score_vector, score_bias=score_bias)
    return _attend(scores, value, masks, empty_rows)


@show_keywords_of(MaskedRows)
def cosine_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    scale: float | None = None,
    **masks: Unpack[MaskedRows],
) -> Stages:
    """Attend with the cosine as score."""
    empty_rows = masks.pop("empty_rows", "zero")
    return _attend(cosine_scores(query, key, scale=scale), value, masks, empty_rows)


def _attend(stages: Stages, value: Array, masks: Any, empty_rows: EmptyRows) -> Stages:
    """Mask scores, normalise and average the values."""
    stages |= mask_scores(stages["scores"], **masks)
    *_, logits = stages.values()  # the last stage that was asked for
    stages |= _softmax_with_sinks(logits, None, empty_rows)
    stages["output"] = _weighted_sum(stages["weights"], value)
    return stages


@show_keywords_of(Differentiated)
def attention_gradients(
    query: Array,
    key: Array,
    value: Array,
    grad_output: Array,
    **options: Unpack[Differentiated],
) -> Stages:
    """Differentiate by hand, from the last stage to the first: the chain rule as vector-Jacobian products."""
    bias, sinks, softcap = options.get("bias"), options.get("sinks"), options.get("softcap")
    stages = attention(query, key, value, **options)
    heads, kv_heads = query.shape[1], key.shape[1]
    query, key = stages.get("rotated_query", query), stages.get("rotated_key", key)
    *_, logits, weights, log_sum_exp, _ = stages.values()
    key, value = _repeat_heads(key, value, heads)
    grad_weights = _dot(grad_output, value)
    mean = _row_sum(weights * grad_weights)
    grad_logits = _softmax_gradient(weights, grad_weights, mean)
    if options.get("empty_rows", "zero") != "zero":  # the weights of a row without a key follow from none of its scores
        grad_logits = np.where(logits == -np.inf, 0.0, grad_logits)
    if options.get("mask_fill") is not None:  # no gradient goes through what was put in the place of a score
        edges = options.get("is_causal", False), options.get("window")
        allowed = _allowed_keys(logits, options.get("mask"), *edges, options.get("key_lengths"))
        grad_logits = grad_logits if allowed is None else np.where(allowed, grad_logits, 0.0)
    grad_scores = grad_logits if softcap is None else grad_logits * _cap_slope(stages["capped"], softcap)
    head_scale = options.get("head_scale")
    grad_raw_scores = grad_scores * _scale_of(query, options.get("scale") if head_scale is None else 1.0)
    if head_scale is not None:
        grad_raw_scores = grad_raw_scores * head_scale[:, np.newaxis, np.newaxis]
    gradients = {
        "grad_query": _weighted_sum(grad_raw_scores, key),
        "grad_key": _sum_heads(_sum_over_queries(grad_raw_scores, query), kv_heads),
        "grad_value": _sum_heads(_sum_over_queries(weights, grad_output), kv_heads),
    }
    rotary_cos, rotary_sin = options.get("rotary_cos"), options.get("rotary_sin")
    if rotary_cos is not None and rotary_sin is not None:
        interleaved = options.get("rotary_interleaved", False)
        for name in ("grad_query", "grad_key"):  # a rotation's transpose turns backwards
            gradients[name] = _rotate(gradients[name], rotary_cos, -rotary_sin, interleaved)
    if bias is not None:
        gradients["grad_bias"] = _sum_broadcast(grad_logits, bias)
    if sinks is not None:
        sink = sinks[:, np.newaxis]  # (H, 1)
        sink_weight = np.where(sink == -np.inf, 0, np.exp(sink - log_sum_exp))
        gradients["grad_sinks"] = -(sink_weight * mean[..., 0]).sum(axis=(0, 2))  # its value is 0
    return gradients


@show_keywords_of(Attended)
def gated_attention(query: Array, key: Array, value: Array, gate: Array, **options: Unpack[Attended]) -> Stages:
    """Attend, and multiply the output with the sigmoid of its gate."""
    stages = attention(query, key, value, **options)
    stages["context"] = stages.pop("output")
    stages["output"] = stages["context"] * _sigmoid(gate)
    return stages


@show_keywords_of(Differentiated)
def gated_attention_gradients(
    query: Array,
    key: Array,
    value: Array,
    gate: Array,
    grad_output: Array,
    **options: Unpack[Differentiated],
) -> Stages:
    """Differentiate the product by hand, and attention by what comes back through the gate."""
    context, opened = attention(query, key, value, **options)["output"], _sigmoid(gate)
    gradients = attention_gradients(query, key, value, grad_output * opened, **options)
    return gradients | {"grad_gate": grad_output * context * _sigmoid_slope(opened)}


@show_keywords_of(Scored)
def packed_attention(
    query: Array,
    key: Array,
    value: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    *,
    key_lengths: Array | None = None,
    **options: Unpack[Scored],
) -> Stages:
    """Attend within one sequence after the other."""
    edges = options.pop("is_causal", False), options.pop("window", None)
    parts: list[Stages] = []
    for queries, keys, _ in _sequence_slices(cu_seqlens_q, cu_seqlens_k, key_lengths):
        if parts and queries.start == queries.stop:
            continue  # no row of any result
        part = [query[:, :, queries], key[:, :, keys], value[:, :, keys]]
        mask = _allowed_from_the_end(part[0].shape[-2], part[1].shape[-2], *edges)
        parts.append(attention(*part, mask=mask, **options))
    return {
        "log_sum_exp": np.concatenate([part["log_sum_exp"] for part in parts], axis=-1),
        "output": np.concatenate([part["output"] for part in parts], axis=-2),
    }


@show_keywords_of(Scored)
def packed_attention_gradients(
    query: Array,
    key: Array,
    value: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    grad_output: Array,
    *,
    key_lengths: Array | None = None,
    **options: Unpack[Scored],
) -> Stages:
    """Differentiate one sequence after the other."""
    edges = options.pop("is_causal", False), options.pop("window", None)
    parts: dict[str, list[Array]] = {}
    for queries, keys, unused in _sequence_slices(cu_seqlens_q, cu_seqlens_k, key_lengths):
        part = [query[:, :, queries], key[:, :, keys], value[:, :, keys], grad_output[:, :, queries]]
        mask = _allowed_from_the_end(part[0].shape[-2], part[1].shape[-2], *edges)
        for name, gradient in attention_gradients(*part, mask=mask, **options).items():
            behind = unused if name in ("grad_key", "grad_value") else 0
            rows = gradient if not behind else np.pad(gradient, ((0, 0), (0, 0), (0, behind), (0, 0)))
            parts.setdefault(name, []).append(rows)
    shared = {"grad_sinks": sum(parts.pop("grad_sinks"))} if options.get("sinks") is not None else {}
    return {name: np.concatenate(arrays, axis=-2) for name, arrays in parts.items()} | shared


@show_keywords_of(StoredPages)
def paged_attention(
    query: Array,
    key_pages: Array,
    value_pages: Array,
    block_table: Array,
    key_lengths: Array,
    **options: Unpack[StoredPages],
) -> Stages:
    """Make numbers of codes, if there are any, and attend to the pages of one batch entry after the other."""
    keywords: dict[str, Any] = {**options}
    query, key_pages, value_pages = _numbers_of_codes(query, key_pages, value_pages, keywords, in_pages=True)
    edges = keywords.pop("is_causal", False), keywords.pop("window", None)
    parts = []
    for entry_query, pages, used in zip(query, block_table, key_lengths, strict=True):
        pages = pages[: -(-used // key_pages.shape[1])]  # later entries of the table may be no pages
        key, value = (_join_pages(cache, pages)[:, :, :used] for cache in (key_pages, value_pages))
        mask = _allowed_from_the_end(entry_query.shape[-2], key.shape[-2], *edges)
        parts.append(attention(entry_query[np.newaxis], key, value, mask=mask, **keywords))
    return {name: np.concatenate([part[name] for part in parts]) for name in ("log_sum_exp", "output")}


@show_keywords_of(StoredPages)
def ragged_paged_attention(
    query: Array,
    key_pages: Array,
    value_pages: Array,
    cu_seqlens_q: Array,
    block_table: Array,
    key_lengths: Array,
    *,
    tree_mask: Array | None = None,
    **options: Unpack[StoredPages],
) -> Stages:
    """Make numbers of codes, if there are any, and attend to the pages of one sequence after the other."""
    keywords: dict[str, Any] = {**options}
    query, key_pages, value_pages = _numbers_of_codes(query, key_pages, value_pages, keywords, in_pages=True)
    parts = []
    for begin, end, pages, used in zip(cu_seqlens_q, cu_seqlens_q[1:], block_table, key_lengths, strict=False):
        rows, of_sequence = query[:, :, begin:end], (pages[np.newaxis], used[np.newaxis])
        if tree_mask is not None:
            keywords["bias"] = np.where(tree_mask[begin:end, :used], query.dtype.type(0), -np.inf)[
                np.newaxis, np.newaxis
            ]
        parts.append(paged_attention(rows, key_pages, value_pages, *of_sequence, **keywords))
    return {
        "log_sum_exp": np.concatenate([part["log_sum_exp"] for part in parts], axis=-1),
        "output": np.concatenate([part["output"] for part in parts], axis=-2),
    }


_numbers_of_codes = make_numbers_of_codes(
    make_dequantize(
        lambda array, dtype: array.astype(dtype),
        lambda values, codes, dtype: np.array(values, dtype)[codes],
        np.stack,
        np.repeat,
    )
)


@show_keywords_of(Stored)
def quantized_attention(
    query: Array,
    key: Array,
    value: Array,
    key_scale: Array,
    value_scale: Array,
    *,
    mask: Array | None = None,
    key_lengths: Array | None = None,
    **options: Unpack[Stored],
) -> Stages:
    """Make numbers of codes, and attend."""
    keywords: dict[str, Any] = {**options, "key_scale": key_scale, "value_scale": value_scale}
    return attention(*_numbers_of_codes(query, key, value, keywords), mask=mask, key_lengths=key_lengths, **keywords)


@show_keywords_of(Normalized)
def normalized_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    norm: Norm = "rms",
    norm_over: NormOver = "head",
    epsilon: float = 1e-6,
    norm_after_rotation: bool = False,
    query_norm_weight: Array | None = None,
    key_norm_weight: Array | None = None,
    **options: Unpack[Normalized],
) -> Stages:
    """Normalise queries and keys, rotate them, and attend; or rotate them first."""
    stages: Stages = {}
    rotary_cos, rotary_sin = options.get("rotary_cos"), options.get("rotary_sin")
    if norm_after_rotation and rotary_cos is not None and rotary_sin is not None:
        interleaved = options.get("rotary_interleaved", False)
        stages["rotated_query"] = query = _rotate(query, rotary_cos, rotary_sin, interleaved)
        stages["rotated_key"] = key = _rotate(key, rotary_cos, rotary_sin, interleaved)
        options |= {"rotary_cos": None, "rotary_sin": None}
    is_full = norm_over == "full"
    stages["normalized_query"] = _normalize(query, query_norm_weight, norm, epsilon, is_full)
    stages["normalized_key"] = _normalize(key, key_norm_weight, norm, epsilon, is_full)
    return stages | attention(stages["normalized_query"], stages["normalized_key"], value, **options)


@show_keywords_of(Latent)
def latent_attention(
    query: Array,
    latent: Array,
    key_projection: Array,
    value_projection: Array,
    *,
    query_rotary: Array | None = None,
    key_rotary: Array | None = None,
    **options: Unpack[Latent],
) -> Stages:
    """Make the keys and values of every head, and attend to them."""
    key, value = (_project_latents(latent, projection) for projection in (key_projection, value_projection))
    if query_rotary is not None and key_rotary is not None:
        query, key = _append_rotary(query, query_rotary), _append_rotary(key, key_rotary[:, np.newaxis])
    return attention(query, key, value, **options)


@show_keywords_of(Chosen)
def sparse_attention(
    query: Array,
    key: Array,
    value: Array,
    key_indices: Array,
    *,
    block_size: int = 1,
    **options: Unpack[Chosen],
) -> Stages:
    """Gather the keys of every query, and attend to them: each query is a batch entry of its own."""
    (batch, heads, queries, _), (kv_heads, keys) = query.shape, key.shape[1:3]
    keywords: dict[str, Any] = {**options}
    rules = [keywords.pop(name, None) for name in ("is_causal", "window", "key_lengths", "query_offsets")]
    indices = np.broadcast_to(key_indices, (batch, kv_heads, queries, key_indices.shape[-1]))
    positions = _positions_of_indices(indices, block_size, keys)
    allowed = _allowed_positions(positions, *rules)  # (B, Hkv, Lq, M), as the positions
    gathered = _gather_keys(key, positions), _gather_keys(value, positions)  # (B, Hkv, Lq, M, D)
    parts: dict[str, list[Array]] = {"log_sum_exp": [], "output": []}
    for head, of_head in enumerate(np.split(np.arange(heads), kv_heads)):
        rows = [query[:, of_head].swapaxes(1, 2)[:, :, :, np.newaxis]]  # (B, Lq, G, 1, D)
        rows += [array[:, head, :, np.newaxis] for array in (*gathered, allowed[..., np.newaxis, :])]
        entries = [array.reshape(batch * queries, *array.shape[2:]) for array in rows]
        numbers = {name: keywords.get(name) for name in ("sinks", "head_scale")}
        per_head = {name: None if array is None else array[of_head] for name, array in numbers.items()}
        stages = attention(*entries[:3], mask=entries[3], **{**keywords, **per_head})
        for name, arrays in parts.items():
            array = stages[name][:, :, 0]  # (B Lq, G), or (B Lq, G, Dv)
            arrays.append(array.reshape(batch, queries, *array.shape[1:]).swapaxes(1, 2))
    return {name: np.concatenate(arrays, axis=1) for name, arrays in parts.items()}


@show_keywords_of(Projected)
def multi_head_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    heads: int,
    kv_heads: int | None = None,
    query_weight: Array,
    key_weight: Array,
    value_weight: Array,
    output_weight: Array | None = None,
    query_bias: Array | None = None,
    key_bias: Array | None = None,
    value_bias: Array | None = None,
    output_bias: Array | None = None,
    scale: float | None = None,
    **options: Unpack[Projected],
) -> Stages:
    """Project, attend in every head, merge the heads and project once more."""
    if output_weight is None and output_bias is not None:
        raise ValueError("output_bias needs output_weight")
    kv_heads = heads if kv_heads is None else kv_heads
    stages: Stages = {
        "query": _split_heads(_project(query, query_weight, query_bias), heads),
        "key": _split_heads(_project(key, key_weight, key_bias), kv_heads),
        "value": _split_heads(_project(value, value_weight, value_bias), kv_heads),
    }
    stages |= attention(**stages, **options, scale=scale)
    stages["context"] = stages.pop("output")
    merged = _merge_heads(stages["context"])
    stages["output"] = merged if output_weight is None else _project(merged, output_weight, output_bias)
    return stages


def _sequence_slices(
    cu_seqlens_q: Array, cu_seqlens_k: Array, key_lengths: Array | None
) -> list[tuple[slice, slice, int]]:
    """Return, for each sequence, its queries, its used keys, and the number of its unused keys."""
    queries, keys = ([slice(*map(int, ends)) for ends in pairwise(limits)] for limits in (cu_seqlens_q, cu_seqlens_k))
    used = [part.stop - part.start for part in keys] if key_lengths is None else map(int, key_lengths)
    ends = [part.start + length for part, length in zip(keys, used, strict=True)]
    return [
        (query_part, slice(key_part.start, end), key_part.stop - end)
        for query_part, key_part, end in zip(queries, keys, ends, strict=True)
    ]


def _allowed_from_the_end(queries: int, keys: int, is_causal: bool, window: Window | None) -> Array | None:
    """Return the allowed keys of each query, (1, 1, Lq, Lk), for a last query at the position of the last key."""
    behind = np.arange(keys) - (np.arange(queries)[:, np.newaxis] + keys - queries)
    rules = causal_and_window_conditions(behind, is_causal, window)
    return reduce(np.logical_and, rules)[np.newaxis, np.newaxis] if rules else None


def _join_pages(pages: Array, table: Array) -> Array:
    """Put pages one after the other: (Np, Lp, Hkv, D), (W,) -> (1, Hkv, W Lp, D)."""
    rows = pages[table].reshape(-1, *pages.shape[2:])
    return rows.swapaxes(0, 1)[np.newaxis]


def _positions_of_indices(key_indices: Array, block_size: int, keys: int) -> Array:
    """Return the positions of the keys that each query names, and -1 for none: (.., K) -> (.., K n), n keys a block."""
    inside = np.arange(block_size)
    positions = key_indices[..., np.newaxis] * block_size + inside
    is_key = (key_indices[..., np.newaxis] >= 0) & (positions < keys)  # the last block may be cut off
    named: Array = np.where(is_key, positions, -1)
    return named.reshape(*key_indices.shape[:-1], key_indices.shape[-1] * block_size)


def _allowed_positions(
    positions: Array,
    is_causal: bool | None,
    window: Window | None,
    key_lengths: Array | None,
    query_offsets: Array | None,
) -> Array:
    """Return which of the named positions, (B, Hkv, Lq, M), are keys that their query may attend to."""
    query_position = np.arange(positions.shape[-2])[:, np.newaxis]
    if query_offsets is not None:
        query_position = query_position + query_offsets[:, np.newaxis, np.newaxis, np.newaxis]
    rules = [positions >= 0, *causal_and_window_conditions(positions - query_position, bool(is_causal), window)]
    if key_lengths is not None:
        rules.append(positions < key_lengths[:, np.newaxis, np.newaxis, np.newaxis])
    allowed: Array = reduce(np.logical_and, rules)
    return allowed


def _gather_keys(rows: Array, positions: Array) -> Array:
    """Gather the rows of positions, and zeros for none: (B, Hkv, Lk, W), (B, Hkv, Lq, M) -> (B, Hkv, Lq, M, W)."""
    batch, heads, _, width = rows.shape
    with_none = np.concatenate([rows, np.zeros((batch, heads, 1, width), rows.dtype)], axis=2)  # -1 is the last row
    entry, head = np.arange(batch)[:, np.newaxis, np.newaxis, np.newaxis], np.arange(heads)[:, np.newaxis, np.newaxis]
    gathered: Array = with_none[entry, head, positions]
    return gathered


def merge_states(outputs: Array, log_sum_exps: Array, *, lse_base: LseBase = "e") -> Stages:
    """Merge what attention gave for parts of the keys."""
    stages = softmax(_natural_logarithms(np.moveaxis(log_sum_exps, 0, -1), lse_base))
    stages["log_sum_exp"] = _logarithms_in_base(stages["log_sum_exp"], lse_base)
    parts = np.moveaxis(_without_empty_parts(outputs, log_sum_exps), 0, -2)  # (B, H, Lq, N, Dv)
    stages["output"] = _average_parts(stages["weights"], parts).astype(outputs.dtype)
    return stages


def _natural_logarithms(logarithms: Array, base: LseBase) -> Array:
    return logarithms if base == "e" else logarithms * math.log(2)


def _logarithms_in_base(logarithms: Array, base: LseBase) -> Array:
    return logarithms if base == "e" else logarithms / math.log(2)


def _without_empty_parts(outputs: Array, log_sum_exps: Array) -> Array:
    """Set to 0 what a part gives in which a query may attend to no key: 0 times NaN would be NaN."""
    return np.where(np.isneginf(log_sum_exps)[..., np.newaxis], np.zeros((), outputs.dtype), outputs)


def _average_parts(weights: Array, parts: Array) -> Array:
    """Average the parts of every query: (B, H, Lq, N), (B, H, Lq, N, Dv) -> (B, H, Lq, Dv)."""
    mean: Array = (weights[..., np.newaxis, :] @ parts)[..., 0, :]
    return mean


def _normalize(inputs: Array, weight: Array | None, norm: Norm, epsilon: float, is_full: bool) -> Array:
    """Normalise each head's vector, or those of all heads of a position side by side: (B, H, L, D)."""
    rows = _merge_heads(inputs) if is_full else inputs
    squares = _squares(rows)
    divisor = _root_mean_square(squares, epsilon) if norm == "rms" else _length(squares, epsilon)
    normalized = (rows / divisor).astype(inputs.dtype)
    if weight is not None:
        normalized = _multiply_by_weight(normalized, weight)
    return _split_heads(normalized, inputs.shape[1]) if is_full else normalized


def _squares(rows: Array) -> Array:
    """Square 16-bit numbers in float32: in float16, the square of 256 is infinite."""
    wide = rows if rows.dtype.itemsize > 2 else rows.astype(np.float32)
    return wide * wide


def _root_mean_square(squares: Array, epsilon: float) -> Array:
    root: Array = np.sqrt(squares.mean(axis=-1, keepdims=True) + epsilon)
    return root


def _length(squares: Array, epsilon: float) -> Array:
    length: Array = np.maximum(np.sqrt(squares.sum(axis=-1, keepdims=True)), epsilon)
    return length


def _multiply_by_weight(normalized: Array, weight: Array) -> Array:
    weighted: Array = normalized * weight
    return weighted


def _project_latents(latent: Array, projection: Array) -> Array:
    """Project latent vectors to those of every head: (B, L, C), (H, C, W) -> (B, H, L, W)."""
    projected: Array = latent[:, np.newaxis] @ projection
    return projected


def _append_rotary(vectors: Array, rotary: Array) -> Array:
    """Append the rotated part to each vector; a part that all heads share is appended in each head."""
    return np.concatenate([vectors, np.broadcast_to(rotary, (*vectors.shape[:-1], rotary.shape[-1]))], axis=-1)


def _rotate(inputs: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """Rotate pairs of elements of (B, H, L, D) by the first L rows of cos and sin, (L, R) or (B, 1, L, R)."""
    length, pairs = inputs.shape[-2], cos.shape[-1]
    cos, sin = cos[..., :length, :], sin[..., :length, :]
    rotated, rest = inputs[..., : 2 * pairs], inputs[..., 2 * pairs :]
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
        turned = np.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(rotated.shape)
    else:
        first, second = rotated[..., :pairs], rotated[..., pairs:]
        turned = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return np.concatenate([turned, rest], axis=-1)


def _rows_at(table: Array, offsets: Array, length: int) -> Array:
    """Return the rows of each batch entry, beginning at its offset: (Lr, R), (B,) -> (B, 1, L, R)."""
    rows: Array = table[offsets[:, np.newaxis] + np.arange(length)][:, np.newaxis]
    return rows


def _dot(query: Array, key: Array) -> Array:
    """Multiply every query with every key: (B, H, Lq, D), (B, H, T, D) -> (B, H, Lq, T)."""
    products: Array = query @ np.swapaxes(key, -1, -2)
    return products


def _weighted_sum(weights: Array, rows: Array) -> Array:
    """Add up the rows of every key: (B, H, Lq, T), (B, H, T, W) -> (B, H, Lq, W)."""
    total: Array = weights @ rows
    return total


def _sum_over_queries(weights: Array, rows: Array) -> Array:
    """Add up the rows of every query: (B, H, Lq, T), (B, H, Lq, W) -> (B, H, T, W)."""
    total: Array = np.swapaxes(weights, -1, -2) @ rows
    return total


def _scale_of(query: Array, scale: float | None) -> float:
    # math.sqrt gives a Python float; 1 / np.sqrt(D) would be a float64 scalar and turn float32 scores into float64.
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _scale_by_head(stages: Stages, head_scale: Array, softcap: float | None) -> Stages:
    """Multiply scores by the number of their head, then cap them."""
    scores = stages["scores"] * head_scale[:, np.newaxis, np.newaxis]
    return {**stages, "scores": scores, **({} if softcap is None else {"capped": _cap(scores, softcap)})}


def _cap(scores: Array, softcap: float) -> Array:
    capped: Array = softcap * np.tanh(scores / softcap)
    return capped


def _cap_slope(capped: Array, softcap: float) -> Array:
    slope: Array = 1 - (capped / softcap) ** 2  # the derivative of c tanh(s / c) is 1 - tanh(s / c)^2
    return slope


def _sigmoid(gate: Array) -> Array:
    """Return 1 / (1 + e^-x); no exponential overflows."""
    opened: Array = np.exp(np.minimum(gate, 0)) / (1 + np.exp(-np.abs(gate)))
    return opened


def _sigmoid_slope(opened: Array) -> Array:
    slope: Array = opened * (1 - opened)
    return slope


def _fill_empty_rows(scores: Array, sinks: Array | None, empty_rows: EmptyRows) -> Array:
    """Replace the scores of rows without a key so that softmax returns the requested weights."""
    if empty_rows == "zero":
        return scores
    empty = (scores == -np.inf).all(axis=-1, keepdims=True)
    if sinks is not None:
        empty = empty & (sinks == -np.inf)[:, np.newaxis, np.newaxis]
    # Equal scores have equal weights, and NaN spreads to all of them.
    return np.where(empty, 0.0 if empty_rows == "uniform" else np.nan, scores)


def _row_maximum(scores: Array) -> Array:
    return np.asarray(scores.max(axis=-1, keepdims=True, initial=-np.inf))


def _row_sum(terms: Array) -> Array:
    return np.asarray(terms.sum(axis=-1, keepdims=True))


def _softmax_gradient(weights: Array, grad_weights: Array, mean: Array) -> Array:
    """Multiply with the Jacobian of a softmax, diag(p) - p p^T. It is 0 if the weight is, such as at a masked key."""
    gradient: Array = weights * (grad_weights - mean)
    return gradient


def _repeat_heads(key: Array, value: Array, heads: int) -> tuple[Array, Array]:
    """Give every query head its key and value head: head h gets h // (H / Hkv)."""
    kv_heads = key.shape[1]
    if kv_heads == heads:
        return key, value
    return np.repeat(key, heads // kv_heads, axis=1), np.repeat(value, heads // kv_heads, axis=1)


def _sum_heads(gradient: Array, kv_heads: int) -> Array:
    """Add up what the query heads of a group contribute to the head that they share."""
    batch, heads, length, width = gradient.shape
    grouped = gradient.reshape(batch, kv_heads, heads // kv_heads, length, width)
    summed: Array = grouped.sum(axis=2)
    return summed


def _sum_broadcast(gradient: Array, bias: Array) -> Array:
    """Add up along the axes of length 1: one number of the bias was added in every place along them."""
    axes = tuple(axis for axis, length in enumerate(bias.shape) if length == 1)
    summed: Array = gradient.sum(axis=axes, keepdims=True)
    return summed


def _project(inputs: Array, weight: Array, bias: Array | None) -> Array:
    projected: Array = inputs @ weight
    return projected if bias is None else projected + bias


def _split_heads(inputs: Array, heads: int) -> Array:
    batch, length, width = inputs.shape
    return inputs.reshape(batch, length, heads, width // heads).swapaxes(1, 2)  # (B, L, H*D) -> (B, H, L, D)


def _merge_heads(context: Array) -> Array:
    batch, heads, length, width = context.shape
    return context.swapaxes(1, 2).reshape(batch, length, heads * width)  # (B, H, L, D) -> (B, L, H*D)


_services = SimpleNamespace(prepare=prepare, describe=describe, from_numpy=from_numpy, to_numpy=to_numpy)
ABSORBED = make_absorbed_backend(attention, np.concatenate, lambda a, b: a @ np.swapaxes(b, -1, -2), _services)
