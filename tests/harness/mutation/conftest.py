"""Small problems made by hand: each variant can be told from the reference by at least one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.backends import numpy_backend
from attncheck.backends.contract import Backend
from attncheck.execution.layout import apply_layout
from attncheck.execution.operations import run_operation
from attncheck.execution.worker import Task
from attncheck.reading.array_kinds import RelativeBuckets
from attncheck.reading.bias_kinds import Alibi
from attncheck.reading.dtypes import numpy_dtype
from attncheck.reading.mask_kinds import Chunked, Dilated, FirstTokens, ImageSpans, PrefixLM, Tree
from attncheck.reading.masks import make_blocks, make_mask
from attncheck.reading.position_biases import make_alibi, make_bucket_bias

Arrays = dict[str, NDArray[Any]]
Stages = dict[str, NDArray[Any]]


def _attention_inputs(rng: np.random.Generator, batch: int, heads: int, queries: int, keys: int) -> Arrays:
    return {
        "query": rng.normal(size=(batch, heads, queries, 9)),
        "key": rng.normal(size=(batch, heads, keys, 9)),
        "value": rng.normal(size=(batch, heads, keys, 11)),
    }


def _multi_head_inputs(rng: np.random.Generator) -> Arrays:
    """Two heads of width 3; every weight is square, so that transposing one is silent."""
    weights = {f"{name}_weight": rng.normal(size=(6, 6)) for name in ("query", "key", "value", "output")}
    biases = {f"{name}_bias": rng.normal(size=6) for name in ("query", "key", "value", "output")}
    models = {
        "query": rng.normal(size=(3, 4, 6)),
        "key": rng.normal(size=(3, 5, 6)),
        "value": rng.normal(size=(3, 5, 6)),
    }
    return models | weights | biases


def _problems() -> dict[str, Task]:
    rng = np.random.default_rng(20170612)
    square = _attention_inputs(rng, 3, 3, 6, 6)
    steep = _attention_inputs(rng, 1, 1, 70, 97)
    steep["query"], steep["key"] = np.ones((1, 1, 70, 9)), np.zeros((1, 1, 97, 9))
    steep["key"][..., 0] = 45 * np.arange(97)  # logits grow by 15 a key: no block may forget to rescale
    own_mask = rng.random((3, 1, 6, 6)) < 0.6
    own_mask[..., 0] = True
    padding = np.arange(6) < np.array([6, 3, 2])[:, np.newaxis, np.newaxis, np.newaxis]
    bias = rng.normal(size=(1, 3, 6, 6))
    rows = np.array([[3e4, 0, -1, 2], [0, 0, -30, 1], [-6e4, -6e4, -6e4, -6e4 - 4], [1000, 900, 1000, 0]])
    logits = rows[np.newaxis, np.newaxis]
    allowed = np.array([[False, True, True, True], [True] * 4, [True] * 4, [False] * 4])
    return {
        "plain": Task("attention", {}, _attention_inputs(rng, 2, 3, 4, 6)),
        "explicit scale": Task("attention", {"scale": 0.77}, _attention_inputs(rng, 2, 3, 4, 6)),
        "scale zero": Task("attention", {"scale": 0.0, "is_causal": True}, _attention_inputs(rng, 2, 3, 4, 6)),
        "negative scale": Task("attention", {"scale": -0.3, "is_causal": True}, _attention_inputs(rng, 2, 3, 4, 6)),
        "mask and bias": Task("attention", {}, square | {"mask": own_mask, "bias": bias}),
        "mask and causal": Task("attention", {"is_causal": True}, square | {"mask": own_mask}),
        "bias and causal": Task("attention", {"is_causal": True}, square | {"bias": bias}),
        "padding": Task("attention", {}, square | {"mask": padding}),
        "mask per head": Task(
            "masking", {}, {"scores": np.zeros((1, 3, 6, 6)), "mask": rng.random((1, 3, 6, 6)) < 0.5}
        ),
        "decoding": Task("masking", {"is_causal": True}, {"scores": rng.normal(size=(1, 1, 1, 5))}),
        "lifted by the bias": Task(
            "masking", {}, {"scores": logits, "mask": allowed, "bias": np.full((1, 1, 1, 4), 1e4)}
        ),
        "steep and long": Task("attention", {"is_causal": True}, steep),
        "steep and open": Task("attention", {}, steep),
        "long": Task("attention", {}, _attention_inputs(rng, 2, 1, 35, 37)),
        "large scores": Task("softmax", {}, {"scores": logits}),
        "large masked scores": Task(
            "attention",
            {"scale": 1.0},
            {"query": rows[np.newaxis, np.newaxis], "key": np.eye(4)[np.newaxis, np.newaxis]}
            | {"value": rng.normal(size=(1, 1, 4, 5)), "mask": allowed},
        ),
        "general": Task(
            "scoring",
            {"score": "general"},
            {**_pick(rng, 5, 6), "weight": rng.normal(size=(5, 5)), "score_bias": np.array([0.5, -1.0, 2.0])},
        ),
        "additive": Task("scoring", {"score": "additive"}, _additive(rng, 1.0)),
        "additive, saturated": Task("scoring", {"score": "additive"}, _additive(rng, 400.0)),
        "multi-head": Task("multi_head_attention", {"heads": 2}, _multi_head_inputs(rng)),
        **_by_score(),
    }


def _by_score() -> dict[str, Task]:
    """Attention by other scores, with square weights and values that have the keys' shape."""
    rng = np.random.default_rng(2015)
    operands = {**_pick(rng, 5, 6), "value": rng.normal(size=(2, 3, 6, 5))}
    network = {"query_weight": rng.normal(size=(5, 5)), "key_weight": rng.normal(size=(5, 5))}
    network |= {"score_vector": rng.normal(size=5), "score_bias": rng.normal(size=5)}
    mask = rng.random((2, 1, 4, 6)) < 0.7
    mask[..., 0] = True
    lengths = {"key_lengths": np.array([6, 3])}
    weight = {"weight": rng.normal(size=(5, 5)), "score_bias": np.array([0.5, -1.0, 2.0])}
    return {
        "additive attention": Task("additive_attention", {}, operands | network),
        "additive attention, masked": Task("additive_attention", {}, operands | network | {"mask": mask}),
        "additive attention, lengths": Task("additive_attention", {}, operands | network | lengths),
        "bilinear attention, lengths": Task("general_attention", {}, operands | weight | lengths),
        "cosine attention": Task("cosine_attention", {"scale": 3.0}, operands),
    }


