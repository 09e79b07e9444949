"""Where an implementation goes wrong, and who gets blamed: NumPy's stages with one step replaced, or a number changed.

Each implementation is compared with the exact answer by itself; what the others say is told in pairs. That NumPy itself
is right in every case of the corpus is what ``attncheck check`` says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from problems import Array, Problem
from tables import tables_beside

from attncheck.execution.worker import Computed, Failure, Outcome
from attncheck.judging.compare import ErrorTier, MeasuredErrors
from attncheck.judging.judge import CaseJudgement, compare_all_pairs, judge_case, max_errors_of_whole_stages
from attncheck.judging.judge_stages import (
    ERROR_ACCUMULATES,
    ERROR_FROM_EARLIER_STAGE,
    ERROR_WITHOUT_STEP,
    StageJudgement,
    describe_wrong_ranges,
    explain_first_faulty_stage,
    first_faulty_stage,
    judge_stages,
    sort_stages,
)
from attncheck.judging.truth import Truth, find_truth
from attncheck.reading.case import Case
from attncheck.reading.inputs import RoundedInputs, make_problem_of_case
from attncheck.results.format import Row
from attncheck.spec.verdicts import Verdict

Stages = dict[str, Array]
Compute = Callable[[Case, str], tuple[RoundedInputs, Stages]]
LoadText = Callable[[str | bytes], list[Case]]
JudgeAll = Callable[..., CaseJudgement]

CASE = tables_beside(__file__)["case files"]["seven words"]
STAGES = ["raw_scores", "scores", "masked", "weights", "log_sum_exp", "output"]
AGREE, NUMERIC, NONFINITE = Verdict.AGREE, Verdict.NUMERIC, Verdict.NONFINITE


@pytest.fixture(scope="module")
def case(load_text: LoadText) -> Case:
    return load_text(CASE)[0]


@pytest.fixture(params=["float32", "float64"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def truth(case: Case, dtype: str, compute: Compute) -> Truth:
    inputs, _ = compute(case, dtype)
    return find_truth(make_problem_of_case(case, inputs))


@pytest.fixture
def right(case: Case, dtype: str, compute: Compute) -> Stages:
    return compute(case, dtype)[1]


@pytest.fixture
def judge_all(case: Case, dtype: str, compute: Compute) -> JudgeAll:
    """Judge outcomes by name; stages stand for themselves."""

    def call(**outcomes: Stages | Outcome) -> CaseJudgement:
        inputs, _ = compute(case, dtype)
        made = {name: Computed(own) if isinstance(own, dict) else own for name, own in outcomes.items()}
        return judge_case(case, dtype, inputs, made, dict.fromkeys(made, "native"))

    return call


def computed(inputs: Any, **steps: Callable[..., Any]) -> Stages:
    """Compute attention as it is written in a textbook; a step that is given replaces the one of that name."""
    dtype = inputs["query"].dtype
    own: dict[str, Callable[..., Any]] = {
        "raw_scores": lambda query, key: query @ np.swapaxes(key, -1, -2),
        "scores": lambda raw: raw * np.array(1 / np.sqrt(5), dtype),
        "masked": lambda scores: np.where(inputs["mask"], scores, np.array(-np.inf, dtype)),
        "weights": lambda powers: powers / powers.sum(axis=-1, keepdims=True),
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


def placed(array: Array, index: tuple[Any, ...], value: float) -> Array:
    array = array.copy()
    array[index] = value
    return array


def changed(stages: Stages, stage: str, index: tuple[int, ...], value: float) -> Stages:
    return stages | {stage: placed(stages[stage], index, value)}


def stage_rows(judged: CaseJudgement, implementation: str) -> dict[str, Row]:
    rows = [row for row in judged.rows if row.comparison == "stage" and row.implementation == implementation]
    return {row.stage: row for row in rows}


def blamed(judged: CaseJudgement) -> dict[str, dict[str, str]]:
    """Return the stages that are not right, and what is said of them, by implementation."""
    found: dict[str, dict[str, str]] = {}
    for row in judged.rows:
        if row.comparison == "stage" and row.verdict != AGREE:
            found.setdefault(row.implementation, {})[row.stage] = str(row.verdict)
    return found


def failing_pairs(judged: CaseJudgement) -> list[tuple[str, str | None, str, str | None]]:
    rows = [row for row in judged.rows if row.comparison == "pair" and row.verdict != AGREE]
    return [(row.implementation, row.other, row.stage, row.index) for row in rows]


def test_norms_come_before_rotations_or_after_them_and_own_names_last() -> None:
    stages = ["rotated_query", "normalized_query", "mine", "scores", "rotated_key", "normalized_key"]
    norms, rotations = ["normalized_query", "normalized_key"], ["rotated_query", "rotated_key"]
    assert sort_stages(stages) == [*norms, *rotations, "scores", "mine"]
    assert sort_stages(stages, {"norm_after_rotation": True}) == [*rotations, *norms, "scores", "mine"]


# Wrong in one step.

HERE = (0, 0, 2, 5)
FAULTS: Mapping[str, tuple[dict[str, Callable[..., Any]], dict[str, Verdict], set[str], dict[str, str]]] = {
    "a swapped sign": (
        {"raw_scores": lambda query, key: -(query @ np.swapaxes(key, -1, -2))},
        dict.fromkeys(STAGES, NUMERIC),
        {"raw_scores", "scores"},  # the scores are compared with query and key, too
        dict.fromkeys(
            ("masked", "weights", "log_sum_exp", "output"), "; this step is right, the error comes from before it"
        ),
    ),
    "two faults that cancel": (  # the output is right, but not from the weights that were returned
        {
            "weights": lambda powers: 2 * powers / powers.sum(axis=-1, keepdims=True),
            "output": lambda weights, value: (weights / 2) @ value,
        },
        {"weights": NUMERIC, "output": NUMERIC},
        {"weights", "output"},
        {"output": "times the largest error that is possible in this step"},
    ),
    **{
        f"{value} where the mask forbids": (
            {"masked": lambda scores, value=value: placed(scores, (..., 0), value)},
            {"masked": NONFINITE},
            {"masked"},
            {"masked": f"{value:g} where the exact value is -inf, at 14 of 126 elements"},
        )
        for value in (-1e9, np.nan, np.inf, 0.0)
    },
    "a NaN that is handed on": (
        {"scores": lambda raw: placed(raw * raw.dtype.type(1 / np.sqrt(5)), HERE, np.nan)},
        dict.fromkeys(STAGES[1:], NONFINITE),
        {"scores"},
        {"scores": ", at 1 of 126 elements"},
    ),
}
"""What is computed instead, verdicts of stages, the stages that go wrong themselves, and how messages end."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_blamed_on_the_stage_where_it_is(fault: str, truth: Truth, case: Case) -> None:
    steps, verdicts, own, ends = FAULTS[fault]
    stages = computed(truth.judged_problem.canonical.inputs, **steps)
    judgements = judge_stages(truth, {"mine": stages["output"], **stages}, case.stage_shapes, "native")
    *found, last = judgements
    assert [each.stage for each in found] == STAGES
    assert verdicts.items() <= {each.stage: each.verdict for each in found if each.verdict is not AGREE}.items()
    assert first_faulty_stage(judgements) == next(stage for stage in STAGES if stage in own)
    for each in found:
        assert each.is_at_fault == (each.stage in own) or each.verdict is NONFINITE
        if each.stage in ends:
            assert each.message.endswith(ends[each.stage])
    assert (last.verdict, last.message) == (
        Verdict.UNVERIFIED,
        "no exact answer is known for a stage of this name: mine",
    )


