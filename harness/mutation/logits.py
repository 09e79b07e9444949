"""Faults between scores and output: softcap, bias and sinks, the softmax, precision behind it, and special numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from attncheck.backends import numpy_backend as backend
from attncheck.backends.contract import Stages
from attncheck.judging.readings_of_scores import is_masked
from attncheck.mutation import forms, kernel
from attncheck.mutation.kernel import Array
from attncheck.mutation.mutant import EVERY, KERNELS, ROUNDED, WIDE, Steps, equivalent, mutant, numpy_with, within

_faulty_softcap = partial(mutant, "softcap", at="capped")
_faulty_bias = partial(mutant, "bias", at="biased")


def _tanh(tanh: Callable[[Array], Array]) -> Steps:
    """Use another hyperbolic tangent."""
    return {"_cap.np": numpy_with(tanh=tanh)}


_faulty_sinks = partial(mutant, "sinks", at="weights")
_faulty_softmax = partial(mutant, "softmax", at="weights")
_faulty_denominator = partial(mutant, "denominator", at="weights")
_faulty_precision = partial(mutant, "precision", at="weights")


def _exponential(exp: Callable[[Array], Array]) -> Steps:
    """Use another exponential."""
    return {"_softmax_with_sinks.np": numpy_with(exp=exp)}


def _with_relative_error(size: float) -> Callable[[Array], Array]:
    """Let every exponential err by up to ``size``, each by another amount, so that it does not cancel."""
    return lambda shifted: np.asarray(np.exp(shifted) * (1 + size * np.sin(97 * shifted + 1)))


@_faulty_softmax(_exponential, at="weights", **ROUNDED)
def exp_by_a_parabola(shifted: Array) -> Array:
    """2^fraction by a quadratic"""
    power = shifted * math.log2(math.e)
    whole = np.floor(np.maximum(power, -1000))
    fraction = power - whole
    return np.where(power < -1000, 0, np.exp2(whole) * (1 + fraction * (0.6565 + 0.3435 * fraction)))


def _over_axis(axis: int) -> Steps:
    """Normalise the weights over a wrong axis."""

    def normalise(logits: Array) -> Stages:
        turned = np.swapaxes(logits, axis, -1)
        return backend.softmax(logits) | {"weights": np.swapaxes(backend.softmax(turned)["weights"], axis, -1)}

    return forms.normalised(normalise)


@_faulty_softmax(forms.normalised, at="log_sum_exp", diagnosis="log-sum-exp-without-maximum")
def log_sum_exp_without_maximum(logits: Array) -> Stages:
    """log of the shifted sum alone"""
    stages, exponentials = forms.with_exponentials(logits)
    maximum = backend._row_maximum(logits)
    total = np.where(maximum == -np.inf, 1, backend._row_sum(exponentials))
    return stages | {"log_sum_exp": np.where(np.isinf(maximum), maximum, np.log(total))[..., 0]}


def _plus(epsilon: float) -> Steps:
    return {_TOTAL: lambda exponentials: np.asarray(backend._row_sum(exponentials) + epsilon)}


_TOTAL = "_softmax_with_sinks._row_sum"
"""What adds the exponentials up."""
_EPSILON = "an epsilon against division by zero"


@equivalent(
    forms.normalised,
    defect="a clamp that has nothing to clamp",
    proof="All terms are at least 0, so every rounded partial sum is at least each of its terms (rounding is "
    "monotone), and a quotient of two numbers of which the divisor is not smaller does not round above 1. NaN stays "
    "NaN.",
)
def weights_clipped_at_one(logits: Array) -> Stages:
    stages = backend.softmax(logits)
    return stages | {"weights": np.minimum(stages["weights"], 1)}


@equivalent(
    _exponential,
    defect="a clamp against overflow that has nothing to clamp",
    proof="A difference s - m with s <= m is at most 0, and rounding keeps its sign: min(s - m, 0) is s - m, bit for "
    "bit. NaN stays NaN.",
)
def exponent_clipped_at_zero(shifted: Array) -> Array:
    return np.asarray(np.exp(np.minimum(shifted, 0)))


_valued = partial(mutant, "special values", dtypes=KERNELS, at="biased")


@_valued(forms.normalised, at="weights", defect="a row of finfo.min gives NaN: pytorch#109517, #110213")
def row_of_least_finite_numbers_is_nan(logits: Array) -> Stages:
    """Subtract a row's maximum that is itself minus infinity."""
    stages, maximum = backend.softmax(logits), backend._row_maximum(logits)
    is_lost = (maximum <= np.finfo(logits.dtype).min / 2) & ~np.isneginf(maximum)
    return stages | {"weights": np.where(is_lost, np.nan, stages["weights"]).astype(logits.dtype)}