def _pick(rng: np.random.Generator, width: int, keys: int) -> Arrays:
    return {"query": rng.normal(size=(2, 3, 4, width)), "key": rng.normal(size=(2, 3, keys, width))}


def _additive(rng: np.random.Generator, spread: float) -> Arrays:
    return {
        **_pick(rng, 5, 6),
        "query_weight": spread * rng.normal(size=(5, 7)),
        "key_weight": spread * rng.normal(size=(5, 7)),
        "score_vector": rng.normal(size=7),
        "score_bias": rng.normal(size=7),
    }


def _sequences() -> dict[str, Task]:
    """Packed sequences, some of them empty, and paged caches of small and large pages."""
    rng = np.random.default_rng(1603)
    operands = _attention_inputs(rng, 1, 3, 24, 41)
    limits = {"cu_seqlens_q": np.array([0, 6, 6, 15, 24]), "cu_seqlens_k": np.array([0, 9, 12, 33, 41])}
    none_empty = {"cu_seqlens_q": np.array([0, 6, 10, 15, 24]), "cu_seqlens_k": limits["cu_seqlens_k"]}
    packed = operands | limits
    used = {"key_lengths": np.array([8, 3, 21, 5])}
    sinks = {"sinks": np.array([1.5, -1.0, 0.5])}
    near = {"is_causal": True, "window": (3, None)}
    gradients = operands | none_empty | {"value": operands["key"], "grad_output": rng.normal(size=(1, 3, 24, 9))}
    pages = {
        "query": rng.normal(size=(2, 3, 4, 9)),
        "key_pages": rng.normal(size=(9, 5, 3, 9)),
        "value_pages": rng.normal(size=(9, 5, 3, 11)),
        "block_table": np.array([[7, 2, 5], [1, 8, 3]]),
        "key_lengths": np.array([14, 6]),
    }
    poisoned = pages | {name: pages[name].copy() for name in ("key_pages", "value_pages")}
    for name in ("key_pages", "value_pages"):
        poisoned[name][[0, 3, 4, 6]] = np.nan
    large = {
        **pages,
        "key_pages": rng.normal(size=(3, 150, 3, 9)),
        "value_pages": rng.normal(size=(3, 150, 3, 11)),
        "block_table": np.array([[2], [0]]),
        "key_lengths": np.array([140, 133]),
    }
    quantized = {
        "query": rng.normal(size=(2, 4, 5, 6)),
        "key": (30 * rng.normal(size=(2, 2, 9, 6))).astype(ml_dtypes.float8_e4m3fn),
        "value": (30 * rng.normal(size=(2, 2, 9, 6))).astype(ml_dtypes.float8_e4m3fn),
        "key_scale": rng.uniform(0.01, 0.05, (2, 2, 9)),
        "value_scale": rng.uniform(0.1, 0.9, (2, 2, 1)),
    }
    quantized["key"][..., 0] = np.asarray(0.005, ml_dtypes.float8_e4m3fn)  # below the least normal number
    quantized["key_scale"][..., 3] = 9
    plain = {
        "query": rng.normal(size=(2, 4, 5, 6)) * np.array([0.05, 1, 20, 3]).reshape(-1, 1, 1),
        "key": rng.normal(size=(2, 2, 9, 6)) * np.array([0.2, 5]).reshape(-1, 1, 1),
        "value": rng.normal(size=(2, 2, 9, 6)),
    }
    weights = {f"{name}_norm_weight": rng.uniform(0.2, 3, 6) for name in ("query", "key")}
    full = {"query_norm_weight": rng.uniform(0.2, 3, 24), "key_norm_weight": rng.uniform(0.2, 3, 12)}
    tables = {name: rng.uniform(-1, 1, (9, 2)) for name in ("rotary_cos", "rotary_sin")}
    unit_options = {"norm": "l2", "epsilon": 1.5, "scale": 4.0}
    small = {name: (array if name == "value" else 1e-3 * array) for name, array in plain.items()}
    large_rows = plain | {"query": 400 * np.sign(plain["query"])}
    latents = {
        "query": rng.normal(size=(2, 3, 5, 6)),
        "latent": rng.normal(size=(2, 37, 11)),
        "key_projection": rng.normal(size=(3, 11, 6)),
        "value_projection": rng.normal(size=(3, 11, 5)),
        "query_rotary": rng.normal(size=(2, 3, 5, 4)),
        "key_rotary": rng.normal(size=(2, 37, 4)),
    }
    square = {name: rng.normal(size=(3, 6, 6)) for name in ("key_projection", "value_projection")}
    square |= {"query": latents["query"], "latent": rng.normal(size=(2, 9, 6))}
    of_heads = {f"{name}_scale": rng.uniform(0.02, 0.2, (1, 2, 1)) for name in ("key", "value")}
    return {
        "8 bits": Task("quantized_attention", {}, quantized),
        "8 bits, heads": Task("quantized_attention", {"is_causal": True}, quantized | of_heads),
        "8 bits, lengths": Task("quantized_attention", {}, quantized | {"key_lengths": np.array([9, 4])}),
        "norms": Task("normalized_attention", {"scale": 0.5}, plain | weights),
        "norms, small": Task("normalized_attention", {}, small | weights),
        "norms, large": Task("normalized_attention", {}, large_rows),
        "norms, full": Task("normalized_attention", {"norm_over": "full"}, plain | full),
        "norms, lengths": Task("normalized_attention", unit_options, plain),
        "norms, rotated": Task("normalized_attention", {}, plain | weights | tables),
        "norms, rotated first": Task("normalized_attention", {"norm_after_rotation": True}, plain | weights | tables),
        "latents": Task("latent_attention", {}, latents),
        "latents, scaled": Task("latent_attention", {"scale": 0.3, "is_causal": True}, latents),
        "latents, square": Task("latent_attention", {"softcap": 2.0}, square),
        "packed": Task("packed_attention", {}, packed),
        "packed, used, sinks": Task("packed_attention", near, packed | used | sinks),
        "packed gradients": Task("packed_attention_gradients", {"is_causal": True}, gradients | used | sinks),
        "paged": Task("paged_attention", {}, pages),
        "paged, poisoned": Task("paged_attention", near, poisoned | sinks),
        "paged, large": Task("paged_attention", {}, large),
    }


