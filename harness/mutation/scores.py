"""Faults from scores to the mean: scale, products, other scores, softcap, bias, sinks, softmax, and special numbers.

Other scores are the bilinear, the additive and the cosine one. Attention by such a score goes from the score network to
the mean.
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
from attncheck.diagnosis.readings_of_scores import is_masked
from attncheck.mutation import forms, kernel
from attncheck.mutation.kernel import Array
from attncheck.mutation.mutant import (
    ALL_BUT_BFLOAT16,
    FAST_PATH_DTYPES,
    ROUNDING_FIELDS,
    WIDE_DTYPES,
    StepReplacements,
    numpy_with,
    rebind_globals,
    register_equivalent,
    register_fault,
)
from attncheck.reading.problem import Problem
from attncheck.spec import LOGITS, OPERATIONS_BY_SCORE, STAGES

_register_scale_fault = partial(register_fault, "scale", stage="scores")
_register_score_fault = partial(register_fault, "scores", stage="raw_scores")


def _change_scale(change: Callable[[float], float]) -> StepReplacements:
    """Change the factor, default or explicit."""
    return {"_scale_of": lambda query, scale: change(backend._scale_of(query, scale))}


def _replace_default_scale(default: Callable[[Array], float]) -> StepReplacements:
    """Change only the default."""
    return {"_scale_of": lambda query, scale: default(query) if scale is None else scale}


_register_rotary_fault = partial(register_fault, "rotary", stage="rotated_query")


def _has_default_scale(problem: Problem) -> bool:
    """Return whether a problem leaves the scale to its default."""
    return problem.options.get("scale") is None and "head_scale" not in problem.inputs


_register_other_score_fault = partial(register_fault, "other scores", stage="scores")


def _replace_numpy_function(function: str, name: str) -> Callable[[Callable[[Array], Array]], StepReplacements]:
    """Return a form that replaces the NumPy function ``name`` in a function of the backend."""
    return lambda change: {f"{function}.np": numpy_with(**{name: change})}


_replace_activation, _replace_softcap_tanh = (
    _replace_numpy_function("additive_scores", "tanh"),
    _replace_numpy_function("_cap", "tanh"),
)
_replace_exponential = _replace_numpy_function("_softmax_with_sinks", "exp")


def _replace_hidden_layer(hidden_layer: Callable[[Array, Array, Array | float], Array]) -> StepReplacements:
    """Replace the hidden layer by ``hidden_layer(query_part, key_part, bias)``."""

    def additive_scores(
        query: Array, key: Array, query_weight: Array, key_weight: Array, score_vector: Array, *, score_bias: Any = None
    ) -> Stages:
        query_part = (query @ query_weight)[..., :, np.newaxis, :]  # (B, H, Lq, 1, A)
        key_part = (key @ key_weight)[..., np.newaxis, :, :]  # (B, H, 1, Lk, A)
        bias = np.zeros((), query_part.dtype) if score_bias is None else score_bias
        return {"scores": hidden_layer(query_part, key_part, bias) @ score_vector}

    return {"additive_scores": additive_scores}


@_register_other_score_fault("additive_scores", defect="v (tanh(q + k) + b) for v tanh(q + k + b)")
def additive_bias_after_tanh(
    query: Array, key: Array, query_weight: Array, key_weight: Array, score_vector: Array, *, score_bias: Any = None
) -> Stages:
    stages = backend.additive_scores(query, key, query_weight, key_weight, score_vector)
    return stages if score_bias is None else {"scores": stages["scores"] + score_bias @ score_vector}


def _replace_vector_lengths(norm: Callable[..., Array]) -> StepReplacements:
    """Replace the lengths by which vectors are divided."""
    return {"cosine_scores.np": numpy_with(linalg=SimpleNamespace(norm=norm))}


def _change_vector_lengths(change: Callable[[Array], Array]) -> StepReplacements:
    """Change the lengths by which vectors are divided."""
    return _replace_vector_lengths(lambda vectors, **axes: change(np.asarray(np.linalg.norm(vectors, **axes))))


def _divide_one_operand(is_divided: Callable[[str], bool]) -> StepReplacements:
    """Divide only one of the two by their lengths: ``is_divided`` of its name, ``query`` or ``key``."""

    def cosine_scores(query: Array, key: Array, *, scale: float | None = None) -> Stages:
        names = iter(("query", "key"))  # In the order in which the backend takes their lengths.

        def norm(vectors: Array, **axes: Any) -> Array:
            lengths = np.asarray(np.linalg.norm(vectors, **axes))
            return lengths if is_divided(next(names)) else np.ones_like(lengths)

        library = numpy_with(linalg=SimpleNamespace(norm=norm))
        as_they_are = rebind_globals(backend.cosine_scores, np=library, _scale_near_one=lambda vectors: vectors)
        stages: Stages = as_they_are(query, key, scale=scale)
        return stages

    return {"cosine_scores": cosine_scores}


_register_attention_by_score_fault = partial(register_fault, "attention by score", stage="scores")


@_register_attention_by_score_fault(
    "_attend",
    stage="masked",
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


def _zero_padded_keys(name: str) -> StepReplacements:
    """Set padded keys to 0 before the score, and forbid none, so that padded keys have weights."""
    right = getattr(backend, name)

    def attention(
        query: Array, key: Array, *arrays: Array, key_lengths: Array | None = None, **keywords: Any
    ) -> Stages:
        if key_lengths is None:
            return dict(right(query, key, *arrays, **keywords))
        is_used = np.arange(key.shape[-2]) < key_lengths[:, np.newaxis]
        zeroed = np.where(is_used[:, np.newaxis, :, np.newaxis], key, np.zeros((), key.dtype))
        stages = dict(right(query, zeroed, *arrays, **keywords))
        stages["masked"] = next(stages[stage] for stage in LOGITS[::-1] if stage in stages)
        return {name: stages[name] for name in sorted(stages, key=STAGES.index)}

    return {name: attention}


@_register_attention_by_score_fault(
    "_attend", stage="output", defect="structure: the context is made of scores, not of weights"
)
def values_averaged_by_scores(stages: Stages, value: Array, masks: dict[str, Any], empty_rows: EmptyRows) -> Stages:
    all_stages = backend._attend(stages, value, masks, empty_rows)
    shares = np.where(all_stages["weights"] == 0, np.zeros((), value.dtype), all_stages["scores"])
    return all_stages | {"output": np.asarray(shares @ value)}


@_register_attention_by_score_fault("_attend", stage="weights", diagnosis="softmax-over-queries")
def attention_by_score_normalised_over_queries(
    stages: Stages, value: Array, masks: dict[str, Any], empty_rows: EmptyRows
) -> Stages:
    """the softmax runs over the queries: labml#146's kind"""
    all_stages = backend._attend(stages, value, masks, empty_rows)
    logits = next(all_stages[stage] for stage in LOGITS[::-1] if stage in all_stages)
    turned = backend.softmax(np.swapaxes(logits, -1, -2), empty_rows=empty_rows)["weights"]
    weights = np.ascontiguousarray(np.swapaxes(turned, -1, -2))
    return all_stages | {"weights": weights, "output": np.asarray(weights @ value)}


