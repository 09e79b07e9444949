"""Condition numbers: known for a single rounding, for cancellation, and for what is exact."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from attncheck.execution.limits import Limits
from attncheck.explain import explain_case, find_implementation
from attncheck.judging.conditioning import Conditioning, condition_numbers
from attncheck.reading.case import Case
from attncheck.reports.explanation import explanation_text
from attncheck.searching.concrete import ConcreteCase, read_concrete


def case_of(query: list[float], key: list[float], folder: Path) -> Case:
    inputs = {name: np.array([[[each]]]) for name, each in (("query", query), ("key", key), ("value", [1.0, 2.0]))}
    return read_concrete(ConcreteCase("attention", {"scale": 1.0}, inputs, "float32"), folder, "search/condition")


def test_they_are_the_bound_in_units_of_rounding_the_number() -> None:
    numbers = condition_numbers(np.array([2.0, -2.0, 0.0, 0.0]), np.array([0.5, 0.5, 0.0, 0.5]), 0.25)
    assert_array_equal(numbers, [1.0, 1.0, 0.0, math.inf])
    assert Conditioning(1.0, 1.0, 0, 1, 0.25).of(4.0, -2.0) == 8.0


def test_a_product_of_one_term_is_well_conditioned(tmp_path: Path) -> None:
    found = explain_case(case_of([3.1], [0.7], tmp_path), find_implementation("numpy"), "float32", Limits())
    scores = found.conditioning["raw_scores"]
    assert (scores.elements, scores.ill) == (1, 0)
    assert 1 <= scores.largest < 4
    assert "(1 ill)" not in explanation_text(found, {})


@pytest.mark.parametrize(("apart", "is_ill"), [(2.0**-12, True), (2048.0, False)])
def test_terms_that_cancel_are_ill_conditioned_where_the_rest_is_less_than_their_rounding(
    apart: float, is_ill: bool, tmp_path: Path
) -> None:
    one, other = float(np.float32(4095.7)), float(np.float32(4095.3))
    found = explain_case(
        case_of([one, one], [other, apart - other], tmp_path), find_implementation("numpy"), "float32", Limits()
    )
    scores, value = found.conditioning["raw_scores"], one * apart
    assert scores.largest * scores.unit_roundoff * value >= 2.0**-24 * one * other  # one product, rounded once
    assert bool(scores.ill) == is_ill
    assert ("raw_scores 1 of 1" in explanation_text(found, {})) == is_ill
