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
from attncheck.mutation.mask_forms import filled
from attncheck.mutation.mutant import ACCURACY_OF_16_BITS, WIDE, mutant
from attncheck.mutation.variant import Steps

_faulty_scale = partial(mutant, "scale", at="scores")
_faulty_scores = partial(mutant, "scores", at="raw_scores")


def _factor(change: Callable[[float], float]) -> Steps:
    """Change the factor, default or explicit."""
    return {"_scale_of": lambda query, scale: change(_scale_of(query, scale))}


def _default(default: Callable[[Array], float]) -> Steps:
    """Change the default alone."""
    return {"_scale_of": lambda query, scale: default(query) if scale is None else scale}


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
    scores_read_as, at="scores", defect="logits multiplied by logits: keras#20510", diagnosis="scores-squared"
)
def scores_squared(scores: Array) -> Array:
    squares: Array = scores * scores
    return squares


@_faulty_scores(
    "dot_scores._dot",
    at="raw_scores",
    defect="K Q^T for Q K^T, silent where Lq == Lk: diffusers#14341's kind",
    diagnosis="query-and-key-exchanged",
)
def scores_transposed_where_square(query: Array, key: Array) -> Array:
    product = _dot(query, key)
    return np.swapaxes(product, -1, -2) if product.shape[-1] == product.shape[-2] else product


_faulty_rotary = partial(mutant, "rotary", at="rotated_query")


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
_faulty_scale(_default, "scale_of_width_plus_one", "1/sqrt(d + 1) for 1/sqrt(d)",
    lambda query: 1 / math.sqrt(query.shape[-1] + 1), diagnosis="scale-fitted")
_faulty_scale(_factor, "scale_off_by_1e_6", "a constant printed with six digits",
    lambda scale: scale * (1 + 1e-06), dtypes=WIDE, diagnosis="scale-fitted")
_faulty_scale(_factor, "scale_off_by_1e_5", "a constant printed with five digits",
    lambda scale: scale * (1 + 1e-05), dtypes=WIDE, diagnosis="scale-fitted")
_faulty_scale(_default, "scale_missing", "sqrt(d) missing: mlc-llm#3426, cntkx#10, MONAI GenerativeModels#146",
    lambda query: 1.0, diagnosis="scale-one")
_faulty_scale(_factor, "scale_applied_twice", "scaled query and scaled scores: pytorch#174049 as reported",
    lambda scale: scale * scale, diagnosis="scale-twice")
_faulty_scale(_default, "scale_without_root", "1/d for 1/sqrt(d)",
    lambda query: 1 / int(query.shape[-1]), diagnosis="scale-inverse-width")
_faulty_scale(_default, "scale_of_model_width", "1/sqrt(H d), the model's width for the head's",
    lambda query: 1 / math.sqrt(query.shape[1] * query.shape[-1]), diagnosis="scale-inverse-root-of-HD")
_faulty_scale(_factor, "scale_in_bfloat16", "the factor is computed in the storage type: MONAI GenerativeModels#146",
    lambda scale: float(arithmetic.bfloat16(np.array(scale))), dtypes=WIDE, diagnosis="scale-fitted")
_faulty_scale(_factor, "scale_in_float32", "tf.cast(1/sqrt(d), float64) passes a Python float through float32",
    lambda scale: float(arithmetic.float32(np.array(scale))), dtypes=("float64",),
    diagnosis=("scale-fitted", "accuracy-of-float32"))
_faulty_scale("_scale_of", "explicit_scale_ignored", "the argument has no effect: tt-metal#33304, pytorch#151098",
    lambda query, scale: _scale_of(query, None), diagnosis="scale-default")
_faulty_scale("_scale_of", "explicit_scale_times_default", "the argument multiplies 1/sqrt(d) instead of replacing it",
    lambda query, scale: _scale_of(query, None) * (1.0 if scale is None else scale), diagnosis="scale-times-default")
_faulty_scale("_scale_of", "scale_zero_taken_for_absent", "`scale or default`: zero is falsy in Python",
    lambda query, scale: _scale_of(query, scale or None), diagnosis="scale-default")
_faulty_scale(_factor, "negative_scale_loses_its_sign", "sqrt(|scale|) on query and key, the sign forgotten",
    lambda scale: abs(scale), diagnosis="scale-negated")
