"""Faults of attention to latent vectors: other scales, a rotated part that is lost, projections of another head."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from attncheck.backends import numpy_backend
from attncheck.backends.contract import Stages
from attncheck.backends.numpy_backend import _of_latents, attention, latent_attention
from attncheck.mutation.arithmetic import Array, bfloat16
from attncheck.mutation.mutant import ACCURACY_OF_16_BITS, WIDE, control, mutant
from attncheck.mutation.variant import Steps

_faulty_scale = partial(mutant, "latents", at="scores")
_faulty_key = partial(mutant, "latents", at="raw_scores")
_faulty_value = partial(mutant, "latents", at="output")
Given = dict[str, Any]
"""The arrays and options of a call, by name."""
_ARRAYS = ("query", "latent", "key_projection", "value_projection")


def _asked_for(change: Callable[[Given], Given]) -> Steps:
    """Attend to what becomes of a call: ``change`` gets all of it and returns what differs."""

    def attend(*arrays: Array, **given: Any) -> Stages:
        call = {**dict(zip(_ARRAYS, arrays, strict=False)), **given}
        return latent_attention(**{**call, **change(call)})

    return {"latent_attention": attend}


def _by(way: Callable[..., Stages]) -> Steps:
    """Attend in another way, which gets arrays and options by name."""

    def attend(*arrays: Array, **given: Any) -> Stages:
        return way(**{**dict(zip(_ARRAYS, arrays, strict=False)), **given})

    return {"latent_attention": attend}


def _width_of_rotary(call: Given) -> int:
    return 0 if call.get("key_rotary") is None else int(call["key_rotary"].shape[-1])


def _scaled_by(root_of: Callable[[Given], float]) -> Callable[[Given], Given]:
    """Take another scale where none is given."""
    return lambda call: {"scale": root_of(call)} if call.get("scale") is None else {}


def _is_rotated(call: Given) -> bool:
    return call.get("key_rotary") is not None


@_faulty_key(
    _asked_for,
    defect="k_pe is made of all heads of k: every head adds the query of the first",
    diagnosis="rotated-query-of-first-head",
)
def rotated_query_of_the_first_head(call: Given) -> Given:
    rotary = call.get("query_rotary")
    return {} if rotary is None else {"query_rotary": np.broadcast_to(rotary[:, :1], rotary.shape)}


def _square(weight: Array) -> bool:
    return bool(weight.shape[1] == weight.shape[2])


def _identities(weight: Array) -> Array:
    return np.broadcast_to(np.eye(weight.shape[1], dtype=weight.dtype), weight.shape)


def _viewed(weight: Array) -> Array:
    """View (C, H W) as (H, C, W) without a transposition."""
    heads, latent, width = weight.shape
    return weight.swapaxes(0, 1).reshape(latent, heads * width).reshape(heads, latent, width)


@_faulty_value(
    _by,
    defect="the mean of latent vectors is stored in bfloat16 before W_UV",
    dtypes=WIDE,
    diagnosis=ACCURACY_OF_16_BITS,
)
def mean_of_latents_in_bfloat16(**call: Any) -> Stages:
    stages = latent_attention(**call)
    mean = bfloat16(stages["weights"] @ call["latent"][:, np.newaxis])
    return stages | {"output": np.asarray(mean @ call["value_projection"])}


control(_by, why="the projections are absorbed: no key and no value is made", name="projections_absorbed")(
    numpy_backend.ABSORBED.latent_attention
)


@control("_of_latents", why="keys and values are made of three latent vectors at a time")
def made_in_chunks(latent: Array, projection: Array) -> Array:
    parts = [_of_latents(latent[:, start : start + 3], projection) for start in range(0, latent.shape[1], 3)]
    return np.concatenate(parts, axis=2) if parts else _of_latents(latent, projection)


@control("_of_latents", why="the terms of a projection are added up from the last to the first")
def made_from_the_last_term(latent: Array, projection: Array) -> Array:
    return _of_latents(np.ascontiguousarray(latent[..., ::-1]), np.ascontiguousarray(projection[:, ::-1]))


@control(_by, why="the part that is rotated stands in front", name="rotated_part_in_front")
def _in_front(query_rotary: Array | None = None, key_rotary: Array | None = None, **call: Any) -> Stages:
    if query_rotary is None or key_rotary is None:
        return latent_attention(**call)
    names = ("key_projection", "value_projection")
    key, value = (_of_latents(call["latent"], call[name]) for name in names)
    shared = np.broadcast_to(key_rotary[:, np.newaxis], (*key.shape[:-1], key_rotary.shape[-1]))
    query = np.concatenate([query_rotary, call["query"]], axis=-1)
    kept = {name: option for name, option in call.items() if name not in _ARRAYS}
    return attention(query, np.concatenate([shared, key], axis=-1), value, **kept)


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
_faulty_scale(_asked_for, "scale_without_the_rotated_part",
    "1/sqrt of the part that is not rotated: NVIDIA/Megatron-LM#1501's kind",
    _scaled_by(lambda call: 1 / math.sqrt(call["query"].shape[-1])), diagnosis="scale-inverse-root-of-Dn")
_faulty_scale(_asked_for, "scale_of_absorbed_queries", "1/sqrt of the width that absorbed queries have, 576 for 192",
    _scaled_by(lambda call: 1 / math.sqrt(call["latent"].shape[-1] + _width_of_rotary(call))),
    diagnosis="scale-inverse-root-of-C+Dr")
_faulty_scale(_asked_for, "scale_of_the_values_of_latents",
    "1/sqrt of the values' width, which is that of no query: NVIDIA/Megatron-LM#1501's kind",
    _scaled_by(lambda call: 1 / math.sqrt(call["value_projection"].shape[-1])), diagnosis="scale-inverse-root-of-Dv")
_faulty_scale(_asked_for, "scale_of_latents_reversed",
    "multiplied by sqrt(D + Dr) for divided by it: AI-Hypercomputer/maxtext#1370",
    _scaled_by(lambda call: math.sqrt(call["query"].shape[-1] + _width_of_rotary(call))),
    diagnosis="scale-root-of-width")
_faulty_scale(_asked_for, "scale_of_latents_not_handed_on",
    "the model's own scale is not handed on: huggingface/optimum-intel#1877",
    lambda call: {"scale": None}, diagnosis="scale-default")
_faulty_key(_asked_for, "rotated_part_left_out", "the scores lack the part that is rotated",
    lambda call: {"key_rotary": np.zeros_like(call["key_rotary"])} if _is_rotated(call) else {},
    diagnosis="rotated-part-ignored")
_faulty_key(_asked_for, "rotated_part_scaled_twice",
    "the rotated part is scaled before it is added, and with the rest again",
    lambda call: {} if not _is_rotated(call) else {"key_rotary":
        call["key_rotary"] * (1 / math.sqrt(call["query"].shape[-1] + _width_of_rotary(call))
        if call.get("scale") is None else call["scale"])}, diagnosis="rotated-part-scaled-twice")
_faulty_key(_asked_for, "rotated_part_of_the_token_before",
    "the cache of rotated parts is a token behind that of latent vectors",
    lambda call: {"key_rotary": np.roll(call["key_rotary"], 1, axis=1)} if _is_rotated(call) else {},
    diagnosis="rotated-part-one-position-late")
_faulty_key(_asked_for, "rotated_queries_of_other_positions",
    "q_pe is rotated by tables with the axis of heads for positions: tensorgi/TPA#4's kind",
    lambda call: {"query_rotary": call["query_rotary"][:, :, ::-1]} if _is_rotated(call) else {})
_faulty_key(_asked_for, "key_projection_transposed", "W_UK is kept (D, C) in a checkpoint, and absorbed as if (C, D)",
    lambda call: {"key_projection": call["key_projection"].swapaxes(1, 2)} if _square(call["key_projection"]) else {},
    diagnosis="key-projection-transposed")
_faulty_value(_asked_for, "value_projection_transposed", "W_UV is multiplied from the other side",
    lambda call: {"value_projection": call["value_projection"].swapaxes(1, 2)} if _square(call["value_projection"])
        else {},
    diagnosis="value-projection-transposed")
_faulty_key(_asked_for, "key_projection_of_the_next_head", "kv_b_proj is sharded one head off",
    lambda call: {"key_projection": np.roll(call["key_projection"], -1, axis=0)},
    diagnosis="key-projection-of-next-head")
_faulty_value(_asked_for, "value_projection_of_the_next_head", "kv_b_proj is sharded one head off, behind the mean",
    lambda call: {"value_projection": np.roll(call["value_projection"], -1, axis=0)},
    diagnosis="value-projection-of-next-head")
_faulty_value(_asked_for, "value_projection_of_the_first_head",
    "one matrix for all heads behind the mean: a product that spreads over the wrong axis",
    lambda call: {"value_projection": np.broadcast_to(call["value_projection"][:1], call["value_projection"].shape)},
    diagnosis="value-projection-of-first-head")
_faulty_key(_asked_for, "key_projection_viewed",
    "kv_b_proj is viewed as heads first: a reshape without a transposition",
    lambda call: {"key_projection": _viewed(call["key_projection"])}, diagnosis="key-projection-viewed")
_faulty_value(_asked_for, "value_projection_viewed", "kv_b_proj is viewed as heads first, for values alone",
    lambda call: {"value_projection": _viewed(call["value_projection"])}, diagnosis="value-projection-viewed")
_faulty_key(_asked_for, "latent_projections_swapped", "kv_b_proj is split with v before k_nope",
    lambda call: {"key_projection": call["value_projection"], "value_projection": call["key_projection"]}
        if call["key_projection"].shape == call["value_projection"].shape else {},
    diagnosis="latent-projections-swapped")
_faulty_value(_asked_for, "latents_taken_for_values",
    "the mean of latent vectors is returned as it is: W_UV is not absorbed anywhere",
    lambda call: {"value_projection": _identities(call["value_projection"])} if _square(call["value_projection"])
        else {},
    diagnosis="value-projection-ignored")
_faulty_key(_asked_for, "latents_taken_for_keys", "queries meet latent vectors without W_UK, which is as wide",
    lambda call: {"key_projection": _identities(call["key_projection"])} if _square(call["key_projection"]) else {},
    diagnosis="key-projection-ignored")
_faulty_key(_asked_for, "chunks_of_latents_from_the_start",
    "a long cache is made into keys in chunks, each from its start: vllm#26042's kind",
    lambda call: {"latent": np.concatenate([call["latent"][:, :32], call["latent"][:, :
        max(call["latent"].shape[1] - 32, 0)]], axis=1)})
_faulty_key(_asked_for, "latents_cached_in_bfloat16", "latent vectors are kept in bfloat16 beside float32",
    lambda call: {"latent": bfloat16(call["latent"])}, dtypes=WIDE, diagnosis=ACCURACY_OF_16_BITS)
