"""The radii of ``propagate``: never too small, wherever the inputs move to, and not much larger than needed.

Every stage is computed again by the NumPy backend, at inputs moved within their radii: at random, and to the corners,
where the largest changes are. That the radii are no larger than needed is held against the derivatives, taken
numerically: for small radii a stage f moves by sum |df/dx_i| r_i, and no further to first order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from attncheck.attention.radii import PROPAGATED, propagate
from attncheck.backends import BACKENDS
from attncheck.execution.operations import run_operation
from attncheck.reading.case import Case
from attncheck.reading.inputs import Inputs
from attncheck.reading.selection import select_cases

Array = NDArray[Any]
Stages = dict[str, Array]
Shapes = dict[str, tuple[int, ...]]

NUMPY = BACKENDS["numpy"].load()
INFINITE = -np.inf


def is_real(array: Array) -> bool:
    """Whether an array holds numbers that may move, as masks and counts may not."""
    return np.issubdtype(array.dtype, np.floating)


@dataclass(frozen=True)
class Setting:
    """An operation with options, the shapes of its inputs, and where some of them are -inf or masked."""

    name: str
    operation: str
    shapes: Shapes
    options: dict[str, Any] = field(default_factory=dict)
    fixed: dict[str, Array] = field(default_factory=dict)
    """Masks and counts, which are exact, and -inf put over drawn numbers."""
    loose: dict[str, float] = field(default_factory=dict)
    """The factor by which a stage's largest radius may exceed what the derivatives give; elsewhere no element may."""

    def draw(self, generator: np.random.Generator) -> dict[str, Array]:
        arrays: dict[str, Array] = {name: generator.standard_normal(shape) for name, shape in self.shapes.items()}
        for name, over in self.fixed.items():
            arrays[name] = np.where(np.isinf(over), over, arrays[name]) if is_real(over) else over
        return arrays


MASK = np.array([[True, False, True, True], [False, False, False, False], [True, True, True, True]])
HIDING_BIAS = np.array([[0, INFINITE, 0, 0], [0, 0, 0, INFINITE], [INFINITE, INFINITE, INFINITE, INFINITE]])
SCORING: Shapes = {"query": (2, 3, 5), "key": (2, 4, 5)}
ATTENTION: Shapes = {"query": (1, 2, 3, 5), "key": (1, 2, 4, 5), "value": (1, 2, 4, 3)}
PROJECTIONS: Shapes = {"query_weight": (6, 4), "key_weight": (5, 4), "value_weight": (3, 6)}
WORDS: Shapes = {"query": (1, 3, 6), "key": (1, 4, 5), "value": (1, 4, 3)}
ALL_BIASES: Shapes = {
    "query_bias": (4,),
    "key_bias": (4,),
    "value_bias": (6,),
    "output_weight": (6, 5),
    "output_bias": (5,),
}
# Factors at every step take the numbers before to move independently: a query is the same for all keys, weights sum to
# one. Each factor is a little above the largest of twenty seeds.
LOOSE_ATTENTION = {"weights": 2.0, "log_sum_exp": 2.0, "output": 3.0}
LOOSE_HEADS = dict.fromkeys(("raw_scores", "scores", "biased", "masked", "log_sum_exp"), 2.0)
LOOSE_HEADS |= {"weights": 5.0, "context": 12.0, "output": 12.0}

