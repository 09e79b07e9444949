"""Faults of a cache: how the past is joined with new keys and values."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from attncheck.mutants import rounding
from attncheck.mutants.mutant import WIDE, Mutant
from attncheck.mutants.rounding import Array, Store
from attncheck.mutants.steps import join, join_both
from attncheck.mutants.variant import Variant

Joined = Callable[[Array, Array], Array]


def _joined(key: Joined = join, value: Joined = join) -> Variant:
    """Join past and new in another way, keys and values each in their own."""
    return Variant(join=lambda past_key, past_value, k, v: (key(past_key, k), value(past_value, v)))


def _after(past: Array, new: Array) -> Array:
    return join(new, past)


def _past_zero(past: Array, new: Array) -> Array:
    return join(np.zeros_like(past), new)


def _new_not_written(past: Array, new: Array) -> Array:
    return join(past, np.zeros_like(new))


def _one_slot_early(past: Array, new: Array) -> Array:
    """Write over the last slot of the past, and leave the last slot as it was."""
    return np.concatenate((past[..., :-1, :], new, np.zeros_like(new[..., :1, :])), axis=-2)


def _one_slot_late(past: Array, new: Array) -> Array:
    return np.concatenate((past, np.zeros_like(new[..., :1, :]), new[..., :-1, :]), axis=-2)


def _reversed(past: Array, new: Array) -> Array:
    return join(past[..., ::-1, :], new)


def _one_step_behind(past: Array, new: Array) -> Array:
    return np.roll(join(past, new), 1, axis=-2)


def _first_batch_entry(past: Array, new: Array) -> Array:
    return join(np.broadcast_to(past[:1], past.shape), new)


def _next_head(past: Array, new: Array) -> Array:
    return join(np.roll(past, -1, axis=1), new)


def _first_page(past: Array, new: Array) -> Array:
    """Read every page of 16 keys from the first one."""
    keys = past.shape[-2]
    return join(past[..., np.arange(keys) % 16, :], new)


def _stored(store: Store) -> Variant:
    def stored(past: Array, new: Array) -> Array:
        return join(store(past), new)

    return _joined(stored, stored)


def _swapped(past_key: Array, past_value: Array, key: Array, value: Array) -> tuple[Array, Array]:
    """Take the past's keys for its values, where that goes unnoticed."""
    silent = past_key.shape == past_value.shape
    return join_both(*((past_value, past_key) if silent else (past_key, past_value)), key, value)


MUTANTS = (
    Mutant(
        "past_dropped",
        "caches",
        "only the new keys count; those of the past are read as zeros: transformers#30437's kind",
        _joined(_past_zero, _past_zero),
        "raw_scores",
    ),
    Mutant(
        "past_appended_after_the_keys",
        "caches",
        "the cache joined at the wrong end",
        _joined(_after, _after),
        "raw_scores",
    ),
    Mutant(
        "past_key_and_past_value_swapped",
        "caches",
        "the pair unpacked in the other order, silent where Dv == D",
        Variant(join=_swapped),
        "raw_scores",
    ),
    Mutant(
        "past_values_dropped",
        "caches",
        "the values of the cache are not read",
        _joined(value=_past_zero),
        "context",
    ),
    Mutant("past_values_reversed", "caches", "a ring buffer unrolled backwards", _joined(value=_reversed), "context"),
    Mutant(
        "values_one_step_behind_their_keys",
        "caches",
        "two write positions that have come apart",
        _joined(value=_one_step_behind),
        "context",
    ),
    Mutant(
        "new_keys_not_written_to_the_cache",
        "caches",
        "attention over the cache as it was before this step",
        _joined(_new_not_written, _new_not_written),
        "raw_scores",
    ),
    Mutant(
        "last_key_of_the_past_lost",
        "caches",
        "written one slot early, over the newest key of the past: tt-metal#41215's position",
        _joined(_one_slot_early, _one_slot_early),
        "raw_scores",
    ),
    Mutant(
        "new_keys_written_one_slot_late",
        "caches",
        "one slot between past and new keys that nobody wrote",
        _joined(_one_slot_late, _one_slot_late),
        "raw_scores",
    ),
    Mutant(
        "past_of_the_first_batch_entry",
        "caches",
        "one cache for the whole batch: pytorch#191937's stride 0",
        _joined(_first_batch_entry, _first_batch_entry),
        "raw_scores",
    ),
    Mutant(
        "past_of_the_next_head",
        "caches",
        "head index off by one in the cache alone: pytorch#193893's kind",
        _joined(_next_head, _next_head),
        "raw_scores",
    ),
    Mutant(
        "past_beyond_its_first_page_repeated",
        "caches",
        "every page of 16 keys read from the first one: tt-metal#41215's kind",
        _joined(_first_page, _first_page),
        "raw_scores",
    ),
    Mutant(
        "past_in_bfloat16",
        "caches",
        "a cache in 16 bits behind wider keys",
        _stored(rounding.bfloat16),
        "raw_scores",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "past_in_float16",
        "caches",
        "a cache in 16 bits behind wider keys",
        _stored(rounding.float16),
        "raw_scores",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
)
