"""Faults of the boolean mask: its meaning, its axes, and its company."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from attncheck.mutants.mask_steps import Allowed, MaskRequest
from attncheck.mutants.mutant import Mutant
from attncheck.mutants.rounding import Array
from attncheck.mutants.variant import Variant


def _read_as(change: Callable[[Array, MaskRequest], Array]) -> Variant:
    """Change the mask before it is combined with causality."""
    return Variant(allowed=Allowed(mask=change))


def _dropped_if(unwanted: Callable[[MaskRequest], bool]) -> Variant:
    def allowed(request: MaskRequest) -> Array:
        return Allowed()(replace(request, mask=None) if unwanted(request) else request)

    return Variant(allowed=allowed)


def _transposed(mask: Array, request: MaskRequest) -> Array:
    """Swap the axes of queries and keys, where that goes unnoticed."""
    queries, keys = request.scores.shape[-2:]
    return np.swapaxes(mask, -1, -2) if mask.ndim >= 2 and queries == keys else mask


def _padding_on_rows(mask: Array, request: MaskRequest) -> Array:
    is_padding = mask.ndim >= 2 and mask.shape[-2] == 1
    return _transposed(mask, request) if is_padding else mask


def _heads_for_batch(mask: Array, request: MaskRequest) -> Array:
    batch, heads = request.scores.shape[:2]
    return mask.swapaxes(0, 1) if mask.ndim == 4 and batch == heads else mask


def _first_of(axis: int) -> Callable[[Array, MaskRequest], Array]:
    def change(mask: Array, request: MaskRequest) -> Array:
        return mask.take([0], axis=axis) if mask.ndim == 4 else mask

    return change


def _rounded_up(mask: Array, request: MaskRequest) -> Array:
    """Let a group of four keys be attended as soon as one of them may be."""
    keys = mask.shape[-1]
    groups = np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, -keys % 4)]).reshape(*mask.shape[:-1], -1, 4)
    return np.repeat(groups.any(axis=-1), 4, axis=-1)[..., :keys]


def _either(request: MaskRequest) -> Array:
    if request.mask is None or not request.is_causal:
        return Allowed()(request)
    return np.asarray(request.mask | Allowed()(replace(request, mask=None)))


MUTANTS = (
    Mutant(
        "mask_inverted",
        "masks",
        "true read as drop: tensorflow text#894, unturtle#56",
        _read_as(lambda mask, request: ~mask),
        "masked",
        diagnosis=("mask-inverted",),
    ),
    Mutant(
        "mask_ignored",
        "masks",
        "the argument has no effect",
        _dropped_if(lambda request: True),
        "masked",
        diagnosis=("mask-ignored",),
    ),
    Mutant(
        "mask_dropped_when_a_bias_is_given",
        "masks",
        "only one of mask and bias is used: pytorch#136816's kind",
        _dropped_if(lambda request: request.bias is not None),
        "masked",
        diagnosis=("mask-ignored",),
    ),
    Mutant(
        "mask_dropped_when_causal",
        "masks",
        "causality replaces padding: onnxruntime#14363",
        _dropped_if(lambda request: request.is_causal),
        "masked",
        diagnosis=("mask-ignored",),
    ),
    Mutant("mask_or_causal", "masks", "either may allow, where both must", Variant(allowed=_either), "masked"),
    Mutant(
        "mask_transposed_where_square",
        "masks",
        "queries and keys swapped, silent where Lq == Lk: keras#21483",
        _read_as(_transposed),
        "masked",
        diagnosis=("mask-transposed",),
    ),
    Mutant(
        "padding_on_the_query_axis",
        "masks",
        "padding masks rows, silent where Lq == Lk: hyunwoongko transformer#40",
        _read_as(_padding_on_rows),
        "masked",
        diagnosis=("mask-transposed",),
    ),
    Mutant(
        "mask_of_the_first_batch_entry",
        "masks",
        "one entry's mask for all: graph-transformer-pytorch#2",
        _read_as(_first_of(0)),
        "masked",
        diagnosis=("mask-of-first-batch-entry",),
    ),
    Mutant(
        "mask_of_the_first_head",
        "masks",
        "one head's mask for all: lighthouse#77's kind",
        _read_as(_first_of(1)),
        "masked",
        diagnosis=("mask-of-first-head",),
    ),
    Mutant(
        "mask_of_the_first_query",
        "masks",
        "one row's mask for all: keras#20488's expansion",
        _read_as(_first_of(2)),
        "masked",
    ),
    Mutant(
        "mask_of_batch_taken_for_heads",
        "masks",
        "(B, 1, ..) read as (1, H, ..) where B == H: mlx-lm#1903, onnx#8108",
        _read_as(_heads_for_batch),
        "masked",
    ),
    Mutant(
        "mask_rounded_up_to_four_keys",
        "masks",
        "a tile is masked as a whole or not at all: tt-metal#41215",
        _read_as(_rounded_up),
        "masked",
    ),
)
