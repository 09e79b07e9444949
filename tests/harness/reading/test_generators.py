"""Generators draw what their libraries draw; dtypes are those of NumPy and of ml_dtypes."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from functools import partial
from itertools import product
from typing import Any

import flint
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from attncheck.dtypes import largest_number, numpy_dtype, rounded_once
from attncheck.reading.random_numbers import (
    GENERATORS,
    NumpyLegacy,
    R,
    TorchCpu,
    _rounded_once,
    check_draw,
    draw,
    words_from_state,
)
from attncheck.spec import DTYPES


def test_the_twister_gives_the_word_that_the_cpp_standard_fixes() -> None:
    # ISO C++ [rand.predef]: the 10000th word of std::mt19937, whose default seed is 5489, is 4123659995.
    words = words_from_state(np.random.RandomState(5489).get_state(legacy=False)["state"]["key"])
    first = words(4000)
    assert first[0] == 3499211612
    assert words(6000)[-1] == 4123659995


@pytest.mark.parametrize(
    ("seed", "printed"),
    [
        (0, [0.8966972, 0.2655087, 0.3721239, 0.5728534, 0.9082078]),
        (42, [0.9148060, 0.9370754, 0.2861395, 0.8304476, 0.6417455, 0.5190959]),
        (123, [0.2875775, 0.7883051, 0.4089769, 0.8830174, 0.9404673, 0.0455565]),
    ],
)
def test_r_draws_what_r_prints_after_set_seed(seed: int, printed: list[float]) -> None:
    drawn = R(seed).runif((len(printed),), 0, 1)
    np.testing.assert_allclose(drawn, printed, rtol=0, atol=0.5e-7)


@pytest.mark.parametrize(
    ("distribution", "seed", "printed"),
    [
        ("rand", 42, [0.37454012, 0.95071431, 0.73199394]),
        ("randn", 0, [1.76405235, 0.40015721, 0.97873798]),
        ("randn", 42, [0.49671415, -0.1382643, 0.64768854]),
    ],
)
def test_numpy_legacy_draws_the_well_known_first_numbers(distribution: str, seed: int, printed: list[float]) -> None:
    drawn = draw(NumpyLegacy(seed), distribution, (3,), {})
    assert drawn.dtype == np.float64
    np.testing.assert_allclose(drawn, printed, rtol=0, atol=0.5e-8)


def test_torch_draws_the_numbers_that_its_users_see() -> None:
    printed = [0.4963, 0.7682, 0.0885, 0.1320, 0.3074, 0.6341, 0.4901, 0.8964]
    drawn = TorchCpu(0).rand((8,))
    assert drawn.dtype == np.float32
    np.testing.assert_allclose(drawn, printed, rtol=0, atol=0.5e-4)


def test_torch_draws_the_normal_numbers_that_its_users_see() -> None:
    printed = [
        [-1.1258, -1.1524, -0.2506, -0.4339],
        [0.8487, 0.6920, -0.3160, -2.1152],
        [0.3223, -1.2633, 0.3500, 0.3081],
        [0.1198, 1.2377, 1.1168, -0.2473],
    ]
    drawn = TorchCpu(0).randn((4, 4))
    assert drawn.dtype == np.float32
    np.testing.assert_allclose(drawn, printed, rtol=0, atol=0.5e-4)


SEEDS = [0, 1, 42, 2**31, 2**32 - 1]


@pytest.mark.torch
@pytest.mark.parametrize("seed", SEEDS)
def test_rand_is_torchs_own_bit_for_bit_and_randn_within_a_millionth(seed: int) -> None:
    torch = pytest.importorskip("torch", reason="compares with torch's own generator")
    for shape in [(1,), (7,), (16,), (5, 5), (4, 16, 4), (1000,)]:
        theirs = torch.rand(shape, generator=torch.Generator().manual_seed(seed)).numpy()
        np.testing.assert_array_equal(TorchCpu(seed).rand(shape).view(np.uint32), theirs.view(np.uint32))
    for shape in [(16,), (17,), (31,), (32,), (10, 16), (3, 11), (1, 2, 3, 7), (4099,)]:
        theirs = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).numpy().astype(np.float64)
        np.testing.assert_allclose(TorchCpu(seed).randn(shape).astype(np.float64), theirs, rtol=0, atol=2**-20)


@pytest.mark.torch
@pytest.mark.parametrize("seed", SEEDS)
def test_several_draws_from_one_seed_follow_each_other_as_torchs_do(seed: int) -> None:
    torch = pytest.importorskip("torch", reason="compares with torch's own generator")
    state, ours = torch.Generator().manual_seed(seed), TorchCpu(seed)
    # The sizes that are no multiple of 16 draw a last block anew, which moves everything after them.
    steps = [("randn", 160), ("rand", 5), ("randn", 17), ("randn", 700), ("rand", 256), ("randn", 16), ("rand", 1)]
    for distribution, size in steps:
        theirs = getattr(torch, distribution)(size, generator=state).numpy().astype(np.float64)
        atol = 0 if distribution == "rand" else 2**-20
        np.testing.assert_allclose(draw(ours, distribution, (size,), {}), theirs, rtol=0, atol=atol)


@pytest.mark.parametrize("middle", [1 + 2**-24, 1 + 3 * 2**-24, -(1 + 2**-24), 2**-30 * (1 + 5 * 2**-24)])
def test_a_value_close_to_the_middle_is_decided_by_interval_arithmetic(middle: float) -> None:
    # The exact value is 2^-60 beside the middle of two float32 numbers; float64 says the middle, or the other side.
    below, above = (np.float32(np.nextafter(middle, side)) for side in (-np.inf, np.inf))
    assert below != above
    for side, error in product((-1, 1), (-(2.0**-51), 0.0, 2.0**-51)):
        distance = side * abs(middle) * 2.0**-60
        rounded = _rounded_once(
            np.ones(3, dtype=np.float32),
            partial(np.full_like, fill_value=middle * (1 + error)),
            lambda _, distance=distance: flint.arb(middle) + flint.arb(distance),  # type: ignore[misc]
        )
        assert rounded.tolist() == [above if side > 0 else below] * 3


def _nearest_float32(exact: Fraction) -> np.float32:
    near = np.float32(float(exact))
    candidates = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    return min(candidates, key=lambda candidate: abs(Fraction(float(candidate)) - exact))


def test_the_logarithm_is_rounded_as_the_decimal_module_says() -> None:
    arguments = np.random.RandomState(5).random_sample(500).astype(np.float32)
    arguments = arguments[arguments > 0]
    with localcontext(Context(prec=60)):
        wanted = [_nearest_float32(Fraction(Decimal(float(argument)).ln())) for argument in arguments]
    np.testing.assert_array_equal(_rounded_once(arguments, np.log, flint.arb.log), np.array(wanted))


DRAWS: list[tuple[str, str, dict[str, float], type[Any]]] = [
    ("numpy-legacy", "rand", {}, np.float64),
    ("numpy-legacy", "randn", {}, np.float64),
    ("numpy-legacy", "randint", {"low": -1, "high": 5}, np.int64),
    ("numpy-legacy", "runif", {"low": -1, "high": 5}, np.float64),
    ("r", "runif", {"low": -1, "high": 5}, np.float64),
    ("torch", "rand", {}, np.float32),
    ("torch", "randn", {}, np.float32),
]


@pytest.mark.parametrize(("generator", "distribution", "parameters", "dtype"), DRAWS)
def test_draws_repeat(generator: str, distribution: str, parameters: dict[str, float], dtype: type[Any]) -> None:
    shape = (2, 3, 4)
    check_draw(generator, distribution, parameters, shape)
    make: Callable[[int], Any] = GENERATORS[generator]
    once = make(3)
    first, second = (draw(once, distribution, shape, parameters) for _ in range(2))
    assert first.shape == shape
    assert first.dtype == dtype
    np.testing.assert_array_equal(draw(make(3), distribution, shape, parameters), first)
    assert not np.array_equal(first, second)
    assert not np.array_equal(draw(make(4), distribution, shape, parameters), first)


# Bits of the significand, and the exponent of the least subnormal number: IEEE 754-2019, table 3.5.
FORMATS = {"float64": (53, -1074), "float32": (24, -149), "float16": (11, -24), "bfloat16": (8, -133)}


def nearest(number: float, dtype: str) -> Fraction:
    """The closest number of a format without an end to its exponents; in the middle, the even one."""
    bits, least = FORMATS[dtype]
    exact = Fraction(number)
    if not exact:
        return exact
    exponent = 0
    while abs(exact) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(exact) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** max(exponent - bits + 1, least)
    return round(exact / unit) * unit  # Python rounds a fraction in the middle to the even number


@pytest.mark.parametrize("dtype", DTYPES)
@given(number=st.floats(allow_nan=False, allow_infinity=False) | st.floats(-70000, 70000))
@example(number=1 + 2.0**-8 + 2.0**-40)
@example(number=-(1 + 2.0**-8 + 2.0**-40))
@example(number=2.0**-134 + 2.0**-180)
@example(number=2.0**-149)
@example(number=3.4e38)
@example(number=65519.999)
def test_a_number_is_rounded_once_to_the_nearest(dtype: str, number: float) -> None:
    with np.errstate(over="ignore"):
        rounded = float(rounded_once(np.array([number]), dtype)[0])
    wanted = nearest(number, dtype)
    if abs(wanted) > largest_number(dtype):
        assert rounded == np.copysign(np.inf, number)
    else:
        assert Fraction(rounded) == wanted


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_the_sign_of_zero_and_numbers_of_other_dtypes_are_kept(dtype: str) -> None:
    rounded = rounded_once(np.array([np.inf, -np.inf, np.nan, -0.0, 3.0]), dtype).astype(np.float64)
    np.testing.assert_array_equal(rounded, [np.inf, -np.inf, np.nan, 0, 3])
    assert np.signbit(rounded[3])
    for source in (np.float32, np.int64, bool, np.float16, ml_dtypes.bfloat16):
        rounded = rounded_once(np.array([[0, 1], [1, 1]]).astype(source), dtype)
        assert rounded.dtype == numpy_dtype(dtype)
        assert rounded.astype(np.float64).tolist() == [[0, 1], [1, 1]]


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [("float16", 65504), ("bfloat16", (2 - 2.0**-7) * 2.0**127), ("float32", (2 - 2.0**-23) * 2.0**127)],
)
def test_the_largest_number_is_that_of_the_format(dtype: str, largest: float) -> None:
    assert largest_number(dtype) == largest
