"""bfloat16 and float16, where a backend declares them: bits are kept, and sums accumulate in float32.

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


def test_every_number_of_sixteen_bits_comes_back_from_the_framework_bit_by_bit(half_setting: Any) -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    numbers = bits.view(half_setting.dtype)
    with np.errstate(invalid="ignore"):  # a signalling NaN is among them
        numbers = numbers[~np.isnan(numbers)]
    back = half_setting.backend.to_numpy(half_setting.backend.from_numpy(numbers))
    assert back.dtype == half_setting.dtype
    np.testing.assert_array_equal(back.view(np.uint16), numbers.view(np.uint16))


@pytest.mark.parametrize(
    "view",
    [
        lambda array: array[:, ::-1, ::-2],
        lambda array: array.swapaxes(0, 2),
        lambda array: np.broadcast_to(array[:, :1], array.shape),
        lambda array: array[:, :, :0],
        lambda array: array[0, 0, 0],
    ],
    ids=["negative strides", "transposed", "broadcast", "empty", "rank 0"],
)
def test_a_view_comes_back_with_its_dtype_shape_and_numbers(
    half_setting: Any, view: Callable[[NDArray[Any]], Any]
) -> None:
    array = np.asarray(view(np.arange(24).reshape(2, 3, 4).astype(half_setting.dtype)))
    back = half_setting.backend.to_numpy(half_setting.backend.from_numpy(array))
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(back, array)


def test_every_operation_keeps_the_dtype(half_setting: Any, run_half: Run) -> None:
    query, key, value, identity = np.ones((2, 2, 3, 4)), np.ones((2, 2, 5, 4)), np.ones((2, 2, 5, 6)), np.eye(4)
    options = {
        "mask": np.ones((1, 1, 1, 5), dtype=bool),
        "bias": np.zeros((1, 2, 1, 5)),
        "window": (3, None),
        "key_lengths": np.array([5, 3]),
    }
    weights = {f"{name}_weight": identity for name in ("query", "key", "value", "output")}
    model = np.ones((2, 3, 4))
    found = [
        run_half("dot_scores", query, key, scale=0.3, softcap=2.0),
        run_half("cosine_scores", query, key, scale=3.0),
        run_half("general_scores", query, key, identity),
        run_half("additive_scores", query, key, identity, identity, np.ones(4), score_bias=np.ones(4)),
        run_half("attention", query, key, value, **options, scale=0.3, softcap=2.0),
        run_half("attention_gradients", query, key, value, np.ones((2, 2, 3, 6)), **options, scale=0.3, softcap=2.0),
        run_half("multi_head_attention", model, model, model, heads=2, kv_heads=2, **weights, is_causal=True),
    ]
    assert {stage.dtype for stages in found for stage in stages.values()} == {half_setting.dtype}


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


def test_a_row_without_a_key_is_zero_and_so_are_its_gradients(run_half: Run) -> None:
    query, key, value = np.ones((1, 2, 3, 4)), np.ones((1, 1, 5, 4)), np.ones((1, 1, 5, 4))
    mask = np.array([True, False, True]).reshape(1, 1, 3, 1)
    stages = run_half("attention", query, key, value, mask=mask)
    assert (stages["output"][:, :, 1] == 0).all()
    assert (stages["output"][:, :, [0, 2]] == 1).all()
    found = run_half("attention_gradients", query, key, value, np.ones((1, 2, 3, 4)), mask=mask)
    assert all(np.isfinite(gradient.astype(np.float64)).all() for gradient in found.values())
    assert (found["grad_query"][:, :, 1] == 0).all()


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
