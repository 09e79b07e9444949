"""Float32 attention that takes reduced products at some widths alone, where a matrix unit has a tile for them."""

from __future__ import annotations

import numpy as np

from attncheck.mutants import rounding
from attncheck.mutants.backward import Backward
from attncheck.mutants.mutant import Mutant
from attncheck.mutants.rounding import Array, Store
from attncheck.mutants.steps import DotScore, dot
from attncheck.mutants.variant import Variant

_SINGLE = ("float32",)


def _where_multiple(store: Store, multiple: int) -> Store:
    """Round where the last axis is such a multiple."""
    return lambda array: store(array) if array.shape[-1] % multiple == 0 else array


def _scores(store: Store) -> Variant:
    return Variant(score=DotScore(dot=lambda query, key: dot(store(query), store(key))))


def _values(store: Store, multiple: int) -> Variant:
    def average(logits: Array, weights: Array, value: Array) -> Array:
        is_chosen = value.shape[-1] % multiple == 0
        return np.asarray(store(weights) @ store(value) if is_chosen else weights @ value)

    return Variant(average=average)


def _backward(store: Store, multiple: int) -> Variant:
    def over_queries(by_key: Array, by_query: Array) -> Array:
        is_chosen = by_query.shape[-1] % multiple == 0
        left, right = (store(by_key), store(by_query)) if is_chosen else (by_key, by_query)
        return np.asarray(np.swapaxes(left, -1, -2) @ right)

    return Variant(backward=Backward(key=over_queries, value=over_queries))


def _chosen(name: str, defect: str, backend: Variant, first_wrong_stage: str) -> Mutant:
    return Mutant(name, "chosen products", defect, backend, first_wrong_stage, _SINGLE, ("accuracy-of-16-bits",))


_TF32, _BFLOAT16 = rounding.tf32, rounding.bfloat16

MUTANTS = (
    _chosen(
        "tf32_scores_at_widths_of_8",
        "tensor cores take the product where the width is a multiple of 8: pytorch#161022",
        _scores(_where_multiple(_TF32, 8)),
        "raw_scores",
    ),
    _chosen(
        "tf32_scores_at_widths_of_32",
        "the same where the width is a multiple of 32: triton#3498",
        _scores(_where_multiple(_TF32, 32)),
        "raw_scores",
    ),
    _chosen(
        "bfloat16_scores_at_widths_of_16",
        "a matrix unit of bfloat16 where the width is a multiple of 16: openvino#31630's kind",
        _scores(_where_multiple(_BFLOAT16, 16)),
        "raw_scores",
    ),
    _chosen(
        "tf32_values_at_widths_of_16",
        "P V in TF32 where the value's width is a multiple of 16: mlx#3860",
        _values(_TF32, 16),
        "context",
    ),
    _chosen(
        "bfloat16_values_at_widths_of_32",
        "P V in bfloat16 where the value's width is a multiple of 32: openvino#31630's kind",
        _values(_BFLOAT16, 32),
        "context",
    ),
    _chosen(
        "tf32_gradients_at_widths_of_8",
        "dk and dv in TF32 where the width is a multiple of 8: pytorch#161022",
        _backward(_TF32, 8),
        "grad_key",
    ),
)
