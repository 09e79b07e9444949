"""What is written is an ordinary case file, with the very numbers of a problem in few digits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from attncheck.reading.dtypes import rounded_once
from attncheck.reading.selection import select_cases
from attncheck.searching.concrete import ConcreteCase
from attncheck.searching.problems import Draw
from attncheck.searching.source import ProblemSource
from attncheck.searching.writing import MAX_IN_FILE, holds, read_written, write_case
from attncheck.spec import DTYPES


def test_drawn_problems_come_back_from_their_files(tmp_path: Path) -> None:
    source = ProblemSource(Draw(7, None), DTYPES)
    written = 0
    for number in range(60):
        problem = source.problem(number)
        try:
            case = write_case(problem, tmp_path / f"case-{number}.yaml", "A drawn problem", "a test")
        except Exception as error:
            if "case-" in str(error):  # what was drawn does not fit together
                continue
            raise
        assert holds(case, problem, tmp_path)
        written += 1
    assert written > 50
    assert list(tmp_path.glob("*.npz"))  # some are large


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_have_as_few_digits_as_tell_them_apart(dtype: str, tmp_path: Path) -> None:
    third = float(rounded_once(np.array(1 / 3), dtype))
    row = np.array([[[[third, -0.0, 0.0, 2.0, -1.5]]]])
    problem = ConcreteCase("attention", {}, dict.fromkeys(("query", "key", "value"), row), dtype)
    path = tmp_path / "numbers.yaml"
    assert holds(write_case(problem, path, "Numbers", "a test"), problem, tmp_path)
    digits = {"float64": "0.3333333333333333", "float32": "0.33333334", "bfloat16": "0.334", "float16": "0.3333"}
    assert f"[[[[{digits[dtype]}, -0.0, 0, 2, -1.5]]]]" in path.read_text(encoding="utf-8")


def test_the_ends_of_a_range_and_what_is_not_finite_can_be_written(tmp_path: Path) -> None:
    ones = {name: np.ones((1, 1, 1, 3)) for name in ("query", "key", "value")}
    least = float(np.finfo(np.float32).min)
    ones["query"] = np.array([[[[np.nan, np.inf, least]]]])
    problem = ConcreteCase("attention", {"window": (1, None)}, ones, "float32")
    case = write_case(problem, tmp_path / "ends.yaml", "The ends of a range", "a test")
    assert holds(case, problem, tmp_path)
    assert read_written(tmp_path / "ends.yaml").options == {"window": (1, None)}


def test_a_written_case_stands_in_a_folder_of_cases(tmp_path: Path) -> None:
    many = {name: np.ones((1, 1, MAX_IN_FILE, 1)) for name in ("query", "key", "value")}
    few = {name: np.ones((1, 1, 2, 1)) for name in ("query", "key", "value")}
    for name, inputs in (("many", many), ("few", few)):
        problem = ConcreteCase("attention", {}, inputs, "float32")
        write_case(problem, tmp_path / f"{name}.yaml", f"A case of {name} numbers", "a test")
    selected = select_cases([str(tmp_path)])
    assert not selected.faults
    assert len(selected.cases) == 2
