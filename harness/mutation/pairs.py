"""Faults of two options together: one is dropped, or read in another way, where the other is given."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from attncheck.backends.contract import EmptyRows, Stages
from attncheck.backends.numpy_backend import _cap, _scale_of, _softmax_with_sinks, dot_scores
from attncheck.mutation.arithmetic import Array
from attncheck.mutation.forward_forms import (
    in_attention,
    where,
    with_groups,
    with_lengths,
    with_past,
    with_softcap,
    with_window,
)
from attncheck.mutation.mask_forms import (
    Masks,
    bias_added,
    bias_dropped,
    bias_read_as,
    both,
    distance,
    dropped,
    mask_read_as,
    masks_read_as,
)
from attncheck.mutation.mutant import KERNELS, mutant
from attncheck.mutation.variant import Call, Steps

_pair = partial(mutant, "pairs", dtypes=KERNELS, at="biased")


_CALLED_WITH = {"groups": with_groups, "a_softcap": with_softcap, "a_past": with_past}
"""What ``mask_scores`` is not told: only the whole call has it."""


def _given(option: str) -> Callable[[Masks], bool]:
    return lambda masks: masks[option] is not None


def _on_path(other: str, without: Callable[[Callable[[Masks], bool]], Steps]) -> Steps:
    """Do without something on the path that another option takes."""
    if other in _CALLED_WITH:
        return where(_CALLED_WITH[other], without(lambda masks: True))
    return without(_given(other.removeprefix("a_")))


_IGNORED = {
    "is_causal": ("causality-ignored",),
    "window": ("window-ignored",),
    "mask": ("mask-ignored", "query-mask-ignored"),
    "key_lengths": ("key-lengths-ignored",),
}
for _option, _other, _defect in (
    ("is_causal", "a_softcap", "the path with a cap forgets causality: onnxruntime#28379's kind"),
    ("is_causal", "groups", "a kernel for groups knows no causality: pytorch#193893's kind"),
    ("is_causal", "key_lengths", "lengths end causality: onnxruntime#14363's kind"),
    ("window", "groups", "a kernel for groups knows no window: sglang#30050's kind"),
    ("window", "a_bias", "a bias takes a path without windows: jax#32300's kind"),
    ("window", "a_softcap", "a cap takes a path without windows: sglang#30050's kind"),
    ("mask", "groups", "a kernel for groups reads no mask: pytorch#193893's kind"),
    ("mask", "a_softcap", "the mask is lost behind the cap: onnxruntime#28379's kind"),
    ("mask", "a_window", "the window takes the mask's place: transformers#39408's kind"),
    ("key_lengths", "a_softcap", "lengths are lost behind the cap: onnxruntime#28379"),
    ("key_lengths", "groups", "a kernel for groups reads no lengths: jax#23349's kind"),
    ("key_lengths", "a_bias", "a bias takes a path without lengths: jax#23349's kind"),
    ("key_lengths", "a_window", "the window ends behind the padding: jax#23349's kind"),
):
    _name = f"{_option.removeprefix('is_')}_dropped_with_{_other}"
    _steps = _on_path(_other, partial(dropped, _option))
    _pair(at="masked", defect=_defect, diagnosis=_IGNORED[_option], name=_name)(_steps)


for _other, _defect in (
    ("groups", "a kernel for groups adds no bias: pytorch#193893's kind"),
    ("a_window", "a window takes a path without a bias: jax#32300's kind"),
    ("key_lengths", "lengths take the place of the bias: jax#23349's kind"),
    ("a_softcap", "a cap takes a path without a bias: vllm#7425's kind"),
    ("a_past", "a cache takes a path without a bias: transformers#30437's kind"),
):
    _name, _steps = f"bias_dropped_with_{_other}", _on_path(_other, bias_dropped)
    _pair(at="biased", defect=_defect, diagnosis="bias-ignored", name=_name)(_steps)


def _softcap_dropped(is_asked: Callable[[Call], bool]) -> Steps:
    """Take the scores before the cap: a path that has what the other option asks for, and no cap."""

    def steps(call: Call) -> Steps:
        def uncapped(logits: Array, sinks: Array | None, empty_rows: EmptyRows) -> Stages:
            return _softmax_with_sinks(logits - call.scores + call.stages["scores"], sinks, empty_rows)

        return {"_softmax_with_sinks": uncapped} if call.softcap is not None and is_asked(call) else {}

    return in_attention(steps)


for _other, _is_asked, _defect in (
    ("groups", with_groups, "a kernel for groups knows no cap: sgl-kernel-xpu#491's kind"),
    ("a_window", with_window, "a window takes a path without a cap: vllm-metal#666's kind"),
    ("key_lengths", with_lengths, "lengths take a path without a cap: onnxruntime#28379's kind"),
    ("a_past", with_past, "decoding from a cache knows no cap: vllm#7425's kind"),
):
    _pair(
        _softcap_dropped,
        at="weights",
        defect=_defect,
        diagnosis="softcap-ignored",
        name=f"softcap_dropped_with_{_other}",
    )(_is_asked)


@_pair(
    "dot_scores",
    at="capped",
    defect="structure: the scale is part of the cap's argument, and applied once more",
    diagnosis="scale-twice",
)
def scale_applied_twice_with_a_softcap(
    query: Array, key: Array, *, scale: float | None = None, softcap: float | None = None
) -> Stages:
    stages = dot_scores(query, key, scale=scale)
    if softcap is None:
        return stages
    return stages | {"capped": _cap(stages["scores"] * _scale_of(query, scale), softcap)}


@_pair(
    in_attention,
    at="biased",
    defect="structure: one pointer for all that belongs to a head of keys",
    diagnosis="bias-by-key-heads",
)
def bias_of_query_heads_read_by_key_heads(call: Call) -> Steps:
    """Read the bias of query head h at the place of its head of keys."""
    heads, kv_heads = call.query.shape[1], call.key.shape[1]
    if call.bias is None or not call.has_groups or call.bias.shape[1] != heads:
        return {}
    return bias_read_as(lambda bias, scores: bias[:, np.arange(heads) // (heads // kv_heads)])


def _own_corner(scores: Array, lengths: Array) -> Array:
    """Return j - i as it is where the last query stands at each entry's last key: (B, 1, Lq, T)."""
    offset = (lengths - scores.shape[-2])[:, np.newaxis, np.newaxis, np.newaxis]
    return np.asarray(distance(scores) - offset)