@_valued(
    forms.logits_read_as,
    at="weights",
    defect="structure: the maximum's place is kept, and its equals in later tiles are left out",
)
def far_ties_of_the_maximum_forgotten(logits: Array) -> Array:
    """Forget a maximum that comes again 16 keys later or more."""
    keys = np.arange(logits.shape[-1])
    is_largest = (logits == backend._row_maximum(logits)) & np.isfinite(logits)
    first = is_largest.argmax(axis=-1)[..., np.newaxis] if logits.shape[-1] else np.zeros((), int)
    return np.where(is_largest & (keys >= first + 16), -np.inf, logits)


@_valued(
    forms.logits_read_as,
    at="weights",
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


def _nan_from_a_first_tile(tile: int) -> Steps:
    """Let exp(-inf - -inf) of a first tile that is wholly masked reach the row, where a later one has keys."""

    def normalise(logits: Array) -> Stages:
        stages = backend.softmax(logits)
        first, rest = backend._row_maximum(logits[..., :tile]), backend._row_maximum(logits[..., tile:])
        is_lost = np.isneginf(first) & ~np.isneginf(rest)
        return stages | {"weights": np.where(is_lost, np.nan, stages["weights"]).astype(logits.dtype)}

    return forms.normalised(normalise)


def _by_unmasked(change: Callable[[Array, Array], Array]) -> Steps:
    """Take the softmax of other logits, ``change(logits, unmasked)``; a softmax alone has masked nothing."""
    alone = forms.logits_read_as(lambda logits: change(logits, logits))
    return alone | forms.in_attention(lambda call: forms.logits_read_as(lambda logits: change(logits, call.unmasked)))


@_valued(forms.averaged, at="context", defect="a query that holds NaN makes its neighbour NaN: pytorch#160064's kind")
def nan_in_a_query_spreads(logits: Array, weights: Array, value: Array) -> Array:
    """Let a NaN in the scores of one query reach the one before it, which shares a register."""
    output = weights @ value
    has_nan = np.isnan(logits).any(axis=-1, keepdims=True)
    return np.where(np.roll(has_nan, -1, axis=-2), np.nan, output).astype(output.dtype)


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
_faulty_sinks(forms.gradients_read_as, "sinks_without_a_gradient", "no gradient for the sink: flash-attention#1973",
    lambda gradients: {name: np.zeros_like(each) if name == "grad_sinks" else each for name, each in gradients.items()},
    at="grad_sinks", diagnosis="gradient-of-sinks-zero")
# Rows, laid out by hand: the reading that is computed, the defect in the wild, and a name and where, if not everywhere.
for _fault in forms.misread(
    ("softcap", "softcap-of-raw-scores", "the cap bounds raw scores: vllm#7425's kind"),
    ("softcap", "softcap-ignored", "the argument is not passed on: vllm#7425"),
    ("softcap", "softcap-ignored", "a bias takes another path, which knows no cap",
        "softcap_dropped_when_a_bias_is_given", forms.given("bias")),
    ("softcap", "softcap-ignored", "a mask takes another path, which knows no cap",
        "softcap_dropped_when_something_is_masked", is_masked),
    ("bias", "bias-scaled", "(q k + b) scale for q k scale + b: TransformerEngine#236"),
    ("bias", "bias-times-ln2", "an exp2 kernel forgot log2(e) on the bias: segment-anything-fast#71"),
    ("bias", "bias-of-batch-for-heads", "(H, Lq, Lk) read as (B, Lq, Lk) where B == H: mlx-lm#1903, onnx#8108"),
    ("bias", "bias-ignored", "only one of mask and bias is used: onnxruntime#14363's kind",
        "bias_dropped_when_a_mask_is_given", forms.given("mask")),
    ("sinks", "sinks-by-key-heads",
        "query heads of a group as rows of one tile read the sink of the tile: sgl-kernel-xpu#254"),
    ("sinks", "sinks-twice", "each of two splits of the keys counts the sink: rocm-libraries#12229"),
    ("sinks", "sinks-scaled", "the sink is scaled as the scores are: rocm-libraries#12229's kind"),
):
    mutant(**_fault)
_faulty_softcap(forms.in_attention, "softcap_after_the_mask",
    "-inf becomes -cap, and masked keys get weights: onnx#7865, onnxruntime#28379",
    lambda call: {} if call.softcap is None else forms.filled(lambda biased, allowed, masks: np.where(allowed, biased,
        np.asarray(-call.softcap, biased.dtype))),
    at="masked", diagnosis="softcap-after-masked")
_faulty_softcap(forms.in_attention, "softcap_after_the_bias",
        "the bias is capped together with the scores: onnx#7865's kind",
    lambda call: {} if call.softcap is None else forms.bias_added(lambda scores, bias, masks:
        backend._cap(np.asarray(call.stages["scores"] + bias), call.softcap)),
    at="biased", diagnosis="softcap-after-biased")
_faulty_softcap("_cap", "softcap_applied_twice", "by the caller and by the kernel",
    lambda scores, softcap: backend._cap(backend._cap(scores, softcap), softcap), diagnosis="softcap-twice")
_faulty_softcap("_cap", "softcap_not_multiplied_back", "tanh(s / c) without the factor c",
    lambda scores, softcap: np.asarray(np.tanh(scores / softcap)), diagnosis="softcap-not-multiplied-back")
_faulty_softcap("_cap", "softcap_not_divided_by", "c tanh(s) for c tanh(s / c)",
    lambda scores, softcap: np.asarray(softcap * np.tanh(scores)), diagnosis="softcap-not-divided-by")
_faulty_softcap("_cap", "softcap_clips", "a clamp at the cap for a hyperbolic tangent",
    lambda scores, softcap: np.clip(scores, -softcap, softcap), diagnosis="softcap-clips")
_faulty_softcap("_cap", "softcap_by_softsign", "c s / (c + |s|), another bounded function",
    lambda scores, softcap: np.asarray(scores * softcap / (softcap + np.abs(scores))),
    diagnosis="softcap-by-softsign")
_faulty_softcap(_tanh, "softcap_by_a_ratio_of_exponentials", "(e^2x - 1) / (e^2x + 1) overflows: vllm#56578",
    kernel.tanh_by_ratio)
_faulty_softcap(_tanh, "softcap_by_pade", "a rational approximation of tanh", kernel.tanh_by_pade, dtypes=WIDE)
_faulty_softcap(_tanh, "softcap_in_bfloat16", "tanh evaluated in bfloat16",
    lambda argument: kernel.bfloat16(np.tanh(kernel.bfloat16(argument))), **ROUNDED)
_faulty_softcap(_tanh, "softcap_tanh_in_float16", "tanh.approx: eleven bits",
    lambda argument: kernel.float16(np.tanh(argument)), **ROUNDED)
_faulty_bias(forms.filled, "bias_added_after_a_finite_mask",
    "-1e4 first, then a bias that can lift it: Automodel#2658's planes",
    lambda biased, allowed, masks: np.where(allowed, biased, np.asarray(-10000.0, biased.dtype) + (np.zeros((),
        biased.dtype) if masks["bias"] is None else masks["bias"])),
    at="masked", diagnosis="masked-at-minus-1e4")
for _size, _digits, _named in (
    (1e-6, "six digits: pytorch#115151's kind", {"dtypes": WIDE}), (1e-5, "five digits", {"dtypes": WIDE}),
    (1e-4, "four digits", ROUNDED),
):
    _faulty_softmax(_exponential, f"exp_off_by_{_size:.0e}".replace("-0", "_"), f"a polynomial exp of {_digits}",
        _with_relative_error(_size), **_named)
for _axis, _which, _where in ((-2, "queries", "annotated_deep_learning#146"), (1, "heads", "fastNLP#254"),
    (0, "batch", "PyTorch-NLP#2")):
    _faulty_softmax(_over_axis, f"softmax_over_{_which}", f"wrong axis: {_where}", _axis,
        diagnosis=f"softmax-over-{_which}")
_faulty_softmax(forms.normalised, "log_sum_exp_in_float16", "statistics kept in 16 bits",
    lambda logits: (stages := backend.softmax(logits)) | {"log_sum_exp": kernel.float16(stages["log_sum_exp"])},
    at="log_sum_exp", **ROUNDED)
for _name, _defect, _dtypes, _epsilon in (
    ("one_added_to_the_sum", "1 for exp(-max): AttentionIsOFFByOne#5", EVERY, 1.0),
    ("sum_plus_1e_9", _EPSILON, ("float64",), 1e-9),
    ("sum_plus_1e_6", _EPSILON, WIDE, 1e-6),
    ("sum_plus_1e_3", _EPSILON, WIDE, 1e-3),
):
    _faulty_denominator(_plus, _name, _defect, _epsilon, dtypes=_dtypes, diagnosis=f"denominator-plus-{_epsilon:g}")
equivalent(
    _plus,
    defect=_EPSILON,
    proof="The largest term is exp(0) = 1 exactly, so the sum is at least 1, where half a unit in the last place is "
    "6e-8 in float32 and more in 16 bits: adding 1e-9 to it rounds to the sum itself, bit for bit.",
    dtypes=("float32", "float16"),
    name="sum_plus_1e_9_below_the_last_place",
)(1e-9)
for _name, _defect, _store in (
    ("weights_in_bfloat16", "P is stored in bfloat16 before P V", kernel.bfloat16),
    ("weights_in_float16", "P is stored in float16 before P V: pytorch#158979's reference", kernel.float16),
    ("weights_in_tf32", "P V in TF32: pytorch#161022", kernel.tf32),
    ("weights_truncated_to_bfloat16", "a shift for a rounding conversion", kernel.truncated_bfloat16),
):
    _faulty_precision(forms.weights_read_as, _name, _defect, _store, **ROUNDED)
for _format, _seen in (("float16", ": metal-flash-attention#8"), ("bfloat16", "")):
    _faulty_precision("attention._weighted_sum", f"values_accumulated_in_{_format}",
        f"P V with {_format} running sums{_seen}",
        partial(kernel.sequential_matmul, store=getattr(kernel, _format)), at="context", **ROUNDED)
_faulty_softmax(forms.maximum_read_as, "maximum_not_subtracted", "exp overflows above 88 (709 in float64)",
    lambda logits: np.zeros_like(backend._row_maximum(logits)))
_faulty_softmax(forms.in_attention, "maximum_over_masked_keys",
    "the maximum includes what is masked: everything kept underflows",
    lambda call: {"_softmax_with_sinks": within(backend._softmax_with_sinks, **forms.maximum_read_as(lambda logits:
        backend._row_maximum(call.unmasked)))})
_faulty_softmax(forms.maximum_read_as, "maximum_starts_at_zero",
    "the running maximum starts at 0: rows far below it underflow",
    lambda logits: np.maximum(backend._row_maximum(logits), 0))
_faulty_softmax(forms.maximum_read_as, "maximum_starts_at_minus_5e4", "a finite sentinel for -inf: flashinfer#4267",
    lambda logits: np.asarray(np.maximum(backend._row_maximum(logits), np.asarray(-5e4, logits.dtype))))
_faulty_softmax(_exponential, "exp_with_coarse_log2e", "exp2(1.4427 x): five digits of log2(e)",
    lambda shifted: np.asarray(np.exp2(shifted * 1.4427)), dtypes=WIDE)
_faulty_softmax(_exponential, "exp_in_float16", "exp evaluated in float16",
    lambda shifted: kernel.float16(np.exp(kernel.float16(shifted))), **ROUNDED)
_faulty_softmax(_exponential, "exp_in_bfloat16", "exp rounded to bfloat16",
    lambda shifted: kernel.bfloat16(np.exp(shifted)), **ROUNDED)
_faulty_softmax(_exponential, "exp_floored_at_minus_20", "a clamp keeps weights of 2e-9 alive",
    lambda shifted: np.asarray(np.exp(np.where(np.isfinite(shifted), np.maximum(shifted, -20), shifted))))
_faulty_softmax(forms.logits_read_as, "logits_clipped_at_60", "a clamp against overflow levels the largest logits",
    lambda logits: np.asarray(np.minimum(logits, np.asarray(60, logits.dtype))))
_faulty_softmax("_softmax_with_sinks.np", "log_sum_exp_in_base_two", "log2 for log: flashinfer#2113, sglang#35045",
    numpy_with(log=np.log2), at="log_sum_exp", diagnosis="log-sum-exp-mixed-base")
_faulty_denominator(_TOTAL, "sum_accumulated_in_float16", "the row sum sticks at 2048: tract#2586",
    lambda exponentials: kernel.sequential_sum(exponentials, kernel.float16), **ROUNDED)
_faulty_denominator(_TOTAL, "sum_accumulated_in_bfloat16", "the row sum sticks at 256: executorch#20090, mlx#4178",
    lambda exponentials: kernel.sequential_sum(exponentials, kernel.bfloat16), **ROUNDED)
_faulty_denominator(_TOTAL, "sum_in_float32", "float64 in, float32 statistics: jax#37422, jax#34114",
    lambda exponentials: kernel.float32(backend._row_sum(kernel.float32(exponentials))), dtypes=("float64",),
    diagnosis="accuracy-of-float32")
_faulty_denominator(forms.reciprocal_read_as, "reciprocal_in_tf32", "an approximate reciprocal without a Newton step",
    lambda total: kernel.tf32(1 / total), **ROUNDED)
_faulty_denominator(_TOTAL, "sum_without_its_smallest_terms", "terms below 1e-4 are skipped as negligible",
    lambda exponentials: backend._row_sum(np.where(exponentials < 1e-4, 0, exponentials)), dtypes=WIDE)
_faulty_precision(forms.weights_read_as, "small_weights_dropped", "weights below 1e-5 are skipped as negligible",
    lambda weights: np.where(weights < 1e-05, 0, weights), dtypes=WIDE)
_faulty_precision(forms.inputs_changed, "inputs_in_float32",
    "float64 attention computed from float32 inputs: jax#37422's kind",
    lambda query, key, value: (kernel.float32(query), kernel.float32(key), kernel.float32(value)),
    at="raw_scores", dtypes=("float64",), diagnosis="accuracy-of-float32")
for _tile in (16, 64):
    _valued(_nan_from_a_first_tile, f"first_tile_of_{_tile}_without_a_key_gives_nan",
        "exp(-inf - -inf) of a first tile that is all masked: flashinfer#1178", _tile, at="weights")
_valued(forms.bias_read_as, "negative_zero_in_a_bias_forbids",
    "structure: a bias is compared by its bits, and the sign bit alone is the least integer",
    lambda bias, scores: np.where((bias == 0) & np.signbit(bias), -np.inf, bias).astype(bias.dtype))
# Add what forbids a second time: the least finite number becomes minus infinity.
_valued(forms.bias_read_as, "least_finite_bias_added_twice",
    "finfo.min + finfo.min is minus infinity: Automodel#2658, transformers#31303",
    lambda bias, scores: np.where(bias <= np.finfo(bias.dtype).min / 2, bias + bias, bias))
_valued(forms.bias_read_as, "least_finite_bias_forbids",
    "finfo.min is taken for minus infinity, and a row of it for an empty one: pytorch#109517's kind",
    lambda bias, scores: np.where(bias <= np.finfo(bias.dtype).min / 2, -np.inf, bias).astype(bias.dtype))
# Take a row whose scores are all zero for padding.
_valued(forms.averaged, "rows_of_zero_scores_taken_for_padding",
    "structure: a query of zeros is padding, and its output is not computed",
    lambda logits, weights, value: np.where((np.where(np.isneginf(logits), 0, logits) == 0).all(axis=-1,
        keepdims=True) & (logits.shape[-1] > 1), 0, weights @ value).astype(value.dtype),
    at="context")
# Take keys whose scores are zero for every query for padding.
mutant("special values", _by_unmasked, "zero_keys_taken_for_padding",
    "structure: a key of zeros is padding, and forbidden",
    lambda logits, unmasked: np.where((unmasked == 0).all(axis=-2, keepdims=True) & ~(unmasked == 0).all(axis=(-1, -2),
        keepdims=True), -np.inf, logits),
    at="weights", dtypes=("float32",))
_valued("attention._weighted_sum", "nan_in_a_query_hidden", "a query that holds NaN gives zeros: pytorch#141128",
    lambda weights, value: np.asarray(np.nan_to_num(weights) @ value), at="context")
# fmt: on
