"""Faults of softcap, bias and sinks: where they stand among scale, mask and softmax, and what they do there."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from attncheck.backends.contract import EmptyRows, Stages
from attncheck.backends.numpy_backend import _cap, _scale_of, _softmax_with_sinks, dot_scores
from attncheck.mutation import arithmetic
from attncheck.mutation.arithmetic import Array
from attncheck.mutation.backward_forms import gradients_read_as
from attncheck.mutation.forward_forms import in_attention, sinks_read_as
from attncheck.mutation.mask_forms import Masks, bias_added, bias_dropped, bias_read_as, filled
from attncheck.mutation.mutant import ACCURACY_OF_16_BITS, WIDE, mutant
from attncheck.mutation.variant import Call, Steps, numpy_with

_faulty_softcap = partial(mutant, "softcap")
_faulty_bias = partial(mutant, "bias")


@_faulty_softcap("_cap", at="capped", defect="the argument is not passed on: vllm#7425", diagnosis="softcap-ignored")
def softcap_ignored(scores: Array, softcap: float) -> Array:
    return scores


@_faulty_softcap(
    in_attention,
    at="masked",
    defect="-inf becomes -cap, and masked keys get weights: onnx#7865, onnxruntime#28379",
    diagnosis="softcap-after-masked",
)
def softcap_after_the_mask(call: Call) -> Steps:
    def minus_cap(biased: Array, allowed: Array, masks: Masks) -> Array:
        return np.where(allowed, biased, np.asarray(-call.softcap, biased.dtype))

    return {} if call.softcap is None else filled(minus_cap)


@_faulty_softcap(
    in_attention,
    at="biased",
    defect="the bias is capped together with the scores: onnx#7865's kind",
    diagnosis="softcap-after-biased",
)
def softcap_after_the_bias(call: Call) -> Steps:
    if call.softcap is None:
        return {}
    return bias_added(lambda scores, bias, masks: _cap(np.asarray(call.stages["scores"] + bias), call.softcap))


@_faulty_softcap("dot_scores", at="capped", defect="the cap bounds raw scores: vllm#7425's kind")
def softcap_before_the_scale(
    query: Array, key: Array, *, scale: float | None = None, softcap: float | None = None
) -> Stages:
    stages = dot_scores(query, key, scale=scale)
    if softcap is None:
        return stages
    factor = _scale_of(query, scale)
    raw = np.divide(stages["scores"], factor) if factor else stages["scores"]
    return stages | {"capped": _cap(raw, softcap) * factor}


@_faulty_softcap("_cap", at="capped", defect="2c tanh(s / 2c): a cap handed on in another unit")
def softcap_doubled(scores: Array, softcap: float) -> Array:
    return _cap(scores, 2 * softcap)


@_faulty_softcap("_cap", at="capped", defect="by the caller and by the kernel")
def softcap_applied_twice(scores: Array, softcap: float) -> Array:
    return _cap(_cap(scores, softcap), softcap)


@_faulty_softcap("_cap", at="capped", defect="tanh(s / c) without the factor c")
def softcap_not_multiplied_back(scores: Array, softcap: float) -> Array:
    return np.asarray(np.tanh(scores / softcap))


@_faulty_softcap("_cap", at="capped", defect="c tanh(s) for c tanh(s / c)")
def softcap_not_divided_by(scores: Array, softcap: float) -> Array:
    return np.asarray(softcap * np.tanh(scores))


@_faulty_softcap("_cap", at="capped", defect="a clamp at the cap for a hyperbolic tangent")
def softcap_clips(scores: Array, softcap: float) -> Array:
    return np.clip(scores, -softcap, softcap)


@_faulty_softcap("_cap", at="capped", defect="c s / (c + |s|), another bounded function")
def softcap_by_softsign(scores: Array, softcap: float) -> Array:
    return np.asarray(scores * softcap / (softcap + np.abs(scores)))


def _tanh(tanh: Callable[[Array], Array]) -> Steps:
    """Use another hyperbolic tangent."""
    return {"_cap.np": numpy_with(tanh=tanh)}


_faulty_softcap(
    _tanh,
    at="capped",
    defect="(e^2x - 1) / (e^2x + 1) overflows: vllm#56578",
    name="softcap_by_a_ratio_of_exponentials",
)(arithmetic.tanh_by_ratio)
_faulty_softcap(_tanh, at="capped", defect="a rational approximation of tanh", dtypes=WIDE, name="softcap_by_pade")(
    arithmetic.tanh_by_pade
)


@_faulty_softcap(_tanh, at="capped", defect="tanh evaluated in bfloat16", dtypes=WIDE, diagnosis=ACCURACY_OF_16_BITS)
def softcap_in_bfloat16(argument: Array) -> Array:
    return arithmetic.bfloat16(np.tanh(arithmetic.bfloat16(argument)))


@_faulty_softcap(_tanh, at="capped", defect="tanh.approx: eleven bits", dtypes=WIDE, diagnosis=ACCURACY_OF_16_BITS)
def softcap_tanh_in_float16(argument: Array) -> Array:
    return arithmetic.float16(np.tanh(argument))


@_faulty_softcap(
    in_attention, at="biased", defect="a bias takes another path, which knows no cap", diagnosis="softcap-ignored"
)
def softcap_dropped_when_a_bias_is_given(call: Call) -> Steps:
    return bias_added(lambda scores, bias, masks: np.asarray(call.stages["scores"] + bias))


@_faulty_softcap(
    in_attention, at="masked", defect="a mask takes another path, which knows no cap", diagnosis="softcap-ignored"
)
def softcap_dropped_when_something_is_masked(call: Call) -> Steps:
    def uncapped(biased: Array, allowed: Array, masks: Masks) -> Array:
        return np.where(allowed, call.stages["scores"], -np.inf)

    return {} if call.bias is not None else filled(uncapped)


@_faulty_bias(
    bias_dropped, at="biased", defect="the argument has no effect: jax#32242's forward", diagnosis="bias-ignored"
)
def bias_ignored(masks: Masks) -> bool:
    return True


@_faulty_bias(bias_read_as, at="biased", defect="sign inverted: attention-gym#86 (ALiBi)", diagnosis="bias-negated")
def bias_negated(bias: Array, scores: Array) -> Array:
    return -bias


@_faulty_bias(
    in_attention,
    at="biased",
    defect="(q k + b) scale for q k scale + b: TransformerEngine#236",
    diagnosis="bias-scaled",
)
def bias_scaled_with_scores(call: Call) -> Steps:
    return bias_read_as(lambda bias, scores: np.asarray(bias * call.factor))


@_faulty_bias(
    bias_read_as,
    at="biased",
    defect="an exp2 kernel forgot log2(e) on the bias: segment-anything-fast#71",
    diagnosis="bias-times-ln2",
)
def bias_in_the_wrong_base(bias: Array, scores: Array) -> Array:
    return np.asarray(bias * math.log(2))


@_faulty_bias(
    bias_read_as,
    at="biased",
    defect="ALiBi's distances in 16 bits: vllm#945",
    dtypes=WIDE,
    diagnosis=ACCURACY_OF_16_BITS,
)
def bias_in_bfloat16(bias: Array, scores: Array) -> Array:
    return arithmetic.bfloat16(bias)


@_faulty_bias(bias_read_as, at="biased", defect="added by the kernel and by its caller", diagnosis="bias-twice")
def bias_added_twice(bias: Array, scores: Array) -> Array:
    return np.asarray(bias + bias)


@_faulty_bias(bias_read_as, at="biased", defect="ALiBi's distance off by one: vllm#945")
def bias_off_by_one_key(bias: Array, scores: Array) -> Array:
    return np.roll(bias, 1, axis=-1)


@_faulty_bias(
    bias_read_as,
    at="biased",
    defect="a bias per head broadcast from head 0: jax#30593's kind",
    diagnosis="bias-of-first-head",
)
def bias_of_the_first_head(bias: Array, scores: Array) -> Array:
    return bias[:, :1] if bias.ndim == 4 else bias


@_faulty_bias(bias_read_as, at="biased", defect="(H, Lq, Lk) read as (B, Lq, Lk) where B == H: mlx-lm#1903, onnx#8108")
def bias_of_heads_taken_for_batch(bias: Array, scores: Array) -> Array:
    batch, heads = scores.shape[:2]
    per_head = bias.ndim == 4 and bias.shape[0] == 1 and bias.shape[1] == heads
    return bias.swapaxes(0, 1) if per_head and batch == heads else bias


@_faulty_bias(
    bias_dropped,
    at="biased",
    defect="only one of mask and bias is used: onnxruntime#14363's kind",
    diagnosis="bias-ignored",
)
def bias_dropped_when_a_mask_is_given(masks: Masks) -> bool:
    return masks["mask"] is not None


@_faulty_bias(filled, at="masked", defect="-1e4 first, then a bias that can lift it: Automodel#2658's planes")
def bias_added_after_a_finite_mask(biased: Array, allowed: Array, masks: Masks) -> Array:
    bias = np.zeros((), biased.dtype) if masks["bias"] is None else masks["bias"]
    return np.where(allowed, biased, np.asarray(-1e4, biased.dtype) + bias)


_faulty_sinks = partial(mutant, "sinks")


@_faulty_sinks(
    "_softmax_with_sinks",
    at="weights",
    defect="a kernel that has the code and never gets the argument: vllm-metal#212",
    diagnosis="sinks-ignored",
)
def sinks_ignored(scores: Array, sinks: Array | None, empty_rows: EmptyRows) -> Stages:
    return _softmax_with_sinks(scores, None, empty_rows)


@_faulty_sinks(
    sinks_read_as, at="weights", defect="each of two splits of the keys counts the sink: rocm-libraries#12229"
)
def sinks_counted_twice(sinks: Array) -> Array:
    return np.asarray(sinks + math.log(2))


@_faulty_sinks(in_attention, at="weights", defect="the sink is scaled as the scores are: rocm-libraries#12229's kind")
def sinks_scaled_with_scores(call: Call) -> Steps:
    return sinks_read_as(lambda sinks: np.asarray(sinks * call.factor))


@_faulty_sinks(
    in_attention,
    at="weights",
    defect="query heads of a group as rows of one tile read the sink of the tile: sgl-kernel-xpu#254",
)
def sinks_read_by_key_heads(call: Call) -> Steps:
    group = call.query.shape[1] // call.key.shape[1]
    return sinks_read_as(lambda sinks: sinks[np.arange(len(sinks)) // group])


@_faulty_sinks(gradients_read_as, at="grad_sinks", defect="no gradient for the sink: flash-attention#1973")
def sinks_without_a_gradient(gradients: Stages) -> Stages:
    if "grad_sinks" in gradients:
        gradients["grad_sinks"] = np.zeros_like(gradients["grad_sinks"])
    return gradients
