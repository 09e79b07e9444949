"""Paddle's attention on a CPU: the formula and its gradients, and which causality is its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.backends import LIBRARIES

PADDLE = LIBRARIES["paddle"]
pytestmark = [pytest.mark.paddle, pytest.mark.skipif(not PADDLE.is_installed, reason="paddlepaddle is not installed")]

Judge = Callable[..., dict[str, str]]
RNG = np.random.default_rng(9686)


def normal(*shape: int) -> NDArray[Any]:
    return RNG.normal(size=shape)


# B 2, H 4 in 2 groups, Lq 3, Lk 5, D 4.
INPUTS = {"query": normal(2, 4, 3, 4), "key": normal(2, 2, 5, 4), "value": normal(2, 2, 5, 4)}
PAST = {"past_key": normal(2, 2, 4, 4), "past_value": normal(2, 2, 4, 4)}
BIAS = normal(1, 4, 3, 5)
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "scaled": (INPUTS, {"scale": -0.75}),
    "causal": (INPUTS, {"is_causal": True}),
    "biased, of lengths": ({**INPUTS, "bias": BIAS, "key_lengths": np.array([3, 5])}, {}),
    "biased": ({**INPUTS, "bias": BIAS}, {}),
    "a window": (INPUTS, {"window": (1, 1)}),
    "a window behind a past": ({**INPUTS, **PAST}, {"window": (1, 0)}),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("call", CALLS)
def test_the_call_is_the_formula(judge_mode: Judge, call: str, dtype: str) -> None:
    assert judge_mode("paddle.sdpa", dtype, "attention", *CALLS[call]) == {"output": "agree"}


@pytest.mark.parametrize("call", ["scaled", "biased"])
def test_its_gradients_are_those_of_the_formula(judge_mode: Judge, call: str) -> None:
    inputs, options = CALLS[call]
    asked = {**inputs, "grad_output": normal(2, 4, 3, 4)}
    found = judge_mode("paddle.sdpa", "float32", "attention_gradients", asked, options)
    assert set(found.values()) == {"agree"}, found
    assert len(found) == 3 + ("bias" in inputs)


@pytest.mark.parametrize(("call", "its_own", "masked"), [("causal", True, False), ("a window", False, True)])
def test_its_own_causality_is_asked_for_where_nothing_else_forbids_a_key(
    call: str, its_own: bool, masked: bool
) -> None:
    backend: Any = PADDLE.load("sdpa")
    backend.prepare("float32", 1)
    inputs, options = CALLS[call]
    tensors = {name: backend.from_numpy(array.astype(np.float32)) for name, array in inputs.items()}
    kernel = backend.functional.scaled_dot_product_attention
    with mock.patch.object(backend.functional, "scaled_dot_product_attention", side_effect=kernel) as called:
        backend.attention(**tensors, **options)
    handed_over = called.call_args.kwargs
    assert (handed_over["is_causal"], handed_over["attn_mask"] is not None) == (its_own, masked)


@pytest.mark.parametrize("name", ["float64", "float32", "float16", "bfloat16", "int32", "bool"])
def test_arrays_go_over_and_come_back(name: str) -> None:
    import ml_dtypes

    backend: Any = PADDLE.load("sdpa")
    array = np.arange(-4, 8).reshape(3, 4)[:, ::2].astype(getattr(ml_dtypes, name, name))
    back = backend.to_numpy(backend.from_numpy(array))
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)
