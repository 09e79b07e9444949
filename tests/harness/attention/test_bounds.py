"""Bounds and radii: rules for the steps of every problem, right ways to compute, and some worked out by hand."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from problems import FORWARD, NAMES, Array, Arrays, Problem, draw
from tables import tables_beside

from attncheck.attention.bounds import bound_accumulated_errors, bound_introduced_errors, propagate_radii
from attncheck.attention.errors import Ball
from attncheck.attention.oracle import enclose_exact_stages, evaluate_from_returned_stages
from attncheck.attention.problem import Computation
from attncheck.attention.sampling import select_stage_rows
from attncheck.attention.walk import value_walk
from attncheck.execution.operations import run_operation
from attncheck.judging.judge_stages import judge_stages
from attncheck.mutation.catalogue import CONTROLS, SUBJECTS_BY_NAME
from attncheck.mutation.judgement import REFERENCE_ROUNDING_MODELS
from attncheck.reading.lowering import select_rotary_table_rows
from attncheck.spec import OPERATIONS
from attncheck.spec.classes import rounding_model_named
from attncheck.spec.rounding import FORMATS
from attncheck.spec.verdicts import Verdict

U32 = 2.0**-24
DOUBLE, SINGLE = (rounding_model_named("native", dtype) for dtype in ("float64", "float32"))
GRADIENTS = "attention_gradients"
every_problem = pytest.mark.parametrize("name", NAMES)
every_forward_problem = pytest.mark.parametrize("name", FORWARD)

# Values, steps and rows.


@every_forward_problem
def test_float64_values_are_exact_and_a_bound_from_the_inputs_is_accumulated(name: str) -> None:
    problem = draw(name).laid_out()
    exact, computation = enclose_exact_stages(problem), Computation.from_problem(problem)
    highs = {stage: each.high for stage, each in exact.items()}
    values = value_walk(computation.in_float64())
    bounds, accumulated = (bound_accumulated_errors(problem, rounding, highs) for rounding in (DOUBLE, SINGLE))
    for stage, high in highs.items():
        value = computation.in_float64().without_added_key(stage, values.evaluate(stage))
        assert (exact[stage].distance_to(value) <= bounds[stage].max_error + exact[stage].radius).all(), stage
        introduced = bound_introduced_errors(computation, SINGLE, {}, {stage: high})
        if problem.operation == "multi_head_attention" and stage not in problem.inputs:
            assert introduced is None, stage  # without the projections that were returned
            continue
        for part in ("max_error", "sigma"):
            own, other = getattr(introduced[stage], part), getattr(accumulated[stage], part)
            np.testing.assert_allclose(own, other, rtol=1e-6, atol=1e-30)
    assert list(bound_accumulated_errors(problem, SINGLE, highs, [stage])) == [stage]


@every_forward_problem
def test_some_rows_are_those_of_the_whole(name: str) -> None:
    problem, rows = draw(name).laid_out(), np.array([1, 3])
    of_rows = draw(name).laid_out(rows)
    whole, part = enclose_exact_stages(problem), enclose_exact_stages(of_rows)
    bounds, own = (
        bound_accumulated_errors(plain, SINGLE, {stage: each.high for stage, each in exact.items()})
        for plain, exact in ((problem, whole), (of_rows, part))
    )
    assert list(whole) == list(part)
    for stage, exact in whole.items():
        kept = select_stage_rows(stage, exact.high, rows)
        np.testing.assert_array_equal(part[stage].high, kept, stage)
        expected = select_stage_rows(stage, bounds[stage].max_error, rows)
        np.testing.assert_allclose(own[stage].max_error, expected, rtol=1e-9, err_msg=stage)


@every_forward_problem
def test_names_that_are_no_stages_are_nobodys_predecessors(name: str) -> None:
    whole = enclose_exact_stages(draw(name).laid_out())
    for stage, exact in whole.items():
        nobody = {"exponentials": np.ones(1), "product": np.ones(1)}  # nodes of the oracle's own
        found = evaluate_from_returned_stages(Computation.from_problem(draw(name).laid_out()), nobody, [stage])
        np.testing.assert_array_equal(found[stage].high, exact.high)


# Rounding models.


def test_formats_have_the_numbers_that_their_libraries_state() -> None:
    for name, stated in FORMATS.items():
        limits = ml_dtypes.finfo(name)  # type: ignore[no-untyped-call]
        numbers = limits.eps, limits.smallest_normal, limits.smallest_subnormal, limits.max
        own = 2 * stated.unit_roundoff, stated.least_normal, stated.least_subnormal, stated.largest
        assert own == tuple(map(float, numbers))
        assert stated.underflow == (2.0**-25 if name == "float16" else stated.least_normal)  # it alone keeps subnormals


# What is not finite.


def test_what_a_masked_key_holds_changes_no_bound_and_none_follows_from_what_is_not_finite() -> None:
    problem = Problem("attention", {}, draw("attention").inputs | {"mask": np.arange(6) < 5}).stored("float32")
    exact, value = {stage: each.high for stage, each in enclose_exact_stages(problem).items()}, problem.inputs["value"]
    clean = bound_accumulated_errors(problem, SINGLE, exact)["output"].max_error
    for poison in (np.inf, np.nan, 3e38):
        poisoned = problem.with_inputs(value=np.where(np.arange(6)[:, None] == 5, np.float32(poison), value))
        np.testing.assert_array_equal(bound_accumulated_errors(poisoned, SINGLE, exact)["output"].max_error, clean)
    computation, stages = Computation.from_problem(draw("attention").canonical()), draw("attention").returned()
    for poison in (0.0, np.nan, np.inf):
        broken = stages | {"scores": np.where(np.arange(6) == 2, poison, stages["scores"])}
        for stage in ("weights", "log_sum_exp", "output"):  # the output follows from the weights
            found = bound_introduced_errors(computation, SINGLE, broken, {stage: stages[stage]})
            assert (found is not None) == (poison == 0 or stage == "output")


# Right ways to compute.

DTYPES = ("float64", "float32", "float16", "bfloat16")
GENERIC = ("normal", "peaky", "small")
REGIMES: dict[str, dict[str, Callable[[np.random.Generator, Array], Array]]] = {
    "normal": {},
    "peaky": {"query": lambda _, query: 6 * query, "log_sum_exps": lambda _, totals: 100 * totals},
    "small": {"query": lambda _, query: query / 20, "value": lambda _, value: value / 100},
    "tiny": dict.fromkeys(("query", "key", "value"), lambda _, array: array / 1000),
    "huge": {"query": lambda _, query: 60 * query, "log_sum_exps": lambda _, totals: 1000 * totals},
    "cancelling": {"query": lambda random, query: query + 20 * random.choice([-1, 1], query.shape[-1])},
    "repeated": {"key": lambda _, key: np.repeat(key[..., :1, :], key.shape[-2], axis=-2)},
    "whole": dict.fromkeys(("query", "key"), lambda random, array: random.integers(-3, 4, array.shape) * 1.0),
    "offset keys": {"key": lambda _, key: key / 10 + 3, "log_sum_exps": lambda _, totals: totals - 800},
    "offset values": {"value": lambda _, value: value / 100 + 50, "log_sum_exps": lambda _, totals: totals + 90},
}
"""What numbers of inputs are like. Statistics are held where they are generic."""
ONE_IN = 4
"""Of the right ways, so many are taken for a problem in a dtype and a regime, in turn, and NumPy's plain one always."""


