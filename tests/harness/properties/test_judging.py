"""Two results are bitwise the same, within the bounds of both, or broken: decided on arrays made by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.properties.judging import Side, judge_arrays
from attncheck.verdicts import PropertyOutcome

pytestmark = pytest.mark.usefixtures("forked_workers")

Real = NDArray[np.float64]


ONE, TWO = np.ones(1), np.full(1, 2.0)
NO, YES = np.zeros(1, bool), np.ones(1, bool)
NAN = np.full(1, np.nan)
ALLOWED = 1e-6


def sides(first: Real, second: Real, exact: Real, is_open: tuple[Any, Any]) -> Callable[[], tuple[Side, Side]]:
    """Return both sides, of which an error beyond the bound is wrong where there is an exact answer."""

    def made(what: str, given: Real, own: Any) -> Side:
        wrong = ~(np.abs(given - exact) <= ALLOWED) & ~own
        return Side(what, given, exact, np.full(given.shape, ALLOWED), wrong, own)

    return lambda: (made("the first call", first, is_open[0]), made("the further", second, is_open[1]))


def refused() -> tuple[Side, Side]:
    raise AssertionError("where every bit is the same nothing else is asked")


PAIRS: tuple[tuple[Real, Real, Real, tuple[Any, Any], str], ...] = (
    (np.zeros(1), -np.zeros(1), np.zeros(1), (NO, NO), "within bounds"),  # the sign of zero is a bit
    (ONE + 4e-7, ONE - 3e-7, ONE, (NO, NO), "within bounds"),
    (ONE, ONE + 0.1, ONE, (NO, NO), "broken"),
    (ONE + 0.1, ONE, ONE, (NO, NO), "broken"),
    (ONE, NAN, ONE, (NO, NO), "broken"),
    (ONE, ONE * np.inf, ONE, (NO, NO), "broken"),
    (NAN, ONE, ONE, (YES, YES), "broken"),  # also without an exact answer
    (ONE, NAN, ONE, (YES, YES), "broken"),
    (ONE, ONE + 1e-9, ONE, (YES, NO), "not judged"),
    (ONE, TWO, ONE, (YES, YES), "not judged"),
)


def test_what_two_results_come_to() -> None:
    for first, second, exact, is_open, outcome in PAIRS:
        found = judge_arrays("output", first, second, "again", sides(first, second, exact, is_open))
        assert found.verdict == outcome


def test_calls_without_one_exact_answer_are_not_held_against_each_other() -> None:
    def apart() -> tuple[Side, Side]:
        (one, _), (_, other) = sides(ONE, TWO, ONE, (NO, NO))(), sides(ONE, TWO, TWO, (NO, NO))()
        return one, other

    assert judge_arrays("output", ONE, TWO, "again", apart).verdict is PropertyOutcome.NOT_JUDGED


def test_equal_bits_need_no_exact_answer_and_another_form_is_broken() -> None:
    array = np.array([1.0, -0.0, np.nan])
    found = judge_arrays("output", array, array.copy(), "again", refused)
    assert (found.verdict, found.differing, found.elements) == (PropertyOutcome.BITWISE, 0, 3)
    found = judge_arrays("output", array, array[::-1].copy(), "again", refused, np.array([False, True, False]))
    assert (found.verdict, found.elements) == (PropertyOutcome.BITWISE, 1)  # nothing is said of the rest
    for second in (np.ones((3, 2)), np.ones((2, 3), np.float32)):
        assert judge_arrays("output", np.ones((2, 3)), second, "again", refused).verdict is PropertyOutcome.BROKEN


def test_the_element_is_named_with_its_numbers_and_whoever_is_wrong() -> None:
    exact, no = np.ones(2), np.zeros(2, bool)
    first, second = np.array([1.0, 1 + 4e-7]), np.array([1.0, 1 - 3e-7])
    found = judge_arrays("output", first, second, "again", sides(first, second, exact, (no, no)))
    assert (found.index, found.value, found.reference, found.exact) == ("1", first[1], second[1], 1.0)
    assert (found.first_bound, found.second_bound, found.differing) == (ALLOWED, ALLOWED, 1)
    for pair, blamed in (((exact, exact + 0.1), "the further"), ((exact + 0.1, exact), "the first call")):
        found = judge_arrays("output", *pair, "again", sides(*pair, exact, (no, no)))
        assert found.message.endswith(f"beyond its bound is {blamed}")
