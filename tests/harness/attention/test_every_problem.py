"""Rules that hold for the steps of every problem: values, bounds, radii, some rows for all; and radii by hand."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent))
from problems import FORWARD, NAMES, Problem, draw

from attncheck.attention.bounds import PROPAGATED, accumulated_bounds, introduced_bounds, propagate
from attncheck.attention.oracle import exact_from, exact_stages
from attncheck.attention.problem import Computation as Canonical
from attncheck.attention.rounding import rounding_model_named
from attncheck.attention.sampling import rows_of_stage
from attncheck.attention.walk import radius_walk, value_walk
from attncheck.judging.truth import Truth
from attncheck.reading.inputs import Inputs
from attncheck.spec import computed_stages

Array = NDArray[Any]
every_problem = pytest.mark.parametrize("name", NAMES)
every_forward_problem = pytest.mark.parametrize("name", FORWARD)
GRADIENTS = "attention_gradients"
MODELS = {
    "float64": ["native"],
    "float32": ["native", "tf32_products", "native_lse"],
    "float16": ["fused", "eager_lse"],
}
SIZES = {"float64": ((1, 1.0),), "float32": ((2, 0.05), (3, 2.5)), "float16": ((1, 1.0), (3, 2.5))}
"""Seeds, and how large the numbers are."""


def is_within(array: Array, exact: Any, max_error: Array) -> bool:
    """Whether an array is no further from what is exact than its bound, and the same where that is not finite."""
    known = np.isfinite(exact.high)
    wide = array.astype(np.float64)
    near = exact.error_of(array)[known] <= (max_error + exact.radius)[known]
    return bool(near.all() and np.array_equal(wide[~known], exact.high[~known], equal_nan=True))


@every_problem
@pytest.mark.parametrize("dtype", MODELS)
def test_numpy_is_within_the_bounds_of_every_stage_and_step(name: str, dtype: str) -> None:
    for seed, size in SIZES[dtype]:
        problem = draw(name, seed, size).stored(dtype)
        truth = problem.truth(dtype)
        computed = returned_in(problem, dtype, truth)
        assert computed.keys() == truth.exact.keys()
        for model in MODELS[dtype]:
            bounds = truth.bounds(model)
            assert bounds.keys() == truth.exact.keys()
            for stage, array in computed.items():
                exact, bound = truth.exact[stage], bounds[stage]
                assert array.shape == exact.shape == bound.max_error.shape
                assert is_within(array, exact, bound.max_error), (stage, model)
                assert (bound.sigma <= bound.max_error).all()
                step = truth.introduced(stage, computed, model)
                if truth.operation == GRADIENTS:
                    assert step is None
                    continue
                assert step is not None
                assert is_within(array, step[0], step[1].max_error), (stage, model)


def returned_in(problem: Problem, dtype: str, truth: Truth) -> dict[str, Array]:
    """Return NumPy's stages; in 16 bits of an evaluation in float32, as a fused kernel does it."""
    if dtype != "float16":
        return problem.returned()
    wide = {
        name: each.astype(np.float32) if each.dtype == np.float16 else each for name, each in problem.inputs.items()
    }
    found = problem.with_inputs(**wide).returned()
    return {stage: array.astype(truth.dtype_of(stage)) for stage, array in found.items()}


@every_problem
def test_bounds_are_not_idle(name: str) -> None:
    # No bound is so large that honest errors are nothing beside it, and none is many times the size of what it is of.
    largest = 0.0
    for seed in range(3):
        problem = draw(name, 10 + seed).stored("float32")
        truth = problem.truth("float32")
        for stage, array in problem.returned().items():
            exact, bound = truth.exact[stage], truth.bounds("native")[stage].max_error
            size = np.abs(exact.high[np.isfinite(exact.high)]).max(initial=1e-3)
            assert bound.max(initial=0) <= 2.0**-24 * 500 * max(size, 10.0), stage
            known = (bound > 0) & np.isfinite(exact.high)
            largest = max(largest, float((exact.error_of(array)[known] / bound[known]).max(initial=0)))
    assert largest > 0.02 or set(truth.exact) == {"masked"}


@every_forward_problem
def test_float64_values_are_exact_and_a_bound_from_the_inputs_is_accumulated(name: str) -> None:
    operation, options, inputs = draw(name).laid_out()
    exact = exact_stages(Problem(operation, options, inputs))
    highs = {stage: each.high for stage, each in exact.items()}
    problem = Canonical.of(Problem(operation, options, inputs)).in_float64()
    values = value_walk(problem)
    double, single = (rounding_model_named("native", dtype) for dtype in ("float64", "float32"))
    bounds = accumulated_bounds(Problem(operation, options, inputs), double, highs)
    accumulated = accumulated_bounds(Problem(operation, options, inputs), single, highs)
    for stage, high in highs.items():
        value = problem.without_added(stage, values.node(stage))
        assert (exact[stage].error_of(value) <= bounds[stage].max_error + exact[stage].radius).all(), stage
        introduced = introduced_bounds(Canonical.of(Problem(operation, options, inputs)), single, {}, {stage: high})
        if operation == "multi_head_attention" and stage not in inputs:
            assert introduced is None, stage  # without the projections that were returned
            continue
        assert introduced is not None
        for part in ("max_error", "sigma"):
            own, other = getattr(introduced[stage], part), getattr(accumulated[stage], part)
            np.testing.assert_allclose(own, other, rtol=1e-6, atol=1e-30)
    assert list(accumulated_bounds(Problem(operation, options, inputs), single, highs, [stage])) == [stage]