SETTINGS = [
    Setting("dot", "scoring", SCORING, {"score": "dot"}),
    Setting("dot with a scale", "scoring", SCORING, {"score": "dot", "scale": 0.3}),
    Setting("scaled dot", "scoring", SCORING, {"score": "scaled_dot"}),
    Setting("scaled dot with a negative scale", "scoring", SCORING, {"scale": -0.7}),
    Setting(
        "general",
        "scoring",
        {"query": (2, 3, 2), "key": (2, 4, 3), "weight": (2, 3)},
        {"score": "general"},
        loose={"scores": 2.0},
    ),
    Setting(
        "general with a bias",
        "scoring",
        {"query": (2, 3, 2), "key": (2, 4, 3), "weight": (2, 3), "score_bias": (2,)},
        {"score": "general"},
        loose={"scores": 2.0},
    ),
    Setting(
        "additive",
        "scoring",
        {"query": (2, 3, 2), "key": (2, 4, 3), "query_weight": (2, 4), "key_weight": (3, 4), "score_vector": (4,)},
        {"score": "additive"},
        loose={"scores": 4.0},  # where tanh is flat, its slope is still taken as 1
    ),
    Setting(
        "additive with a bias",
        "scoring",
        {
            "query": (3, 2),
            "key": (4, 2),
            "query_weight": (2, 3),
            "key_weight": (2, 3),
            "score_vector": (3,),
            "score_bias": (3,),
        },
        {"score": "additive"},
        loose={"scores": 4.0},
    ),
    Setting(
        "scaled dot under a cap",
        "scoring",
        SCORING,
        {"softcap": 2.0},
        loose={"capped": 30.0},  # where tanh is flat, its slope is still taken as 1
    ),
    Setting("cosine", "scoring", SCORING, {"score": "cosine", "scale": -3.0}, loose={"scores": 6.0}),
    Setting(
        "bilinear attention",
        "general_attention",
        {"query": (1, 2, 3, 2), "key": (1, 2, 4, 3), "value": (1, 2, 4, 2), "weight": (2, 3)},
        loose={"scores": 2.0, "weights": 6.0, "log_sum_exp": 4.0, "output": 6.0},
    ),
    Setting("softmax", "softmax", {"scores": (2, 3, 4)}),
    Setting("softmax of rows with minus infinity", "softmax", {"scores": (3, 4)}, fixed={"scores": HIDING_BIAS}),
    Setting("masking by a mask", "masking", {"scores": (2, 3, 4)}, fixed={"mask": MASK}),
    Setting("masking by a bias", "masking", {"scores": (2, 3, 4), "bias": (3, 4)}, fixed={"bias": HIDING_BIAS}),
    Setting("masking, causal", "masking", {"scores": (2, 3, 4)}, {"is_causal": True}),
    Setting(
        "masking by all three",
        "masking",
        {"scores": (2, 3, 4), "bias": (3, 4)},
        {"is_causal": True},
        {"mask": MASK, "bias": HIDING_BIAS},
    ),
    Setting(
        "masking by a window and lengths",
        "masking",
        {"scores": (2, 1, 3, 4)},
        {"window": (1, 2)},
        {"key_lengths": np.array([4, 1])},
    ),
    Setting("attention", "attention", ATTENTION, loose=LOOSE_ATTENTION),
    Setting(
        "attention of grouped heads behind a past, under a cap",
        "attention",
        {"query": (1, 2, 3, 5), "key": (1, 1, 2, 5), "value": (1, 1, 2, 3)}
        | {"past_key": (1, 1, 2, 5), "past_value": (1, 1, 2, 3)},
        {"softcap": 1.5, "window": (2, None)},
        loose=LOOSE_ATTENTION | {"capped": 30.0, "masked": 30.0, "weights": 30.0, "log_sum_exp": 30.0, "output": 30.0},
    ),
    Setting(
        "attention with a mask, a bias, causality and a scale",
        "attention",
        ATTENTION | {"bias": (1, 1, 3, 4)},
        {"is_causal": True, "scale": -0.4},
        {"mask": MASK, "bias": np.array([[0, 0, 0, 0], [0, 0, 0, 0], [0, INFINITE, 0, 0]])},
        loose=LOOSE_ATTENTION,
    ),
    Setting("heads without biases", "multi_head_attention", WORDS | PROJECTIONS, {"heads": 2}, loose=LOOSE_HEADS),
    Setting(
        "heads that share keys and values",
        "multi_head_attention",
        WORDS | {"query_weight": (6, 4), "key_weight": (5, 2), "value_weight": (3, 3)},
        {"heads": 2, "kv_heads": 1},
        {"key_lengths": np.array([3])},
        loose=LOOSE_HEADS,
    ),
    Setting(
        "heads with every option",
        "multi_head_attention",
        WORDS | PROJECTIONS | ALL_BIASES | {"bias": (1, 1, 3, 4)},
        {"heads": 2, "is_causal": True, "scale": 0.8},
        {"mask": MASK},
        loose=LOOSE_HEADS,
    ),
]


