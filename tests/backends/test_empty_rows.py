"""What a query without a key gives: each convention of the contract in every framework, and nothing else changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

Array = NDArray[Any]
Run = Callable[..., dict[str, Array]]

WEIGHT = {"zero": 0.0, "uniform": 0.25, "nan": np.nan}
"""Of four keys, so that the weight is a number of every format."""
DRAWN = np.random.default_rng(12)
# Quarters, so that products and sums of a few are exact.
QUERY, KEY, VALUE, GRAD = (
    DRAWN.integers(-8, 9, shape) / 4 for shape in ((1, 4, 3, 2), *[(1, 2, 4, 2)] * 2, (1, 4, 3, 2))
)
MASK = np.ones((1, 4, 3, 4), dtype=bool)
MASK[0, 2, 1] = False  # a query of the second pair of heads, which share the second head of keys
OTHERS = MASK.any(axis=-1)
INPUTS = {"query": QUERY, "key": KEY, "value": VALUE, "mask": MASK}
GRADIENTS = ("grad_query", "grad_key", "grad_value")


@pytest.mark.parametrize("convention", WEIGHT)
def test_a_row_of_minus_infinities_has_the_weights_of_the_convention(run: Run, convention: str) -> None:
    scores = np.array([[[[-np.inf] * 4, [0.5, 1.0, -np.inf, 2.0]]]])
    weights = run("softmax", scores, empty_rows=convention)["weights"]
    np.testing.assert_array_equal(weights[0, 0, 0], np.full(4, WEIGHT[convention], weights.dtype))
    np.testing.assert_array_equal(weights[0, 0, 1], run("softmax", scores)["weights"][0, 0, 1])


def test_without_a_word_a_row_without_a_key_is_zero(run: Run) -> None:
    silent, said = run("attention", **INPUTS), run("attention", **INPUTS, empty_rows="zero")
    for stage, array in silent.items():
        np.testing.assert_array_equal(array, said[stage])
    np.testing.assert_array_equal(silent["output"][0, 2, 1], np.zeros(2))


@pytest.mark.parametrize("convention", ["uniform", "nan"])
def test_attention_gives_the_mean_or_nan_there_and_nowhere_else(run: Run, convention: str) -> None:
    found, plain = run("attention", **INPUTS, empty_rows=convention), run("attention", **INPUTS)
    expected = VALUE[0, 1].mean(axis=0) if convention == "uniform" else np.full(2, np.nan)
    np.testing.assert_array_equal(found["output"][0, 2, 1], expected)
    for stage in ("weights", "output"):
        np.testing.assert_array_equal(found[stage][OTHERS], plain[stage][OTHERS])


@pytest.mark.parametrize("given", ["bias", "is_causal", "key_lengths", "window"])
@pytest.mark.parametrize("convention", ["uniform", "nan"])
def test_whatever_leaves_a_query_no_key(run: Run, convention: str, given: str) -> None:
    everything: dict[str, Any] = {
        "bias": np.full((1, 1, 1, 4), -np.inf),
        "is_causal": True,
        "key_lengths": np.array([0]),
        "window": (None, -5),
    }
    options = {given: everything[given]} | (
        {"mask": np.tri(3, 4, -1, dtype=bool)[None, None]} if given == "is_causal" else {}
    )
    plain = {name: array for name, array in INPUTS.items() if name != "mask"}
    output = run("attention", **plain, **options, empty_rows=convention)["output"][0, 0, 0]
    expected = VALUE[0, 0].mean(axis=0) if convention == "uniform" else np.full(2, np.nan)
    np.testing.assert_array_equal(output, expected)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("convention", ["uniform", "nan"])
def test_only_the_gradient_of_the_values_hears_of_such_a_row(
    run: Run, unit: float, convention: str, bias: bool
) -> None:
    inputs = INPUTS | {"grad_output": GRAD} | ({"bias": np.full((1, 4, 1, 4), 0.5)} if bias else {})
    plain, found = run("attention_gradients", **inputs), run("attention_gradients", **inputs, empty_rows=convention)
    for stage in plain.keys() - {"grad_value"}:
        np.testing.assert_array_equal(found[stage], plain[stage])
    np.testing.assert_array_equal(found["grad_value"][0, 0], plain["grad_value"][0, 0])
    shared = found["grad_value"][0, 1] - plain["grad_value"][0, 1]
    if convention == "nan":
        assert np.isnan(shared).all()
    else:  # sums of a few numbers below 8
        np.testing.assert_allclose(shared, np.broadcast_to(GRAD[0, 2, 1] / 4, (4, 2)), rtol=0, atol=64 * unit)


@pytest.mark.parametrize("is_projected", [False, True])
@pytest.mark.parametrize("convention", ["uniform", "nan"])
def test_one_head_of_a_query_reaches_what_its_projection_makes_of_it(
    run: Run, unit: float, convention: str, is_projected: bool
) -> None:
    words = {
        name: DRAWN.integers(-4, 5, (1, length, 4)) / 4 for name, length in (("query", 3), ("key", 4), ("value", 4))
    }
    words |= {f"{name}_weight": np.eye(4) for name in ("query", "key", "value")}
    words |= {"output_weight": np.ones((4, 1))} if is_projected else {}
    mask = np.ones((1, 2, 3, 4), dtype=bool)
    mask[0, 1, 2] = False
    options = {"heads": 2, "mask": mask}
    plain, found = (run("multi_head_attention", **words, **options, empty_rows=each) for each in ("zero", convention))
    mean = words["value"][0].mean(axis=0)[2:]
    part = np.full(2, np.nan) if convention == "nan" else mean
    np.testing.assert_array_equal(found["context"][0, 1, 2], part)
    difference = found["output"] - plain["output"]
    reached = difference[0, 2] if is_projected else difference[0, 2, 2:]
    # A sum of four numbers of at most 1 with and without two of them.
    np.testing.assert_allclose(reached, part.sum(keepdims=True) if is_projected else part, rtol=0, atol=16 * unit)
    np.testing.assert_array_equal(np.delete(difference[0], 2, axis=0), 0)


def test_without_any_key_every_convention_is_zero_values(run: Run) -> None:
    inputs = {"query": QUERY, "key": KEY[:, :, :0], "value": VALUE[:, :, :0]}
    for convention in ("zero", "uniform"):
        output = run("attention", **inputs, empty_rows=convention)["output"]
        np.testing.assert_array_equal(output, np.zeros((1, 4, 3, 2)))
