"""Faults of values: signed zeros, ties, the least finite number, equal maxima, zero vectors, NaN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from attncheck.backends.contract import Stages
from attncheck.mutants.mask_steps import MaskRequest, add_bias
from attncheck.mutants.mutant import KERNELS, Mutant
from attncheck.mutants.rounding import Array
from attncheck.mutants.steps import SOFTMAX, largest
from attncheck.mutants.variant import Variant


def _with_bias(change: Callable[[Array, MaskRequest], Array]) -> Variant:
    """Add another bias than the one that is given."""

    def biased(request: MaskRequest) -> Array:
        assert request.bias is not None
        return add_bias(replace(request, bias=change(request.bias, request)))

    return Variant(add_bias=biased)


def _negative_zero_forbids(bias: Array, request: MaskRequest) -> Array:
    return np.where((bias == 0) & np.signbit(bias), -np.inf, bias).astype(bias.dtype)


def _least_finite_twice(bias: Array, request: MaskRequest) -> Array:
    """Add what forbids a second time: the least finite number becomes minus infinity."""
    return np.where(bias <= np.finfo(bias.dtype).min / 2, bias + bias, bias)


def _least_finite_forbids(bias: Array, request: MaskRequest) -> Array:
    return np.where(bias <= np.finfo(bias.dtype).min / 2, -np.inf, bias).astype(bias.dtype)


def _least_finite_twice_is_nan(logits: Array, unmasked: Array) -> Stages:
    """Subtract a row's maximum that is itself minus infinity."""
    stages = SOFTMAX(logits, unmasked)
    finfo = np.finfo(logits.dtype)
    is_lost = largest(logits) <= finfo.min / 2
    is_lost &= ~np.isneginf(largest(logits))
    return stages | {"weights": np.where(is_lost, np.nan, stages["weights"]).astype(logits.dtype)}


def _first_of_far_ties(logits: Array, unmasked: Array) -> Stages:
    """Forget a maximum that comes again 16 keys later or more."""
    keys = np.arange(logits.shape[-1])
    is_largest = (logits == largest(logits)) & np.isfinite(logits)
    first = is_largest.argmax(axis=-1)[..., np.newaxis] if logits.shape[-1] else np.zeros((), int)
    return SOFTMAX(np.where(is_largest & (keys >= first + 16), -np.inf, logits), unmasked)


def _in_tiles(tile: int, change: Callable[[Array, Array], Array]) -> Variant:
    """Walk over tiles of keys; ``change(tile, running maximum)`` says what is seen of a tile."""

    def normalise(logits: Array, unmasked: Array) -> Stages:
        running = np.full((*logits.shape[:-1], 1), -np.inf, logits.dtype)
        seen = []
        for start in range(0, logits.shape[-1], tile):
            part = logits[..., start : start + tile]
            seen.append(change(part, running))
            running = np.maximum(running, largest(part))
        return SOFTMAX(np.concatenate(seen, axis=-1) if seen else logits, unmasked)

    return Variant(normalise=normalise)


def _equal_maximum_skipped(part: Array, running: Array) -> Array:
    return np.where((largest(part) == running) & np.isfinite(running), -np.inf, part).astype(part.dtype)


def _nan_from_a_first_tile(tile: int) -> Variant:
    """Let exp(-inf - -inf) of a first tile that is wholly masked reach the row, where a later one has keys."""

    def normalise(logits: Array, unmasked: Array) -> Stages:
        stages = SOFTMAX(logits, unmasked)
        first, rest = largest(logits[..., :tile]), largest(logits[..., tile:])
        is_lost = np.isneginf(first) & ~np.isneginf(rest)
        return stages | {"weights": np.where(is_lost, np.nan, stages["weights"]).astype(logits.dtype)}

    return Variant(normalise=normalise)