def evaluate(setting: Setting, arrays: dict[str, Array]) -> Stages:
    with np.errstate(all="ignore"):
        return dict(run_operation(NUMPY, setting.operation, arrays, setting.options))


def draw_radii(arrays: dict[str, Array], size: float, generator: np.random.Generator) -> dict[str, Array]:
    """Radii up to a size, some of them zero; what is -inf, a mask or a count is known exactly."""
    return {
        name: np.where(
            np.isfinite(array) & is_real(array) & (generator.random(array.shape) < 0.8),
            size * generator.random(array.shape),
            0.0,
        )
        for name, array in arrays.items()
    }


def moved_inputs(
    arrays: dict[str, Array], radii: dict[str, Array], generator: np.random.Generator, count: int
) -> Iterator[dict[str, Array]]:
    """Inputs moved anywhere within their radii, and to their corners."""
    for number in range(count):
        moved = {}
        for name, array in arrays.items():
            step = generator.uniform(-1, 1, array.shape)
            step = np.sign(step) if number % 2 else step
            moved[name] = array + step * radii[name] if is_real(array) else array
        yield moved


def rounding(stages: Stages, others: Stages, name: str) -> float:
    """What float64 itself may be off by: of the stage, and of the scores whose exponential it is made of."""

    def largest(stage: str) -> float:
        both = [own[stage] for own in (stages, others) if stage in own]
        return max((float(np.abs(array[np.isfinite(array)]).max(initial=0)) for array in both), default=0.0)

    return 2e-14 * (1 + largest("raw_scores") + largest("biased")) * (1 + largest(name) + largest("value"))


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), exponent=st.floats(-8, 3))
def test_no_stage_moves_further_than_its_radius(setting: Setting, seed: int, exponent: float) -> None:
    generator = np.random.default_rng(seed)
    arrays = setting.draw(generator)
    radii = draw_radii(arrays, 10**exponent, generator)
    balls = propagate(setting.operation, setting.options, Inputs(arrays, radii))
    stages = evaluate(setting, arrays)
    assert list(balls) == list(stages)
    for moved in moved_inputs(arrays, radii, generator, 12):
        for name, array in evaluate(setting, moved).items():
            infinite = np.isinf(stages[name])
            np.testing.assert_array_equal(np.isinf(array), infinite)
            change = np.abs(np.where(infinite, 0, array) - np.where(infinite, 0, stages[name]))
            assert (change <= balls[name].radius + rounding(stages, {name: array}, name)).all(), name
            assert (balls[name].radius[infinite] == 0).all()


def first_order(setting: Setting, arrays: dict[str, Array], radii: dict[str, Array]) -> Stages:
    """How far each stage moves to first order, from its numerical derivative by every number of every input."""
    step = 1e-5
    stages = evaluate(setting, arrays)
    moves = {name: np.zeros(stage.shape) for name, stage in stages.items()}
    for name, radius in radii.items():
        for index in np.argwhere(radius > 0):
            sides = []
            for sign in (1, -1):
                array = arrays[name].copy()
                array[tuple(index)] += sign * step
                sides.append(evaluate(setting, arrays | {name: array}))
            for stage, move in moves.items():
                finite = np.isfinite(stages[stage])
                slope = np.zeros(move.shape)
                slope[finite] = (sides[0][stage][finite] - sides[1][stage][finite]) / (2 * step)
                move += np.abs(slope) * radius[tuple(index)]
    return moves


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_small_radii_stay_within_a_stated_factor_of_what_the_derivatives_give(setting: Setting, seed: int) -> None:
    generator = np.random.default_rng(seed)
    arrays = setting.draw(generator)
    size = 1e-7
    radii = draw_radii(arrays, size, generator)
    balls = propagate(setting.operation, setting.options, Inputs(arrays, radii))
    for name, least in first_order(setting, arrays, radii).items():
        radius = balls[name].radius
        slack = 1e-8 * size  # of the numerical derivative
        assert (radius >= least * (1 - 1e-6) - slack).all(), name
        if name in setting.loose:
            assert radius.max() <= setting.loose[name] * least.max(), name
        else:
            assert (radius <= least * (1 + 1e-5) + slack).all(), name


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_exact_inputs_have_exact_stages(setting: Setting) -> None:
    arrays = setting.draw(np.random.default_rng(5))
    radii = {name: np.zeros(array.shape) for name, array in arrays.items()}
    for name, ball in propagate(setting.operation, setting.options, Inputs(arrays, radii)).items():
        np.testing.assert_array_equal(ball.radius, np.zeros(ball.value.shape), err_msg=name)


