"""What a run says of an implementation's fault is what all of its failing cases say together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray

from attncheck.api import check
from attncheck.diagnosing import counted_again, reworded_frame, reworded_rows
from attncheck.judging.diagnosis import Evidence, Fit, Plain, pack
from attncheck.results.format import Row
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
def folder(tmp_path: Path) -> Path:
    (tmp_path / "causal.yaml").write_text(CASES, encoding="utf-8")
    return tmp_path


def test_many_queries_say_what_one_query_does_not_tell(folder: Path) -> None:
    result = check(ignoring_causality, cases=[str(folder)])
    rows = result.frames.results.set_index("case")
    assert set(rows["verdict"]) == {"numeric"}
    assert set(rows["diagnosis"]) == {"causality-ignored"}
    assert all(message.startswith("causality is ignored; ") for message in rows["message"])
    assert {(row.verdict, row.diagnosis) for row in result.failures} == {("numeric", "causality-ignored")}


def test_one_query_alone_fits_a_convention_and_says_what_else_it_may_be(folder: Path) -> None:
    (folder / "causal.yaml").write_text(CASES[: CASES.index("  - name: Many queries")], encoding="utf-8")
    (row,) = check(ignoring_causality, cases=[str(folder)]).frames.results.to_dict("records")
    assert row["verdict"] == "semantic"
    assert row["message"].startswith("causality is aligned bottom-right")
    assert row["message"].endswith("this case does not tell them apart)")


CONVENTION = Fit("convention", "it means something else", "masked", "semantic", "convention")
PLAIN = Plain("numeric", "twice the bound", "output", "it means something else")


def row(case: str, evidence: Evidence, **changes: Any) -> Row:
    own = Row(case, "attention", "float64", "kernel", "stage", "output", Verdict.SEMANTIC, begins_at="masked")
    return replace(own, message=PLAIN.written, diagnosis="convention", evidence=pack(evidence, PLAIN), **changes)


ALONE, REFUTING = Evidence((CONVENTION,)), Evidence((), frozenset({"convention"}))


def test_a_convention_that_another_case_refutes_is_told_as_the_wrong_number_that_it_is() -> None:
    number = row("file/one", Evidence(), comparison="printed")
    rows = reworded_rows([row("file/one", ALONE), number, row("file/two", REFUTING)])
    assert [(each.verdict, each.message, each.diagnosis) for each in rows] == [("numeric", "twice the bound", None)] * 3
    assert [each.begins_at for each in rows] == ["output", "masked", "output"]
    # Another implementation refutes nothing, and neither does what is known beforehand.
    other = row("file/two", REFUTING, implementation="other")
    assert reworded_rows([row("file/one", ALONE), other])[0].verdict == "semantic"
    assert reworded_rows([row("file/one", ALONE), row("file/two", REFUTING, xfail=True)])[0].verdict == "semantic"


def test_rows_side_by_side_are_retold_by_the_cases_of_their_own_environment() -> None:
    rows = [row("file/one", ALONE), row("file/two", REFUTING), row("file/one", ALONE)]
    frame = pd.DataFrame([vars(each) for each in rows]).assign(environment=["here", "here", "there"])
    told = reworded_frame(frame)
    assert list(told["verdict"]) == ["numeric", "numeric", "semantic"]
    assert list(told["message"]) == ["twice the bound", "twice the bound", "it means something else"]
    assert told["diagnosis"].isna().tolist() == [True, True, False]


def test_damaged_evidence_leaves_a_row_as_it_is() -> None:
    damaged = replace(row("file/one", ALONE), evidence="{")
    assert reworded_rows([damaged, row("file/two", REFUTING)])[0] == damaged


def test_verdicts_are_counted_as_they_are_told() -> None:
    before = [row("file/one", ALONE), row("file/two", REFUTING)]
    counts = counted_again({"semantic": 2, "agree": 5}, before, reworded_rows(before))
    assert {name: count for name, count in counts.items() if count} == {"numeric": 2, "agree": 5}
