"""A fault that float32 results show is named although float64 is computed in float32, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from attncheck.diagnosis.case_evidence import Match
from attncheck.diagnosis.decision import NO_DIAGNOSIS, Decision
from attncheck.diagnosis.float64_in_float32 import decide_by_dtype, is_computed_in_float32
from attncheck.spec import ACCURACY_OF_FLOAT32

ACCURACY = Decision(Match(ACCURACY_OF_FLOAT32, "as accurate as float32", "", "numeric", ""))
FAULT = Decision(Match("keys-fitted", "keys are left out", "masked", "numeric", ""))


@dataclass(frozen=True, eq=False)
class Failure:
    """A failing evaluation, as far as decisions by dtype read it."""

    of: str
    dtype: str
    output: np.ndarray

    unit = property(lambda self: SimpleNamespace(dtype=self.dtype))
    case = property(lambda self: SimpleNamespace(id=self.of))
    key = property(lambda self: ("kernel", self.of, self.dtype))
    rows = (SimpleNamespace(stage="output"),)
    returned = property(lambda self: SimpleNamespace(stages={"output": self.output}))


def failures(dtype: str, cases: Sequence[str], value: float = 0.5) -> list[Failure]:
    return [Failure(case, dtype, np.full(3, value, dtype)) for case in cases]


ONLY_WIDE, BOTH = ["a", "b", "c", "d"], ["x", "y", "z"]
CASES = frozenset([*ONLY_WIDE, *BOTH])


def decided(failing: Sequence[Any], of_only_wide: Decision = ACCURACY) -> tuple[dict[Any, Decision], list[set[str]]]:
    """Return the decisions, and the cases and dtypes of each group that decided together."""
    groups: list[set[str]] = []

    def decide(group: Sequence[Any]) -> Mapping[Any, Decision]:
        groups.append({f"{failure.of} {failure.dtype}" for failure in group})
        is_narrow = all(failure.dtype == "float32" for failure in group)
        of = dict.fromkeys(ONLY_WIDE, of_only_wide)
        return {failure.key: of.get(failure.of, FAULT if is_narrow else NO_DIAGNOSIS) for failure in group}

    return decide_by_dtype(failing, CASES, decide), groups


def test_the_results_in_float32_decide_without_those_in_float64() -> None:
    failing = failures("float64", [*ONLY_WIDE, *BOTH]) + failures("float32", BOTH)
    decisions, groups = decided(failing)
    assert {"x float32", "y float32", "z float32"} in groups
    assert decisions["kernel", "x", "float32"] == FAULT
    assert decisions["kernel", "a", "float64"] == ACCURACY
    assert decisions.keys() == {failure.key for failure in failing}


@pytest.mark.parametrize(("value", "expected"), [(0.5, FAULT), (0.5 + 2.0**-22, FAULT), (0.51, NO_DIAGNOSIS)])
def test_a_float64_result_near_the_float32_one_has_its_diagnosis(value: float, expected: Decision) -> None:
    failing = failures("float64", ONLY_WIDE) + failures("float64", BOTH, value) + failures("float32", BOTH)
    assert decided(failing)[0]["kernel", "x", "float64"] == expected


def test_all_decide_together_unless_float64_is_as_accurate_as_float32() -> None:
    failing = failures("float64", [*ONLY_WIDE, *BOTH]) + failures("float32", BOTH)
    _, groups = decided(failing, of_only_wide=NO_DIAGNOSIS)
    assert groups[-1] == {f"{failure.of} {failure.dtype}" for failure in failing}


def test_two_cases_do_not_show_that_float64_is_computed_in_float32() -> None:
    failing = failures("float64", ONLY_WIDE[:2]) + failures("float64", BOTH) + failures("float32", BOTH)
    assert len(decided(failing)[1]) == 1


def test_only_a_float64_accuracy_is_a_computation_in_float32() -> None:
    assert is_computed_in_float32(("kernel", "a", "float64"), ACCURACY)
    assert not is_computed_in_float32(("kernel", "a", "float32"), ACCURACY)
    assert not is_computed_in_float32(("kernel", "a", "float64"), FAULT)
