"""The rotary embedding: against complex numbers, its bounds, what it leaves alone, and where its positions begin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.attention.bounds import accumulated_bounds, introduced_bound
from attncheck.attention.problem import Problem
from attncheck.attention.radii import propagate
from attncheck.attention.rounding import rounding_model_named
from attncheck.attention.walk import error_walk, reach_walk, value_walk
from attncheck.backends import numpy_backend
from attncheck.oracle.blocks import are_blocked, exact_results
from attncheck.oracle.evaluate import exact_from, exact_stages
from attncheck.reading.canonical import canonical_form, rows_of_tables
from attncheck.reading.inputs import Inputs

Array = NDArray[Any]
LAYOUTS = pytest.mark.parametrize("options", [{}, {"rotary_interleaved": True}], ids=["halves", "neighbours"])
QUERIES, KEYS, PAIRS, WIDTH = 5, 6, 3, 8


def drawn(*, gradients: bool = False, **more: Array) -> dict[str, Array]:
    rng = np.random.default_rng(11)
    inputs = {
        "query": rng.standard_normal((2, 4, QUERIES, WIDTH)),
        "key": rng.standard_normal((2, 2, KEYS, WIDTH)),
        "value": rng.standard_normal((2, 2, KEYS, 4)),
        "rotary_cos": rng.standard_normal((9, PAIRS)),
        "rotary_sin": rng.standard_normal((9, PAIRS)),
    }
    if gradients:
        inputs["grad_output"] = rng.standard_normal((2, 4, QUERIES, 4))
    return inputs | more


def canonical(
    operation: str, options: dict[str, Any], inputs: dict[str, Array]
) -> tuple[dict[str, Any], dict[str, Array]]:
    posed = canonical_form(operation, options, inputs)
    return posed.options, posed.inputs


def by_complex_numbers(array: Array, cos: Array, sin: Array, *, interleaved: bool) -> Array:
    """Multiply x + iy by cos + i sin: the paper's own words for it."""
    pairs = cos.shape[-1]
    first, second = (
        (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if interleaved else (slice(0, pairs), slice(pairs, 2 * pairs))
    )
    product = (array[..., first] + 1j * array[..., second]) * (cos + 1j * sin)
    turned = array.copy()
    turned[..., first], turned[..., second] = product.real, product.imag
    return turned


@LAYOUTS
def test_a_rotation_is_a_product_of_complex_numbers(options: dict[str, Any]) -> None:
    inputs = drawn()
    exact = exact_stages("attention", *canonical("attention", options, inputs))
    for name, length in (("query", QUERIES), ("key", KEYS)):
        cos, sin = inputs["rotary_cos"][:length], inputs["rotary_sin"][:length]
        expected = by_complex_numbers(inputs[name], cos, sin, interleaved=bool(options))
        np.testing.assert_allclose(exact[f"rotated_{name}"].high, expected, rtol=1e-13, atol=1e-14)
        np.testing.assert_array_equal(exact[f"rotated_{name}"].high[..., 2 * PAIRS :], inputs[name][..., 2 * PAIRS :])


@LAYOUTS
def test_gradients_are_those_of_the_rotated_query_and_key_turned_back(options: dict[str, Any]) -> None:
    inputs = drawn(gradients=True)
    own = exact_stages("attention_gradients", *canonical("attention_gradients", options, inputs))
    tables = {
        name: (inputs["rotary_cos"][:length], inputs["rotary_sin"][:length])
        for name, length in (("query", QUERIES), ("key", KEYS))
    }
    turned = {name: by_complex_numbers(inputs[name], *tables[name], interleaved=bool(options)) for name in tables}
    plain = {**turned, "value": inputs["value"], "grad_output": inputs["grad_output"]}
    other = exact_stages("attention_gradients", {}, plain)
    for name, (cos, sin) in tables.items():
        back = by_complex_numbers(other[f"grad_{name}"].high, cos, -sin, interleaved=bool(options))
        np.testing.assert_allclose(own[f"grad_{name}"].high, back, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(own["grad_value"].high, other["grad_value"].high, rtol=1e-12, atol=1e-13)


def test_positions_count_the_past_which_is_not_rotated() -> None:
    past = {"past_key": np.ones((2, 2, 3, WIDTH)), "past_value": np.ones((2, 2, 3, 4))}
    inputs = drawn(**past)
    rows = rows_of_tables(inputs)
    np.testing.assert_array_equal(rows["query_cos"], inputs["rotary_cos"][3:8])
    np.testing.assert_array_equal(rows["key_sin"][3:], inputs["rotary_sin"][3:9])
    assert (rows["key_cos"][:3] == 1).all()
    assert not rows["key_sin"][:3].any()
    exact = exact_stages("attention", *canonical("attention", {}, inputs))["rotated_key"]
    np.testing.assert_array_equal(exact.high[:, :, :3], past["past_key"])
    returned = numpy_backend.attention(**inputs)
    assert returned["rotated_key"].shape == exact.shape
    np.testing.assert_allclose(returned["rotated_key"], exact.high, rtol=1e-13, atol=1e-14)


def test_some_rows_have_their_own_positions() -> None:
    inputs, rows = drawn(), np.array([4, 1])
    some = canonical_form("attention", {}, inputs, rows)
    whole = exact_stages("attention", *canonical("attention", {}, inputs))["output"]
    np.testing.assert_array_equal(
        exact_stages("attention", some.options, some.inputs)["output"].high, whole.high[:, :, rows]
    )


@LAYOUTS
@pytest.mark.parametrize(("dtype", "model"), [("float64", "native"), ("float32", "native"), ("float16", "eager")])
@pytest.mark.parametrize("operation", ["attention", "attention_gradients"])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_right_implementation_is_within_the_bounds(
    operation: str, dtype: str, model: str, options: dict[str, Any], sinks: bool
) -> None:
    inputs = drawn(gradients=operation == "attention_gradients")
    if sinks:
        inputs["sinks"] = np.array([0.5, -np.inf, 3.0, -1.0])
    inputs = {name: array.astype(dtype) for name, array in inputs.items()}
    posed = canonical(operation, options, inputs)
    exact = exact_stages(operation, *posed)
    highs = {stage: each.high for stage, each in exact.items()}
    bounds = accumulated_bounds(operation, *posed, rounding_model_named(model, dtype), highs)
    returned = getattr(numpy_backend, operation)(**inputs, **options)
    assert bounds.keys() == exact.keys() == returned.keys()
    for stage, bound in bounds.items():
        assert (exact[stage].error_of(returned[stage]) <= bound.max_error + exact[stage].radius).all(), stage
        assert (bound.sigma <= bound.max_error).all()


def test_a_rotation_by_nothing_or_a_quarter_rounds_nothing() -> None:
    cos, sin = (np.repeat(np.array([each]).T, PAIRS, 1) for each in ([1.0, 0, -1, 0, 0.6], [0.0, 1, 0, -1, 0.8]))
    inputs = {**drawn(), **{f"query_{name}": table for name, table in (("cos", cos), ("sin", sin))}}
    inputs |= {f"key_{name}": np.full((KEYS, PAIRS), table) for name, table in (("cos", 1.0), ("sin", 0.0))}
    inputs = {name: array for name, array in inputs.items() if not name.startswith("rotary")}
    problem = Problem.of("attention", {}, inputs).in_float64()
    walk = error_walk(problem, rounding_model_named("native", "float32"), value_walk(problem))
    of_query, of_key = walk.node("rotated_query").max_error, walk.node("rotated_key").max_error
    assert not of_query[..., :4, :].any()
    assert not of_key.any()
    assert (of_query[..., 4, : 2 * PAIRS] > 0).all()
    assert not of_query[..., 2 * PAIRS :].any()


@LAYOUTS
def test_what_follows_from_returned_rotations_starts_there(options: dict[str, Any]) -> None:
    posed = canonical("attention", options, drawn())
    exact = {stage: each.high for stage, each in exact_stages("attention", *posed).items()}
    returned = {name: exact[name] + 1.0 for name in ("rotated_query", "rotated_key")}
    step = exact_from("attention", *posed, returned, "raw_scores")
    assert step is not None
    by_hand = returned["rotated_query"] @ np.repeat(returned["rotated_key"], 2, 1).swapaxes(-1, -2)
    np.testing.assert_allclose(step.high, by_hand, rtol=1e-12, atol=1e-12)
    assert introduced_bound(
        "attention", *posed, rounding_model_named("native", "float64"), returned, step.high, "raw_scores"
    )


@LAYOUTS
def test_radii_of_tables_and_inputs_hold(options: dict[str, Any]) -> None:
    arrays, rng = drawn(), np.random.default_rng(2)
    radius = {name: np.full(array.shape, 1e-3) for name, array in arrays.items()}
    balls = propagate("attention", options, Inputs(arrays, radius))
    for _ in range(5):
        moved = {name: array + rng.choice([-1e-3, 1e-3], array.shape) for name, array in arrays.items()}
        other = exact_stages("attention", *canonical("attention", options, moved))
        for stage, ball in balls.items():
            assert (np.abs(other[stage].high - ball.value) <= ball.radius * (1 + 1e-9)).all(), stage


@LAYOUTS
def test_flags_reach_the_other_element_of_their_pair(options: dict[str, Any]) -> None:
    posed = canonical("attention", options, drawn())
    flags = {name: np.zeros(array.shape, bool) for name, array in posed[1].items()}
    flags["key"][0, 0, 2, 0] = flags["query_cos"][3, 1] = True
    walk = reach_walk(Problem.of("attention", *posed), flags, None)
    partner = 1 if options else PAIRS
    np.testing.assert_array_equal(np.argwhere(walk.node("rotated_key")), [[0, 0, 2, 0], [0, 0, 2, partner]])
    of_pair = (2, 3) if options else (1, PAIRS + 1)
    assert {tuple(each[2:]) for each in np.argwhere(walk.node("rotated_query")).tolist()} == {
        (3, each) for each in of_pair
    }


@LAYOUTS
def test_keys_in_blocks_are_rotated_by_their_own_positions(options: dict[str, Any]) -> None:
    rng = np.random.default_rng(5)
    inputs = {
        name: rng.standard_normal((1, 2, length, WIDTH))
        for name, length in (("query", 150), ("key", 180), ("value", 180))
    }
    inputs |= {name: rng.standard_normal((180, PAIRS)) for name in ("rotary_cos", "rotary_sin")}
    posed = canonical("attention", options | {"is_causal": True}, inputs)
    assert are_blocked("attention", *posed, ["output"])
    blocked = exact_results("attention", *posed, ["output"])
    assert blocked is not None
    np.testing.assert_array_equal(
        blocked.exact["output"].high, exact_stages("attention", *posed, ["output"])["output"].high
    )