_faulty_scale(in_attention, "scale_applied_after_mask",
    "-inf is scaled too: NaN at scale 0, inf at a negative one (onnx#7865's kind)",
    lambda call: filled(lambda biased, allowed, masks: np.where(allowed, biased,
        np.asarray(-np.inf * np.float64(call.factor), biased.dtype))),
    at="masked", diagnosis="fill-minus-infinity")
_faulty_scale("dot_scores._dot", "scores_scaled_in_float16",
    "the scale comes after a float16 product: metal-flash-attention#8",
    lambda query, key: arithmetic.float16(_dot(query, key)), at="raw_scores", dtypes=WIDE,
    diagnosis=ACCURACY_OF_16_BITS)
_faulty_scores("dot_scores._dot", "query_in_bfloat16", "the query is cast down on the way in: pytorch#158979's kind",
    lambda query, key: _dot(arithmetic.bfloat16(query), key), dtypes=WIDE, diagnosis=ACCURACY_OF_16_BITS)
_faulty_scores("dot_scores._dot", "key_in_float16", "a float16 key cache under a float32 query",
    lambda query, key: _dot(query, arithmetic.float16(key)), dtypes=WIDE, diagnosis=ACCURACY_OF_16_BITS)
_faulty_scores("dot_scores._dot", "query_and_key_in_tf32",
    "float32 matmul silently in TF32: pytorch#161022, mlx#3860, triton#3498",
    lambda query, key: _dot(arithmetic.tf32(query), arithmetic.tf32(key)), dtypes=WIDE, diagnosis=ACCURACY_OF_16_BITS)
_faulty_scores("dot_scores._dot", "scores_accumulated_in_float16",
    "float16 running sums: metal-flash-attention#8, ultralytics#24990",
    lambda query, key: arithmetic.sequential_matmul(query, np.swapaxes(key, -1, -2), store=arithmetic.float16),
    dtypes=WIDE, diagnosis=ACCURACY_OF_16_BITS)
_faulty_scores("dot_scores._dot", "last_feature_of_the_score_dropped", "the loop over the width ends one early",
    lambda query, key: _dot(query[..., :-1], key[..., :-1]), diagnosis="last-feature-dropped")
_faulty_scores("dot_scores._dot", "key_of_the_next_head",
    "head index off by one: HipKittens#22, FreeToken#177, pytorch#193893",
    lambda query, key: _dot(query, np.roll(key, -1, axis=1)), diagnosis="key-of-next-head")
_faulty_scores("dot_scores._dot", "key_of_the_first_batch_entry",
    "batch stride 0 read for the key: pytorch#191937's kind",
    lambda query, key: _dot(query, key[:1]), diagnosis="key-of-first-batch-entry")
_faulty_rotary("_rotate", "rotary_pairs_of_the_other_layout",
    "neighbours where the weights are of pairs half of the width apart: candle#3948",
    lambda inputs, cos, sin, interleaved: _rotate(inputs, cos, sin, not interleaved), diagnosis="rotary-pairs")
_faulty_rotary("_rotate", "rotary_ignored", "the embedding is configured and never applied",
    lambda inputs, cos, sin, interleaved: inputs, diagnosis="rotary-ignored")
_faulty_rotary("_rotate", "rotary_backwards", "the sign of rotate_half is lost",
    lambda inputs, cos, sin, interleaved: _rotate(inputs, cos, -sin, interleaved), diagnosis="rotary-backwards")
_faulty_rotary(in_attention, "rotary_positions_without_the_past",
    "the offset is no part of the key of a cache of angles: rotary-embedding-torch#11",
    lambda call: {"_rotate": lambda inputs, cos, sin, interleaved: _rotate(inputs, call.rotary_cos, call.rotary_sin,
        interleaved)},
    diagnosis=("rotary-without-past", "rotary-without-offsets"))
_faulty_rotary("_rotate", "rotary_sine_of_a_padded_width",
    "the sine is read from behind the next power of two: vllm-ascend#12723",
    lambda inputs, cos, sin, interleaved: _rotate(inputs, cos, sin
        if 1 << (sin.shape[-1] - 1).bit_length() == sin.shape[-1] else np.zeros_like(sin), interleaved))
_faulty_rotary("attention_gradients._rotate", "rotary_gradient_not_turned_back", "the way back leaves the rotation out",
    lambda inputs, cos, sin, interleaved: inputs, at="grad_query")
