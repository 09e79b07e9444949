"""What the comparison with mpmath does not reach: enclosures, extremes, precision, an implementation's own stages."""

from __future__ import annotations

import pickle
from fractions import Fraction
from typing import Any

import flint
import numpy as np
import pytest
from flint import arb, ctx, fmpq
from hypothesis import given
from hypothesis import strategies as st
from mpmath import mp, mpf
from problems import Array, Problem, draw

from attncheck.attention import oracle
from attncheck.attention.balls import Balls
from attncheck.attention.double_words import DoubleWords
from attncheck.attention.exact_array import Enclosure, make_enclosure
from attncheck.attention.oracle import (
    OutsideDomain,
    PrecisionExhausted,
    enclose_exact_stages,
    evaluate_from_returned_stages,
)
from attncheck.attention.problem import Computation

INF = float("inf")


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


PLAIN = {name: normal(2, 3, *shape) for name, shape in (("query", (4, 6)), ("key", (5, 6)), ("value", (5, 2)))}


def softmax_of(*scores: float) -> Problem:
    return Problem("softmax", {}, {"scores": np.array(scores, dtype=np.float64).reshape(1, 1, 1, -1)})


def balls(*numbers: arb) -> Balls:
    return Balls((np.array([*numbers, None], dtype=object)[:-1],))


def agree(one: Enclosure, other: Enclosure) -> bool:
    """Whether two enclosures can be of the same truth."""
    with np.errstate(invalid="ignore"):
        difference = np.abs((one.high - other.high) + (one.low - other.low))
    same_infinity = np.isinf(one.high) & (one.high == other.high)
    return bool((same_infinity | (difference <= (one.radius + other.radius) * (1 + 1e-12))).all())


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
        got = make_enclosure(balls(arb(fmpq(truth.numerator, truth.denominator))))
    rounded, radius = got.round_for_storage(), Fraction(float(got.radius[0]))
    limits = abs(truth) * Fraction(2) ** -50, max(2 * radius, abs(truth) * Fraction(2) ** -67)
    for found, limit in zip((got, rounded), limits, strict=True):
        high, low, own = (Fraction(float(part[0])) for part in (found.high, found.low, found.radius))
        assert abs(truth - high - low) <= own
        assert own <= max(limit, Fraction(2) ** -1072)
    again = rounded.round_for_storage()
    assert (again.low.tobytes(), again.radius.tobytes()) == (rounded.low.tobytes(), rounded.radius.tobytes())


finite = st.floats(-1e300, 1e300)


@given(finite, finite, st.floats(-0.5, 0.5), st.integers(-20, 20))
def test_error_is_right_to_51_bits(high: float, other: float, part: float, steps: int) -> None:
    low = part * float(np.spacing(abs(high)))
    for candidate in (other, high, high + steps * float(np.spacing(high))):
        error = abs(Fraction(candidate) - Fraction(high) - Fraction(low))
        got = Fraction(enclosure([high], [low]).distance_to(np.array([candidate]))[0])
        assert abs(got - error) <= error * Fraction(2) ** -51


def test_errors_of_infinities_and_nan_and_what_is_exact_or_open() -> None:
    for exact, errors in ((1.0, [INF, INF, INF, 0]), (-INF, [INF, 0, INF, INF]), (INF, [0, INF, INF, INF])):
        assert enclosure([exact] * 4).distance_to(np.array([INF, -INF, np.nan, 1.0])).tolist() == errors
    assert enclosure([-1.5e308]).distance_to(np.array([1.5e308])) == INF
    got = make_enclosure(balls(arb(7), arb(3), arb(0)).reshaped((1, 3)).mask_forbidden(np.array([[False, True, True]])))
    assert (got.high.tolist(), got.low.tolist(), got.radius.tolist()) == ([[-INF, 3, 0]], [[0, 0, 0]], [[0, 0, 0]])
    for ball in (arb("1e400"), -arb("1e400"), arb("nan"), arb(0, arb("inf"))):  # float64 cannot bound it
        assert make_enclosure(balls(ball)).radius[0] == make_enclosure(balls(ball)).round_for_storage().radius[0] == INF


# Extremes.


@pytest.mark.parametrize(("size", "expected"), [(1e-300, [0.5, 0.5]), (1e300, [0.0, 1.0]), (-1e300, [1.0, 0.0])])
def test_scores_beyond_float64_still_have_exact_weights(size: float, expected: list[float]) -> None:
    inputs = {
        "query": np.full((1, 1, 1, 3), size),
        "key": np.array([[[[1.0] * 3, [2.0] * 3]]]) * abs(size),
        "value": np.array([[[[1e300], [-1e-300]]]]),
    }
    exact = enclose_exact_stages(Problem("attention", {}, inputs))
    assert exact["weights"].distance_to(np.array(expected).reshape(1, 1, 1, 2)).max() <= 5e-324
    output = exact["output"]
    assert (output.distance_to(np.array([expected]) @ inputs["value"]) <= output.radius).all()
    assert (output.radius <= max(2.0**-100 * abs(output.high.item()), 1e-323)).all()
    if abs(size) > 1:
        assert np.isinf([*exact["scores"].high.flat, *exact["scores"].radius.flat]).all()
        assert exact["log_sum_exp"].radius[0, 0, 0] == INF


