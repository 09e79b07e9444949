"""Keys and values of 8 bits times their scales: the exact product, and bounds for every way to apply a scale."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import mpmath
import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.attention.rounding import rounding_model_named
from attncheck.backends import numpy_backend
from attncheck.judging.truth import Truth, find_truth
from attncheck.reading.dtypes import EIGHT_BITS

Array = NDArray[Any]


def drawn(seed: int, name: str, dtype: Any = np.float32) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    codes = EIGHT_BITS[name]
    return {
        "query": rng.normal(size=(1, 4, 3, 5)).astype(dtype),
        "key": (20 * rng.normal(size=(1, 2, 6, 5))).astype(codes),
        "value": (20 * rng.normal(size=(1, 2, 6, 4))).astype(codes),
        "key_scale": rng.uniform(0.005, 0.1, (1, 2, 6)).astype(dtype),
        "value_scale": rng.uniform(0.005, 1, (1, 2, 1)).astype(dtype),
    }


def truth_of(inputs: dict[str, Array], dtype: str, **options: Any) -> Truth:
    return find_truth("quantized_attention", options, inputs, dtype, supports_statistics=True)


@pytest.mark.parametrize("name", EIGHT_BITS)
@pytest.mark.parametrize("seed", range(10))
def test_the_exact_answer_is_that_of_codes_times_scales_at_200_bits(seed: int, name: str) -> None:
    inputs = drawn(seed, name)
    exact = truth_of(inputs, "float32").exact["output"]
    with mpmath.workprec(200):
        for (h, i, c), value in np.ndenumerate(exact.high[0]):
            assert abs(by_definition(inputs, h, i, c) - value) <= abs(value) * 2.0**-52


def by_definition(inputs: dict[str, Array], h: int, i: int, c: int) -> Any:
    head = h // 2
    query = [mpmath.mpf(float(x)) for x in inputs["query"][0, h, i]]
    scores = [
        mpmath.fsum(q * mpmath.mpf(float(k)) for q, k in zip(query, row, strict=True)) * mpmath.mpf(float(scale))
        for row, scale in zip(inputs["key"][0, head], inputs["key_scale"][0, head], strict=True)
    ]
    terms = [mpmath.exp(score / mpmath.sqrt(5)) for score in scores]
    values = [
        mpmath.mpf(float(row[c])) * mpmath.mpf(float(inputs["value_scale"][0, head, 0]))
        for row in inputs["value"][0, head]
    ]
    return mpmath.fsum(term * value for term, value in zip(terms, values, strict=True)) / mpmath.fsum(terms)


def scaled_first(inputs: dict[str, Array]) -> Array:
    """Store keys and values times their scales, as the NumPy backend does."""
    return np.asarray(numpy_backend.quantized_attention(**inputs)["output"])


def scaled_last(inputs: dict[str, Array]) -> Array:
    """Multiply scores with the scale of each key, and the output with that of the head."""
    query = inputs["query"]
    key, value = (np.repeat(inputs[name].astype(query.dtype), 2, axis=1) for name in ("key", "value"))
    of_keys, of_values = (np.repeat(inputs[f"{name}_scale"], 2, axis=1) for name in ("key", "value"))
    scores = query @ key.swapaxes(-1, -2) * of_keys[:, :, np.newaxis] * query.dtype.type(1 / np.sqrt(5))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.asarray(weights @ value * of_values[:, :, np.newaxis])


@pytest.mark.parametrize("name", EIGHT_BITS)
@pytest.mark.parametrize(("dtype", "model"), [("float64", "native"), ("float32", "native"), ("float16", "eager")])
@pytest.mark.parametrize("way", [scaled_first, scaled_last])
def test_every_way_to_apply_a_scale_is_within_bounds(way: Any, dtype: str, model: str, name: str) -> None:
    for seed in range(20):
        inputs = drawn(seed, name, np.dtype(dtype))
        truth = truth_of(inputs, dtype)
        error = np.abs(way(inputs).astype(np.float64) - truth.exact["output"].high)
        bound = truth.bounds(model)["output"].max_error
        assert (error <= bound).all()
        assert (bound <= 2.0**12 * np.finfo(dtype).eps * 10).all()  # and no larger than what rounding can make


def test_a_scale_that_is_left_out_is_beyond_every_bound() -> None:
    inputs = drawn(1, "float8_e4m3fn")
    truth = truth_of(inputs, "float32")
    wrong = scaled_first({**inputs, "value_scale": np.ones_like(inputs["value_scale"])})
    assert (np.abs(wrong - truth.exact["output"].high) > 1000 * truth.bounds("native")["output"].max_error).all()


def test_weights_of_8_bits_are_allowed_their_rounding_and_no_more() -> None:
    inputs = drawn(2, "float8_e4m3fn", np.dtype(ml_dtypes.bfloat16))
    bounds = {name: truth_of(inputs, "bfloat16").bounds(name)["output"].max_error for name in ("fused", "fused_fp8")}
    assert (bounds["fused_fp8"] > bounds["fused"]).all()
    model = rounding_model_named("fused_fp8", "bfloat16")
    info = ml_dtypes.finfo(ml_dtypes.float8_e4m3fn)
    assert model.weight_unit == float(info.eps) / 2
    assert model.weight_underflow == float(info.smallest_subnormal) / 2