_register_softcap_fault = partial(register_fault, "softcap", stage="capped")
_register_bias_fault = partial(register_fault, "bias", stage="biased")


_register_sink_fault = partial(register_fault, "sinks", stage="weights")
_register_softmax_fault = partial(register_fault, "softmax", stage="weights")
_register_denominator_fault = partial(register_fault, "denominator", stage="weights")
_register_precision_fault = partial(register_fault, "precision", stage="weights")


@_register_softmax_fault(_replace_exponential, stage="weights", **ROUNDING_FIELDS)
def exp_by_a_parabola(shifted: Array) -> Array:
    """2^fraction by a quadratic"""
    power = shifted * math.log2(math.e)
    whole = np.floor(np.maximum(power, -1000))
    fraction = power - whole
    return np.where(power < -1000, 0, np.exp2(whole) * (1 + fraction * (0.6565 + 0.3435 * fraction)))


def _replace_softmax_axis(axis: int) -> StepReplacements:
    """Normalise the weights over a wrong axis."""

    def softmax_over_axis(logits: Array) -> Stages:
        turned = np.swapaxes(logits, axis, -1)
        return backend.softmax(logits) | {"weights": np.swapaxes(backend.softmax(turned)["weights"], axis, -1)}

    return forms.replace_softmax(softmax_over_axis)


@_register_softmax_fault(forms.replace_softmax, stage="log_sum_exp", diagnosis="log-sum-exp-without-maximum")
def log_sum_exp_without_maximum(logits: Array) -> Stages:
    """log of the shifted sum alone"""
    stages, exponentials = forms.softmax_and_exponentials(logits)
    maximum = backend._row_maximum(logits)
    total = np.where(maximum == -np.inf, 1, backend._row_sum(exponentials))
    return stages | {"log_sum_exp": np.where(np.isinf(maximum), maximum, np.log(total))[..., 0]}


def _add_to_row_sum(epsilon: float) -> StepReplacements:
    return {_ROW_SUM_STEP: lambda exponentials: np.asarray(backend._row_sum(exponentials) + epsilon)}


_ROW_SUM_STEP = "_softmax_with_sinks._row_sum"
"""What adds the exponentials up."""
_EPSILON_DEFECT = "an epsilon against division by zero"


@register_equivalent(
    forms.replace_softmax,
    defect="a clamp that has nothing to clamp",
    proof="All terms are at least 0, so every rounded partial sum is at least each of its terms (rounding is "
    "monotone), and a quotient of two numbers of which the divisor is not smaller does not round above 1. NaN stays "
    "NaN.",
)
def weights_clipped_at_one(logits: Array) -> Stages:
    stages = backend.softmax(logits)
    return stages | {"weights": np.minimum(stages["weights"], 1)}


@register_equivalent(
    _replace_exponential,
    defect="a clamp against overflow that has nothing to clamp",
    proof="A difference s - m with s <= m is at most 0, and rounding keeps its sign: min(s - m, 0) is s - m, bit for "
    "bit. NaN stays NaN.",
)
def exponent_clipped_at_zero(shifted: Array) -> Array:
    return np.asarray(np.exp(np.minimum(shifted, 0)))


