"""Faults of precision after the softmax: how weights, values and output are stored and summed."""

from __future__ import annotations

import numpy as np

from attncheck.mutants import rounding
from attncheck.mutants.mutant import WIDE, Mutant
from attncheck.mutants.rounding import Array, Store, sequential_matmul
from attncheck.mutants.variant import Variant


def _weights(store: Store) -> Variant:
    return Variant(after_softmax=lambda weights, allowed: store(weights))


def _value(store: Store) -> Variant:
    return Variant(average=lambda logits, weights, value: weights @ store(value))


def _output(store: Store) -> Variant:
    return Variant(average=lambda logits, weights, value: store(weights @ value))


def _accumulated(store: Store) -> Variant:
    return Variant(average=lambda logits, weights, value: sequential_matmul(weights, value, store=store))


def _in_float32(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
    return rounding.float32(query), rounding.float32(key), rounding.float32(value)


MUTANTS = (
    Mutant(
        "weights_in_bfloat16",
        "precision",
        "P is stored in bfloat16 before P V",
        _weights(rounding.bfloat16),
        "weights",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "weights_in_float16",
        "precision",
        "P is stored in float16 before P V: pytorch#158979's reference",
        _weights(rounding.float16),
        "weights",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "weights_in_tf32",
        "precision",
        "P V in TF32: pytorch#161022",
        _weights(rounding.tf32),
        "weights",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "weights_truncated_to_bfloat16",
        "precision",
        "a shift for a rounding conversion",
        _weights(rounding.truncated_bfloat16),
        "weights",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "small_weights_dropped",
        "precision",
        "weights below 1e-5 are skipped as negligible",
        _weights(lambda weights: np.where(weights < 1e-5, 0, weights)),
        "weights",
        WIDE,
    ),
    Mutant(
        "value_in_bfloat16",
        "precision",
        "the value is cast down on the way in",
        _value(rounding.bfloat16),
        "context",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "value_in_tf32",
        "precision",
        "P V in TF32: triton#3498",
        _value(rounding.tf32),
        "context",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "output_in_bfloat16",
        "precision",
        "the output passes through bfloat16",
        _output(rounding.bfloat16),
        "context",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "output_truncated",
        "precision",
        "a shift for a rounding conversion",
        _output(rounding.truncated_tf32),
        "context",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "values_accumulated_in_float16",
        "precision",
        "P V with float16 running sums: metal-flash-attention#8",
        _accumulated(rounding.float16),
        "context",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "values_accumulated_in_bfloat16",
        "precision",
        "P V with bfloat16 running sums",
        _accumulated(rounding.bfloat16),
        "context",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "inputs_in_float32",
        "precision",
        "float64 attention computed from float32 inputs: jax#37422's kind",
        Variant(inputs=_in_float32),
        "raw_scores",
        ("float64",),
        diagnosis=("accuracy-of-float32",),
    ),
)
