"""Gradients of attention: against the paper's formula differentiated by complex steps, and where they must vanish.

For a function that is real on the real axis, Im f(x + ih) / h is f'(x) with an error of h^2 and no cancellation
(Squire and Trapp 1998, "Using complex variables to estimate derivatives of real functions"): exact in float64 for a
tiny h. No formula for a derivative enters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

Run = Callable[..., dict[str, NDArray[Any]]]

RNG = np.random.default_rng(1847)


def sixteenths(*shape: int) -> NDArray[Any]:
    """Draw numbers of at most 1 that are the same in float32 and float64."""
    return RNG.integers(-16, 17, size=shape) / 16


# Pairwise distinct where it matters: B 2, H 4 in 2 groups, Lq 3, Lk 5, D 6, Dv 7.
INPUTS = {
    "query": sixteenths(2, 4, 3, 6),
    "key": sixteenths(2, 2, 5, 6),
    "value": sixteenths(2, 2, 5, 7),
    "bias": sixteenths(1, 4, 1, 5),
}
GRAD_OUTPUT = sixteenths(2, 4, 3, 7)
MASK = np.array([True, True, False, True, True, True, False, True, True, True]).reshape(2, 1, 1, 5)
LENGTHS = np.array([5, 4])

# Entries are at most 1: the gradient of a weight is at most 7, that of a score at most 3.5, and each is off by the
# weights' 100 u (test_attention.py) and the sums' 20 u; 20 of them (2 batch items, 2 heads of a group, 5 keys, or 3
# queries) of alike signs are added up at most. The typical error is below 10 u. A wrong term is off by 1e-2 or more.
TOLERANCE = 7 * 120 * 10


def formula(
    inputs: dict[str, NDArray[Any]], allowed: NDArray[np.bool_], scale: float, softcap: float | None
) -> NDArray[Any]:
    """softmax(logits) V, Vaswani et al. 2017, equation 1, for complex numbers; a row without a key is zero."""
    key, value = (inputs[name][:, [0, 0, 1, 1]] for name in ("key", "value"))
    scores = np.einsum("bhic,bhjc->bhij", inputs["query"], key) * scale
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    exponentials = np.where(allowed, np.exp(scores + inputs["bias"]), 0)
    total = exponentials.sum(axis=-1, keepdims=True)
    averaged: NDArray[Any] = np.einsum("bhij,bhjc->bhic", exponentials / np.where(total == 0, 1, total), value)
    return averaged


def differentiate(name: str, allowed: NDArray[np.bool_], scale: float, softcap: float | None = None) -> NDArray[Any]:
    """Differentiate sum(grad_output * output) by every element of one input."""
    step, gradient = 1e-30, np.zeros(INPUTS[name].shape)
    for index in np.ndindex(*gradient.shape):
        moved = {each: array.astype(np.complex128) for each, array in INPUTS.items()}
        moved[name][index] += 1j * step
        gradient[index] = (GRAD_OUTPUT * formula(moved, allowed, scale, softcap)).sum().imag / step
    return gradient


OPTIONS: dict[str, Any] = {
    "mask": MASK,
    "is_causal": True,
    "scale": -0.75,
    "softcap": 1.5,
    "window": (2, 1),  # beside causality, only its left side counts
    "key_lengths": LENGTHS,
}
ALLOWED = np.array(
    [
        [MASK[batch, 0, 0, j] and i - 2 <= j <= i and j < LENGTHS[batch] for j in range(5)]
        for batch in range(2)
        for i in range(3)
    ]
).reshape(2, 1, 3, 5)
EVERYWHERE = np.ones((2, 1, 3, 5), dtype=bool)


@pytest.fixture(scope="module")
def expected() -> dict[str, NDArray[Any]]:
    return {f"grad_{name}": differentiate(name, ALLOWED, -0.75, 1.5) for name in INPUTS}


@pytest.fixture(scope="module")
def expected_plainly() -> dict[str, NDArray[Any]]:
    return {f"grad_{name}": differentiate(name, EVERYWHERE, 1 / math.sqrt(6)) for name in INPUTS}


def agree(found: dict[str, NDArray[Any]], expected: dict[str, NDArray[Any]], unit: float) -> None:
    assert list(found) == list(expected)
    for name, gradient in expected.items():
        np.testing.assert_allclose(found[name], gradient, rtol=0, atol=TOLERANCE * unit, err_msg=name)


def test_gradients_are_those_of_the_formula(run: Run, unit: float, expected_plainly: dict[str, NDArray[Any]]) -> None:
    agree(run("attention_gradients", grad_output=GRAD_OUTPUT, **INPUTS), expected_plainly, unit)


def test_gradients_with_every_option_together_are_those_of_the_formula(
    run: Run, unit: float, expected: dict[str, NDArray[Any]]
) -> None:
    agree(run("attention_gradients", grad_output=GRAD_OUTPUT, **INPUTS, **OPTIONS), expected, unit)


@pytest.mark.parametrize("how", ["mask", "bias", "key_lengths"])
def test_a_row_without_a_key_has_gradients_of_zero_and_the_others_are_not_disturbed(run: Run, how: str) -> None:
    allowed = np.array([True, False, True]).reshape(1, 1, 3, 1)
    inputs, options = dict(INPUTS), {}
    if how == "mask":
        options = {"mask": allowed}
    elif how == "bias":
        inputs["bias"] = np.where(allowed, inputs["bias"], -np.inf)
    else:
        allowed, options = np.array([True, False]).reshape(2, 1, 1, 1), {"key_lengths": np.array([5, 0])}
    full = np.broadcast_to(allowed, (2, 4, 3, 1))
    # The empty rows' own gradients are nothing; what they would add to key, value and bias is nothing as well.
    found = run("attention_gradients", grad_output=GRAD_OUTPUT, **inputs, **options)
    silenced = run("attention_gradients", grad_output=GRAD_OUTPUT * full, **inputs, **options)
    assert (found["grad_query"][~full[..., 0]] == 0).all()
    assert (found["grad_query"][full[..., 0]] != 0).any()
    for name, gradient in found.items():
        assert np.isfinite(gradient).all(), name
        np.testing.assert_array_equal(gradient, silenced[name], err_msg=name)


def test_what_may_not_be_attended_has_gradients_of_zero(run: Run) -> None:
    options = {"mask": MASK, "key_lengths": np.array([5, 4])}
    found = run("attention_gradients", grad_output=GRAD_OUTPUT, **INPUTS, **options)
    for name in ("grad_key", "grad_value"):
        assert (found[name][0, :, 2] == 0).all()  # masked
        assert (found[name][1, :, 4] == 0).all()  # beyond the length
        assert (found[name][0, :, [0, 1, 3, 4]] != 0).any(axis=-1).all()


def test_a_single_key_leaves_scores_nothing_to_say(run: Run) -> None:
    # Its weight is 1 whatever its score is, and its value's gradient is the sum of what was asked of each output.
    one = {name: INPUTS[name][:, :, :1] for name in ("key", "value")}
    found = run("attention_gradients", INPUTS["query"], **one, grad_output=GRAD_OUTPUT)
    assert (found["grad_query"] == 0).all()
    assert (found["grad_key"] == 0).all()
    summed = GRAD_OUTPUT.reshape(2, 2, 2, 3, 7).sum(axis=(2, 3))  # sixteenths: exact
    np.testing.assert_array_equal(found["grad_value"][:, :, 0], summed)


def test_a_bias_of_its_own_for_every_score_gets_the_gradient_of_every_score(run: Run, unit: float) -> None:
    # The bias is added where its one row is repeated for three queries and two batch items: those add up.
    whole = {**INPUTS, "bias": np.broadcast_to(INPUTS["bias"], (2, 4, 3, 5))}
    each = run("attention_gradients", grad_output=GRAD_OUTPUT, **whole, **OPTIONS)["grad_bias"]
    summed = run("attention_gradients", grad_output=GRAD_OUTPUT, **INPUTS, **OPTIONS)["grad_bias"]
    assert each.shape == (2, 4, 3, 5)
    assert (each[~np.broadcast_to(ALLOWED, each.shape)] == 0).all()
    np.testing.assert_allclose(each.sum(axis=(0, 2), keepdims=True), summed, rtol=0, atol=TOLERANCE * unit)


def test_no_keys_have_no_gradients_and_leave_the_query_with_zeros(run: Run) -> None:
    none = {name: INPUTS[name][:, :, :0] for name in ("key", "value")}
    found = run("attention_gradients", INPUTS["query"], **none, grad_output=GRAD_OUTPUT)
    np.testing.assert_array_equal(found["grad_query"], np.zeros((2, 4, 3, 6)))
    assert (found["grad_key"].shape, found["grad_value"].shape) == ((2, 2, 0, 6), (2, 2, 0, 7))
