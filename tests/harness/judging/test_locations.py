"""Where wrong elements are is said where it is a range of some axis, and always truly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from attncheck.judging.judge_stages import where_wrong


def wrong(shape: tuple[int, ...], *places: tuple[int | slice, ...]) -> np.ndarray:
    flags = np.zeros(shape, dtype=bool)
    for place in places:
        flags[place] = True
    return flags


@pytest.mark.parametrize(
    ("stage", "flags", "says"),
    [
        ("output", wrong((2, 3, 19, 4), (..., slice(16, None), slice(None))), "query rows 16 to 18 of 19"),
        ("weights", wrong((1, 2, 5, 19), (..., slice(16, None))), "keys 16 to 18 of 19"),
        ("output", wrong((1, 3, 5, 4), (0, 2)), "head 2 of 3"),
        ("output", wrong((2, 3, 5, 4), (1, 2)), "batch entry 1 of 2, head 2 of 3"),
        ("grad_key", wrong((1, 1, 6, 4), (0, 0, slice(0, 3))), "keys 0 to 2 of 6"),
        ("output", wrong((2, 5, 8), (slice(None), slice(None), slice(4, 8))), "columns 4 to 7 of 8"),
        ("log_sum_exp", wrong((1, 2, 5), (0, slice(None), slice(3, 5))), "query rows 3 to 4 of 5"),
    ],
)
def test_a_range_is_said(stage: str, flags: np.ndarray, says: str) -> None:
    assert where_wrong(stage, flags) == f"all {flags.sum()} wrong elements are in {says} (counted from 0)"


def test_a_single_element_everything_and_no_range_are_not() -> None:
    assert where_wrong("output", wrong((2, 3, 5, 4), (0, 0, 0, 0))) == ""
    assert where_wrong("output", wrong((2, 3, 5, 4), (...,))) == ""
    assert where_wrong("output", wrong((1, 1, 5, 4), (..., [0, 2, 4], slice(None)))) == ""


@given(arrays(bool, st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.integers(1, 5))))
def test_what_is_said_names_no_axis_that_is_wrong_throughout(flags: np.ndarray) -> None:
    says = where_wrong("output", flags)
    for axis, word in enumerate(("batch entr", "head", "query row", "column")):
        others = tuple(other for other in range(4) if other != axis)
        assert not (word in says and flags.any(axis=others).all())
