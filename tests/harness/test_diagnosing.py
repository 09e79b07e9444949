"""What a run says of an implementation's fault is what all of its failing cases say together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from here import own_code_here
from numpy.typing import NDArray

from attncheck.api import check
from attncheck.diagnosing import SETTLED, ReturnedStages, _by_itself, follow
from attncheck.execution.worker import Computed
from attncheck.judging.diagnosis import Evidence, Fit
from attncheck.judging.units import Judge
from attncheck.reading.case import Case
from attncheck.results.format import Row, StoredArray
from attncheck.results.last_failed import RunWatch
from attncheck.results.writer import ResultsWriter
from attncheck.store import VARIABLE
from attncheck.verdicts import Verdict

CASES = """\
title: Causal attention
source: {kind: derivation, title: Made for the tests}
operation: attention
cases:
  - name: One query
    dtypes: [float64]
    options: {is_causal: true}
    random: {generator: numpy-legacy, seed: 3}
    inputs:
      query: {draw: randn, shape: [1, 4]}
      key: {draw: randn, shape: [3, 4]}
      value: {draw: randn, shape: [3, 2]}
  - name: Many queries
    dtypes: [float64]
    options: {is_causal: true}
    random: {generator: numpy-legacy, seed: 4}
    inputs:
      query: {draw: randn, shape: [3, 4]}
      key: {draw: randn, shape: [5, 4]}
      value: {draw: randn, shape: [5, 2]}
"""


def ignoring_causality(
    query: NDArray[Any], key: NDArray[Any], value: NDArray[Any], *, is_causal: bool = False
) -> NDArray[Any]:
    scores = query @ np.swapaxes(key, -1, -2) / query.shape[-1] ** 0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True) @ value)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    (tmp_path / "cases").mkdir()
    (tmp_path / "cases" / "causal.yaml").write_text(CASES, encoding="utf-8")
    with own_code_here():
        yield tmp_path / "cases"


def test_one_query_alone_fits_a_convention_and_says_what_else_it_may_be(folder: Path) -> None:
    (folder / "causal.yaml").write_text(CASES[: CASES.index("  - name: Many queries")], encoding="utf-8")
    (row,) = check(ignoring_causality, cases=[str(folder)]).frames.results.to_dict("records")
    assert row["verdict"] == "semantic"
    assert row["message"].startswith("causality is aligned bottom-right")
    assert row["message"].endswith("this case does not tell them apart)")


def many_cases(folder: Path) -> None:
    """Write nine more cases, each of other lengths."""
    case = CASES[CASES.index("  - name: Many queries") :]
    more = [
        case.replace("Many queries", f"Queries {number}").replace("[3, 4]", f"[{number}, 4]") for number in range(4, 13)
    ]
    (folder / "causal.yaml").write_text(CASES + "".join(more), encoding="utf-8")


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The cases that are diagnosed by exact arithmetic."""
    found: list[str] = []
    examine = Judge.examine

    def noted(self: Judge, case: Case, *arguments: Any) -> Any:
        found.append(case.id)
        return examine(self, case, *arguments)

    monkeypatch.setattr(Judge, "examine", noted)
    return found


def test_the_simplest_cases_are_examined_and_what_they_name_is_handed_on(folder: Path, examined: list[str]) -> None:
    many_cases(folder)
    result = check(ignoring_causality, cases=[str(folder)])
    assert len(result.failures) == 11
    assert {(row.verdict, row.diagnosis) for row in result.failures} == {("numeric", "causality-ignored")}
    rows = result.frames.results
    assert (set(rows["verdict"]), set(rows["diagnosis"])) == ({"numeric"}, {"causality-ignored"})
    assert all(message.startswith("causality is ignored; ") for message in rows["message"])
    assert len(examined) == SETTLED


def test_a_case_that_a_name_does_not_explain_is_examined_and_has_no_name(folder: Path, examined: list[str]) -> None:
    def attention(
        query: NDArray[Any], key: NDArray[Any], value: NDArray[Any], *, is_causal: bool = False
    ) -> NDArray[Any]:
        found = ignoring_causality(query, key, value)
        return found + 1 if query.shape[-2] == 12 else found

    many_cases(folder)
    failures = check(attention, cases=[str(folder)]).failures
    names = {row.case.partition("causal/")[2]: row.diagnosis for row in failures}
    assert names.pop("queries-12") is None
    assert set(names.values()) == {"causality-ignored"}
    assert examined[-1].endswith("causal/queries-12")
    assert len(examined) == SETTLED + 1


def test_what_two_runs_have_in_common_is_diagnosed_once(folder: Path, examined: list[str]) -> None:
    many_cases(folder)
    first, second = (check(ignoring_causality, cases=[str(folder)]) for _ in range(2))
    assert len(examined) == SETTLED
    assert first.failures == second.failures


def test_the_rest_has_no_name_where_the_simplest_cases_say_nothing(folder: Path, examined: list[str]) -> None:
    def attention(
        query: NDArray[Any], key: NDArray[Any], value: NDArray[Any], *, is_causal: bool = False
    ) -> NDArray[Any]:
        return np.random.default_rng(1).standard_normal((*query.shape[:-1], 2))

    many_cases(folder)
    failures = check(attention, cases=[str(folder)]).failures
    assert {row.diagnosis for row in failures} == {None}
    assert len(failures) == 11
    assert len(examined) < 11


def test_verdicts_come_before_diagnoses(folder: Path, examined: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    see = RunWatch.see

    def noted(self: RunWatch, rows: Any) -> bool:
        seen.append(len(examined))
        return see(self, rows)

    monkeypatch.setattr(RunWatch, "see", noted)
    many_cases(folder)
    check(ignoring_causality, cases=[str(folder)])
    assert seen == [0] * 11
    assert examined


def test_what_an_earlier_part_of_a_run_has_kept_is_read_from_its_folder(tmp_path: Path) -> None:
    output = np.arange(3.0)
    writer = ResultsWriter(tmp_path)
    writer.add_arrays([StoredArray("file/one", "float64", "kernel", "output", output)])
    writer.flush()
    returned = ReturnedStages(tmp_path, {("kernel", "file/two", "float64"): Computed({"output": output + 1})})
    for case, expected in (("file/one", output), ("file/two", output + 1)):
        found = returned(("kernel", case, "float64"))
        assert found is not None
        np.testing.assert_array_equal(found.stages["output"], expected)
    assert returned(("kernel", "file/three", "float64")) is None
    assert returned(("another", "file/one", "float64")) is None


def test_a_number_that_misses_by_a_convention_says_so() -> None:
    stage = Row("file/one", "attention", "float64", "kernel", "stage", "output", Verdict.SEMANTIC, message="otherwise")
    stage = replace(stage, diagnosis="convention")
    number = replace(stage, comparison="printed", verdict=Verdict.NUMERIC, message="0.5 is printed", diagnosis=None)
    assert follow([stage, number])[1] == replace(
        number, verdict=Verdict.SEMANTIC, message="0.5 is printed; otherwise", diagnosis="convention"
    )
    wrong = replace(stage, verdict=Verdict.NUMERIC)
    assert follow([stage, wrong, number])[2] == number


def test_a_case_without_a_name_says_what_it_names_by_itself_unless_several_answers_fit() -> None:
    one = Fit("softcap-ignored", "the softcap is ignored", "capped", "numeric", "softcap-ignored")
    other = Fit("window-ignored", "the window is ignored", "masked", "numeric", "window-ignored")
    assert _by_itself(Evidence((one,))) == "the softcap is ignored"
    assert _by_itself(Evidence((one, other))) == _by_itself(Evidence()) == ""
