"""Faults of scores: scale, product, precision, and the bilinear, the additive and the cosine score.

Those of attention by such a score go from the score network to the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from attncheck.backends import numpy_backend as backend
from attncheck.backends.contract import EmptyRows, Stages
from attncheck.mutation import forms, kernel
from attncheck.mutation.kernel import Array
from attncheck.mutation.mutant import ROUNDED, WIDE, Steps, mutant, numpy_with, within
from attncheck.reading.lowering import Problem
from attncheck.spec import BY_SCORE, LOGITS, STAGES

_faulty_scale = partial(mutant, "scale", at="scores")
_faulty_scores = partial(mutant, "scores", at="raw_scores")


def _factor(change: Callable[[float], float]) -> Steps:
    """Change the factor, default or explicit."""
    return {"_scale_of": lambda query, scale: change(backend._scale_of(query, scale))}


def _default(default: Callable[[Array], float]) -> Steps:
    """Change the default alone."""
    return {"_scale_of": lambda query, scale: default(query) if scale is None else scale}


_faulty_rotary = partial(mutant, "rotary", at="rotated_query")


def _by_default(problem: Problem) -> bool:
    """Return whether a problem leaves the scale to its default."""
    return problem.options.get("scale") is None and "head_scale" not in problem.inputs


_faulty_other_scores = partial(mutant, "other scores", at="scores")


def _of_parts(hidden: Callable[[Array, Array, Array | float], Array]) -> Steps:
    """Make the hidden layer in another way, by ``hidden(query_part, key_part, bias)``."""

    def score(
        query: Array, key: Array, query_weight: Array, key_weight: Array, score_vector: Array, *, score_bias: Any = None
    ) -> Stages:
        query_part = (query @ query_weight)[..., :, np.newaxis, :]  # (B, H, Lq, 1, A)
        key_part = (key @ key_weight)[..., np.newaxis, :, :]  # (B, H, 1, Lk, A)
        bias = np.zeros((), query_part.dtype) if score_bias is None else score_bias
        return {"scores": hidden(query_part, key_part, bias) @ score_vector}

    return {"additive_scores": score}


def _activation(tanh: Callable[[Array], Array]) -> Steps:
    """Use another hyperbolic tangent."""
    return {"additive_scores.np": numpy_with(tanh=tanh)}


@_faulty_other_scores("additive_scores", defect="v (tanh(q + k) + b) for v tanh(q + k + b)")
def additive_bias_after_tanh(
    query: Array, key: Array, query_weight: Array, key_weight: Array, score_vector: Array, *, score_bias: Any = None
) -> Stages:
    stages = backend.additive_scores(query, key, query_weight, key_weight, score_vector)
    return stages if score_bias is None else {"scores": stages["scores"] + score_bias @ score_vector}


def _lengths(norm: Callable[..., Array]) -> Steps:
    """Divide by other lengths than those of the vectors."""
    return {"cosine_scores.np": numpy_with(linalg=SimpleNamespace(norm=norm))}


def _lengths_read_as(change: Callable[[Array], Array]) -> Steps:
    """Change the length that vectors are divided by."""
    return _lengths(lambda vectors, **axes: change(np.asarray(np.linalg.norm(vectors, **axes))))


def _divided(is_divided: Callable[[str], bool]) -> Steps:
    """Divide only one of the two by their lengths: ``is_divided`` of its name, ``query`` or ``key``."""

    def score(query: Array, key: Array, *, scale: float | None = None) -> Stages:
        names = iter(("query", "key"))  # In the order in which the backend takes their lengths.

        def norm(vectors: Array, **axes: Any) -> Array:
            lengths = np.asarray(np.linalg.norm(vectors, **axes))
            return lengths if is_divided(next(names)) else np.ones_like(lengths)

        library = numpy_with(linalg=SimpleNamespace(norm=norm))
        as_they_are = within(backend.cosine_scores, np=library, _near_one=lambda vectors: vectors)
        stages: Stages = as_they_are(query, key, scale=scale)
        return stages

    return {"cosine_scores": score}


_faulty_by_score = partial(mutant, "attention by score", at="scores")


@_faulty_by_score(
    "_attend",
    at="masked",
    defect="structure: the score network is masked, and its scores are not: 0 has a weight",
    diagnosis="masked-at-zero",
)
def masked_scores_set_to_zero(stages: Stages, value: Array, masks: dict[str, Any], empty_rows: EmptyRows) -> Stages:
    """Multiply the scores by the mask: what is forbidden has the score 0, and the weight e^0."""
    right = backend.mask_scores(stages["scores"], **masks)
    if "masked" not in right:
        return backend._attend(stages, value, masks, empty_rows)
    before = right["biased"] if "biased" in right else stages["scores"]
    flat = np.where(np.isneginf(right["masked"]) & ~np.isneginf(before), np.zeros((), before.dtype), before)
    later = backend._attend({"scores": flat}, value, {}, empty_rows)
    return {**stages, **right, "masked": flat, **{name: later[name] for name in later if name not in LOGITS}}


def _on_padded_keys(name: str) -> Steps:
    """Set padded keys to 0 in front of the score, and forbid none: the layers' answer to 0 has a weight."""
    right = getattr(backend, name)

    def attention(query: Array, key: Array, *arrays: Array, key_lengths: Array | None = None, **given: Any) -> Stages:
        if key_lengths is None:
            return dict(right(query, key, *arrays, **given))
        is_used = np.arange(key.shape[-2]) < key_lengths[:, np.newaxis]
        zeroed = np.where(is_used[:, np.newaxis, :, np.newaxis], key, np.zeros((), key.dtype))
        stages = dict(right(query, zeroed, *arrays, **given))
        stages["masked"] = next(stages[stage] for stage in LOGITS[::-1] if stage in stages)
        return {name: stages[name] for name in sorted(stages, key=STAGES.index)}

    return {name: attention}