def test_large_scores_that_float64_tells_apart_and_weights_below_the_least_float_are_known() -> None:
    close = enclose_exact_stages(softmax_of(1e300, np.nextafter(1e300, 0), -1e300))
    assert (close["weights"].high.tolist(), close["log_sum_exp"].high.item()) == ([[[[1, 0, 0]]]], 1e300)
    exact = enclose_exact_stages(softmax_of(0, -781))["weights"]
    assert exact.high[0, 0, 0, 1] == exact.low[0, 0, 0, 1] == 0
    with mp.workprec(200):
        assert 0 < mp.exp(-781) <= mpf(float(exact.radius[0, 0, 0, 1]))
    assert exact.radius[0, 0, 0, 1] <= 2.0**-1072


def test_an_empty_row_has_an_output_of_exactly_zero() -> None:
    inputs = {name: normal(1, 1, 96, 80, seed=3) for name in ("query", "key", "value")}  # FLINT's blocked product
    mask = np.broadcast_to(np.arange(96)[:, np.newaxis] != 5, (96, 96))
    output = enclose_exact_stages(Problem("attention", {}, inputs | {"mask": mask}), ["output"])["output"]
    assert not any(part[0, 0, 5].any() for part in (output.high, output.low, output.radius))
    assert output.high[0, 0, 4].all()


# Precision.


def cancelling(**options: Any) -> Problem:
    """Return attention whose scores have terms that are 2^200 times as large as the scores themselves."""
    key = np.array([[1, 0.7, -1], [1, 0.5, -1]]) / 3
    inputs = {"query": np.array([[2.0**200, 1, 2.0**200]]), "key": key, "value": np.array([[1.0], [-1.0]])}
    return Problem("attention", options, inputs)


