"""A log_sum_exp in float32 beside outputs of 16 bits: accepted, by a bound for float32; everything else as it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.attention.rounding import rounding_model_named
from attncheck.judging.judge import judge_pairs
from attncheck.judging.judge_implementation import judge_and_diagnose
from attncheck.judging.truth import Truth, find_truth
from attncheck.mutation.judgement import RememberingTruth
from attncheck.reading.case import Case
from attncheck.repro.expected import expected_stages
from attncheck.verdicts import Verdict

Array = NDArray[Any]
SHAPE = (1, 2, 9, 11)
SHAPES = {"output": (1, 2, 9, 4), "log_sum_exp": (1, 2, 9), "weights": SHAPE}
NARROW = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
MODELS = ("fused", "fused_lse", "fused_fp8", "eager", "eager_pre")
CASE = """
title: A case to be judged
source: {kind: derivation, title: none}
operation: attention
cases:
  - name: Two queries attend to one key
    dtypes: [bfloat16]
    inputs:
      query: {values: [[1], [2]]}
      key: {values: [[3]]}
      value: {values: [[4]]}
"""


def truth_in(dtype: str, stored: Any) -> Truth:
    random = np.random.default_rng(5)
    shapes = {"query": (1, 2, 9, 4), "key": (1, 2, 11, 4), "value": (1, 2, 11, 4)}
    inputs = {name: random.normal(size=shape).astype(stored) for name, shape in shapes.items()}
    inputs["query"] = (3 * inputs["query"].astype(np.float64)).astype(stored)
    return find_truth("attention", {}, inputs, dtype, supports_statistics=True)


@pytest.fixture(params=NARROW)
def truth(request: pytest.FixtureRequest) -> Truth:
    return truth_in(request.param, NARROW[request.param])


def right(truth: Truth, **other: Any) -> dict[str, Array]:
    """Return exact stages, rounded once to the dtype of the case, or to another."""
    narrow = NARROW.get(truth.dtype, np.dtype(truth.dtype))
    return {stage: truth.exact[stage].high.astype(other.get(stage, narrow)) for stage in SHAPES}


def verdicts(truth: Truth, stages: Mapping[str, Array], model: str) -> dict[str, Verdict]:
    return {each.stage: each.verdict for each in judge_and_diagnose(truth, stages, SHAPES, model).judgements}


@pytest.mark.parametrize("model", MODELS)
def test_a_log_sum_exp_may_be_float32(truth: Truth, model: str) -> None:
    assert set(verdicts(truth, right(truth), model).values()) == {Verdict.AGREE}
    assert set(verdicts(truth, right(truth, log_sum_exp=np.float32), model).values()) == {Verdict.AGREE}


@pytest.mark.parametrize("model", MODELS)
def test_only_the_bound_of_the_log_sum_exp_is_another(truth: Truth, model: str) -> None:
    wide, narrow = truth.with_wide_statistics().bounds(model), truth.bounds(model)
    assert (wide["log_sum_exp"].max_error < narrow["log_sum_exp"].max_error).all()
    for stage in ("scores", "weights", "output"):
        np.testing.assert_array_equal(wide[stage].max_error, narrow[stage].max_error)
        np.testing.assert_array_equal(wide[stage].sigma, narrow[stage].sigma)


def test_a_fused_kernel_is_held_to_the_accuracy_of_float32(truth: Truth) -> None:
    bound = truth.with_wide_statistics().bounds("fused")["log_sum_exp"]
    assert (bound.max_error < 100 * 2.0**-24 * (1 + np.abs(truth.exact["log_sum_exp"].high))).all()


def test_what_was_stored_in_16_bits_and_widened_is_wrong(truth: Truth) -> None:
    stages = right(truth)
    stages["log_sum_exp"] = stages["log_sum_exp"].astype(np.float32)
    found = verdicts(truth, stages, "fused")
    assert found.pop("log_sum_exp") is Verdict.NUMERIC
    assert set(found.values()) == {Verdict.AGREE}


@pytest.mark.parametrize(
    ("stage", "dtype"), [("weights", "float32"), ("output", "float32"), ("log_sum_exp", "float64")]
)
def test_nothing_else_may_be_wide(truth: Truth, stage: str, dtype: str) -> None:
    found = judge_and_diagnose(truth, right(truth, **{stage: dtype}), SHAPES, "fused").judgements
    [wrong] = [each for each in found if each.verdict is not Verdict.AGREE]
    assert (wrong.stage, wrong.verdict) == (stage, Verdict.DTYPE)
    expected = f"{truth.dtype} or float32" if stage == "log_sum_exp" else truth.dtype
    assert wrong.message == f"expected {expected}, got {dtype}"


def test_beside_wider_inputs_a_log_sum_exp_has_their_dtype() -> None:
    truth = truth_in("float64", np.float64)
    assert verdicts(truth, right(truth, log_sum_exp=np.float32), "native")["log_sum_exp"] is Verdict.DTYPE


def test_in_float16_it_has_the_range_of_float32() -> None:
    inputs = {name: np.full((1, 1, 2, 1), 300, np.float16) for name in ("query", "key", "value")}
    truth = find_truth("attention", {}, inputs, "float16", supports_statistics=False)
    stages = {"log_sum_exp": truth.exact["log_sum_exp"].high.astype(np.float32)}
    [judged] = judge_and_diagnose(truth, stages, {"log_sum_exp": (1, 1, 2)}, "fused").judgements
    assert (judged.verdict, judged.unjudged) == (Verdict.AGREE, 0)
    stages = {"log_sum_exp": stages["log_sum_exp"] * np.float32(1.001)}
    [judged] = judge_and_diagnose(truth, stages, {"log_sum_exp": (1, 1, 2)}, "fused").judgements
    assert judged.verdict is Verdict.NUMERIC


def test_a_wide_and_a_narrow_one_are_compared_by_their_numbers(truth: Truth) -> None:
    bounds = {
        "narrow": {"log_sum_exp": truth.bounds("fused")["log_sum_exp"].max_error},
        "wide": {"log_sum_exp": truth.with_wide_statistics().bounds("fused")["log_sum_exp"].max_error},
    }
    narrow, wide = right(truth), right(truth, log_sum_exp=np.float32)
    pairs = judge_pairs({"narrow": narrow, "wide": wide}, bounds)
    assert pairs["narrow", "wide", "log_sum_exp"].verdict is Verdict.AGREE
    wide["log_sum_exp"] = wide["log_sum_exp"] + np.float32(1)
    pairs = judge_pairs({"wide": wide, "narrow": narrow}, bounds)
    assert pairs["wide", "narrow", "log_sum_exp"].verdict is Verdict.NUMERIC
    assert judge_pairs({"wide": right(truth, output=np.float32), "narrow": narrow}, {"wide": {}, "narrow": {}})[
        "wide", "narrow", "output"
    ].verdict is (Verdict.DTYPE)


def test_what_remembers_keeps_both_apart(truth: Truth) -> None:
    remembering = RememberingTruth.of(truth)
    late = right(truth)
    late["log_sum_exp"] = late["log_sum_exp"].astype(np.float32)
    for stages, is_right in ((right(truth), True), (late, False), (right(truth, log_sum_exp=np.float32), True)) * 2:
        own = remembering.for_returned(stages)
        assert isinstance(own, RememberingTruth)
        found = {each.stage: each.verdict for each in own.judgements(stages, SHAPES, "fused")}
        assert (found["log_sum_exp"] is Verdict.AGREE) == is_right


def test_scripts_expect_the_dtype_that_was_returned(load_text: Callable[[str], list[Case]]) -> None:
    [case] = load_text(CASE)
    inputs = {name: np.full(shape, 2, ml_dtypes.bfloat16) for name, shape in case.input_shapes.items()}
    truth = find_truth("attention", {}, inputs, "bfloat16", supports_statistics=False)
    stages = {"log_sum_exp": truth.exact["log_sum_exp"].high.astype(np.float32)}
    judged = judge_and_diagnose(truth, stages, case.stage_shapes, "fused")
    assert expected_stages(case, truth, "fused", judged.judgements)["log_sum_exp"].dtype == "float32"
    assert not expected_stages(case, truth, "fused", [])["log_sum_exp"].dtype


def test_a_class_that_is_not_wide_is_what_it_was() -> None:
    rounding = rounding_model_named("fused", "bfloat16")
    assert rounding.of_statistics is rounding