@_faulty_by_score("_attend", at="output", defect="structure: the context is made of scores, not of weights")
def values_averaged_by_scores(stages: Stages, value: Array, masks: dict[str, Any], empty_rows: EmptyRows) -> Stages:
    found = backend._attend(stages, value, masks, empty_rows)
    shares = np.where(found["weights"] == 0, np.zeros((), value.dtype), found["scores"])
    return found | {"output": np.asarray(shares @ value)}


@_faulty_by_score("_attend", at="weights", diagnosis="softmax-over-queries")
def attention_by_score_normalised_over_queries(
    stages: Stages, value: Array, masks: dict[str, Any], empty_rows: EmptyRows
) -> Stages:
    """the softmax runs over the queries: labml#146's kind"""
    found = backend._attend(stages, value, masks, empty_rows)
    logits = next(found[stage] for stage in LOGITS[::-1] if stage in found)
    turned = backend.softmax(np.swapaxes(logits, -1, -2), empty_rows=empty_rows)["weights"]
    weights = np.ascontiguousarray(np.swapaxes(turned, -1, -2))
    return found | {"weights": weights, "output": np.asarray(weights @ value)}


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
# Rows, laid out by hand: the reading that is computed, the defect in the wild, and a name and where, if not everywhere.
for _fault in forms.misread(
    ("scale", "scale-one", "sqrt(d) missing: mlc-llm#3426, cntkx#10, MONAI GenerativeModels#146", "scale_missing",
        _by_default),
    ("scale", "scale-twice", "scaled query and scaled scores: pytorch#174049 as reported"),
    ("scale", "scale-inverse-width", "1/d for 1/sqrt(d)", "scale_without_root", _by_default),
    ("scale", "scale-inverse-root-of-HD", "1/sqrt(H d), the model's width for the head's", "scale_of_model_width",
        _by_default),
    ("scale", "scale-times-default", "the argument multiplies 1/sqrt(d) instead of replacing it",
        "explicit_scale_times_default", lambda problem: problem.options.get("scale") is not None),
    ("scale", "scale-default", "`scale or default`: zero is falsy in Python", "scale_zero_taken_for_absent",
        lambda problem: problem.options.get("scale") == 0),
    ("scale", "scale-negated", "sqrt(|scale|) on query and key, the sign forgotten", "negative_scale_loses_its_sign",
        lambda problem: (problem.options.get("scale") or 0) < 0),
    ("rotary", "rotary-pairs", "neighbours where the weights are of pairs half of the width apart: candle#3948"),
    ("rotary", "rotary-ignored", "the embedding is configured and never applied"),
    ("other scores", "score-weight-transposed", "W^T for W, silent where W is square (Luong, general)"),
    ("other scores", "score-weight-ignored", "the dot score for the general one where W is square"),
    ("other scores", "score-bias-missing", "structure: the bias of the bilinear layer has no effect",
        "bilinear_bias_ignored", forms.of_operation("general_attention")),
    ("other scores", "score-bias-missing", "the hidden layer's bias has no effect", "additive_bias_ignored",
        forms.of_operation("additive_attention")),
    ("other scores", "score-bias-negated", "structure: the bias is subtracted, as one of the other side"),
    ("other scores", "score-bias-of-first-head", "structure: the bias of the first head serves all"),
    ("other scores", "scale-times-default", "1/sqrt(d) once more: cntkx#10's kind", "cosine_scaled_by_the_width",
        forms.of_operation("cosine_attention")),
    ("attention by score", "score-scaled", "1/sqrt(D) of the dot product is applied to a score that has no scale",
        "additive_scores_over_root_of_width", forms.of_operation("additive_attention")),
    ("attention by score", "score-scaled", "1/sqrt(D) of the dot product beside the bilinear weight",
        "bilinear_scores_over_root_of_width", forms.of_operation("general_attention")),
    ("attention by score", "score-weights-exchanged",
        "structure: Wq k + Wk q, silent where both weights have one shape"),
    ("attention by score", "score-query-weight-transposed",
        "structure: the layout of torch.nn.Linear, (A, D), where the weight is square"),
    ("attention by score", "score-key-weight-transposed",
        "structure: the layout of torch.nn.Linear, (A, Dk), where the weight is square"),
    *(
        ("attention by score", "value-read-as-key",
            "structure: the encoder's states are keys and values in the paper, and so the keys are averaged",
            f"keys_averaged_by_{name}", forms.of_operation(name))
        for name in BY_SCORE
    ),
):
    mutant(**_fault)
