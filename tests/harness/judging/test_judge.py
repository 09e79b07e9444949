"""Who gets blamed: implementations made from NumPy's stages, some of them wrong on purpose.

Each is held against the exact answer by itself; what the others say is told in pairs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.backends import BACKENDS
from attncheck.execution.worker import Computed, Failure, Outcome
from attncheck.judging.judge import Judged, judge, judge_pairs, worst_bounds
from attncheck.reading.case import Case
from attncheck.reading.inputs import Inputs
from attncheck.results.format import Row
from attncheck.verdicts import Verdict

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
        return judge(case, dtype, inputs, made, dict.fromkeys(made, "native"))

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


def failing_pairs(judged: Judged) -> list[tuple[str, str | None, str]]:
    return [
        (row.implementation, row.other, row.stage)
        for row in judged.rows
        if row.comparison == "pair" and row.verdict != Verdict.AGREE
    ]


# By the exact answer.


@pytest.mark.parametrize("count", [1, 2, 3])
def test_right_results_agree_at_every_stage_and_in_every_pair(
    judge_all: Callable[..., Judged], right: Stages, count: int
) -> None:
    judged = judge_all(**{f"i{number}": right for number in range(count)})
    assert {row.verdict for row in judged.rows} == {Verdict.AGREE}
    assert {row.message for row in judged.rows} == {""}
    assert not judged.disagrees
    kinds = Counter(row.comparison for row in judged.rows)
    assert kinds["stage"] == count * len(STAGES)
    assert kinds["pair"] == count * (count - 1) // 2 * len(STAGES)


def test_a_single_implementation_is_judged_by_the_exact_answer(judge_all: Callable[..., Judged], right: Stages) -> None:
    judged = judge_all(alone=right)
    assert [(row.stage, row.verdict, row.tier) for row in judged.rows] == [
        (stage, Verdict.AGREE, "within") for stage in STAGES
    ]
    judged = judge_all(alone=changed(right, "output", (0, 1, 2, 3), 9.0))
    assert blamed(judged) == {"alone": [("output", "numeric")]}
    assert judged.disagrees


@pytest.mark.parametrize("others", [1, 2, 3])
@pytest.mark.parametrize("position", [0, 1])
def test_only_the_one_that_is_wrong_is_blamed(
    judge_all: Callable[..., Judged], right: Stages, others: int, position: int
) -> None:
    names = [f"good{number}" for number in range(others)]
    names.insert(position, "bad")
    wrong = changed(right, "output", (0, 0, 1, 2), 7.5)
    judged = judge_all(**{name: wrong if name == "bad" else right for name in names})
    assert blamed(judged) == {"bad": [("output", "numeric")]}
    assert judged.disagrees


def test_the_majority_does_not_decide(judge_all: Callable[..., Judged], right: Stages) -> None:
    wrong = changed(right, "output", (0, 0, 0, 0), 7.0)
    judged = judge_all(a=wrong, b=wrong, c=wrong, d=right)
    assert blamed(judged) == {name: [("output", "numeric")] for name in "abc"}
    assert failing_pairs(judged) == [("a", "d", "output"), ("b", "d", "output"), ("c", "d", "output")]


def test_a_row_says_which_element_what_was_computed_and_what_is_exact(
    judge_all: Callable[..., Judged], right: Stages, dtype: str
) -> None:
    judged = judge_all(bad=changed(right, "output", (0, 1, 2, 3), 9.0))
    row = row_of(judged, "bad", "output")
    honest = float(right["output"][0, 1, 2, 3])
    # Within a few units of its last place, NumPy's own number is the exact one.
    assert row.reference == pytest.approx(honest, rel=20 * float(np.finfo(dtype).eps))
    assert (row.index, row.value, row.other, row.shape) == ("0,1,2,3", 9.0, None, "1x2x3x6")
    assert row.difference == pytest.approx(9 - honest)
    assert row.allowed is not None
    assert 0 < row.allowed < 100 * float(np.finfo(dtype).eps)
    assert row.introduced_ratio == pytest.approx(row.difference / row.allowed)
    assert (row.tier, row.introduced_tier, row.begins_at, row.elements) == ("proven", "proven", "output", 36)
    assert (
        " times the largest error that is possible in this step; at [0, 1, 2, 3] computed 9 (0x1.2000000000000p+3)"
        in (row.message)
    )
    assert f", exact {row.reference:.17g}, off by " in row.message


def test_every_stage_says_where_the_implementation_goes_wrong(judge_all: Callable[..., Judged], right: Stages) -> None:
    judged = judge_all(a=right, bad=changed(right, "weights", (0, 0, 1, 2), 0.75))
    assert {row.begins_at for row in stage_rows(judged) if row.implementation == "bad"} == {"weights"}
    assert {row.begins_at for row in stage_rows(judged) if row.implementation == "a"} == {None}
    # NumPy's output does not follow from weights that were changed afterwards.
    assert blamed(judged) == {"bad": [("weights", "numeric"), ("output", "numeric")]}
    row = row_of(judged, "bad", "output")
    assert (row.tier, row.introduced_tier) == ("within", "proven")
    # The element is that of the step, the ratio still that of the exact answer.
    assert row.against == "step"
    assert (row.difference or 0) / (row.allowed or 1) == row.introduced_ratio
    assert (row.ratio or 0) < 1 < (row.introduced_ratio or 0)
    row = row_of(judged, "a", "output")
    assert row.against == "exact"
    assert (row.difference or 0) / (row.allowed or 1) == row.ratio


# By each other.


def test_the_pair_that_differs_is_a_row_of_its_own(judge_all: Callable[..., Judged], right: Stages) -> None:
    judged = judge_all(a=right, b=changed(right, "scores", (0, 0, 0, 0), 50.0), c=right)
    pairs = [row for row in judged.rows if row.comparison == "pair"]
    assert {(row.implementation, row.other) for row in pairs} == {("a", "b"), ("a", "c"), ("b", "c")}
    value = float(right["scores"][0, 0, 0, 0])
    differing = [row for row in pairs if row.verdict != Verdict.AGREE]
    assert [(row.implementation, row.other, row.stage, row.index, row.value, row.reference) for row in differing] == [
        ("a", "b", "scores", "0,0,0,0", value, 50.0),
        ("b", "c", "scores", "0,0,0,0", 50.0, value),
    ]
    assert all(row.ratio == pytest.approx((row.difference or 0) / (row.allowed or 1)) for row in differing)


@pytest.mark.parametrize("stage", STAGES)
def test_two_disagree_where_they_differ_by_more_than_both_bounds_together(
    judge_all: Callable[..., Judged], right: Stages, stage: str
) -> None:
    # Moved by nearly a bound to either side, each might be right; a little more, and one of them is wrong.
    truth = judge_all(a=right).truth
    exact, max_error = truth.exact[stage].high, truth.bounds("native")[stage].max_error
    for factor, verdict in ((0.875, Verdict.AGREE), (1.125, Verdict.NUMERIC)):
        sides = {"a": {stage: exact + factor * max_error}, "b": {stage: exact - factor * max_error}}
        (comparison,) = judge_pairs(sides, dict.fromkeys("ab", worst_bounds(truth, "native"))).values()
        assert comparison.verdict is verdict
        assert comparison.ratio == pytest.approx(factor, rel=0.1)
        assert comparison.index is not None
        assert comparison.allowed == 2 * max_error[comparison.index]


def test_stages_that_only_one_of_two_returns_are_no_pair(judge_all: Callable[..., Judged], right: Stages) -> None:
    judged = judge_all(a=right, short={"output": right["output"]})
    assert [row.stage for row in judged.rows if row.comparison == "pair"] == ["output"]
    assert {row.verdict for row in judged.rows} == {Verdict.AGREE}


# Form.


@pytest.mark.parametrize("others", [0, 1, 2])
def test_a_wrong_shape_is_told_by_the_case_itself(judge_all: Callable[..., Judged], right: Stages, others: int) -> None:
    wrong = right | {"weights": right["weights"].swapaxes(-1, -2)}
    judged = judge_all(bad=wrong, **{f"good{number}": right for number in range(others)})
    row = row_of(judged, "bad", "weights")
    assert (row.verdict, row.shape, row.begins_at) == (Verdict.SHAPE, "1x2x4x3", "weights")
    assert row.message == "expected shape 1x2x3x4, got 1x2x4x3"
    assert blamed(judged) == {"bad": [("weights", "shape")]}
    assert len(failing_pairs(judged)) == others
    assert judged.disagrees


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
    assert blamed(judged) == {"bad": [("output", "dtype")]}


def test_whole_numbers_have_the_wrong_dtype_and_raise_nothing(
    judge_all: Callable[..., Judged], right: Stages, dtype: str
) -> None:
    whole = right | {"output": np.ones_like(right["output"], dtype=np.int64)}
    judged = judge_all(a=whole, b=whole)
    assert row_of(judged, "a", "output").message == f"expected {dtype}, got int64"
    assert blamed(judged) == {name: [("output", "dtype")] for name in "ab"}
    assert failing_pairs(judged) == [("a", "b", "output")]


def test_a_nan_is_told_with_its_place(judge_all: Callable[..., Judged], right: Stages, dtype: str) -> None:
    judged = judge_all(a=right, bad=changed(right, "output", (0, 1, 1, 4), np.nan), c=right)
    assert blamed(judged) == {"bad": [("output", "nonfinite")]}
    row = row_of(judged, "bad", "output")
    assert row.index == "0,1,1,4"
    assert row.reference == pytest.approx(float(right["output"][0, 1, 1, 4]), rel=20 * float(np.finfo(dtype).eps))
    assert np.isnan(row.value or 0)
    assert row.message == f"nan where the exact value is {row.reference:.9g}, at 1 of 36 elements"


def test_a_masked_score_that_is_only_very_small_is_told(judge_all: Callable[..., Judged], right: Stages) -> None:
    judged = judge_all(a=right, bad=changed(right, "masked", (0, 0, 0, 3), -1e9), c=right)
    assert blamed(judged)["bad"][0] == ("masked", "nonfinite")
    assert list(blamed(judged)) == ["bad"]
    assert row_of(judged, "bad", "masked").reference == -np.inf


def test_what_has_no_exact_answer_is_unverified_with_the_reason(load_text: LoadText, compute: Compute) -> None:
    text = CASE.replace("{draw: randn, shape: [2, 4, 6]}", "{constant: .nan, shape: [2, 4, 6]}")
    (case,) = load_text(text.replace("    inputs:", "    allow_nonfinite: true\n    inputs:"))
    inputs, stages = compute(case, "float64")
    judged = judge(
        case, "float64", inputs, {"a": Computed(stages), "b": Computed(stages)}, {"a": "native", "b": "native"}
    )
    # Every value is NaN; scores and weights know nothing of values.
    found = {row.stage: row.verdict for row in stage_rows(judged)}
    assert found == {**dict.fromkeys(STAGES, "agree"), "output": "unverified"}
    assert {row.verdict for row in judged.rows if row.comparison == "pair"} == {"agree"}
    output = row_of(judged, "a", "output")
    assert output.message == "there is no exact answer: value holds NaN or an infinity that no mask explains"
    assert (output.unjudged, row_of(judged, "a", "weights").unjudged) == (36, 0)
    assert not judged.disagrees
    assert np.isnan(worst_bounds(judged.truth, "native")["output"]).all()


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
    rows = [row for row in stage_rows(judged) if row.implementation == "flipped"]
    assert {row.begins_at for row in rows} == {"scores"}
    assert [row.introduced_tier for row in rows] == ["within", "proven", "within", "within", "within", "within"]


def test_stages_are_judged_in_the_order_of_the_computation_however_they_are_returned(
    judge_all: Callable[..., Judged], right: Stages
) -> None:
    judged = judge_all(a=dict(reversed(right.items())), b=right)
    assert [row.stage for row in stage_rows(judged)] == STAGES * 2


def test_an_implementation_is_judged_by_the_stages_that_it_returns(
    judge_all: Callable[..., Judged], right: Stages
) -> None:
    judged = judge_all(a=right, short={"output": -right["output"]}, c=right)
    assert blamed(judged) == {"short": [("output", "numeric")]}
    assert [row.stage for row in stage_rows(judged) if row.implementation == "short"] == ["output"]


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


def test_failures_everywhere_leave_one_row_each(judge_all: Callable[..., Judged]) -> None:
    judged = judge_all(a=Failure("timeout", "late"), b=Failure("error", "broken"))
    assert [(row.implementation, row.verdict) for row in judged.rows] == [("a", "timeout"), ("b", "error")]


def test_every_row_names_the_case_the_operation_and_the_dtype(
    judge_all: Callable[..., Judged], right: Stages, case: Case, dtype: str
) -> None:
    judged = judge_all(a=right, b=right, c=Failure("error", "broken"))
    assert {(row.case, row.operation, row.dtype) for row in judged.rows} == {(case.id, "attention", dtype)}
    assert all(row.implementation for row in judged.rows)


@pytest.mark.parametrize("shape", [(1, 1, 4, 7), (3,), (1, 2, 5)])
def test_two_that_return_the_same_wrong_shape_of_a_sampled_stage_are_not_compared(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    wrong = {name: {"scores": rng.normal(size=shape)} for name in ("first", "second")}
    bounds = {name: {"scores": np.ones((1, 1, 2, 7))} for name in wrong}
    (comparison,) = judge_pairs(wrong, bounds, np.array([0, 299])).values()
    assert comparison.verdict is Verdict.UNVERIFIED