_register_special_value_fault = partial(register_fault, "special values", dtypes=FAST_PATH_DTYPES, stage="biased")


@_register_special_value_fault(
    forms.replace_softmax, stage="weights", defect="a row of finfo.min gives NaN: pytorch#109517, #110213"
)
def row_of_least_finite_numbers_is_nan(logits: Array) -> Stages:
    """Subtract a row's maximum that is itself minus infinity."""
    stages, maximum = backend.softmax(logits), backend._row_maximum(logits)
    is_lost = (maximum <= np.finfo(logits.dtype).min / 2) & ~np.isneginf(maximum)
    return stages | {"weights": np.where(is_lost, np.nan, stages["weights"]).astype(logits.dtype)}


@_register_special_value_fault(
    forms.change_logits,
    stage="weights",
    defect="structure: the maximum's place is kept, and its equals in later tiles are left out",
)
def far_ties_of_the_maximum_forgotten(logits: Array) -> Array:
    """Forget a maximum that comes again 16 keys later or more."""
    keys = np.arange(logits.shape[-1])
    is_largest = (logits == backend._row_maximum(logits)) & np.isfinite(logits)
    first = is_largest.argmax(axis=-1)[..., np.newaxis] if logits.shape[-1] else np.zeros((), int)
    return np.where(is_largest & (keys >= first + 16), -np.inf, logits)


@_register_special_value_fault(
    forms.change_logits,
    stage="weights",
    defect="structure: a tile is read where its maximum is above the running one, and otherwise where it is below",
)
def tile_with_an_equal_maximum_skipped(logits: Array) -> Array:
    """Walk over tiles of 16 keys, and see nothing of one whose maximum is the running one."""
    running = np.full((*logits.shape[:-1], 1), -np.inf, logits.dtype)
    seen = []
    for start in range(0, logits.shape[-1], 16):
        part = logits[..., start : start + 16]
        is_skipped = (backend._row_maximum(part) == running) & np.isfinite(running)
        seen.append(np.where(is_skipped, -np.inf, part).astype(part.dtype))
        running = np.maximum(running, backend._row_maximum(part))
    return np.concatenate(seen, axis=-1) if seen else logits


def _nan_after_masked_first_tile(tile: int) -> StepReplacements:
    """Spread exp(-inf - -inf) of a fully masked first tile to the row, if a later tile has keys."""

    def softmax_with_nan_rows(logits: Array) -> Stages:
        stages = backend.softmax(logits)
        first, rest = backend._row_maximum(logits[..., :tile]), backend._row_maximum(logits[..., tile:])
        is_lost = np.isneginf(first) & ~np.isneginf(rest)
        return stages | {"weights": np.where(is_lost, np.nan, stages["weights"]).astype(logits.dtype)}

    return forms.replace_softmax(softmax_with_nan_rows)


def _change_logits_by_unmasked(change: Callable[[Array, Array], Array]) -> StepReplacements:
    """Compute the softmax of other logits, ``change(logits, unmasked)``; the operation softmax masks nothing."""
    alone = forms.change_logits(lambda logits: change(logits, logits))
    return alone | forms.replace_attention_steps(
        lambda call: forms.change_logits(lambda logits: change(logits, call.unmasked_logits))
    )