@pytest.mark.parametrize(
    ("stage", "options", "precisions", "of_terms"),
    [
        ("weights", {"scale": 1.0}, [106, 128, 256], False),
        ("capped", {"scale": 1.0, "softcap": 2.0}, [106, 128, 256], False),  # a cap far below the terms
        ("scores", {"scale": 1.0}, [106], True),
        ("capped", {"scale": 1.0, "softcap": 2.0**150}, [106, 128], True),  # one smaller than the terms by 2^51
        ("masked", {}, [106], True),
    ],
)
def test_precision_is_raised_where_it_must_be(
    stage: str, options: dict[str, Any], precisions: list[int], of_terms: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []  # that of double words, then FLINT's
    attempt = oracle._try_by_rows

    def counted(parts: Any, stages: Any) -> Any:
        tried.append(106 if parts[0].arithmetic is DoubleWords else flint.ctx.prec)
        return attempt(parts, stages)

    monkeypatch.setattr(oracle, "_try_by_rows", counted)
    exact = enclose_exact_stages(cancelling(**options), [stage])[stage]
    assert tried == precisions
    assert (exact.radius > 0).all()
    assert (exact.radius <= 2.0**-80 * (2.0**201 if of_terms else np.abs(exact.high))).all()
    if stage == "weights":
        with mp.workprec(400):
            first, second = (mpf(float(part)) for part in cancelling().inputs["key"][:, 1])
            truth = 1 / (1 + mp.exp(second - first))
            assert abs(truth - mpf(exact.high[0, 0]) - mpf(exact.low[0, 0])) <= mpf(exact.radius[0, 0])


def test_when_no_precision_suffices_it_says_so_and_leaves_flint_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    before = flint.ctx.prec
    monkeypatch.setattr(oracle, "MAX_PRECISION", 128)
    with pytest.raises(PrecisionExhausted, match="attention: weights not settled with 128 bits"):
        enclose_exact_stages(cancelling(), ["weights"])
    assert flint.ctx.prec == before


# What has no value.


@pytest.mark.parametrize("name", ["query", "value", "bias"])
def test_inputs_outside_the_domain_are_named(name: str) -> None:
    for poison in (np.nan, INF, -INF):
        inputs = {each: array.copy() for each, array in PLAIN.items()} | {"bias": np.zeros((4, 5))}
        inputs[name][..., -1, -1] = poison
        if (name, poison) == ("bias", -INF):
            assert enclose_exact_stages(Problem("attention", {}, inputs))["biased"].high[0, 0, -1, -1] == -INF
            continue
        with pytest.raises(OutsideDomain, match=f"^{name} ") as caught:
            enclose_exact_stages(Problem("attention", {}, inputs))
        assert caught.value.input_name == name
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_divisions_by_zero_and_what_the_oracle_does_not_know_are_refused() -> None:
    cosine = "scoring", {"score": "cosine"}, {"query": np.ones((2, 3)), "key": np.eye(4, 3)}
    assert enclose_exact_stages(Problem("attention", {"scale": None, "window": None}, PLAIN))
    for problem, error, says in (
        (("attention", {"softcap": 0.0}, PLAIN), OutsideDomain, "softcap is 0"),
        (cosine, OutsideDomain, "key has a vector of length 0"),
        (
            ("attention", {"window": (1, 0)}, PLAIN | {"key_lengths": np.ones(2)}),
            ValueError,
            "no attention with key_lengths, window",
        ),
        (("convolution", {}, PLAIN), ValueError, "no convolution with anything"),
    ):
        with pytest.raises(error, match=says):
            enclose_exact_stages(Problem(*problem))
    with pytest.raises(ValueError, match="softmax has no raw_scores"):
        enclose_exact_stages(softmax_of(1, 2), ["raw_scores"])


# From an implementation's own stages.

MASK = np.array([[True, False, True, True, True]] * 3 + [[False] * 5])
BIAS = np.where(np.eye(4, 5) > 0, -INF, normal(4, 5))
MASKED = Problem("attention", {"is_causal": True, "softcap": 2.0}, PLAIN | {"mask": MASK, "bias": BIAS})
UNCAPPED = Problem("attention", {"is_causal": True}, MASKED.inputs)


def follows(problem: Problem, stage: str, **returned: Array) -> Enclosure | None:
    exact = evaluate_from_returned_stages(Computation.from_problem(problem), returned, [stage])
    return None if exact is None else exact[stage]


def test_each_stage_follows_from_the_nearest_that_was_returned() -> None:
    scores, other = normal(2, 3, 4, 5, seed=8), normal(2, 3, 4, 5, seed=9)
    allowed, weights, of_heads = MASK & np.tri(4, 5, dtype=bool), np.abs(other), normal(2, 3, 4, 2)
    for stage, returned, expected in (
        ("capped", {"scores": scores, "raw_scores": other}, 2 * np.tanh(scores / 2)),
        ("biased", {"scores": scores, "capped": other}, other + BIAS),
        ("masked", {"biased": other, "scores": scores}, np.where(allowed, other, -INF)),
        ("output", {"weights": weights, "masked": scores}, weights @ PLAIN["value"]),
        ("output", {"context": of_heads, "weights": weights}, weights @ PLAIN["value"]),  # context is a layer's alone
    ):
        found = follows(MASKED, stage, **returned)
        assert found.distance_to(expected).max() < 1e-14
    for stage in ("weights", "log_sum_exp"):
        for returned, logits in (
            ({"biased": other, "scores": scores}, other),
            ({"masked": np.where(allowed, scores, -INF), "biased": other}, scores),
            # The sum of the exponentials does not follow from the weights, nor they from it.
            ({"biased": other, "weights": scores, "log_sum_exp": scores[..., 0]}, other),
        ):
            exact = enclose_exact_stages(Problem("softmax", {}, {"scores": np.where(allowed, logits, -INF)}))[stage]
            found = follows(MASKED, stage, **returned)
            assert agree(found, exact)
    scaled = draw("scaled dot").laid_out()  # a scale may be applied before the product
    found = follows(scaled, "scores", raw_scores=np.zeros((2, 4, 5, 6)))
    assert np.array_equal(found.high, enclose_exact_stages(scaled)["scores"].high)


@pytest.mark.parametrize("poison", [np.nan, INF, -INF])
def test_what_is_not_finite_where_it_is_attended_has_no_exact_value(poison: float) -> None:
    attended, forbidden = normal(2, 3, 4, 5), normal(2, 3, 4, 5)
    attended[0, 0, 2, 0] = forbidden[0, 0, 2, 4] = poison
    for stage in ("masked", "weights", "log_sum_exp"):
        assert follows(UNCAPPED, stage, scores=attended) is None
        assert follows(UNCAPPED, stage, scores=forbidden) is not None
    assert follows(UNCAPPED, "output", weights=attended) is None
    assert follows(UNCAPPED, "weights", weights=attended) is not None
    assert (follows(UNCAPPED, "weights", masked=attended) is None) == (poison != -INF)
    biased = normal(2, 3, 4, 5)
    biased[..., 2, 2] = -INF  # as in BIAS
    found = follows(UNCAPPED, "weights", biased=biased)
    assert not found.high[..., 2, 2].any()
