"""Sums of a backward pass: what adding up the heads of a group in the output's format may cost."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.judging.truth import Truth, find_truth

HEADS, KEYS, WIDTH = 64, 3, 4


def posed(seed: int) -> tuple[Truth, NDArray[np.float16]]:
    """Attention of one query for each of 64 heads that share a key and a value, and its gradient of the values.

    The heads are added up one after the other in float16, as torch's flash kernel for CPUs does; all else is exact.
    """
    draw = np.random.RandomState(seed).standard_normal
    shapes = {"query": (1, HEADS, 1, WIDTH), "key": (1, 1, KEYS, WIDTH), "value": (1, 1, KEYS, WIDTH)}
    inputs = {
        name: draw(shape).astype(np.float16) for name, shape in (shapes | {"grad_output": shapes["query"]}).items()
    }
    inputs["grad_output"] = np.abs(inputs["grad_output"])  # no term takes away what another has added
    query, key, upstream = (inputs[name].astype(np.float64) for name in ("query", "key", "grad_output"))
    powers = np.exp(query @ key.swapaxes(-1, -2) / np.sqrt(WIDTH))
    weights = powers / powers.sum(axis=-1, keepdims=True)
    total = np.zeros((1, 1, KEYS, WIDTH), np.float16)
    for head in range(HEADS):
        total = (total + weights[:, head : head + 1].swapaxes(-1, -2) @ upstream[:, head : head + 1]).astype(np.float16)
    truth = find_truth("attention_gradients", {}, inputs, "float16", supports_statistics=True, whole=True)
    return truth, total


@pytest.mark.parametrize("seed", range(40))
def test_heads_added_up_in_the_outputs_format_are_within_the_bounds_of_such_kernels(seed: int) -> None:
    truth, total = posed(seed)
    error = truth.exact["grad_value"].error_of(total)
    assert (error <= truth.bounds("fused_bwd")["grad_value"].max_error).all()


def test_they_are_beyond_the_bounds_of_kernels_that_store_the_sum_alone() -> None:
    beyond = 0
    for seed in range(40):
        truth, total = posed(seed)
        beyond += (truth.exact["grad_value"].error_of(total) > truth.bounds("fused")["grad_value"].max_error).any()
    assert beyond > 0
