"""What the comparison with mpmath does not reach: enclosures, extremes, precision, an implementation's own stages."""

from __future__ import annotations

import pickle
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import flint
import numpy as np
import pytest
from flint import arb, ctx, fmpq
from hypothesis import given
from hypothesis import strategies as st
from mpmath import mp, mpf
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent))
from problems import draw

from attncheck.attention import oracle
from attncheck.attention.balls import Balls
from attncheck.attention.double_words import DoubleWords
from attncheck.attention.enclosure import Enclosure, enclose
from attncheck.attention.oracle import OutsideDomain, PrecisionExhausted, exact_from, exact_stages
from attncheck.attention.problem import Computation as Canonical
from attncheck.reading.lowering import Problem

Array = NDArray[Any]
INF = float("inf")


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def attention_inputs(queries: int = 4, keys: int = 5, batch: int = 2, heads: int = 3) -> dict[str, Array]:
    shapes = {"query": (queries, 6), "key": (keys, 6), "value": (keys, 2)}
    return {name: normal(batch, heads, *shape) for name, shape in shapes.items()}


def row_of_scores(*scores: float) -> dict[str, Array]:
    return {"scores": np.array(scores, dtype=np.float64).reshape(1, 1, 1, -1)}


def balls(*numbers: arb) -> Balls:
    return Balls((np.array([*numbers, None], dtype=object)[:-1],))


def agree(one: Enclosure, other: Enclosure) -> bool:
    """Whether two enclosures can be of the same truth."""
    with np.errstate(invalid="ignore"):
        difference = np.abs((one.high - other.high) + (one.low - other.low))
    same_infinity = np.isinf(one.high) & (one.high == other.high)
    return bool((same_infinity | (difference <= (one.radius + other.radius) * (1 + 1e-12))).all())


def follows(problem: tuple[str, dict[str, Any], dict[str, Array]], stage: str, **returned: Array) -> Enclosure:
    exact = exact_from(Canonical.of(Problem(*problem)), returned, [stage])
    assert exact is not None
    return exact[stage]


# Enclosures.


def enclosure(high: list[float], low: list[float] | None = None) -> Enclosure:
    return Enclosure(np.array(high), np.array(low or [0.0] * len(high)), np.zeros(len(high)))


@given(
    st.integers(-(10**60), 10**60),
    st.integers(1, 10**60),
    st.integers(-340, 240),
    st.sampled_from([53, 128, 400]),
)
def test_the_truth_lies_within_the_radius(numerator: int, denominator: int, exponent: int, precision: int) -> None:
    truth = Fraction(numerator, denominator) * Fraction(10) ** exponent
    with ctx.workprec(precision):
        got = enclose(balls(arb(fmpq(truth.numerator, truth.denominator))))
    high, low, radius = (Fraction(float(part[0])) for part in (got.high, got.low, got.radius))
    assert abs(truth - high - low) <= radius
    assert radius <= max(abs(truth) * Fraction(2) ** -50, Fraction(2) ** -1072)
    rounded = got.rounded()
    high, low, wider = (Fraction(float(part[0])) for part in (rounded.high, rounded.low, rounded.radius))
    assert abs(truth - high - low) <= wider
    assert wider <= max(2 * radius, abs(truth) * Fraction(2) ** -67, Fraction(2) ** -1072)
    again = rounded.rounded()
    assert (again.low.tobytes(), again.radius.tobytes()) == (rounded.low.tobytes(), rounded.radius.tobytes())


def test_zero_and_minus_infinity_are_exact_and_what_float64_cannot_bound_is_open() -> None:
    got = enclose(balls(arb(7), arb(3), arb(0)).reshaped((1, 3)).restricted_to(np.array([[False, True, True]])))
    assert got.high.tolist() == [[-INF, 3, 0]]
    assert got.low.tolist() == got.radius.tolist() == [[0, 0, 0]]
    for ball in (arb("1e400"), -arb("1e400"), arb("nan"), arb(0, arb("inf"))):
        assert enclose(balls(ball)).radius[0] == enclose(balls(ball)).rounded().radius[0] == INF