def in_regime(problem: Problem, regime: str, random: np.random.Generator) -> Problem:
    drawn = {name: each for name, each in problem.inputs.items() if each.dtype == np.float64}
    changes = {name: change(random, drawn[name]) for name, change in REGIMES[regime].items() if name in drawn}
    return problem.with_inputs(**changes)


@every_problem
def test_no_right_way_to_compute_exceeds_its_bounds(name: str) -> None:
    turn, offenders, count = NAMES.index(name), [], 0
    for dtype in [*DTYPES, *DTYPES]:
        turn += 1
        regime = list(REGIMES)[turn % len(REGIMES)]
        problem = in_regime(draw(name, turn), regime, np.random.default_rng(turn)).stored(dtype)
        truth = problem.truth(dtype, supports_statistics=regime in GENERIC)
        called = problem.as_call()
        for control in {each.name: each for each in [CONTROLS[0], *CONTROLS[turn % ONE_IN :: ONE_IN]]}.values():
            if dtype not in control.dtypes:
                continue
            with np.errstate(all="ignore"):
                try:
                    stages = run_operation(control.backend, problem.operation, called.inputs, called.options)
                except NotImplementedError:  # it lacks something that the problem has
                    continue
                count += 1
                shapes = {stage: exact.shape for stage, exact in truth.exact.items()}
                model = control.rounding_models.get(dtype, REFERENCE_ROUNDING_MODELS.get(dtype, ""))
                assert truth.bounds.bounds_by_stage(model).keys() == truth.exact.keys()
                found = judge_stages(truth.for_returned_dtypes(stages), stages, shapes, model)
            wrong = [each for each in found if each.verdict is not Verdict.AGREE]
            offenders += [(control.name, dtype, regime, each.stage, each.message) for each in wrong]
    assert offenders == []
    assert count > 40