@every_problem
def test_some_rows_are_those_of_the_whole(name: str) -> None:
    problem = draw(name)
    operation, options, inputs = problem.laid_out()
    rows = np.array([1, 3])
    if operation == GRADIENTS:
        with pytest.raises(ValueError, match="adds query rows up"):
            exact_stages(Problem(operation, options, inputs), query_rows=rows)
        return
    whole, sampled = (
        exact_stages(Problem(operation, options, inputs)),
        exact_stages(Problem(operation, options, inputs), query_rows=rows),
    )
    of_rows = problem.laid_out(rows)
    part = exact_stages(Problem(*of_rows))
    single = rounding_model_named("native", "float32")
    bounds, own = (
        accumulated_bounds(Problem(*plain), single, {stage: each.high for stage, each in exact.items()})
        for plain, exact in (((operation, options, inputs), whole), (of_rows, part))
    )
    assert list(whole) == list(part) == list(sampled)
    for stage, exact in whole.items():
        kept = rows_of_stage(stage, exact.high, rows)
        np.testing.assert_array_equal(sampled[stage].high, kept, stage)
        np.testing.assert_array_equal(part[stage].high, kept, stage)
        expected = rows_of_stage(stage, bounds[stage].max_error, rows)
        np.testing.assert_allclose(own[stage].max_error, expected, rtol=1e-9, err_msg=stage)


@every_forward_problem
def test_a_step_follows_from_what_was_returned_and_from_some_rows_of_it(name: str) -> None:
    operation, options, inputs = draw(name).laid_out()
    whole, rows = exact_stages(Problem(operation, options, inputs)), [2, 1]
    stages = {stage: each.high + 0.125 for stage, each in whole.items()}  # whatever was returned
    problem = Canonical.of(Problem(operation, options, inputs))
    for stage in stages:
        found, some = (exact_from(problem, stages, [stage], each) for each in (None, rows))
        assert found is not None
        assert some is not None
        np.testing.assert_array_equal(some[stage].high, rows_of_stage(stage, found[stage].high, np.array(rows)))
        # Names that are no stages, be they those of the oracle's own nodes, are nobody's predecessors.
        without = exact_from(problem, {"exponentials": np.ones(1), "product": np.ones(1)}, [stage])
        assert without is not None
        np.testing.assert_array_equal(without[stage].high, whole[stage].high)


# Radii.

LOOSE = {
    **dict.fromkeys(("raw_scores", "scores", "biased", "masked"), 4.0),
    **{"rotated_query": 1.5, "rotated_key": 1.5, "capped": 40.0, "log_sum_exp": 8.0, "weights": 8.0},
    **dict.fromkeys(("context", "output"), 15.0),
}
"""The factor by which a stage's largest radius may exceed what derivatives give, in problems of several steps: factors
at every step take the numbers before to move independently, and where tanh is flat its slope is still taken as 1."""
TIGHT = {
    **dict.fromkeys(("default scale", "scaled dot", "softmax", "softmax, empty row"), 1 + 1e-5),
    **dict.fromkeys(("masking", "masking, bias", "masking, all", "masking, window"), 1 + 1e-5),
    "general": 2.0,
    "additive": 5.0,
    "cosine": 8.0,
}
"""The same where there is one step."""


def draw_radii(problem: Problem, size: float, rng: np.random.Generator) -> dict[str, Array]:
    """Draw radii, some of them zero; what is -inf, a mask or a count is known exactly."""
    return {
        name: np.where(
            np.isfinite(array) & (array.dtype == np.float64) & (rng.random(array.shape) < 0.8),
            size * rng.random(array.shape),
            0.0,
        )
        for name, array in ((name, np.asarray(each)) for name, each in problem.inputs.items())
    }


def balls_of(problem: Problem, radii: dict[str, Array]) -> tuple[dict[str, Any], Callable[[Problem], dict[str, Array]]]:
    """Return the balls of every stage, and what evaluates the stages of moved inputs."""
    if problem.operation in PROPAGATED:
        return propagate(problem.operation, problem.options, Inputs(problem.inputs, radii)), Problem.returned
    plain = problem.on_walk()
    around = Problem(problem.operation, problem.options, radii).on_walk()
    walk = radius_walk(plain, around.inputs)
    stages = computed_stages(plain.operation, plain.options, plain.inputs)

    def evaluated(moved: Problem) -> dict[str, Array]:
        values = value_walk(moved.on_walk())
        return {stage: values.node(stage) for stage in stages}

    return {stage: walk.node(stage) for stage in stages}, evaluated


