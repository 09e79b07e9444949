"""Faults of decoding, one query against many keys, of extending, and of keys that are split and merged again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np

from attncheck.backends.numpy_backend import _row_maximum, softmax
from attncheck.mutation.arithmetic import Array
from attncheck.mutation.forward_forms import averaged, in_attention, inputs_changed, logits_read_as
from attncheck.mutation.mask_forms import NO_RULES, Masks, allowed_keys, bias_added, masks_read_as
from attncheck.mutation.mutant import KERNELS, mutant
from attncheck.mutation.online import NEVER_HELD
from attncheck.mutation.variant import Call, Steps

_decoding = partial(mutant, "decoding", dtypes=KERNELS)


def _is_decoding(scores: Array) -> bool:
    queries, keys = scores.shape[-2:]
    return bool(queries == 1 < keys)


def _dropped_in_decoding(option: str) -> Steps:
    """Do as if a rule had not been given where there is one query."""
    return masks_read_as(lambda scores, masks: {option: None} if _is_decoding(scores) else {})


_decoding(
    _dropped_in_decoding,
    at="masked",
    defect="a path for one query that knows no mask: onnxruntime#29020's kind",
    diagnosis=("mask-ignored", "query-mask-ignored"),
    name="mask_ignored_in_decoding",
)("mask")
_decoding(
    _dropped_in_decoding,
    at="masked",
    defect="positions behind the current one are read: tt-metal#41215",
    diagnosis="key-lengths-ignored",
    name="key_lengths_ignored_in_decoding",
)("key_lengths")


@_decoding(
    bias_added,
    at="biased",
    defect="a path for one query that knows no bias: onnxruntime#29020's kind",
    diagnosis="bias-ignored",
)
def bias_ignored_in_decoding(scores: Array, bias: Array, masks: Masks) -> Array:
    return scores if _is_decoding(scores) else np.asarray(scores + bias)


@_decoding(
    inputs_changed,
    at="raw_scores",
    defect="structure: the batch stride of the cache is left out where there is one query",
)
def first_batch_entry_for_all_in_decoding(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
    if query.shape[-2] > 1:
        return query, key, value
    return query, np.broadcast_to(key[:1], key.shape), np.broadcast_to(value[:1], value.shape)


@_decoding(
    inputs_changed,
    at="raw_scores",
    defect="the heads of a group become rows of one tile, in the wrong order: pytorch#174861's kind",
    diagnosis="heads-tiled",
)
def heads_of_groups_stacked_across_in_decoding(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
    """Stack the heads of a group as rows of one query, in the order of the other axis."""
    heads, kv_heads = query.shape[1], key.shape[1]
    if query.shape[-2] > 1 or heads == kv_heads:
        return query, key, value
    order = np.arange(heads).reshape(-1, kv_heads).T.reshape(-1)
    return query[:, order], key, value


@_decoding(logits_read_as, at="weights", defect="structure: the number of splits is that of the first tile")
def keys_beyond_128_lost_in_decoding(logits: Array) -> Array:
    seen = (np.arange(logits.shape[-1]) < 128) | (logits.shape[-2] > 1)
    return np.where(seen, logits, -np.inf)


def _is_extending(call: Call) -> bool:
    return bool(call.past and call.query.shape[-2] > 1)


@_decoding(
    in_attention,
    at="masked",
    defect="extending reads all of the cache: transformers#30437's kind",
    diagnosis=("mask-ignored", "query-mask-ignored"),
)
def mask_does_not_reach_the_past_of_several_queries(call: Call) -> Steps:
    """Let several queries attend to all of the past."""

    def widened(scores: Array, masks: Masks) -> Masks:
        is_past = np.arange(scores.shape[-1]) < call.past
        return {**NO_RULES, "mask": allowed_keys(scores, masks) | is_past}

    return masks_read_as(widened) if _is_extending(call) and call.mask is not None else {}


@_decoding(
    in_attention,
    at="biased",
    defect="extending adds the bias to the new keys alone: transformers#30437's kind",
)
def bias_does_not_reach_the_past_of_several_queries(call: Call) -> Steps:
    """Add the bias behind the past alone."""

    def add(scores: Array, bias: Array, masks: Masks) -> Array:
        return np.where(np.arange(scores.shape[-1]) < call.past, scores, scores + bias)

    return bias_added(add) if _is_extending(call) else {}


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
        stages = [softmax(logits[..., span]) for span in spans]
        averages = np.stack(
            [part["weights"] @ value[..., span, :] for part, span in zip(stages, spans, strict=True)], -1
        )
        statistics = np.stack([part["log_sum_exp"] for part in stages], -1)
        maxima = np.concatenate([_row_maximum(logits[..., span]) for span in spans], -1)
        shares = merge(maxima, np.exp(statistics - maxima), statistics)
        return np.asarray((averages * shares[..., np.newaxis, :]).sum(-1)).astype(logits.dtype)

    return averaged(average)


def _shares(statistics: Array) -> Array:
    weights: Array = softmax(statistics)["weights"]
    return weights


_merged = partial(_decoding, at="context", hidden=NEVER_HELD)


@_merged(_split, defect="parts count by their maximum alone: sglang#40903's kind")
def splits_merged_by_their_maxima(maxima: Array, sums: Array, statistics: Array) -> Array:
    return _shares(maxima)


@_merged(_split, defect="parts count by sums that belong to different maxima: gcnasm#21's kind")
def splits_merged_by_their_sums(maxima: Array, sums: Array, statistics: Array) -> Array:
    return np.asarray(sums / sums.sum(-1, keepdims=True))


@_merged(_split, defect="structure: the merge forgets how much each part weighs")
def splits_averaged(maxima: Array, sums: Array, statistics: Array) -> Array:
    return np.full_like(statistics, 1 / statistics.shape[-1])


@_merged(_split, defect="log_sum_exp in base 2 is merged as one in base e: flashinfer#2113, sglang#35045")
def splits_merged_in_the_wrong_base(maxima: Array, sums: Array, statistics: Array) -> Array:
    return _shares(statistics / np.log(2).astype(statistics.dtype))


@_merged(_split, defect="structure: one split fewer is merged than there are")
def last_split_lost(maxima: Array, sums: Array, statistics: Array) -> Array:
    return _shares(np.where(np.arange(statistics.shape[-1]) < statistics.shape[-1] - 1, statistics, -np.inf))


@_merged(_split, defect="a part of which every key is masked: flashinfer#4051, #1178")
def empty_split_gives_nan(maxima: Array, sums: Array, statistics: Array) -> Array:
    """Multiply 0 with minus infinity where a part has no key, but some other one has."""
    is_lost = np.isneginf(statistics) & ~np.isneginf(_row_maximum(statistics))
    return np.where(is_lost, np.nan, _shares(statistics))


_merged(
    partial(_split, parts=7, is_asked=lambda logits: logits.shape[-2] == 1),
    defect="the same in decoding alone: vllm#28840's kind",
    name="splits_of_one_query_merged_by_their_maxima",
)(splits_merged_by_their_maxima)