@_register_special_value_fault(
    forms.replace_average,
    stage="context",
    defect="a query that holds NaN makes its neighbour NaN: pytorch#160064's kind",
)
def nan_in_a_query_spreads(logits: Array, weights: Array, value: Array) -> Array:
    """Spread a NaN in the scores of one query to the query before it, which shares a register."""
    output = weights @ value
    has_nan = np.isnan(logits).any(axis=-1, keepdims=True)
    return np.where(np.roll(has_nan, -1, axis=-2), np.nan, output).astype(output.dtype)


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
# Rows, laid out by hand: the reading that is computed, the defect in the wild, and a name and where, if not everywhere.
for _fault in forms.faults_from_readings(
    ("scale", "scale-one", "sqrt(d) missing: mlc-llm#3426, cntkx#10, MONAI GenerativeModels#146", "scale_missing",
        _has_default_scale),
    ("scale", "scale-twice", "scaled query and scaled scores: pytorch#174049 as reported"),
    ("scale", "scale-inverse-width", "1/d for 1/sqrt(d)", "scale_without_root", _has_default_scale),
    ("scale", "scale-inverse-root-of-HD", "1/sqrt(H d), the model's width for the head's", "scale_of_model_width",
        _has_default_scale),
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
        "bilinear_bias_ignored", forms.is_operation("general_attention")),
    ("other scores", "score-bias-missing", "the hidden layer's bias has no effect", "additive_bias_ignored",
        forms.is_operation("additive_attention")),
    ("other scores", "score-bias-negated", "structure: the bias is subtracted, as one of the other side"),
    ("other scores", "score-bias-of-first-head", "structure: the bias of the first head serves all"),
    ("other scores", "scale-times-default", "1/sqrt(d) once more: cntkx#10's kind", "cosine_scaled_by_the_width",
        forms.is_operation("cosine_attention")),
    ("attention by score", "score-scaled", "1/sqrt(D) of the dot product is applied to a score that has no scale",
        "additive_scores_over_root_of_width", forms.is_operation("additive_attention")),
    ("attention by score", "score-scaled", "1/sqrt(D) of the dot product beside the bilinear weight",
        "bilinear_scores_over_root_of_width", forms.is_operation("general_attention")),
    ("attention by score", "score-weights-exchanged",
        "structure: Wq k + Wk q, silent where both weights have one shape"),
    ("attention by score", "score-query-weight-transposed",
        "structure: the layout of torch.nn.Linear, (A, D), where the weight is square"),
    ("attention by score", "score-key-weight-transposed",
        "structure: the layout of torch.nn.Linear, (A, Dk), where the weight is square"),
    *(
        ("attention by score", "value-read-as-key",
            "structure: the encoder's states are keys and values in the paper, and so the keys are averaged",
            f"keys_averaged_by_{name}", forms.is_operation(name))
        for name in OPERATIONS_BY_SCORE
    ),
    ("softcap", "softcap-of-raw-scores", "the cap bounds raw scores: vllm#7425's kind"),
    ("softcap", "softcap-ignored", "the argument is not passed on: vllm#7425"),
    ("softcap", "softcap-ignored", "a bias takes another path, which knows no cap",
        "softcap_dropped_when_a_bias_is_given", forms.has_any_of("bias")),
    ("softcap", "softcap-ignored", "a mask takes another path, which knows no cap",
        "softcap_dropped_when_something_is_masked", is_masked),
    ("bias", "bias-scaled", "(q k + b) scale for q k scale + b: TransformerEngine#236"),
    ("bias", "bias-times-ln2", "an exp2 kernel forgot log2(e) on the bias: segment-anything-fast#71"),
    ("bias", "bias-of-batch-for-heads", "(H, Lq, Lk) read as (B, Lq, Lk) where B == H: mlx-lm#1903, onnx#8108"),
    ("bias", "bias-ignored", "only one of mask and bias is used: onnxruntime#14363's kind",
        "bias_dropped_when_a_mask_is_given", forms.has_any_of("mask")),
    ("sinks", "sinks-by-key-heads",
        "query heads of a group as rows of one tile read the sink of the tile: sgl-kernel-xpu#254"),
    ("sinks", "sinks-twice", "each of two splits of the keys counts the sink: rocm-libraries#12229"),
    ("sinks", "sinks-scaled", "the sink is scaled as the scores are: rocm-libraries#12229's kind"),
):
    register_fault(**_fault)
for _format, _store, _where in (
    ("bfloat16", kernel.round_to_bfloat16, ""), ("TF32", kernel.round_to_tf32, ""),
    ("float16", kernel.round_to_float16, ": kvpress#268, pytorch#60939"),
):
    _register_score_fault(forms.change_scores, f"scores_stored_in_{_format.lower()}",
        f"scores written to memory in {_format}{_where}", _store, stage="scores", **ROUNDING_FIELDS)
_register_score_fault(forms.change_scores, "scores_squared", "logits multiplied by logits: keras#20510",
    lambda scores: np.asarray(scores * scores), stage="scores", diagnosis="scores-squared")
_register_score_fault("dot_scores._dot", "scores_transposed_where_square",
    "K Q^T for Q K^T, silent where Lq == Lk: diffusers#14341's kind",
    lambda query, key: np.swapaxes(backend._dot(query, key), -1, -2) if query.shape[-2] == key.shape[-2]
        else backend._dot(query, key), diagnosis="query-and-key-exchanged")
_register_scale_fault(_replace_default_scale, "scale_of_width_plus_one", "1/sqrt(d + 1) for 1/sqrt(d)",
    lambda query: 1 / math.sqrt(query.shape[-1] + 1), diagnosis="scale-fitted")
_register_scale_fault(_change_scale, "scale_off_by_1e_6", "a constant printed with six digits",
    lambda scale: scale * (1 + 1e-06), dtypes=WIDE_DTYPES, diagnosis="scale-fitted")
_register_scale_fault(_change_scale, "scale_off_by_1e_5", "a constant printed with five digits",
    lambda scale: scale * (1 + 1e-05), dtypes=WIDE_DTYPES, diagnosis="scale-fitted")
_register_scale_fault(_change_scale, "scale_in_bfloat16",
    "the factor is computed in the storage type: MONAI GenerativeModels#146",
    lambda scale: float(kernel.round_to_bfloat16(np.array(scale))), dtypes=WIDE_DTYPES, diagnosis="scale-fitted")
_register_scale_fault(_change_scale, "scale_in_float32",
    "tf.cast(1/sqrt(d), float64) passes a Python float through float32",
    lambda scale: float(kernel.round_to_float32(np.array(scale))), dtypes=("float64",),
    diagnosis=("scale-fitted", "accuracy-of-float32"))
