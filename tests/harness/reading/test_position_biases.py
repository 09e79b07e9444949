"""ALiBi and T5's relative buckets, each against a plain loop written from the published definition."""

from __future__ import annotations

import math
from collections.abc import Callable

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from attncheck.errors import CaseError
from attncheck.reading.bias_kinds import Alibi
from attncheck.reading.case import Case
from attncheck.reading.inputs import convert_inputs, make_exact_inputs
from attncheck.reading.position_biases import alibi_shape, alibi_slopes, make_alibi, relative_buckets

Load = Callable[[str | bytes], list[Case]]


def _published_slopes(heads: int) -> list[float]:
    """The rule of the authors' code, as they say it: recursively, with Python's own powers."""

    def of_a_power_of_two(number: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(number) - 3)))
        return [start * start**head for head in range(number)]

    if math.log2(heads).is_integer():
        return of_a_power_of_two(heads)
    below = 2 ** math.floor(math.log2(heads))
    return of_a_power_of_two(below) + _published_slopes(2 * below)[0::2][: heads - below]


@given(heads=st.integers(1, 130))
def test_slopes_are_those_of_the_published_rule(heads: int) -> None:
    np.testing.assert_allclose(alibi_slopes(heads), _published_slopes(heads), rtol=1e-12)


def test_slopes_that_are_powers_of_two_are_exact() -> None:
    assert alibi_slopes(8) == [2.0**-power for power in range(1, 9)]
    assert alibi_slopes(1) == [2.0**-8]
    assert alibi_slopes(12)[:8] == alibi_slopes(8)
    assert alibi_slopes(12)[8:] == alibi_slopes(16)[:8:2]


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
def test_buckets_are_those_of_the_published_rule(
    half: int, beyond: int, bidirectional: bool, distances: list[int]
) -> None:
    buckets = 2 * half
    max_distance = (half if not bidirectional else half // 2) + beyond
    found = relative_buckets(np.array(distances), buckets, max_distance, bidirectional=bidirectional)
    assert found.tolist() == [_bucket(each, buckets, max_distance, bidirectional) for each in distances]


def test_the_buckets_of_t5() -> None:
    distances = np.array([0, -1, -15, -16, -18, -19, -127, -128, -5000, 1, 5000])
    assert relative_buckets(distances, 32, 128, bidirectional=False).tolist() == [
        0,
        1,
        15,
        16,
        16,
        17,
        31,
        31,
        31,
        0,
        0,
    ]
    distances = np.array([0, -7, -8, -11, -12, -15, -16, -63, -64, -90, -91, 1, 7, 8, 64, 128, 999])
    found = relative_buckets(distances, 32, 128, bidirectional=True).tolist()
    assert found == [0, 7, 8, 8, 9, 9, 10, 13, 14, 14, 15, 17, 23, 24, 30, 31, 31]


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


FAULTS = {
    "{alibi: 0, shape: [4, 6]}": ("inputs.bias.alibi", "greater than 0, got 0"),
    "{alibi: 4, shape: [4, 6]}": ("inputs.bias", "shape 1x4x4x6 does not broadcast to 2x3x4x6"),
    "{alibi: 3, shape: [4, 6], offset: -1}": ("inputs.bias.offset", "greater than or equal to 0, got -1"),
    "{alibi: 3, shape: [4, 6], offset: 2000000}": ("inputs.bias.alibi", "beyond the range of float16"),
    "{relative_buckets: {values: [1, 2]}, max_distance: 6, bidirectional: true, shape: [4, 6]}": (
        "inputs.bias.relative_buckets",
        "expected a table (buckets, H), got shape 2",
    ),
    "{relative_buckets: {constant: 1, shape: [7, 3]}, max_distance: 6, bidirectional: true, shape: [4, 6]}": (
        "inputs.bias.relative_buckets",
        "expected an even number of 4 to 512 rows, one for each bucket, got 7",
    ),
    "{relative_buckets: {constant: 1, shape: [8, 3]}, max_distance: 4, bidirectional: false, shape: [4, 6]}": (
        "inputs.bias.max_distance",
        "expected more than 4, as distances below that have a bucket of their own",
    ),
    "{relative_buckets: {constant: 1, shape: [8, 3]}, max_distance: 6, shape: [4, 6]}": (
        "inputs.bias.bidirectional",
        "this field is missing",
    ),
    "{relative_buckets: nothing, max_distance: 6, bidirectional: true, shape: [4, 6]}": (
        "inputs.bias.relative_buckets",
        "no array is named 'nothing'",
    ),
}


@pytest.mark.parametrize("bias", FAULTS)
def test_what_is_wrong_with_a_bias_is_said(load_text: Load, bias: str) -> None:
    with pytest.raises(CaseError) as error:
        load_text(HEAD.replace("BIAS", bias).replace("bfloat16]", "float16]"))
    [fault] = error.value.faults
    assert (fault.field, fault.line) == (FAULTS[bias][0], 7)
    assert FAULTS[bias][1] in fault.message