@every_problem
def test_bounds_are_not_idle(name: str) -> None:
    # No bound is so large that honest errors are nothing beside it, and none is many times the size of what it is of.
    largest = 0.0
    for seed in range(3):
        problem = draw(name, 10 + seed).stored("float32")
        truth = problem.truth("float32")
        for stage, array in problem.returned().items():
            exact, bound = truth.exact[stage], truth.bounds.bounds_by_stage("native")[stage].max_error
            size = np.abs(exact.high[np.isfinite(exact.high)]).max(initial=1e-3)
            assert bound.max(initial=0) <= U32 * 500 * max(size, 10.0), stage
            known = (bound > 0) & np.isfinite(exact.high)
            largest = max(largest, float((exact.distance_to(array)[known] / bound[known]).max(initial=0)))
    assert largest > 0.015 or set(truth.exact) == {"masked"}


def test_a_sum_over_weights_made_again_is_within_the_bounds_of_peaked_rows() -> None:
    """Such weights add up to 1 but for L's error, which meets all of Delta, where y is nearly 0."""
    control, beside = SUBJECTS_BY_NAME["gradient_row_sum_of_weights_made_again"], []
    for seed in range(8):
        random = np.random.RandomState(seed).standard_normal
        inputs = {name: random((2, 6, 5, 7)) for name in ("query", "key", "value", "grad_output")}
        problem = Problem(GRADIENTS, {}, inputs | {"query": 9 * inputs["query"], "key": 9 * inputs["key"]})
        stages = run_operation(control.backend, GRADIENTS, problem.inputs, {})
        truth = problem.truth("float64")
        error, bound = (
            truth.exact["grad_query"].distance_to(stages["grad_query"]),
            truth.bounds.bounds_by_stage("native")["grad_query"],
        )
        assert (error <= bound.max_error).all()
        beside.append((error / bound.max_error).max())
    assert max(beside) > 0.01


def test_heads_added_up_in_16_bits_are_within_the_bounds_of_such_kernels_alone() -> None:
    """64 heads share a key and a value; float16 adds them up one after the other, as torch's flash kernel does."""
    beyond = 0
    for seed in range(10):
        random = np.random.RandomState(seed).standard_normal
        shapes = {"query": (1, 64, 1, 4), "key": (1, 1, 3, 4), "value": (1, 1, 3, 4), "grad_output": (1, 64, 1, 4)}
        inputs = {name: random(shape).astype(np.float16) for name, shape in shapes.items()}
        inputs["grad_output"] = np.abs(inputs["grad_output"])  # no term takes away what another has added
        query, key, upstream = (inputs[name].astype(np.float64) for name in ("query", "key", "grad_output"))
        powers = np.exp(query @ key.swapaxes(-1, -2) / 2)
        parts = (powers / powers.sum(axis=-1, keepdims=True)).swapaxes(-1, -2) @ upstream
        total = np.zeros((3, 4), np.float16)
        for part in parts[0]:
            total = (total + part).astype(np.float16)
        truth = Problem(GRADIENTS, {}, inputs).truth("float16")
        error = truth.exact["grad_value"].distance_to(total[np.newaxis, np.newaxis])
        assert (error <= truth.bounds.bounds_by_stage("fused_bwd")["grad_value"].max_error).all()
        beyond += (error > truth.bounds.bounds_by_stage("fused")["grad_value"].max_error).any()
    assert beyond > 0


def test_a_fill_is_rounded_to_the_dtype_and_beyond_it_is_minus_infinity() -> None:
    def filled(fill: float, dtype: str) -> Problem:
        return Problem("attention", {"mask_fill": fill}, draw("fill").stored(dtype).inputs)

    for dtype, fill in (("float64", -1e-9), ("float32", float(np.float32(-1e-9))), ("float16", -0.0)):
        for form in (Problem.as_call, Problem.canonical):
            assert form(filled(-1e-9, dtype)).options["mask_fill"] == fill
    assert "mask_fill" not in filled(-1e9, "float16").canonical().options


