"""Where an implementation goes wrong, and who gets blamed: NumPy's stages with one step replaced, or a number changed.

Each implementation is compared with the exact answer by itself; what the others say is told in pairs. That NumPy itself
is right in every case of the corpus is what ``attncheck check`` says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.execution.worker import Computed, Failure, Outcome
from attncheck.judging.compare import Measured, Tier
from attncheck.judging.judge import CaseJudgement, judge, judge_pairs, worst_bounds
from attncheck.judging.judge_stages import StageJudgement, in_order, judge_stages, where_it_begins, where_wrong
from attncheck.judging.truth import Truth, find_truth
from attncheck.reading.case import Case
from attncheck.reading.inputs import Inputs
from attncheck.reading.lowering import Problem
from attncheck.results.format import Row
from attncheck.verdicts import Verdict

Array = NDArray[Any]
Stages = dict[str, Array]
Compute = Callable[[Case, str], tuple[Inputs, Stages]]
LoadText = Callable[[str | bytes], list[Case]]
JudgeAll = Callable[..., CaseJudgement]

CASE = """
title: A case to be judged
source: {kind: derivation, title: none}
operation: attention
defaults:
  random: {generator: numpy-legacy, seed: 3}
cases:
  - name: Seven words attend to nine
    inputs:
      query: {draw: randn, shape: [2, 7, 5]}
      key: {draw: randn, shape: [2, 9, 5]}
      value: {draw: randn, shape: [2, 9, 6]}
      mask:
        values: [[false, true, true, true, true, true, true, true, true]]
