"""Double words against balls of 300 bits: the truth lies within every radius, and every radius is what was derived."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flint import arb, ctx
from numpy.typing import NDArray

from attncheck.attention import double_words
from attncheck.attention.balls import Balls
from attncheck.attention.double_words import DoubleWords
from attncheck.attention.exact_array import ExactArray

Array = NDArray[np.float64]
Operation = Callable[..., Any]

SIZES = (1e-290, 1e-30, 1.0, 1e30, 1e290)
"""Regimes that operands are drawn in: the middle one, and those where something over- or underflows."""
UNARY: dict[str, Operation] = {
    "exp": lambda x: x.exp(),
    "log": lambda x: abs(x).log(),
    "sqrt": lambda x: abs(x).sqrt(),
    "tanh": lambda x: x.tanh(),
    "negative": lambda x: -x,
}
BINARY: dict[str, Operation] = {
    "sum": lambda x, y: x + y,
    "difference": lambda x, y: x - y,
    "product": lambda x, y: x * y,
    "quotient": lambda x, y: x / y,
    "larger": lambda x, y: x.maximum(y),
}
U2 = 2.0**-106


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with np.errstate(all="ignore"), ctx.workprec(300):
        yield


def drawn(rng: np.random.Generator, *shape: int, spread: float = 1.0) -> Array:
    """Draw numbers, a few of which are much smaller than the others, or 0."""
    numbers = rng.standard_normal(shape) * np.exp2(-np.floor(spread * rng.exponential(10, shape)))
    return np.where(rng.random(shape) < 0.05, 0.0, numbers)


def both_of(high: Array, low: Array | None = None, radius: Array | None = None, side: float = 0.0) -> Any:
    """Return double words, and what they stand for as balls: ``side`` times the radius away from the middle."""
    low, radius = (np.zeros(high.shape) if part is None else part for part in (low, radius))
    exact = Balls.from_finite_numbers(high) + Balls.from_finite_numbers(low)
    return DoubleWords((high, low, radius)), exact + Balls.from_finite_numbers(radius) * side


def computed(rng: np.random.Generator, *shape: int, size: float = 1.0, side: float = 0.0) -> Any:
    """Return operands as steps have them: two numbers, with a radius, and a truth at ``side`` of it."""
    high = drawn(rng, *shape) * size
    low = high * 2.0**-54 * rng.uniform(-1, 1, shape)
    return both_of(high, low, np.abs(high) * 2.0 ** -rng.integers(70, 106, shape), side)


def outside(found: ExactArray, truth: Balls) -> int:
    """Count the truths that an enclosure leaves out."""
    high, low, radius = (part.ravel().tolist() for part in found.high_low_radius())
    truths = np.broadcast_to(truth.parts[0], found.shape).ravel()
    return sum(
        not (abs(ball - first - second) - rest <= arb(0, ball.rad()) + ball.rad() * 2)
        for first, second, rest, ball in zip(high, low, radius, truths, strict=True)
        if np.isfinite(rest) and ball.is_finite()
    )


@pytest.mark.parametrize("size", SIZES)
def test_the_truth_is_enclosed_by_every_operation(size: float) -> None:
    rng, offenders = np.random.default_rng(1), []
    for side in (-1.0, 0.0, 1.0):
        x, exact_x = computed(rng, 40, 25, size=size, side=side)
        y, exact_y = computed(rng, 40, 25, side=-side)
        offenders += [name for name, of in UNARY.items() if outside(of(x), of(exact_x))]
        offenders += [name for name, of in BINARY.items() if outside(of(x, y), of(exact_x, exact_y))]
        offenders += ["product of matrices"] * outside(x @ y.transposed(), exact_x @ exact_y.transposed())
        offenders += ["sum of rows"] * outside(x.sum(-1), exact_x.sum(-1))
    assert not offenders


def test_exponents_and_logarithms_are_enclosed_over_their_whole_range() -> None:
    rng, offenders = np.random.default_rng(2), []
    for scale in (1e-12, 1e-3, 1.0, 30.0, 800.0):
        x, exact = both_of(rng.uniform(-scale, scale, (50, 20)))
        size, exact_size = both_of(np.exp(rng.uniform(-min(scale, 600), min(scale, 600), (50, 20))))
        for name, number, truth in (("exp", x, exact), ("tanh", x, exact), ("log", size, exact_size)):
            offenders += [(name, scale)] * outside(UNARY[name](number), UNARY[name](truth))
    ends, exact = both_of(np.array([[0.0, -708.0, -740.0, -745.2, -746.0, -1e300, 1e-300, -1e-300]]))
    wide, exact_wide = both_of(np.array([[-800.0, -800.0]]), radius=np.array([[100.0, 801.0]]), side=1.0)
    offenders += [("ends", 0)] * (outside(ends.exp(), exact.exp()) + outside(wide.exp(), exact_wide.exp()))
    assert ends.exp().radius.max() <= 2.0**-102
    x, exact = both_of(-np.abs(np.random.default_rng(8).uniform(2.0**-20, 2.0**-12, (20, 20))))
    less_one = DoubleWords(double_words._expm1_with_radius(*x.parts))
    offenders += [("e^x - 1", 0)] * outside(less_one, Balls((np.frompyfunc(arb.expm1, 1, 1)(exact.parts[0]),)))
    assert (less_one.radius >= 9 * U2 * np.abs(less_one.parts[0])).all()  # a product and a sum with one number
    assert not offenders


DERIVED: dict[str, tuple[float, Operation]] = {
    "sum": (16, lambda x, y, z, r, s: r + s + 3 * U2 * abs(z)),
    "difference": (16, lambda x, y, z, r, s: r + s + 3 * U2 * abs(z)),
    "product": (16, lambda x, y, z, r, s: abs(x) * s + r * (abs(y) + s) + 7 * U2 * abs(z)),
    "quotient": (16, lambda x, y, z, r, s: (r + abs(z) * s) / (abs(y) - s) + 15 * U2 * abs(z)),
    "larger": (16, lambda x, y, z, r, s: np.maximum(r, s)),
    "exp": (4.1, lambda x, y, z, r, s: z * (np.expm1(r) + 3.8 * U2)),
    "sqrt": (4, lambda x, y, z, r, s: r / z + 25 / 8 * U2 * z),
    "log": (np.inf, lambda x, y, z, r, s: r / (abs(x) - r) + 16 * U2),
}
"""How large the radius of exact operands is at most, in squares of u, and how large it is at least of any."""
EXACT = (0.0, 0.0)


def of(name: str, x: DoubleWords, y: DoubleWords) -> DoubleWords:
    found: DoubleWords = UNARY[name](x) if name in UNARY else BINARY[name](x, y)
    return found


@pytest.mark.parametrize("name", DERIVED)
def test_radii_are_as_small_as_derived_and_none_is_below(name: str) -> None:
    """A bound that is halved, or has lost a term, encloses random truths all the same: docs/numerics.md, section 2."""
    (most, least), rng = DERIVED[name], np.random.default_rng(4)
    operands = [both_of(np.abs(rng.standard_normal((20, 20))) + 0.1)[0].parts for _ in range(2)]
    for radii in (EXACT, (1e-25, 0.0), (0.0, 1e-25), (1e-25, 1e-25), (1e-4, 1e-4)):
        pairs = zip(operands, radii, strict=True)
        x, y = (DoubleWords((high, low, np.full((20, 20), radius))) for (high, low, _), radius in pairs)
        found = of(name, x, y)
        bound = least(x.parts[0], y.parts[0], found.parts[0], *radii)
        assert (found.radius >= bound * (1 - 2.0**-30)).all(), radii
        assert (found.radius <= np.maximum(bound * 4, 2.0**-99)).all(), radii
    rng = np.random.default_rng(3)
    high, _, radius = of(name, *(both_of(drawn(rng, 40, 25, spread=0.1))[0] for _ in range(2))).high_low_radius()
    is_known = np.isfinite(radius) & np.isfinite(high)
    assert is_known.mean() > 0.9
    assert most == np.inf or (radius[is_known] <= most * U2 * np.abs(high[is_known]) * (1 + 2.0**-30)).all()


def test_radii_of_sums_and_products_of_rows_and_of_tangents_are_small() -> None:
    rng = np.random.default_rng(3)
    x, y = (both_of(drawn(rng, 40, 25, spread=0.1))[0] for _ in range(2))
    high, _, radius = x.tanh().high_low_radius()
    assert (radius <= 2.0**-89 * np.abs(high)).all()  # what the reduction leaves of numbers near 2^-11
    assert ((x @ y.transposed()).radius <= 2.0**-100 * (np.abs(x.parts[0]) @ np.abs(y.parts[0].T))).all()
    assert (x.sum(-1).radius <= 2.0**-100 * np.abs(x.parts[0]).sum(-1, keepdims=True)).all()


def test_products_of_matrices_do_not_depend_on_the_order_of_their_sums() -> None:
    """Every bit of an operand set, and magnitudes that cancel: whatever a BLAS adds up first, it loses nothing."""
    rng = np.random.default_rng(5)
    full = np.nextafter(2.0, 1.0)
    for inner in (1, 2, 3, 63, 64, 65, 1000, 3000):
        x = np.where(rng.random((6, inner)) < 0.5, full, -full) * np.exp2(rng.integers(-30, 30, (6, inner)))
        y = np.where(rng.random((inner, 5)) < 0.5, full, -full) * np.exp2(rng.integers(-30, 30, (inner, 5)))
        x[0], y[:, 0] = (  # both slices as large as they can be, odd, and of one sign
            (rng.integers(1 << 20, 1.5 * 2**20, inner) * 4 + 1) / 2**21
            + (rng.integers(0, 1 << 20, inner) * 2 + 1) / 2**43
            for _ in range(2)
        )
        left, right = both_of(x), both_of(y)
        found = left[0] @ right[0]
        assert not outside(found, left[1] @ right[1]), inner
        order = rng.permutation(inner)
        turned = both_of(x[:, order])[0] @ both_of(y[order])[0]
        for one, other in zip(found.high_low_radius(), turned.high_low_radius(), strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-12, atol=0)
        assert np.array_equal(turned.parts[0], found.parts[0])
        assert np.array_equal(turned.parts[1], found.parts[1])


def test_what_slices_leave_and_what_operands_move_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(7)
    positive = [np.abs(rng.standard_normal(shape)) for shape in ((9, 30), (30, 7))]
    moved = [both_of(each, radius=each / 2, side=1.0) for each in positive]
    assert not outside(moved[0][0] @ moved[1][0], moved[0][1] @ moved[1][1])
    # Near the smallest numbers, products of slices are rounded when they are put in their place.
    small = [both_of(each * size) for each, size in zip(positive, (1e-160, 1e-155), strict=True)]
    assert not outside(small[0][0] @ small[1][0], small[0][1] @ small[1][1])
    sums = [both_of(each.astype(np.float32).astype(np.float64))[0] for each in positive]
    product = sums[0] @ sums[1]  # of two slices each: three sums, of which the first two add up exactly
    assert (product.radius >= 2 * U2 * product.parts[0]).all()
    assert (sums[0].sum(-1).radius >= 4 * 3 * U2 * sums[0].sum(-1).parts[0]).all()
    long = [both_of(each, each * 2.0**-54) for each in positive]
    for bits in range(30, 90, 2):  # as many as are left out for want of time are too few to show beside the rest
        monkeypatch.setattr(double_words, "KEPT_BITS", bits)
        cut = long[0][0] @ long[1][0]
        assert cut.radius.max() > 2.0 ** (-bits - 40)
        assert not outside(cut, long[0][1] @ long[1][1]), bits


def test_every_slice_that_a_number_needs_is_taken() -> None:
    """Numbers far smaller than others of their row are known as well: a slice too few would leave them out."""
    small = np.exp2(-np.arange(0.0, 60.0, 4.0))
    x = np.where(np.arange(15) % 2 == 0, 1.0, 0.0)[np.newaxis] + small
    left, right = both_of(x / 3, x * 2.0**-56 / 3), both_of(np.diag(small) / 7)
    found = left[0] @ right[0]
    assert not outside(found, left[1] @ right[1])
    assert (found.radius <= 2.0**-100 * np.abs(found.parts[0])).all()
    assert (found.radius[found.parts[0] != 0] > 0).all()


def test_what_is_exactly_zero_stays_so_and_what_is_not_finite_is_unknown() -> None:
    zero, number, huge, tiny = (both_of(np.full((2, 3), value))[0] for value in (0.0, 1.5, 1e200, 1e-200))
    for found in (zero * number, zero / number, zero @ number.transposed(), zero.sum(-1), zero.tanh(), zero.sqrt()):
        assert found.flag_zeros().all()
    root = -number.sqrt() * huge * huge
    for found in (huge * huge, huge.exp(), huge @ (huge * number).transposed(), number / zero, root):
        assert np.isinf(found.high_low_radius()[2]).all()
        assert np.isfinite(found.high_low_radius()[0] + found.high_low_radius()[1]).all()
    assert ((tiny * tiny).radius > 0).all()
    assert ((tiny * tiny).radius <= 2.0**-1070).all()


def test_what_is_small_is_small_beside_a_scale_alone() -> None:
    number = both_of(np.full((1, 2), 3.0), radius=np.array([[2.0**-92, 2.0**-80]]))[0]
    one, infinite = DoubleWords.from_finite_numbers(np.ones((1, 1))), np.full((1, 1), np.inf)
    assert number.flag_small_radii(one, 2.0**-90).tolist() == [[True, False]]
    assert number.flag_small_radii(one * 2.0**20, 2.0**-90).all()
    unknown, beside = both_of(np.ones((1, 1)), radius=infinite)[0], both_of(infinite)[0]
    assert not unknown.flag_small_radii(beside, 2.0**-90)


def test_each_number_is_the_same_wherever_it_lies_in_a_larger_array(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = both_of(np.linspace(0.5, 4.0, 42).reshape(2, 3, 7), radius=np.full((2, 3, 7), 2.0**-98))[0]
    whole = [(numbers.exp(), numbers.log())]
    monkeypatch.setattr(double_words, "_BLOCK_SIZE", 5)
    for found, expected in zip((numbers.exp(), numbers.log()), *whole, strict=True):
        assert np.array_equal(np.stack(found.parts), np.stack(expected.parts))
