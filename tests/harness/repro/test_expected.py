"""What a script holds stages against: it proves wrong what the judge proves wrong, place by place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.judging.judge_stages import failing_elements
from attncheck.judging.truth import Truth, truth_of_case
from attncheck.oracle.sampling import rows_of_stage
from attncheck.reading.case import Case
from attncheck.reading.dtypes import numpy_dtype
from attncheck.reading.inputs import convert_inputs, make_exact_inputs
from attncheck.repro.expected import expected_of
from attncheck.repro.parts import judge, wrong_elements

ATTENTION = """
inputs:
  query: {draw: randn, shape: [1, 2, 9, 4]}
  key: {draw: randn, shape: [1, 2, 8, 4]}
  value: {draw: randn, shape: [1, 2, 8, 4]}
"""
CAUSAL = f"options: {{is_causal: true}}\n{ATTENTION}"
EMPTY_ROWS = """
options: {empty_rows: CONVENTION}
inputs:
  query: {draw: randn, shape: [1, 1, 2, 4]}
  key: {draw: randn, shape: [1, 1, 3, 4]}
  value: {draw: randn, shape: [1, 1, 3, 4]}
  mask: {values: [[0, 0, 0], [1, 0, 1]]}
"""
NAN = """
allow_nonfinite: true
inputs:
  query: {values: [[.nan, 1], [1, 2]]}
  key: {values: [[1, 2], [3, 4], [5, 6]]}
  value: {values: [[1, 2], [3, 4], [5, 6]]}
  mask: {values: [[1, 0, 1], [1, 1, 1]]}
"""
LARGE = """
inputs:
  query: {values: [[60000, 60000]]}
  key: {values: [[60000, 60000], [1, 0]]}
  value: {values: [[1, 2], [3, 4]]}
"""
MANY_ROWS = """
inputs:
  query: {draw: randn, shape: [1, 1, 4100, 2]}
  key: {draw: randn, shape: [1, 1, 65, 2]}
  value: {draw: randn, shape: [1, 1, 65, 3]}
"""


def class_of(dtype: str) -> str:
    return "native" if dtype in ("float64", "float32") else "eager"


def truth_of(case: Case, dtype: str) -> Truth:
    return truth_of_case(case, dtype, convert_inputs(case, make_exact_inputs(case), dtype))


def spoiled(truth: Truth, stage: str, shape: tuple[int, ...], random: np.random.Generator) -> NDArray[Any]:
    """Return a stage whose errors are about as large as the bounds, some of them NaN and infinite."""
    exact, max_error = truth.exact[stage].high, truth.bounds(class_of(truth.dtype))[stage].max_error
    with np.errstate(all="ignore"):
        near = exact + max_error * random.uniform(-1.5, 1.5, exact.shape)
        near[random.uniform(size=exact.shape) < 0.3] = 0
        near = np.where(random.uniform(size=exact.shape) < 0.3, exact, near)
        odd = random.choice([np.nan, np.inf, -np.inf], exact.shape)
        kept = np.where(random.uniform(size=exact.shape) < 0.1, odd, near)
        if truth.query_rows is None or kept.shape == shape:
            return kept.astype(numpy_dtype(truth.dtype))
        whole = np.zeros(shape)
        whole[..., truth.query_rows, :] = kept
        return whole.astype(numpy_dtype(truth.dtype))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "fields",
    [
        ATTENTION,
        CAUSAL,
        NAN,
        LARGE,
        MANY_ROWS,
        *(EMPTY_ROWS.replace("CONVENTION", convention) for convention in ("zero", "uniform", "nan")),
    ],
    ids=["plain", "causal", "nan", "large", "many rows", "zero", "uniform", "nan rows"],
)
def test_the_script_finds_wrong_what_the_judge_finds_wrong(
    one_case: Callable[..., Case], fields: str, dtype: str
) -> None:
    case = one_case("attention", f"dtypes: [{dtype}]\n{fields}")
    truth = truth_of(case, dtype)
    random = np.random.default_rng(7)
    found = 0
    for stage in ("scores", "masked", "weights", "output"):
        if stage not in truth.exact:
            continue
        shape = case.stage_shapes[stage]
        expected = expected_of(truth, stage, shape, class_of(dtype))
        for _ in range(5):
            computed = spoiled(truth, stage, shape, random)
            kept = rows_of_stage(stage, computed, truth.query_rows)
            by_judge = failing_elements(truth, stage, kept, class_of(dtype))
            by_script, _, _ = wrong_elements(kept.astype(np.float64), expected)
            np.testing.assert_array_equal(by_script, by_judge)
            is_right, told = judge(computed, expected, dtype)
            assert is_right == (not by_judge.any()), told
            found += int(by_judge.sum())
    assert found or dtype == "float16", "something has to be wrong for this to say anything"


def test_what_is_open_is_right_whatever_it_is(one_case: Callable[..., Case]) -> None:
    # Where a mask forbids the key of a query that holds NaN, selection gives -inf and addition NaN.
    case = one_case("attention", NAN)
    expected = expected_of(truth_of(case, "float32"), "masked", case.stage_shapes["masked"], "native")
    assert expected.exact is not None
    for anything in (np.nan, -np.inf, 3):
        computed = expected.exact.astype(np.float32)
        computed[0, 0, 0, 1] = anything
        assert judge(computed, expected, "float32")[0]
    computed[0, 0, 0, 0] = 3  # NaN is right there, and nothing else
    is_right, told = judge(computed, expected, "float32")
    assert not is_right
    assert "is WRONG at 1 of 6 elements; 1 of 6 numbers have no exact answer\n" in told
    assert "most at [0, 0, 0, 0]: computed 3, exact nan, off by inf" in told