def test_the_first_stage_is_named_where_every_step_is_right_but_their_errors_add_up() -> None:
    within, fails = (MeasuredErrors(tier, 0.5, (0,), 1.0, 0.5, 1) for tier in (ErrorTier.WITHIN, ErrorTier.STATISTICAL))
    for introduced, begins_at in ((within, "weights"), (fails, "output")):
        judgements = [
            StageJudgement("scores", AGREE, within, within),
            StageJudgement("weights", NUMERIC, fails, within, message=ERROR_FROM_EARLIER_STAGE),
            StageJudgement("output", NUMERIC, fails, introduced),
        ]
        assert first_faulty_stage(judgements) == begins_at
        assert explain_first_faulty_stage(judgements)[1].message == (
            ERROR_ACCUMULATES if begins_at == "weights" else ERROR_FROM_EARLIER_STAGE
        )


def test_an_error_many_times_its_bound_is_no_sum_of_roundings() -> None:
    within, proven = (
        MeasuredErrors(tier, ratio, (0,), 1.0, 0.5, 1)
        for tier, ratio in ((ErrorTier.WITHIN, 0.5), (ErrorTier.PROVEN, 5.0))
    )
    wrong = StageJudgement("output", NUMERIC, proven, within, message=ERROR_FROM_EARLIER_STAGE)
    assert explain_first_faulty_stage([wrong])[0].message == ERROR_WITHOUT_STEP


