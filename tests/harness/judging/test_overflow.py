"""Scores that float16 cannot hold before they are scaled: a matter of the rounding model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.judging.truth import Truth, find_truth

SCALE = 1e-4
RNG = np.random.default_rng(6)


def truth_of(operation: str, dtype: str = "float16", row: int = 1, head: int = 0, **more: NDArray[Any]) -> Truth:
    """Return the truth of 2 heads, 3 queries and 4 keys, of which one query of one head has raw scores of 8e4."""
    query, key = (RNG.uniform(1, 2, size=(1, 2, length, 4)) for length in (3, 4))
    query[0, head, row] *= 100
    inputs = {"query": query, "key": key * 100, "value": RNG.normal(size=(1, 2, 4, 5)), **more}
    stored = {name: array.astype(dtype) for name, array in inputs.items()}
    return find_truth(operation, {"scale": SCALE}, stored, dtype, supports_statistics=True)


def has_bound(truth: Truth, stage: str, model: str) -> NDArray[np.bool_]:
    return np.isfinite(truth.bounds(model)[stage].max_error)


@pytest.mark.parametrize("model", ["eager", "eager_pre", "eager_lse"])
@pytest.mark.parametrize("stage", ["scores", "weights", "log_sum_exp", "output"])
def test_the_row_behind_such_a_score_has_no_bound_where_scores_are_stored(model: str, stage: str) -> None:
    found = has_bound(truth_of("attention"), stage, model)
    assert not found[0, 0, 1].any()
    assert found[0, 0, [0, 2]].all()
    assert found[0, 1].all()


@pytest.mark.parametrize("model", ["fused", "fused_bwd", "fused_lse"])
def test_models_that_keep_scores_in_float32_are_judged(model: str) -> None:
    truth = truth_of("attention")
    assert all(has_bound(truth, stage, model).all() for stage in ("weights", "log_sum_exp", "output"))


def test_formats_that_hold_such_scores_are_judged() -> None:
    truth = truth_of("attention", "float32")
    assert all(has_bound(truth, stage, "native").all() for stage in truth.exact)


def test_sums_over_queries_have_no_bound_in_that_head_alone() -> None:
    grad_output, bias = RNG.normal(size=(1, 2, 3, 5)), RNG.normal(size=(1, 2, 1, 4))
    truth = truth_of("attention_gradients", grad_output=grad_output, bias=bias)
    for stage in ("grad_key", "grad_value", "grad_bias"):
        found = has_bound(truth, stage, "eager")
        assert not found[0, 0].any()
        assert found[0, 1].all()
    assert has_bound(truth, "grad_query", "eager")[0, 0].tolist() == [[True] * 4, [False] * 4, [True] * 4]
    assert has_bound(truth, "grad_key", "fused").all()


def test_an_output_projection_has_every_head_in_it() -> None:
    weights = {name: np.eye(8) for name in ("query_weight", "key_weight", "value_weight", "output_weight")}
    query, key = RNG.uniform(1, 2, size=(1, 3, 8)), RNG.uniform(100, 200, size=(1, 4, 8))
    query[0, 2, :4] *= 100
    inputs = {"query": query, "key": key, "value": RNG.normal(size=(1, 4, 8)), **weights}
    stored = {name: array.astype("float16") for name, array in inputs.items()}
    options = {"heads": 2, "scale": SCALE}
    for without in (set(), {"output_weight"}):
        given = {name: array for name, array in stored.items() if name not in without}
        truth = find_truth("multi_head_attention", options, given, "float16", supports_statistics=True)
        found = has_bound(truth, "output", "eager")
        assert found[0, :2].all()
        assert found[0, 2].tolist() == ([False] * 4 + [True] * 4 if without else [False] * 8)


def test_what_overflowed_is_nobodys_fault_against_its_own_steps_either() -> None:
    truth = truth_of("attention")
    output = truth.exact["output"].high.astype("float16")
    output[0, 0, 1] = np.nan
    step = truth.introduced("output", {"output": output}, "eager")
    assert step is not None
    assert np.isinf(step[1].max_error[0, 0, 1]).all()
    assert np.isfinite(step[1].max_error[0, 0, 0]).all()
