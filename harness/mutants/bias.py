"""Faults of the additive bias."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from attncheck.mutants import rounding
from attncheck.mutants.mask_steps import MaskRequest, add_bias
from attncheck.mutants.mutant import WIDE, Mutant
from attncheck.mutants.rounding import Array
from attncheck.mutants.variant import Variant


def _changed(change: Callable[[Array, MaskRequest], Array]) -> Variant:
    """Change the bias before it is added."""

    def add(request: MaskRequest) -> Array:
        assert request.bias is not None
        return add_bias(replace(request, bias=change(request.bias, request)))

    return Variant(add_bias=add)


def _ignored_if(unwanted: Callable[[MaskRequest], bool]) -> Variant:
    return Variant(add_bias=lambda request: request.scores if unwanted(request) else add_bias(request))


def _of_batch_for_heads(bias: Array, request: MaskRequest) -> Array:
    batch, heads = request.scores.shape[:2]
    per_head = bias.ndim == 4 and bias.shape[0] == 1 and bias.shape[1] == heads
    return bias.swapaxes(0, 1) if per_head and batch == heads else bias


def _finite_fill_then_bias(biased: Array, allowed: Array, request: MaskRequest) -> Array:
    bias = np.zeros((), biased.dtype) if request.bias is None else request.bias
    return np.where(allowed, biased, np.asarray(-1e4, biased.dtype) + bias)


MUTANTS = (
    Mutant(
        "bias_ignored",
        "bias",
        "the argument has no effect: jax#32242's forward",
        _ignored_if(lambda request: True),
        "biased",
        diagnosis=("bias-ignored",),
    ),
    Mutant(
        "bias_negated",
        "bias",
        "sign inverted: attention-gym#86 (ALiBi)",
        _changed(lambda bias, request: -bias),
        "biased",
        diagnosis=("bias-negated",),
    ),
    Mutant(
        "bias_scaled_with_scores",
        "bias",
        "(q k + b) scale for q k scale + b: TransformerEngine#236",
        _changed(lambda bias, request: bias * request.scale),
        "biased",
        diagnosis=("bias-scaled",),
    ),
    Mutant(
        "bias_in_the_wrong_base",
        "bias",
        "an exp2 kernel forgot log2(e) on the bias: segment-anything-fast#71",
        _changed(lambda bias, request: bias * math.log(2)),
        "biased",
        diagnosis=("bias-times-ln2",),
    ),
    Mutant(
        "bias_in_bfloat16",
        "bias",
        "ALiBi's distances in 16 bits: vllm#945",
        _changed(lambda bias, request: rounding.bfloat16(bias)),
        "biased",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "bias_added_twice",
        "bias",
        "added by the kernel and by its caller",
        _changed(lambda bias, request: bias + bias),
        "biased",
        diagnosis=("bias-twice",),
    ),
    Mutant(
        "bias_off_by_one_key",
        "bias",
        "ALiBi's distance off by one: vllm#945",
        _changed(lambda bias, request: np.roll(bias, 1, axis=-1)),
        "biased",
    ),
    Mutant(
        "bias_of_the_first_head",
        "bias",
        "a bias per head broadcast from head 0: jax#30593's kind",
        _changed(lambda bias, request: bias[:, :1] if bias.ndim == 4 else bias),
        "biased",
        diagnosis=("bias-of-first-head",),
    ),
    Mutant(
        "bias_of_heads_taken_for_batch",
        "bias",
        "(H, Lq, Lk) read as (B, Lq, Lk) where B == H: mlx-lm#1903, onnx#8108",
        _changed(_of_batch_for_heads),
        "biased",
    ),
    Mutant(
        "bias_dropped_when_a_mask_is_given",
        "bias",
        "only one of mask and bias is used: onnxruntime#14363's kind",
        _ignored_if(lambda request: request.mask is not None),
        "biased",
        diagnosis=("bias-ignored",),
    ),
    Mutant(
        "bias_added_after_a_finite_mask",
        "bias",
        "-1e4 first, then a bias that can lift it: Automodel#2658's planes",
        Variant(fill=_finite_fill_then_bias),
        "masked",
    ),
)
