"""mlx's attention on a CPU: the formula and its gradients, which corner causality is at, and rows without a key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.backends import LIBRARIES

MLX = LIBRARIES["mlx"]
pytestmark = [pytest.mark.mlx, pytest.mark.skipif(not MLX.is_installed, reason="mlx is not installed")]

Judge = Callable[..., dict[str, str]]
RNG = np.random.default_rng(2835)
DTYPES = ("float32", "bfloat16", "float16")


def normal(*shape: int) -> NDArray[Any]:
    return RNG.normal(size=shape)


# B 2, H 4 in 2 groups, Lq 3, Lk 5, D 4, Dv 6.
INPUTS = {"query": normal(2, 4, 3, 4), "key": normal(2, 2, 5, 4), "value": normal(2, 2, 5, 6)}
SQUARE = {**INPUTS, "query": normal(2, 4, 5, 4)}
PAST = {"past_key": normal(2, 2, 4, 4), "past_value": normal(2, 2, 4, 6)}
MASK = RNG.random((2, 1, 3, 5)) < 0.7
MASK[..., 0] = True
BIAS = normal(1, 4, 3, 1)
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plainly": (INPUTS, {}),
    "scaled": (INPUTS, {"scale": -0.75}),
    "causal from the top left": (INPUTS, {"is_causal": True}),
    "causal as long as the keys": (SQUARE, {"is_causal": True}),
    "causal behind a past": ({**INPUTS, "query": normal(2, 4, 5, 4), **PAST}, {"window": (None, 0)}),
    "a window behind a past": ({**INPUTS, **PAST}, {"window": (1, 0)}),
    "masked": ({**INPUTS, "mask": MASK, "key_lengths": np.array([3, 5])}, {}),
    "masked and biased": ({**INPUTS, "mask": MASK, "bias": BIAS}, {}),
    "sinks": ({**INPUTS, "mask": MASK, "sinks": normal(4)}, {}),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("call", CALLS)
def test_the_call_is_the_formula(judge_mode: Judge, call: str, dtype: str) -> None:
    assert judge_mode("mlx.sdpa", dtype, "attention", *CALLS[call]) == {"output": "agree"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("call", ["causal as long as the keys", "masked and biased", "sinks"])
def test_its_gradients_are_those_of_the_formula(judge_mode: Judge, call: str, dtype: str) -> None:
    inputs, options = CALLS[call]
    like_output = normal(2, 4, inputs["query"].shape[2], 6)
    found = judge_mode("mlx.sdpa", dtype, "attention_gradients", {**inputs, "grad_output": like_output}, options)
    assert set(found.values()) == {"agree"}, found
    assert len(found) == 3 + ("bias" in inputs) + ("sinks" in inputs)


def asked(inputs: dict[str, Any], **options: Any) -> NDArray[Any]:
    backend: Any = MLX.load("sdpa")
    backend.prepare("float32", 1)
    tensors = {
        name: backend.from_numpy(array.astype(np.float32) if array.dtype.kind == "f" else array)
        for name, array in inputs.items()
    }
    output: NDArray[Any] = backend.to_numpy(backend.attention(**tensors, **options)["output"])
    return output


@pytest.mark.parametrize(
    ("call", "handed_over"),
    [
        ("causal as long as the keys", "causal"),
        ("causal behind a past", "causal"),
        ("causal from the top left", "array"),
        ("plainly", "None"),
    ],
)
def test_its_own_causality_is_asked_for_where_the_last_query_stands_at_the_last_key(
    call: str, handed_over: str
) -> None:
    import mlx.core as mx

    inputs, options = CALLS[call]
    kernel = mx.fast.scaled_dot_product_attention
    with mock.patch.object(mx.fast, "scaled_dot_product_attention", side_effect=kernel) as called:
        asked(inputs, **options)
    mask = called.call_args.kwargs["mask"]
    assert ("array" if isinstance(mask, mx.array) else str(mask)) == handed_over


def test_a_row_without_a_key_is_uniform_under_a_boolean_mask_and_nan_under_one_that_is_added() -> None:
    mask = np.ones((2, 1, 3, 5), dtype=bool)
    mask[1, 0, 2] = False
    value = INPUTS["value"].astype(np.float32).mean(axis=2).repeat(2, axis=1)
    np.testing.assert_allclose(asked({**INPUTS, "mask": mask})[1, :, 2], value[1], rtol=0, atol=1e-6)
    assert np.isnan(asked({**INPUTS, "mask": mask, "bias": BIAS})[1, :, 2]).all()


def test_a_scale_that_is_no_float32_is_refused_in_float64() -> None:
    backend: Any = MLX.load("sdpa")
    tensors = {name: backend.from_numpy(array) for name, array in INPUTS.items()}
    with pytest.raises(NotImplementedError, match="holds the scale in float32"):
        backend.attention(**tensors, scale=0.77)
    assert backend.to_numpy(backend.attention(**tensors)["output"]).dtype == np.float64


@pytest.mark.parametrize("name", ["float64", "float32", "float16", "bfloat16", "int32", "bool"])
def test_arrays_go_over_and_come_back(name: str) -> None:
    import ml_dtypes

    backend: Any = MLX.load("sdpa")
    backend.prepare("float32", 1)
    array = np.arange(-4, 8).reshape(3, 4)[:, ::2].astype(getattr(ml_dtypes, name, name))
    back = backend.to_numpy(backend.from_numpy(array))
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)
