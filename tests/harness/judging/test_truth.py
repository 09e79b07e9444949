"""What is true of one case: worked out once, in its own dtype, and silent where there is nothing to know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from problems import Array, Arrays, Problem

from attncheck.attention.exact_array import Enclosure
from attncheck.attention.oracle import PrecisionExhausted
from attncheck.dtypes import numpy_dtype
from attncheck.judging import truth as module
from attncheck.judging.judge import judge_pairs
from attncheck.judging.judge_implementation import judge_and_diagnose
from attncheck.judging.judge_stages import StageJudgement
from attncheck.judging.truth import Truth, within_range
from attncheck.verdicts import Verdict

AGREE, NUMERIC, DTYPE = Verdict.AGREE, Verdict.NUMERIC, Verdict.DTYPE


def test_what_no_precision_settles_what_is_too_large_and_what_nobody_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*arguments: object, **options: object) -> None:
        raise PrecisionExhausted("softmax: weights not settled")

    inputs = {name: np.ones((1, 1, 3, 2)) for name in ("query", "key", "value", "grad_output")}
    problem = Problem("attention_gradients", {}, inputs)
    monkeypatch.setattr(module, "MAX_WHOLE", 9)
    assert problem.truth().exact
    monkeypatch.setattr(module, "MAX_WHOLE", 8)
    outside = "attention_gradients has 9 scores; at most 8 are judged where every row counts"
    assert (problem.truth().exact, problem.truth().outside) == ({}, outside)
    monkeypatch.setattr(module, "exact_stages", exhausted)
    truth = Problem("softmax", {}, {"scores": np.ones((1, 1, 1, 2))}).truth()
    assert (truth.exact, truth.outside) == ({}, "softmax: weights not settled")
    monkeypatch.setattr(module, "exact_stages", pytest.fail)
    truth = problem.truth(returned=())
    assert (truth.exact, truth.bounds("native")) == ({}, {})


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_largest_number_of_the_dtype_is_judged_and_nothing_larger(dtype: str) -> None:
    largest, zero = float(np.finfo(dtype).max), np.zeros(6)
    with np.errstate(over="ignore"):
        high = np.array([largest, -largest, np.nextafter(largest, np.inf), 0.0, -np.inf, np.inf])
    judged = within_range(Enclosure(high, zero, np.where(high == np.inf, np.inf, 0.0)), dtype)
    assert judged.tolist() == [True, True, False, True, False, False]
    if dtype != "float16":  # a score of the square of it leaves the rest to be judged
        arrays = {"query": np.array([[[[largest, 1]]]], dtype), "key": np.array([[[[-largest, 0], [0, 1]]]], dtype)}
        exact = Problem("scoring", {"scale": 1.0}, arrays).truth(dtype, supports_statistics=False).exact["scores"]
        assert within_range(exact, dtype).ravel().tolist() == [False, True]


# Scores that float16 cannot hold before they are scaled: a matter of the rounding model.

RNG = np.random.default_rng(6)
QUERY, KEY = (RNG.uniform(1, 2, size=(1, 2, length, 4)) for length in (3, 4))
QUERY[0, 0, 1] *= 100
OVERFLOWING = {"query": QUERY, "key": 100 * KEY, "value": RNG.normal(size=(1, 2, 4, 5))}
"""2 heads, 3 queries and 4 keys, of which one query of one head has raw scores of 8e4."""
BACKWARD = {"grad_output": RNG.normal(size=(1, 2, 3, 5)), "bias": RNG.normal(size=(1, 2, 1, 4))}


def has_bound(truth: Truth, stage: str, model: str) -> NDArray[np.bool_]:
    return np.isfinite(truth.bounds(model)[stage].max_error)


def truth_of(operation: str, inputs: Arrays, dtype: str = "float16", **options: Any) -> Truth:
    return Problem(operation, {"scale": 1e-4, **options}, inputs).stored(dtype).truth(dtype)


def test_the_row_behind_such_a_score_has_no_bound_where_scores_are_stored() -> None:
    truth, wide = truth_of("attention", OVERFLOWING), truth_of("attention", OVERFLOWING, "float32")
    assert all(has_bound(wide, stage, "native").all() for stage in wide.exact)
    for stage in ("scores", "weights", "log_sum_exp", "output"):
        for model in ("eager", "eager_pre", "eager_lse"):
            found = has_bound(truth, stage, model).reshape(2, 3, -1)
            assert (found.any(-1) == found.all(-1)).all()
            assert found.all(-1).tolist() == [[True, False, True], [True] * 3]
        if stage != "scores":
            assert all(has_bound(truth, stage, model).all() for model in ("fused", "fused_bwd", "fused_lse"))
    output = truth.exact["output"].high.astype("float16")  # nor does it have one against its own steps
    output[0, 0, 1] = np.nan
    step = truth.introduced("output", {"output": output}, "eager")
    assert np.isfinite(step[1].max_error[0, 0]).all(axis=-1).tolist() == [True, False, True]


def test_sums_over_queries_have_no_bound_in_that_head_alone_and_a_projection_has_every_head_in_it() -> None:
    truth = truth_of("attention_gradients", OVERFLOWING | BACKWARD)
    for stage in ("grad_key", "grad_value", "grad_bias"):
        found = has_bound(truth, stage, "eager")
        assert (found[0, 0].any(), found[0, 1].all()) == (False, True)
    assert has_bound(truth, "grad_query", "eager")[0, 0].tolist() == [[True] * 4, [False] * 4, [True] * 4]
    assert has_bound(truth, "grad_key", "fused").all()
    query, key = RNG.uniform(1, 2, size=(1, 3, 8)), RNG.uniform(100, 200, size=(1, 4, 8))
    query[0, 2, :4] *= 100
    weights = {f"{name}_weight": np.eye(8) for name in ("query", "key", "value")}
    inputs = {"query": query, "key": key, "value": RNG.normal(size=(1, 4, 8)), **weights}
    for more, last in (({"output_weight": np.eye(8)}, [False] * 8), ({}, [False] * 4 + [True] * 4)):
        found = has_bound(truth_of("multi_head_attention", inputs | more, heads=2), "output", "eager")
        assert found[0].tolist() == [[True] * 8, [True] * 8, last]


# A log_sum_exp in float32 beside outputs of 16 bits: accepted, by a bound for float32; everything else as it was.

SHAPES = {"output": (1, 2, 9, 4), "log_sum_exp": (1, 2, 9), "weights": (1, 2, 9, 11)}


def truth_in(dtype: str) -> Truth:
    random = np.random.default_rng(5)
    shapes = {"query": (1, 2, 9, 4), "key": (1, 2, 11, 4), "value": (1, 2, 11, 4)}
    inputs = {name: random.normal(size=shape) for name, shape in shapes.items()}
    return Problem("attention", {}, inputs | {"query": 3 * inputs["query"]}).stored(dtype).truth(dtype)


@pytest.fixture(params=["bfloat16", "float16"])
def truth(request: pytest.FixtureRequest) -> Truth:
    return truth_in(request.param)


def right(truth: Truth, **other: str) -> Arrays:
    """Return exact stages, rounded once to the dtype of the case, or to another."""
    return {stage: truth.exact[stage].high.astype(numpy_dtype(other.get(stage, truth.dtype))) for stage in SHAPES}


def judgements(truth: Truth, stages: Mapping[str, Array], model: str = "fused") -> dict[str, StageJudgement]:
    return {each.stage: each for each in judge_and_diagnose(truth, stages, SHAPES, model).judgements}


def test_a_log_sum_exp_may_be_float32_and_only_its_bound_is_another(truth: Truth) -> None:
    for model in ("fused", "fused_lse", "fused_fp8", "eager", "eager_pre"):
        for stages in (right(truth), right(truth, log_sum_exp="float32")):
            assert {each.verdict for each in judgements(truth, stages, model).values()} == {AGREE}
        wide, narrow = truth.with_wide_statistics().bounds(model), truth.bounds(model)
        assert (wide["log_sum_exp"].max_error < narrow["log_sum_exp"].max_error).all()
        for stage in ("scores", "weights", "output"):
            np.testing.assert_array_equal(wide[stage].max_error, narrow[stage].max_error)
            np.testing.assert_array_equal(wide[stage].sigma, narrow[stage].sigma)
    bound = truth.with_wide_statistics().bounds("fused")["log_sum_exp"]
    assert (bound.max_error < 100 * 2.0**-24 * (1 + np.abs(truth.exact["log_sum_exp"].high))).all()


def test_nothing_else_may_be_wide(truth: Truth) -> None:
    for stage, dtype in (("weights", "float32"), ("output", "float32"), ("log_sum_exp", "float64")):
        found = judgements(truth, right(truth, **{stage: dtype}))
        assert [name for name, each in found.items() if each.verdict is not AGREE] == [stage]
        expected = f"{truth.dtype} or float32" if stage == "log_sum_exp" else truth.dtype
        assert (found[stage].verdict, found[stage].message) == (DTYPE, f"expected {expected}, got {dtype}")
    wider = truth_in("float64")
    assert judgements(wider, right(wider, log_sum_exp="float32"), "native")["log_sum_exp"].verdict is DTYPE


def test_in_float16_it_has_the_range_of_float32() -> None:
    inputs = {name: np.full((1, 1, 2, 1), 300, np.float16) for name in ("query", "key", "value")}
    truth = Problem("attention", {}, inputs).truth("float16", supports_statistics=False)
    for factor, verdict in ((1, AGREE), (1.001, NUMERIC)):
        stages = {"log_sum_exp": truth.exact["log_sum_exp"].high.astype(np.float32) * np.float32(factor)}
        [judged] = judge_and_diagnose(truth, stages, {"log_sum_exp": (1, 1, 2)}, "fused").judgements
        assert (judged.verdict, judged.unjudged) == (verdict, 0)


def test_a_wide_and_a_narrow_one_are_compared_by_their_numbers(truth: Truth) -> None:
    bounds = {
        name: {"log_sum_exp": each.bounds("fused")["log_sum_exp"].max_error}
        for name, each in (("narrow", truth), ("wide", truth.with_wide_statistics()))
    }
    narrow, wide = right(truth), right(truth, log_sum_exp="float32", output="float32")
    for by, verdict in ((0, AGREE), (1, NUMERIC)):
        other = wide | {"log_sum_exp": wide["log_sum_exp"] + np.float32(by)}
        pairs = judge_pairs({"narrow": narrow, "wide": other}, bounds)
        assert pairs["narrow", "wide", "log_sum_exp"].verdict is verdict
        assert pairs["narrow", "wide", "output"].verdict is DTYPE