finite = st.floats(-1e300, 1e300)


@given(finite, finite, st.floats(-0.5, 0.5), st.integers(-20, 20))
def test_error_is_right_to_51_bits(high: float, other: float, part: float, steps: int) -> None:
    low = part * float(np.spacing(abs(high)))
    for candidate in (other, high, high + steps * float(np.spacing(high))):
        error = abs(Fraction(candidate) - Fraction(high) - Fraction(low))
        got = Fraction(enclosure([high], [low]).error_of(np.array([candidate]))[0])
        assert abs(got - error) <= error * Fraction(2) ** -51


def test_errors_of_infinities_and_nan() -> None:
    candidates = np.array([INF, -INF, np.nan, 1.0])
    assert enclosure([1.0] * 4).error_of(candidates).tolist() == [INF, INF, INF, 0]
    assert enclosure([-INF] * 4).error_of(candidates).tolist() == [INF, 0, INF, INF]
    assert enclosure([INF] * 4).error_of(candidates).tolist() == [0, INF, INF, INF]
    assert enclosure([-1.5e308]).error_of(np.array([1.5e308])) == INF


# Extremes.


@pytest.mark.parametrize(("size", "expected"), [(1e-300, [0.5, 0.5]), (1e300, [0.0, 1.0]), (-1e300, [1.0, 0.0])])
def test_scores_beyond_float64_still_have_exact_weights(size: float, expected: list[float]) -> None:
    inputs = {
        "query": np.full((1, 1, 1, 3), size),
        "key": np.array([[[[1.0] * 3, [2.0] * 3]]]) * abs(size),
        "value": np.array([[[[1e300], [-1e-300]]]]),
    }
    exact = exact_stages(Problem("attention", {}, inputs))
    assert exact["weights"].error_of(np.array(expected).reshape(1, 1, 1, 2)).max() <= 5e-324
    output = exact["output"].error_of(np.array([[[[expected[0] * 1e300 + expected[1] * -1e-300]]]]))
    assert (output <= exact["output"].radius).all()
    assert (exact["output"].radius <= max(2.0**-100 * abs(exact["output"].high.item()), 1e-323)).all()
    if abs(size) > 1:
        assert np.isinf(exact["scores"].high).all()
        assert np.isinf(exact["scores"].radius).all()
        assert exact["log_sum_exp"].radius[0, 0, 0] == INF


def test_large_scores_that_float64_tells_apart_and_weights_below_the_least_float_are_known() -> None:
    close = exact_stages(Problem("softmax", {}, row_of_scores(1e300, np.nextafter(1e300, 0), -1e300)))
    assert close["weights"].high.tolist() == [[[[1, 0, 0]]]]
    assert close["log_sum_exp"].high[0, 0, 0] == 1e300
    exact = exact_stages(Problem("softmax", {}, row_of_scores(0, -781)))["weights"]
    assert exact.high[0, 0, 0, 1] == exact.low[0, 0, 0, 1] == 0
    with mp.workprec(200):
        assert 0 < mp.exp(-781) <= mpf(float(exact.radius[0, 0, 0, 1]))
    assert exact.radius[0, 0, 0, 1] <= 2.0**-1072


def test_an_empty_row_has_an_output_of_exactly_zero() -> None:
    inputs = {name: normal(1, 1, 96, 80, seed=3) for name in ("query", "key", "value")}  # FLINT's blocked product
    mask = np.ones((96, 96), dtype=bool)
    mask[5] = False
    output = exact_stages(Problem("attention", {}, inputs | {"mask": mask}), ["output"])["output"]
    for part in (output.high, output.low, output.radius):
        assert not part[0, 0, 5].any()
    assert output.high[0, 0, 4].all()


# Precision.


