"""Keras's attention on TensorFlow: against the paper's formula, and what the calls cannot express.

Scales are powers of two here, D is 4: other scales pass through float32 on the way into
``keras.ops.dot_product_attention``, which is a matter for the judges and not for the code that calls it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.backends import BACKENDS

ENTRY = BACKENDS["tensorflow"]
pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.skipif(not ENTRY.is_installed, reason="tensorflow is not installed"),
]

Call = Callable[..., NDArray[Any]]

RNG = np.random.default_rng(1510)


def sixteenths(*shape: int) -> NDArray[Any]:
    """Draw numbers of at most 1 that are the same in float32 and float64."""
    return RNG.integers(-16, 17, size=shape) / 16


# Pairwise distinct where it matters: B 2, H 4, Lq 3, Lk 5, D 4, Dv 7.
QUERY, KEY, VALUE, GRAD_OUTPUT = (
    sixteenths(2, 4, 3, 4),
    sixteenths(2, 4, 5, 4),
    sixteenths(2, 4, 5, 7),
    sixteenths(2, 4, 3, 7),
)
BIAS = sixteenths(1, 4, 1, 5)
KEY_MASK = np.array([[1, 1, 0, 1, 1], [1, 0, 1, 1, 1]], dtype=bool).reshape(2, 1, 1, 5)
LENGTHS = np.array([5, 4])
WITHIN = (np.arange(5) < LENGTHS[:, np.newaxis]).reshape(2, 1, 1, 5)
CAUSAL = np.tri(3, 5, dtype=bool)
EVERYWHERE = np.ones((1, 1, 1, 5), dtype=bool)

# Derived in test_attention.py and test_gradients.py for numbers of the same size.
TOLERANCE, GRADIENT_TOLERANCE = 150, 7 * 120 * 10


@pytest.fixture(scope="module", params=["float32", "float64"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def unit(dtype: str) -> float:
    return float(np.finfo(dtype).eps) / 2


@pytest.fixture(scope="module")
def load() -> Iterator[Callable[[str], Any]]:
    def prepared(mode: str) -> Any:
        backend = ENTRY.load(mode)
        backend.prepare("float32", 1)
        return backend

    with mock.patch.dict(os.environ, ENTRY.environment):
        yield prepared


@pytest.fixture(scope="module")
def call(load: Callable[[str], Any], dtype: str) -> Callable[..., dict[str, NDArray[Any]]]:
    """Return what calls an operation of a mode with NumPy arrays."""

    def convert(backend: Any, value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        return backend.from_numpy(value.astype(dtype) if value.dtype.kind == "f" else value)

    def calling(mode: str, operation: str, *args: Any, **options: Any) -> dict[str, NDArray[Any]]:
        backend = load(mode)
        stages = getattr(backend, operation)(
            *(convert(backend, each) for each in args),
            **{name: convert(backend, each) for name, each in options.items()},
        )
        return {name: backend.to_numpy(stage) for name, stage in stages.items()}

    return calling


def formula(
    query: NDArray[Any],
    key: NDArray[Any],
    value: NDArray[Any],
    *,
    scale: float = 0.5,
    allowed: NDArray[np.bool_] = EVERYWHERE,
    bias: Any = 0.0,
) -> NDArray[Any]:
    """softmax(logits) V, Vaswani et al. 2017, equation 1, for real and complex numbers."""
    logits = np.einsum("bhic,bhjc->bhij", query, key) * scale + bias
    exponentials = np.where(allowed, np.exp(logits), 0)
    averaged: NDArray[Any] = np.einsum("bhij,bhjc->bhic", exponentials / exponentials.sum(-1, keepdims=True), value)
    return averaged


@pytest.mark.parametrize("mode", ["keras_dpa", "keras_attention"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {}),
        ({"scale": -0.25}, {"scale": -0.25}),
        ({"scale": 1.0}, {"scale": 1.0}),
        ({"is_causal": True}, {"allowed": CAUSAL}),
        ({"mask": KEY_MASK}, {"allowed": KEY_MASK}),
        ({"key_lengths": LENGTHS}, {"allowed": WITHIN}),
        (
            {"mask": KEY_MASK, "key_lengths": LENGTHS, "is_causal": True},
            {"allowed": KEY_MASK & WITHIN & CAUSAL},
        ),
    ],
    ids=["plain", "scale", "scale 1", "causal", "mask", "lengths", "together"],
)
def test_attention_follows_the_formula(
    call: Call, unit: float, mode: str, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = call(mode, "attention", QUERY, KEY, VALUE, **options)
    assert list(found) == ["output"]
    np.testing.assert_allclose(found["output"], formula(QUERY, KEY, VALUE, **expected), rtol=0, atol=TOLERANCE * unit)


def test_the_operation_takes_a_bias_a_mask_of_queries_and_heads_and_grouped_heads(call: Call, unit: float) -> None:
    mask = RNG.random((2, 4, 3, 5)) < 0.7
    mask[..., 0] = True
    key, value = KEY[:, :2], VALUE[:, :2]
    found = call("keras_dpa", "attention", QUERY, key, value, bias=BIAS, mask=mask, key_lengths=LENGTHS)["output"]
    expected = formula(QUERY, key[:, [0, 0, 1, 1]], value[:, [0, 0, 1, 1]], bias=BIAS, allowed=mask & WITHIN)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * unit)


def test_the_layer_takes_a_mask_of_its_own_for_every_head(call: Call, unit: float) -> None:
    mask = np.broadcast_to(KEY_MASK, (2, 4, 1, 5)).copy()
    mask[:, 2] = True
    found = call("keras_attention", "attention", QUERY, KEY, VALUE, mask=mask)["output"]
    np.testing.assert_allclose(found, formula(QUERY, KEY, VALUE, allowed=mask), rtol=0, atol=TOLERANCE * unit)


@pytest.mark.parametrize("mode", ["keras_dpa", "keras_attention"])
def test_gradients_are_those_of_the_formula(call: Call, unit: float, mode: str) -> None:
    inputs = {"query": QUERY, "key": KEY, "value": VALUE} | ({"bias": BIAS} if mode == "keras_dpa" else {})
    options = {"mask": KEY_MASK, "is_causal": True, "scale": -0.25, "key_lengths": LENGTHS}
    found = call(mode, "attention_gradients", grad_output=GRAD_OUTPUT, **inputs, **options)
    assert list(found) == [f"grad_{name}" for name in inputs]
    for name, array in inputs.items():
        gradient = np.zeros(array.shape)
        # Complex steps: Im f(x + ih) / h is f'(x), exact in float64 for a tiny h (Squire and Trapp 1998).
        for index in np.ndindex(*array.shape):
            moved = {each: value.astype(np.complex128) for each, value in inputs.items()}
            moved[name][index] += 1e-30j
            output = formula(**moved, scale=-0.25, allowed=KEY_MASK & WITHIN & CAUSAL)
            gradient[index] = (GRAD_OUTPUT * output).sum().imag / 1e-30
        limit = GRADIENT_TOLERANCE * unit
        np.testing.assert_allclose(found[f"grad_{name}"], gradient, rtol=0, atol=limit, err_msg=name)


# Two heads, as many as batch items; models 6, 3 and 8 wide, projected to D 4 and Dv 7, and to 9 at the end.
HEADS = 2
MODELS = {"query": sixteenths(2, 3, 6), "key": sixteenths(2, 5, 3), "value": sixteenths(2, 5, 8)}
WEIGHTS = {
    "query_weight": sixteenths(6, HEADS * 4) / 2,
    "key_weight": sixteenths(3, HEADS * 4) / 2,
    "value_weight": sixteenths(8, HEADS * 7) / 2,
    "output_weight": sixteenths(HEADS * 7, 9) / 2,
}
SOME_BIASES = {"key_bias": sixteenths(HEADS * 4), "output_bias": sixteenths(9)}
OF_HEADS = np.array([[1, 1, 1, 0, 1], [1, 1, 1, 1, 0]], dtype=bool).reshape(1, 2, 1, 5)
DISTANCE = np.arange(5) - np.arange(3)[:, np.newaxis]
# A query is at most 3, a key 2.5: a score is at most 15, off by 15 (6 + 4 + 2) u, and a weight by twice that and 20 u.
# A value is at most 4, and an output adds up 14 of them times a half. A wrong mask is off by 1e-2.
PROJECTED_TOLERANCE = 14 // 2 * 4 * 380


def projected_formula(biases: dict[str, NDArray[Any]], allowed: NDArray[np.bool_]) -> NDArray[Any]:
    heads = {}
    for name, model in MODELS.items():
        flat = model @ WEIGHTS[f"{name}_weight"] + biases.get(f"{name}_bias", 0.0)
        heads[name] = np.stack(np.split(flat, HEADS, axis=-1), axis=1)
    context = formula(**heads, allowed=allowed)
    merged = np.concatenate([context[:, head] for head in range(HEADS)], axis=-1)
    output: NDArray[Any] = merged @ WEIGHTS["output_weight"] + biases.get("output_bias", 0.0)
    return output


@pytest.mark.parametrize("biases", [{}, SOME_BIASES], ids=["no biases", "some biases"])
@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({}, EVERYWHERE),
        ({"is_causal": True}, CAUSAL),
        ({"mask": KEY_MASK}, KEY_MASK),
        ({"mask": OF_HEADS}, OF_HEADS),
        ({"key_lengths": LENGTHS}, WITHIN),
        ({"mask": KEY_MASK & CAUSAL, "key_lengths": LENGTHS}, KEY_MASK & CAUSAL & WITHIN),
        ({"mask": OF_HEADS, "key_lengths": LENGTHS, "is_causal": True}, OF_HEADS & WITHIN & CAUSAL),
        ({"window": (1, 1)}, abs(DISTANCE) <= 1),
        ({"window": (1, 0)}, (DISTANCE >= -1) & (DISTANCE <= 0)),
        ({"window": (1, 2), "is_causal": True}, (DISTANCE >= -1) & (DISTANCE <= 0)),
        ({"window": (None, 0)}, CAUSAL),
        ({"window": (None, None)}, EVERYWHERE),
    ],
    ids=str,
)
def test_multi_head_attention_follows_the_formula(
    call: Call, unit: float, biases: dict[str, NDArray[Any]], options: dict[str, Any], allowed: NDArray[np.bool_]
) -> None:
    found = call("keras_mha", "multi_head_attention", **MODELS, **WEIGHTS, **biases, heads=HEADS, **options)
    assert list(found) == ["output"]
    expected = projected_formula(biases, allowed)
    np.testing.assert_allclose(found["output"], expected, rtol=0, atol=PROJECTED_TOLERANCE * unit)
    whole = call("keras_mha_weights", "multi_head_attention", **MODELS, **WEIGHTS, **biases, heads=HEADS, **options)
    assert list(whole) == ["weights", "output"]
    np.testing.assert_allclose(whole["output"], expected, rtol=0, atol=PROJECTED_TOLERANCE * unit)
    weights = whole["weights"]
    assert not weights[np.broadcast_to(~allowed, weights.shape)].any()
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=0, atol=weights.shape[-1] * 4 * unit)


def test_a_layer_that_is_used_again_takes_the_weights_and_biases_of_its_call(call: Call) -> None:
    def output(weights: dict[str, NDArray[Any]], biases: dict[str, NDArray[Any]]) -> NDArray[Any]:
        return call("keras_mha", "multi_head_attention", **MODELS, **weights, **biases, heads=HEADS)["output"]

    other = {name: weight[::-1, ::-1].copy() for name, weight in WEIGHTS.items()}
    first, second = output(WEIGHTS, SOME_BIASES), output(other, {"value_bias": sixteenths(HEADS * 7)})
    assert np.abs(first - second).max() > 0.1
    np.testing.assert_array_equal(output(WEIGHTS, SOME_BIASES), first)


def test_additive_scores_follow_the_formula(call: Call, unit: float) -> None:
    key, query_weight, key_weight = sixteenths(2, 4, 5, 3), sixteenths(4, 6), sixteenths(3, 6)
    vector, bias = sixteenths(6), sixteenths(6)
    inputs = {"query_weight": query_weight, "key_weight": key_weight, "score_vector": vector}
    hidden = (QUERY @ query_weight)[..., :, np.newaxis, :] + (key @ key_weight)[..., np.newaxis, :, :]
    # Sums of at most 8, tanh within 1, six of them: below 6 (8 6 + 8) u.
    limit = {"rtol": 0, "atol": 6 * (8 * 6 + 8) * unit}
    found = call("keras_additive", "additive_scores", QUERY, key, **inputs)["scores"]
    np.testing.assert_allclose(found, np.tanh(hidden) @ vector, **limit)
    found = call("keras_additive", "additive_scores", QUERY, key, **inputs, score_bias=bias)["scores"]
    np.testing.assert_allclose(found, np.tanh(hidden + bias) @ vector, **limit)


@pytest.mark.parametrize("mode", ["keras_dpa", "keras_attention"])
def test_a_row_without_a_key_is_uniform_in_float32_as_is_known(
    load: Callable[[str], Any], mode: str, given_without_a_key: Callable[[str, str], dict[str, str]]
) -> None:
    assert given_without_a_key(f"tensorflow.{mode}", "float32") == {"empty_rows": "uniform"}
    backend = load(mode)
    query, key, value = (backend.from_numpy(each.astype(np.float32)) for each in (QUERY, KEY, VALUE))
    output = backend.attention(query, key, value, mask=backend.from_numpy(np.zeros((1, 1, 1, 5), dtype=bool)))["output"]
    expected = np.broadcast_to(VALUE.mean(axis=2, keepdims=True), (2, 4, 3, 7))
    np.testing.assert_allclose(backend.to_numpy(output), expected, rtol=0, atol=TOLERANCE * 2.0**-24)


@pytest.mark.parametrize(
    ("mode", "operation", "options", "reason"),
    [
        ("keras_attention", "attention", {"mask": CAUSAL.reshape(1, 1, 3, 5)}, "a mask of keys"),
        ("keras_attention", "attention", {"key": KEY[:, :2], "value": VALUE[:, :2]}, "no grouped heads"),
        ("keras_mha", "multi_head_attention", {"output_weight": None}, "needs output_weight"),
        ("keras_mha", "multi_head_attention", {"kv_heads": 1}, "as many key and value heads"),
        ("keras_mha", "multi_head_attention", {"window": (1, 2)}, "causal or alike on both sides"),
    ],
)
def test_what_a_call_cannot_express_is_refused_with_the_reason(
    call: Call, mode: str, operation: str, options: dict[str, Any], reason: str
) -> None:
    plain: dict[str, Any] = {"query": QUERY, "key": KEY, "value": VALUE}
    if operation == "multi_head_attention":
        plain = {**MODELS, **WEIGHTS, "heads": HEADS}
    with pytest.raises(NotImplementedError, match=reason):
        call(mode, operation, **plain | options)


def test_windows_are_refused_by_a_keras_that_has_none_and_nothing_else_is(
    load: Callable[[str], Any], call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = load("keras_mha")
    import keras

    class Older(keras.layers.MultiHeadAttention):  # type: ignore[misc] # untyped
        """The layer's signature of Keras 3.6, which takes any keyword and refuses those that it does not know."""

        def __init__(self, num_heads: int, key_dim: int, **options: Any) -> None:
            assert "sliding_window" not in options
            super().__init__(num_heads, key_dim, **options)

    plain = call("keras_mha", "multi_head_attention", **MODELS, **WEIGHTS, heads=HEADS)["output"]
    monkeypatch.setattr(keras.layers, "MultiHeadAttention", Older)
    backend._build_layer.cache_clear()
    found = call("keras_mha", "multi_head_attention", **MODELS, **WEIGHTS, heads=HEADS)["output"]
    np.testing.assert_array_equal(found, plain)
    with pytest.raises(NotImplementedError, match="has no windows"):
        call("keras_mha", "multi_head_attention", **MODELS, **WEIGHTS, heads=HEADS, window=(1, 0))
    backend._build_layer.cache_clear()


def test_the_modes_describe_keras_and_say_which_framework_it_computes_with(load: Callable[[str], Any]) -> None:
    description = load("keras_dpa").describe()
    assert description["keras_backend"] == "tensorflow"
    assert {"version", "device", "keras"} <= set(description)


def test_keras_on_another_framework_is_refused_with_what_to_do(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = load("keras_dpa")
    import keras

    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(
        RuntimeError, match="Keras computes with jax, expected tensorflow: set KERAS_BACKEND=tensorflow"
    ):
        backend.prepare("float32", 1)
