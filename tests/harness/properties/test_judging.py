"""Two results are bitwise the same, within the bounds of both, or broken: decided on arrays made by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.properties.judging import Side, judge_arrays
from attncheck.verdicts import PropertyOutcome

pytestmark = pytest.mark.usefixtures("forked_workers")

Real = NDArray[np.float64]


def sides(
    first: Real, second: Real, exact: Real | None = None, allowed: float = 1e-6
) -> Callable[[], tuple[Side, Side]]:
    """Return both sides, of which an error beyond the bound is wrong."""
    true = np.ones(first.shape) if exact is None else exact

    def made() -> tuple[Side, Side]:
        bounds, no = np.full(first.shape, allowed), np.zeros(first.shape, bool)
        found = [
            Side(what, each, true, bounds, ~(np.abs(each - true) <= bounds), no)
            for what, each in (("the first call", first), ("the further", second))
        ]
        return found[0], found[1]

    return made


def refused() -> tuple[Side, Side]:
    raise AssertionError("where every bit is the same nothing else is asked")


def test_equal_bits_need_no_exact_answer() -> None:
    array = np.array([1.0, -0.0, np.nan])
    found = judge_arrays("output", array, array.copy(), "again", refused)
    assert (found.outcome, found.differing, found.elements) == (PropertyOutcome.BITWISE, 0, 3)


def test_the_sign_of_zero_is_a_bit() -> None:
    first, second = np.array([0.0]), np.array([-0.0])
    found = judge_arrays("output", first, second, "again", sides(first, second, np.zeros(1)))
    assert found.outcome is PropertyOutcome.WITHIN_BOUNDS


def test_errors_within_both_bounds_are_within_bounds_and_named_with_their_numbers() -> None:
    first, second = np.array([1.0, 1 + 4e-7]), np.array([1.0, 1 - 3e-7])
    found = judge_arrays("output", first, second, "again", sides(first, second))
    assert found.outcome is PropertyOutcome.WITHIN_BOUNDS
    assert (found.index, found.first, found.second, found.exact) == ((1,), first[1], second[1], 1.0)
    assert (found.first_bound, found.second_bound, found.differing) == (1e-6, 1e-6, 1)


@pytest.mark.parametrize("wrong", [1.1, np.nan, np.inf])
def test_an_error_beyond_the_bound_of_either_is_broken_and_blamed(wrong: float) -> None:
    good, bad = np.array([1.0, 1.0]), np.array([1.0, wrong])
    for first, second, blamed in ((good, bad, "the further"), (bad, good, "the first call")):
        found = judge_arrays("output", first, second, "again", sides(first, second))
        assert found.outcome is PropertyOutcome.BROKEN
        assert found.index == (1,)
        assert found.message.endswith(f"beyond its bound is {blamed}")


def test_nothing_is_said_of_what_is_not_compared() -> None:
    first, second = np.array([1.0, 1.0]), np.array([1.0, np.nan])
    found = judge_arrays("output", first, second, "again", refused, np.array([True, False]))
    assert (found.outcome, found.elements) == (PropertyOutcome.BITWISE, 1)


def test_another_shape_or_dtype_is_broken() -> None:
    first = np.ones((2, 3))
    for second in (np.ones((3, 2)), np.ones((2, 3), np.float32)):
        assert judge_arrays("output", first, second, "again", refused).outcome is PropertyOutcome.BROKEN


def test_calls_without_one_exact_answer_are_not_held_against_each_other() -> None:
    first, second = np.ones(1), np.full(1, 2.0)

    def other() -> tuple[Side, Side]:
        one, two = sides(first, second)()
        return one, Side(two.what, two.given, second, two.allowed, two.is_open, two.is_open)

    assert judge_arrays("output", first, second, "again", other).outcome is PropertyOutcome.NOT_JUDGED


@pytest.mark.parametrize("swapped", [False, True])
def test_nan_of_one_call_and_a_number_of_the_other_is_broken_also_without_an_exact_answer(swapped: bool) -> None:
    pair = [np.full(1, np.nan), np.ones(1)]
    first, second = reversed(pair) if swapped else pair

    def open_() -> tuple[Side, Side]:
        one, two = sides(first, second)()
        yes = np.ones(1, bool)
        return replace(one, wrong=~yes, is_open=yes), replace(two, wrong=~yes, is_open=yes)

    assert judge_arrays("output", first, second, "again", open_).outcome is PropertyOutcome.BROKEN


def test_elements_without_an_exact_answer_are_not_judged() -> None:
    first, second = np.ones(1), np.full(1, 1 + 1e-9)

    def open_() -> tuple[Side, Side]:
        one, two = sides(first, second)()
        yes = np.ones(1, bool)
        return Side(one.what, one.given, one.exact, one.allowed, ~yes, yes), two

    assert judge_arrays("output", first, second, "again", open_).outcome is PropertyOutcome.NOT_JUDGED