_register_scale_fault(forms.replace_attention_steps, "scale_applied_after_mask",
    "-inf is scaled too: NaN at scale 0, inf at a negative one (onnx#7865's kind)",
    lambda call: forms.replace_fill(lambda biased, allowed, masks: np.where(allowed, biased,
        np.asarray(-np.inf * np.float64(call.scale_factor), biased.dtype))),
    stage="masked", diagnosis="fill-minus-infinity")
_register_score_fault("dot_scores._dot", "query_and_key_in_tf32",
    "float32 matmul silently in TF32: pytorch#161022, mlx#3860, triton#3498",
    lambda query, key: backend._dot(kernel.round_to_tf32(query), kernel.round_to_tf32(key)), **ROUNDING_FIELDS)
_register_score_fault("dot_scores._dot", "scores_accumulated_in_float16",
    "float16 running sums: metal-flash-attention#8, ultralytics#24990",
    lambda query, key: kernel.sequential_matmul(query, np.swapaxes(key, -1, -2), store=kernel.round_to_float16),
        **ROUNDING_FIELDS)
_register_rotary_fault(forms.replace_attention_steps, "rotary_positions_without_the_past",
    "the offset is no part of the key of a cache of angles: rotary-embedding-torch#11",
    lambda call: {"_rotate": lambda inputs, cos, sin, interleaved: backend._rotate(inputs, call.rotary_cos,
        call.rotary_sin, interleaved)}, diagnosis=("rotary-without-past", "rotary-without-offsets"))
_register_rotary_fault("_rotate", "rotary_sine_of_a_padded_width",
    "the sine is read from behind the next power of two: vllm-ascend#12723",
    lambda inputs, cos, sin, interleaved: backend._rotate(inputs, cos, sin
        if 1 << (sin.shape[-1] - 1).bit_length() == sin.shape[-1] else np.zeros_like(sin), interleaved))
_register_rotary_fault("attention_gradients._rotate", "rotary_gradient_not_turned_back",
    "the way back leaves the rotation out",
    lambda inputs, cos, sin, interleaved: inputs, stage="grad_query")
_register_other_score_fault(_replace_hidden_layer, "additive_tanh_of_each_part",
    "tanh(q Wq) + tanh(k Wk) for tanh(q Wq + k Wk)",
    lambda query_part, key_part, bias: np.tanh(query_part + bias) + np.tanh(key_part + bias))
_register_other_score_fault(lambda change: _change_vector_lengths(change) | {
    "cosine_scores._scale_near_one": lambda vectors: vectors},
    "cosine_divided_by_squared_lengths", "the root of the squared length is missing",
    lambda lengths: np.asarray(lengths * lengths), diagnosis="cosine-times-inverse-lengths")
_register_other_score_fault("general_scores", "bilinear_bias_added_to_the_weight",
    "structure: q (W + b) k^T: the bias is added to the weight",
    lambda query, key, weight, *, score_bias=None: backend.general_scores(query, key, weight if score_bias is None
        else weight + score_bias[0]))
_register_other_score_fault("general_scores._dot", "bilinear_product_in_tf32",
    "the first of two products in TF32: pytorch#161022",
    lambda projected, key: backend._dot(kernel.round_to_tf32(projected), key), **ROUNDING_FIELDS)
_register_other_score_fault(_replace_hidden_layer, "additive_parts_multiplied",
    "tanh(q Wq * k Wk): the parts are mixed by product",
    lambda query_part, key_part, bias: np.asarray(np.tanh(query_part * key_part + bias)))
_register_other_score_fault(_replace_activation, "additive_tanh_missing", "the hidden layer is linear",
    lambda hidden: hidden)
_register_other_score_fault(_replace_activation, "additive_tanh_by_pade", "x(27 + x^2)/(27 + 9x^2) for tanh",
    kernel.tanh_by_pade)
_register_other_score_fault(_replace_activation, "additive_tanh_in_float16", "tanh looked up in float16",
    lambda hidden: kernel.round_to_float16(np.tanh(hidden)), **ROUNDING_FIELDS)
_register_other_score_fault(_replace_activation, "additive_tanh_off_by_1e_5", "a polynomial tanh of five digits",
    lambda hidden: np.asarray(np.tanh(hidden) * (1 + 1e-05 * np.sin(97 * hidden))), dtypes=WIDE_DTYPES)
_register_other_score_fault(_replace_activation, "additive_tanh_by_ratio",
    "(e^2x - 1)/(e^2x + 1) overflows: vllm#56578",
    kernel.tanh_by_ratio)
_register_other_score_fault(_divide_one_operand, "cosine_of_an_undivided_query", "only the keys are normalised",
    lambda name: name != "query", diagnosis="cosine-times-length-of-query")
_register_other_score_fault(_divide_one_operand, "cosine_of_an_undivided_key", "only the queries are normalised",
    lambda name: name != "key", diagnosis="cosine-times-length-of-key")
_register_other_score_fault(_replace_vector_lengths, "cosine_of_lengths_over_the_first_axis",
    "lengths over the vectors, not over their features",
    lambda vectors, **axes: np.asarray(np.linalg.norm(vectors, axis=-2, keepdims=True)))
_register_other_score_fault(_change_vector_lengths, "cosine_with_1e_6_added_to_lengths",
    "an epsilon against division by zero",
    lambda lengths: np.asarray(lengths + np.asarray(1e-06, lengths.dtype)), dtypes=WIDE_DTYPES)