def _with_options() -> dict[str, Task]:
    rng = np.random.default_rng(2024)
    square = _attention_inputs(rng, 3, 3, 6, 6)
    wide = _attention_inputs(rng, 2, 2, 4, 9)
    mask = rng.random((3, 1, 6, 6)) < 0.7
    bias = rng.normal(size=(3, 1, 6, 6))
    lengths = np.array([6, 0, 3])
    steep = square | {"query": 300 * square["query"]}
    long = _attention_inputs(rng, 1, 1, 70, 72)
    unit = _pick(rng, 5, 6)
    unit["query"] *= 0.1
    return {
        "capped": Task("attention", {"softcap": 1.3, "scale": 0.8}, square),
        "capped, biased, masked": Task("attention", {"softcap": 1.3}, square | {"bias": bias, "mask": mask}),
        "capped, masked": Task("attention", {"softcap": 1.3}, square | {"mask": mask}),
        "capped far below the scores": Task("attention", {"softcap": 0.5}, steep),
        "window before": Task("masking", {"window": (2, None)}, {"scores": np.zeros((1, 1, 5, 7))}),
        "window after": Task("masking", {"window": (None, 2)}, {"scores": np.zeros((1, 1, 5, 7))}),
        "window on both sides": Task("attention", {"window": (3, 1)}, wide),
        "window of one": Task("attention", {"window": (0, 0)}, wide),
        "window and causal": Task("attention", {"window": (1, 2), "is_causal": True}, square),
        "window and mask": Task("attention", {"window": (1, 2)}, square | {"mask": mask}),
        "window and lengths": Task("attention", {"window": (1, 2)}, square | {"key_lengths": lengths}),
        "long window": Task("attention", {"window": (5, 0)}, long),
        "lengths": Task("attention", {}, square | {"key_lengths": lengths}),
        "lengths and mask": Task("attention", {}, square | {"key_lengths": lengths, "mask": mask}),
        "lengths and causal": Task("attention", {"is_causal": True}, square | {"key_lengths": lengths}),
        "cosine": Task("scoring", {"score": "cosine", "scale": 3.0}, unit),
        "laid out": Task("attention", {}, wide, {"query": "strided", "key": "strided", "value": "strided"}),
        "transposed": Task("attention", {}, wide, {"query": "transposed", "key": "transposed"}),
        "broadcast": _broadcast(rng),
        **_with_past(rng),
        **_grouped(rng),
        **_gradients(rng),
        **_without_keys(rng),
        **_with_sinks(),
        **_rotated(),
        **_with_masks_of_models(rng),
        **_filled(),
    }


