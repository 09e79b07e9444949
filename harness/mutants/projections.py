"""Faults of the projections around multi-head attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attncheck.mutants import rounding
from attncheck.mutants.mutant import WIDE, Mutant
from attncheck.mutants.rounding import Array
from attncheck.mutants.steps import project
from attncheck.mutants.variant import Variant

Arguments = dict[str, Any]
"""inputs, weight and bias of query, key and value; weight and bias of output."""


def _weight_transposed(role: str) -> Variant:
    def arguments(given: Arguments) -> Arguments:
        *before, weight, bias = given[role]
        is_square = weight is not None and weight.shape[0] == weight.shape[1]
        return given | {role: (*before, weight.T, bias)} if is_square else given

    return Variant(arguments=arguments)


def _bias_changed(role: str, change: Callable[[Array], Array | None]) -> Variant:
    def arguments(given: Arguments) -> Arguments:
        *before, bias = given[role]
        return given if bias is None else given | {role: (*before, change(bias))}

    return Variant(arguments=arguments)


def _inputs_swapped(given: Arguments) -> Arguments:
    key, value = given["key"], given["value"]
    if key[0].shape != value[0].shape:
        return given
    return given | {"key": (value[0], *key[1:]), "value": (key[0], *value[1:])}


def _weights_swapped(given: Arguments) -> Arguments:
    key, value = given["key"], given["value"]
    if key[1].shape != value[1].shape:
        return given
    return given | {"key": (key[0], value[1], key[2]), "value": (value[0], key[1], value[2])}


def _bias_before(inputs: Array, weight: Array, bias: Array | None) -> Array:
    if bias is None or inputs.shape[-1] != bias.shape[-1]:
        return project(inputs, weight, bias)
    return project(inputs + bias, weight, None)


def _bias_per_head(context: Array, merged: Array, weight: Array, bias: Array | None) -> Array:
    return project(merged, weight, None if bias is None else context.shape[1] * bias)


def _first_rows_for_all_heads(context: Array, merged: Array, weight: Array, bias: Array | None) -> Array:
    """Project each head before the merge, all of them with the first head's rows of the weight."""
    return project(context.sum(axis=1), weight[: context.shape[-1]], bias)


def _in_bfloat16(inputs: Array, weight: Array, bias: Array | None) -> Array:
    return project(inputs, rounding.bfloat16(weight), bias)


def _in_tf32(inputs: Array, weight: Array, bias: Array | None) -> Array:
    return project(rounding.tf32(inputs), rounding.tf32(weight), bias)


MUTANTS = (
    Mutant(
        "query_weight_transposed",
        "projections",
        "W^T for W, silent where it is square",
        _weight_transposed("query"),
        "query",
        diagnosis=("query-weight-transposed",),
    ),
    Mutant(
        "value_weight_transposed",
        "projections",
        "W^T for W, silent where it is square",
        _weight_transposed("value"),
        "value",
        diagnosis=("value-weight-transposed",),
    ),
    Mutant(
        "output_weight_transposed",
        "projections",
        "W^T for W, silent where it is square: nntile#347's kind",
        _weight_transposed("output"),
        "output",
        diagnosis=("output-weight-transposed",),
    ),
    Mutant(
        "query_bias_dropped",
        "projections",
        "the bias is not loaded",
        _bias_changed("query", lambda bias: None),
        "query",
        diagnosis=("query-bias-missing",),
    ),
    Mutant(
        "value_bias_dropped",
        "projections",
        "the bias is not loaded",
        _bias_changed("value", lambda bias: None),
        "value",
        diagnosis=("value-bias-missing",),
    ),
    Mutant(
        "output_bias_dropped",
        "projections",
        "the bias is not loaded",
        _bias_changed("output", lambda bias: None),
        "output",
        diagnosis=("output-bias-missing",),
    ),
    Mutant(
        "output_bias_added_twice",
        "projections",
        "by the kernel and by its caller",
        _bias_changed("output", lambda bias: bias + bias),
        "output",
    ),
    Mutant(
        "output_bias_added_per_head",
        "projections",
        "each head's part of a split product brings the bias",
        Variant(project_output=_bias_per_head),
        "output",
    ),
    Mutant(
        "projection_bias_before_the_product",
        "projections",
        "(x + b) W for x W + b, silent where the widths are equal",
        Variant(project=_bias_before),
        "query",
    ),
    Mutant(
        "projected_before_the_merge",
        "projections",
        "every head meets the first head's rows of the weight: nntile#347",
        Variant(project_output=_first_rows_for_all_heads),
        "output",
    ),
    Mutant(
        "key_and_value_inputs_swapped",
        "projections",
        "Keras takes query, value, key, in that order",
        Variant(arguments=_inputs_swapped),
        "key",
    ),
    Mutant(
        "key_and_value_weights_swapped",
        "projections",
        "packed weights read in another order: slapo#46, tt-metal#57366",
        Variant(arguments=_weights_swapped),
        "key",
    ),
    Mutant(
        "projection_weights_in_bfloat16",
        "projections",
        "weights stored in 16 bits",
        Variant(project=_in_bfloat16),
        "query",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
    Mutant(
        "projections_in_tf32",
        "projections",
        "float32 matmul silently in TF32: pytorch#161022",
        Variant(project=_in_tf32),
        "query",
        WIDE,
        diagnosis=("accuracy-of-16-bits",),
    ),
)
