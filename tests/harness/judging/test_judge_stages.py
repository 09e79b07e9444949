"""Where an implementation goes wrong: NumPy's stages with one step replaced, and what follows computed from that.

That NumPy itself passes in every case of the corpus is tested beside the corpus (``tests/cases/test_corpus.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.judging.judge_stages import StageJudgement, in_order, judge_stages, where_it_begins
from attncheck.judging.tiers import Measured, Tier
from attncheck.judging.truth import Truth, find_truth
from attncheck.reading.case import Case
from attncheck.reading.inputs import Inputs
from attncheck.verdicts import Verdict

Array = NDArray[Any]
Stages = dict[str, Array]
Compute = Callable[[Case, str], tuple[Inputs, Stages]]
LoadText = Callable[[str | bytes], list[Case]]

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
DTYPES = (FLOAT32, FLOAT64)


@pytest.fixture(scope="module")
def case(load_text: LoadText) -> Case:
    return load_text(CASE)[0]


@pytest.fixture(scope="module")
def truths(case: Case, compute: Compute) -> dict[str, Truth]:
    return {dtype: truth_of(case, dtype, compute) for dtype in DTYPES}


def truth_of(case: Case, dtype: str, compute: Compute) -> Truth:
    inputs, _ = compute(case, dtype)
    return find_truth(case.operation, case.options, inputs.arrays, dtype, supports_statistics=case.supports_statistics)


Judge = Callable[..., list[StageJudgement]]


@pytest.fixture
def judge(case: Case, truths: dict[str, Truth]) -> Judge:
    """Judge an implementation of which some steps are replaced."""

    def call(dtype: str, *, returned: tuple[str, ...] = tuple(STAGES), **steps: Callable[..., Any]) -> Any:
        stages = computed(truths[dtype].inputs, **steps)
        kept = {stage: stages[stage] for stage in returned}
        return judge_stages(truths[dtype], kept, case.stage_shapes, "native")

    return call


def computed(inputs: Any, **steps: Callable[..., Any]) -> Stages:
    """Attention as it is written in a textbook; a step that is given replaces the one of that name."""
    dtype = inputs["query"].dtype
    scale = np.array(1 / np.sqrt(5), dtype)
    own: dict[str, Callable[..., Any]] = {
        "raw_scores": lambda query, key: query @ np.swapaxes(key, -1, -2),
        "scores": lambda raw: raw * scale,
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


def failing(judgements: list[StageJudgement]) -> dict[str, Verdict]:
    return {found.stage: found.verdict for found in judgements if found.verdict is not Verdict.AGREE}


def of(judgements: list[StageJudgement], stage: str) -> StageJudgement:
    (found,) = [judgement for judgement in judgements if judgement.stage == stage]
    return found


# Right.


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_textbook_is_right_at_every_stage_in_both_comparisons(judge: Judge, dtype: str) -> None:
    judgements = judge(dtype)
    assert [found.stage for found in judgements] == STAGES
    for found in judgements:
        assert (found.verdict, found.message) == (Verdict.AGREE, "")
        assert found.accumulated is not None
        assert found.introduced is not None
        assert 0 < found.accumulated.ratio < 1
        assert found.introduced.ratio < 1
    assert where_it_begins(judgements) == ""


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_element_that_is_named_is_there_with_its_exact_value(
    judge: Judge, truths: dict[str, Truth], dtype: str
) -> None:
    for found in judge(dtype):
        exact = truths[dtype].exact[found.stage]
        value = computed(truths[dtype].inputs)[found.stage][found.index]
        assert (found.value, found.exact) == (float(value), float(exact.high[found.index]))
        assert found.error == abs(float(value) - exact.high[found.index] - exact.low[found.index])
        assert found.bound is not None
        assert found.error <= found.bound


# Wrong in one step.


def test_a_scale_that_is_wrong_by_a_hundred_thousandth_is_named_in_float32(judge: Judge) -> None:
    wrong = np.float32(1 / np.sqrt(5) * (1 + 1e-5))
    judgements = judge(FLOAT32, scores=lambda raw: raw * wrong)
    assert where_it_begins(judgements) == "scores"
    assert of(judgements, "raw_scores").verdict is Verdict.AGREE
    assert of(judgements, "scores").goes_wrong_here
    # What follows is right from the scores that it was given.
    assert not any(of(judgements, stage).goes_wrong_here for stage in STAGES[2:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_rounded_to_bfloat16_are_named(judge: Judge, dtype: str) -> None:
    judgements = judge(dtype, weights=lambda powers: bfloat16(powers / powers.sum(axis=-1, keepdims=True)))
    assert where_it_begins(judgements) == "weights"
    assert failing(judgements) == {"weights": Verdict.NUMERIC, "output": Verdict.NUMERIC}
    assert of(judgements, "weights").goes_wrong_here
    assert not of(judgements, "output").goes_wrong_here


def bfloat16(array: Array) -> Array:
    """Round to eight bits of significand, half of which is lost to nearest."""
    fraction, exponent = np.frexp(array)
    rounded: Array = np.ldexp(np.rint(fraction * 256) / 256, exponent).astype(array.dtype)
    return rounded


@pytest.mark.parametrize(("dtype", "extra"), [(FLOAT64, 1e-6), (FLOAT64, 1e-12), (FLOAT32, 1e-5)])
def test_a_small_number_added_to_the_denominator_is_named(judge: Judge, dtype: str, extra: float) -> None:
    added = np.array(extra, dtype)
    judgements = judge(dtype, weights=lambda powers: powers / (powers.sum(axis=-1, keepdims=True) + added))
    assert where_it_begins(judgements) == "weights"
    assert of(judgements, "log_sum_exp").verdict is Verdict.AGREE


def test_a_millionth_added_to_the_denominator_is_named_in_float32_where_one_weight_is_nearly_all() -> None:
    # Spread over a row that sums to 4 it would be 4 units of roundoff; beside a sum of 1 it is 17.
    scores = np.array([[[[0.0, -30.0, -31.0]]]], np.float32)
    truth = find_truth("softmax", {}, {"scores": scores}, FLOAT32, supports_statistics=False)
    powers = np.exp(scores)
    for extra, verdict in ((0.0, Verdict.AGREE), (1e-6, Verdict.NUMERIC)):
        weights = powers / (powers.sum(axis=-1, keepdims=True) + np.float32(extra))
        (found,) = judge_stages(truth, {"weights": weights}, {"weights": (1, 1, 1, 3)}, "native")
        assert found.verdict is verdict
    assert found.goes_wrong_here


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sign_that_is_swapped_is_blamed_on_the_first_stage_alone(judge: Judge, dtype: str) -> None:
    judgements = judge(dtype, raw_scores=lambda query, key: -(query @ np.swapaxes(key, -1, -2)))
    assert failing(judgements) == dict.fromkeys(STAGES, Verdict.NUMERIC)
    assert where_it_begins(judgements) == "raw_scores"
    # The scores are held against query and key, too; from there on the error is inherited.
    assert [found.stage for found in judgements if found.goes_wrong_here] == ["raw_scores", "scores"]
    for stage in ("masked", "weights", "log_sum_exp", "output"):
        found = of(judgements, stage)
        assert found.introduced is not None
        assert found.introduced.tier is Tier.WITHIN
        assert found.message.endswith("; this step is right, the error comes from before it")
    assert "this step is right" not in of(judgements, "raw_scores").message


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_faults_that_cancel_are_both_found(judge: Judge, dtype: str) -> None:
    # The output is right, but not from the weights that were returned.
    judgements = judge(
        dtype,
        weights=lambda powers: 2 * powers / powers.sum(axis=-1, keepdims=True),
        output=lambda weights, value: (weights / 2) @ value,
    )
    assert failing(judgements) == {"weights": Verdict.NUMERIC, "output": Verdict.NUMERIC}
    found = of(judgements, "output")
    assert found.accumulated is not None
    assert found.introduced is not None
    assert (found.accumulated.tier.fails, found.introduced.tier) == (False, Tier.PROVEN)
    assert found.goes_wrong_here
    assert found.message.endswith("times the largest error that is possible in this step")
    # The exact value that is named is that of the step.
    assert (found.against, of(judgements, "raw_scores").against) == ("step", "exact")
    assert found.exact == pytest.approx(2 * (found.value or 0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_implementation_that_returns_its_output_alone_is_judged_by_that(judge: Judge, dtype: str) -> None:
    assert failing(judge(dtype, returned=("output",))) == {}
    (found,) = judge(dtype, returned=("output",), scores=lambda raw: raw * np.array(0.5, raw.dtype))
    assert (found.verdict, found.goes_wrong_here) == (Verdict.NUMERIC, True)
    assert where_it_begins([found]) == "output"


def test_errors_that_are_too_large_to_be_rounding_fail_on_generic_inputs_alone(case: Case, compute: Compute) -> None:
    # Half the bound at every element: possible, but roundings do not conspire so.
    for supports_statistics, verdict in ((True, Verdict.NUMERIC), (False, Verdict.AGREE)):
        truth = replace(truth_of(case, FLOAT64, compute), supports_statistics=supports_statistics)
        stages = {"output": truth.exact["output"].high + truth.bounds("native")["output"].max_error / 2}
        (found,) = judge_stages(truth, stages, case.stage_shapes, "native")
        assert found.verdict is verdict
        assert found.accumulated is not None
        assert found.accumulated.ratio == pytest.approx(0.5, rel=0.05)
    truth = replace(truth, supports_statistics=True)
    (found,) = judge_stages(truth, stages, case.stage_shapes, "native")
    assert found.message.startswith("errors too large to be rounding")


@pytest.mark.parametrize(("z", "noisy"), [(0.25, False), (0.75, True)])
def test_noise_agrees_and_is_told(z: float, noisy: bool) -> None:
    # 30 rows and columns: enough for a warning where the root mean square is above 0.6.
    scores = np.random.default_rng(5).standard_normal((1, 1, 30, 30))
    truth = find_truth("softmax", {}, {"scores": scores}, FLOAT64, supports_statistics=True)
    weights = truth.exact["weights"].high + z * truth.bounds("native")["weights"].sigma
    (found,) = judge_stages(truth, {"weights": weights}, {"weights": scores.shape}, "native")
    assert (found.verdict, found.is_noisy) == (Verdict.AGREE, noisy)
    assert found.accumulated is not None
    assert found.accumulated.mean_z == pytest.approx(z, rel=0.2)


@pytest.mark.parametrize("stage", ["biased", "masked"])
def test_a_bias_is_added_in_one_rounding_of_which_nothing_is_said_by_statistics(stage: str) -> None:
    # 1 + b with b just below half a unit is 1, at each of 900 places: the largest error that one rounding makes.
    unit = 2.0**-53
    inputs = {
        "scores": np.ones((1, 1, 30, 30)),
        "bias": np.linspace(0.9, 0.99, 900).reshape(1, 1, 30, 30) * unit,
        "mask": np.ones((1, 1, 30, 30), np.bool_),
    }
    truth = find_truth("masking", {}, inputs, FLOAT64, supports_statistics=True)
    stages = {stage: inputs["scores"] + inputs["bias"]}
    (found,) = judge_stages(truth, stages, {stage: (1, 1, 30, 30)}, "native")
    assert found.accumulated is not None
    assert found.accumulated.mean_z > 0.9
    assert found.accumulated.tier is Tier.WITHIN
    assert found.accumulated == found.introduced
    assert not found.is_noisy
    stages[stage][0, 0, 7, 1] += 2 * unit
    (found,) = judge_stages(truth, stages, {stage: (1, 1, 30, 30)}, "native")
    assert (found.verdict, found.index) == (Verdict.NUMERIC, (0, 0, 7, 1))


# Form, NaN and infinity.


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wrong_shape_is_told_and_the_stage_after_it_is_not_judged_from_it(judge: Judge, dtype: str) -> None:
    judgements = judge(
        dtype, weights=lambda powers: np.swapaxes(powers, -1, -2), output=lambda weights, value: weights[..., :6] * 0
    )
    found = of(judgements, "weights")
    assert (found.verdict, found.message) == (Verdict.SHAPE, "expected shape 1x2x7x9, got 1x2x9x7")
    assert found.accumulated is found.introduced is None
    assert where_it_begins(judgements) == "weights"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wrong_dtype_is_told_though_the_values_are_right(judge: Judge, dtype: str) -> None:
    other = FLOAT64 if dtype == FLOAT32 else FLOAT32
    judgements = judge(dtype, log_sum_exp=lambda highest, powers: log_sum_exp(highest, powers).astype(other))
    assert failing(judgements) == {"log_sum_exp": Verdict.DTYPE}
    assert of(judgements, "log_sum_exp").message == f"expected {dtype}, got {other}"


def log_sum_exp(highest: Array, powers: Array) -> Array:
    result: Array = (highest + np.log(powers.sum(axis=-1, keepdims=True)))[..., 0]
    return result


def placed(array: Array, index: tuple[int, ...], value: float) -> Array:
    array = array.copy()
    array[index] = value
    return array


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_where_the_exact_value_is_is_told_with_its_place(
    judge: Judge, dtype: str, value: float
) -> None:
    judgements = judge(dtype, output=lambda weights, v: placed(weights @ v, (0, 1, 3, 2), value))
    assert failing(judgements) == {"output": Verdict.NONFINITE}
    found = of(judgements, "output")
    assert (found.index, found.goes_wrong_here) == ((0, 1, 3, 2), True)
    assert found.message.startswith(f"{value:g} where the exact value is ")
    assert found.message.endswith(", at 1 of 84 elements")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [-1e9, np.nan, np.inf, 0.0])
def test_what_is_not_minus_infinity_where_the_mask_forbids_is_told(judge: Judge, dtype: str, value: float) -> None:
    judgements = judge(dtype, masked=lambda scores: placed(scores, (..., 0), value))
    found = of(judgements, "masked")
    assert (found.verdict, found.index, found.exact) == (Verdict.NONFINITE, (0, 0, 0, 0), -np.inf)
    assert found.message == f"{value:g} where the exact value is -inf, at 14 of 126 elements"
    assert where_it_begins(judgements) == "masked"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_key_that_is_masked_and_should_not_be_is_told(judge: Judge, dtype: str) -> None:
    judgements = judge(dtype, masked=lambda scores: placed(placed(scores, (..., 0), -np.inf), (..., 3, 4), -np.inf))
    found = of(judgements, "masked")
    assert (found.verdict, found.index, found.value) == (Verdict.NONFINITE, (0, 0, 3, 4), -np.inf)
    assert where_it_begins(judgements) == "masked"
    assert not of(judgements, "weights").goes_wrong_here


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_that_is_handed_on_is_blamed_on_the_stage_where_it_appears(judge: Judge, dtype: str) -> None:
    judgements = judge(dtype, scores=lambda raw: placed(raw * np.array(1 / np.sqrt(5), dtype), (0, 0, 2, 5), np.nan))
    assert failing(judgements) == dict.fromkeys(STAGES[1:], Verdict.NONFINITE)
    assert where_it_begins(judgements) == "scores"


# What cannot be judged.


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_an_exact_answer_are_counted_and_forms_are_judged_all_the_same(
    load_text: LoadText, compute: Compute, dtype: str
) -> None:
    text = CASE.replace(
        "query: {draw: randn, shape: [2, 7, 5]}", "query: {values: [[[.inf, 1, 1, 1, 1]], [[1, 1, 1, 1, 1]]]}"
    ).replace("    inputs:", "    allow_nonfinite: true\n    inputs:")
    (case,) = load_text(text)
    truth, (_, stages) = truth_of(case, dtype, compute), compute(case, dtype)
    judgements = judge_stages(truth, stages, case.stage_shapes, "native")
    assert failing(judgements) == {}
    assert [found.unjudged * 2 for found in judgements] == [stages[found.stage].size for found in judgements]
    assert {found.message.partition(": ")[2] for found in judgements} == {
        "query holds NaN or an infinity that no mask explains"
    }
    assert where_it_begins(judgements) == ""
    wrong = stages | {"weights": stages["weights"][..., 1:], "output": stages["output"].astype(np.float16)}
    judgements = judge_stages(truth, wrong, case.stage_shapes, "native")
    assert (of(judgements, "weights").verdict, of(judgements, "output").verdict) == (Verdict.SHAPE, Verdict.DTYPE)
    assert where_it_begins(judgements) == "weights"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_stage_of_a_name_of_its_own_is_unverified(case: Case, truths: dict[str, Truth], dtype: str) -> None:
    stages = computed(truths[dtype].inputs)
    judgements = judge_stages(truths[dtype], {"mine": stages["output"], **stages}, case.stage_shapes, "native")
    assert judgements[-1].stage == "mine"
    assert failing(judgements) == {"mine": Verdict.UNVERIFIED}
    assert judgements[-1].message == "no exact answer is known for a stage of this name: mine"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [-np.inf, np.nan, -1e300])
def test_nothing_is_asked_of_an_element_beyond_the_range_of_float64(
    load_text: LoadText, compute: Compute, dtype: str, value: float
) -> None:
    # The exact score, about -1e600 in float64 and -1e76 in float32, is no number of the dtype.
    largest = {"float32": "3e38", "float64": "1e308"}[dtype]
    text = f"""
