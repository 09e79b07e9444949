"""bfloat16 and float16, where a backend declares them: sums accumulate in float32.

That is the class ``eager`` of docs/numerics.md, section 3. A sum that stays in bfloat16 sticks at 256, where adding 1
changes nothing, and one that stays in float16 at 2048.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

Run = Callable[..., dict[str, NDArray[Any]]]

LENGTH = 4096
UNITS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


@pytest.fixture
def half_unit(half_setting: Any) -> float:
    return UNITS[str(half_setting.dtype)]


def test_products_add_up_in_float32(run_half: Run) -> None:
    ones = np.ones((1, 1, 1, LENGTH))
    scores = run_half("dot_scores", ones, ones, scale=1.0)["raw_scores"]
    assert float(scores[0, 0, 0, 0]) == LENGTH
    flat, column = np.zeros((1, 1, LENGTH, 1)), np.ones((1, 1, LENGTH, 1))
    # 4,096 weights of 2^-12 and as many values of 1.
    assert float(run_half("attention", np.zeros((1, 1, 1, 1)), flat, column)["output"][0, 0, 0, 0]) == 1


def test_exponentials_add_up_in_float32(run_half: Run, half_unit: float) -> None:
    stages = run_half("softmax", np.zeros((1, 1, 1, LENGTH)))
    np.testing.assert_array_equal(stages["weights"].astype(np.float64), np.full((1, 1, 1, LENGTH), 1 / LENGTH))
    # A logarithm near 8.3 that is rounded once or twice.
    np.testing.assert_allclose(stages["log_sum_exp"].astype(np.float64), math.log(LENGTH), rtol=4 * half_unit, atol=0)


def test_the_gradient_of_a_value_adds_up_in_float32(run_half: Run) -> None:
    # One key, whose weight is 1 in 4,096 rows.
    query, one, grad_output = np.zeros((1, 1, LENGTH, 2)), np.ones((1, 1, 1, 2)), np.ones((1, 1, LENGTH, 2))
    found = run_half("attention_gradients", query, one, one, grad_output)
    np.testing.assert_array_equal(found["grad_value"].astype(np.float64), np.full((1, 1, 1, 2), LENGTH))


# Weights of 1/2, and with these values logits whose gradients are 1/2 and -1/2.
TWO_KEYS = {"key": np.zeros((1, 1, 2, 1)), "value": np.array([1.0, -1.0]).reshape(1, 1, 2, 1)}


@pytest.fixture
def run_outer_sums(half_setting: Any, run_half: Run, request: pytest.FixtureRequest) -> Run:
    """Return ``run_half`` where sums over an axis that is not the last are known to add up in float32, or not to."""
    if half_setting.name == "tensorflow" and str(half_setting.dtype) == "float16":
        # tf.reduce_sum(tf.fill((4096, 2), tf.cast(0.5, tf.float16)), axis=0) is [1024, 1024]:
        # https://github.com/tensorflow/tensorflow/issues/123299
        request.applymarker(pytest.mark.xfail(reason="tf.reduce_sum adds up float16 in float16"))
    return run_half


def test_the_gradient_of_a_bias_adds_up_in_float32(run_outer_sums: Run) -> None:
    rows = {"query": np.zeros((1, 1, LENGTH, 1)), "grad_output": np.ones((1, 1, LENGTH, 1))}
    found = run_outer_sums("attention_gradients", **rows, **TWO_KEYS, bias=np.zeros((1, 1, 1, 2)))
    np.testing.assert_array_equal(found["grad_bias"].astype(np.float64).ravel(), [LENGTH / 2, -LENGTH / 2])


def test_the_gradient_of_a_value_that_heads_share_adds_up_in_float32(run_outer_sums: Run) -> None:
    heads = {"query": np.zeros((1, LENGTH, 1, 1)), "grad_output": np.ones((1, LENGTH, 1, 1))}
    found = run_outer_sums("attention_gradients", **heads, **TWO_KEYS)
    np.testing.assert_array_equal(found["grad_value"].astype(np.float64).ravel(), [LENGTH / 2, LENGTH / 2])
