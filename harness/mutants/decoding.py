"""Faults of decoding, one query against many keys, of extending, and of keys that are split and merged again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np

from attncheck.backends.contract import Stages
from attncheck.mutants.mask_steps import ALLOWED, MaskRequest, add_bias
from attncheck.mutants.mutant import KERNELS, Mutant
from attncheck.mutants.online import NEVER_HELD
from attncheck.mutants.rounding import Array
from attncheck.mutants.steps import SOFTMAX, largest
from attncheck.mutants.variant import Variant

Merge = Callable[[Array, Array, Array], Array]
"""What each part counts: from its maximum, its sum and its log_sum_exp, the parts along the last axis."""


def _is_decoding(request: MaskRequest) -> bool:
    queries, keys = request.scores.shape[-2:]
    return bool(queries == 1 < keys)


def _is_extending(request: MaskRequest) -> bool:
    return bool(request.past and request.scores.shape[-2] > 1)


def _mask_ignored(request: MaskRequest) -> Array:
    return ALLOWED(replace(request, mask=None) if _is_decoding(request) else request)


def _lengths_ignored(request: MaskRequest) -> Array:
    return ALLOWED(replace(request, key_lengths=None) if _is_decoding(request) else request)


def _past_unmasked(request: MaskRequest) -> Array:
    """Let several queries attend to all of the past."""
    allowed = ALLOWED(request)
    if not _is_extending(request) or request.mask is None:
        return allowed
    return np.asarray(allowed | (np.arange(request.scores.shape[-1]) < request.past))


def _bias_ignored(request: MaskRequest) -> Array:
    return request.scores if _is_decoding(request) else add_bias(request)


def _bias_of_the_new_keys(request: MaskRequest) -> Array:
    """Add the bias behind the past alone."""
    biased = add_bias(request)
    if not _is_extending(request):
        return biased
    return np.where(np.arange(biased.shape[-1]) < request.past, request.scores, biased)


def _first_entry(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
    if query.shape[-2] > 1:
        return query, key, value
    return query, np.broadcast_to(key[:1], key.shape), np.broadcast_to(value[:1], value.shape)


def _heads_stacked(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
    """Stack the heads of a group as rows of one query, in the order of the other axis."""
    heads, kv_heads = query.shape[1], key.shape[1]
    if query.shape[-2] > 1 or heads == kv_heads:
        return query, key, value
    order = np.arange(heads).reshape(-1, kv_heads).T.reshape(-1)
    return query[:, order], key, value


def _keys_up_to(most: int) -> Variant:
    def normalise(logits: Array, unmasked: Array) -> Stages:
        seen = (np.arange(logits.shape[-1]) < most) | (logits.shape[-2] > 1)
        return SOFTMAX(np.where(seen, logits, -np.inf), unmasked)

    return Variant(normalise=normalise)


def _split(merge: Merge, *, parts: int = 4, is_asked: Callable[[Array], bool] = lambda logits: True) -> Variant:
    """Attend to parts of the keys and merge the averages as ``merge`` has it."""

    def average(logits: Array, weights: Array, value: Array) -> Array:
        keys = logits.shape[-1]
        if keys < 32 or not is_asked(logits):
            return np.asarray(weights @ value)
        edges = [keys * part // parts for part in range(parts + 1)]
        spans = [slice(*edge) for edge in pairwise(edges)]
        averages = np.stack([SOFTMAX(logits[..., span], logits)["weights"] @ value[..., span, :] for span in spans], -1)
        statistics = np.stack([SOFTMAX(logits[..., span], logits)["log_sum_exp"] for span in spans], -1)
        maxima = np.concatenate([largest(logits[..., span]) for span in spans], -1)
        shares = merge(maxima, np.exp(statistics - maxima), statistics)
        return np.asarray((averages * shares[..., np.newaxis, :]).sum(-1)).astype(logits.dtype)

    return Variant(average=average, hidden=NEVER_HELD)


def _shares(statistics: Array) -> Array:
    weights: Array = SOFTMAX(statistics, statistics)["weights"]
    return weights


def _nan_where_empty(maxima: Array, sums: Array, statistics: Array) -> Array:
    """Multiply 0 with minus infinity where a part has no key, but some other one has."""
    is_lost = np.isneginf(statistics) & ~np.isneginf(largest(statistics))
    return np.where(is_lost, np.nan, _shares(statistics))


def _last_lost(maxima: Array, sums: Array, statistics: Array) -> Array:
    return _shares(np.where(np.arange(statistics.shape[-1]) < statistics.shape[-1] - 1, statistics, -np.inf))


def _decoding(name: str, defect: str, backend: Variant, first_wrong_stage: str, *diagnosis: str) -> Mutant:
    return Mutant(name, "decoding", defect, backend, first_wrong_stage, KERNELS, diagnosis)


MUTANTS = (
    _decoding(
        "mask_ignored_in_decoding",
        "a path for one query that knows no mask: onnxruntime#29020's kind",
        Variant(allowed=_mask_ignored),
        "masked",
        "mask-ignored",
        "query-mask-ignored",
    ),
    _decoding(
        "key_lengths_ignored_in_decoding",
        "positions behind the current one are read: tt-metal#41215",
        Variant(allowed=_lengths_ignored),
        "masked",
        "key-lengths-ignored",
    ),
    _decoding(
        "bias_ignored_in_decoding",
        "a path for one query that knows no bias: onnxruntime#29020's kind",
        Variant(add_bias=_bias_ignored),
        "biased",
        "bias-ignored",
    ),
    _decoding(
        "first_batch_entry_for_all_in_decoding",
        "structure: the batch stride of the cache is left out where there is one query",
        Variant(inputs=_first_entry),
        "raw_scores",
    ),
    _decoding(
        "heads_of_groups_stacked_across_in_decoding",
        "the heads of a group become rows of one tile, in the wrong order: pytorch#174861's kind",
        Variant(inputs=_heads_stacked),
        "raw_scores",
        "heads-tiled",
    ),
    _decoding(
        "keys_beyond_128_lost_in_decoding",
        "structure: the number of splits is that of the first tile",
        _keys_up_to(128),
        "weights",
    ),
    _decoding(
        "mask_does_not_reach_the_past_of_several_queries",
        "extending reads all of the cache: transformers#30437's kind",
        Variant(allowed=_past_unmasked),
        "masked",
        "mask-ignored",
        "query-mask-ignored",
    ),
    _decoding(
        "bias_does_not_reach_the_past_of_several_queries",
        "extending adds the bias to the new keys alone: transformers#30437's kind",
        Variant(add_bias=_bias_of_the_new_keys),
        "biased",
    ),
    _decoding(
        "splits_merged_by_their_maxima",
        "parts count by their maximum alone: sglang#40903's kind",
        _split(lambda maxima, sums, statistics: _shares(maxima)),
        "context",
    ),
    _decoding(
        "splits_merged_by_their_sums",
        "parts count by sums that belong to different maxima: gcnasm#21's kind",
        _split(lambda maxima, sums, statistics: sums / sums.sum(-1, keepdims=True)),
        "context",
    ),
    _decoding(
        "splits_averaged",
        "structure: the merge forgets how much each part weighs",
        _split(lambda maxima, sums, statistics: np.full_like(statistics, 1 / statistics.shape[-1])),
        "context",
    ),
    _decoding(
        "splits_merged_in_the_wrong_base",
        "log_sum_exp in base 2 is merged as one in base e: flashinfer#2113, sglang#35045",
        _split(lambda maxima, sums, statistics: _shares(statistics / np.log(2).astype(statistics.dtype))),
        "context",
    ),
    _decoding(
        "last_split_lost",
        "structure: one split fewer is merged than there are",
        _split(_last_lost),
        "context",
    ),
    _decoding(
        "empty_split_gives_nan",
        "a part of which every key is masked: flashinfer#4051, #1178",
        _split(_nan_where_empty),
        "context",
    ),
    _decoding(
        "splits_of_one_query_merged_by_their_maxima",
        "the same in decoding alone: vllm#28840's kind",
        _split(
            lambda maxima, sums, statistics: _shares(maxima), parts=7, is_asked=lambda logits: logits.shape[-2] == 1
        ),
        "context",
    ),
)