def _broadcast(rng: np.random.Generator) -> Task:
    arrays = _attention_inputs(rng, 2, 3, 4, 33)
    arrays["key"] = np.broadcast_to(arrays["key"][:, :1], arrays["key"].shape)
    return Task("attention", {}, arrays, {"key": "broadcast"})


def _with_past(rng: np.random.Generator) -> dict[str, Task]:
    def behind(past: int, queries: int) -> Arrays:
        arrays = _attention_inputs(rng, 2, 2, queries, queries)
        arrays["value"] = arrays["value"][..., :9]
        return arrays | {f"past_{name}": rng.normal(size=(2, 2, past, 9)) for name in ("key", "value")}

    causal = np.tri(3, 7, 4, dtype=bool)[np.newaxis, np.newaxis]
    last = np.array([7, 2])
    projected = {f"past_{name}": rng.normal(size=(3, 2, 4, 3)) for name in ("key", "value")}
    return {
        "past": Task("attention", {}, behind(21, 2)),
        "past and causal mask": Task("attention", {}, behind(4, 3) | {"mask": causal}),
        "past and padding": Task("attention", {}, behind(4, 3) | {"mask": np.arange(7)[np.newaxis] != [[[[1]]]]}),
        "past and window": Task("attention", {"window": (3, 1)}, behind(4, 3)),
        "past and lengths": Task("attention", {}, behind(4, 3) | {"key_lengths": last}),
        "past, projected": Task("multi_head_attention", {"heads": 2}, _multi_head_inputs(rng) | projected),
        "past and bias": Task("attention", {}, behind(4, 3) | {"bias": rng.normal(size=(1, 2, 3, 7))}),
    }