for _format, _store, _where in (
    ("bfloat16", kernel.bfloat16, ""), ("TF32", kernel.tf32, ""),
    ("float16", kernel.float16, ": kvpress#268, pytorch#60939"),
):
    _faulty_scores(forms.scores_read_as, f"scores_stored_in_{_format.lower()}",
        f"scores written to memory in {_format}{_where}", _store, at="scores", **ROUNDED)
_faulty_scores(forms.scores_read_as, "scores_squared", "logits multiplied by logits: keras#20510",
    lambda scores: np.asarray(scores * scores), at="scores", diagnosis="scores-squared")
_faulty_scores("dot_scores._dot", "scores_transposed_where_square",
    "K Q^T for Q K^T, silent where Lq == Lk: diffusers#14341's kind",
    lambda query, key: np.swapaxes(backend._dot(query, key), -1, -2) if query.shape[-2] == key.shape[-2]
        else backend._dot(query, key), diagnosis="query-and-key-exchanged")
_faulty_scale(_default, "scale_of_width_plus_one", "1/sqrt(d + 1) for 1/sqrt(d)",
    lambda query: 1 / math.sqrt(query.shape[-1] + 1), diagnosis="scale-fitted")
_faulty_scale(_factor, "scale_off_by_1e_6", "a constant printed with six digits",
    lambda scale: scale * (1 + 1e-06), dtypes=WIDE, diagnosis="scale-fitted")
_faulty_scale(_factor, "scale_off_by_1e_5", "a constant printed with five digits",
    lambda scale: scale * (1 + 1e-05), dtypes=WIDE, diagnosis="scale-fitted")
_faulty_scale(_factor, "scale_in_bfloat16", "the factor is computed in the storage type: MONAI GenerativeModels#146",
    lambda scale: float(kernel.bfloat16(np.array(scale))), dtypes=WIDE, diagnosis="scale-fitted")
_faulty_scale(_factor, "scale_in_float32", "tf.cast(1/sqrt(d), float64) passes a Python float through float32",
    lambda scale: float(kernel.float32(np.array(scale))), dtypes=("float64",),
    diagnosis=("scale-fitted", "accuracy-of-float32"))
_faulty_scale(forms.in_attention, "scale_applied_after_mask",
    "-inf is scaled too: NaN at scale 0, inf at a negative one (onnx#7865's kind)",
    lambda call: forms.filled(lambda biased, allowed, masks: np.where(allowed, biased,
        np.asarray(-np.inf * np.float64(call.factor), biased.dtype))),
    at="masked", diagnosis="fill-minus-infinity")
_faulty_scores("dot_scores._dot", "query_and_key_in_tf32",
    "float32 matmul silently in TF32: pytorch#161022, mlx#3860, triton#3498",
    lambda query, key: backend._dot(kernel.tf32(query), kernel.tf32(key)), **ROUNDED)
_faulty_scores("dot_scores._dot", "scores_accumulated_in_float16",
    "float16 running sums: metal-flash-attention#8, ultralytics#24990",
    lambda query, key: kernel.sequential_matmul(query, np.swapaxes(key, -1, -2), store=kernel.float16), **ROUNDED)
_faulty_rotary(forms.in_attention, "rotary_positions_without_the_past",
    "the offset is no part of the key of a cache of angles: rotary-embedding-torch#11",
    lambda call: {"_rotate": lambda inputs, cos, sin, interleaved: backend._rotate(inputs, call.rotary_cos,
        call.rotary_sin, interleaved)}, diagnosis=("rotary-without-past", "rotary-without-offsets"))
