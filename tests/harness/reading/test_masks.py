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
from numpy.typing import NDArray
from tables import tables_beside

from attncheck.dtypes import largest_number, numpy_dtype, rounded_once
from attncheck.reading import array_kinds as kinds
from attncheck.reading.array_kinds import Alibi
from attncheck.reading.case import Case
from attncheck.reading.generated_arrays import (
    alibi_shape,
    alibi_slopes,
    make_alibi,
    make_mask,
    mask_shape,
    relative_buckets,
)
from attncheck.reading.inputs import convert_inputs, make_exact_inputs
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

TABLES = tables_beside(__file__)


def test_the_twister_gives_the_word_that_the_cpp_standard_fixes() -> None:
    # ISO C++ [rand.predef]: the 10000th word of std::mt19937, whose default seed is 5489, is 4123659995.
    words = words_from_state(np.random.RandomState(5489).get_state(legacy=False)["state"]["key"])
    first = words(4000)
    assert first[0] == 3499211612
    assert words(6000)[-1] == 4123659995


@pytest.mark.parametrize(("seed", "printed"), TABLES["r_prints"])
def test_r_draws_what_r_prints_after_set_seed(seed: int, printed: list[float]) -> None:
    drawn = R(seed).runif((len(printed),), 0, 1)
    np.testing.assert_allclose(drawn, printed, rtol=0, atol=0.5e-7)


@pytest.mark.parametrize(("distribution", "seed", "printed"), TABLES["numpy_prints"])
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


Load = Callable[[str | bytes], list[Case]]
Seen = Callable[[int, int, int], bool]
"""Whether an element of the batch lets the query at a position see a key."""

LENGTH = st.integers(0, 9)
OFFSET = st.integers(0, 5)
SIDE = st.none() | st.integers(0, 4)


Pattern = tuple[Any, Seen, int | None]
"""A pattern as a file has it, its definition, and how many elements of the batch it has masks for, if one for each."""


@st.composite
def _shapes(draw: st.DrawFn) -> dict[str, Any]:
    return {"shape": [draw(LENGTH), draw(LENGTH)], "offset": draw(OFFSET)}


@st.composite
def _windows(draw: st.DrawFn) -> Pattern:
    left, right = window = draw(st.lists(SIDE, min_size=2, max_size=2))
    source = kinds.SlidingWindow(sliding_window=window, **draw(_shapes()))
    return (
        source,
        lambda _, i, j: (left is None or j >= i - left) and (right is None or j <= i + right),
        None,
    )


@st.composite
def _prefixes(draw: st.DrawFn) -> Pattern:
    prefix = draw(st.integers(0, 9) | st.lists(st.integers(0, 9), min_size=1, max_size=3))
    lengths = prefix if isinstance(prefix, list) else [prefix]
    source = kinds.PrefixLM(prefix_lm=prefix, **draw(_shapes()))
    return source, lambda b, i, j: j <= i or j < lengths[b], len(lengths) if isinstance(prefix, list) else None


@st.composite
def _numbers_of_keys(draw: st.DrawFn) -> tuple[list[list[int]], bool, int, int]:
    """Numbers of keys for each of the batch, whether they are given once for all, the number of queries, the offset."""
    keys = draw(st.integers(1, 9))
    offset = draw(st.integers(0, keys))
    rows = draw(st.lists(st.lists(st.integers(0, 3), min_size=keys, max_size=keys), min_size=1, max_size=3))
    return rows, draw(st.booleans()), draw(st.integers(0, keys - offset)), offset


@st.composite
def _numbered(draw: st.DrawFn) -> Pattern:
    """Draw segments, or images in text."""
    rows, once, queries, offset = draw(_numbers_of_keys())
    numbers, place = rows[0] if once else rows, {"shape": [queries, len(rows[0])], "offset": offset}
    count = None if once else len(rows)
    if draw(st.booleans()):
        return kinds.Segments(segments=numbers, **place), lambda b, i, j: rows[b][i] == rows[b][j], count
    source = kinds.Images(images=numbers, **place)
    return source, lambda b, i, j: j <= i or rows[b][i] == rows[b][j] > 0, count


@st.composite
def _chunks(draw: st.DrawFn) -> Pattern:
    chunk = draw(st.integers(1, 5))
    padding = draw(st.none() | st.integers(0, 6) | st.lists(st.integers(0, 6), min_size=1, max_size=3))
    begins = padding if isinstance(padding, list) else [padding or 0]
    source = kinds.Chunked(chunked=chunk, left_padding=padding, **draw(_shapes()))
    return (
        source,
        lambda b, i, j: j <= i and (i - begins[b]) // chunk == (j - begins[b]) // chunk,
        len(begins) if isinstance(padding, list) else None,
    )


@st.composite
def _kept(draw: st.DrawFn) -> Pattern:
    """Draw first tokens that are kept beside a window."""
    first, left = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    source = kinds.FirstTokens(first_tokens=first, left=left, **draw(_shapes()))
    return source, lambda _, i, j: j <= i and (j < first or i - j <= left), None


