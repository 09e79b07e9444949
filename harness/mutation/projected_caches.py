"""Faults of caches in front of projections: what a cache holds is projected, split and rotated already."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from attncheck.backends.contract import Stages
from attncheck.backends.numpy_backend import _project, _rotate, _split_heads, attention, multi_head_attention
from attncheck.mutation.arithmetic import Array
from attncheck.mutation.mutant import mutant
from attncheck.mutation.variant import Steps

_faulty_caches = partial(mutant, "projected caches", at="raw_scores")


def _past_read_as(change: Callable[[str, Array, dict[str, Any]], Array]) -> Steps:
    """Take the past for another one: ``change(name, past, given)`` for key and value."""

    def attend(*arrays: Array, **given: Any) -> Stages:
        if given.get("past_key") is not None:
            given |= {f"past_{name}": change(name, given[f"past_{name}"], given) for name in ("key", "value")}
        return multi_head_attention(*arrays, **given)

    return {"multi_head_attention": attend}


@_faulty_caches(_past_read_as, defect="the whole sequence goes through the projection, silent where H D = E")
def past_projected_again(name: str, past: Array, given: dict[str, Any]) -> Array:
    batch, heads, length, width = past.shape
    weight = given[f"{name}_weight"]
    if weight.shape[0] != heads * width:
        return past
    merged = past.swapaxes(1, 2).reshape(batch, length, heads * width)
    return _split_heads(_project(merged, weight, None), heads)


@_faulty_caches(_past_read_as, defect="the bias is added behind the cache, so that it counts once more in every step")
def past_biased_again(name: str, past: Array, given: dict[str, Any]) -> Array:
    bias = given.get(f"{name}_bias")
    return past if bias is None else np.asarray(past + bias.reshape(past.shape[1], 1, -1))


def _attention_with_past_rotated(*arrays: Array, **given: Any) -> Stages:
    cos, past = given.get("rotary_cos"), given.get("past_key")
    if cos is not None and past is not None:
        given["past_key"] = _rotate(past, cos, given["rotary_sin"], given.get("rotary_interleaved", False))
    return attention(*arrays, **given)


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
_faulty_caches(_past_read_as, "past_heads_taken_for_positions",
    "a cache of (B, H, L, D) viewed as (B, L, H, D): FuxiCTR#30's kind",
    lambda name, past, given: past.reshape(past.shape[0], past.shape[2], past.shape[1], past.shape[3]).swapaxes(1, 2))
# Wrap the values around, and not the keys: of both together nothing would show without positions.
_faulty_caches(_past_read_as, "past_in_the_order_of_a_ring",
    "a ring buffer returned as it lies, newer keys first: moshi#241",
    lambda name, past, given: np.roll(past, 1, axis=-2) if name == "value" else past, at="context")
mutant("rotary", None, "rotary_applied_to_the_past_again",
    "keys are cached behind the rotation, and all of the cache is rotated in every step",
    {"attention": _attention_with_past_rotated}, at="rotated_key", diagnosis="rotary-of-past-again")
