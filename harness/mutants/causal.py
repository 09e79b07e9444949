"""Faults of causality, and of rows in which nothing may be attended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from attncheck.backends.contract import Stages
from attncheck.mutants.mask_steps import Allowed, MaskRequest, causal_mask
from attncheck.mutants.mutant import Mutant
from attncheck.mutants.rounding import Array
from attncheck.mutants.steps import Softmax, largest
from attncheck.mutants.variant import Variant


def _shape(causal: Callable[[int, int], Array]) -> Variant:
    return Variant(allowed=Allowed(causal=causal))


def _diagonal(offset: Callable[[int, int], int]) -> Variant:
    return _shape(lambda queries, keys: np.tri(queries, keys, offset(queries, keys), dtype=bool))


def _dropped_if(unwanted: Callable[[MaskRequest], bool]) -> Variant:
    def allowed(request: MaskRequest) -> Array:
        return Allowed()(replace(request, is_causal=False) if unwanted(request) else request)

    return Variant(allowed=allowed)


def _by_four(queries: int, keys: int) -> Array:
    """Let every query of a group of four see what the group's last one sees."""
    last = np.minimum(np.arange(queries) // 4 * 4 + 3, queries - 1)
    return np.asarray(causal_mask(queries, keys)[last])


def _empty_rows(weights: Callable[[Array], Array], log_sum_exp: Callable[[Array], Array] | None = None) -> Variant:
    """Give rows in which nothing may be attended other weights, and another log_sum_exp, made from the logits."""

    def normalise(logits: Array, unmasked: Array) -> Stages:
        stages = Softmax()(logits, unmasked)
        empty = largest(logits) == -np.inf
        stages["weights"] = np.where(empty, weights(logits), stages["weights"]).astype(logits.dtype)
        if log_sum_exp is not None:
            other = np.where(empty[..., 0], log_sum_exp(logits), stages["log_sum_exp"])
            stages["log_sum_exp"] = other.astype(logits.dtype)
        return stages

    return Variant(normalise=normalise)


def _first_key(logits: Array) -> Array:
    return np.asarray(np.arange(logits.shape[-1]) == 0)


MUTANTS = (
    Mutant(
        "causal_sees_the_next_key",
        "causal",
        "j <= i + 1: tt-metal#41215",
        _diagonal(lambda q, k: 1),
        "masked",
        diagnosis=("causal-next-key",),
    ),
    Mutant(
        "causal_without_its_own_key",
        "causal",
        "j < i: onnxruntime#25927's kind",
        _diagonal(lambda q, k: -1),
        "masked",
        diagnosis=("causal-without-own-key",),
    ),
    Mutant(
        "causal_aligned_bottom_right",
        "causal",
        "the other corner: mlx#2835, cutlass#2336, flash-attention#1778",
        _diagonal(lambda queries, keys: keys - queries),
        "masked",
        diagnosis=("aligned-bottom-right",),
    ),
    Mutant(
        "causal_bottom_right_for_one_query",
        "causal",
        "the other corner, if Lq == 1 only: onnxruntime#29020",
        _diagonal(lambda queries, keys: keys - queries if queries == 1 else 0),
        "masked",
        diagnosis=("aligned-bottom-right",),
    ),
    Mutant(
        "causal_mirrored",
        "causal",
        "j >= i, the upper triangle",
        _shape(lambda q, k: causal_mask(k, q).T),
        "masked",
        diagnosis=("causal-mirrored",),
    ),
    Mutant(
        "causal_by_groups_of_four",
        "causal",
        "decided once per four queries: pytorch#195910",
        _shape(_by_four),
        "masked",
    ),
    Mutant(
        "causal_ignored",
        "causal",
        "the argument has no effect: keras#23038",
        _dropped_if(lambda r: True),
        "masked",
        diagnosis=("causality-ignored",),
    ),
    Mutant(
        "causal_dropped_when_a_mask_is_given",
        "causal",
        "a mask of one's own ends causality: transformers#48748, keras",
        _dropped_if(lambda request: request.mask is not None),
        "masked",
        diagnosis=("causality-ignored",),
    ),
    Mutant(
        "causal_dropped_when_a_bias_is_given",
        "causal",
        "a bias of one's own ends causality",
        _dropped_if(lambda request: request.bias is not None),
        "masked",
        diagnosis=("causality-ignored",),
    ),
    Mutant(
        "causal_beyond_64_queries_ignored",
        "causal",
        "right in the first tile of 64 rows only: gcnasm#21",
        _shape(lambda queries, keys: causal_mask(queries, keys) | (np.arange(queries)[:, np.newaxis] >= 64)),
        "masked",
    ),
    Mutant(
        "empty_row_gives_nan",
        "empty rows",
        "softmax of a row of -inf: pytorch#103749, rten#1321, iree#24178",
        _empty_rows(lambda logits: np.full(logits.shape, np.nan), lambda logits: np.full(logits.shape[:-1], np.nan)),
        "weights",
        diagnosis=("empty-rows-nan",),
    ),
    Mutant(
        "empty_row_is_uniform",
        "empty rows",
        "the mean of the values: keras#21123",
        _empty_rows(lambda logits: np.full(logits.shape, 1 / logits.shape[-1])),
        "weights",
        diagnosis=("empty-rows-uniform",),
    ),
    Mutant(
        "empty_row_takes_the_first_key",
        "empty rows",
        "argmax of nothing is 0",
        _empty_rows(_first_key),
        "weights",
    ),
    Mutant(
        "empty_row_has_log_sum_exp_zero",
        "empty rows",
        "log 1 for -inf: merged states weigh an empty one (mlx#2608)",
        _empty_rows(lambda logits: np.zeros(logits.shape), lambda logits: np.zeros(logits.shape[:-1])),
        "log_sum_exp",
    ),
)
