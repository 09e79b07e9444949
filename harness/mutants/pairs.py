"""Faults of two options together: one is dropped, or read in another way, where the other is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from attncheck.backends.contract import Stages
from attncheck.mutants.mask_steps import ALLOWED, MaskRequest, add_bias, distance, within_lengths, without_a_key
from attncheck.mutants.mutant import KERNELS, Mutant
from attncheck.mutants.rounding import Array
from attncheck.mutants.steps import cap, times
from attncheck.mutants.variant import Variant

Asked = Callable[[MaskRequest], bool]


def has_groups(request: MaskRequest) -> bool:
    """Whether query heads share heads of keys and values."""
    return request.kv_heads not in (0, request.scores.shape[1])


def _has(name: str) -> Asked:
    return lambda request: getattr(request, name) is not None


_has_bias, _has_mask, _has_window = _has("bias"), _has("mask"), _has("window")
_has_lengths, _has_softcap = _has("key_lengths"), _has("softcap")


def _is_causal(request: MaskRequest) -> bool:
    return request.is_causal


def _has_past(request: MaskRequest) -> bool:
    return request.past > 0


def _neutral(option: str) -> dict[str, Any]:
    return {option: False if option == "is_causal" else None}


_DIAGNOSES = {
    "is_causal": ("causality-ignored",),
    "window": ("window-ignored",),
    "mask": ("mask-ignored", "query-mask-ignored"),
    "key_lengths": ("key-lengths-ignored",),
}


def _dropped(option: str, other: str, is_asked: Asked, defect: str) -> Mutant:
    """Do as if a rule were not given where another option is."""

    def allowed(request: MaskRequest) -> Array:
        return ALLOWED(replace(request, **_neutral(option)) if is_asked(request) else request)

    name = f"{option.removeprefix('is_')}_dropped_with_{other}"
    return _pair(name, defect, Variant(allowed=allowed), "masked", *_DIAGNOSES[option])


def _bias_dropped(other: str, is_asked: Asked, defect: str) -> Mutant:
    backend = Variant(add_bias=lambda request: request.scores if is_asked(request) else add_bias(request))
    return _pair(f"bias_dropped_with_{other}", defect, backend, "biased", "bias-ignored")


def _softcap_dropped(other: str, is_asked: Asked, defect: str) -> Mutant:
    """Take the scores before the cap: a path that has what the other option asks for, and no cap."""

    def uncapped(logits: Array, request: MaskRequest) -> Array:
        if request.softcap is None or request.uncapped is None or not is_asked(request):
            return without_a_key(logits, request)
        return without_a_key(np.asarray(logits - request.scores + request.uncapped), request)

    backend = Variant(without_a_key=uncapped)
    return _pair(f"softcap_dropped_with_{other}", defect, backend, "weights", "softcap-ignored")


def _scaled_again(stages: Stages, softcap: float, scale: float) -> Array:
    return cap({"scores": times(stages["scores"], scale)}, softcap, scale)


def _bias_of_key_heads(request: MaskRequest) -> Array:
    """Read the bias of query head h at the place of its head of keys."""
    bias, heads = request.bias, request.scores.shape[1]
    if bias is None or not has_groups(request) or bias.shape[1] != heads:
        return add_bias(request)
    shared = bias[:, np.arange(heads) // (heads // request.kv_heads)]
    return add_bias(replace(request, bias=shared))


def _with_batch_stride(request: MaskRequest) -> Array:
    """Read the mask of batch entry b and head h at h B + b, where it differs between both."""
    mask, (batch, heads) = request.mask, request.scores.shape[:2]
    if mask is None or mask.shape[:2] != (batch, heads):
        return ALLOWED(request)
    strided = mask.reshape(heads, batch, *mask.shape[2:]).swapaxes(0, 1)
    return ALLOWED(replace(request, mask=strided))


def _head_with_batch_stride(request: MaskRequest) -> Array:
    """Read the mask of head h, which all batch entries share, one head further in each of them."""
    mask, (batch, heads) = request.mask, request.scores.shape[:2]
    if mask is None or mask.shape[:2] != (1, heads):
        return ALLOWED(request)
    head = (np.arange(heads) + np.arange(batch)[:, np.newaxis]) % heads
    return ALLOWED(replace(request, mask=mask[0][head]))


def _own_corner(request: MaskRequest) -> Array:
    """Return j - i as it is where the last query stands at each entry's last key: (B, 1, Lq, T)."""
    lengths, queries = request.key_lengths, request.scores.shape[-2]
    assert lengths is not None
    offset = (lengths - queries)[:, np.newaxis, np.newaxis, np.newaxis]
    return np.asarray(distance(request) - offset)


def _causal_by_lengths(request: MaskRequest) -> Array:
    if not request.is_causal or request.key_lengths is None:
        return ALLOWED(request)
    return np.asarray(ALLOWED(replace(request, is_causal=False)) & (_own_corner(request) <= 0))


def _window_by_lengths(request: MaskRequest) -> Array:
    if request.window is None or request.key_lengths is None:
        return ALLOWED(request)
    behind, (left, right) = _own_corner(request), request.window
    within = np.ones_like(behind, dtype=bool)
    within &= True if left is None else behind >= -left
    within &= True if right is None else behind <= right
    return np.asarray(ALLOWED(replace(request, window=None)) & within)


def _lengths_behind_the_past(request: MaskRequest, lengths: Array) -> Array:
    return within_lengths(request, lengths + request.past)


