"""Faults of rotary embeddings: what pairs are, which way they turn, where positions begin, and the way back."""

from __future__ import annotations

import numpy as np

from attncheck.backends.numpy_backend import _rotate
from attncheck.mutation.arithmetic import Array
from attncheck.mutation.forward_forms import in_attention
from attncheck.mutation.mutant import mutant
from attncheck.mutation.variant import Call, Steps


@mutant(
    "rotary",
    "_rotate",
    at="rotated_query",
    defect="neighbours where the weights are of pairs half of the width apart: candle#3948",
    diagnosis="rotary-pairs",
)
def rotary_pairs_of_the_other_layout(inputs: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    return _rotate(inputs, cos, sin, not interleaved)


@mutant(
    "rotary",
    "_rotate",
    at="rotated_query",
    defect="the embedding is configured and never applied",
    diagnosis="rotary-ignored",
)
def rotary_ignored(inputs: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    return inputs


@mutant("rotary", "_rotate", at="rotated_query", defect="the sign of rotate_half is lost", diagnosis="rotary-backwards")
def rotary_backwards(inputs: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    return _rotate(inputs, cos, -sin, interleaved)


@mutant(
    "rotary",
    in_attention,
    at="rotated_query",
    defect="the offset is no part of the key of a cache of angles: rotary-embedding-torch#11",
    diagnosis="rotary-without-past",
)
def rotary_positions_without_the_past(call: Call) -> Steps:
    def rotate(inputs: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
        return _rotate(inputs, call.rotary_cos, call.rotary_sin, interleaved)

    return {"_rotate": rotate}


@mutant(
    "rotary",
    "_rotate",
    at="rotated_query",
    defect="the sine is read from behind the next power of two: vllm-ascend#12723",
)
def rotary_sine_of_a_padded_width(inputs: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    pairs = sin.shape[-1]
    padded = 1 << (pairs - 1).bit_length()
    return _rotate(inputs, cos, sin if padded == pairs else np.zeros_like(sin), interleaved)


@mutant("rotary", "attention_gradients._rotate", at="grad_query", defect="the way back leaves the rotation out")
def rotary_gradient_not_turned_back(inputs: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    return inputs
