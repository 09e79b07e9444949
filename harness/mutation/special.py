"""Faults of values: signed zeros, ties, the least finite number, equal maxima, zero vectors, NaN."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from attncheck.backends.contract import Stages
from attncheck.backends.numpy_backend import _row_maximum, softmax
from attncheck.mutation.arithmetic import Array
from attncheck.mutation.forward_forms import averaged, in_attention, logits_read_as, normalised
from attncheck.mutation.mask_forms import bias_read_as
from attncheck.mutation.mutant import KERNELS, mutant
from attncheck.mutation.variant import Steps

_valued = partial(mutant, "special values", dtypes=KERNELS, at="biased")


@_valued(normalised, at="weights", defect="a row of finfo.min gives NaN: pytorch#109517, #110213")
def row_of_least_finite_numbers_is_nan(logits: Array) -> Stages:
    """Subtract a row's maximum that is itself minus infinity."""
    stages, maximum = softmax(logits), _row_maximum(logits)
    is_lost = (maximum <= np.finfo(logits.dtype).min / 2) & ~np.isneginf(maximum)
    return stages | {"weights": np.where(is_lost, np.nan, stages["weights"]).astype(logits.dtype)}


@_valued(
    logits_read_as,
    at="weights",
    defect="structure: the maximum's place is kept, and its equals in later tiles are left out",
)
def far_ties_of_the_maximum_forgotten(logits: Array) -> Array:
    """Forget a maximum that comes again 16 keys later or more."""
    keys = np.arange(logits.shape[-1])
    is_largest = (logits == _row_maximum(logits)) & np.isfinite(logits)
    first = is_largest.argmax(axis=-1)[..., np.newaxis] if logits.shape[-1] else np.zeros((), int)
    return np.where(is_largest & (keys >= first + 16), -np.inf, logits)


@_valued(
    logits_read_as,
    at="weights",
    defect="structure: a tile is read where its maximum is above the running one, and otherwise where it is below",
)
def tile_with_an_equal_maximum_skipped(logits: Array) -> Array:
    """Walk over tiles of 16 keys, and see nothing of one whose maximum is the running one."""
    running = np.full((*logits.shape[:-1], 1), -np.inf, logits.dtype)
    seen = []
    for start in range(0, logits.shape[-1], 16):
        part = logits[..., start : start + 16]
        is_skipped = (_row_maximum(part) == running) & np.isfinite(running)
        seen.append(np.where(is_skipped, -np.inf, part).astype(part.dtype))
        running = np.maximum(running, _row_maximum(part))
    return np.concatenate(seen, axis=-1) if seen else logits


def _nan_from_a_first_tile(tile: int) -> Steps:
    """Let exp(-inf - -inf) of a first tile that is wholly masked reach the row, where a later one has keys."""

    def normalise(logits: Array) -> Stages:
        stages = softmax(logits)
        first, rest = _row_maximum(logits[..., :tile]), _row_maximum(logits[..., tile:])
        is_lost = np.isneginf(first) & ~np.isneginf(rest)
        return stages | {"weights": np.where(is_lost, np.nan, stages["weights"]).astype(logits.dtype)}

    return normalised(normalise)


for _tile in (16, 64):
    _valued(
        _nan_from_a_first_tile,
        at="weights",
        defect="exp(-inf - -inf) of a first tile that is all masked: flashinfer#1178",
        name=f"first_tile_of_{_tile}_without_a_key_gives_nan",
    )(_tile)


def _by_unmasked(change: Callable[[Array, Array], Array]) -> Steps:
    """Take the softmax of other logits, ``change(logits, unmasked)``; a softmax alone has masked nothing."""
    alone = logits_read_as(lambda logits: change(logits, logits))
    return alone | in_attention(lambda call: logits_read_as(lambda logits: change(logits, call.unmasked)))


@_valued(averaged, at="context", defect="a query that holds NaN makes its neighbour NaN: pytorch#160064's kind")
def nan_in_a_query_spreads(logits: Array, weights: Array, value: Array) -> Array:
    """Let a NaN in the scores of one query reach the one before it, which shares a register."""
    output = weights @ value
    has_nan = np.isnan(logits).any(axis=-1, keepdims=True)
    return np.where(np.roll(has_nan, -1, axis=-2), np.nan, output).astype(output.dtype)


# Rows, laid out by hand: the fault and the defect in the wild, and below what it does instead.
# fmt: off
_valued(bias_read_as, "negative_zero_in_a_bias_forbids",
    "structure: a bias is compared by its bits, and the sign bit alone is the least integer",
    lambda bias, scores: np.where((bias == 0) & np.signbit(bias), -np.inf, bias).astype(bias.dtype))
# Add what forbids a second time: the least finite number becomes minus infinity.
_valued(bias_read_as, "least_finite_bias_added_twice",
    "finfo.min + finfo.min is minus infinity: Automodel#2658, transformers#31303",
    lambda bias, scores: np.where(bias <= np.finfo(bias.dtype).min / 2, bias + bias, bias))
_valued(bias_read_as, "least_finite_bias_forbids",
    "finfo.min is taken for minus infinity, and a row of it for an empty one: pytorch#109517's kind",
    lambda bias, scores: np.where(bias <= np.finfo(bias.dtype).min / 2, -np.inf, bias).astype(bias.dtype))
# Take a row whose scores are all zero for padding.
_valued(averaged, "rows_of_zero_scores_taken_for_padding",
    "structure: a query of zeros is padding, and its output is not computed",
    lambda logits, weights, value: np.where((np.where(np.isneginf(logits), 0, logits) == 0).all(axis=-1,
        keepdims=True) & (logits.shape[-1] > 1), 0, weights @ value).astype(value.dtype),
    at="context")
# Take keys whose scores are zero for every query for padding.
mutant("special values", _by_unmasked, "zero_keys_taken_for_padding",
    "structure: a key of zeros is padding, and forbidden",
    lambda logits, unmasked: np.where((unmasked == 0).all(axis=-2, keepdims=True) & ~(unmasked == 0).all(axis=(-1, -2),
        keepdims=True), -np.inf, logits),
    at="weights", dtypes=("float32",))
_valued("attention._weighted_sum", "nan_in_a_query_hidden", "a query that holds NaN gives zeros: pytorch#141128",
    lambda weights, value: np.asarray(np.nan_to_num(weights) @ value), at="context")