def _grouped(rng: np.random.Generator, heads: int = 6) -> dict[str, Task]:
    def groups(kv_heads: int) -> Arrays:
        arrays = _attention_inputs(rng, 2, kv_heads, 4, 5)
        return arrays | {"query": rng.normal(size=(2, heads, 4, 9))}

    own = {"mask": rng.random((2, 1, 4, 5)) < 0.6, "bias": rng.normal(size=(2, 1, 4, 5))}
    projected = {"query": (6, 12), "key": (6, 4), "value": (6, 4), "output": (12, 5)}
    weights = {f"{name}_weight": rng.normal(size=shape) for name, shape in projected.items()}
    models = {name: rng.normal(size=(2, 4, 6)) for name in ("query", "key", "value")}
    return {
        "three groups": Task("attention", {}, groups(3)),
        "two groups": Task("attention", {}, groups(2) | own),
        "projected groups": Task("multi_head_attention", {"heads": 6, "kv_heads": 2}, models | weights),
    }


def _gradients(rng: np.random.Generator) -> dict[str, Task]:
    def inputs(batch: int, heads: int, kv_heads: int, queries: int, keys: int) -> Arrays:
        return {
            "query": rng.normal(size=(batch, heads, queries, 9)),
            "key": rng.normal(size=(batch, kv_heads, keys, 9)),
            "value": rng.normal(size=(batch, kv_heads, keys, 7)),
            "grad_output": rng.normal(size=(batch, heads, queries, 7)),
        }

    def task(arrays: Arrays, **options: Any) -> Task:
        return Task("attention_gradients", options, arrays)

    square = inputs(3, 3, 3, 6, 6)
    mask = rng.random((3, 1, 6, 6)) < 0.6
    mask[0, 0, 0] = False
    return {
        "gradients": task(inputs(2, 3, 3, 4, 5)),
        "gradients, scaled": task(square, scale=0.77),
        "gradients, masked": task(square | {"mask": mask}),
        "gradients, causal": task(square, is_causal=True),
        "gradients, window": task(square, window=(1, 1)),
        "gradients, lengths": task(square | {"key_lengths": np.array([6, 2, 3])}),
        "gradients, bias per head": task(square | {"bias": rng.normal(size=(1, 3, 6, 6))}),
        "gradients, bias per key": task(square | {"bias": rng.normal(size=(1, 1, 1, 6))}, scale=0.3),
        "gradients, capped": task(square | {"bias": rng.normal(size=(1, 3, 1, 6))}, softcap=1.1),
        "gradients, grouped": task(inputs(2, 6, 2, 4, 5)),
        "gradients, as many keys as heads": task(inputs(2, 3, 3, 4, 3)),
        "gradients, long": task(inputs(1, 1, 1, 70, 20)),
        "gradients, one tile": task(inputs(1, 1, 1, 32, 20)),
    }