def test_a_wrong_row_that_does_not_follow_from_the_scores_is_the_fault_of_its_own_stage() -> None:
    inputs = {
        "query": np.ones((1, 1, 2, 2)),
        "key": np.ones((1, 1, 3, 2)),
        "value": np.arange(6.0).reshape(1, 1, 3, 2),
        "mask": np.array([[[[True] * 3, [False] * 3]]]),
    }
    truth = Problem("attention", {"empty_rows": "uniform"}, inputs).truth()
    masked, output = (truth.exact[stage].high for stage in ("masked", "output"))
    wrong = placed(output, (0, 0, 1, slice(None)), 7.0)
    shapes = {"masked": masked.shape, "output": output.shape}
    for stages in ({"output": wrong}, {"masked": masked, "output": wrong}):
        *_, found = judge_stages(truth, stages, shapes, "native")
        assert found.is_at_fault
        assert found.message.endswith("all 2 wrong elements are in query row 1 of 2 (counted from 0)")


def test_the_message_of_a_wrong_shape_names_two_swapped_axes() -> None:
    shape, expected = (2, 3, 4, 5), "expected shape 2x3x4x5, got "
    truth = Problem("attention", {}, {name: np.ones(shape) for name in ("query", "key", "value")}).truth()
    for returned, end in {
        (2, 4, 3, 5): "2x4x3x5: heads and query rows are swapped",
        (2, 3, 5, 4): "2x3x5x4: query rows and columns are swapped",
        (2, 4, 5, 3): "2x4x5x3",
        (2, 3, 4): "2x3x4",
    }.items():
        [found] = judge_stages(truth, {"output": np.ones(returned)}, {"output": shape}, "native")
        assert (found.verdict, found.message) == (Verdict.SHAPE, expected + end)


def test_a_textbook_is_right_and_errors_too_large_to_be_rounding_fail_on_generic_inputs_alone(
    truth: Truth, case: Case
) -> None:
    stages = computed(truth.judged_problem.canonical.inputs)
    for found in judge_stages(truth, stages, case.stage_shapes, "native"):
        exact, value = truth.exact[found.stage], float(stages[found.stage][found.index])
        assert (found.verdict, found.message, found.value) == (AGREE, "", value)
        assert found.exact == float(exact.high[found.index])
        assert found.error == abs(value - exact.high[found.index] - exact.low[found.index])
        assert found.error <= found.bound
    # Half the bound at every element: possible, but roundings do not conspire so.
    off = truth.exact["output"].high + truth.bounds.bounds_by_stage("native")["output"].max_error / 2
    for supports_statistics, verdict in ((False, AGREE), (True, NUMERIC)):
        generic = replace(truth, supports_statistics=supports_statistics)
        (found,) = judge_stages(generic, {"output": off.astype(truth.bounds.dtype)}, case.stage_shapes, "native")
        assert found.verdict is verdict
        assert found.accumulated.ratio == pytest.approx(0.5, rel=0.1)
    assert found.message.startswith("errors too large to be rounding")