@_pair(
    masks_read_as,
    at="masked",
    defect="the window counts from each entry's last key: flash-attention#1778's kind",
    diagnosis="aligned-bottom-right",
)
def window_at_the_last_key_of_each_length(scores: Array, masks: Masks) -> Masks:
    if masks["window"] is None or masks["key_lengths"] is None:
        return {}
    behind, (left, right) = _own_corner(scores, masks["key_lengths"]), masks["window"]
    within = np.ones_like(behind, dtype=bool)
    within &= True if left is None else behind >= -left
    within &= True if right is None else behind <= right
    return {"window": None, "mask": both(masks["mask"], within)}


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
# Read the mask of batch entry b and head h at h B + b, where it differs between both.
_pair(mask_read_as, "mask_of_each_batch_and_head_read_across", "(B, H) read as (H, B): lighthouse#77, FuxiCTR#130",
    lambda mask, scores: mask if mask.shape[:2] != (scores.shape[0], scores.shape[1])
        else mask.reshape(scores.shape[1], scores.shape[0], *mask.shape[2:]).swapaxes(0, 1),
    at="masked")
# Read the mask of head h, which all batch entries share, one head further in each of them.
_pair(mask_read_as, "mask_per_head_read_with_a_batch_stride",
    "a shared mask moves on with the batch: graph-transformer-pytorch#2's kind",
    lambda mask, scores: mask if mask.shape[:2] != (1, scores.shape[1])
        else np.asarray(mask[0][(np.arange(scores.shape[1]) + np.arange(scores.shape[0])[:,
        np.newaxis]) % scores.shape[1]]),
    at="masked")
_pair(masks_read_as, "causal_at_the_last_key_of_each_length",
    "causality counts from each entry's last key: flash-attention#1778's kind",
    lambda scores, masks: {} if not masks["is_causal"] or masks["key_lengths"] is None else {"is_causal": False,
        "mask": both(masks["mask"], _own_corner(scores, masks["key_lengths"]) <= 0)},
    at="masked", diagnosis="aligned-bottom-right")
_pair(in_attention, "bias_scaled_when_causal",
    "the scale is applied to the sum on the causal path: TransformerEngine#236's kind",
    lambda call: {} if not call.is_causal else bias_read_as(lambda bias, scores:
        (bias * call.factor).astype(bias.dtype)),
    diagnosis="bias-scaled")
# Read a bias for each distance from the other corner where the window is given.
_pair(bias_added, "bias_one_key_late_in_a_window",
    "structure: the offset of a window's first key is added to the bias, too",
    lambda scores, bias, masks: np.asarray(scores + (np.roll(bias, 1, axis=-1) if masks["window"] is not None
        and bias.shape[-1] != 1 else bias)))
