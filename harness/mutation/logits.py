"""Faults of softcap, bias and sinks: where they stand among scale, mask and softmax, and what they do there."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from attncheck.backends.contract import Stages
from attncheck.backends.numpy_backend import _cap, _scale_of, _softmax_with_sinks, dot_scores
from attncheck.mutation import arithmetic
from attncheck.mutation.arithmetic import Array
from attncheck.mutation.backward_forms import gradients_read_as
from attncheck.mutation.forward_forms import in_attention, sinks_read_as
from attncheck.mutation.mask_forms import bias_added, bias_dropped, bias_read_as, filled
from attncheck.mutation.mutant import ACCURACY_OF_16_BITS, WIDE, mutant
from attncheck.mutation.variant import Call, Steps, numpy_with

_faulty_softcap = partial(mutant, "softcap", at="capped")
_faulty_bias = partial(mutant, "bias", at="biased")


@_faulty_softcap(
    "dot_scores", at="capped", defect="the cap bounds raw scores: vllm#7425's kind", diagnosis="softcap-of-raw-scores"
)
def softcap_before_the_scale(
    query: Array, key: Array, *, scale: float | None = None, softcap: float | None = None
) -> Stages:
    stages = dot_scores(query, key, scale=scale)
    if softcap is None:
        return stages
    factor = _scale_of(query, scale)
    raw = np.divide(stages["scores"], factor) if factor else stages["scores"]
    return stages | {"capped": _cap(raw, softcap) * factor}


def _tanh(tanh: Callable[[Array], Array]) -> Steps:
    """Use another hyperbolic tangent."""
    return {"_cap.np": numpy_with(tanh=tanh)}


_faulty_sinks = partial(mutant, "sinks", at="weights")


@_faulty_sinks(
    in_attention,
    at="weights",
    defect="query heads of a group as rows of one tile read the sink of the tile: sgl-kernel-xpu#254",
    diagnosis="sinks-by-key-heads",
)
def sinks_read_by_key_heads(call: Call) -> Steps:
    group = call.query.shape[1] // call.key.shape[1]
    return sinks_read_as(lambda sinks: sinks[np.arange(len(sinks)) // group])


@_faulty_sinks(
    gradients_read_as,
    at="grad_sinks",
    defect="no gradient for the sink: flash-attention#1973",
    diagnosis="gradient-of-sinks-zero",
)
def sinks_without_a_gradient(gradients: Stages) -> Stages:
    if "grad_sinks" in gradients:
        gradients["grad_sinks"] = np.zeros_like(gradients["grad_sinks"])
    return gradients


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
_faulty_softcap("_cap", "softcap_ignored", "the argument is not passed on: vllm#7425",
    lambda scores, softcap: scores, diagnosis="softcap-ignored")
_faulty_softcap(in_attention, "softcap_after_the_mask",
    "-inf becomes -cap, and masked keys get weights: onnx#7865, onnxruntime#28379",
    lambda call: {} if call.softcap is None else filled(lambda biased, allowed, masks: np.where(allowed, biased,
        np.asarray(-call.softcap, biased.dtype))),
    at="masked", diagnosis="softcap-after-masked")
_faulty_softcap(in_attention, "softcap_after_the_bias", "the bias is capped together with the scores: onnx#7865's kind",
    lambda call: {} if call.softcap is None else bias_added(lambda scores, bias, masks:
        _cap(np.asarray(call.stages["scores"] + bias), call.softcap)),
    at="biased", diagnosis="softcap-after-biased")
_faulty_softcap("_cap", "softcap_doubled", "2c tanh(s / 2c): a cap handed on in another unit",
    lambda scores, softcap: _cap(scores, 2 * softcap), diagnosis="softcap-doubled")
_faulty_softcap("_cap", "softcap_applied_twice", "by the caller and by the kernel",
    lambda scores, softcap: _cap(_cap(scores, softcap), softcap), diagnosis="softcap-twice")
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
    arithmetic.tanh_by_ratio)
_faulty_softcap(_tanh, "softcap_by_pade", "a rational approximation of tanh", arithmetic.tanh_by_pade, dtypes=WIDE)
_faulty_softcap(_tanh, "softcap_in_bfloat16", "tanh evaluated in bfloat16",
    lambda argument: arithmetic.bfloat16(np.tanh(arithmetic.bfloat16(argument))), dtypes=WIDE,
    diagnosis=ACCURACY_OF_16_BITS)
_faulty_softcap(_tanh, "softcap_tanh_in_float16", "tanh.approx: eleven bits",
    lambda argument: arithmetic.float16(np.tanh(argument)), dtypes=WIDE, diagnosis=ACCURACY_OF_16_BITS)
_faulty_softcap(in_attention, "softcap_dropped_when_a_bias_is_given", "a bias takes another path, which knows no cap",
    lambda call: bias_added(lambda scores, bias, masks: np.asarray(call.stages["scores"] + bias)), at="biased",
    diagnosis="softcap-ignored")
_faulty_softcap(in_attention, "softcap_dropped_when_something_is_masked",
    "a mask takes another path, which knows no cap",
    lambda call: {} if call.bias is not None else filled(lambda biased, allowed, masks: np.where(allowed,
        call.stages["scores"], -np.inf)),
    at="masked", diagnosis=("softcap-ignored", "fill-minus-infinity"))
_faulty_bias(bias_dropped, "bias_ignored", "the argument has no effect: jax#32242's forward",
    lambda masks: True, diagnosis="bias-ignored")
_faulty_bias(bias_read_as, "bias_negated", "sign inverted: attention-gym#86 (ALiBi)",
    lambda bias, scores: -bias, diagnosis="bias-negated")
_faulty_bias(in_attention, "bias_scaled_with_scores", "(q k + b) scale for q k scale + b: TransformerEngine#236",
    lambda call: bias_read_as(lambda bias, scores: np.asarray(bias * call.factor)), diagnosis="bias-scaled")
_faulty_bias(bias_read_as, "bias_in_the_wrong_base",
    "an exp2 kernel forgot log2(e) on the bias: segment-anything-fast#71",
    lambda bias, scores: np.asarray(bias * math.log(2)), diagnosis="bias-times-ln2")
_faulty_bias(bias_read_as, "bias_in_bfloat16", "ALiBi's distances in 16 bits: vllm#945",
    lambda bias, scores: arithmetic.bfloat16(bias), dtypes=WIDE, diagnosis=ACCURACY_OF_16_BITS)
_faulty_bias(bias_read_as, "bias_added_twice", "added by the kernel and by its caller",
    lambda bias, scores: np.asarray(bias + bias), diagnosis="bias-twice")
_faulty_bias(bias_read_as, "bias_off_by_one_key", "ALiBi's distance off by one: vllm#945",
    lambda bias, scores: np.roll(bias, 1, axis=-1), diagnosis="bias-one-key-late")
_faulty_bias(bias_read_as, "bias_of_the_first_head", "a bias per head broadcast from head 0: jax#30593's kind",
    lambda bias, scores: bias[:, :1] if bias.ndim == 4 else bias, diagnosis="bias-of-first-head")
_faulty_bias(bias_read_as, "bias_of_heads_taken_for_batch",
    "(H, Lq, Lk) read as (B, Lq, Lk) where B == H: mlx-lm#1903, onnx#8108",
    lambda bias, scores: bias.swapaxes(0, 1) if (bias.ndim == 4 and bias.shape[0] == 1
        and (bias.shape[1] == scores.shape[1])) and scores.shape[0] == scores.shape[1] else bias,
    diagnosis="bias-of-batch-for-heads")
_faulty_bias(bias_dropped, "bias_dropped_when_a_mask_is_given",
    "only one of mask and bias is used: onnxruntime#14363's kind",
    lambda masks: masks["mask"] is not None, diagnosis="bias-ignored")
_faulty_bias(filled, "bias_added_after_a_finite_mask",
    "-1e4 first, then a bias that can lift it: Automodel#2658's planes",
    lambda biased, allowed, masks: np.where(allowed, biased, np.asarray(-10000.0, biased.dtype) + (np.zeros((),
        biased.dtype) if masks["bias"] is None else masks["bias"])),
    at="masked", diagnosis="masked-at-minus-1e4")
_faulty_sinks("_softmax_with_sinks", "sinks_ignored",
    "a kernel that has the code and never gets the argument: vllm-metal#212",
    lambda scores, sinks, empty_rows: _softmax_with_sinks(scores, None, empty_rows), diagnosis="sinks-ignored")
_faulty_sinks(sinks_read_as, "sinks_counted_twice",
    "each of two splits of the keys counts the sink: rocm-libraries#12229",
    lambda sinks: np.asarray(sinks + math.log(2)), diagnosis="sinks-twice")
_faulty_sinks(in_attention, "sinks_scaled_with_scores",
    "the sink is scaled as the scores are: rocm-libraries#12229's kind",
    lambda call: sinks_read_as(lambda sinks: np.asarray(sinks * call.factor)), diagnosis="sinks-scaled")
