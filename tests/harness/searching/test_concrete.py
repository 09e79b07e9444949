"""Concrete cases: any case comes back from one, and from its file; their inputs are cut alike, whatever their axes."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from numpy.typing import NDArray

from attncheck.dtypes import rounded_once
from attncheck.errors import CaseError
from attncheck.execution.runner import task_of
from attncheck.reading.inputs import convert_inputs, make_exact_inputs
from attncheck.reading.selection import select_cases
from attncheck.reading.shapes import ShapeFault
from attncheck.searching.concrete import ConcreteCase, concrete_case, read_concrete
from attncheck.searching.findings import MAX_IN_FILE, holds, read_written, write_case
from attncheck.searching.problems import Draw, ProblemSource
from attncheck.searching.reduction import cut, extent, letters_of, with_counts_that_fit, without_sequence
from attncheck.spec import DTYPES

PATTERNS = ["layouts/*", "packed/*", "linear_projections/*", "quantized/*", "mask_fill/*", "merge_states/*", "probes/*"]
SMALL = 4000


def test_the_call_of_every_form_of_case_comes_back(tmp_path: Path) -> None:
    cases = [
        each
        for each in select_cases(PATTERNS).cases
        if sum(int(np.prod(shape)) for shape in each.input_shapes.values()) < SMALL
    ]
    assert len(cases) > 100
    for number, case in enumerate(cases):
        dtype = case.dtypes[number % len(case.dtypes)]
        again = read_concrete(concrete_case(case, dtype), tmp_path, f"search/one-{number}")
        one, other = (task_of(each, convert_inputs(each, make_exact_inputs(each), dtype)) for each in (case, again))
        assert one.options == other.options, case.id
        assert one.inputs.keys() == other.inputs.keys()
        for name, array in one.inputs.items():
            assert array.dtype == other.inputs[name].dtype
            np.testing.assert_array_equal(array.astype(np.float64), other.inputs[name].astype(np.float64))
        assert case.stage_shapes == again.stage_shapes


def attention(length: int = 2, width: int = 2) -> dict[str, NDArray[np.float64]]:
    return {name: np.ones((1, 1, length, width)) for name in ("query", "key", "value")}


def test_what_is_no_case_is_refused(tmp_path: Path) -> None:
    without = {name: array for name, array in attention().items() if name != "value"}
    for inputs, message in ((without, "value"), ({**attention(), "key_lengths": np.array([3])}, "at most 2")):
        with pytest.raises(CaseError, match=message):
            read_concrete(ConcreteCase("attention", {}, inputs, "float32"), tmp_path, "search/one")


def test_minus_infinity_counts_as_finite_where_it_forbids() -> None:
    infinite = np.full((1, 1, 2, 2), -np.inf)
    problem = ConcreteCase("attention", {}, {**attention(), "bias": infinite}, "float32")
    assert not problem.has_nonfinite
    assert problem.with_inputs(query=infinite).has_nonfinite


def test_drawn_problems_come_back_from_their_files(tmp_path: Path) -> None:
    source, written = ProblemSource(Draw(7, None), DTYPES), 0
    for number in range(36):
        problem = source.problem(number)
        with suppress(CaseError, ShapeFault):  # what was drawn may not fit together
            case = write_case(problem, tmp_path / f"case-{number}.yaml", "A drawn problem", "a test")
            assert holds(case, problem, tmp_path)
            written += 1
    assert written > 30
    assert list(tmp_path.glob("*.npz"))  # some are large


def test_any_number_is_written_with_as_few_digits_as_tell_it_apart(tmp_path: Path) -> None:
    path = tmp_path / "numbers.yaml"
    digits = {"float64": "0.3333333333333333", "float32": "0.33333334", "bfloat16": "0.334", "float16": "0.3333"}
    for dtype, third in digits.items():
        row = np.array([[[[float(rounded_once(np.array(1 / 3), dtype)), -0.0, 0.0, 2.0, -1.5]]]])
        problem = ConcreteCase("attention", {}, dict.fromkeys(("query", "key", "value"), row), dtype)
        assert holds(write_case(problem, path, "Numbers", "a test"), problem, tmp_path)
        assert f"[[[[{third}, -0.0, 0, 2, -1.5]]]]" in path.read_text(encoding="utf-8")
    ends = np.array([[[[np.nan, np.inf, float(np.finfo(np.float32).min)]]]])
    problem = ConcreteCase("attention", {"window": (1, None)}, {**attention(1, 3), "query": ends}, "float32")
    assert holds(write_case(problem, path, "The ends of a range", "a test"), problem, tmp_path)
    assert read_written(path).options == {"window": (1, None)}


def test_a_written_case_stands_in_a_folder_of_cases(tmp_path: Path) -> None:
    for name, length in (("many", MAX_IN_FILE), ("few", 2)):
        problem = ConcreteCase("attention", {}, attention(length, 1), "float32")
        write_case(problem, tmp_path / f"{name}.yaml", f"A case of {name} numbers", "a test")
    selected = select_cases([str(tmp_path)])
    assert not selected.faults
    assert len(selected.cases) == 2


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


def test_heads_go_with_those_that_they_share_and_lengths_count_keys_of_the_past() -> None:
    whole = grouped()
    assert extent(whole, "H") == 2
    one = cut(whole, {"Hkv": np.array([1])})
    for name in ("query", "bias"):
        assert_array_equal(one.inputs[name], whole.inputs[name][:, 2:])
    first_of_each = cut(whole, {"H": np.array([0])})
    assert_array_equal(first_of_each.inputs["query"], whole.inputs["query"][:, [0, 2]])
    assert first_of_each.inputs["key"].shape[1] == 2
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
    for number in range(25):
        problem = source.problem(number)
        for letter in letters_of(problem):
            if (length := extent(problem, letter)) > 1:
                tried += 1
                with suppress(CaseError, ShapeFault):
                    shorter = with_counts_that_fit(cut(problem, {letter: np.arange(length - 1)}))
                    read_concrete(shorter, tmp_path, f"search/cut-{tried}")
                    read += 1
    assert tried > 100
    assert read > 0.8 * tried