@st.composite
def _dilated(draw: st.DrawFn) -> Pattern:
    dilation, window = (
        draw(st.integers(1, 4)),
        draw(st.lists(SIDE, min_size=2, max_size=2).filter(lambda pair: pair != [None, None])),
    )
    left, right = (30 if side is None else side for side in window)
    source = kinds.Dilated(dilated=dilation, window=window, **draw(_shapes()))
    return source, lambda _, i, j: any(j == i + step * dilation for step in range(-left, right + 1)), None


@settings(max_examples=300)
@given(pattern=_windows() | _prefixes() | _numbered() | _chunks() | _kept() | _dilated())
def test_a_mask_is_what_its_definition_says_of_each_query_and_key(pattern: Pattern) -> None:
    source, seen, batch = pattern
    made = make_mask(source)
    assert made.dtype == bool
    assert made.shape == mask_shape(source)
    assert made.ndim == (2 if batch is None else 4)
    wanted = np.zeros((batch or 1, 1, *source.shape), bool)
    for entry, _, query, key in np.ndindex(wanted.shape):
        wanted[entry, 0, query, key] = seen(entry, source.offset + query, key)
    np.testing.assert_array_equal(made, wanted[0, 0] if batch is None else wanted)


@given(drawn=_numbers_of_keys())
def test_images_by_where_they_begin_and_end(drawn: tuple[list[list[int]], bool, int, int]) -> None:
    rows, once, queries, offset = drawn
    spans, alike = [], []
    for row in rows:
        runs = [(number, len(list(run))) for number, run in groupby(row)]
        ends = np.cumsum([length for _, length in runs]).tolist()
        spans.append([[end - length, end] for (number, length), end in zip(runs, ends, strict=True) if number])
        alike.append([place + 1 if number else 0 for place, (number, length) in enumerate(runs) for _ in range(length)])
    if not all(spans):
        return
    shape = [queries, len(rows[0])]
    source = kinds.ImageSpans(image_spans=spans[0] if once else spans, shape=shape, offset=offset)
    same = kinds.Images(images=alike[0] if once else alike, shape=shape, offset=offset)
    np.testing.assert_array_equal(make_mask(source), make_mask(same))


@given(
    lengths=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any), min_size=1, max_size=3),
    once=st.booleans(),
)
def test_documents_by_their_lengths(lengths: list[list[int]], once: bool) -> None:
    keys = max(map(sum, lengths))
    filled = [[*row, keys - sum(row)] for row in lengths]
    numbers = [[number for number, length in enumerate(row) for _ in range(length)] for row in filled]
    source = kinds.DocumentLengths(document_lengths=filled[0] if once else filled, shape=[keys, keys])
    same = kinds.Segments(segments=numbers[0] if once else numbers, shape=[keys, keys])
    np.testing.assert_array_equal(make_mask(source), make_mask(same))


@st.composite
def _trees(draw: st.DrawFn) -> list[list[int | None]]:
    nodes = draw(st.integers(1, 8))
    parents = [st.none() if node == 0 else st.none() | st.integers(0, node - 1) for node in range(nodes)]
    return draw(st.lists(st.tuples(*parents).map(list), min_size=1, max_size=3))


@given(trees=_trees(), once=st.booleans(), committed=st.integers(0, 4))
def test_a_tree_of_drafted_tokens(trees: list[list[int | None]], once: bool, committed: int) -> None:
    nodes = len(trees[0])

    def sees(tree: list[int | None], query: int, key: int) -> bool:
        node: int | None = query
        while node is not None:
            if node == key:
                return True
            node = tree[node]
        return False

    wanted = np.ones((len(trees), 1, nodes, committed + nodes), bool)
    for entry, tree in enumerate(trees):
        for query in range(nodes):
            for key in range(nodes):
                wanted[entry, 0, query, committed + key] = sees(tree, query, key)
    source = kinds.Tree(tree=trees[0] if once else trees, committed=committed)
    made = make_mask(source)
    assert made.shape == mask_shape(source)
    np.testing.assert_array_equal(made, wanted[0, 0] if once else wanted)


SOFTMAX = """\
title: Masks of every kind
source: {kind: derivation, title: Made for this test}
operation: masking
defaults: {random: {generator: numpy-legacy, seed: 3}}
cases:
  - name: The case at hand
"""


def _mask(load_text: Load, mask: str, queries: int = 4, keys: int = 6, name: str = "mask") -> NDArray[Any]:
    inputs = f"inputs: {{scores: {{constant: 0, shape: [2, 3, {queries}, {keys}]}}, {name}: {mask}}}"
    [case] = load_text(f"{SOFTMAX}    {inputs}\n")
    made = make_exact_inputs(case)[name]
    assert made.array.shape == case.input_shapes[name]
    assert not made.radius.any()
    return made.array


