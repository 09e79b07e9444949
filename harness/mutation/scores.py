"""Faults of the scaled dot product: the product, the factor on the raw scores, and the rotation before it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from attncheck.backends.numpy_backend import _dot, _rotate, _scale_of
from attncheck.mutation import arithmetic
from attncheck.mutation.arithmetic import Array, Store
from attncheck.mutation.forward_forms import in_attention, scores_read_as
from attncheck.mutation.mask_forms import Masks, filled
from attncheck.mutation.mutant import ACCURACY_OF_16_BITS, WIDE, mutant
from attncheck.mutation.variant import Call, Steps

_faulty_scale = partial(mutant, "scale")
_faulty_scores = partial(mutant, "scores")


def _factor(change: Callable[[float], float]) -> Steps:
    """Change the factor, default or explicit."""
    return {"_scale_of": lambda query, scale: change(_scale_of(query, scale))}


def _default(default: Callable[[Array], float]) -> Steps:
    """Change the default alone."""
    return {"_scale_of": lambda query, scale: default(query) if scale is None else scale}


@_faulty_scale(_default, at="scores", defect="1/sqrt(d + 1) for 1/sqrt(d)", diagnosis="scale-fitted")
def scale_of_width_plus_one(query: Array) -> float:
    return 1 / math.sqrt(query.shape[-1] + 1)


@_faulty_scale(_factor, at="scores", defect="a constant printed with six digits", dtypes=WIDE, diagnosis="scale-fitted")
def scale_off_by_1e_6(scale: float) -> float:
    return scale * (1 + 1e-6)


@_faulty_scale(
    _factor, at="scores", defect="a constant printed with five digits", dtypes=WIDE, diagnosis="scale-fitted"
)
def scale_off_by_1e_5(scale: float) -> float:
    return scale * (1 + 1e-5)


@_faulty_scale(
    _default,
    at="scores",
    defect="sqrt(d) missing: mlc-llm#3426, cntkx#10, MONAI GenerativeModels#146",
    diagnosis="scale-one",
)
def scale_missing(query: Array) -> float:
    return 1.0


@_faulty_scale(
    _factor, at="scores", defect="scaled query and scaled scores: pytorch#174049 as reported", diagnosis="scale-twice"
)
def scale_applied_twice(scale: float) -> float:
    return scale * scale


@_faulty_scale(_default, at="scores", defect="1/d for 1/sqrt(d)", diagnosis="scale-inverse-width")
def scale_without_root(query: Array) -> float:
    return 1 / int(query.shape[-1])


@_faulty_scale(
    _default, at="scores", defect="1/sqrt(H d), the model's width for the head's", diagnosis="scale-inverse-root-of-HD"
)
def scale_of_model_width(query: Array) -> float:
    return 1 / math.sqrt(query.shape[1] * query.shape[-1])


@_faulty_scale(
    _factor,
    at="scores",
    defect="the factor is computed in the storage type: MONAI GenerativeModels#146",
    dtypes=WIDE,
    diagnosis="scale-fitted",
)
def scale_in_bfloat16(scale: float) -> float:
    return float(arithmetic.bfloat16(np.array(scale)))


@_faulty_scale(
    _factor,
    at="scores",
    defect="tf.cast(1/sqrt(d), float64) passes a Python float through float32",
    dtypes=("float64",),
    diagnosis=("scale-fitted", "accuracy-of-float32"),
)
def scale_in_float32(scale: float) -> float:
    return float(arithmetic.float32(np.array(scale)))


@_faulty_scale(
    "_scale_of",
    at="scores",
    defect="the argument has no effect: tt-metal#33304, pytorch#151098",
    diagnosis="scale-default",
)
def explicit_scale_ignored(query: Array, scale: float | None) -> float:
    return _scale_of(query, None)


@_faulty_scale(
    "_scale_of",
    at="scores",
    defect="the argument multiplies 1/sqrt(d) instead of replacing it",
    diagnosis="scale-times-default",
)
def explicit_scale_times_default(query: Array, scale: float | None) -> float:
    return _scale_of(query, None) * (1.0 if scale is None else scale)


@_faulty_scale(
    "_scale_of", at="scores", defect="`scale or default`: zero is falsy in Python", diagnosis="scale-default"
)
def scale_zero_taken_for_absent(query: Array, scale: float | None) -> float:
    return _scale_of(query, scale or None)


@_faulty_scale(
    _factor, at="scores", defect="sqrt(|scale|) on query and key, the sign forgotten", diagnosis="scale-negated"
)
def negative_scale_loses_its_sign(scale: float) -> float:
    return abs(scale)


@_faulty_scale(
    in_attention, at="masked", defect="-inf is scaled too: NaN at scale 0, inf at a negative one (onnx#7865's kind)"
)
def scale_applied_after_mask(call: Call) -> Steps:
    def fill(biased: Array, allowed: Array, masks: Masks) -> Array:
        forbidden = np.asarray(-np.inf * np.float64(call.factor), biased.dtype)
        return np.where(allowed, biased, forbidden)

    return filled(fill)


@_faulty_scale(
    "dot_scores._dot",
    at="raw_scores",
    defect="the scale comes after a float16 product: metal-flash-attention#8",
    dtypes=WIDE,
    diagnosis=ACCURACY_OF_16_BITS,
)
def scores_scaled_in_float16(query: Array, key: Array) -> Array:
    return arithmetic.float16(_dot(query, key))


@_faulty_scores(
    "dot_scores._dot",
    at="raw_scores",
    defect="the query is cast down on the way in: pytorch#158979's kind",
    dtypes=WIDE,
    diagnosis=ACCURACY_OF_16_BITS,
)
def query_in_bfloat16(query: Array, key: Array) -> Array:
    return _dot(arithmetic.bfloat16(query), key)


@_faulty_scores(
    "dot_scores._dot",
    at="raw_scores",
    defect="a float16 key cache under a float32 query",
    dtypes=WIDE,
    diagnosis=ACCURACY_OF_16_BITS,
)
def key_in_float16(query: Array, key: Array) -> Array:
    return _dot(query, arithmetic.float16(key))


@_faulty_scores(
    "dot_scores._dot",
    at="raw_scores",
    defect="float32 matmul silently in TF32: pytorch#161022, mlx#3860, triton#3498",
    dtypes=WIDE,
    diagnosis=ACCURACY_OF_16_BITS,
)
def query_and_key_in_tf32(query: Array, key: Array) -> Array:
    return _dot(arithmetic.tf32(query), arithmetic.tf32(key))


_STORED: tuple[tuple[str, str, Store], ...] = (
    ("bfloat16", "scores written to memory in bfloat16", arithmetic.bfloat16),
    ("float16", "scores written to memory in float16: kvpress#268, pytorch#60939", arithmetic.float16),
    ("tf32", "scores written to memory in TF32", arithmetic.tf32),
)
for _format, _defect, _store in _STORED:
    _faulty_scores(
        scores_read_as,
        at="scores",
        defect=_defect,
        dtypes=WIDE,
        diagnosis=ACCURACY_OF_16_BITS,
        name=f"scores_stored_in_{_format}",
    )(_store)


@_faulty_scores(
    "dot_scores._dot",
    at="raw_scores",
    defect="float16 running sums: metal-flash-attention#8, ultralytics#24990",
    dtypes=WIDE,
    diagnosis=ACCURACY_OF_16_BITS,
)
def scores_accumulated_in_float16(query: Array, key: Array) -> Array:
    return arithmetic.sequential_matmul(query, np.swapaxes(key, -1, -2), store=arithmetic.float16)


@_faulty_scores(
    scores_read_as, at="scores", defect="logits multiplied by logits: keras#20510", diagnosis="scores-squared"
)
def scores_squared(scores: Array) -> Array:
    squares: Array = scores * scores
    return squares


@_faulty_scores(
    "dot_scores._dot", at="raw_scores", defect="K Q^T for Q K^T, silent where Lq == Lk: diffusers#14341's kind"
)
def scores_transposed_where_square(query: Array, key: Array) -> Array:
    product = _dot(query, key)
    return np.swapaxes(product, -1, -2) if product.shape[-1] == product.shape[-2] else product


@_faulty_scores("dot_scores._dot", at="raw_scores", defect="the loop over the width ends one early")
def last_feature_of_the_score_dropped(query: Array, key: Array) -> Array:
    return _dot(query[..., :-1], key[..., :-1])


@_faulty_scores(
    "dot_scores._dot",
    at="raw_scores",
    defect="head index off by one: HipKittens#22, FreeToken#177, pytorch#193893",
    diagnosis="key-of-next-head",
)
def key_of_the_next_head(query: Array, key: Array) -> Array:
    return _dot(query, np.roll(key, -1, axis=1))


@_faulty_scores("dot_scores._dot", at="raw_scores", defect="batch stride 0 read for the key: pytorch#191937's kind")
def key_of_the_first_batch_entry(query: Array, key: Array) -> Array:
    return _dot(query, key[:1])


_faulty_rotary = partial(mutant, "rotary")


@_faulty_rotary(
    "_rotate",
    at="rotated_query",
    defect="neighbours where the weights are of pairs half of the width apart: candle#3948",
    diagnosis="rotary-pairs",
)
def rotary_pairs_of_the_other_layout(inputs: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    return _rotate(inputs, cos, sin, not interleaved)


@_faulty_rotary(
    "_rotate", at="rotated_query", defect="the embedding is configured and never applied", diagnosis="rotary-ignored"
)
def rotary_ignored(inputs: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    return inputs


@_faulty_rotary("_rotate", at="rotated_query", defect="the sign of rotate_half is lost", diagnosis="rotary-backwards")
def rotary_backwards(inputs: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    return _rotate(inputs, cos, -sin, interleaved)


@_faulty_rotary(
    in_attention,
    at="rotated_query",
    defect="the offset is no part of the key of a cache of angles: rotary-embedding-torch#11",
    diagnosis=("rotary-without-past", "rotary-without-offsets"),
)
def rotary_positions_without_the_past(call: Call) -> Steps:
    def rotate(inputs: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
        return _rotate(inputs, call.rotary_cos, call.rotary_sin, interleaved)

    return {"_rotate": rotate}


@_faulty_rotary(
    "_rotate", at="rotated_query", defect="the sine is read from behind the next power of two: vllm-ascend#12723"
)
def rotary_sine_of_a_padded_width(inputs: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    pairs = sin.shape[-1]
    padded = 1 << (pairs - 1).bit_length()
    return _rotate(inputs, cos, sin if padded == pairs else np.zeros_like(sin), interleaved)


@_faulty_rotary("attention_gradients._rotate", at="grad_query", defect="the way back leaves the rotation out")
def rotary_gradient_not_turned_back(inputs: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    return inputs
