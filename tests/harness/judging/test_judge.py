"""Who gets blamed: implementations made from NumPy's stages, some of them wrong on purpose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.backends import BACKENDS
from attncheck.harness.judging.judge import Judged, in_order, judge
from attncheck.harness.reading.case import Case
from attncheck.harness.reading.inputs import Inputs
from attncheck.harness.results.writer import Row
from attncheck.harness.running.worker import Computed, Failure, Outcome
from attncheck.harness.verdicts import Verdict

Array = NDArray[Any]
Stages = dict[str, Array]
Compute = Callable[[Case, str], tuple[Inputs, Stages]]
LoadText = Callable[[str | bytes], list[Case]]

NUMPY = BACKENDS["numpy"].load()
CASE = """
title: A case to be judged
source: {kind: derivation, title: none}
operation: attention
defaults:
  random: {generator: numpy-legacy, seed: 3}
cases:
  - name: Three words attend to four
    inputs:
      query: {draw: randn, shape: [2, 3, 5]}
      key: {draw: randn, shape: [2, 4, 5]}
      value: {draw: randn, shape: [2, 4, 6]}
      mask: {values: [[true, true, true, false], [false, true, true, true], [true, true, true, true]]}
"""
STAGES = ["raw_scores", "scores", "masked", "weights", "log_sum_exp", "output"]


@pytest.fixture(scope="module")
def case(load_text: LoadText) -> Case:
    return load_text(CASE)[0]


@pytest.fixture(params=["float32", "float64"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def right(case: Case, dtype: str, compute: Compute) -> Stages:
    return compute(case, dtype)[1]


@pytest.fixture
def judge_all(case: Case, dtype: str, compute: Compute) -> Callable[..., Judged]:
    """Judge outcomes by name; stages stand for themselves."""

    def call(**outcomes: Stages | Outcome) -> Judged:
        inputs, _ = compute(case, dtype)
        made = {name: Computed(own) if isinstance(own, dict) else own for name, own in outcomes.items()}
        return judge(case, dtype, inputs, made)

    return call


def changed(stages: Stages, stage: str, index: tuple[int, ...], value: float) -> Stages:
    array = stages[stage].copy()
    array[index] = value
    return stages | {stage: array}


def stage_rows(judged: Judged) -> list[Row]:
    return [row for row in judged.rows if row.comparison == "stage"]


def blamed(judged: Judged) -> dict[str, list[tuple[str, str]]]:
    """The stages that are not right, and what is said of them, by implementation."""
    found: dict[str, list[tuple[str, str]]] = {}
    for row in stage_rows(judged):
        if row.verdict != Verdict.AGREE:
            found.setdefault(row.implementation, []).append((row.stage, str(row.verdict)))
    return found


def row_of(judged: Judged, implementation: str, stage: str) -> Row:
    (row,) = [row for row in stage_rows(judged) if (row.implementation, row.stage) == (implementation, stage)]
    return row


# By majority.


@pytest.mark.parametrize("count", [2, 3, 4])
def test_equal_results_agree_at_every_stage_and_in_every_pair(
    judge_all: Callable[..., Judged], right: Stages, count: int
) -> None:
    judged = judge_all(**{f"i{number}": right for number in range(count)})
    assert {row.verdict for row in judged.rows} == {Verdict.AGREE}
    assert not judged.disagrees
    kinds = Counter(row.comparison for row in judged.rows)
    assert kinds == {"stage": count * len(STAGES), "pair": count * (count - 1) // 2 * len(STAGES)}


def test_a_single_implementation_has_nothing_to_agree_with(judge_all: Callable[..., Judged], right: Stages) -> None:
    judged = judge_all(alone=right)
    assert [(row.stage, row.verdict) for row in judged.rows] == [(stage, Verdict.UNVERIFIED) for stage in STAGES]
    assert {row.message for row in judged.rows} == {"no other implementation to compare with"}
    assert not judged.disagrees


def test_of_two_that_differ_both_are_blamed_and_name_each_other(
    judge_all: Callable[..., Judged], right: Stages, dtype: str
) -> None:
    judged = judge_all(a=right, b=changed(right, "output", (0, 1, 2, 3), 9.0))
    assert blamed(judged) == {"a": [("output", "numeric")], "b": [("output", "numeric")]}
    assert judged.disagrees
    own, other = row_of(judged, "a", "output"), row_of(judged, "b", "output")
    value = float(right["output"][0, 1, 2, 3])
    assert (own.other, own.index, own.value, own.reference) == ("b", "0,1,2,3", value, 9.0)
    assert (other.other, other.index, other.value, other.reference) == ("a", "0,1,2,3", 9.0, value)
    assert own.difference == pytest.approx(9 - value)
    assert own.units == pytest.approx((9 - value) / (8 * float(np.finfo(dtype).eps)))
    assert own.message.startswith(f"differs from b; at [0,1,2,3] {value:.9g} instead of 9 (b), ")
    assert own.message.endswith(" units of which 64 are allowed")


@pytest.mark.parametrize("others", [2, 3])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_of_several_only_the_one_that_differs_is_blamed(
    judge_all: Callable[..., Judged], right: Stages, others: int, position: int
) -> None:
    names = [f"good{number}" for number in range(others)]
    names.insert(position, "bad")
    wrong = changed(right, "weights", (0, 0, 1, 2), 0.75)
    judged = judge_all(**{name: wrong if name == "bad" else right for name in names})
    assert blamed(judged) == {"bad": [("weights", "numeric")]}
    row = row_of(judged, "bad", "weights")
    assert (row.value, row.reference) == (0.75, float(right["weights"][0, 0, 1, 2]))
    assert row.message.startswith(f"differs from {', '.join(sorted(set(names) - {'bad'}))}; at [0,0,1,2] 0.75 instead")
    assert judged.disagrees


def test_the_pair_that_differs_is_a_row_of_its_own(judge_all: Callable[..., Judged], right: Stages) -> None:
    judged = judge_all(a=right, b=changed(right, "scores", (0, 0, 0, 0), 50.0), c=right)
    pairs = {(row.implementation, row.other): row for row in judged.rows if row.comparison == "pair"}
    assert set(pairs) == {("a", "b"), ("a", "c"), ("b", "c")}
    differing = [
        (row.implementation, row.other, row.stage, row.value, row.reference)
        for row in judged.rows
        if row.comparison == "pair" and row.verdict != Verdict.AGREE
    ]
    value = float(right["scores"][0, 0, 0, 0])
    assert differing == [("a", "b", "scores", value, 50.0), ("b", "c", "scores", 50.0, value)]


def test_two_against_two_are_all_blamed(judge_all: Callable[..., Judged], right: Stages) -> None:
    wrong = changed(right, "output", (0, 0, 0, 0), 7.0)
    judged = judge_all(a=right, b=wrong, c=right, d=wrong)
    assert set(blamed(judged)) == {"a", "b", "c", "d"}
    assert row_of(judged, "a", "output").message.startswith("differs from b, d; ")


def test_three_that_all_differ_are_all_blamed(judge_all: Callable[..., Judged], right: Stages) -> None:
    index = (0, 0, 0, 0)
    judged = judge_all(a=right, b=changed(right, "output", index, 7.0), c=changed(right, "output", index, -7.0))
    assert set(blamed(judged)) == {"a", "b", "c"}


def test_the_gravest_difference_is_the_one_that_is_told(judge_all: Callable[..., Judged], right: Stages) -> None:
    index = (0, 0, 0, 0)
    judged = judge_all(a=right, b=changed(right, "output", index, 7.0), c=right | {"output": right["output"][..., :2]})
    row = row_of(judged, "a", "output")
    assert (row.verdict, row.other, row.index) == (Verdict.SHAPE, "c", None)
    assert row.message == "differs from b, c: shape 1x2x3x6 against 1x2x3x2"


def test_differences_within_the_allowance_blame_nobody(judge_all: Callable[..., Judged], right: Stages) -> None:
    row = right["weights"][0, 0, 0]
    moved = changed(right, "weights", (0, 0, 0, 0), row[0] + 60 * np.spacing(row.max()))
    judged = judge_all(a=right, b=moved)
    assert blamed(judged) == {}
    assert row_of(judged, "a", "weights").verdict == Verdict.AGREE


# Form.


@pytest.mark.parametrize("others", [0, 1, 2])
def test_a_wrong_shape_is_told_by_the_case_itself(judge_all: Callable[..., Judged], right: Stages, others: int) -> None:
    wrong = right | {"weights": right["weights"].swapaxes(-1, -2)}
    judged = judge_all(bad=wrong, **{f"good{number}": right for number in range(others)})
    row = row_of(judged, "bad", "weights")
    assert (row.verdict, row.shape) == (Verdict.SHAPE, "1x2x4x3")
    assert row.message == "expected shape 1x2x3x4, got 1x2x4x3"
    assert judged.disagrees
    if others == 2:
        assert set(blamed(judged)) == {"bad"}


@pytest.mark.parametrize("others", [0, 2])
def test_a_wrong_dtype_is_told_by_the_case_itself(
    judge_all: Callable[..., Judged], right: Stages, dtype: str, others: int
) -> None:
    another = "float64" if dtype == "float32" else "float32"
    judged = judge_all(
        bad=right | {"output": right["output"].astype(another)},
        **{f"good{number}": right for number in range(others)},
    )
    row = row_of(judged, "bad", "output")
    assert (row.verdict, row.message) == (Verdict.DTYPE, f"expected {dtype}, got {another}")
    assert [entry for entry in blamed(judged).get("bad", []) if entry[1] != "unverified"] == [("output", "dtype")]
    assert {name for name in blamed(judged) if others} <= {"bad"}


def test_whole_numbers_have_the_wrong_dtype_and_raise_nothing(
    judge_all: Callable[..., Judged], right: Stages, dtype: str
) -> None:
    whole = right | {"output": np.ones_like(right["output"], dtype=np.int64)}
    judged = judge_all(a=whole, b=whole)
    assert row_of(judged, "a", "output").message == f"expected {dtype}, got int64"
    assert {name: [stage for stage, _ in stages] for name, stages in blamed(judged).items()} == {
        "a": ["output"],
        "b": ["output"],
    }


def test_a_nan_is_told_with_its_place(judge_all: Callable[..., Judged], right: Stages) -> None:
    judged = judge_all(a=right, bad=changed(right, "output", (0, 1, 1, 4), np.nan), c=right)
    assert blamed(judged) == {"bad": [("output", "nonfinite")]}
    row = row_of(judged, "bad", "output")
    assert (row.index, row.reference) == ("0,1,1,4", float(right["output"][0, 1, 1, 4]))
    assert np.isnan(row.value or 0)
    assert "at [0,1,1,4] nan instead of " in row.message


def test_a_masked_score_that_is_only_very_small_is_told(judge_all: Callable[..., Judged], right: Stages) -> None:
    judged = judge_all(a=right, bad=changed(right, "masked", (0, 0, 0, 3), -1e9), c=right)
    assert blamed(judged) == {"bad": [("masked", "nonfinite")]}
    assert row_of(judged, "bad", "masked").reference == -np.inf


# Where it goes wrong.


def test_the_first_wrong_stage_leads_what_follows_from_it(
    judge_all: Callable[..., Judged], right: Stages, case: Case, dtype: str, compute: Compute
) -> None:
    # The scores' sign swapped, and everything after them computed from that.
    flipped = right | {"scores": -right["scores"]}
    flipped["masked"] = np.where(np.isinf(right["masked"]), right["masked"], flipped["scores"])
    flipped |= NUMPY.softmax(flipped["masked"])
    flipped["output"] = flipped["weights"] @ compute(case, dtype)[0].arrays["value"]
    judged = judge_all(a=right, flipped=flipped, c=right)
    assert list(blamed(judged)) == ["flipped"]
    assert [stage for stage, _ in blamed(judged)["flipped"]] == ["scores", "masked", "weights", "log_sum_exp", "output"]
    assert row_of(judged, "flipped", "raw_scores").verdict == Verdict.AGREE


def test_stages_are_judged_in_the_order_of_the_computation_however_they_are_returned(
    judge_all: Callable[..., Judged], right: Stages
) -> None:
    judged = judge_all(a=dict(reversed(right.items())), b=right)
    assert [row.stage for row in stage_rows(judged)] == STAGES * 2


def test_stages_that_no_operation_knows_come_last(right: Stages) -> None:
    assert in_order({"own": right["output"], **dict(reversed(right.items()))}) == [*STAGES, "own"]


def test_an_implementation_is_judged_by_the_stages_that_it_returns(
    judge_all: Callable[..., Judged], right: Stages
) -> None:
    short = {"output": -right["output"]}
    judged = judge_all(a=right, short=short, c=right)
    assert blamed(judged) == {"short": [("output", "numeric")]}
    assert [row.stage for row in stage_rows(judged) if row.implementation == "short"] == ["output"]


def test_a_stage_that_one_implementation_alone_returns_is_unverified(
    judge_all: Callable[..., Judged], right: Stages
) -> None:
    judged = judge_all(a=right, short={"output": right["output"]})
    assert blamed(judged) == {"a": [(stage, "unverified") for stage in STAGES[:-1]]}


# Failures.


@pytest.mark.parametrize("verdict", ["error", "crash", "timeout", "unsupported"])
def test_a_failure_is_a_row_and_the_others_are_still_judged(
    judge_all: Callable[..., Judged], right: Stages, verdict: str
) -> None:
    judged = judge_all(a=right, broken=Failure(verdict, "what it said"), c=right)
    (row,) = [row for row in judged.rows if row.implementation == "broken"]
    assert (row.comparison, row.stage, row.verdict, row.message) == ("stage", "", verdict, "what it said")
    assert [row.stage for row in stage_rows(judged) if row.implementation == "a"] == STAGES
    assert {row.verdict for row in judged.rows if row.implementation != "broken"} == {Verdict.AGREE}
    # What cannot be expressed is no disagreement; the rest is.
    assert judged.disagrees == (verdict != "unsupported")


def test_beside_a_failure_a_single_implementation_is_unverified(
    judge_all: Callable[..., Judged], right: Stages
) -> None:
    judged = judge_all(a=right, broken=Failure("crash", "gone"))
    assert {row.verdict for row in judged.rows if row.implementation == "a"} == {Verdict.UNVERIFIED}


def test_failures_everywhere_leave_one_row_each(judge_all: Callable[..., Judged]) -> None:
    judged = judge_all(a=Failure("timeout", "late"), b=Failure("error", "broken"))
    assert [(row.implementation, row.verdict) for row in judged.rows] == [("a", "timeout"), ("b", "error")]


def test_every_row_names_the_case_the_operation_and_the_dtype(
    judge_all: Callable[..., Judged], right: Stages, case: Case, dtype: str
) -> None:
    judged = judge_all(a=right, b=right, c=Failure("error", "broken"))
    assert {(row.case, row.operation, row.dtype) for row in judged.rows} == {(case.id, "attention", dtype)}
    assert all(row.implementation for row in judged.rows)
