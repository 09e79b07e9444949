"""Arrays that are drawn or made from a rule, against the libraries' numbers and plain loops over queries and keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from functools import partial
from itertools import groupby, product
from typing import Any

import flint
import ml_dtypes
import mpmath
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tables import tables_beside

from attncheck.reading import array_kinds as kinds
from attncheck.reading.array_kinds import Alibi
from attncheck.reading.generated_arrays import (
    GENERATORS,
    NumpyLegacyGenerator,
    TorchCpuGenerator,
    _evaluate_correctly_rounded,
    alibi_shape,
    alibi_slopes,
    check_draw,
    find_relative_buckets,
    make_alibi_bias,
    make_mask,
    make_twister_word_source,
    mask_shape,
)
from attncheck.spec import DTYPES
from attncheck.spec.dtypes import largest_number, numpy_dtype, round_to

TABLES = tables_beside(__file__)


def drawn_by(generator: Any, distribution: str, shape: tuple[int, ...], parameters: Any) -> Any:
    return getattr(generator, distribution)(shape, **parameters)


def test_the_twister_gives_the_word_that_the_cpp_standard_fixes() -> None:
    # ISO C++ [rand.predef]: the 10000th word of std::mt19937, whose default seed is 5489, is 4123659995.
    words = make_twister_word_source(np.random.RandomState(5489).get_state(legacy=False)["state"]["key"])
    assert words(4000)[0] == 3499211612
    assert words(6000)[-1] == 4123659995


def test_generators_draw_what_their_users_see_and_go_on_from_there() -> None:
    for name, distribution, seed, printed in TABLES["prints"]:
        decimals = {"torch": 4, "numpy-legacy": 8, "r": 7}[name]
        make: Callable[[int], Any] = GENERATORS[name]
        generator, others, parameters = make(seed), make(seed), {"low": 0, "high": 1} if name == "r" else {}
        check_draw(name, distribution, parameters, np.shape(printed))
        drawn = drawn_by(generator, distribution, np.shape(printed), parameters)
        np.testing.assert_allclose(drawn, printed, rtol=0, atol=0.5 * 10.0**-decimals)
        assert drawn.dtype == (np.float32 if name == "torch" else np.float64)
        np.testing.assert_array_equal(drawn_by(others, distribution, np.shape(printed), parameters), drawn)
        assert not np.array_equal(drawn_by(generator, distribution, np.shape(printed), parameters), drawn)
    whole = drawn_by(NumpyLegacyGenerator(3), "randint", (2, 3), {"low": -1, "high": 5})
    assert whole.dtype == np.int64
    np.testing.assert_array_equal(whole, np.random.RandomState(3).randint(-1, 5, (2, 3)))


@pytest.mark.torch
@pytest.mark.parametrize("seed", [0, 42, 2**32 - 1])
def test_draws_from_one_seed_follow_each_other_as_torchs_do(seed: int) -> None:
    """Those of rand bit for bit, those of randn within a millionth."""
    torch = pytest.importorskip("torch", reason="compares with torch's own generator")
    state, ours = torch.Generator().manual_seed(seed), TorchCpuGenerator(seed)
    # The sizes that are no multiple of 16 draw a last block anew, which moves everything after them.
    sizes = [(160,), (17,), (3, 11), (5, 5), (700,), (256,), (16,), (1, 2, 3, 7), (4099,), (4, 16, 4)]
    for shape, distribution in product(sizes, ("randn", "rand")):
        theirs = getattr(torch, distribution)(shape, generator=state).numpy().astype(np.float64)
        atol = 0 if distribution == "rand" else 2**-20
        np.testing.assert_allclose(drawn_by(ours, distribution, shape, {}), theirs, rtol=0, atol=atol)


@pytest.mark.parametrize("middle", [1 + 2**-24, 1 + 3 * 2**-24, -(1 + 2**-24), 2**-30 * (1 + 5 * 2**-24)])
def test_a_value_close_to_the_middle_is_decided_by_interval_arithmetic(middle: float) -> None:
    # The exact value is 2^-60 beside the middle of two float32 numbers; float64 says the middle, or the other side.
    below, above = (np.float32(np.nextafter(middle, side)) for side in (-np.inf, np.inf))
    assert below != above
    for side, error in product((-1, 1), (-(2.0**-51), 0.0, 2.0**-51)):
        distance = side * abs(middle) * 2.0**-60
        rounded = _evaluate_correctly_rounded(
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
    np.testing.assert_array_equal(_evaluate_correctly_rounded(arguments, np.log, flint.arb.log), np.array(wanted))


# Bits of the significand, and the exponent of the least subnormal number: IEEE 754-2019, table 3.5.
FORMATS = {"float64": (53, -1074), "float32": (24, -149), "float16": (11, -24), "bfloat16": (8, -133)}


def nearest(number: float, dtype: str) -> Fraction:
    """The closest number of a format without an end to its exponents; in the middle, the even one."""
    bits, least = FORMATS[dtype]
    unit = Fraction(2) ** max(math.frexp(number)[1] - bits, least)
    return round(Fraction(number) / unit) * unit  # Python rounds a fraction in the middle to the even number


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
        rounded = float(round_to(np.array([number]), dtype)[0])
    wanted, (bits, least) = nearest(number, dtype), FORMATS[dtype]
    assert largest_number(dtype) == (2 - 2.0 ** (1 - bits)) * 2.0 ** (2 - least - bits)
    assert rounded == (float(wanted) if abs(wanted) <= largest_number(dtype) else np.copysign(np.inf, number))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_the_sign_of_zero_and_numbers_of_other_dtypes_are_kept(dtype: str) -> None:
    rounded = round_to(np.array([np.inf, -np.inf, np.nan, -0.0, 3.0]), dtype).astype(np.float64)
    np.testing.assert_array_equal(rounded, [np.inf, -np.inf, np.nan, 0, 3])
    assert np.signbit(rounded[3])
    for source in (np.float32, np.int64, bool, np.float16, ml_dtypes.bfloat16):
        rounded = round_to(np.array([[0, 1], [1, 1]]).astype(source), dtype)
        assert rounded.dtype == numpy_dtype(dtype)
        assert rounded.astype(np.float64).tolist() == [[0, 1], [1, 1]]


Seen = Callable[[int, int, int], bool]
"""Whether an element of the batch lets the query at a position see a key."""
Pattern = tuple[Any, Seen, int | None]
"""A pattern as a file has it, its definition, and how many elements of the batch it has masks for, if one for each."""

SIDE = st.none() | st.integers(0, 4)


@st.composite
def _by_distance(draw: st.DrawFn) -> Pattern:
    """Draw a window, with tokens that are kept beside it, dilated, or with a prefix or chunks for each of the batch."""
    place = {"shape": [draw(st.integers(0, 9)), draw(st.integers(0, 9))], "offset": draw(st.integers(0, 5))}
    window = draw(st.lists(SIDE, min_size=2, max_size=2).filter(lambda pair: pair != [None, None]))
    left, right = (30 if side is None else side for side in window)
    step = draw(st.integers(1, 5))
    given_once = draw(st.integers(0, 9))
    each = draw(st.none() | st.lists(st.integers(0, 9), min_size=1, max_size=3))
    begins, batch = each or [given_once], each and len(each)
    by_batch: Any = each or given_once
    patterns: list[Pattern] = [
        (kinds.SlidingWindow(sliding_window=window, **place), lambda _, i, j: i - left <= j <= i + right, None),
        (
            kinds.FirstTokens(first_tokens=given_once, left=left, **place),
            lambda _, i, j: j <= i and (j < given_once or i - j <= left),
            None,
        ),
        (
            kinds.Dilated(dilated=step, window=window, **place),
            lambda _, i, j: any(j == i + times * step for times in range(-left, right + 1)),
            None,
        ),
        (kinds.PrefixLM(prefix_lm=by_batch, **place), lambda b, i, j: j <= i or j < begins[b], batch),
        (
            kinds.Chunked(chunked=step, left_padding=by_batch, **place),
            lambda b, i, j: j <= i and (i - begins[b]) // step == (j - begins[b]) // step,
            batch,
        ),
        (kinds.Chunked(chunked=step, **place), lambda _, i, j: j <= i and i // step == j // step, None),
    ]
    return draw(st.sampled_from(patterns))


@st.composite
def _by_numbers(draw: st.DrawFn) -> Pattern:
    """Draw segments or images in text, by a number for each key or by where runs of one number begin and end."""
    keys = draw(st.integers(1, 9))
    offset = draw(st.integers(0, keys))
    place = {"shape": [draw(st.integers(0, keys - offset)), keys], "offset": offset}
    rows = draw(st.lists(st.lists(st.integers(0, 3), min_size=keys, max_size=keys), min_size=1, max_size=3))
    once = draw(st.booleans())
    runs = [[(number, len(list(run))) for number, run in groupby(row)] for row in rows]
    run_of = [[place for place, (_, length) in enumerate(row) for _ in range(length)] for row in runs]
    lengths = [[0, *(length for _, length in row)] for row in runs]
    ends = [np.cumsum(row).tolist() for row in lengths]
    spans = [
        [[begin, end] for begin, end, (number, _) in zip(ends[entry], ends[entry][1:], row, strict=False) if number]
        for entry, row in enumerate(runs)
    ]

    def given(values: list[Any]) -> Any:
        return values[0] if once else values

    patterns: list[tuple[Any, Seen]] = [
        (kinds.Segments(segments=given(rows), **place), lambda b, i, j: rows[b][i] == rows[b][j]),
        (kinds.DocumentLengths(document_lengths=given(lengths), **place), lambda b, i, j: run_of[b][i] == run_of[b][j]),
        (kinds.Images(images=given(rows), **place), lambda b, i, j: j <= i or rows[b][i] == rows[b][j] > 0),
    ]
    if all(spans):
        patterns.append(
            (
                kinds.ImageSpans(image_spans=given(spans), **place),
                lambda b, i, j: j <= i or (rows[b][j] > 0 and run_of[b][i] == run_of[b][j]),
            )
        )
    return *draw(st.sampled_from(patterns)), None if once else len(rows)


@settings(max_examples=300)
@given(pattern=_by_distance() | _by_numbers())
def test_a_mask_is_what_its_definition_says_of_each_query_and_key(pattern: Pattern) -> None:
    source, seen, batch = pattern
    made = make_mask(source)
    assert made.dtype == bool
    assert made.shape == mask_shape(source)
    wanted = np.zeros((batch or 1, 1, *source.shape), bool)
    for entry, _, query, key in np.ndindex(wanted.shape):
        wanted[entry, 0, query, key] = seen(entry, source.offset + query, key)
    np.testing.assert_array_equal(made, wanted[0, 0] if batch is None else wanted)


@st.composite
def _trees(draw: st.DrawFn) -> list[list[int | None]]:
    nodes = draw(st.integers(1, 8))
    parents = [st.none() if node == 0 else st.none() | st.integers(0, node - 1) for node in range(nodes)]
    return draw(st.lists(st.tuples(*parents).map(list), min_size=1, max_size=3))


@given(trees=_trees(), once=st.booleans(), committed=st.integers(0, 4))
def test_a_drafted_token_sees_what_is_committed_and_its_ancestors(
    trees: list[list[int | None]], once: bool, committed: int
) -> None:
    nodes = len(trees[0])
    wanted = np.zeros((len(trees), 1, nodes, committed + nodes), bool)
    wanted[..., :committed] = True
    for (entry, tree), query in product(enumerate(trees), range(nodes)):
        node: int | None = query
        while node is not None:
            wanted[entry, 0, query, committed + node] = True
            node = tree[node]
    source = kinds.Tree(tree=trees[0] if once else trees, committed=committed)
    made = make_mask(source)
    assert made.shape == mask_shape(source)
    np.testing.assert_array_equal(made, wanted[0, 0] if once else wanted)


@given(heads=st.integers(1, 12), shape=st.tuples(st.integers(0, 6), st.integers(0, 8)), offset=st.integers(0, 5))
def test_alibi_is_minus_the_slope_times_the_distance(heads: int, shape: tuple[int, int], offset: int) -> None:
    source = Alibi(alibi=heads, shape=list(shape), offset=offset)
    made = make_alibi_bias(source)
    assert made.shape == alibi_shape(source) == (heads, *shape)
    assert not np.signbit(made[made == 0]).any()
    distance = np.abs(offset + np.arange(shape[0])[:, np.newaxis] - np.arange(shape[1]))
    np.testing.assert_array_equal(made, -np.array(alibi_slopes(heads))[:, np.newaxis, np.newaxis] * distance)


def _bucket(distance: int, buckets: int, max_distance: int, bidirectional: bool) -> int:
    """T5's bucket of one distance j - p, with a logarithm of 200 bits."""
    first, back = 0, max(-distance, 0)
    if bidirectional:
        buckets //= 2
        first, back = (buckets if distance > 0 else 0), abs(distance)
    exact = buckets // 2
    if back < exact:
        return first + back
    with mpmath.workprec(200):
        step = mpmath.log(mpmath.mpf(back) / exact) / mpmath.log(mpmath.mpf(max_distance) / exact) * (buckets - exact)
        return first + min(exact + int(mpmath.floor(step + mpmath.mpf(2) ** -150)), buckets - 1)


@given(
    half=st.integers(2, 20),
    beyond=st.integers(1, 200),
    bidirectional=st.booleans(),
    distances=st.lists(st.integers(-300, 300), min_size=1, max_size=30),
)
def test_buckets_follow_the_rule(half: int, beyond: int, bidirectional: bool, distances: list[int]) -> None:
    buckets = 2 * half
    max_distance = (half if not bidirectional else half // 2) + beyond
    found = find_relative_buckets(np.array(distances), buckets, max_distance, bidirectional=bidirectional)
    assert found.tolist() == [_bucket(each, buckets, max_distance, bidirectional) for each in distances]
