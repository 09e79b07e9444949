"""What is true of one case: worked out once, in its own dtype, and silent where there is nothing to know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.attention.enclosure import Enclosure
from attncheck.attention.oracle import PrecisionExhausted
from attncheck.judging import truth as module
from attncheck.judging.judge import judge_pairs
from attncheck.judging.judge_implementation import judge_and_diagnose
from attncheck.judging.truth import Truth, find_truth, within_range
from attncheck.mutation.judgement import RememberingTruth
from attncheck.reading.case import Case
from attncheck.reading.lowering import Problem
from attncheck.repro.code import expected_stages
from attncheck.verdicts import Verdict

Array = NDArray[Any]
QUERY, KEY = [[[[1.5, -2.25]]]], [[[[3.0, 0.1], [0.2, 0.3]]]]
SCALE = 0.5
DTYPES = ("float32", "float64")


@pytest.fixture(params=DTYPES)
def scoring(request: pytest.FixtureRequest) -> Truth:
    inputs = {"query": np.array(QUERY, request.param), "key": np.array(KEY, request.param)}
    return find_truth(Problem("scoring", {"scale": SCALE}, inputs), request.param, supports_statistics=True)


def products(truth: Truth) -> list[Fraction]:
    """Return the dot products of one query with every key, exactly."""
    query, keys = truth.inputs["query"][0, 0, 0], truth.inputs["key"][0, 0]
    query, keys = ([Fraction(float(x)) for x in row] for row in (query, keys.ravel()))
    return [sum((a * b for a, b in zip(query, row, strict=True)), Fraction(0)) for row in (keys[:2], keys[2:])]


def assert_encloses(enclosure: Enclosure, exact: list[Fraction]) -> None:
    parts = (enclosure.high.ravel(), enclosure.low.ravel(), enclosure.radius.ravel())
    for high, low, radius, number in zip(*parts, exact, strict=True):
        assert abs(Fraction(float(high)) + Fraction(float(low)) - number) <= Fraction(float(radius))
        assert radius <= abs(high) * 2.0**-67  # judging keeps no more


def test_exact_stages_are_those_of_the_numbers_as_stored_and_bounds_are_worked_out_once(
    scoring: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = products(scoring)
    assert list(scoring.exact) == ["raw_scores", "scores"]
    assert (scoring.outside, scoring.supports_statistics) == ("", True)
    for stage, factor in (("raw_scores", Fraction(1)), ("scores", Fraction(SCALE))):
        assert_encloses(scoring.exact[stage], [number * factor for number in exact])
        # The scores are compared with query and key: a scale may be applied to these before their product.
        step = scoring.introduced(stage, {"raw_scores": np.zeros((1, 1, 1, 2), scoring.dtype)}, "native")
        assert step is not None
        assert_encloses(step[0], [number * factor for number in exact])
    bounds = scoring.bounds("native")
    for bound in bounds.values():
        assert bound.max_error.shape == (1, 1, 1, 2)
        assert (bound.max_error > 0).all()
        assert (bound.sigma <= bound.max_error).all()
    for name in ("accumulated_bounds", "bounds_of"):
        monkeypatch.setattr(module, name, lambda *arguments: pytest.fail("asked for again"))
    assert scoring.bounds("native") is bounds
    with pytest.raises(ValueError, match="there is no rounding model fused in"):
        scoring.bounds("fused")


def test_what_no_precision_settles_what_is_too_large_and_what_nobody_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*arguments: object, **options: object) -> None:
        raise PrecisionExhausted("softmax: weights not settled")

    inputs = {name: np.ones((1, 1, 3, 2)) for name in ("query", "key", "value", "grad_output")}
    problem: Any = (Problem("attention_gradients", {}, inputs), "float64")
    monkeypatch.setattr(module, "MAX_WHOLE", 9)
    assert find_truth(*problem, supports_statistics=True).exact
    monkeypatch.setattr(module, "MAX_WHOLE", 8)
    truth = find_truth(*problem, supports_statistics=True)
    assert truth.outside == "attention_gradients has 9 scores; at most 8 are judged where every row counts"
    assert not truth.exact
    monkeypatch.setattr(module, "exact_stages", exhausted)
    truth = find_truth(Problem("softmax", {}, {"scores": np.ones((1, 1, 1, 2))}), "float64", supports_statistics=True)
    assert (truth.exact, truth.outside) == ({}, "softmax: weights not settled")
    monkeypatch.setattr(module, "exact_stages", pytest.fail)
    truth = find_truth(*problem, supports_statistics=True, returned=())
    assert (truth.exact, truth.bounds("native")) == ({}, {})


# The range of a dtype.


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_largest_number_of_the_dtype_is_judged_and_nothing_larger(dtype: str) -> None:
    largest, zero = float(np.finfo(dtype).max), np.zeros(6)
    with np.errstate(over="ignore"):
        high = np.array([largest, -largest, np.nextafter(largest, np.inf), 0.0, -np.inf, np.inf])
    judged = within_range(Enclosure(high, zero, np.where(high == np.inf, np.inf, 0.0)), np.zeros(6, dtype))
    assert judged.tolist() == [True, True, False, True, False, False]
    if dtype != "float16":  # a score of the square of it leaves the rest to be judged
        arrays = {"query": np.array([[[[largest, 1]]]], dtype), "key": np.array([[[[-largest, 0], [0, 1]]]], dtype)}
        truth = find_truth(Problem("scoring", {"scale": 1.0}, arrays), dtype, supports_statistics=False)
        judged = within_range(truth.exact["scores"], np.zeros((1, 1, 1, 2), dtype))
        assert judged.ravel().tolist() == [False, True]


# Scores that float16 cannot hold before they are scaled: a matter of the rounding model.

OVERFLOWING = 1e-4
RNG = np.random.default_rng(6)


def overflowing(operation: str = "attention", dtype: str = "float16", **more: Array) -> Truth:
    """Return the truth of 2 heads, 3 queries and 4 keys, of which one query of one head has raw scores of 8e4."""
    query, key = (RNG.uniform(1, 2, size=(1, 2, length, 4)) for length in (3, 4))
    query[0, 0, 1] *= 100
    inputs = {"query": query, "key": key * 100, "value": RNG.normal(size=(1, 2, 4, 5)), **more}
    stored = {name: array.astype(dtype) for name, array in inputs.items()}
    return find_truth(Problem(operation, {"scale": OVERFLOWING}, stored), dtype, supports_statistics=True)


def has_bound(truth: Truth, stage: str, model: str) -> NDArray[np.bool_]:
    return np.isfinite(truth.bounds(model)[stage].max_error)


def test_the_row_behind_such_a_score_has_no_bound_where_scores_are_stored() -> None:
    truth = overflowing()
    for stage in ("scores", "weights", "log_sum_exp", "output"):
        for model in ("eager", "eager_pre", "eager_lse"):
            found = has_bound(truth, stage, model)
            assert not found[0, 0, 1].any()
            assert found[0, 0, [0, 2]].all()
            assert found[0, 1].all()
        if stage != "scores":
            assert all(has_bound(truth, stage, model).all() for model in ("fused", "fused_bwd", "fused_lse"))
    wide = overflowing(dtype="float32")
    assert all(has_bound(wide, stage, "native").all() for stage in wide.exact)
    # Nor does it have one against its own steps.
    output = truth.exact["output"].high.astype("float16")
    output[0, 0, 1] = np.nan
    step = truth.introduced("output", {"output": output}, "eager")
    assert step is not None
    assert np.isinf(step[1].max_error[0, 0, 1]).all()
    assert np.isfinite(step[1].max_error[0, 0, 0]).all()


def test_sums_over_queries_have_no_bound_in_that_head_alone() -> None:
    more = {"grad_output": RNG.normal(size=(1, 2, 3, 5)), "bias": RNG.normal(size=(1, 2, 1, 4))}
    truth = overflowing("attention_gradients", **more)
    for stage in ("grad_key", "grad_value", "grad_bias"):
        found = has_bound(truth, stage, "eager")
        assert not found[0, 0].any()
        assert found[0, 1].all()
    assert has_bound(truth, "grad_query", "eager")[0, 0].tolist() == [[True] * 4, [False] * 4, [True] * 4]
    assert has_bound(truth, "grad_key", "fused").all()


@pytest.mark.parametrize("is_projected", [True, False])
def test_an_output_projection_has_every_head_in_it(is_projected: bool) -> None:
    names = ("query_weight", "key_weight", "value_weight", *(("output_weight",) if is_projected else ()))
    query, key = RNG.uniform(1, 2, size=(1, 3, 8)), RNG.uniform(100, 200, size=(1, 4, 8))
    query[0, 2, :4] *= 100
    inputs = {"query": query, "key": key, "value": RNG.normal(size=(1, 4, 8))} | {name: np.eye(8) for name in names}
    stored = {name: array.astype("float16") for name, array in inputs.items()}
    options = {"heads": 2, "scale": OVERFLOWING}
    truth = find_truth(Problem("multi_head_attention", options, stored), "float16", supports_statistics=True)
    found = has_bound(truth, "output", "eager")
    assert found[0, :2].all()
    assert found[0, 2].tolist() == ([False] * 8 if is_projected else [False] * 4 + [True] * 4)


# A log_sum_exp in float32 beside outputs of 16 bits: accepted, by a bound for float32; everything else as it was.

SHAPES = {"output": (1, 2, 9, 4), "log_sum_exp": (1, 2, 9), "weights": (1, 2, 9, 11)}
NARROW = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
MODELS = ("fused", "fused_lse", "fused_fp8", "eager", "eager_pre")


def truth_in(dtype: str) -> Truth:
    random, stored = np.random.default_rng(5), NARROW.get(dtype, dtype)
    shapes = {"query": (1, 2, 9, 4), "key": (1, 2, 11, 4), "value": (1, 2, 11, 4)}
    inputs = {name: random.normal(size=shape).astype(stored) for name, shape in shapes.items()}
    inputs["query"] = (3 * inputs["query"].astype(np.float64)).astype(stored)
    return find_truth(Problem("attention", {}, inputs), dtype, supports_statistics=True)


@pytest.fixture(params=NARROW)
def truth(request: pytest.FixtureRequest) -> Truth:
    return truth_in(request.param)


def right(truth: Truth, **other: Any) -> dict[str, Array]:
    """Return exact stages, rounded once to the dtype of the case, or to another."""
    narrow = NARROW.get(truth.dtype, np.dtype(truth.dtype))
    return {stage: truth.exact[stage].high.astype(other.get(stage, narrow)) for stage in SHAPES}


def verdicts(truth: Truth, stages: Mapping[str, Array], model: str = "fused") -> dict[str, Verdict]:
    return {each.stage: each.verdict for each in judge_and_diagnose(truth, stages, SHAPES, model).judgements}


def test_a_log_sum_exp_may_be_float32_and_only_its_bound_is_another(truth: Truth) -> None:
    for model in MODELS:
        assert set(verdicts(truth, right(truth), model).values()) == {Verdict.AGREE}
        assert set(verdicts(truth, right(truth, log_sum_exp=np.float32), model).values()) == {Verdict.AGREE}
        wide, narrow = truth.with_wide_statistics().bounds(model), truth.bounds(model)
        assert (wide["log_sum_exp"].max_error < narrow["log_sum_exp"].max_error).all()
        for stage in ("scores", "weights", "output"):
            np.testing.assert_array_equal(wide[stage].max_error, narrow[stage].max_error)
            np.testing.assert_array_equal(wide[stage].sigma, narrow[stage].sigma)
    bound = truth.with_wide_statistics().bounds("fused")["log_sum_exp"]
    assert (bound.max_error < 100 * 2.0**-24 * (1 + np.abs(truth.exact["log_sum_exp"].high))).all()


def test_what_was_stored_in_16_bits_and_widened_is_wrong_and_what_remembers_keeps_both_apart(truth: Truth) -> None:
    late = right(truth)
    late["log_sum_exp"] = late["log_sum_exp"].astype(np.float32)
    assert verdicts(truth, late) == dict.fromkeys(SHAPES, Verdict.AGREE) | {"log_sum_exp": Verdict.NUMERIC}
    remembering = RememberingTruth.of(truth_in(truth.dtype))
    for stages, is_right in ((right(truth), True), (late, False), (right(truth, log_sum_exp=np.float32), True)) * 2:
        own = remembering.for_returned(stages)
        assert isinstance(own, RememberingTruth)
        found = {each.stage: each.verdict for each in own.judgements(stages, SHAPES, "fused")}
        assert (found["log_sum_exp"] is Verdict.AGREE) == is_right


def test_nothing_else_may_be_wide(truth: Truth) -> None:
    for stage, dtype in (("weights", "float32"), ("output", "float32"), ("log_sum_exp", "float64")):
        found = judge_and_diagnose(truth, right(truth, **{stage: dtype}), SHAPES, "fused").judgements
        [wrong] = [each for each in found if each.verdict is not Verdict.AGREE]
        assert (wrong.stage, wrong.verdict) == (stage, Verdict.DTYPE)
        expected = f"{truth.dtype} or float32" if stage == "log_sum_exp" else truth.dtype
        assert wrong.message == f"expected {expected}, got {dtype}"
    wider = truth_in("float64")
    assert verdicts(wider, right(wider, log_sum_exp=np.float32), "native")["log_sum_exp"] is Verdict.DTYPE


def test_in_float16_it_has_the_range_of_float32() -> None:
    inputs = {name: np.full((1, 1, 2, 1), 300, np.float16) for name in ("query", "key", "value")}
    truth = find_truth(Problem("attention", {}, inputs), "float16", supports_statistics=False)
    for factor, verdict in ((1, Verdict.AGREE), (1.001, Verdict.NUMERIC)):
        stages = {"log_sum_exp": truth.exact["log_sum_exp"].high.astype(np.float32) * np.float32(factor)}
        [judged] = judge_and_diagnose(truth, stages, {"log_sum_exp": (1, 1, 2)}, "fused").judgements
        assert (judged.verdict, judged.unjudged) == (verdict, 0)


def test_a_wide_and_a_narrow_one_are_compared_by_their_numbers(truth: Truth) -> None:
    bounds = {
        name: {"log_sum_exp": each.bounds("fused")["log_sum_exp"].max_error}
        for name, each in (("narrow", truth), ("wide", truth.with_wide_statistics()))
    }
    narrow, wide = right(truth), right(truth, log_sum_exp=np.float32)
    for by, verdict in ((0, Verdict.AGREE), (1, Verdict.NUMERIC)):
        other = wide | {"log_sum_exp": wide["log_sum_exp"] + np.float32(by)}
        pairs = judge_pairs({"narrow": narrow, "wide": other}, bounds)
        assert pairs["narrow", "wide", "log_sum_exp"].verdict is verdict
    pairs = judge_pairs({"wide": right(truth, output=np.float32), "narrow": narrow}, {"wide": {}, "narrow": {}})
    assert pairs["wide", "narrow", "output"].verdict is Verdict.DTYPE


CASE = """
title: A case to be judged
source: {kind: derivation, title: none}
operation: attention
cases:
  - name: Two queries attend to one key
    dtypes: [bfloat16]
    inputs: {query: {values: [[1], [2]]}, key: {values: [[3]]}, value: {values: [[4]]}}
"""


def test_scripts_expect_the_dtype_that_was_returned(load_text: Callable[[str], list[Case]]) -> None:
    [case] = load_text(CASE)
    inputs = {name: np.full(shape, 2, ml_dtypes.bfloat16) for name, shape in case.input_shapes.items()}
    truth = find_truth(Problem("attention", {}, inputs), "bfloat16", supports_statistics=False)
    stages = {"log_sum_exp": truth.exact["log_sum_exp"].high.astype(np.float32)}
    judged = judge_and_diagnose(truth, stages, case.stage_shapes, "fused")
    assert expected_stages(case, truth, "fused", judged.judgements)["log_sum_exp"].dtype == "float32"
    assert not expected_stages(case, truth, "fused", [])["log_sum_exp"].dtype