_register_other_score_fault(_change_vector_lengths, "cosine_of_lengths_of_at_least_one",
    "an epsilon of 1 as the least length",
    lambda lengths: np.maximum(lengths, 1))
_register_other_score_fault(_change_vector_lengths, "cosine_of_lengths_in_float16", "lengths kept in 16 bits",
    lambda lengths: kernel.round_to_float16(lengths), **ROUNDING_FIELDS)
_register_other_score_fault("cosine_scores", "cosine_divided_by_the_scale", "a temperature is taken for its inverse",
    lambda query, key, *, scale=None: backend.cosine_scores(query, key, scale=1 / scale if scale else scale),
    diagnosis="scale-fitted")
for _name in ("additive_attention", "general_attention"):
    _register_attention_by_score_fault(_zero_padded_keys, f"padded_keys_zeroed_before_{_name}",
        "structure: padded annotations are set to zero, and take part in the softmax", _name)
_register_sink_fault(forms.change_gradients, "sinks_without_a_gradient",
    "no gradient for the sink: flash-attention#1973",
    lambda gradients: {name: np.zeros_like(rows) if name == "grad_sinks" else rows for name, rows in gradients.items()},
    stage="grad_sinks", diagnosis="gradient-of-sinks-zero")
_register_softcap_fault(forms.replace_attention_steps, "softcap_after_the_mask",
    "-inf becomes -cap, and masked keys get weights: onnx#7865, onnxruntime#28379",
    lambda call: {} if call.softcap is None else forms.replace_fill(
        lambda biased, allowed, masks: np.where(allowed, biased,
        np.asarray(-call.softcap, biased.dtype))),
    stage="masked", diagnosis="softcap-after-masked")
_register_softcap_fault(forms.replace_attention_steps, "softcap_after_the_bias",
        "the bias is capped together with the scores: onnx#7865's kind",
    lambda call: {} if call.softcap is None else forms.replace_bias_addition(lambda scores, bias, masks:
        backend._cap(np.asarray(call.stages["scores"] + bias), call.softcap)),
    stage="biased", diagnosis="softcap-after-biased")
_register_softcap_fault("_cap", "softcap_applied_twice", "by the caller and by the kernel",
    lambda scores, softcap: backend._cap(backend._cap(scores, softcap), softcap), diagnosis="softcap-twice")
_register_softcap_fault("_cap", "softcap_not_multiplied_back", "tanh(s / c) without the factor c",
    lambda scores, softcap: np.asarray(np.tanh(scores / softcap)), diagnosis="softcap-not-multiplied-back")
_register_softcap_fault("_cap", "softcap_not_divided_by", "c tanh(s) for c tanh(s / c)",
    lambda scores, softcap: np.asarray(softcap * np.tanh(scores)), diagnosis="softcap-not-divided-by")
_register_softcap_fault("_cap", "softcap_clips", "a clamp at the cap for a hyperbolic tangent",
    lambda scores, softcap: np.clip(scores, -softcap, softcap), diagnosis="softcap-clips")
_register_softcap_fault("_cap", "softcap_by_softsign", "c s / (c + |s|), another bounded function",
    lambda scores, softcap: np.asarray(scores * softcap / (softcap + np.abs(scores))),
    diagnosis="softcap-by-softsign")
_register_softcap_fault(_replace_softcap_tanh, "softcap_by_a_ratio_of_exponentials",
    "(e^2x - 1) / (e^2x + 1) overflows: vllm#56578",
    kernel.tanh_by_ratio)
_register_softcap_fault(_replace_softcap_tanh, "softcap_by_pade", "a rational approximation of tanh",
    kernel.tanh_by_pade, dtypes=WIDE_DTYPES)
_register_softcap_fault(_replace_softcap_tanh, "softcap_in_bfloat16", "tanh evaluated in bfloat16",
    lambda argument: kernel.round_to_bfloat16(np.tanh(kernel.round_to_bfloat16(argument))), **ROUNDING_FIELDS)
_register_softcap_fault(_replace_softcap_tanh, "softcap_tanh_in_float16", "tanh.approx: eleven bits",
    lambda argument: kernel.round_to_float16(np.tanh(argument)), **ROUNDING_FIELDS)
_register_bias_fault(forms.replace_fill, "bias_added_after_a_finite_mask",
    "-1e4 first, then a bias that can lift it: Automodel#2658's planes",
    lambda biased, allowed, masks: np.where(allowed, biased, np.asarray(-10000.0, biased.dtype) + (np.zeros((),
        biased.dtype) if masks["bias"] is None else masks["bias"])),
    stage="masked", diagnosis="masked-at-minus-1e4")
for _size, _digits, _named in (
    (1e-6, "six digits: pytorch#115151's kind", {"dtypes": WIDE_DTYPES}),
    (1e-5, "five digits", {"dtypes": WIDE_DTYPES}),
    (1e-4, "four digits", ROUNDING_FIELDS),
):
    _register_softmax_fault(_replace_exponential, f"exp_off_by_{_size:.0e}".replace("-0", "_"),
        f"a polynomial exp of {_digits}",
        partial(lambda size, shifted: np.asarray(np.exp(shifted) * (1 + size * np.sin(97 * shifted + 1))), _size),
        **_named)  # the errors differ, so that they do not cancel
