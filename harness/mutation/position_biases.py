"""Faults of biases that follow from positions: the slopes of ALiBi, and the relative buckets of T5.

A kernel gets the bias as numbers. What a model's code, or a kernel that makes the bias itself, does instead is told
from them: a bias that is minus a slope times a distance, or one that depends on the distance alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from attncheck.backends.numpy_backend import mask_scores
from attncheck.mutation.arithmetic import Array
from attncheck.mutation.forward_forms import where
from attncheck.mutation.mask_forms import bias_dropped, bias_read_as
from attncheck.mutation.mutant import mutant
from attncheck.mutation.variant import Steps
from attncheck.reading.generated_arrays import alibi_slopes, relative_buckets

_faulty = partial(mutant, "biases from positions", at="biased")
_TOLERANCE = 2.0**-6
"""A slope and its products are rounded to the dtype."""


def _alibi_read_as(change: Callable[[Array, Array, Array], Array]) -> Steps:
    """Take another bias, (H, Lq, T), for ALiBi: ``change(slopes, query, key)`` by positions; leave others alone."""

    def read(bias: Array, scores: Array) -> Array:
        found = _slopes_and_offset(bias)
        if found is None:
            return bias
        slopes, offset = found
        queries, keys = bias.shape[-2:]
        query, key = offset + np.arange(queries)[:, np.newaxis], np.arange(keys)
        return np.asarray(change(slopes[:, np.newaxis, np.newaxis], query, key)[np.newaxis], bias.dtype)

    return bias_read_as(read)


def _slopes_and_offset(bias: Array) -> tuple[Array, int] | None:
    """Return the slope of each head, and the position of the first query, where a bias is ALiBi."""
    if bias.ndim != 4 or bias.shape[0] != 1 or bias.shape[1] < 2 or bias.shape[-1] < 2 or not bias.shape[-2]:
        return None
    own = (bias[0, :, 0] == 0).all(axis=0)
    if own.sum() != 1:
        return None
    offset = int(own.argmax())
    slopes = -np.asarray(bias[0, :, 0, offset - 1 if offset else 1], np.float64)
    away = np.abs(np.arange(bias.shape[-1]) - offset - np.arange(bias.shape[-2])[:, np.newaxis])
    is_alibi = np.allclose(np.asarray(bias[0], np.float64), -slopes[:, np.newaxis, np.newaxis] * away, rtol=_TOLERANCE)
    return (slopes, offset) if is_alibi and (slopes > 0).all() else None


def _slopes_read_as(change: Callable[[Array], Array]) -> Steps:
    """Take other slopes for those of ALiBi: ``change(slopes)``, (H)."""
    return _alibi_read_as(lambda slopes, query, key: -change(slopes.ravel())[:, None, None] * np.abs(query - key))


def _below(heads: int) -> int:
    """Return the largest power of two that is no more than a number of heads."""
    return 1 << (heads.bit_length() - 1)


@_faulty(_slopes_read_as, defect="2^(-8 (h + 1) / n) for any number of heads: mlx#343, fixed by mlx#3071")
def alibi_slopes_of_one_sequence(slopes: Array) -> Array:
    heads = len(slopes)
    return slopes if heads == _below(heads) else np.asarray(2.0 ** (-8 * np.arange(1, heads + 1) / heads))


@_faulty(_slopes_read_as, defect="the first slopes of 2n heads, not every other one, where n heads are too few")
def alibi_slopes_without_leaving_any_out(slopes: Array) -> Array:
    below, heads = _below(len(slopes)), len(slopes)
    return np.array([*alibi_slopes(below), *alibi_slopes(2 * below)[: heads - below]])


@_faulty(
    bias_read_as,
    defect="every rank counts its heads from 0: flashinfer#1606, Megatron-DeepSpeed#227",
    diagnosis=("bias-of-first-half-of-heads", "bias-of-first-head"),
)
def bias_of_the_first_half_of_the_heads(bias: Array, scores: Array) -> Array:
    heads = bias.shape[1] if bias.ndim == 4 else 1
    return bias[:, np.arange(heads) % (heads // 2)] if heads > 1 else bias


@_faulty(
    bias_read_as,
    defect="query heads of a group share the bias of its first: a kernel that packs groups",
    diagnosis="bias-of-first-head-of-group",
)
def bias_of_the_first_head_of_a_group(bias: Array, scores: Array) -> Array:
    heads = bias.shape[1] if bias.ndim == 4 else 1
    return bias[:, np.arange(heads) // 2 * 2] if heads % 2 == 0 else bias


def _distances_read_as(change: Callable[[Array], Array]) -> Steps:
    """Look a bias up at other distances j - p, where it is told by the distance alone: ``change(distance)``."""

    def read(bias: Array, scores: Array) -> Array:
        found = _by_distance(bias)
        if found is None:
            return bias
        numbers, zero = found
        queries, keys = bias.shape[-2:]
        offset = queries - 1 - zero
        distance = np.arange(keys) - (offset + np.arange(queries))[:, np.newaxis]
        return np.asarray(numbers[..., np.clip(change(distance) + offset + queries - 1, 0, numbers.shape[-1] - 1)])

    return bias_read_as(read)


def _by_distance(bias: Array) -> tuple[Array, int] | None:
    """Return the numbers of a bias from the least distance on, (..., Lq + T - 1), where nothing else tells them."""
    if bias.ndim != 4 or min(bias.shape[-2:]) < 2 or bias.shape[-1] < bias.shape[-2]:
        return None
    queries, keys = bias.shape[-2:]
    numbers = np.concatenate([bias[..., ::-1, 0], bias[..., 0, 1:]], axis=-1)
    place = np.arange(keys) + queries - 1 - np.arange(queries)[:, np.newaxis]
    if not np.array_equal(numbers[..., place], bias) or (numbers == numbers[..., :1]).all():
        return None
    return numbers, queries - 1 - (keys - queries)


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
# of eight heads, this is twice the bias
_faulty(_slopes_read_as, "alibi_slopes_begin_with_one", "2^(-8 h / n), the exponent off by one: aprender#2143",
    lambda slopes: np.asarray(slopes * 2.0 ** (8 / _below(len(slopes)))), diagnosis=("bias-twice", "bias-fitted"))
_faulty(_slopes_read_as, "alibi_slopes_sorted",
    "slopes in order for every number of heads: CROMA#12, TensorRT-LLM#1611",
    lambda slopes: np.sort(slopes)[::-1])
_faulty(_alibi_read_as, "alibi_of_the_keys_alone",
    "the slope times the key's position: right but with sinks, as rows are shifted",
    lambda slopes, query, key: np.asarray(slopes * (key + 0 * query)))
_faulty(_alibi_read_as, "alibi_without_magnitude",
    "a signed distance, which rewards later keys where nothing forbids them",
    lambda slopes, query, key: np.asarray(slopes * (key - query)))
_faulty(_alibi_read_as, "alibi_from_the_first_new_key",
    "distances that do not count the past: flash-attention#907's kind",
    lambda slopes, query, key: np.asarray(-slopes * np.abs(query - query[0] - key)))
_faulty(bias_read_as, "bias_of_heads_in_reverse", "heads in reverse",
    lambda bias, scores: bias[:, ::-1] if bias.ndim == 4 else bias, diagnosis="bias-in-reverse-of-head")
_faulty(_distances_read_as, "relative_distance_of_the_other_sign",
    "the distance p - j for j - p: later keys have the buckets of earlier ones",
    lambda distance: -distance)
_faulty(_distances_read_as, "relative_buckets_of_both_sides",
    "the buckets of an encoder in a decoder: text-to-text-transfer-transformer#415",
    lambda distance: np.asarray(np.where(distance < 0, -relative_buckets(np.minimum(distance, 0), 32, 128,
        bidirectional=True), distance)))
_faulty(_distances_read_as, "relative_buckets_of_one_side",
    "the buckets of a decoder in an encoder: every later key as the own one",
    lambda distance: np.minimum(distance, 0))
_faulty(_distances_read_as, "relative_buckets_without_a_logarithm",
    "buckets that end with those of a distance each: no logarithm",
    lambda distance: np.clip(distance, -8, 8))
_faulty(_distances_read_as, "relative_buckets_one_distance_late",
    "the step to the next bucket one distance late: > for >=",
    lambda distance: np.asarray(distance - np.sign(distance) * (np.abs(distance) >= 8)))
_faulty(lambda unwanted: bias_dropped(unwanted) | where(lambda call: call.past == 0, {"mask_scores": mask_scores}),
"bias_dropped_behind_a_past",
    "no bias once there is a cache: TensorRT-LLM#13870",
    lambda masks: True, diagnosis="bias-ignored")
