"""Any case, in one dtype, is a concrete case, and comes back from that as the same call."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from attncheck.errors import CaseError
from attncheck.execution.runner import task_of
from attncheck.reading.inputs import convert_inputs, make_exact_inputs
from attncheck.reading.selection import select_cases
from attncheck.searching.concrete import ConcreteCase, concrete_case, read_concrete

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


def test_what_is_no_case_is_refused(tmp_path: Path) -> None:
    ones = {name: np.ones((1, 1, 2, 3)) for name in ("query", "key")}
    with pytest.raises(CaseError, match="value"):
        read_concrete(ConcreteCase("attention", {}, ones, "float32"), tmp_path, "search/without-values")
    inputs = {**ones, "value": np.ones((1, 1, 2, 3)), "key_lengths": np.array([3])}
    with pytest.raises(CaseError, match="at most 2"):
        read_concrete(ConcreteCase("attention", {}, inputs, "float32"), tmp_path, "search/too-many")


def test_minus_infinity_counts_as_finite_where_it_forbids() -> None:
    ones = {name: np.ones((1, 1, 2, 2)) for name in ("query", "key", "value")}
    problem = ConcreteCase("attention", {}, {**ones, "bias": np.full((1, 1, 2, 2), -np.inf)}, "float32")
    assert not problem.has_nonfinite
    assert problem.changed(inputs={**ones, "query": np.full((1, 1, 2, 2), -np.inf)}).has_nonfinite
