"""Inputs are cut alike, whatever axes they have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.testing import assert_array_equal

from attncheck.errors import CaseError
from attncheck.reading.shapes import ShapeFault
from attncheck.searching.concrete import ConcreteCase, read_concrete
from attncheck.searching.problems import Draw
from attncheck.searching.slicing import cut, extent, letters_of, with_counts_that_fit, without_sequence
from attncheck.searching.source import ProblemSource
from attncheck.spec import DTYPES


def grouped() -> ConcreteCase:
    random = np.random.RandomState(1)
    inputs = {
        "query": random.randn(2, 4, 3, 5),
        "key": random.randn(2, 2, 6, 5),
        "value": random.randn(2, 2, 6, 7),
        "past_key": random.randn(2, 2, 3, 5),
        "past_value": random.randn(2, 2, 3, 7),
        "bias": random.randn(1, 4, 1, 9),
        "key_lengths": np.array([9, 4]),
    }
    return ConcreteCase("attention", {}, inputs, "float32")


def test_heads_go_with_those_that_they_share() -> None:
    whole = grouped()
    assert extent(whole, "H") == 2
    one = cut(whole, {"Hkv": np.array([1])})
    assert_array_equal(one.inputs["query"], whole.inputs["query"][:, 2:])
    assert_array_equal(one.inputs["bias"], whole.inputs["bias"][:, 2:])
    first_of_each = cut(whole, {"H": np.array([0])})
    assert_array_equal(first_of_each.inputs["query"], whole.inputs["query"][:, [0, 2]])
    assert first_of_each.inputs["key"].shape[1] == 2


def test_what_goes_along_all_keys_counts_those_of_the_past() -> None:
    whole = grouped()
    fewer = cut(whole, {"Lk": np.array([0, 5])})
    assert_array_equal(fewer.inputs["bias"], whole.inputs["bias"][..., [0, 1, 2, 3, 8]])
    assert_array_equal(fewer.inputs["key_lengths"], [5, 4])
    assert fewer.lengths["T"] == 5


def test_a_sequence_is_left_out_of_a_pack() -> None:
    random = np.random.RandomState(1)
    inputs = {
        **{name: random.randn(1, 1, 6, 2) for name in ("query", "key", "value")},
        "cu_seqlens_q": np.array([0, 2, 3, 6]),
        "cu_seqlens_k": np.array([0, 1, 4, 6]),
        "key_lengths": np.array([1, 2, 0]),
    }
    whole = ConcreteCase("packed_attention", {}, inputs, "float32")
    rest = without_sequence(whole, 1)
    assert_array_equal(rest.inputs["cu_seqlens_q"], [0, 2, 5])
    assert_array_equal(rest.inputs["cu_seqlens_k"], [0, 1, 3])
    assert_array_equal(rest.inputs["key_lengths"], [1, 0])
    assert_array_equal(rest.inputs["key"], inputs["key"][:, :, [0, 4, 5]])


def test_most_cuts_of_drawn_problems_are_cases_again(tmp_path: Path) -> None:
    source, tried, read = ProblemSource(Draw(3, None), DTYPES), 0, 0
    for number in range(40):
        problem = source.problem(number)
        for letter in letters_of(problem):
            length = extent(problem, letter)
            if length < 2:
                continue
            tried += 1
            try:
                shorter = with_counts_that_fit(cut(problem, {letter: np.arange(length - 1)}))
                read_concrete(shorter, tmp_path, f"search/cut-{tried}")
                read += 1
            except (CaseError, ShapeFault):
                pass
    assert tried > 100
    assert read > 0.8 * tried