def _rows_of_zero_scores(logits: Array, weights: Array, value: Array) -> Array:
    """Take a row whose scores are all zero for padding."""
    seen = np.where(np.isneginf(logits), 0, logits)
    is_padding = (seen == 0).all(axis=-1, keepdims=True) & (logits.shape[-1] > 1)
    return np.where(is_padding, 0, weights @ value).astype(value.dtype)


def _zero_keys_forbidden(logits: Array, unmasked: Array) -> Stages:
    """Take keys whose scores are zero for every query for padding."""
    is_padding = (unmasked == 0).all(axis=-2, keepdims=True) & ~(unmasked == 0).all(axis=(-1, -2), keepdims=True)
    return SOFTMAX(np.where(is_padding, -np.inf, logits), unmasked)


def _nan_hidden(logits: Array, weights: Array, value: Array) -> Array:
    return np.asarray(np.nan_to_num(weights) @ value)


def _nan_spreads(logits: Array, weights: Array, value: Array) -> Array:
    """Let a NaN in the scores of one query reach the one before it, which shares a register."""
    output = weights @ value
    has_nan = np.isnan(logits).any(axis=-1, keepdims=True)
    return np.where(np.roll(has_nan, -1, axis=-2), np.nan, output).astype(output.dtype)


def _valued(name: str, defect: str, backend: Variant, first_wrong_stage: str, *diagnosis: str) -> Mutant:
    return Mutant(name, "special values", defect, backend, first_wrong_stage, KERNELS, diagnosis)


MUTANTS = (
    _valued(
        "negative_zero_in_a_bias_forbids",
        "structure: a bias is compared by its bits, and the sign bit alone is the least integer",
        _with_bias(_negative_zero_forbids),
        "biased",
    ),
    _valued(
        "least_finite_bias_added_twice",
        "finfo.min + finfo.min is minus infinity: Automodel#2658, transformers#31303",
        _with_bias(_least_finite_twice),
        "biased",
    ),
    _valued(
        "least_finite_bias_forbids",
        "finfo.min is taken for minus infinity, and a row of it for an empty one: pytorch#109517's kind",
        _with_bias(_least_finite_forbids),
        "biased",
    ),
    _valued(
        "row_of_least_finite_numbers_is_nan",
        "a row of finfo.min gives NaN: pytorch#109517, #110213",
        Variant(normalise=_least_finite_twice_is_nan),
        "weights",
    ),
    _valued(
        "far_ties_of_the_maximum_forgotten",
        "structure: the maximum's place is kept, and its equals in later tiles are left out",
        Variant(normalise=_first_of_far_ties),
        "weights",
    ),
    _valued(
        "tile_with_an_equal_maximum_skipped",
        "structure: a tile is read where its maximum is above the running one, and otherwise where it is below",
        _in_tiles(16, _equal_maximum_skipped),
        "weights",
    ),
    *(
        _valued(
            f"first_tile_of_{tile}_without_a_key_gives_nan",
            "exp(-inf - -inf) of a first tile that is all masked: flashinfer#1178",
            _nan_from_a_first_tile(tile),
            "weights",
        )
        for tile in (16, 64)
    ),
    _valued(
        "rows_of_zero_scores_taken_for_padding",
        "structure: a query of zeros is padding, and its output is not computed",
        Variant(average=_rows_of_zero_scores),
        "context",
    ),
    Mutant(
        "zero_keys_taken_for_padding",
        "special values",
        "structure: a key of zeros is padding, and forbidden",
        Variant(normalise=_zero_keys_forbidden),
        "weights",
        ("float32",),
    ),
    _valued(
        "nan_in_a_query_hidden",
        "a query that holds NaN gives zeros: pytorch#141128",
        Variant(average=_nan_hidden),
        "context",
    ),
    _valued(
        "nan_in_a_query_spreads",
        "a query that holds NaN makes its neighbour NaN: pytorch#160064's kind",
        Variant(average=_nan_spreads),
        "context",
    ),
)
