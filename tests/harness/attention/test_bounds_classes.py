"""Bounds of classes that allow more than float32 itself: reduced products, and weights from a stored log_sum_exp."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from attncheck.attention.rounding import rounding_model_named
from attncheck.execution.worker import Computed, Task, evaluate_on
from attncheck.judging.judge_stages import judge_stages
from attncheck.judging.truth import Truth, find_truth
from attncheck.mutation import reduced
from attncheck.mutation.mutant import Control, subjects_of_module

Array = NDArray[Any]

REDUCED = ("tf32_products", "bf16_products", "bf16x3_products")
FINE_TO_COARSE = ("native", "bf16x3_products", "tf32_products", "bf16_products")
CONTROLS = [each for each in subjects_of_module(reduced.__name__) if isinstance(each, Control)]


def draw(seed: int, *, gradients: bool) -> Task:
    rng = np.random.default_rng(seed)
    queries, keys, width, columns = (int(each) for each in rng.integers(1, 40, 4))
    shapes = {"query": (1, 2, queries, width), "key": (1, 2, keys, width), "value": (1, 2, keys, columns)}
    shapes |= {"grad_output": (1, 2, queries, columns)} if gradients else {}
    inputs: dict[str, Array] = {name: rng.standard_normal(shape).astype("f") for name, shape in shapes.items()}
    inputs["query"] *= np.float32(rng.choice([0.1, 1, 8]))
    options: dict[str, Any] = {"softcap": 5.0} if rng.random() < 0.3 else {}
    if rng.random() < 0.4:
        inputs["mask"] = rng.random((1, 1, queries, keys)) < 0.7
    if rng.random() < 0.3:
        inputs["bias"] = rng.standard_normal((1, 1, queries, keys)).astype("f")
    return Task("attention_gradients" if gradients else "attention", options, inputs)


def truth_of(task: Task) -> Truth:
    return find_truth(task.operation, task.options, task.inputs, "float32", supports_statistics=True)


@pytest.mark.parametrize("gradients", [False, True])
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32 - 1))
def test_no_emulated_kernel_is_flagged_in_its_class(gradients: bool, seed: int) -> None:
    task = draw(seed, gradients=gradients)
    truth = truth_of(task)
    for honest in CONTROLS:
        outcome = evaluate_on(honest.backend, task)
        assert isinstance(outcome, Computed)
        shapes = {name: array.shape for name, array in outcome.stages.items()}
        for found in judge_stages(truth, outcome.stages, shapes, honest.classes["float32"]):
            assert not found.verdict.exit_code, (honest.name, found)


@pytest.mark.parametrize("gradients", [False, True])
def test_a_coarser_product_is_allowed_more(gradients: bool) -> None:
    for seed in range(6):
        truth = truth_of(draw(seed, gradients=gradients))
        for fine, coarse in itertools.pairwise(FINE_TO_COARSE):
            for stage, bound in truth.bounds(coarse).items():
                assert (bound.max_error >= truth.bounds(fine)[stage].max_error).all(), (stage, fine, coarse)
                assert (bound.sigma <= bound.max_error).all()


def test_a_stored_log_sum_exp_costs_weights_and_output_more_and_nothing_else() -> None:
    truth = truth_of(draw(1, gradients=False))
    for stage, bound in truth.bounds("native_lse").items():
        own = truth.bounds("native")[stage].max_error
        if stage in ("weights", "output"):
            assert (bound.max_error >= own).all()
            assert (bound.max_error > own).any()
        else:
            np.testing.assert_array_equal(bound.max_error, own)


def test_what_a_stored_log_sum_exp_costs_grows_with_its_size() -> None:
    def relative(offset: float) -> float:
        scores = np.random.default_rng(0).standard_normal((1, 1, 3, 5)) + offset
        truth = find_truth("softmax", {}, {"scores": scores.astype("f")}, "float32", supports_statistics=True)
        exact, max_error = truth.exact["weights"].high, truth.bounds("native_lse")["weights"].max_error
        return float((max_error / exact).max())

    assert relative(1000.0) > relative(0.0) + 1000 * 2.0**-24


def test_what_a_factor_can_hold_is_not_rounded() -> None:
    rng = np.random.default_rng(0)
    inputs = {name: rng.integers(-100, 101, (1, 1, 6, 16)).astype("f") for name in ("query", "key")}
    truth = find_truth("scoring", {"score": "dot"}, inputs, "float32", supports_statistics=False)
    assert (truth.bounds("tf32_products")["raw_scores"].max_error < 1e-30).all()  # what underflows alone
    inputs["query"][0, 0, 0, 0] = 2049  # 12 bits
    truth = find_truth("scoring", {"score": "dot"}, inputs, "float32", supports_statistics=False)
    assert (truth.bounds("tf32_products")["raw_scores"].max_error > 2.0**-11 * 2049).any()


@pytest.mark.parametrize("name", REDUCED)
def test_a_reduced_product_keeps_float32_at_both_ends(name: str) -> None:
    rounding, native = rounding_model_named(name, "float32"), rounding_model_named("native", "float32")
    changed = {
        "rounding_model",
        "accumulate_unit",
        "product_precision",
        "product_unit",
        "product_underflow",
    }
    kept = {each: getattr(native, each) for each in changed}
    assert replace(rounding, **kept) == native
    assert rounding.product_error > native.accumulate_unit


def test_an_honest_variant_claims_a_class_for_each_of_its_dtypes() -> None:
    for honest in CONTROLS:
        assert isinstance(honest, Control)
        for dtype in honest.dtypes:
            assert rounding_model_named(honest.classes[dtype], dtype).dtype == dtype
