"""Faults of loops over keys, and of two options that are right alone and wrong together.

A block leaves something over or forgets it, or parts of the keys are merged wrongly. Decoding, one query against many
keys, and extending, several queries behind a past, have such loops of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np

from attncheck.backends import numpy_backend as backend
from attncheck.backends.contract import EmptyRows, Stages
from attncheck.mutation import forms
from attncheck.mutation.kernel import Array, bfloat16
from attncheck.mutation.mutant import ACCURACY_OF_16_BITS, KERNELS, WIDE, Call, Steps, mutant

_faulty_blocks = partial(mutant, "blocks", at="weights")


def _without_keys(first_dropped: Callable[[int], int]) -> Steps:
    """Never look at the keys from this one on."""

    def visible(logits: Array) -> Array:
        keys = logits.shape[-1]
        return np.where(np.arange(keys) < first_dropped(keys), logits, -np.inf)

    return forms.logits_read_as(visible)


def _online(online: forms.Online) -> Steps:
    return online.steps


_faulty_blocks(forms.outputs_read_as, "query_rows_beyond_a_multiple_of_16_zero",
    "the last tile of queries is not written: fla#892",
    lambda output: np.where(np.arange(output.shape[-2])[:, np.newaxis] < max(output.shape[-2] // 16, 1) * 16,
        output, 0), at="context")  # fmt: skip


_decoding = partial(mutant, "decoding", dtypes=KERNELS, at="masked")


def _is_decoding(scores: Array) -> bool:
    queries, keys = scores.shape[-2:]
    return bool(queries == 1 < keys)


def _dropped_in_decoding(option: str) -> Steps:
    """Do as if a rule had not been given where there is one query."""
    return forms.masks_read_as(lambda scores, masks: {option: None} if _is_decoding(scores) else {})


def _is_extending(call: Call) -> bool:
    return bool(call.past and call.query.shape[-2] > 1)


Merge = Callable[[Array, Array, Array], Array]
"""What each part counts: from its maximum, its sum and its log_sum_exp, the parts along the last axis."""


def _split(merge: Merge, *, parts: int = 4, is_asked: Callable[[Array], bool] = lambda logits: True) -> Steps:
    """Attend to parts of the keys and merge the averages as ``merge`` has it."""

    def average(logits: Array, weights: Array, value: Array) -> Array:
        keys = logits.shape[-1]
        if keys < 32 or not is_asked(logits):
            return np.asarray(weights @ value)
        edges = [keys * part // parts for part in range(parts + 1)]
        spans = [slice(*edge) for edge in pairwise(edges)]
        stages = [backend.softmax(logits[..., span]) for span in spans]
        averages = np.stack(
            [part["weights"] @ value[..., span, :] for part, span in zip(stages, spans, strict=True)], -1
        )
        statistics = np.stack([part["log_sum_exp"] for part in stages], -1)
        maxima = np.concatenate([backend._row_maximum(logits[..., span]) for span in spans], -1)
        shares = merge(maxima, np.exp(statistics - maxima), statistics)
        return np.asarray((averages * shares[..., np.newaxis, :]).sum(-1)).astype(logits.dtype)

    return forms.averaged(average)


def _shares(statistics: Array) -> Array:
    weights: Array = backend.softmax(statistics)["weights"]
    return weights


_merged = partial(_decoding, at="context", hidden=forms.NEVER_HELD)


@_merged(_split, defect="parts count by their maximum alone: sglang#40903's kind")
def splits_merged_by_their_maxima(maxima: Array, sums: Array, statistics: Array) -> Array:
    return _shares(maxima)


_merged(_split, "splits_merged_by_their_sums", "parts count by sums that belong to different maxima: gcnasm#21's kind",
    lambda maxima, sums, statistics: np.asarray(sums / sums.sum(-1, keepdims=True)))  # fmt: skip


_merged(_split, "splits_averaged", "structure: the merge forgets how much each part weighs",
    lambda maxima, sums, statistics: np.full_like(statistics, 1 / statistics.shape[-1]))  # fmt: skip


_merged(_split, "splits_merged_in_the_wrong_base",
    "log_sum_exp in base 2 is merged as one in base e: flashinfer#2113, sglang#35045",
    lambda maxima, sums, statistics: _shares(statistics / np.log(2).astype(statistics.dtype)))  # fmt: skip


_merged(_split, "last_split_lost", "structure: one split fewer is merged than there are",
    lambda maxima, sums, statistics: _shares(np.where(np.arange(statistics.shape[-1]) < statistics.shape[-1] - 1,
        statistics, -np.inf)))  # fmt: skip


@_merged(_split, defect="a part of which every key is masked: flashinfer#4051, #1178")
def empty_split_gives_nan(maxima: Array, sums: Array, statistics: Array) -> Array:
    """Multiply 0 with minus infinity where a part has no key, but some other one has."""
    is_lost = np.isneginf(statistics) & ~np.isneginf(backend._row_maximum(statistics))
    return np.where(is_lost, np.nan, _shares(statistics))


_merged(partial(_split, parts=7, is_asked=lambda logits: logits.shape[-2] == 1),
    "splits_of_one_query_merged_by_their_maxima", "the same in decoding alone: vllm#28840's kind",
    splits_merged_by_their_maxima)  # fmt: skip


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
_faulty_blocks(_without_keys, "last_key_dropped_unless_multiple_of_4",
    "a vectorised loop without its tail: SageAttention#376's kind",
    lambda keys: keys if keys % 4 == 0 or keys == 1 else keys - 1, diagnosis="last-key-dropped")
_faulty_blocks(_without_keys, "last_key_dropped_unless_multiple_of_16", "a tile of 16 without its tail",
    lambda keys: keys if keys % 16 == 0 or keys == 1 else keys - 1, diagnosis="last-key-dropped")
_faulty_blocks(_without_keys, "tail_dropped_after_blocks_of_32", "only whole tiles of 32 keys: FlagGems#898",
    lambda keys: keys - keys % 32 if keys > 32 else keys, diagnosis="last-key-dropped")
_faulty_blocks("dot_scores._dot", "width_beyond_a_multiple_of_8_dropped", "features in chunks of 8 without their tail",
    lambda query, key: backend._dot(*(each[..., : max(query.shape[-1] // 8 * 8, min(query.shape[-1], 8))]
        for each in (query, key))), at="raw_scores")
_faulty_blocks(_without_keys, "only_the_first_16_keys", "the loop over blocks runs once: pytorch#139462's kind",
    lambda keys: 16)
_faulty_blocks("_softmax_with_sinks._row_sum", "tail_counted_twice_in_the_sum",
    "the last tile overlaps the one before it",
    lambda exponentials: np.asarray(backend._row_sum(exponentials) + backend._row_sum(exponentials[...,
        exponentials.shape[-1] - exponentials.shape[-1] % 16 :] if exponentials.shape[-1] > 16 else exponentials[...,
        :0])))
_faulty_blocks(forms.maximum_read_as, "maximum_of_the_first_16_keys",
        "the maximum is not updated: overflow in later blocks",
    lambda logits: backend._row_maximum(logits[..., :16]))
_faulty_blocks(_online, "sum_not_rescaled_in_the_second_block", "tile maximum and running maximum mixed: gcnasm#21",
    forms.Online(16, rescales_sum=lambda block: block != 1), at="log_sum_exp", hidden=forms.NEVER_HELD)
_faulty_blocks(_online, "output_not_rescaled_in_the_second_block", "one rescale of the accumulator missed: gcnasm#21",
    forms.Online(16, rescales_output=lambda block: block != 1), at="context", hidden=forms.NEVER_HELD)
_faulty_blocks(_online, "output_never_rescaled", "no rescale of the accumulator at all",
    forms.Online(16, rescales_output=lambda block: False), at="context", hidden=forms.NEVER_HELD)
_faulty_blocks(_online, "output_kept_in_bfloat16_between_blocks",
    "the accumulator lives in the output's type: torch's backward",
    forms.Online(16, store=bfloat16), at="context", dtypes=WIDE, diagnosis=ACCURACY_OF_16_BITS, hidden=forms.NEVER_HELD)
_faulty_blocks(forms.scores_read_as, "scale_compounds_over_blocks",
    "qk_scale *= log2e inside the loop over keys: FlagGems#424",
    lambda scores: np.asarray(scores * (math.log2(math.e) ** (np.arange(scores.shape[-1]) // 16)).astype(scores.dtype)),
    at="scores")
_faulty_blocks(forms.values_read_as, "last_value_stale_where_lk_mod_32_is_1", "reads the row before: pytorch#191937",
    lambda value: np.concatenate([value[..., :-1, :], value[..., -2:-1, :]], axis=-2) if value.shape[-2] > 1
        and value.shape[-2] % 32 == 1 else value,
    at="context")
_decoding(_dropped_in_decoding, "mask_ignored_in_decoding",
    "a path for one query that knows no mask: onnxruntime#29020's kind",
    "mask", diagnosis=("mask-ignored", "query-mask-ignored"))
_decoding(_dropped_in_decoding, "key_lengths_ignored_in_decoding",
    "positions behind the current one are read: tt-metal#41215",
    "key_lengths", diagnosis="key-lengths-ignored")
_decoding(forms.bias_added, "bias_ignored_in_decoding",
        "a path for one query that knows no bias: onnxruntime#29020's kind",
    lambda scores, bias, masks: scores if _is_decoding(scores) else np.asarray(scores + bias), at="biased",
    diagnosis="bias-ignored")
_decoding(forms.inputs_changed, "first_batch_entry_for_all_in_decoding",
    "structure: the batch stride of the cache is left out where there is one query",
    lambda query, key, value: (query, key, value) if query.shape[-2] > 1 else (query, np.broadcast_to(key[:1],
        key.shape), np.broadcast_to(value[:1], value.shape)),
    at="raw_scores")
# Stack the heads of a group as rows of one query, in the order of the other axis.
_decoding(forms.inputs_changed, "heads_of_groups_stacked_across_in_decoding",
    "the heads of a group become rows of one tile, in the wrong order: pytorch#174861's kind",
    lambda query, key, value: (query, key, value) if query.shape[-2] > 1 or query.shape[1] == key.shape[1]
        else (query[:, np.arange(query.shape[1]).reshape(-1, key.shape[1]).T.reshape(-1)], key, value),
    at="raw_scores", diagnosis="heads-tiled")
_decoding(forms.logits_read_as, "keys_beyond_128_lost_in_decoding",
    "structure: the number of splits is that of the first tile",
    lambda logits: np.where((np.arange(logits.shape[-1]) < 128) | (logits.shape[-2] > 1), logits, -np.inf),
    at="weights")
# Let several queries attend to all of the past.
_decoding(forms.in_attention, "mask_does_not_reach_the_past_of_several_queries",
    "extending reads all of the cache: transformers#30437's kind",
    lambda call: forms.masks_read_as(lambda scores, masks: {**forms.NO_RULES, "mask": forms.allowed_keys(scores,
        masks) | (np.arange(scores.shape[-1]) < call.past)}) if _is_extending(call) and call.mask is not None else {},
    diagnosis=("mask-ignored", "query-mask-ignored", "mask-beside-past"))
# Add the bias behind the past alone.
_decoding(forms.in_attention, "bias_does_not_reach_the_past_of_several_queries",
    "extending adds the bias to the new keys alone: transformers#30437's kind",
    lambda call: forms.bias_added(lambda scores, bias, masks: np.where(np.arange(scores.shape[-1]) < call.past, scores,
        scores + bias)) if _is_extending(call) else {},
    at="biased")
# fmt: on


_pair = partial(mutant, "pairs", dtypes=KERNELS, at="biased")


def _on_path(other: str, without: Callable[[Callable[[forms.Masks], bool]], Steps]) -> Steps:
    """Do without something on the path that another option takes, of which ``mask_scores`` need not be told."""
    option = other.removeprefix("a_")
    if option in forms.NO_RULES or option == "bias":
        return without(lambda masks: masks[option] is not None)
    return forms.where(forms.GIVEN[option], without(lambda masks: True))


_IGNORED = {
    "is_causal": ("causality-ignored",),
    "window": ("window-ignored",),
    "mask": ("mask-ignored", "query-mask-ignored", "causality-ignored"),  # of pages, causality is a mask
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
    _pair(partial(_on_path, _other), f"{_option.removeprefix('is_')}_dropped_with_{_other}", _defect,
        partial(forms.dropped, _option), at="masked", diagnosis=_IGNORED[_option])  # fmt: skip


for _other, _defect in (
    ("groups", "a kernel for groups adds no bias: pytorch#193893's kind"),
    ("a_window", "a window takes a path without a bias: jax#32300's kind"),
    ("key_lengths", "lengths take the place of the bias: jax#23349's kind"),
    ("a_softcap", "a cap takes a path without a bias: vllm#7425's kind"),
    ("a_past", "a cache takes a path without a bias: transformers#30437's kind"),
):
    _pair(
        partial(_on_path, _other), f"bias_dropped_with_{_other}", _defect, forms.bias_dropped, diagnosis="bias-ignored"
    )


def _softcap_dropped(is_asked: Callable[[Call], bool]) -> Steps:
    """Take the scores before the cap: a path that has what the other option asks for, and no cap."""

    def steps(call: Call) -> Steps:
        def uncapped(logits: Array, sinks: Array | None, empty_rows: EmptyRows) -> Stages:
            return backend._softmax_with_sinks(logits - call.scores + call.stages["scores"], sinks, empty_rows)

        return {"_softmax_with_sinks": uncapped} if call.softcap is not None and is_asked(call) else {}

    return forms.in_attention(steps)


for _other, _defect in (
    ("groups", "a kernel for groups knows no cap: sgl-kernel-xpu#491's kind"),
    ("a_window", "a window takes a path without a cap: vllm-metal#666's kind"),
    ("key_lengths", "lengths take a path without a cap: onnxruntime#28379's kind"),
    ("a_past", "decoding from a cache knows no cap: vllm#7425's kind"),
):
    _pair(_softcap_dropped, f"softcap_dropped_with_{_other}", _defect, forms.GIVEN[_other.removeprefix("a_")],
        at="weights", diagnosis="softcap-ignored")  # fmt: skip


@_pair("dot_scores", at="capped", diagnosis="softcap-of-twice-scaled-scores")
def scale_applied_twice_with_a_softcap(
    query: Array, key: Array, *, scale: float | None = None, softcap: float | None = None
) -> Stages:
    """structure: the scale is part of the cap's argument, and applied once more"""
    stages = backend.dot_scores(query, key, scale=scale)
    if softcap is None:
        return stages
    return stages | {"capped": backend._cap(stages["scores"] * backend._scale_of(query, scale), softcap)}