@settings(max_examples=25)
@given(
    table=st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=2, max_size=2),
    block=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    cut=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_a_table_of_blocks(
    load_text: Load, table: list[list[bool]], block: tuple[int, int], cut: tuple[int, int]
) -> None:
    queries, keys = 2 * block[0] - min(cut[0], block[0] - 1), 3 * block[1] - min(cut[1], block[1] - 1)
    given_table = str([[int(each) for each in row] for row in table])
    made = _mask(
        load_text,
        f"{{blocks: {{values: {given_table}}}, block_size: [{block[0]}, {block[1]}], shape: [{queries}, {keys}]}}",
        queries,
        keys,
    )
    for query in range(queries):
        for key in range(keys):
            assert made[0, 0, query, key] == table[query // block[0]][key // block[1]]


WINDOW = "{sliding_window: [1, 0], shape: [4, 6], offset: 2}"
DOCUMENTS = "{segments: [[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]], shape: [4, 6], offset: 2}"


def test_masks_are_put_together(load_text: Load) -> None:
    window, documents = _mask(load_text, WINDOW), _mask(load_text, DOCUMENTS)
    np.testing.assert_array_equal(_mask(load_text, f"{{any_of: [{WINDOW}, {DOCUMENTS}]}}"), (window + documents) > 0)
    np.testing.assert_array_equal(_mask(load_text, f"{{all_of: [{WINDOW}, {DOCUMENTS}]}}"), window * documents)
    bias = _mask(load_text, f"{{as_bias: {{all_of: [{WINDOW}, {DOCUMENTS}]}}}}", name="bias")
    np.testing.assert_array_equal(bias, np.where(window * documents, 0, -np.inf))


def test_every_kind_of_mask_is_known_as_one() -> None:
    assert {kinds.KINDS[kind] for kind in kinds.MASK_KINDS} >= set(kinds.MASK_PATTERNS)


@given(heads=st.sampled_from([12, 16, 40, 112]))
def test_every_slope_is_the_float64_next_to_it(heads: int) -> None:
    with mpmath.workprec(200):
        below = 2 ** math.floor(math.log2(heads))
        exponents = [mpmath.mpf(-8 * (head + 1)) / below for head in range(below)]
        exponents += [mpmath.mpf(-8 * (2 * head + 1)) / (2 * below) for head in range(heads - below)]
        assert alibi_slopes(heads) == [float(mpmath.mpf(2) ** exponent) for exponent in exponents]


@given(heads=st.integers(1, 12), shape=st.tuples(st.integers(0, 6), st.integers(0, 8)), offset=st.integers(0, 5))
def test_alibi_is_minus_the_slope_times_the_distance(heads: int, shape: tuple[int, int], offset: int) -> None:
    source = Alibi(alibi=heads, shape=list(shape), offset=offset)
    made = make_alibi(source)
    assert made.shape == alibi_shape(source) == (heads, *shape)
    assert not np.signbit(made[made == 0]).any()
    slopes = alibi_slopes(heads)
    for head in range(heads):
        for query in range(shape[0]):
            for key in range(shape[1]):
                assert made[head, query, key] == -slopes[head] * abs(offset + query - key)


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
    found = relative_buckets(np.array(distances), buckets, max_distance, bidirectional=bidirectional)
    assert found.tolist() == [_bucket(each, buckets, max_distance, bidirectional) for each in distances]


HEAD = """\
title: Biases from positions
source: {kind: derivation, title: Made for this test}
operation: attention
defaults: {random: {generator: numpy-legacy, seed: 3}, dtypes: [float64, bfloat16]}
cases:
  - name: The case at hand
    inputs: {query: {draw: randn, shape: [2, 3, 4, 5]}, key: {draw: randn, shape: [2, 3, 6, 5]}, value: \
{draw: randn, shape: [2, 3, 6, 5]}, bias: BIAS}
"""


def _bias(load_text: Load, bias: str, dtype: str = "float64", heads: int = 3) -> NDArray[np.float64]:
    [case] = load_text(HEAD.replace("[2, 3,", f"[2, {heads},").replace("BIAS", bias))
    inputs = convert_inputs(case, make_exact_inputs(case), dtype)
    return inputs.arrays["bias"].astype(np.float64)


def test_a_bias_of_buckets_is_looked_up_in_the_table(load_text: Load) -> None:
    table = "{ascending: [0, 1], shape: [8, 3]}"
    source = f"{{relative_buckets: {table}, max_distance: 6, bidirectional: true, shape: [4, 6], offset: 2}}"
    made = _bias(load_text, source)
    assert made.shape == (1, 3, 4, 6)
    for head in range(3):
        for query in range(4):
            for key in range(6):
                assert made[0, head, query, key] == 3 * _bucket(key - 2 - query, 8, 6, True) + head


def test_a_bias_is_rounded_once_to_the_dtype(load_text: Load) -> None:
    source = "{alibi: 12, shape: [4, 6], offset: 2}"
    exact, narrow = (_bias(load_text, source, dtype, 12) for dtype in ("float64", "bfloat16"))
    assert exact[0, 8, 0, 0] == -2 * 2**-0.5
    assert (narrow[0, :8] == exact[0, :8]).all()
    assert (narrow[0, 8:] != exact[0, 8:]).any()
    np.testing.assert_allclose(narrow, exact, rtol=2.0**-8)
