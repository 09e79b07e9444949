"""Faults of tiles: what is left over, what is counted twice, and what the next block forgets."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from attncheck.mutants import rounding
from attncheck.mutants.mutant import WIDE, Mutant
from attncheck.mutants.online import NEVER_HELD, Online
from attncheck.mutants.rounding import Array
from attncheck.mutants.steps import DotScore, Softmax, dot, largest, times
from attncheck.mutants.variant import Variant


def _without_keys(first_dropped: Callable[[int], int]) -> Variant:
    """Never look at the keys from this one on."""

    def visible(logits: Array) -> Array:
        keys = logits.shape[-1]
        return np.where(np.arange(keys) < first_dropped(keys), logits, -np.inf)

    return Variant(normalise=lambda logits, unmasked: Softmax()(visible(logits), unmasked))


def _last_dropped_unless_multiple_of(block: int) -> Variant:
    return _without_keys(lambda keys: keys if keys % block == 0 or keys == 1 else keys - 1)


def _sum_counts_tail_twice(exponentials: Array) -> Array:
    keys = exponentials.shape[-1]
    tail = exponentials[..., keys - keys % 16 :] if keys > 16 else exponentials[..., :0]
    return np.asarray(exponentials.sum(axis=-1, keepdims=True) + tail.sum(axis=-1, keepdims=True))


def _online(online: Online) -> Variant:
    return Variant(normalise=online.normalise, average=online.average, hidden=NEVER_HELD)


def _scaled_per_block(raw_scores: Array, scale: float) -> Array:
    blocks = np.arange(raw_scores.shape[-1]) // 16
    return np.asarray(times(raw_scores, scale) * (math.log2(math.e) ** blocks).astype(raw_scores.dtype))


def _whole_chunks_only(query: Array, key: Array) -> Array:
    width = query.shape[-1]
    whole = width - width % 8 if width > 8 else width
    return dot(query[..., :whole], key[..., :whole])


def _last_rows_zero(logits: Array, weights: Array, value: Array) -> Array:
    output = weights @ value
    queries = output.shape[-2]
    if queries > 16:
        output[..., queries - queries % 16 :, :] = 0
    return np.asarray(output)


def _stale_last_key(logits: Array, weights: Array, value: Array) -> Array:
    keys = value.shape[-2]
    if keys > 1 and keys % 32 == 1:
        value = np.concatenate([value[..., :-1, :], value[..., -2:-1, :]], axis=-2)
    return np.asarray(weights @ value)


def _not_in(number: int) -> Callable[[int], bool]:
    return lambda block: block != number


MUTANTS = (
    Mutant(
        "last_key_dropped_unless_multiple_of_4",
        "blocks",
        "a vectorised loop without its tail: SageAttention#376's kind",
        _last_dropped_unless_multiple_of(4),
        "weights",
    ),
    Mutant(
        "last_key_dropped_unless_multiple_of_16",
        "blocks",
        "a tile of 16 without its tail",
        _last_dropped_unless_multiple_of(16),
        "weights",
    ),
    Mutant(
        "tail_dropped_after_blocks_of_32",
        "blocks",
        "only whole tiles of 32 keys: FlagGems#898",
        _without_keys(lambda keys: keys - keys % 32 if keys > 32 else keys),
        "weights",
    ),
    Mutant(
        "only_the_first_16_keys",
        "blocks",
        "the loop over blocks runs once: pytorch#139462's kind",
        _without_keys(lambda keys: 16),
        "weights",
    ),
    Mutant(
        "tail_counted_twice_in_the_sum",
        "blocks",
        "the last tile overlaps the one before it",
        Variant(normalise=Softmax(total=_sum_counts_tail_twice)),
        "weights",
    ),
    Mutant(
        "maximum_of_the_first_16_keys",
        "blocks",
        "the maximum is not updated: overflow in later blocks",
        Variant(normalise=Softmax(maximum=lambda logits, unmasked: largest(logits[..., :16]))),
        "weights",
    ),
    Mutant(
        "sum_not_rescaled_in_the_second_block",
        "blocks",
        "tile maximum and running maximum mixed: gcnasm#21",
        _online(Online(16, rescales_sum=_not_in(1))),
        "log_sum_exp",
    ),
    Mutant(
        "output_not_rescaled_in_the_second_block",
        "blocks",
        "one rescale of the accumulator missed: gcnasm#21",
        _online(Online(16, rescales_output=_not_in(1))),
        "context",
    ),
    Mutant(
        "output_never_rescaled",
        "blocks",
        "no rescale of the accumulator at all",
        _online(Online(16, rescales_output=lambda number: False)),
        "context",
    ),
    Mutant(
        "output_kept_in_bfloat16_between_blocks",
        "blocks",
        "the accumulator lives in the output's type: torch's backward",
        _online(Online(16, store=rounding.bfloat16)),
        "context",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "scale_compounds_over_blocks",
        "blocks",
        "qk_scale *= log2e inside the loop over keys: FlagGems#424",
        Variant(score=DotScore(apply_scale=_scaled_per_block)),
        "scores",
    ),
    Mutant(
        "width_beyond_a_multiple_of_8_dropped",
        "blocks",
        "features in chunks of 8 without their tail",
        Variant(score=DotScore(dot=_whole_chunks_only)),
        "raw_scores",
    ),
    Mutant(
        "query_rows_beyond_a_multiple_of_16_zero",
        "blocks",
        "the last tile of queries is not written: fla#892",
        Variant(average=_last_rows_zero),
        "context",
    ),
    Mutant(
        "last_value_stale_where_lk_mod_32_is_1",
        "blocks",
        "reads the row before: pytorch#191937",
        Variant(average=_stale_last_key),
        "context",
    ),
)