for _axis, _which, _where in ((-2, "queries", "annotated_deep_learning#146"), (1, "heads", "fastNLP#254"),
    (0, "batch", "PyTorch-NLP#2")):
    _register_softmax_fault(_replace_softmax_axis, f"softmax_over_{_which}", f"wrong axis: {_where}", _axis,
        diagnosis=f"softmax-over-{_which}")
_register_softmax_fault(forms.replace_softmax, "log_sum_exp_in_float16", "statistics kept in 16 bits",
    lambda logits: (stages := backend.softmax(logits))
        | {"log_sum_exp": kernel.round_to_float16(stages["log_sum_exp"])},
    stage="log_sum_exp", **ROUNDING_FIELDS)
for _name, _defect, _dtypes, _epsilon in (
    ("one_added_to_the_sum", "1 for exp(-max): AttentionIsOFFByOne#5", ALL_BUT_BFLOAT16, 1.0),
    ("sum_plus_1e_9", _EPSILON_DEFECT, ("float64",), 1e-9),
    ("sum_plus_1e_6", _EPSILON_DEFECT, WIDE_DTYPES, 1e-6),
    ("sum_plus_1e_3", _EPSILON_DEFECT, WIDE_DTYPES, 1e-3),
):
    _register_denominator_fault(_add_to_row_sum, _name, _defect, _epsilon, dtypes=_dtypes,
        diagnosis=f"denominator-plus-{_epsilon:g}")
register_equivalent(
    _add_to_row_sum,
    defect=_EPSILON_DEFECT,
    proof="The largest term is exp(0) = 1 exactly, so the sum is at least 1, where half a unit in the last place is "
    "6e-8 in float32 and more in 16 bits: adding 1e-9 to it rounds to the sum itself, bit for bit.",
    dtypes=("float32", "float16"),
    name="sum_plus_1e_9_below_the_last_place",
)(1e-9)
for _name, _defect, _store in (
    ("weights_in_bfloat16", "P is stored in bfloat16 before P V", kernel.round_to_bfloat16),
    ("weights_in_float16", "P is stored in float16 before P V: pytorch#158979's reference", kernel.round_to_float16),
    ("weights_in_tf32", "P V in TF32: pytorch#161022", kernel.round_to_tf32),
    ("weights_truncated_to_bfloat16", "a shift for a rounding conversion", kernel.truncate_to_bfloat16),
):
    _register_precision_fault(forms.change_weights, _name, _defect, _store, **ROUNDING_FIELDS)
for _format, _seen in (("float16", ": metal-flash-attention#8"), ("bfloat16", "")):
    _register_precision_fault("attention._weighted_sum", f"values_accumulated_in_{_format}",
        f"P V with {_format} running sums{_seen}",
        partial(kernel.sequential_matmul, store=getattr(kernel, f"round_to_{_format}")), stage="context",
        **ROUNDING_FIELDS)
_register_softmax_fault(forms.replace_row_maximum, "maximum_not_subtracted", "exp overflows above 88 (709 in float64)",
    lambda logits: np.zeros_like(backend._row_maximum(logits)), diagnosis="maximum-not-subtracted")
_register_softmax_fault(forms.replace_attention_steps, "maximum_over_masked_keys",
    "the maximum includes what is masked: everything kept underflows",
    lambda call: {"_softmax_with_sinks": rebind_globals(
        backend._softmax_with_sinks, **forms.replace_row_maximum(lambda logits:
        backend._row_maximum(call.unmasked_logits)))})
_register_softmax_fault(forms.replace_row_maximum, "maximum_starts_at_zero",
    "the running maximum starts at 0: rows far below it underflow",
    lambda logits: np.maximum(backend._row_maximum(logits), 0), diagnosis="maximum-not-subtracted")
_register_softmax_fault(forms.replace_row_maximum, "maximum_starts_at_minus_5e4",
    "a finite sentinel for -inf: flashinfer#4267",
    lambda logits: np.asarray(np.maximum(backend._row_maximum(logits), np.asarray(-5e4, logits.dtype))),
    diagnosis="maximum-not-subtracted")
_register_softmax_fault(_replace_exponential, "exp_with_coarse_log2e", "exp2(1.4427 x): five digits of log2(e)",
    lambda shifted: np.asarray(np.exp2(shifted * 1.4427)), dtypes=WIDE_DTYPES)
_register_softmax_fault(_replace_exponential, "exp_in_float16", "exp evaluated in float16",
    lambda shifted: kernel.round_to_float16(np.exp(kernel.round_to_float16(shifted))), **ROUNDING_FIELDS)
_register_softmax_fault(_replace_exponential, "exp_in_bfloat16", "exp rounded to bfloat16",
    lambda shifted: kernel.round_to_bfloat16(np.exp(shifted)), **ROUNDING_FIELDS)
