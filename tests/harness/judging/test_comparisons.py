"""What numbers say: two arrays, errors beside bounds, condition numbers; and what is true of a case, or not known."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from problems import Array, Arrays, Problem
from tables import tables_beside

from attncheck.attention.exact_array import Enclosure
from attncheck.attention.oracle import PrecisionExhausted
from attncheck.diagnosis.examine import judge_and_diagnose
from attncheck.judging import exact_stages as module
from attncheck.judging.compare import (
    Comparison,
    ErrorTier,
    MeasuredErrors,
    absolute_difference,
    compare_arrays,
    compare_shapes_and_nonfinite,
    error_ratio,
    index_of_largest,
    rate_errors,
    z_failure_limit,
)
from attncheck.judging.judge import compare_all_pairs
from attncheck.judging.judge_stages import StageJudgement
from attncheck.judging.stage_bounds import Conditioning, condition_numbers, flag_within_range
from attncheck.judging.truth import Truth
from attncheck.spec.dtypes import numpy_dtype
from attncheck.spec.verdicts import Verdict

AGREE, NUMERIC, NONFINITE, UNVERIFIED = Verdict.AGREE, Verdict.NUMERIC, Verdict.NONFINITE, Verdict.UNVERIFIED
DTYPES = ("float32", "float64")
NAN, INF = np.nan, np.inf


# Two arrays: shape, then dtype, then the places of NaN and infinity, then values.


def compare(first: Any, second: Any, allowed: Any = 0.0, dtype: str = "float64") -> Comparison:
    """Compare where one number, or one for each element, is allowed."""
    array = np.array(first, dtype)
    return compare_arrays(array, np.array(second, dtype), np.broadcast_to(np.asarray(allowed, np.float64), array.shape))


def test_shape_comes_first_then_dtype_then_the_places_of_nan() -> None:
    of_form: tuple[tuple[Array, Array, Verdict, str], ...] = (
        (np.full((2, 3), NAN), np.ones((3, 2), "f"), Verdict.SHAPE, "shape 2x3 against 3x2"),
        (np.ones((1, 1)), np.ones(1), Verdict.SHAPE, "shape 1x1 against 1"),  # they would broadcast
        (np.array([NAN, 1]), np.ones(2, "f"), Verdict.DTYPE, "dtype float64 against float32"),
        (np.ones(2, "float16"), np.ones(2, "bfloat16"), Verdict.DTYPE, "dtype float16 against bfloat16"),
        *(
            (np.ones(2, each), np.ones(2, each), Verdict.DTYPE, f"dtype {each} is not a floating one")
            for each in ("int64", "bool", "complex128", "object")
        ),
    )
    for first, second, verdict, message in of_form:
        assert compare_arrays(first, second, np.full(first.shape, 9.0)) == Comparison(verdict, message)
        if verdict is Verdict.SHAPE:
            assert compare_shapes_and_nonfinite(first, second) == Comparison(verdict, message)
    assert compare_shapes_and_nonfinite(np.array([NAN, 1.0]), np.array([NAN, 2.0])) is None
    found = compare([[1.0, 2.0], [3.0, NAN]], [[100.0, 2.0], [3.0, 4.0]])
    assert (found.verdict, found.index, found.reference, found.difference) == (NONFINITE, (1, 1), 4.0, None)


def test_nan_and_each_infinity_agree_with_themselves_alone() -> None:
    for dtype in DTYPES:
        for first, second in permutations([NAN, INF, -INF, 1.0], 2):
            # However much is allowed, and also where nothing is known of that.
            assert compare([0, first], [0, second], INF, dtype).verdict is NONFINITE
            assert compare_arrays(*np.array([[0, first], [0, second]], dtype), None).verdict is NONFINITE
        for special in (NAN, INF, -INF):
            found = compare([special, 2.0], [special, 2.0], 0.0, dtype)
            assert (found.verdict, found.difference, found.ratio) == (AGREE, 0.0, 0.0)
        assert compare([0.0], [-0.0], 0.0, dtype).verdict is AGREE
    for first, second, allowed, verdict, index in (
        ([NAN, 1.0], [1.0, NAN], 0.0, NONFINITE, (0,)),
        ([NAN, INF, 1.0], [NAN, INF, 1.5], 0.25, NUMERIC, (2,)),
        # Where anything is right NaN is too, and nowhere else.
        ([NAN, 1.0], [0.0, 1.0], [NAN, 1e-9], AGREE, (0,)),
        ([NAN, 1.0], [0.0, 1.0], [1.0, NAN], NONFINITE, (0,)),
    ):
        found = compare(first, second, allowed)
        assert (found.verdict, found.index) == (verdict, index)
    assert index_of_largest(np.array([[False, True], [False, True]])) == (0, 1)


def test_what_is_allowed_agrees_and_the_next_number_does_not() -> None:
    for dtype in DTYPES:
        for direction in (1, -1):
            edge = np.array(1.0 + direction * 0.25, dtype)
            beyond = np.nextafter(edge, np.array(direction * INF, dtype))
            assert compare([1.0], [edge], 0.25, dtype).verdict is AGREE
            found = compare([1.0], [beyond], 0.25, dtype)
            assert (found.verdict, found.allowed, found.difference) == (NUMERIC, 0.25, abs(float(beyond) - 1))


def test_all_is_said_of_the_element_that_is_worst_beside_what_is_allowed_there() -> None:
    found = compare([[1000.0, 0.0], [1.0, 0.0]], [[1008.0, 0.0], [1.0, 0.5]], [[10.0, 1.0], [1.0, 0.25]])
    assert found == Comparison(NUMERIC, "", (1, 1), 0.0, 0.5, 0.5, 0.25, 2.0)
    found = compare([[1000.0, 0.0]], [[1008.0, 0.5]], [[10.0, 1.0]])
    assert found == Comparison(AGREE, "", (0, 0), 1000.0, 1008.0, 8.0, 10.0, 0.8)
    found = compare([0.0, 1.0], [5e-324, 1.0])
    assert (found.verdict, found.index, found.ratio) == (NUMERIC, (0,), INF)
    assert compare(1.0, 2.0).index == ()
    for shape in ((0,), (2, 0), (0, 3)):
        assert compare(np.zeros(shape), np.zeros(shape)) == Comparison(AGREE)


def test_without_bounds_of_its_shape_nothing_is_said_of_values_that_differ() -> None:
    for allowed, reason in (
        (None, "there is no exact answer, and so no bound"),
        # The shape that the bounds have not is another row's fault.
        (np.ones((1, 4)), "shape 4, where the exact answer has 1x4"),
    ):
        array = np.array([NAN, -INF, 0.0, 1.0])
        assert compare_arrays(array, array.copy(), allowed) == Comparison(AGREE)
        assert compare_arrays(array, np.array([NAN, -INF, 0.0, np.nextafter(1.0, 2)]), allowed).verdict is UNVERIFIED
        found = compare_arrays(np.ones(4), np.array([1.0, 3.0, 2.0, 1.0]), allowed)
        assert found == Comparison(UNVERIFIED, f"values not compared: {reason}", (1,), 1.0, 3.0, 2.0)


def test_differences_quotients_and_condition_numbers_are_exact_and_raise_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compare([1.7e308], [-1.7e308], 1.0).verdict is NUMERIC
        found = compare([1.7e308, 1.0], [-1.7e308, 1.5], [INF, 1.0])
        tops, bottoms = np.array([0.0, 1.0, 0.0, 1.0, 3.0, INF, 1e308]), np.array([0.0, 0, 2, INF, 2, INF, 1e-308])
        assert error_ratio(tops, bottoms).tolist() == [0.0, INF, 0.0, 0.0, 1.5, 0.0, INF]
    assert (found.verdict, found.index, found.ratio) == (AGREE, (1,), 0.5)
    small = np.array([2.0**-60], np.float32)
    assert absolute_difference(np.array([1], np.float32), small).item() == 1 - 2.0**-60
    numbers = condition_numbers(np.array([2.0, -2.0, 0.0, 0.0]), np.array([0.5, 0.5, 0.0, 0.5]), 0.25)
    np.testing.assert_array_equal(numbers, [1.0, 1.0, 0.0, INF])
    assert Conditioning(1.0, 1.0, 0, 1, 0.25).condition_number(4.0, -2.0) == 8.0


SPECIAL = st.sampled_from([NAN, INF, -INF, 0.0, 1.0, -2.5])


@given(first=arrays(np.float64, (2, 3), elements=SPECIAL), second=arrays(np.float64, (2, 3), elements=SPECIAL))
def test_which_of_the_two_comes_first_does_not_matter(first: Array, second: Array) -> None:
    one, other = (compare_arrays(*pair, np.full((2, 3), 1.25)) for pair in ((first, second), (second, first)))
    for part in ("verdict", "index", "difference", "ratio"):
        assert getattr(one, part) == getattr(other, part)
    np.testing.assert_equal([one.value, one.reference], [other.reference, other.value])


# Tiers: proved wrong, statistically wrong, noisy, or within what the class allows.


def measured(error: Any, *, radius: Any = 0.0, max_error: Any = 1.0, scale: Any = 0.125, **more: Any) -> MeasuredErrors:
    """Judge errors, given with everything else as one number for all or as one for each."""
    shape = np.shape(error)
    numbers = [np.broadcast_to(np.asarray(part, np.float64), shape) for part in (error, radius, max_error, scale)]
    judged = np.broadcast_to(np.asarray(more.get("judged", True)), shape)
    return rate_errors(*numbers, judged, supports_statistics=more.get("generic", True))


JUST_ABOVE = np.nextafter(1.0, 2)
ROWS: tuple[tuple[Any, dict[str, Any], str, float, Any], ...] = (
    *tables_beside(__file__)["tiers"],
    ([JUST_ABOVE], {}, "PROVEN", JUST_ABOVE, (0,)),
    (np.full(300, 2.0), {"scale": 0.01}, "PROVEN", 2.0, (0,)),  # before statistics
    (np.zeros((2, 0, 3)), {}, "WITHIN", 0.0, None),
)


def test_an_error_beyond_its_bound_is_proved_wrong_whatever_the_inputs() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for error, more, tier, ratio, index in ROWS:
            for generic in (True, False):
                found = measured(error, **more, generic=generic)
                place = None if index is None else tuple(index)
                assert (found.tier, found.ratio, found.index) == (ErrorTier[tier], ratio, place), error
                assert found.tier.is_failure == (tier == "PROVEN")
    assert measured([INF, 0.5], radius=[INF, 0.0], judged=[False, True]).mean_z == 4.0


def one_of(count: int, error: float) -> Array:
    """So many errors of 0, of which the last is another."""
    return np.append(np.zeros(count - 1), error)


# sqrt(2 ln(2 N / 1e-6)): 6.3 for 256 elements, 7.5 for a million (docs/numerics.md, section 7).
@pytest.mark.parametrize(("elements", "limit"), [(1, 5.387), (256, 6.333), (10**6, 7.527)])
def test_one_error_beyond_the_threshold_is_statistically_wrong_on_generic_inputs_alone(
    elements: int, limit: float
) -> None:
    assert z_failure_limit(elements) == pytest.approx(limit, abs=5e-4)
    if elements < 1000:  # sigma is 1/8: an error of z / 8 lies at z
        above, below = (one_of(elements, (limit + by) / 8) for by in (0.001, -0.001))
        assert (measured(above).tier, measured(above, generic=False).tier) == (ErrorTier.STATISTICAL, ErrorTier.WITHIN)
        assert measured(above).tier.is_failure
        assert not measured(below).tier.is_failure
        assert measured(above).largest_z == pytest.approx(limit, abs=2e-3)


def test_errors_that_are_all_a_little_too_large_fail_but_not_of_few_rows_columns_or_elements() -> None:
    for shape in ((25, 25), (2, 13, 25), (300, 26), (26, 300)):
        assert measured(np.full(shape, 1.0625 / 8)).tier is ErrorTier.STATISTICAL
        # The last is that of roundings just above a power of two.
        for z, tier in (
            (1.0, ErrorTier.WARNING),
            (0.625, ErrorTier.WARNING),
            (0.5625, ErrorTier.WITHIN),
            (3**-0.5, ErrorTier.WITHIN),
        ):
            assert measured(np.full(shape, z / 8)).tier is tier
        assert measured(np.full(shape, 1.0625 / 8), generic=False).tier is ErrorTier.WITHIN
    for shape in ((300,), (1, 300), (300, 1), (24, 300), (300, 24), (1, 24, 300)):
        found = measured(np.full(shape, 1.5 / 8))
        assert (found.tier, found.mean_z) == (ErrorTier.WITHIN, 1.5)
    for count, tier in ((255, ErrorTier.WITHIN), (256, ErrorTier.STATISTICAL)):
        places = np.add.outer(np.arange(30), np.arange(30)) % 30 < 9  # nine in every row and column
        places.flat[np.flatnonzero(places)[count:]] = False
        assert min(places.any(axis=0).sum(), places.any(axis=1).sum()) >= 25
        assert measured(np.full((30, 30), 1.5 / 8), judged=places).tier is tier
    for rows, tier in ((24, ErrorTier.WITHIN), (25, ErrorTier.STATISTICAL)):
        judged = np.broadcast_to(np.arange(40)[:, np.newaxis] < rows, (40, 40))
        for places in (judged, judged.T):
            assert measured(np.full((40, 40), 1.5 / 8), judged=places).tier is tier


def test_a_large_error_is_a_warning_from_256_elements() -> None:
    # Half the threshold is 3.17 for 256 elements and 3.61 for 250,000.
    for elements, z, tier in (
        (255, 3.25, ErrorTier.WITHIN),
        (256, 3.25, ErrorTier.WARNING),
        (256, 3.125, ErrorTier.WITHIN),
        (250_000, 3.5, ErrorTier.WITHIN),
        (250_000, 3.75, ErrorTier.WARNING),
    ):
        assert measured(one_of(elements, z / 8)).tier is tier
        assert measured(one_of(elements, z / 8), generic=False).tier is ErrorTier.WITHIN


DTYPE = Verdict.DTYPE


def test_what_no_precision_settles_what_is_too_large_and_what_nobody_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*arguments: object, **options: object) -> None:
        raise PrecisionExhausted("softmax: weights not settled")

    inputs = {name: np.ones((1, 1, 3, 2)) for name in ("query", "key", "value", "grad_output")}
    problem = Problem("attention_gradients", {}, inputs)
    monkeypatch.setattr(module, "MAX_SCORES_OF_ALL_ROWS", 9)
    assert problem.truth().exact
    monkeypatch.setattr(module, "MAX_SCORES_OF_ALL_ROWS", 8)
    outside = "attention_gradients has 9 scores; at most 8 are judged where every row counts"
    assert (problem.truth().exact, problem.truth().no_answer_reason) == ({}, outside)
    monkeypatch.setattr(module, "enclose_exact_stages", exhausted)
    truth = Problem("softmax", {}, {"scores": np.ones((1, 1, 1, 2))}).truth()
    assert (truth.exact, truth.no_answer_reason) == ({}, "softmax: weights not settled")
    monkeypatch.setattr(module, "enclose_exact_stages", pytest.fail)
    truth = problem.truth(returned=())
    assert (truth.exact, truth.bounds.bounds_by_stage("native")) == ({}, {})


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_largest_number_of_the_dtype_is_judged_and_nothing_larger(dtype: str) -> None:
    largest, zero = float(np.finfo(dtype).max), np.zeros(6)
    with np.errstate(over="ignore"):
        high = np.array([largest, -largest, np.nextafter(largest, np.inf), 0.0, -np.inf, np.inf])
    judged = flag_within_range(Enclosure(high, zero, np.where(high == np.inf, np.inf, 0.0)), dtype)
    assert judged.tolist() == [True, True, False, True, False, False]
    if dtype != "float16":  # a score of the square of it leaves the rest to be judged
        arrays = {"query": np.array([[[[largest, 1]]]], dtype), "key": np.array([[[[-largest, 0], [0, 1]]]], dtype)}
        exact = Problem("scoring", {"scale": 1.0}, arrays).truth(dtype, supports_statistics=False).exact["scores"]
        assert flag_within_range(exact, dtype).ravel().tolist() == [False, True]


# Scores that float16 cannot hold before they are scaled: a matter of the rounding model.

RNG = np.random.default_rng(6)
QUERY, KEY = (RNG.uniform(1, 2, size=(1, 2, length, 4)) for length in (3, 4))
QUERY[0, 0, 1] *= 100
OVERFLOWING = {"query": QUERY, "key": 100 * KEY, "value": RNG.normal(size=(1, 2, 4, 5))}
"""2 heads, 3 queries and 4 keys, of which one query of one head has raw scores of 8e4."""
BACKWARD = {"grad_output": RNG.normal(size=(1, 2, 3, 5)), "bias": RNG.normal(size=(1, 2, 1, 4))}


def has_bound(truth: Truth, stage: str, model: str) -> NDArray[np.bool_]:
    return np.isfinite(truth.bounds.bounds_by_stage(model)[stage].max_error)


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
    step = truth.step_reference("output", {"output": output}, "eager")
    assert np.isfinite(step.bound.max_error[0, 0]).all(axis=-1).tolist() == [True, False, True]


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
    return {
        stage: truth.exact[stage].high.astype(numpy_dtype(other.get(stage, truth.bounds.dtype))) for stage in SHAPES
    }


def judgements(truth: Truth, stages: Mapping[str, Array], model: str = "fused") -> dict[str, StageJudgement]:
    return {each.stage: each for each in judge_and_diagnose(truth, stages, SHAPES, model).judgements}


def test_a_log_sum_exp_may_be_float32_by_another_bound_and_nothing_else_may(truth: Truth) -> None:
    for model in ("fused", "fused_lse", "fused_fp8", "eager", "eager_pre"):
        for stages in (right(truth), right(truth, log_sum_exp="float32")):
            assert {each.verdict for each in judgements(truth, stages, model).values()} == {AGREE}
        wide, narrow = truth.with_wide_statistics.bounds.bounds_by_stage(model), truth.bounds.bounds_by_stage(model)
        assert (wide["log_sum_exp"].max_error < narrow["log_sum_exp"].max_error).all()
        for stage in ("scores", "weights", "output"):
            np.testing.assert_array_equal(wide[stage].max_error, narrow[stage].max_error)
            np.testing.assert_array_equal(wide[stage].sigma, narrow[stage].sigma)
    bound = truth.with_wide_statistics.bounds.bounds_by_stage("fused")["log_sum_exp"]
    assert (bound.max_error < 100 * 2.0**-24 * (1 + np.abs(truth.exact["log_sum_exp"].high))).all()
    for stage, dtype in (("weights", "float32"), ("output", "float32"), ("log_sum_exp", "float64")):
        found = judgements(truth, right(truth, **{stage: dtype}))
        assert [name for name, each in found.items() if each.verdict is not AGREE] == [stage]
        expected = f"{truth.bounds.dtype} or float32" if stage == "log_sum_exp" else truth.bounds.dtype
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
        name: {"log_sum_exp": each.bounds.bounds_by_stage("fused")["log_sum_exp"].max_error}
        for name, each in (("narrow", truth), ("wide", truth.with_wide_statistics))
    }
    narrow, wide = right(truth), right(truth, log_sum_exp="float32", output="float32")
    for by, verdict in ((0, AGREE), (1, NUMERIC)):
        other = wide | {"log_sum_exp": wide["log_sum_exp"] + np.float32(by)}
        pairs = compare_all_pairs({"narrow": narrow, "wide": other}, bounds)
        assert pairs["narrow", "wide", "log_sum_exp"].verdict is verdict
        assert pairs["narrow", "wide", "output"].verdict is DTYPE