def _without_keys(rng: np.random.Generator) -> dict[str, Task]:
    """Queries that may attend to no key, by the conventions that have to be asked for."""
    square = _attention_inputs(rng, 3, 3, 6, 6)
    lengths = square | {"key_lengths": np.array([6, 0, 3]), "mask": np.arange(6)[:, np.newaxis] != [[[[4]]]]}
    learned = {"grad_output": rng.normal(size=(3, 3, 6, 9)), "value": square["value"][..., :9]}
    scores = np.where(np.arange(4)[:, np.newaxis] == 2, -np.inf, rng.normal(size=(2, 1, 4, 5)))
    projected = _multi_head_inputs(rng) | {"mask": np.arange(4)[:, np.newaxis] != [[[[1]]]]}
    return {
        f"{convention}, {name}": Task(operation, {**options, "empty_rows": convention}, inputs)
        for convention in ("uniform", "nan")
        for name, operation, options, inputs in (
            ("softmax", "softmax", {}, {"scores": scores}),
            ("lengths and a mask", "attention", {}, lengths),
            ("gradients", "attention_gradients", {"scale": 0.5}, lengths | learned),
            ("heads", "multi_head_attention", {"heads": 2}, projected),
        )
    }


def _rotated() -> dict[str, Task]:
    rng = np.random.default_rng(20210420)
    inputs = _attention_inputs(rng, 2, 2, 4, 6) | {"query": rng.normal(size=(2, 4, 4, 9))}
    inputs |= {name: rng.normal(size=(12, 3)) for name in ("rotary_cos", "rotary_sin")}
    learned = {"grad_output": rng.normal(size=(2, 4, 4, 7)), "value": inputs["value"][..., :7]}
    past = {
        "past_key": rng.normal(size=(2, 2, 3, 9)),
        "past_value": rng.normal(size=(2, 2, 3, inputs["value"].shape[-1])),
    }
    neighbours = {"rotary_interleaved": True}
    offsets = {"query_offsets": np.array([1, 4])}
    return {
        "rotary, offsets": Task("attention", {"is_causal": True}, inputs | offsets),
        "rotary, offsets, past": Task("attention", {"window": (4, 0)}, inputs | past | offsets),
        "offsets and window": Task(
            "masking",
            {"window": (2, 1)},
            {"scores": rng.normal(size=(3, 1, 4, 9)), "query_offsets": np.array([3, 0, 5])},
        ),
        "rotary": Task("attention", {"is_causal": True}, inputs),
        "rotary, neighbours": Task("attention", neighbours, inputs),
        "rotary, past": Task("attention", {}, inputs | past),
        "rotary, gradients": Task("attention_gradients", neighbours, inputs | learned),
    }


def _filled() -> dict[str, Task]:
    rng = np.random.default_rng(982)
    inputs = _attention_inputs(rng, 2, 2, 5, 7) | {"bias": rng.normal(size=(2, 2, 5, 7))}
    inputs["mask"] = rng.random((2, 1, 5, 7)) < 0.6
    inputs["mask"][:, :, -1] = False
    learned = inputs | {"grad_output": rng.normal(size=(2, 2, 5, 3)), "value": inputs["value"][..., :3]}
    options = {"mask_fill": -2.0, "is_causal": True, "softcap": 1.5, "scale": 0.5}
    scores = {"scores": rng.normal(size=(2, 2, 5, 7)), "mask": inputs["mask"]}
    return {
        "fill": Task("attention", options, inputs),
        "fill, gradients": Task("attention_gradients", options, learned),
        "fill, masks": Task("masking", {"mask_fill": -4.0}, scores),
        "fill, projections": Task("multi_head_attention", {"mask_fill": -2.0, "heads": 2}, _projected(rng)),
    }