_register_softmax_fault(_replace_exponential, "exp_floored_at_minus_20", "a clamp keeps weights of 2e-9 alive",
    lambda shifted: np.asarray(np.exp(np.where(np.isfinite(shifted), np.maximum(shifted, -20), shifted))))
_register_softmax_fault(forms.change_logits, "logits_clipped_at_60",
    "a clamp against overflow levels the largest logits",
    lambda logits: np.asarray(np.minimum(logits, np.asarray(60, logits.dtype))))
_register_softmax_fault("_softmax_with_sinks.np", "log_sum_exp_in_base_two",
    "log2 for log: flashinfer#2113, sglang#35045",
    numpy_with(log=np.log2), stage="log_sum_exp", diagnosis="log-sum-exp-mixed-base")
_register_denominator_fault(_ROW_SUM_STEP, "sum_accumulated_in_float16", "the row sum sticks at 2048: tract#2586",
    lambda exponentials: kernel.sequential_sum(exponentials, kernel.round_to_float16), **ROUNDING_FIELDS)
_register_denominator_fault(_ROW_SUM_STEP, "sum_accumulated_in_bfloat16",
    "the row sum sticks at 256: executorch#20090, mlx#4178",
    lambda exponentials: kernel.sequential_sum(exponentials, kernel.round_to_bfloat16), **ROUNDING_FIELDS)
_register_denominator_fault(_ROW_SUM_STEP, "sum_in_float32", "float64 in, float32 statistics: jax#37422, jax#34114",
    lambda exponentials: kernel.round_to_float32(backend._row_sum(kernel.round_to_float32(exponentials))),
        dtypes=("float64",),
    diagnosis="accuracy-of-float32")
_register_denominator_fault(forms.replace_reciprocal, "reciprocal_in_tf32",
    "an approximate reciprocal without a Newton step",
    lambda total: kernel.round_to_tf32(1 / total), **ROUNDING_FIELDS)
_register_denominator_fault(_ROW_SUM_STEP, "sum_without_its_smallest_terms",
    "terms below 1e-4 are skipped as negligible",
    lambda exponentials: backend._row_sum(np.where(exponentials < 1e-4, 0, exponentials)), dtypes=WIDE_DTYPES)
_register_precision_fault(forms.change_weights, "small_weights_dropped", "weights below 1e-5 are skipped as negligible",
    lambda weights: np.where(weights < 1e-05, 0, weights), dtypes=WIDE_DTYPES)
_register_precision_fault(forms.change_query_key_value, "inputs_in_float32",
    "float64 attention computed from float32 inputs: jax#37422's kind",
    lambda query, key, value: (kernel.round_to_float32(query), kernel.round_to_float32(key),
        kernel.round_to_float32(value)),
    stage="raw_scores", dtypes=("float64",), diagnosis="accuracy-of-float32")
for _tile in (16, 64):
    _register_special_value_fault(_nan_after_masked_first_tile, f"first_tile_of_{_tile}_without_a_key_gives_nan",
        "exp(-inf - -inf) of a first tile that is all masked: flashinfer#1178", _tile, stage="weights")
_register_special_value_fault(forms.change_bias, "negative_zero_in_a_bias_forbids",
    "structure: a bias is compared by its bits, and the sign bit alone is the least integer",
    lambda bias, scores: np.where((bias == 0) & np.signbit(bias), -np.inf, bias).astype(bias.dtype))
# Add what forbids a second time: the least finite number becomes minus infinity.
_register_special_value_fault(forms.change_bias, "least_finite_bias_added_twice",
    "finfo.min + finfo.min is minus infinity: Automodel#2658, transformers#31303",
    lambda bias, scores: np.where(bias <= np.finfo(bias.dtype).min / 2, bias + bias, bias))
_register_special_value_fault(forms.change_bias, "least_finite_bias_forbids",
    "finfo.min is taken for minus infinity, and a row of it for an empty one: pytorch#109517's kind",
    lambda bias, scores: np.where(bias <= np.finfo(bias.dtype).min / 2, -np.inf, bias).astype(bias.dtype))
# Take a row whose scores are all zero for padding.
_register_special_value_fault(forms.replace_average, "rows_of_zero_scores_taken_for_padding",
    "structure: a query of zeros is padding, and its output is not computed",
    lambda logits, weights, value: np.where((np.where(np.isneginf(logits), 0, logits) == 0).all(axis=-1,
        keepdims=True) & (logits.shape[-1] > 1), 0, weights @ value).astype(value.dtype),
    stage="context")
# Take keys whose scores are zero for every query for padding.
register_fault("special values", _change_logits_by_unmasked, "zero_keys_taken_for_padding",
    "structure: a key of zeros is padding, and forbidden",
    lambda logits, unmasked: np.where((unmasked == 0).all(axis=-2, keepdims=True) & ~(unmasked == 0).all(axis=(-1, -2),
        keepdims=True), -np.inf, logits),
    stage="weights", dtypes=("float32",))
_register_special_value_fault("attention._weighted_sum", "nan_in_a_query_hidden",
    "a query that holds NaN gives zeros: pytorch#141128",
    lambda weights, value: np.asarray(np.nan_to_num(weights) @ value), stage="context")
# fmt: on