_faulty_rotary("_rotate", "rotary_sine_of_a_padded_width",
    "the sine is read from behind the next power of two: vllm-ascend#12723",
    lambda inputs, cos, sin, interleaved: backend._rotate(inputs, cos, sin
        if 1 << (sin.shape[-1] - 1).bit_length() == sin.shape[-1] else np.zeros_like(sin), interleaved))
_faulty_rotary("attention_gradients._rotate", "rotary_gradient_not_turned_back", "the way back leaves the rotation out",
    lambda inputs, cos, sin, interleaved: inputs, at="grad_query")
_faulty_other_scores(_of_parts, "additive_tanh_of_each_part", "tanh(q Wq) + tanh(k Wk) for tanh(q Wq + k Wk)",
    lambda query_part, key_part, bias: np.tanh(query_part + bias) + np.tanh(key_part + bias))
_faulty_other_scores(lambda change: _lengths_read_as(change) | {"cosine_scores._near_one": lambda vectors: vectors},
    "cosine_divided_by_squared_lengths", "the root of the squared length is missing",
    lambda lengths: np.asarray(lengths * lengths), diagnosis="cosine-times-inverse-lengths")
_faulty_other_scores("general_scores", "bilinear_bias_added_to_the_weight",
    "structure: q (W + b) k^T: the bias is added to the weight",
    lambda query, key, weight, *, score_bias=None: backend.general_scores(query, key, weight if score_bias is None
        else weight + score_bias[0]))
_faulty_other_scores("general_scores._dot", "bilinear_product_in_tf32",
    "the first of two products in TF32: pytorch#161022",
    lambda projected, key: backend._dot(kernel.tf32(projected), key), **ROUNDED)
_faulty_other_scores(_of_parts, "additive_parts_multiplied", "tanh(q Wq * k Wk): the parts are mixed by product",
    lambda query_part, key_part, bias: np.asarray(np.tanh(query_part * key_part + bias)))
_faulty_other_scores(_activation, "additive_tanh_missing", "the hidden layer is linear", lambda hidden: hidden)
_faulty_other_scores(_activation, "additive_tanh_by_pade", "x(27 + x^2)/(27 + 9x^2) for tanh", kernel.tanh_by_pade)
_faulty_other_scores(_activation, "additive_tanh_in_float16", "tanh looked up in float16",
    lambda hidden: kernel.float16(np.tanh(hidden)), **ROUNDED)
_faulty_other_scores(_activation, "additive_tanh_off_by_1e_5", "a polynomial tanh of five digits",
    lambda hidden: np.asarray(np.tanh(hidden) * (1 + 1e-05 * np.sin(97 * hidden))), dtypes=WIDE)
_faulty_other_scores(_activation, "additive_tanh_by_ratio", "(e^2x - 1)/(e^2x + 1) overflows: vllm#56578",
    kernel.tanh_by_ratio)
_faulty_other_scores(_divided, "cosine_of_an_undivided_query", "only the keys are normalised",
    lambda name: name != "query", diagnosis="cosine-times-length-of-query")
_faulty_other_scores(_divided, "cosine_of_an_undivided_key", "only the queries are normalised",
    lambda name: name != "key", diagnosis="cosine-times-length-of-key")
_faulty_other_scores(_lengths, "cosine_of_lengths_over_the_first_axis",
    "lengths over the vectors, not over their features",
    lambda vectors, **axes: np.asarray(np.linalg.norm(vectors, axis=-2, keepdims=True)))
_faulty_other_scores(_lengths_read_as, "cosine_with_1e_6_added_to_lengths", "an epsilon against division by zero",
    lambda lengths: np.asarray(lengths + np.asarray(1e-06, lengths.dtype)), dtypes=WIDE)
_faulty_other_scores(_lengths_read_as, "cosine_of_lengths_of_at_least_one", "an epsilon of 1 as the least length",
    lambda lengths: np.maximum(lengths, 1))
_faulty_other_scores(_lengths_read_as, "cosine_of_lengths_in_float16", "lengths kept in 16 bits",
    lambda lengths: kernel.float16(lengths), **ROUNDED)
_faulty_other_scores("cosine_scores", "cosine_divided_by_the_scale", "a temperature is taken for its inverse",
    lambda query, key, *, scale=None: backend.cosine_scores(query, key, scale=1 / scale if scale else scale),
    diagnosis="scale-fitted")
for _name in ("additive_attention", "general_attention"):
    _faulty_by_score(_on_padded_keys, f"padded_keys_zeroed_before_{_name}",
        "structure: padded annotations are set to zero, and take part in the softmax", _name)
# fmt: on
