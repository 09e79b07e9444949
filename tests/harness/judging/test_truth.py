"""What is true of one case: worked out once, in its own dtype, and silent where there is nothing to know."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from attncheck.judging import truth as module
from attncheck.judging.truth import Truth, find_truth, within_range
from attncheck.oracle.enclosure import Enclosure
from attncheck.oracle.evaluate import PrecisionExhausted, exact_from

QUERY, KEY = [[[[1.5, -2.25]]]], [[[[3.0, 0.1], [0.2, 0.3]]]]
SCALE = 0.5
DTYPES = ("float32", "float64")


@pytest.fixture(params=DTYPES)
def scoring(request: pytest.FixtureRequest) -> Truth:
    dtype = str(request.param)
    inputs = {"query": np.array(QUERY, dtype), "key": np.array(KEY, dtype)}
    return find_truth("scoring", {"scale": SCALE}, inputs, dtype, supports_statistics=True)


def products(query: np.ndarray, key: np.ndarray) -> list[Fraction]:  # type: ignore[type-arg]
    """The dot products of one query with every key, exactly."""
    return [
        sum((Fraction(float(a)) * Fraction(float(b)) for a, b in zip(query, row, strict=True)), Fraction(0))
        for row in key
    ]


def assert_encloses(enclosure: Enclosure, exact: list[Fraction]) -> None:
    for high, low, radius, number in zip(
        enclosure.high.ravel(), enclosure.low.ravel(), enclosure.radius.ravel(), exact, strict=True
    ):
        assert abs(Fraction(float(high)) + Fraction(float(low)) - number) <= Fraction(float(radius))
        assert radius <= abs(high) * 2.0**-80


def test_the_exact_stages_are_those_of_the_numbers_as_stored(scoring: Truth) -> None:
    exact = products(scoring.inputs["query"][0, 0, 0], scoring.inputs["key"][0, 0])
    assert list(scoring.exact) == ["raw_scores", "scores"]
    assert_encloses(scoring.exact["raw_scores"], exact)
    assert_encloses(scoring.exact["scores"], [number * Fraction(SCALE) for number in exact])
    assert (scoring.outside, scoring.supports_statistics) == ("", True)


def test_the_bounds_of_a_class_have_the_shape_of_every_stage_and_are_worked_out_once(
    scoring: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds = scoring.bounds("native")
    assert {stage: bound.max_error.shape for stage, bound in bounds.items()} == dict.fromkeys(
        scoring.exact, (1, 1, 1, 2)
    )
    assert all((bound.max_error > 0).all() and (bound.sigma <= bound.max_error).all() for bound in bounds.values())
    monkeypatch.setattr(module, "accumulated_bounds", lambda *arguments: pytest.fail("asked for again"))
    assert scoring.bounds("native") is bounds


def test_a_class_that_the_dtype_does_not_have_is_refused(scoring: Truth) -> None:
    with pytest.raises(ValueError, match="there is no rounding model fused in"):
        scoring.bounds("fused")


@pytest.fixture
def attention(scoring: Truth) -> Truth:
    inputs = {**scoring.inputs, "value": np.array([[[[2.0, 1.0, 0.5], [-1.0, 4.0, 0.25]]]], scoring.dtype)}
    return find_truth("attention", {}, inputs, scoring.dtype, supports_statistics=True)


def test_a_step_is_exact_from_the_implementations_own_stage_before_it(attention: Truth) -> None:
    # Weights that no softmax gives, and an output that is not looked at.
    own = {"weights": np.array([[[[0.5, 0.25]]]], attention.dtype), "output": np.zeros((1, 1, 1, 3), attention.dtype)}
    step = attention.introduced("output", own, "native")
    assert step is not None
    exact, bound = step
    assert_encloses(exact, [Fraction(3, 4), Fraction(3, 2), Fraction(5, 16)])
    # Two products, their sum and its storage in the class's own format: no more than that, and no less than storage.
    unit = {"float32": 2.0**-24, "float64": 2.0**-53}[attention.dtype]
    assert (bound.max_error >= 0.99 * unit * np.abs(exact.high)).all()
    assert (bound.max_error < 50 * unit).all()


def test_a_step_without_a_stage_before_it_begins_at_the_inputs(scoring: Truth) -> None:
    for stage, factor in (("raw_scores", Fraction(1)), ("scores", Fraction(SCALE))):
        # The scores are held against query and key: a scale may be applied to these before their product.
        step = scoring.introduced(stage, {"raw_scores": np.zeros((1, 1, 1, 2), scoring.dtype)}, "native")
        assert step is not None
        exact = products(scoring.inputs["query"][0, 0, 0], scoring.inputs["key"][0, 0])
        assert_encloses(step[0], [number * factor for number in exact])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nothing_is_said_of_a_step_from_what_is_not_finite(attention: Truth, bad: float) -> None:
    own = {"weights": np.array([[[[0.5, bad]]]], attention.dtype)}
    assert attention.introduced("output", own, "native") is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_follows_from_infinity_is_open_and_says_why(dtype: str) -> None:
    inputs = {"query": np.array([[[[np.inf, 1], [1, 2]]]], dtype), "key": np.array(KEY, dtype)}
    truth = find_truth("scoring", {}, inputs, dtype, supports_statistics=False)
    assert truth.outside == ""
    assert np.isinf(truth.exact["raw_scores"].radius[0, 0, 0]).all()
    assert np.isfinite(truth.exact["raw_scores"].radius[0, 0, 1]).all()
    assert truth.why_open("raw_scores", (0, 0, 0, 0)) == "query holds NaN or an infinity that no mask explains"
    step = truth.introduced("raw_scores", {}, "native")
    assert step is not None
    assert np.isinf(step[0].radius[0, 0, 0]).all()


def test_what_no_precision_settles_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*arguments: object, **options: object) -> None:
        raise PrecisionExhausted("softmax: weights not settled")

    monkeypatch.setattr(module, "exact_stages", exhausted)
    truth = find_truth("softmax", {}, {"scores": np.ones((1, 1, 1, 2))}, "float64", supports_statistics=True)
    assert (truth.exact, truth.outside) == ({}, "softmax: weights not settled")


def test_gradients_of_too_many_scores_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = {name: np.ones((1, 1, 3, 2)) for name in ("query", "key", "value", "grad_output")}
    monkeypatch.setattr(module, "MAX_WHOLE", 9)
    assert find_truth("attention_gradients", {}, inputs, "float64", supports_statistics=True).exact
    monkeypatch.setattr(module, "MAX_WHOLE", 8)
    truth = find_truth("attention_gradients", {}, inputs, "float64", supports_statistics=True)
    assert truth.outside == "attention_gradients has 9 scores; at most 8 are judged where every row counts"
    assert not truth.exact


# What can be judged.

LARGEST = {"float16": 65504.0, "float32": (2 - 2.0**-23) * 2.0**127, "float64": np.finfo(np.float64).max}


@pytest.mark.parametrize("dtype", LARGEST)
def test_the_largest_number_of_the_dtype_is_judged_and_nothing_larger(dtype: str) -> None:
    with np.errstate(over="ignore"):
        beyond = np.nextafter(LARGEST[dtype], np.inf)
    high = np.array([LARGEST[dtype], -LARGEST[dtype], beyond, 0.0, -np.inf])
    zero = np.zeros(5)
    judged = within_range(Enclosure(high, zero, zero), np.zeros(5, dtype))
    assert judged.tolist() == [True, True, False, True, False]


def test_what_is_not_enclosed_is_not_judged() -> None:
    high = np.array([np.inf, 1.0])
    judged = within_range(Enclosure(high, np.zeros(2), np.array([np.inf, 0.0])), np.zeros(2))
    assert judged.tolist() == [False, True]


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_beyond_the_range_of_float64_leave_the_rest_to_be_judged(
    dtype: str, make_scores: Callable[[str], Truth]
) -> None:
    truth = make_scores(dtype)
    judged = within_range(truth.exact["scores"], np.zeros((1, 1, 1, 2), dtype))
    assert judged.ravel().tolist() == [False, True]


@pytest.fixture
def make_scores() -> Callable[[str], Truth]:
    """Scores of which the first is the square of the dtype's largest number, negative, and the second is 1."""

    def make(dtype: str) -> Truth:
        largest = np.finfo(dtype).max
        inputs = {
            "query": np.array([[[[largest, 1]]]], dtype),
            "key": np.array([[[[-largest, 0], [0, 1]]]], dtype),
        }
        return find_truth("scoring", {"scale": 1.0}, inputs, dtype, supports_statistics=False)

    return make


def test_a_step_that_another_implementation_made_bit_by_bit_is_evaluated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.RandomState(3)
    inputs = {name: random.randn(1, 1, 4, 3) for name in ("query", "key", "value")}
    truth = find_truth("attention", {}, inputs, "float64", supports_statistics=True)
    asked = []

    def counted(*arguments: Any) -> Any:
        asked.append(arguments[-1])
        return exact_from(*arguments)

    monkeypatch.setattr("attncheck.judging.truth.exact_from", counted)
    weights = truth.exact["weights"].high
    others = np.nextafter(weights, 1)
    found = [truth.introduced("output", {"weights": each}, "native") for each in (weights, weights.copy(), others)]
    assert asked == ["output", "output"]
    assert all(each is not None for each in found)
    exact = [each[0].high.tobytes() for each in found if each is not None]
    assert exact[0] == exact[1] != exact[2]


def test_nothing_is_evaluated_where_nobody_returned_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "exact_stages", pytest.fail)
    inputs = {"query": np.array(QUERY), "key": np.array(KEY)}
    found = find_truth("scoring", {"scale": SCALE}, inputs, "float64", supports_statistics=True, returned=())
    assert (found.exact, found.bounds("native")) == ({}, {})