def _bias_scaled_when_causal(request: MaskRequest) -> Array:
    if request.bias is None or not request.is_causal:
        return add_bias(request)
    scaled = (request.bias * request.scale).astype(request.bias.dtype)
    return add_bias(replace(request, bias=scaled))


def _bias_in_the_corner(request: MaskRequest) -> Array:
    """Read a bias for each distance from the other corner where the window is given."""
    bias = request.bias
    if bias is None or request.window is None or bias.shape[-1] == 1:
        return add_bias(request)
    return add_bias(replace(request, bias=np.roll(bias, 1, axis=-1)))


def _pair(name: str, defect: str, backend: Variant, first_wrong_stage: str, *diagnosis: str) -> Mutant:
    return Mutant(name, "pairs", defect, backend, first_wrong_stage, KERNELS, diagnosis)


MUTANTS = (
    _dropped("is_causal", "a_softcap", _has_softcap, "the path with a cap forgets causality: onnxruntime#28379's kind"),
    _dropped("is_causal", "groups", has_groups, "a kernel for groups knows no causality: pytorch#193893's kind"),
    _dropped("is_causal", "key_lengths", _has_lengths, "lengths end causality: onnxruntime#14363's kind"),
    _dropped("window", "groups", has_groups, "a kernel for groups knows no window: sglang#30050's kind"),
    _dropped("window", "a_bias", _has_bias, "a bias takes a path without windows: jax#32300's kind"),
    _dropped("window", "a_softcap", _has_softcap, "a cap takes a path without windows: sglang#30050's kind"),
    _dropped("mask", "groups", has_groups, "a kernel for groups reads no mask: pytorch#193893's kind"),
    _dropped("mask", "a_softcap", _has_softcap, "the mask is lost behind the cap: onnxruntime#28379's kind"),
    _dropped("mask", "a_window", _has_window, "the window takes the mask's place: transformers#39408's kind"),
    _dropped("key_lengths", "a_softcap", _has_softcap, "lengths are lost behind the cap: onnxruntime#28379"),
    _dropped("key_lengths", "groups", has_groups, "a kernel for groups reads no lengths: jax#23349's kind"),
    _dropped("key_lengths", "a_bias", _has_bias, "a bias takes a path without lengths: jax#23349's kind"),
    _dropped("key_lengths", "a_window", _has_window, "the window ends behind the padding: jax#23349's kind"),
    _bias_dropped("groups", has_groups, "a kernel for groups adds no bias: pytorch#193893's kind"),
    _bias_dropped("a_window", _has_window, "a window takes a path without a bias: jax#32300's kind"),
    _bias_dropped("key_lengths", _has_lengths, "lengths take the place of the bias: jax#23349's kind"),
    _bias_dropped("a_softcap", _has_softcap, "a cap takes a path without a bias: vllm#7425's kind"),
    _bias_dropped("a_past", _has_past, "a cache takes a path without a bias: transformers#30437's kind"),
    _softcap_dropped("groups", has_groups, "a kernel for groups knows no cap: sgl-kernel-xpu#491's kind"),
    _softcap_dropped("a_window", _has_window, "a window takes a path without a cap: vllm-metal#666's kind"),
    _softcap_dropped("key_lengths", _has_lengths, "lengths take a path without a cap: onnxruntime#28379's kind"),
    _softcap_dropped("a_past", _has_past, "decoding from a cache knows no cap: vllm#7425's kind"),
    _pair(
        "scale_applied_twice_with_a_softcap",
        "structure: the scale is part of the cap's argument, and applied once more",
        Variant(cap=_scaled_again),
        "capped",
        "scale-twice",
    ),
    _pair(
        "bias_of_query_heads_read_by_key_heads",
        "structure: one pointer for all that belongs to a head of keys",
        Variant(add_bias=_bias_of_key_heads),
        "biased",
    ),
    _pair(
        "mask_of_each_batch_and_head_read_across",
        "(B, H) read as (H, B): lighthouse#77, FuxiCTR#130",
        Variant(allowed=_with_batch_stride),
        "masked",
    ),
    _pair(
        "mask_per_head_read_with_a_batch_stride",
        "a shared mask moves on with the batch: graph-transformer-pytorch#2's kind",
        Variant(allowed=_head_with_batch_stride),
        "masked",
    ),
    _pair(
        "causal_at_the_last_key_of_each_length",
        "causality counts from each entry's last key: flash-attention#1778's kind",
        Variant(allowed=_causal_by_lengths),
        "masked",
        "aligned-bottom-right",
    ),
    _pair(
        "window_at_the_last_key_of_each_length",
        "the window counts from each entry's last key: flash-attention#1778's kind",
        Variant(allowed=_window_by_lengths),
        "masked",
        "aligned-bottom-right",
    ),
    _pair(
        "key_lengths_counted_from_behind_the_past",
        "lengths of the new keys for those of all: vllm#30887's kind",
        Variant(allowed=replace(ALLOWED, lengths=_lengths_behind_the_past)),
        "masked",
    ),
    _pair(
        "bias_scaled_when_causal",
        "the scale is applied to the sum on the causal path: TransformerEngine#236's kind",
        Variant(add_bias=_bias_scaled_when_causal),
        "biased",
        "bias-scaled",
    ),
    _pair(
        "bias_one_key_late_in_a_window",
        "structure: the offset of a window's first key is added to the bias, too",
        Variant(add_bias=_bias_in_the_corner),
        "biased",
    ),
)