def cancelling() -> dict[str, Array]:
    """Scores whose terms are 2^200 times as large as the scores themselves."""
    return {
        "query": np.array([[2.0**200, 1, 2.0**200]]),
        "key": np.array([[1, 0.7, -1], [1, 0.5, -1]]) / 3,
        "value": np.array([[1.0], [-1.0]]),
    }


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the precisions that are tried: that of double words, then FLINT's."""
    found: list[int] = []
    attempt = oracle._attempt

    def counted(parts: Any, stages: Any) -> Any:
        found.append(106 if parts[0].arithmetic is DoubleWords else flint.ctx.prec)
        return attempt(parts, stages)

    monkeypatch.setattr(oracle, "_attempt", counted)
    return found


def test_precision_is_raised_where_it_must_be(tried: list[int]) -> None:
    exact = exact_stages(Problem("attention", {"scale": 1.0}, cancelling()), ["weights"])["weights"]
    assert tried == [106, 128, 256]
    with mp.workprec(400):
        key = [mpf(float(part)) for part in cancelling()["key"][:, 1]]
        truth = 1 / (1 + mp.exp(key[1] - key[0]))
        assert abs(truth - mpf(exact.high[0, 0]) - mpf(exact.low[0, 0])) <= mpf(exact.radius[0, 0])
    assert exact.radius.max() < 2.0**-80
    # A cap far below the terms needs its digits.
    capped = exact_stages(Problem("attention", {"scale": 1.0, "softcap": 2.0}, cancelling()), ["capped"])["capped"]
    assert tried == [106, 128, 256] * 2
    assert (capped.radius <= 2.0**-80 * np.abs(capped.high)).all()


@pytest.mark.parametrize(
    ("stage", "options", "precisions"),
    [
        ("scores", {"scale": 1.0}, [106]),
        ("capped", {"scale": 1.0, "softcap": 2.0**150}, [106, 128]),  # a cap that is smaller than the terms by 2^51
        ("masked", {}, [106]),
    ],
)
def test_small_beside_the_terms(stage: str, options: dict[str, Any], precisions: list[int], tried: list[int]) -> None:
    exact = exact_stages(Problem("attention", options, cancelling()), [stage])[stage]
    assert tried == precisions
    assert (exact.radius > 0).all()
    assert (exact.radius <= 2.0**-80 * 2.0**201).all()


def test_when_no_precision_suffices_it_says_so_and_leaves_flint_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    before = flint.ctx.prec
    exact_stages(Problem("attention", {}, attention_inputs()))
    with pytest.raises(ValueError, match="softmax has no raw_scores"):
        exact_stages(Problem("softmax", {}, row_of_scores(1, 2)), ["raw_scores"])
    monkeypatch.setattr(oracle, "MAX_PRECISION", 128)
    with pytest.raises(PrecisionExhausted, match="attention: weights not settled with 128 bits"):
        exact_stages(Problem("attention", {}, cancelling()), ["weights"])
    assert flint.ctx.prec == before


# What has no value.


@pytest.mark.parametrize("name", ["query", "value", "bias"])
def test_inputs_outside_the_domain_are_named(name: str) -> None:
    for poison in (np.nan, INF, -INF):
        inputs = attention_inputs() | {"bias": np.zeros((4, 5))}
        inputs[name] = inputs[name].copy()
        inputs[name][..., -1, -1] = poison
        if (name, poison) == ("bias", -INF):
            assert exact_stages(Problem("attention", {}, inputs))["biased"].high[0, 0, -1, -1] == -INF
            continue
        with pytest.raises(OutsideDomain, match=f"^{name} ") as caught:
            exact_stages(Problem("attention", {}, inputs))
        assert caught.value.input_name == name
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_divisions_by_zero_and_what_the_oracle_does_not_know_are_refused() -> None:
    inputs = attention_inputs()
    with pytest.raises(OutsideDomain, match="softcap is 0"):
        exact_stages(Problem("attention", {"softcap": 0.0}, inputs))
    with pytest.raises(OutsideDomain, match="key has a vector of length 0"):
        exact_stages(Problem("scoring", {"score": "cosine"}, {"query": np.ones((2, 3)), "key": np.eye(4, 3)}))
    assert exact_stages(Problem("attention", {"scale": None, "window": None}, inputs))
    with pytest.raises(ValueError, match="no attention with key_lengths, window"):
        exact_stages(Problem("attention", {"window": (1, 0)}, inputs | {"key_lengths": np.ones(2)}))
    with pytest.raises(ValueError, match="no convolution with anything"):
        Canonical.of(Problem("convolution", {}, inputs))