CASES = [case for case in select_cases().cases if case.operation in PROPAGATED]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_values_are_the_stages_that_numpy_computes(
    case: Case, compute: Callable[[Case, str], tuple[Inputs, Stages]]
) -> None:
    inputs, stages = compute(case, "float64")
    balls = propagate(case.operation, case.options, inputs)
    assert list(balls) == list(stages)
    for name, ball in balls.items():
        assert ball.radius.shape == ball.value.shape
        value, computed = ball.value, stages[name]
        if name == "log_sum_exp" and case.options.get("empty_rows") in ("uniform", "nan"):
            # No convention says what it is in a row without a key.
            value, computed = value[value > -np.inf], computed[value > -np.inf]
        largest = np.abs(computed[np.isfinite(computed)]).max(initial=1)
        np.testing.assert_allclose(value, computed, rtol=1e-13, atol=1e-14 * largest, err_msg=name)


# The formulas by hand, one at a time.


def moved_by(operation: str, inputs: dict[str, list[float]], radii: dict[str, list[float]], **options: Any) -> Any:
    """Return the balls of the stages of rows of numbers that move by radii."""
    arrays, around = ({name: np.array([[[row]]]) for name, row in rows.items()} for rows in (inputs, radii))
    return propagate(operation, options, Inputs(arrays, around))


def test_a_product_moves_by_both_factors_and_their_radii() -> None:
    moved = moved_by("scoring", {"query": [2.0], "key": [-3.0]}, {"query": [0.5], "key": [0.25]})["raw_scores"]
    # |2.5 * -3.25 + 6| = 2.125 = 2 * 0.25 + 0.5 * 3 + 0.5 * 0.25
    assert (moved.value.item(), moved.radius.item()) == (-6.0, 2.125)


def test_a_sum_moves_by_both_radii_and_an_infinite_one_not_at_all() -> None:
    inputs, radii = {"scores": [1.0, 2.0], "bias": [4.0, INFINITE]}, {"scores": [0.5, 0.5], "bias": [0.25, 0.0]}
    total = moved_by("masking", inputs, radii)["biased"]
    np.testing.assert_array_equal(total.value.ravel(), [5.0, INFINITE])
    np.testing.assert_array_equal(total.radius.ravel(), [0.75, 0.0])


def test_a_negative_factor_gives_no_negative_radius() -> None:
    moved = moved_by("scoring", {"query": [1.0], "key": [1.0]}, {"query": [0.5], "key": [0.0]}, scale=-4.0)["scores"]
    assert (moved.value.item(), moved.radius.item()) == (-4.0, 2.0)


def test_two_scores_that_part_move_their_weights_by_the_logistic_function() -> None:
    balls = propagate("softmax", {}, Inputs({"scores": np.zeros((1, 2))}, {"scores": np.full((1, 2), 0.5)}))
    # One score up by a half, the other down: their difference is 1.
    expected = 1 / (1 + math.exp(-1)) - 0.5
    np.testing.assert_allclose(balls["weights"].radius, [[expected, expected]], rtol=1e-15)
    # Both up by a half.
    np.testing.assert_allclose(balls["log_sum_exp"].radius, [0.5], rtol=1e-15)