def test_noise_agrees_and_is_told_but_not_of_a_bias_that_is_added_in_one_rounding() -> None:
    shape = (1, 1, 30, 30)  # enough for a warning where the root mean square is above 0.6
    scores = np.random.default_rng(5).standard_normal(shape)
    truth = Problem("softmax", {}, {"scores": scores}).truth()
    for z, noisy in ((0.25, False), (0.75, True)):
        weights = truth.exact["weights"].high + z * truth.bounds.bounds_by_stage("native")["weights"].sigma
        (found,) = judge_stages(truth, {"weights": weights}, {"weights": shape}, "native")
        assert (found.verdict, found.is_noisy) == (AGREE, noisy)
        assert found.accumulated.mean_z == pytest.approx(z, rel=0.2)
    # 1 + b with b just below half a unit is 1, at each of 900 places: the largest error that one rounding makes.
    bias = np.linspace(0.9, 0.99, 900).reshape(shape) * 2.0**-53
    truth = Problem("masking", {}, {"scores": np.ones(shape), "mask": np.ones(shape, np.bool_), "bias": bias}).truth()
    for stage in ("biased", "masked"):
        for by, verdict, index in ((0.0, AGREE, None), (2.0**-52, NUMERIC, (0, 0, 7, 1))):
            stages = {stage: placed(1.0 + bias, (0, 0, 7, 1), 1 + by)}
            (found,) = judge_stages(truth, stages, {stage: shape}, "native")
            assert (found.verdict, found.is_noisy, found.accumulated.mean_z > 0.9) == (verdict, False, True)
            assert found.index == index or verdict is AGREE


# Who is blamed.


def test_only_those_that_are_wrong_are_blamed_whatever_the_majority_says(judge_all: JudgeAll, right: Stages) -> None:
    wrong = changed(right, "output", (0, 0, 1, 2), 7.5)
    for names in (["bad"], ["bad", "good"], ["good0", "bad", "good1"], ["bad0", "bad1", "bad2", "good"]):
        judged = judge_all(**{name: wrong if name.startswith("bad") else right for name in names})
        bad = [name for name in names if name.startswith("bad")]
        assert blamed(judged) == {name: {"output": "numeric"} for name in bad}
        assert judged.has_disagreement
        assert len(failing_pairs(judged)) == len(bad) * (len(names) - len(bad))


def test_a_row_says_which_element_what_was_computed_and_what_is_exact(
    judge_all: JudgeAll, right: Stages, dtype: str
) -> None:
    row = stage_rows(judge_all(bad=changed(right, "output", (0, 1, 2, 3), 9.0)), "bad")["output"]
    honest, eps = float(right["output"][0, 1, 2, 3]), float(np.finfo(dtype).eps)
    # Within a few units of its last place, NumPy's own number is the exact one.
    assert row.reference == pytest.approx(honest, rel=20 * eps)
    assert (row.index, row.value, row.other, row.shape) == ("0,1,2,3", 9.0, None, "1x2x7x6")
    assert row.difference == pytest.approx(9 - honest)
    assert 0 < row.allowed < 100 * eps
    assert row.introduced_ratio == pytest.approx(row.difference / row.allowed)
    assert (row.tier, row.introduced_tier, row.begins_at, row.elements) == ("proven", "proven", "output", 84)
    where = f"; at [0, 1, 2, 3] computed 9, exact {row.reference:.4g}, off by "
    assert f" times the largest error that is possible in this step{where}" in row.message


def test_two_disagree_where_they_differ_by_more_than_both_bounds_together(truth: Truth) -> None:
    # Moved by nearly a bound to either side, each might be right; a little more, and one of them is wrong.
    for stage in STAGES:
        exact, max_error = truth.exact[stage].high, truth.bounds.bounds_by_stage("native")[stage].max_error
        for factor, verdict in ((0.875, AGREE), (1.125, NUMERIC)):
            sides = {"a": {stage: exact + factor * max_error}, "b": {stage: exact - factor * max_error}}
            (comparison,) = compare_all_pairs(
                sides, dict.fromkeys("ab", max_errors_of_whole_stages(truth, "native"))
            ).values()
            assert comparison.verdict is verdict
            assert comparison.ratio == pytest.approx(factor, rel=0.15)
            assert comparison.allowed == 2 * max_error[comparison.index]


def test_two_that_return_the_same_wrong_shape_of_a_sampled_stage_are_not_compared() -> None:
    for shape in ((1, 1, 4, 7), (3,), (1, 2, 5)):
        wrong = {name: {"scores": np.full(shape, number)} for name, number in (("first", 1.0), ("second", 2.0))}
        bounds = {name: {"scores": np.ones((1, 1, 2, 7))} for name in wrong}
        (comparison,) = compare_all_pairs(wrong, bounds, np.array([0, 299])).values()
        assert comparison.verdict is Verdict.UNVERIFIED