def _projected(rng: np.random.Generator) -> dict[str, np.ndarray]:
    inputs = {
        "query": rng.normal(size=(2, 5, 6)),
        "key": rng.normal(size=(2, 7, 6)),
        "value": rng.normal(size=(2, 7, 6)),
    }
    weights = {f"{name}_weight": rng.normal(size=(6, 8)) for name in ("query", "key", "value")}
    return {**inputs, **weights, "mask": rng.random((2, 1, 5, 7)) < 0.6}


def _with_masks_of_models(rng: np.random.Generator) -> dict[str, Task]:
    def masked(queries: int, keys: int, **mask: Any) -> Task:
        made = make_mask(Tree(**mask) if "tree" in mask else _PATTERNS[next(iter(mask))](**mask, shape=[queries, keys]))
        arrays = _attention_inputs(rng, 2, 2, queries, keys)
        return Task("attention", {}, arrays | {"mask": made.reshape((1,) * (4 - made.ndim) + made.shape)})

    def biased(bias: np.ndarray, queries: int, keys: int, **past: np.ndarray) -> Task:
        heads = bias.shape[1]
        return Task("attention", {}, _attention_inputs(rng, 1, heads, queries, keys) | {"bias": bias} | past)

    table = rng.random((2, 2, 3, 3)) < 0.5
    blocks = make_blocks(table, [4, 4], [12, 12])
    of_64 = make_blocks(np.array([[1, 1, 0], [0, 1, 1], [1, 0, 1]], bool), [64, 64], [139, 139])
    images = make_mask(ImageSpans(image_spans=[[50, 131]], shape=[139, 139]))
    chunked = {f"past_{name}": rng.normal(size=(2, 2, 6, 9)) for name in ("key", "value")}
    of_buckets = RelativeBuckets(relative_buckets="table", max_distance=128, bidirectional=True, shape=[24, 24])
    of_past = make_alibi(Alibi(alibi=12, shape=[3, 9], offset=6))[np.newaxis]
    past = {f"past_{name}": rng.normal(size=(1, 12, 6, width)) for name, width in (("key", 9), ("value", 11))}
    behind = make_mask(Chunked(chunked=4, shape=[3, 9], offset=6))
    return {
        "masks: prefix": masked(8, 8, prefix_lm=[3, 5]),
        "masks: images": masked(10, 10, image_spans=[[1, 4], [5, 9]]),
        "masks: chunks": masked(9, 9, chunked=4),
        "masks: first tokens": masked(9, 9, first_tokens=1, left=2),
        "masks: dilated": masked(9, 9, dilated=2, window=[2, 0]),
        "masks: tree": masked(6, 9, tree=[None, 0, 0, 1, 2, 1], committed=3),
        "masks: blocks": Task("attention", {}, _attention_inputs(rng, 2, 2, 12, 12) | {"mask": blocks}),
        "masks: tiles": Task("attention", {}, _attention_inputs(rng, 1, 1, 139, 139) | {"mask": of_64[None, None]}),
        "masks: long": Task("attention", {}, _attention_inputs(rng, 1, 1, 139, 139) | {"mask": images[None, None]}),
        "masks: past": Task(
            "attention",
            {},
            {name: array[..., :9] for name, array in _attention_inputs(rng, 2, 2, 3, 3).items()}
            | {"mask": behind[None, None]}
            | chunked,
        ),
        "biases: alibi": biased(make_alibi(Alibi(alibi=12, shape=[9, 9]))[np.newaxis], 9, 9),
        "biases: alibi, past": biased(of_past, 3, 3, **past),
        "biases: buckets": biased(make_bucket_bias(of_buckets, rng.normal(size=(32, 4)))[np.newaxis], 24, 24),
    }