# From an implementation's own stages.

MASK = np.array([[True, False, True, True, True]] * 3 + [[False] * 5])
BIAS = np.where(np.eye(4, 5) > 0, -INF, normal(4, 5))
MASKED = "attention", {"is_causal": True, "softcap": 2.0}, attention_inputs() | {"mask": MASK, "bias": BIAS}


def test_each_stage_follows_from_the_nearest_that_was_returned() -> None:
    scores, other = normal(2, 3, 4, 5, seed=8), normal(2, 3, 4, 5, seed=9)
    allowed = MASK & np.tri(4, 5, dtype=bool)

    def of_masked(logits: Array, stage: str) -> Enclosure:
        return exact_stages(Problem("softmax", {}, {"scores": np.where(allowed, logits, -INF)}))[stage]

    assert follows(MASKED, "capped", scores=scores, raw_scores=other).error_of(2 * np.tanh(scores / 2)).max() < 1e-15
    assert np.array_equal(follows(MASKED, "biased", scores=scores, capped=other).high, (other + BIAS))
    masked = np.where(allowed, other, -INF)
    assert np.array_equal(follows(MASKED, "masked", biased=other, scores=scores).high, masked)
    for stage in ("weights", "log_sum_exp"):
        assert agree(follows(MASKED, stage, biased=other, scores=scores), of_masked(other, stage))
        masked = np.where(allowed, scores, -INF)
        assert agree(follows(MASKED, stage, masked=masked, biased=other), of_masked(scores, stage))
        # The sum of the exponentials does not follow from the weights, nor they from it.
        found = follows(MASKED, stage, biased=other, weights=scores, log_sum_exp=scores[..., 0])
        assert agree(found, of_masked(other, stage))
    weights, value = np.abs(other), MASKED[2]["value"]
    assert follows(MASKED, "output", weights=weights, masked=scores).error_of(weights @ value).max() < 1e-14
    of_heads = normal(2, 3, 4, 2)  # a stage of multi_head_attention alone
    found = follows(MASKED, "output", context=of_heads, weights=weights)
    assert agree(found, follows(MASKED, "output", weights=weights))
    # A scale may be applied before the product.
    scaled = draw("scaled dot").laid_out()
    found = follows(scaled, "scores", raw_scores=np.zeros((2, 2, 5, 6)))
    assert np.array_equal(found.high, exact_stages(Problem(*scaled))["scores"].high)


@pytest.mark.parametrize("poison", [np.nan, INF, -INF])
def test_what_is_not_finite_where_it_is_attended_has_no_exact_value(poison: float) -> None:
    problem = MASKED[0], {"is_causal": True}, MASKED[2]
    attended, forbidden = normal(2, 3, 4, 5), normal(2, 3, 4, 5)
    attended[0, 0, 2, 0] = forbidden[0, 0, 2, 4] = poison
    for stage in ("masked", "weights", "log_sum_exp"):
        assert exact_from(Canonical.of(Problem(*problem)), {"scores": attended}, [stage]) is None
        assert exact_from(Canonical.of(Problem(*problem)), {"scores": forbidden}, [stage]) is not None
    assert exact_from(Canonical.of(Problem(*problem)), {"weights": attended}, ["output"]) is None
    assert exact_from(Canonical.of(Problem(*problem)), {"weights": attended}, ["weights"]) is not None
    assert (exact_from(Canonical.of(Problem(*problem)), {"masked": attended}, ["weights"]) is None) == (poison != -INF)
    biased = normal(2, 3, 4, 5)
    biased[..., 2, 2] = -INF  # as in BIAS
    assert not follows(problem, "weights", biased=biased).high[..., 2, 2].any()


# Gradients.