def corners(scores: Array, radius: Array) -> tuple[Array, float]:
    """The largest moves of the weights and of log_sum_exp at all corners, by the definition."""

    def both(moved: Array) -> tuple[Array, float]:
        exponentials = np.exp(moved - moved.max())
        return exponentials / exponentials.sum(), float(moved.max() + np.log(exponentials.sum()))

    weights, log_sum = both(scores)
    moved = [both(scores + np.array(signs) * radius) for signs in product((-1, 1), repeat=scores.size)]
    return np.max([np.abs(own - weights) for own, _ in moved], axis=0), max(abs(own - log_sum) for _, own in moved)


@pytest.mark.parametrize(
    ("spread", "size"),
    [(1, 1e-9), (1, 1e-3), (1, 1), (5, 30), (30, 50), (100, 100), (1000, 300), (1000, 1000), (300, 3000)],
)
def test_softmax_moves_to_its_radius_in_some_corner_and_never_beyond(spread: float, size: float) -> None:
    generator = np.random.default_rng(11)
    for _ in range(60):
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


def test_a_weight_too_small_for_float64_may_still_win() -> None:
    scores, radius = np.array([[0.0, -800.0]]), np.array([[0.0, 1000.0]])
    balls = propagate("softmax", {}, Inputs({"scores": scores}, {"scores": radius}))
    np.testing.assert_array_equal(balls["weights"].value, [[1, 0]])
    np.testing.assert_array_equal(balls["weights"].radius, [[1, 1]])
    # -800 + 1000 = 200 is the row's new maximum.
    np.testing.assert_allclose(balls["log_sum_exp"].radius, [200], rtol=1e-14)


def test_a_large_radius_on_a_key_that_can_never_win_costs_the_others_nothing() -> None:
    # A finite fill of -1e30, as it is rounded to float32.
    scores, radius = np.array([[0.0, 0.0, -1e30]]), np.array([[1e-9, 1e-9, 1e22]])
    moved = propagate("softmax", {}, Inputs({"scores": scores}, {"scores": radius}))["weights"].radius
    np.testing.assert_allclose(moved, [[5e-10, 5e-10, 0]], rtol=1e-8, atol=0)


def test_a_winning_key_may_lose_everything_although_the_others_hardly_count() -> None:
    scores, radius = np.array([[0.0, -40.0]]), np.array([[60.0, 1.0]])
    moved = propagate("softmax", {}, Inputs({"scores": scores}, {"scores": radius}))["weights"].radius
    # p' = 1 / (1 + e^(60 - 40 + 1)), far below 1, although e^-40 vanishes beside 1.
    np.testing.assert_allclose(moved, [[1.0, 1.0]], rtol=1e-8)


def test_a_single_key_keeps_its_whole_weight_wherever_its_score_goes() -> None:
    balls = propagate("softmax", {}, Inputs({"scores": np.array([[3.0]])}, {"scores": np.array([[50.0]])}))
    assert balls["weights"].radius.item() == 0
    assert balls["log_sum_exp"].radius.item() == 50


@pytest.mark.parametrize("radius", [0.0, 1e-3, 5.0, 700.0, 1e5, 1e300])
def test_an_additive_score_cannot_leave_the_range_of_its_vector(radius: float) -> None:
    arrays = {"query": np.array([[9.0]]), "key": np.array([[0.0]]), "query_weight": np.array([[1.0]])}
    arrays |= {"key_weight": np.array([[1.0]]), "score_vector": np.array([3.0])}
    radii = {name: np.zeros(array.shape) for name, array in arrays.items()} | {"query": np.array([[radius]])}
    ball = propagate("scoring", {"score": "additive"}, Inputs(arrays, radii))["scores"]
    assert ball.radius.item() == pytest.approx(3 * min(radius, 2), rel=1e-15)


def test_an_operation_without_a_propagation_is_refused() -> None:
    with pytest.raises(AssertionError, match="no propagation for the operation convolution"):
        propagate("convolution", {}, Inputs({}, {}))
