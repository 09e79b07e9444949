"""The eager functions as graphs, with and without XLA: against the paper's formula, and that they are graphs at all."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.backends import BACKENDS

ENTRY = BACKENDS["tensorflow"]
pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.skipif(not ENTRY.is_installed, reason="tensorflow is not installed"),
]

RNG = np.random.default_rng(2110)
# Pairwise distinct where it matters: B 2, H 4 in 2 groups, P 2, Lq 3, Lk 5 (T 7), D 6, Dv 8. Sixteenths are exact.
QUERY, GRAD_OUTPUT = RNG.integers(-16, 17, size=(2, 4, 3, 6)) / 16, RNG.integers(-16, 17, size=(2, 4, 3, 8)) / 16
KEYS, VALUES = RNG.integers(-16, 17, size=(2, 2, 7, 6)) / 16, RNG.integers(-16, 17, size=(2, 2, 7, 8)) / 16
PAST = 2
BIAS = RNG.integers(-16, 17, size=(1, 4, 1, 7)) / 16
# The first batch item's second query has no key.
MASK = np.array([[1, 1, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 1, 1], *[[1] * 7] * 3])
MASK = MASK.astype(bool).reshape(2, 1, 3, 7)
LENGTHS = np.array([6, 4])
# Queries stand at 2, 3 and 4; a window of 3 before and 1 after them.
ALLOWED = np.array(
    [
        [MASK[b, 0, i, j] and PAST + i - 3 <= j <= PAST + i + 1 and j < LENGTHS[b] for j in range(7)]
        for b in range(2)
        for i in range(3)
    ]
).reshape(2, 1, 3, 7)
UNIT = 2.0**-24
TOLERANCE = 150  # units: derived in test_attention.py for the same sizes of numbers


@pytest.fixture(scope="module", params=["function", "xla"])
def mode(request: pytest.FixtureRequest) -> Iterator[Any]:
    backend = ENTRY.load(request.param)
    backend.prepare("float32", 1)
    return backend


def call(backend: Any, operation: str, *args: NDArray[Any], **options: Any) -> dict[str, NDArray[Any]]:
    def convert(value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        return backend.from_numpy(value.astype(np.float32) if value.dtype.kind == "f" else value)

    stages = getattr(backend, operation)(*map(convert, args), **{name: convert(each) for name, each in options.items()})
    return {name: backend.to_numpy(stage) for name, stage in stages.items()}


def test_attention_with_a_past_and_every_option_follows_the_formula(mode: Any) -> None:
    key, value = (each[:, [0, 0, 1, 1]] for each in (KEYS, VALUES))
    capped = 1.5 * np.tanh(-0.75 * np.einsum("bhic,bhjc->bhij", QUERY, key) / 1.5)
    exponentials = np.where(ALLOWED, np.exp(capped + BIAS), 0)
    total = exponentials.sum(axis=-1)
    weights = exponentials / np.where(total == 0, 1, total)[..., np.newaxis]
    expected = {
        "capped": capped,
        "masked": np.where(ALLOWED, capped + BIAS, -np.inf),
        "weights": weights,
        "log_sum_exp": [[[math.log(each) if each else -math.inf for each in row] for row in item] for item in total],
        "output": np.einsum("bhij,bhjc->bhic", weights, value),
    }
    past = {"past_key": KEYS[:, :, :PAST], "past_value": VALUES[:, :, :PAST]}
    options = {"mask": MASK, "bias": BIAS, "scale": -0.75, "softcap": 1.5, "window": (3, 1), "key_lengths": LENGTHS}
    found = call(mode, "attention", QUERY, KEYS[:, :, PAST:], VALUES[:, :, PAST:], **past, **options)
    assert list(found) == ["raw_scores", "scores", "capped", "biased", "masked", "weights", "log_sum_exp", "output"]
    for stage, numbers in expected.items():
        np.testing.assert_allclose(found[stage], numbers, rtol=0, atol=TOLERANCE * UNIT, err_msg=stage)
    assert {stage.dtype for stage in found.values()} == {np.dtype(np.float32)}


def test_a_row_without_a_key_has_gradients_of_zero_and_the_others_keep_theirs(mode: Any) -> None:
    found = call(mode, "attention_gradients", QUERY, KEYS, VALUES, GRAD_OUTPUT, mask=MASK, bias=BIAS)
    silenced = GRAD_OUTPUT * MASK.any(axis=-1, keepdims=True)
    expected = call(mode, "attention_gradients", QUERY, KEYS, VALUES, silenced, mask=MASK, bias=BIAS)
    assert list(found) == ["grad_query", "grad_key", "grad_value", "grad_bias"]
    assert (found["grad_query"][0, :, 1] == 0).all()
    assert (found["grad_query"][0, :, 0] != 0).any()
    for name, gradient in found.items():
        np.testing.assert_array_equal(gradient, expected[name], err_msg=name)


def test_the_gradient_of_a_value_is_the_weight_that_it_was_given(mode: Any) -> None:
    # d sum(g o) / d v_jc = sum_i w_ij g_ic, over the queries and over the heads of a group.
    weights = call(mode, "attention", QUERY, KEYS, VALUES, is_causal=True)["weights"].astype(np.float64)
    expected = np.einsum("bhij,bhic->bhjc", weights, GRAD_OUTPUT).reshape(2, 2, 2, 7, 8).sum(axis=2)
    found = call(mode, "attention_gradients", QUERY, KEYS, VALUES, GRAD_OUTPUT, is_causal=True)["grad_value"]
    # Six products of at most 1, added up.
    np.testing.assert_allclose(found, expected, rtol=0, atol=6 * 6 * UNIT)


def test_every_operation_of_the_eager_mode_is_there_with_its_parameters(mode: Any) -> None:
    eager = ENTRY.load()
    operations = [name for name, each in vars(eager).items() if inspect.isfunction(each) and not name.startswith("_")]
    assert "attention_gradients" in operations
    for name in operations:
        assert list(inspect.signature(getattr(mode, name)).parameters) == list(
            inspect.signature(getattr(eager, name)).parameters
        )


def test_a_new_shape_is_traced_and_a_known_one_is_not_traced_again(mode: Any) -> None:
    before = mode.softmax.experimental_get_tracing_count()
    for keys in (3, 3, 5, 3, 5):
        weights = call(mode, "softmax", np.zeros((1, 1, 1, keys)))["weights"]
        np.testing.assert_allclose(weights, np.full((1, 1, 1, keys), 1 / keys), rtol=4 * UNIT, atol=0)
    assert mode.softmax.experimental_get_tracing_count() == before + 2


def test_xla_compiles_and_the_plain_graph_does_not() -> None:
    scores = np.zeros((1, 1, 2, 3), dtype=np.float32)
    xla: Any = ENTRY.load("xla")
    graph: Any = ENTRY.load("function")
    compiled = xla.softmax.experimental_get_compiler_ir(xla.from_numpy(scores), empty_rows="zero")(stage="hlo")
    assert "HloModule" in compiled
    with pytest.raises(ValueError, match="jit_compile"):
        graph.softmax.experimental_get_compiler_ir(graph.from_numpy(scores), empty_rows="zero")
    assert {"xla_flags", "tf_xla_flags", "version", "device"} <= set(xla.describe())