title: Scores that overflow
source: {{kind: derivation, title: none}}
operation: scoring
cases:
  - name: The score of one of two heads overflows
    dtypes: [{dtype}]
    inputs:
      query: {{values: [[[{largest}, 1]], [[1, 2]]]}}
      key: {{values: [[[-{largest}, 0]], [[1, 1]]]}}
    options: {{scale: 1}}
"""
    (case,) = load_text(text)
    truth = truth_of(case, dtype, compute)
    with np.errstate(over="ignore"):
        right, wrong = (np.array([[[[value]], [[second]]]]).astype(dtype) for second in (3.0, 3.5))
    assert failing(judge_stages(truth, {"scores": right}, case.stage_shapes, "native")) == {}
    (found,) = judge_stages(truth, {"scores": wrong}, case.stage_shapes, "native")
    assert (found.verdict, found.index) == (Verdict.NUMERIC, (0, 1, 0, 0))


# Order.


def test_stages_are_judged_in_the_order_of_the_computation_and_names_of_their_own_come_last() -> None:
    names = ["own", *reversed(STAGES)]
    assert in_order({name: np.zeros(1) for name in names}) == [*STAGES, "own"]


def test_the_first_stage_is_named_where_every_step_is_right_but_their_errors_add_up() -> None:
    within, fails = Tier.WITHIN, Tier.STATISTICAL
    judgements = [
        StageJudgement("scores", Verdict.AGREE, measured(within), measured(within)),
        StageJudgement("weights", Verdict.NUMERIC, measured(fails), measured(within)),
        StageJudgement("output", Verdict.NUMERIC, measured(fails), measured(within)),
    ]
    assert where_it_begins(judgements) == "weights"
    judgements[2] = StageJudgement("output", Verdict.NUMERIC, measured(fails), measured(fails))
    assert where_it_begins(judgements) == "output"


def measured(tier: Tier) -> Measured:
    return Measured(tier, 0.5, (0,), 1.0, 0.5, 1)