@_pair(
    forms.in_attention,
    at="biased",
    defect="structure: one pointer for all that belongs to a head of keys",
    diagnosis="bias-by-key-heads",
)
def bias_of_query_heads_read_by_key_heads(call: Call) -> Steps:
    """Read the bias of query head h at the place of its head of keys."""
    heads, kv_heads = call.query.shape[1], call.key.shape[1]
    if call.bias is None or not call.has_groups or call.bias.shape[1] != heads:
        return {}
    return forms.bias_read_as(lambda bias, scores: bias[:, np.arange(heads) // (heads // kv_heads)])


def _own_corner(scores: Array, lengths: Array) -> Array:
    """Return j - i as it is where the last query stands at each entry's last key: (B, 1, Lq, T)."""
    offset = (lengths - scores.shape[-2])[:, np.newaxis, np.newaxis, np.newaxis]
    return np.asarray(forms.distance(scores) - offset)


@_pair(forms.masks_read_as, at="masked", diagnosis=("aligned-bottom-right", "aligned-with-key-lengths"))
def window_at_the_last_key_of_each_length(scores: Array, masks: forms.Masks) -> forms.Masks:
    """the window counts from each entry's last key: flash-attention#1778's kind"""
    if masks["window"] is None or masks["key_lengths"] is None:
        return {}
    behind, (left, right) = _own_corner(scores, masks["key_lengths"]), masks["window"]
    within = np.ones_like(behind, dtype=bool)
    within &= True if left is None else behind >= -left
    within &= True if right is None else behind <= right
    return {"window": None, "mask": forms.both(masks["mask"], within)}


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
# Read the mask of batch entry b and head h at h B + b, where it differs between both.
_pair(forms.mask_read_as, "mask_of_each_batch_and_head_read_across",
        "(B, H) read as (H, B): lighthouse#77, FuxiCTR#130",
    lambda mask, scores: mask if mask.shape[:2] != (scores.shape[0], scores.shape[1])
        else mask.reshape(scores.shape[1], scores.shape[0], *mask.shape[2:]).swapaxes(0, 1),
    at="masked")
# Read the mask of head h, which all batch entries share, one head further in each of them.
_pair(forms.mask_read_as, "mask_per_head_read_with_a_batch_stride",
    "a shared mask moves on with the batch: graph-transformer-pytorch#2's kind",
    lambda mask, scores: mask if mask.shape[:2] != (1, scores.shape[1])
        else np.asarray(mask[0][(np.arange(scores.shape[1]) + np.arange(scores.shape[0])[:,
        np.newaxis]) % scores.shape[1]]),
    at="masked")
_pair(forms.masks_read_as, "causal_at_the_last_key_of_each_length",
    "causality counts from each entry's last key: flash-attention#1778's kind",
    lambda scores, masks: {} if not masks["is_causal"] or masks["key_lengths"] is None else {"is_causal": False,
        "mask": forms.both(masks["mask"], _own_corner(scores, masks["key_lengths"]) <= 0)},
    at="masked", diagnosis=("aligned-bottom-right", "aligned-with-key-lengths"))
_pair(forms.in_attention, "bias_scaled_when_causal",
    "the scale is applied to the sum on the causal path: TransformerEngine#236's kind",
    lambda call: {} if not call.is_causal else forms.bias_read_as(lambda bias, scores:
        (bias * call.factor).astype(bias.dtype)),
    diagnosis="bias-scaled")
# Read a bias for each distance from the other corner where the window is given.
_pair(forms.bias_added, "bias_one_key_late_in_a_window",
    "structure: the offset of a window's first key is added to the bias, too",
    lambda scores, bias, masks: np.asarray(scores + (np.roll(bias, 1, axis=-1) if masks["window"] is not None
        and bias.shape[-1] != 1 else bias)), diagnosis="bias-one-key-late")
# fmt: on