# Form, and failures.


def test_a_wrong_shape_or_dtype_is_told_by_the_case_itself(judge_all: JudgeAll, right: Stages, dtype: str) -> None:
    another = "float64" if dtype == "float32" else "float32"
    turned, other = right["weights"].swapaxes(-1, -2), right["output"].astype(another)
    whole = np.ones_like(right["output"], dtype=np.int64)  # raises nothing
    for stage, array, verdict, message in (
        ("weights", turned, "shape", "expected shape 1x2x7x9, got 1x2x9x7: query rows and keys are swapped"),
        ("output", other, "dtype", f"expected {dtype}, got {another}"),
        ("output", whole, "dtype", f"expected {dtype}, got int64"),
    ):
        wrong = right | {stage: array}
        for names in (("bad",), ("bad", "good0", "good1"), ("bad", "bad1")):
            judged = judge_all(**{name: right if name.startswith("good") else wrong for name in names})
            assert blamed(judged) == {name: {stage: verdict} for name in names if name.startswith("bad")}
            row = stage_rows(judged, "bad")[stage]
            assert (row.message, row.begins_at, judged.has_disagreement) == (message, stage, True)
            assert row.shape == "x".join(map(str, array.shape))
            assert len(failing_pairs(judged)) == names.count("good0") + names.count("good1") + (
                "bad1" in names and array is whole
            )


@pytest.mark.parametrize("verdict", ["error", "crash", "timeout", "unsupported"])
def test_a_failure_is_a_row_and_the_others_are_still_judged(
    judge_all: JudgeAll, right: Stages, case: Case, dtype: str, verdict: str
) -> None:
    judged = judge_all(a=right, broken=Failure(verdict, "what it said"), c=right)
    (row,) = [row for row in judged.rows if row.implementation == "broken"]
    assert (row.comparison, row.stage, row.verdict, row.message) == ("stage", "", verdict, "what it said")
    assert list(stage_rows(judged, "a")) == STAGES
    assert {row.verdict for row in judged.rows if row.implementation != "broken"} == {AGREE}
    assert {(row.case, row.operation, row.dtype) for row in judged.rows} == {(case.id, "attention", dtype)}
    # What cannot be expressed is no disagreement; the rest is.
    assert judged.has_disagreement == (verdict != "unsupported")
    judged = judge_all(a=Failure("timeout", "late"), b=Failure(verdict, "broken"))
    assert [(row.implementation, row.verdict) for row in judged.rows] == [("a", "timeout"), ("b", verdict)]


@pytest.mark.parametrize(
    ("stage", "shape", "places", "says"),
    [
        ("output", (2, 3, 19, 4), np.s_[..., 16:, :], "query rows 16 to 18 of 19"),
        ("weights", (1, 2, 5, 19), np.s_[..., 16:], "keys 16 to 18 of 19"),
        ("output", (1, 3, 5, 4), (0, 2), "head 2 of 3"),
        ("output", (2, 3, 5, 4), (1, 2), "batch entry 1 of 2, head 2 of 3"),
        ("grad_key", (1, 1, 6, 4), np.s_[0, 0, 0:3], "keys 0 to 2 of 6"),
        ("output", (2, 5, 8), np.s_[:, :, 4:8], "columns 4 to 7 of 8"),
        ("log_sum_exp", (1, 2, 5), np.s_[0, :, 3:5], "query rows 3 to 4 of 5"),
        ("output", (2, 3, 5, 4), (0, 0, 0, 0), ""),
        ("output", (2, 3, 5, 4), (...,), ""),
        ("output", (1, 1, 5, 4), (..., [0, 2, 4], slice(None)), ""),
    ],
)
def test_where_wrong_elements_are_is_said_if_they_are_a_range(
    stage: str, shape: tuple[int, ...], places: tuple[Any, ...], says: str
) -> None:
    flags = np.zeros(shape, dtype=bool)
    flags[places] = True
    of_range = f"all {flags.sum()} wrong elements are in {says} (counted from 0)"
    assert describe_wrong_ranges(stage, flags) == (of_range if says else "")