"""
STAGES = ["raw_scores", "scores", "masked", "weights", "log_sum_exp", "output"]
FLOAT32, FLOAT64 = "float32", "float64"
AGREE, NUMERIC, NONFINITE = Verdict.AGREE, Verdict.NUMERIC, Verdict.NONFINITE


@pytest.fixture(scope="module")
def case(load_text: LoadText) -> Case:
    return load_text(CASE)[0]


@pytest.fixture(params=[FLOAT32, FLOAT64])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def truth_of(case: Case, dtype: str, compute: Compute) -> Truth:
    inputs, _ = compute(case, dtype)
    return find_truth(case.problem(inputs.arrays), dtype, supports_statistics=case.supports_statistics)


@pytest.fixture
def truth(case: Case, dtype: str, compute: Compute) -> Truth:
    return truth_of(case, dtype, compute)


@pytest.fixture
def right(case: Case, dtype: str, compute: Compute) -> Stages:
    return compute(case, dtype)[1]


Judge = Callable[..., list[StageJudgement]]


@pytest.fixture
def judged(case: Case, truth: Truth) -> Judge:
    """Judge an implementation of which some steps are replaced."""

    def call(*, returned: tuple[str, ...] = tuple(STAGES), **steps: Callable[..., Any]) -> list[StageJudgement]:
        stages = computed(truth.inputs, **steps)
        return judge_stages(truth, {stage: stages[stage] for stage in returned}, case.stage_shapes, "native")

    return call


@pytest.fixture
def judge_all(case: Case, dtype: str, compute: Compute) -> JudgeAll:
    """Judge outcomes by name; stages stand for themselves."""

    def call(**outcomes: Stages | Outcome) -> CaseJudgement:
        inputs, _ = compute(case, dtype)
        made = {name: Computed(own) if isinstance(own, dict) else own for name, own in outcomes.items()}
        return judge(case, dtype, inputs, made, dict.fromkeys(made, "native"))

    return call


def computed(inputs: Any, **steps: Callable[..., Any]) -> Stages:
    """Compute attention as it is written in a textbook; a step that is given replaces the one of that name."""
    dtype = inputs["query"].dtype
    scale = np.array(1 / np.sqrt(5), dtype)
    own: dict[str, Callable[..., Any]] = {
        "raw_scores": lambda query, key: query @ np.swapaxes(key, -1, -2),
        "scores": lambda raw: raw * scale,
        "masked": lambda scores: np.where(inputs["mask"], scores, np.array(-np.inf, dtype)),
        "weights": normalised,
        "log_sum_exp": lambda highest, powers: (highest + np.log(powers.sum(axis=-1, keepdims=True)))[..., 0],
        "output": lambda weights, value: weights @ value,
    }
    own |= steps
    stages: Stages = {"raw_scores": own["raw_scores"](inputs["query"], inputs["key"])}
    stages["scores"] = own["scores"](stages["raw_scores"])
    stages["masked"] = own["masked"](stages["scores"])
    highest = stages["masked"].max(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        powers = np.exp(stages["masked"] - highest)
    stages["weights"] = own["weights"](powers)
    stages["log_sum_exp"] = own["log_sum_exp"](highest, powers)
    stages["output"] = own["output"](stages["weights"], inputs["value"])
    return stages


def normalised(powers: Array, extra: float = 0.0) -> Array:
    return np.asarray(powers / (powers.sum(axis=-1, keepdims=True) + powers.dtype.type(extra)))


def placed(array: Array, index: tuple[Any, ...], value: float) -> Array:
    array = array.copy()
    array[index] = value
    return array


def changed(stages: Stages, stage: str, index: tuple[int, ...], value: float) -> Stages:
    return stages | {stage: placed(stages[stage], index, value)}


def failing(judgements: list[StageJudgement]) -> dict[str, Verdict]:
    return {found.stage: found.verdict for found in judgements if found.verdict is not AGREE}


def of(judgements: list[StageJudgement], stage: str) -> StageJudgement:
    (found,) = [judgement for judgement in judgements if judgement.stage == stage]
    return found


def stage_rows(judged: CaseJudgement, implementation: str = "") -> list[Row]:
    rows = [row for row in judged.rows if row.comparison == "stage"]
    return [row for row in rows if not implementation or row.implementation == implementation]


def blamed(judged: CaseJudgement) -> dict[str, dict[str, str]]:
    """Return the stages that are not right, and what is said of them, by implementation."""
    found: dict[str, dict[str, str]] = {}
    for row in stage_rows(judged):
        if row.verdict != AGREE:
            found.setdefault(row.implementation, {})[row.stage] = str(row.verdict)
    return found


def row_of(judged: CaseJudgement, implementation: str, stage: str) -> Row:
    (row,) = [row for row in stage_rows(judged, implementation) if row.stage == stage]
    return row


def failing_pairs(judged: CaseJudgement) -> list[tuple[str, str | None, str]]:
    rows = [row for row in judged.rows if row.comparison == "pair" and row.verdict != AGREE]
    return [(row.implementation, row.other, row.stage) for row in rows]


# Right.


def test_a_textbook_is_right_at_every_stage_and_the_element_that_is_named_is_there(judged: Judge, truth: Truth) -> None:
    judgements, stages = judged(), computed(truth.inputs)
    assert [found.stage for found in judgements] == STAGES
    assert where_it_begins(judgements) == ""
    for found in judgements:
        assert (found.verdict, found.message) == (AGREE, "")
        assert found.accumulated is not None
        assert found.introduced is not None
        assert 0 < found.accumulated.ratio < 1
        assert found.introduced.ratio < 1
        exact, value = truth.exact[found.stage], float(stages[found.stage][found.index])
        assert (found.value, found.exact) == (value, float(exact.high[found.index]))
        assert found.error == abs(value - exact.high[found.index] - exact.low[found.index])
        assert found.bound is not None
        assert found.error <= found.bound


def test_norms_come_before_rotations_or_after_them_as_the_case_has_it() -> None:
    stages = ["rotated_query", "normalized_query", "scores", "rotated_key", "normalized_key"]
    norms, rotations = ["normalized_query", "normalized_key"], ["rotated_query", "rotated_key"]
    assert in_order(stages) == [*norms, *rotations, "scores"]
    assert in_order(stages, {"norm_after_rotation": True}) == [*rotations, *norms, "scores"]


def test_names_of_their_own_come_last_and_are_unverified(case: Case, truth: Truth) -> None:
    assert in_order({name: np.zeros(1) for name in ["own", *reversed(STAGES)]}) == [*STAGES, "own"]
    stages = computed(truth.inputs)
    judgements = judge_stages(truth, {"mine": stages["output"], **stages}, case.stage_shapes, "native")
    assert failing(judgements) == {"mine": Verdict.UNVERIFIED}
    assert judgements[-1].message == "no exact answer is known for a stage of this name: mine"


# Wrong in one step.


def test_a_sign_that_is_swapped_is_blamed_on_the_first_stage_alone(judged: Judge) -> None:
    judgements = judged(raw_scores=lambda query, key: -(query @ np.swapaxes(key, -1, -2)))
    assert failing(judgements) == dict.fromkeys(STAGES, NUMERIC)
    assert where_it_begins(judgements) == "raw_scores"
    # The scores are compared with query and key, too; from there on the error is inherited.
    assert [found.stage for found in judgements if found.goes_wrong_here] == ["raw_scores", "scores"]
    for stage in ("masked", "weights", "log_sum_exp", "output"):
        found = of(judgements, stage)
        assert found.introduced is not None
        assert found.introduced.tier is Tier.WITHIN
        assert found.message.endswith("; this step is right, the error comes from before it")
    assert "this step is right" not in of(judgements, "raw_scores").message


def test_two_faults_that_cancel_are_both_found(judged: Judge) -> None:
    # The output is right, but not from the weights that were returned.
    judgements = judged(
        weights=lambda powers: 2 * normalised(powers), output=lambda weights, value: (weights / 2) @ value
    )
    assert failing(judgements) == {"weights": NUMERIC, "output": NUMERIC}
    found = of(judgements, "output")
    assert found.accumulated is not None
    assert found.introduced is not None
    assert (found.accumulated.tier.fails, found.introduced.tier) == (False, Tier.PROVEN)
    assert found.goes_wrong_here
    assert found.message.endswith("times the largest error that is possible in this step")
    # The exact value that is named is that of the step.
    assert (found.against, of(judgements, "raw_scores").against) == ("step", "exact")
    assert found.exact == pytest.approx(2 * (found.value or 0))


def test_errors_that_are_too_large_to_be_rounding_fail_on_generic_inputs_alone(case: Case, compute: Compute) -> None:
    # Half the bound at every element: possible, but roundings do not conspire so.
    for supports_statistics, verdict in ((False, AGREE), (True, NUMERIC)):
        truth = replace(truth_of(case, FLOAT64, compute), supports_statistics=supports_statistics)
        stages = {"output": truth.exact["output"].high + truth.bounds("native")["output"].max_error / 2}
        (found,) = judge_stages(truth, stages, case.stage_shapes, "native")
        assert found.verdict is verdict
        assert found.accumulated is not None
        assert found.accumulated.ratio == pytest.approx(0.5, rel=0.05)
    assert found.message.startswith("errors too large to be rounding")


@pytest.mark.parametrize(("z", "noisy"), [(0.25, False), (0.75, True)])
def test_noise_agrees_and_is_told(z: float, noisy: bool) -> None:
    # 30 rows and columns: enough for a warning where the root mean square is above 0.6.
    scores = np.random.default_rng(5).standard_normal((1, 1, 30, 30))
    truth = find_truth(Problem("softmax", {}, {"scores": scores}), FLOAT64, supports_statistics=True)
    weights = truth.exact["weights"].high + z * truth.bounds("native")["weights"].sigma
    (found,) = judge_stages(truth, {"weights": weights}, {"weights": scores.shape}, "native")
    assert (found.verdict, found.is_noisy) == (AGREE, noisy)
    assert found.accumulated is not None
    assert found.accumulated.mean_z == pytest.approx(z, rel=0.2)


@pytest.mark.parametrize("stage", ["biased", "masked"])
def test_a_bias_is_added_in_one_rounding_of_which_nothing_is_said_by_statistics(stage: str) -> None:
    # 1 + b with b just below half a unit is 1, at each of 900 places: the largest error that one rounding makes.
    unit, shape = 2.0**-53, (1, 1, 30, 30)
    inputs = {"scores": np.ones(shape), "mask": np.ones(shape, np.bool_)}
    inputs["bias"] = np.linspace(0.9, 0.99, 900).reshape(shape) * unit
    truth = find_truth(Problem("masking", {}, inputs), FLOAT64, supports_statistics=True)
    stages = {stage: inputs["scores"] + inputs["bias"]}
    (found,) = judge_stages(truth, stages, {stage: shape}, "native")
    assert found.accumulated is not None
    assert found.accumulated.mean_z > 0.9
    assert found.accumulated.tier is Tier.WITHIN
    assert found.accumulated == found.introduced
    assert not found.is_noisy
    stages[stage][0, 0, 7, 1] += 2 * unit
    (found,) = judge_stages(truth, stages, {stage: shape}, "native")
    assert (found.verdict, found.index) == (NUMERIC, (0, 0, 7, 1))


def test_the_first_stage_is_named_where_every_step_is_right_but_their_errors_add_up() -> None:
    within, fails = (Measured(tier, 0.5, (0,), 1.0, 0.5, 1) for tier in (Tier.WITHIN, Tier.STATISTICAL))
    judgements = [
        StageJudgement("scores", AGREE, within, within),
        StageJudgement("weights", NUMERIC, fails, within),
        StageJudgement("output", NUMERIC, fails, within),
    ]
    assert where_it_begins(judgements) == "weights"
    judgements[2] = StageJudgement("output", NUMERIC, fails, fails)
    assert where_it_begins(judgements) == "output"


# NaN and infinity.


def test_what_is_not_finite_where_the_exact_value_is_is_told_with_its_place(judged: Judge) -> None:
    for value in (np.nan, np.inf, -np.inf):
        judgements = judged(output=lambda weights, v, value=value: placed(weights @ v, (0, 1, 3, 2), value))
        assert failing(judgements) == {"output": NONFINITE}
        found = of(judgements, "output")
        assert (found.index, found.goes_wrong_here) == ((0, 1, 3, 2), True)
        assert found.message.startswith(f"{value:g} where the exact value is ")
        assert found.message.endswith(", at 1 of 84 elements")


def test_what_is_not_minus_infinity_where_the_mask_forbids_or_is_where_it_does_not_is_told(judged: Judge) -> None:
    for value in (-1e9, np.nan, np.inf, 0.0):
        judgements = judged(masked=lambda scores, value=value: placed(scores, (..., 0), value))
        found = of(judgements, "masked")
        assert (found.verdict, found.index, found.exact) == (NONFINITE, (0, 0, 0, 0), -np.inf)
        assert found.message == f"{value:g} where the exact value is -inf, at 14 of 126 elements"
        assert where_it_begins(judgements) == "masked"
    judgements = judged(masked=lambda scores: placed(placed(scores, (..., 0), -np.inf), (..., 3, 4), -np.inf))
    found = of(judgements, "masked")
    assert (found.verdict, found.index, found.value) == (NONFINITE, (0, 0, 3, 4), -np.inf)
    assert where_it_begins(judgements) == "masked"
    assert not of(judgements, "weights").goes_wrong_here


def test_a_nan_that_is_handed_on_is_blamed_on_the_stage_where_it_appears(judged: Judge) -> None:
    judgements = judged(scores=lambda raw: placed(raw * raw.dtype.type(1 / np.sqrt(5)), (0, 0, 2, 5), np.nan))
    assert failing(judgements) == dict.fromkeys(STAGES[1:], NONFINITE)
    assert where_it_begins(judgements) == "scores"


# Who is blamed.


def test_only_those_that_are_wrong_are_blamed_whatever_the_majority_says(judge_all: JudgeAll, right: Stages) -> None:
    wrong = changed(right, "output", (0, 0, 1, 2), 7.5)
    for names in (["bad"], ["bad", "good"], ["good0", "bad", "good1"], ["bad0", "bad1", "bad2", "good"]):
        judged = judge_all(**{name: wrong if name.startswith("bad") else right for name in names})
        bad = [name for name in names if name.startswith("bad")]
        assert blamed(judged) == {name: {"output": "numeric"} for name in bad}
        assert judged.disagrees
        assert len(failing_pairs(judged)) == len(bad) * (len(names) - len(bad))


def test_a_row_says_which_element_what_was_computed_and_what_is_exact(
    judge_all: JudgeAll, right: Stages, dtype: str
) -> None:
    row = row_of(judge_all(bad=changed(right, "output", (0, 1, 2, 3), 9.0)), "bad", "output")
    honest, eps = float(right["output"][0, 1, 2, 3]), float(np.finfo(dtype).eps)
    # Within a few units of its last place, NumPy's own number is the exact one.
    assert row.reference == pytest.approx(honest, rel=20 * eps)
    assert (row.index, row.value, row.other, row.shape) == ("0,1,2,3", 9.0, None, "1x2x7x6")
    assert row.difference == pytest.approx(9 - honest)
    assert row.allowed is not None
    assert 0 < row.allowed < 100 * eps
    assert row.introduced_ratio == pytest.approx(row.difference / row.allowed)
    assert (row.tier, row.introduced_tier, row.begins_at, row.elements) == ("proven", "proven", "output", 84)
    where = f"; at [0, 1, 2, 3] computed 9, exact {row.reference:.4g}, off by "
    assert f" times the largest error that is possible in this step{where}" in row.message


# By each other.


def test_the_pair_that_differs_is_a_row_of_its_own(judge_all: JudgeAll, right: Stages) -> None:
    judged = judge_all(a=right, b=changed(right, "scores", (0, 0, 0, 1), 50.0), c=right)
    pairs = [row for row in judged.rows if row.comparison == "pair"]
    assert {(row.implementation, row.other) for row in pairs} == {("a", "b"), ("a", "c"), ("b", "c")}
    value = float(right["scores"][0, 0, 0, 1])
    differing = [row for row in pairs if row.verdict != AGREE]
    assert [(row.implementation, row.other, row.stage, row.index, row.value, row.reference) for row in differing] == [
        ("a", "b", "scores", "0,0,0,1", value, 50.0),
        ("b", "c", "scores", "0,0,0,1", 50.0, value),
    ]
    assert all(row.ratio == pytest.approx((row.difference or 0) / (row.allowed or 1)) for row in differing)


def test_two_disagree_where_they_differ_by_more_than_both_bounds_together(truth: Truth) -> None:
    # Moved by nearly a bound to either side, each might be right; a little more, and one of them is wrong.
    for stage in STAGES:
        exact, max_error = truth.exact[stage].high, truth.bounds("native")[stage].max_error
        for factor, verdict in ((0.875, AGREE), (1.125, NUMERIC)):
            sides = {"a": {stage: exact + factor * max_error}, "b": {stage: exact - factor * max_error}}
            (comparison,) = judge_pairs(sides, dict.fromkeys("ab", worst_bounds(truth, "native"))).values()
            assert comparison.verdict is verdict
            assert comparison.ratio == pytest.approx(factor, rel=0.15)
            assert comparison.index is not None
            assert comparison.allowed == 2 * max_error[comparison.index]


def test_stages_that_only_one_of_two_returns_are_no_pair(judge_all: JudgeAll, right: Stages) -> None:
    judged = judge_all(a=right, short={"output": -right["output"]})
    assert [row.stage for row in judged.rows if row.comparison == "pair"] == ["output"]
    assert blamed(judged) == {"short": {"output": "numeric"}}
    assert [row.stage for row in stage_rows(judged, "short")] == ["output"]


@pytest.mark.parametrize("shape", [(1, 1, 4, 7), (3,), (1, 2, 5)])
def test_two_that_return_the_same_wrong_shape_of_a_sampled_stage_are_not_compared(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    wrong = {name: {"scores": rng.normal(size=shape)} for name in ("first", "second")}
    bounds = {name: {"scores": np.ones((1, 1, 2, 7))} for name in wrong}
    (comparison,) = judge_pairs(wrong, bounds, np.array([0, 299])).values()
    assert comparison.verdict is Verdict.UNVERIFIED


# Form, and failures.


def test_a_wrong_shape_or_dtype_is_told_by_the_case_itself(judge_all: JudgeAll, right: Stages, dtype: str) -> None:
    another = FLOAT64 if dtype == FLOAT32 else FLOAT32
    turned = right["weights"].swapaxes(-1, -2)
    for others in (0, 2):
        good = {f"good{number}": right for number in range(others)}
        judged = judge_all(bad=right | {"weights": turned}, **good)
        row = row_of(judged, "bad", "weights")
        assert (row.verdict, row.shape, row.begins_at) == (Verdict.SHAPE, "1x2x9x7", "weights")
        assert row.message == "expected shape 1x2x7x9, got 1x2x9x7"
        assert blamed(judged) == {"bad": {"weights": "shape"}}
        assert len(failing_pairs(judged)) == others
        assert judged.disagrees
        judged = judge_all(bad=right | {"output": right["output"].astype(another)}, **good)
        assert row_of(judged, "bad", "output").message == f"expected {dtype}, got {another}"
        assert blamed(judged) == {"bad": {"output": "dtype"}}
    whole = right | {"output": np.ones_like(right["output"], dtype=np.int64)}  # raises nothing
    judged = judge_all(a=whole, b=whole)
    assert row_of(judged, "a", "output").message == f"expected {dtype}, got int64"
    assert blamed(judged) == {name: {"output": "dtype"} for name in "ab"}
    assert failing_pairs(judged) == [("a", "b", "output")]


@pytest.mark.parametrize("verdict", ["error", "crash", "timeout", "unsupported"])
def test_a_failure_is_a_row_and_the_others_are_still_judged(
    judge_all: JudgeAll, right: Stages, case: Case, dtype: str, verdict: str
) -> None:
    judged = judge_all(a=right, broken=Failure(verdict, "what it said"), c=right)
    (row,) = [row for row in judged.rows if row.implementation == "broken"]
    assert (row.comparison, row.stage, row.verdict, row.message) == ("stage", "", verdict, "what it said")
    assert [row.stage for row in stage_rows(judged, "a")] == STAGES
    assert {row.verdict for row in judged.rows if row.implementation != "broken"} == {AGREE}
    assert {(row.case, row.operation, row.dtype) for row in judged.rows} == {(case.id, "attention", dtype)}
    # What cannot be expressed is no disagreement; the rest is.
    assert judged.disagrees == (verdict != "unsupported")
    judged = judge_all(a=Failure("timeout", "late"), b=Failure(verdict, "broken"))
    assert [(row.implementation, row.verdict) for row in judged.rows] == [("a", "timeout"), ("b", verdict)]


# Where wrong elements are.


def wrong(shape: tuple[int, ...], *places: tuple[int | slice, ...]) -> Array:
    flags = np.zeros(shape, dtype=bool)
    for place in places:
        flags[place] = True
    return flags


@pytest.mark.parametrize(
    ("stage", "flags", "says"),
    [
        ("output", wrong((2, 3, 19, 4), (..., slice(16, None), slice(None))), "query rows 16 to 18 of 19"),
        ("weights", wrong((1, 2, 5, 19), (..., slice(16, None))), "keys 16 to 18 of 19"),
        ("output", wrong((1, 3, 5, 4), (0, 2)), "head 2 of 3"),
        ("output", wrong((2, 3, 5, 4), (1, 2)), "batch entry 1 of 2, head 2 of 3"),
        ("grad_key", wrong((1, 1, 6, 4), (0, 0, slice(0, 3))), "keys 0 to 2 of 6"),
        ("output", wrong((2, 5, 8), (slice(None), slice(None), slice(4, 8))), "columns 4 to 7 of 8"),
        ("log_sum_exp", wrong((1, 2, 5), (0, slice(None), slice(3, 5))), "query rows 3 to 4 of 5"),
    ],
)
def test_a_range_is_said(stage: str, flags: Array, says: str) -> None:
    assert where_wrong(stage, flags) == f"all {flags.sum()} wrong elements are in {says} (counted from 0)"


def test_a_single_element_everything_and_no_range_are_not() -> None:
    assert where_wrong("output", wrong((2, 3, 5, 4), (0, 0, 0, 0))) == ""
    assert where_wrong("output", wrong((2, 3, 5, 4), (...,))) == ""
    assert where_wrong("output", wrong((1, 1, 5, 4), (..., [0, 2, 4], slice(None)))) == ""
