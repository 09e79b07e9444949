"""Faults of the dot product."""

from __future__ import annotations

import numpy as np

from attncheck.mutants import rounding
from attncheck.mutants.mutant import WIDE, Mutant
from attncheck.mutants.rounding import Array, Store
from attncheck.mutants.steps import DotScore, dot, times
from attncheck.mutants.variant import Variant


def _operands(query: Store = rounding.exactly, key: Store = rounding.exactly) -> Variant:
    return Variant(score=DotScore(dot=lambda q, k: dot(query(q), key(k))))


def _stored(store: Store) -> Variant:
    return Variant(score=DotScore(apply_scale=lambda raw, scale: store(times(raw, scale))))


def _without_last_feature(query: Array, key: Array) -> Array:
    return dot(query[..., :-1], key[..., :-1])


def _swapped_where_square(query: Array, key: Array) -> Array:
    product = dot(query, key)
    return np.swapaxes(product, -1, -2) if product.shape[-1] == product.shape[-2] else product


MUTANTS = (
    Mutant(
        "query_in_bfloat16",
        "scores",
        "the query is cast down on the way in: pytorch#158979's kind",
        _operands(query=rounding.bfloat16),
        "raw_scores",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "key_in_float16",
        "scores",
        "a float16 key cache under a float32 query",
        _operands(key=rounding.float16),
        "raw_scores",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "query_and_key_in_tf32",
        "scores",
        "float32 matmul silently in TF32: pytorch#161022, mlx#3860, triton#3498",
        _operands(rounding.tf32, rounding.tf32),
        "raw_scores",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "scores_stored_in_bfloat16",
        "scores",
        "scores written to memory in bfloat16",
        _stored(rounding.bfloat16),
        "scores",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "scores_stored_in_float16",
        "scores",
        "scores written to memory in float16: kvpress#268, pytorch#60939",
        _stored(rounding.float16),
        "scores",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "scores_stored_in_tf32",
        "scores",
        "scores written to memory in TF32",
        _stored(rounding.tf32),
        "scores",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "scores_accumulated_in_float16",
        "scores",
        "float16 running sums: metal-flash-attention#8, ultralytics#24990",
        Variant(
            score=DotScore(
                dot=lambda q, k: rounding.sequential_matmul(q, np.swapaxes(k, -1, -2), store=rounding.float16)
            )
        ),
        "raw_scores",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "scores_squared",
        "scores",
        "logits multiplied by logits: keras#20510",
        Variant(score=DotScore(apply_scale=lambda raw, scale: times(raw, scale) * times(raw, scale))),
        "scores",
        diagnosis=("scores-squared",),
    ),
    Mutant(
        "scores_transposed_where_square",
        "scores",
        "K Q^T for Q K^T, silent where Lq == Lk: diffusers#14341's kind",
        Variant(score=DotScore(dot=_swapped_where_square)),
        "raw_scores",
    ),
    Mutant(
        "last_feature_of_the_score_dropped",
        "scores",
        "the loop over the width ends one early",
        Variant(score=DotScore(dot=_without_last_feature)),
        "raw_scores",
    ),
    Mutant(
        "key_of_the_next_head",
        "scores",
        "head index off by one: HipKittens#22, FreeToken#177, pytorch#193893",
        Variant(score=DotScore(dot=lambda query, key: dot(query, np.roll(key, -1, axis=1)))),
        "raw_scores",
        diagnosis=("key-of-next-head",),
    ),
    Mutant(
        "key_of_the_first_batch_entry",
        "scores",
        "batch stride 0 read for the key: pytorch#191937's kind",
        Variant(score=DotScore(dot=lambda query, key: dot(query, key[:1]))),
        "raw_scores",
    ),
)
