"""Faults of offsets of queries: positions of a batch entry's own, in causality, in windows and in rotations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from attncheck.backends.numpy_backend import _rotate
from attncheck.mutation.arithmetic import Array
from attncheck.mutation.forward_forms import in_attention
from attncheck.mutation.mask_forms import Masks, allowed_keys, both, masks_read_as
from attncheck.mutation.mutant import mutant
from attncheck.mutation.variant import Call, Steps

_faulty_offsets = partial(mutant, "query offsets", at="masked")


def _offsets_read_as(change: Callable[[Array], Array | None]) -> Steps:
    """Take the offsets for others where they say who may attend to whom; rotations have the right ones."""

    def changed(scores: Array, masks: Masks) -> Masks:
        offsets = masks["query_offsets"]
        return {} if offsets is None else {"query_offsets": change(offsets)}

    return masks_read_as(changed)


@_faulty_offsets(masks_read_as, defect="the near end of the window counts in the block of queries: lalamo#200's kind")
def query_offsets_reach_the_far_side_of_the_window_alone(scores: Array, masks: Masks) -> Masks:
    """Move the left end of the window by the offset, and leave its right end and causality where they are."""
    left, right = masks["window"] or (None, None)
    if masks["query_offsets"] is None or right is None:
        return {}
    far = allowed_keys(scores, {"window": (left, None), "query_offsets": masks["query_offsets"]})
    near = allowed_keys(scores, {"window": (None, right)})
    return {"window": None, "mask": both(masks["mask"], far & near)}


@mutant(
    "rotary",
    in_attention,
    at="rotated_query",
    defect="one position of the rotation for the whole batch: reasoning-from-scratch#33",
    diagnosis="rotary-without-offsets",
)
def query_offsets_do_not_reach_the_rotation(call: Call) -> Steps:
    """Rotate queries by their place behind the past; keys have the rows that they should."""
    if call.query_offsets is None or call.rotary_cos is None:
        return {}

    def rotate(inputs: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
        if cos.ndim > 2:  # the rows of each batch entry
            cos, sin = call.rotary_cos[call.past :], call.rotary_sin[call.past :]
        return _rotate(inputs, cos, sin, interleaved)

    return {"_rotate": rotate}


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
_faulty_offsets(_offsets_read_as, "query_offsets_of_the_first_batch_entry",
    "the position of the first sequence for all of them: candle-vllm#140, reasoning-from-scratch#33",
    lambda offsets: np.broadcast_to(offsets[:1], offsets.shape), diagnosis="query-offsets-of-first-batch-entry")
_faulty_offsets(_offsets_read_as, "query_offsets_ignored",
    "causality counts from the first key whatever the cache: onnx#8054",
    lambda offsets: None, diagnosis=("query-offsets-ignored", "aligned-top-left"))
_faulty_offsets(_offsets_read_as, "query_offsets_one_too_far", "positions start at 1: mlx-lm#390's kind",
    lambda offsets: np.asarray(offsets + 1), diagnosis="query-offsets-one-too-far")
_faulty_offsets(_offsets_read_as, "query_offsets_of_the_longest_batch_entry",
    "the longest sequence's position for all: left padding is assumed",
    lambda offsets: np.full_like(offsets, offsets.max(initial=0)), diagnosis="query-offsets-of-longest")
_faulty_offsets(_offsets_read_as, "query_offsets_of_the_next_batch_entry", "batch index off by one",
    lambda offsets: np.roll(offsets, -1), diagnosis="query-offsets-of-next-batch-entry")
mutant("rotary", in_attention, "query_offset_of_the_first_batch_entry_in_the_rotation",
    "positions of a batch are those of its first sequence: reasoning-from-scratch#33",
    lambda call: {} if call.query_offsets is None or call.rotary_cos is None else {"_rotate": lambda inputs, cos, sin,
        interleaved: _rotate(inputs, *((cos[:1], sin[:1]) if cos.ndim > 2 else (cos, sin)), interleaved)},
    at="rotated_query", diagnosis="rotary-of-first-batch-entry")