_PATTERNS = {
    "prefix_lm": PrefixLM,
    "image_spans": ImageSpans,
    "chunked": Chunked,
    "first_tokens": FirstTokens,
    "dilated": Dilated,
}


def _with_sinks() -> dict[str, Task]:
    rng = np.random.default_rng(20250805)
    grouped = _attention_inputs(rng, 2, 2, 4, 6) | {"query": rng.normal(size=(2, 4, 4, 9)), "sinks": rng.normal(size=4)}
    mask = rng.random((2, 1, 4, 6)) < 0.6
    mask[0, 0, 1] = False
    some = grouped | {"sinks": np.array([0.5, -np.inf, 3, -np.inf]), "mask": mask}
    learned = {"grad_output": rng.normal(size=(2, 4, 4, 7)), "value": grouped["value"][..., :7]}
    long = _attention_inputs(rng, 1, 1, 3, 40) | {"sinks": np.array([2.0])}
    capped = {"softcap": 1.2, "scale": 0.7}
    return {
        "sinks": Task("attention", {"scale": 0.7}, grouped),
        "sinks, long": Task("attention", {}, long),
        "sinks, masked": Task("attention", {}, some),
        "sinks, uniform": Task("attention", {"empty_rows": "uniform"}, some),
        "sinks, capped and biased": Task("attention", capped, grouped | {"bias": rng.normal(size=(1, 4, 1, 6))}),
        "sinks, gradients": Task("attention_gradients", capped, grouped | learned),
        "sinks, gradients, masked": Task("attention_gradients", {}, some | learned),
    }


def _merged() -> dict[str, Task]:
    rng = np.random.default_rng(20240208)

    def parts(count: int, at: float, *, poison: float = np.nan) -> Arrays:
        outputs, totals = rng.normal(size=(count, 2, 3, 4, 7)), at + 2 * rng.normal(size=(count, 2, 3, 4))
        totals[1, 0, :, 1], totals[:, 0, :, 2] = -np.inf, -np.inf  # a part of some queries, all parts of others
        outputs[1, 0, :, 1], outputs[0, 0, 1, 2] = poison, 3.0
        return {"outputs": outputs, "log_sum_exps": totals}

    return {
        "parts": Task("merge_states", {}, parts(4, 0)),
        "parts in base two": Task("merge_states", {"lse_base": "2"}, parts(3, 5)),
        "many parts": Task("merge_states", {}, parts(35, 0)),
        "low parts": Task("merge_states", {}, parts(3, -800, poison=1.0)),
        "high parts": Task("merge_states", {"lse_base": "2"}, parts(2, 2000)),
    }


@pytest.fixture(scope="session")
def problems() -> dict[str, Task]:
    return _problems() | _sequences() | _with_options() | _merged()


@pytest.fixture(scope="session")
def solve() -> Callable[[Backend, Task, str], Stages]:
    """Run a problem in a dtype; the reference's answers are remembered."""
    known: dict[tuple[int, str], Stages] = {}

    def run(backend: Backend, task: Task, dtype: str) -> Stages:
        if backend is not numpy_backend:
            return _run(backend, task, dtype)
        if (id(task), dtype) not in known:
            known[id(task), dtype] = _run(backend, task, dtype)
        return known[id(task), dtype]

    return run


def _run(backend: Backend, task: Task, dtype: str) -> Stages:
    stored = numpy_dtype(dtype)
    with np.errstate(all="ignore"):
        inputs = task.inputs.items()
        arrays = {name: array.astype(stored) if array.dtype.kind == "f" else array for name, array in inputs}
        return dict(run_operation(backend, task.operation, apply_layout(arrays, task.memory_layout), task.options))