# Radii.

NUMBERS = [name for name in FORWARD if OPERATIONS[draw(name).operation].can_have_expected_numbers]
LOOSE, TIGHT = (tables_beside(__file__)[name] for name in ("radii of several steps", "radii of one step"))


def draw_radii(problem: Problem, size: float, random: np.random.Generator) -> Arrays:
    """Draw radii, some of them zero; what is -inf, a mask or a count is known exactly."""

    def radius(array: Array) -> Array:
        moves = np.isfinite(array) & (array.dtype == np.float64) & (random.random(array.shape) < 0.8)
        return np.where(moves, size * random.random(array.shape), 0.0)

    return {name: radius(array) for name, array in problem.inputs.items()}


def balls_of(problem: Problem, radii: Arrays) -> dict[str, Ball]:
    """Return the balls of every stage."""
    counts = {name: array for name, array in problem.inputs.items() if problem.input_specs[name].is_count}
    given = {**radii, **counts}
    laid_out = Problem(problem.operation, problem.options, given).laid_out().inputs
    return propagate_radii(problem.laid_out(), {**laid_out, **select_rotary_table_rows(given, of_past=(0, 0))})


@pytest.mark.parametrize("name", NUMBERS)
def test_no_stage_moves_further_than_its_radius(name: str) -> None:
    for seed, exponent in enumerate((-8.0, -3.0, -1.0, 0.5, 2.0, 3.5)):
        random, problem = np.random.default_rng(seed), draw(name, seed)
        radii = draw_radii(problem, 10**exponent, random)
        balls, stages = balls_of(problem, radii), problem.returned()
        assert list(balls) == list(stages)
        for stage, array in stages.items():
            np.testing.assert_allclose(balls[stage].value, array, rtol=1e-13, atol=1e-13)
        largest = 1 + max(float(np.abs(each[np.isfinite(each)]).max(initial=0)) for each in stages.values())
        rounding = 2e-14 * largest * (largest + 10 ** (2 * exponent))
        for number in range(4):
            moved = {}
            for each, array in problem.inputs.items():
                step = random.uniform(-1, 1, array.shape)
                step = np.sign(step) if number % 2 else step
                moved[each] = array + step * radii[each] if array.dtype == np.float64 else array
            for stage, array in problem.with_inputs(**moved).returned().items():
                infinite = np.isinf(stages[stage])
                np.testing.assert_array_equal(np.isinf(array), infinite)
                change = np.abs(np.where(infinite, 0, array) - np.where(infinite, 0, stages[stage]))
                assert (change <= balls[stage].radius + rounding).all(), (stage, exponent)
                assert (balls[stage].radius[infinite] == 0).all()


@pytest.mark.parametrize("name", NUMBERS)
def test_radii_hold_to_first_order_and_are_no_many_times_that(name: str) -> None:
    random, problem, step = np.random.default_rng(4), draw(name, 4), 1e-5
    exact = balls_of(problem, draw_radii(problem, 0.0, random))
    assert not any(ball.radius.any() for ball in exact.values())
    radii = draw_radii(problem, 1e-7, random)
    for radius in radii.values():  # a dozen numbers of every input move
        radius.flat[random.permutation(radius.size)[12:]] = 0
    balls = balls_of(problem, radii)
    moves = {stage: np.zeros(ball.value.shape) for stage, ball in balls.items()}
    for each, radius in radii.items():
        for index in map(tuple, np.argwhere(radius > 0)):
            change = np.zeros(radius.shape)
            change[index] = step
            up, down = (
                problem.with_inputs(**{each: problem.inputs[each] + sign * change}).returned() for sign in (1, -1)
            )
            for stage, move in moves.items():
                with np.errstate(invalid="ignore"):
                    move += np.abs(np.nan_to_num((up[stage] - down[stage]) / (2 * step))) * radius[index]
    for stage, least in moves.items():
        radius = balls[stage].radius
        assert (radius >= least * (1 - 1e-6) - 1e-15).all(), stage
        factor = TIGHT.get(name.removesuffix(", bias"), LOOSE.get(stage, 1 + 1e-5))
        assert radius.max() <= factor * least.max() + 1e-15, (stage, radius.max() / least.max())