@pytest.mark.parametrize("name", [name for name in FORWARD if not name.startswith("codes")])
def test_no_stage_moves_further_than_its_radius(name: str) -> None:
    for seed, exponent in enumerate((-8.0, -3.0, -1.0, 0.5, 2.0)):
        rng = np.random.default_rng(seed)
        problem = draw(name, seed)
        if problem.operation == "normalized_attention":
            problem.inputs.pop("query_norm_weight", None), problem.inputs.pop("key_norm_weight", None)
        radii = draw_radii(problem, 10**exponent, rng)
        balls, evaluated = balls_of(problem, radii)
        stages = evaluated(problem)
        assert list(balls) == list(stages)
        for stage, array in stages.items():
            np.testing.assert_allclose(balls[stage].value, array, rtol=1e-13, atol=1e-13)
        for number in range(4):
            moved = {}
            for each, array in problem.inputs.items():
                step = rng.uniform(-1, 1, array.shape)
                step = np.sign(step) if number % 2 else step
                moved[each] = array + step * radii[each] if array.dtype == np.float64 else array
            for stage, array in evaluated(problem.with_inputs(**moved)).items():
                infinite = np.isinf(stages[stage])
                np.testing.assert_array_equal(np.isinf(array), infinite)
                change = np.abs(np.where(infinite, 0, array) - np.where(infinite, 0, stages[stage]))
                largest = 1 + max(float(np.abs(each[np.isfinite(each)]).max(initial=0)) for each in stages.values())
                rounding = 2e-14 * largest * (largest + 10 ** (2 * exponent))
                assert (change <= balls[stage].radius + rounding).all(), (stage, exponent)
                assert (balls[stage].radius[infinite] == 0).all()


@pytest.mark.parametrize("name", [name for name in FORWARD if draw(name).operation in PROPAGATED])
def test_radii_hold_to_first_order_and_are_no_many_times_that(name: str) -> None:
    rng, problem, step = np.random.default_rng(4), draw(name, 4), 1e-5
    exact = propagate(problem.operation, problem.options, Inputs(problem.inputs, draw_radii(problem, 0.0, rng)))
    assert not any(ball.radius.any() for ball in exact.values())
    radii = draw_radii(problem, 1e-7, rng)
    for radius in radii.values():  # a dozen numbers of every input move
        radius.flat[rng.permutation(radius.size)[12:]] = 0
    balls = propagate(problem.operation, problem.options, Inputs(problem.inputs, radii))
    moves = {stage: np.zeros(ball.value.shape) for stage, ball in balls.items()}
    for each, radius in radii.items():
        for index in np.argwhere(radius > 0):
            sides = []
            for sign in (1, -1):
                array = problem.inputs[each].copy()
                array[tuple(index)] += sign * step
                sides.append(problem.with_inputs(**{each: array}).returned())
            for stage, move in moves.items():
                with np.errstate(invalid="ignore"):
                    slope = np.nan_to_num((sides[0][stage] - sides[1][stage]) / (2 * step))
                move += np.abs(slope) * radius[tuple(index)]
    for stage, least in moves.items():
        radius = balls[stage].radius
        assert (radius >= least * (1 - 1e-6) - 1e-15).all(), stage
        factor = TIGHT.get(name.removesuffix(", bias"), LOOSE.get(stage, 1 + 1e-5))
        assert radius.max() <= factor * least.max() + 1e-15, (stage, radius.max() / least.max())


# Radii by hand.


def corners(scores: Array, radius: Array) -> tuple[Array, float]:
    """Return the largest moves of the weights and of log_sum_exp at all corners, by the definition."""

    def both(moved: Array) -> tuple[Array, float]:
        exponentials = np.exp(moved - moved.max())
        return exponentials / exponentials.sum(), float(moved.max() + np.log(exponentials.sum()))

    weights, log_sum = both(scores)
    moved = [both(scores + np.array(signs) * radius) for signs in product((-1, 1), repeat=scores.size)]
    return np.max([np.abs(own - weights) for own, _ in moved], axis=0), max(abs(own - log_sum) for _, own in moved)


@pytest.mark.parametrize(
    ("spread", "size"), [(1, 1e-9), (1, 1e-3), (1, 1), (5, 30), (30, 50), (100, 100), (1000, 1000), (300, 3000)]
)
def test_softmax_moves_to_its_radius_in_some_corner_and_never_beyond(spread: float, size: float) -> None:
    generator = np.random.default_rng(11)
    for _ in range(30):
        count = int(generator.integers(1, 7))
        scores = spread * generator.standard_normal(count)
        radius = np.where(generator.random(count) < 0.8, size * generator.random(count), 0)
        balls = propagate("softmax", {}, Inputs({"scores": scores[None]}, {"scores": radius[None]}))
        weights, log_sum = corners(scores, radius)
        rounded = 1e-15 * (4 + np.abs(scores).max() + size)
        assert (weights <= balls["weights"].radius[0] + rounded).all()
        assert log_sum <= balls["log_sum_exp"].radius.item() + rounded
        # Where a whole row may underflow, the radius is all that a weight can move, and no corner is that bad.
        if size < 300:
            assert (balls["weights"].radius[0] <= 1.001 * weights + rounded).all()
            assert balls["log_sum_exp"].radius.item() <= 1.001 * log_sum + rounded
