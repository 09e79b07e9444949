from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flint import arb, ctx, fmpq
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from attncheck.oracle.enclosure import Enclosure, enclose, join

INF = float("inf")


def enclosure(high: list[float], low: list[float] | None = None) -> Enclosure:
    return Enclosure(np.array(high), np.array(low if low else [0.0] * len(high)), np.zeros(len(high)))


def as_arb(value: Fraction) -> arb:
    return arb(fmpq(value.numerator, value.denominator))


@given(
    st.integers(-(10**60), 10**60),
    st.integers(1, 10**60),
    st.integers(-340, 240),
    st.sampled_from([53, 128, 400]),
)
def test_the_truth_lies_within_the_radius(numerator: int, denominator: int, exponent: int, precision: int) -> None:
    truth = Fraction(numerator, denominator) * Fraction(10) ** exponent
    with ctx.workprec(precision):
        got = enclose([as_arb(truth)], (1,))
    high, low, radius = (Fraction(float(part[0])) for part in (got.high, got.low, got.radius))
    assert abs(truth - high - low) <= radius
    assert radius <= max(abs(truth) * Fraction(2) ** -50, Fraction(2) ** -1072)
    rounded = got.rounded()
    high, low, wider = (Fraction(float(part[0])) for part in (rounded.high, rounded.low, rounded.radius))
    assert abs(truth - high - low) <= wider
    assert wider <= max(2 * radius, abs(truth) * Fraction(2) ** -67, Fraction(2) ** -1072)
    again = rounded.rounded()
    assert (again.low.tobytes(), again.radius.tobytes()) == (rounded.low.tobytes(), rounded.radius.tobytes())


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_is_its_own_enclosure(number: float) -> None:
    got = enclose([arb(number)], (1, 1))
    for each in (got, got.rounded()):
        assert [part.item() for part in (each.high, each.low, each.radius)] == [number, 0, 0]


@pytest.mark.parametrize("digits", ["1e-400", "1e-5000", "-3e-324", "2.4e-324", "5e-324", "1e-310", "1.1e-308"])
def test_below_the_least_float_the_radius_takes_what_high_and_low_cannot_hold(digits: str) -> None:
    with ctx.workprec(128):
        got = enclose([arb(digits)], (1,))
    assert abs(Fraction(digits) - Fraction(got.high[0]) - Fraction(got.low[0])) <= Fraction(got.radius[0])
    assert 0 < got.radius[0] <= 1e-323


def test_a_radius_too_small_for_float64_does_not_become_zero() -> None:
    assert enclose([arb(0, arb("1e-5000"))], (1,)).radius[0] == 5e-324


def test_exact_zero_has_no_radius() -> None:
    got = enclose([arb(0), arb(0)], (2, 1))
    assert not got.high.any()
    assert not got.low.any()
    assert not got.radius.any()


def test_what_is_not_attended_is_minus_infinity_exactly() -> None:
    got = enclose([arb(7), arb(3), arb(0)], (1, 3), np.array([[False, True, False]]))
    assert got.high.tolist() == [[-INF, 3, -INF]]
    assert got.radius.tolist() == [[0, 0, 0]]


@pytest.mark.parametrize("ball", [arb("1e400"), -arb("1e400"), arb("nan"), arb(0, arb("inf"))])
def test_what_float64_cannot_bound_has_an_infinite_radius(ball: arb) -> None:
    assert enclose([ball], (1,)).rounded().radius[0] == INF
    assert enclose([ball], (1,)).radius[0] == INF


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_error_in_every_dtype(dtype: type) -> None:
    exact = enclosure([1 / 3], [1 / 3 * 2.0**-60])
    candidate: NDArray[Any] = np.array([1 / 3], dtype=dtype)
    truth = Fraction(1 / 3) + Fraction(1 / 3 * 2.0**-60)
    error = abs(Fraction(float(candidate[0])) - truth)
    got = exact.error_of(candidate)
    assert got.dtype == np.float64
    assert abs(Fraction(got[0]) - error) <= error * Fraction(2) ** -51


finite = st.floats(-1e300, 1e300)


@given(finite, finite, st.floats(-0.5, 0.5), st.integers(-20, 20))
def test_error_is_right_to_51_bits(high: float, other: float, part: float, steps: int) -> None:
    low = part * float(np.spacing(abs(high)))
    for candidate in (other, high, high + steps * float(np.spacing(high))):
        error = abs(Fraction(candidate) - Fraction(high) - Fraction(low))
        got = Fraction(enclosure([high], [low]).error_of(np.array([candidate]))[0])
        assert abs(got - error) <= error * Fraction(2) ** -51


def test_infinities_and_nan() -> None:
    candidates = np.array([INF, -INF, np.nan, 1.0])
    assert enclosure([1.0] * 4).error_of(candidates).tolist() == [INF, INF, INF, 0]
    assert enclosure([-INF] * 4).error_of(candidates).tolist() == [INF, 0, INF, INF]
    assert enclosure([INF] * 4).error_of(candidates).tolist() == [0, INF, INF, INF]


def test_an_error_beyond_float64_is_infinite_without_a_warning() -> None:
    assert enclosure([-1.5e308]).error_of(np.array([1.5e308])) == INF


def test_shapes_must_be_the_same() -> None:
    with pytest.raises(ValueError, match="one shape"):
        Enclosure(np.zeros(2), np.zeros(3), np.zeros(2))
    with pytest.raises(ValueError, match="a candidate of shape"):
        enclosure([1.0]).error_of(np.zeros((1, 1)))


def test_join_and_reshape() -> None:
    parts = [enclosure([1.0, 2.0]).reshaped((2, 1)), enclosure([3.0]).reshaped((1, 1))]
    joined = join(parts, -2)
    assert joined.shape == (3, 1)
    assert joined.high.ravel().tolist() == [1, 2, 3]
    assert join(parts[:1], -2) is parts[0]
