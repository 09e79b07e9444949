"""What has no exact answer: as much as NaN reaches in NumPy; rows without a key, whose answer is a convention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from problems import LK, NAMES, Array, Arrays, Options, Problem, draw, failing

from attncheck.backends import numpy_backend as reference
from attncheck.judging.judge import compare_all_pairs, exact_values_of_whole_stages, max_errors_of_whole_stages
from attncheck.judging.judge_implementation import KnownEmptyRows
from attncheck.judging.judge_stages import StageJudgement, flag_failing_elements, judge_stages, stage_agrees
from attncheck.judging.truth import Truth
from attncheck.judging.undefined import find_undefined_elements
from attncheck.spec.verdicts import Verdict

AGREE, NUMERIC, SEMANTIC, UNVERIFIED = Verdict.AGREE, Verdict.NUMERIC, Verdict.SEMANTIC, Verdict.UNVERIFIED
REASON = "holds NaN or an infinity that no mask explains"
NORMAL = np.random.default_rng(8).standard_normal


def judged_of(truth: Truth, stages: Mapping[str, Array]) -> dict[str, StageJudgement]:
    shapes = {stage: array.shape for stage, array in stages.items()}
    return {each.stage: each for each in judge_stages(truth, stages, shapes, "native")}


def spoilt_at(problem: Problem, name: str, index: Any, number: float = np.nan) -> Problem:
    array = problem.inputs[name].copy()
    array[index] = number
    return problem.with_inputs(**{name: array})


@pytest.mark.parametrize("name", NAMES)
def test_as_much_is_undefined_as_nan_reaches(name: str) -> None:
    problem = draw(name)
    assert problem.truth().undefined.elements is None, "nothing is, in finite inputs nor by what forbids a key"
    # A mask hides NaN from some kernels and not from others: that has tests of its own.
    hidden = {"mask", "query_mask", "key_lengths", "is_causal", "window", "mask_fill", "block_size"}
    options = {each: value for each, value in problem.options.items() if each not in hidden}
    kept = {each: array for each, array in problem.inputs.items() if each not in hidden}
    kept |= {each: np.where(np.isinf(kept[each]), 0.0, kept[each]) for each in {"bias", "sinks"} & kept.keys()}
    kept |= {each: np.arange(LK).reshape(1, 1, 1, LK) for each in {"key_indices"} & kept.keys()}
    rng = np.random.default_rng(NAMES.index(name))
    for each, array in kept.items():
        finite = np.argwhere(np.isfinite(array)) if array.dtype == np.float64 else []
        for index in finite[rng.integers(len(finite), size=3)] if len(finite) else ():
            spoilt = spoilt_at(Problem(problem.operation, options, kept), each, tuple(index))
            undefined = find_undefined_elements(spoilt.without_layout().canonical())
            for stage, returned in spoilt.returned().items():
                shape = returned.shape
                found = np.zeros(shape, bool) if undefined is None else undefined.flag_undefined_in_stage(stage, shape)
                # A pair of the past, which is not rotated, and a vector behind a norm are flagged as a whole.
                is_coarse = each == "past_key" or ("norm" in problem.operation and each.startswith("rotary"))
                reached = found & np.isnan(returned) if is_coarse and stage.startswith("rotated") else found
                np.testing.assert_array_equal(reached, np.isnan(returned), f"{each} {index} {stage}")


def test_what_is_undefined_is_filled_with_ones_and_says_why() -> None:
    inputs = {name: array.copy() for name, array in draw("cosine").inputs.items()}
    inputs["query"][0, 0, 1] = inputs["key"][0, 1, 3] = 0
    undefined = find_undefined_elements(Problem("scoring", {"score": "cosine"}, inputs))
    wanted = np.zeros((2, 4, 5, 6), dtype=np.bool_)
    wanted[0, 0, 1] = wanted[0, 1, :, 3] = True
    np.testing.assert_array_equal(undefined.flag_undefined_in_stage("scores", wanted.shape), wanted)
    no_direction = "has a vector of length 0, which has no direction"
    assert undefined.reason == f"query {no_direction}; key {no_direction}"
    dots = Problem("scoring", {"score": "dot"}, inputs)
    assert find_undefined_elements(dots) is None
    inputs["query"][0, 0, 0, 0] = np.nan
    undefined = find_undefined_elements(dots)
    assert undefined.reason == f"query {REASON}"
    filled = undefined.fill_with_ones(inputs)["query"]
    assert (filled[0, 0, 0, 0], (filled != inputs["query"]).sum()) == (1, 1)


@pytest.fixture(scope="module")
def infinite() -> Truth:
    """Attention of which one query and one value are infinite."""
    problem = spoilt_at(spoilt_at(draw("attention"), "query", (0, 3, 2, 1), np.inf), "value", (1, 0, 4, 2), -np.inf)
    return problem.truth(supports_statistics=False)


@pytest.fixture(scope="module")
def stages(infinite: Truth) -> Arrays:
    return Problem("attention", {}, infinite.judged_problem.problem_without_layout.inputs).returned()


def test_elements_beside_keep_the_exact_answer_and_a_stage_says_how_many_were_not_judged(
    infinite: Truth, stages: Arrays
) -> None:
    finite, judged = draw("attention").truth(), judged_of(infinite, stages)
    # A row of six keys, or of three columns; and the column of a value in both heads that share it, five rows each.
    counts = {"raw_scores": 6, "scores": 6, "weights": 6, "log_sum_exp": 1, "output": 3 + 10}
    assert {stage: each.unjudged for stage, each in judged.items()} == counts
    for stage, enclosure in infinite.exact.items():
        known = np.isfinite(enclosure.radius)
        assert (judged[stage].verdict, (~known).sum()) == (AGREE, counts[stage])
        np.testing.assert_array_equal(enclosure.high[known], finite.exact[stage].high[known])
        assert np.isnan(exact_values_of_whole_stages(infinite)[stage][~known]).all()
        step = infinite.step_reference(stage, {name: each for name, each in stages.items() if name != stage}, "native")
        flags = infinite.undefined.elements.flag_undefined_in_stage(stage, known.shape)
        np.testing.assert_array_equal(np.isinf(step.exact.radius), flags)
    expected = f"13 of 120 elements were not judged, for want of an exact answer: query {REASON}; value {REASON}"
    assert judged["output"].message == expected


def test_beside_what_is_undefined_a_wrong_number_is_found_and_there_nothing_is(infinite: Truth, stages: Arrays) -> None:
    for stage in ("scores", "weights", "log_sum_exp", "output"):
        flags = infinite.undefined.elements.flag_undefined_in_stage(stage, stages[stage].shape)
        for is_wrong in (False, True):
            changed = stages[stage].copy()
            changed[tuple(np.argwhere(flags != is_wrong)[0])] = 0.25
            assert flag_failing_elements(infinite.stage_reference(stage, "native", changed), changed).any() == is_wrong
            assert stage_agrees(infinite.stage_reference(stage, "native", changed), changed) != is_wrong
            verdict = judged_of(infinite, {**stages, stage: changed})[stage].verdict
            assert verdict == (NUMERIC if is_wrong else AGREE)


def test_a_stage_of_which_nothing_was_judged_is_unverified() -> None:
    inputs = {"query": np.full((1, 1, 1, 2), np.inf, "f"), "key": np.ones((1, 1, 3, 2), "f")}
    truth = Problem("scoring", {}, inputs).truth("float32", supports_statistics=False)
    judged = judged_of(truth, {"scores": np.zeros((1, 1, 1, 3), np.float32)})["scores"]
    assert (judged.verdict, judged.unjudged, judged.accumulated) == (UNVERIFIED, 3, None)
    assert judged.message == f"there is no exact answer: query {REASON}"


def test_two_implementations_that_differ_only_where_nothing_is_known_are_told_so(
    infinite: Truth, stages: Arrays
) -> None:
    second = {stage: np.nan_to_num(array, nan=5.0, posinf=6.0, neginf=7.0) for stage, array in stages.items()}
    bounds = max_errors_of_whole_stages(infinite, "native")
    for stage, part, verdict, unjudged in (
        ("weights", np.s_[:], AGREE, 6),
        ("output", np.s_[:1, 3:, 2:3], UNVERIFIED, 3),
    ):
        sides = {name: {stage: each[stage][part]} for name, each in (("first", stages), ("second", second))}
        found = compare_all_pairs(sides, {key: {stage: bounds[stage][part]} for key in sides})["first", "second", stage]
        assert (found.verdict, found.unjudged) == (verdict, unjudged)
        if verdict is AGREE:
            assert found.message == "6 elements differ and were not compared: there is no exact answer there"


# Behind a mask.

LAST_KEYS = np.arange(6).reshape(1, 1, 1, 6) < 4
MASKED = {
    "attention": draw("attention").with_inputs(mask=LAST_KEYS),
    "causal": Problem("attention", {"is_causal": True}, draw("attention").inputs),
    "lengths": draw("attention").with_inputs(key_lengths=np.array([4, 3])),
    "bias": draw("attention").with_inputs(bias=np.where(LAST_KEYS, 1.5, -np.inf)),
    "layer": draw("layer").with_inputs(mask=LAST_KEYS),
    "gradients": draw("gradients").with_inputs(mask=LAST_KEYS),
}
ROW_STAGES = ("weights", "log_sum_exp", "context", "output", "grad_query", "grad_key", "grad_value", "grad_bias")


def spoilt_behind(name: str, each: str, number: float) -> tuple[Truth, Arrays]:
    """Return the truth where the last key or value holds a number, and what is right where it is left out."""
    problem = MASKED[name]
    index = (0, -1, 1) if name == "layer" else (0, slice(None), -1, 1)
    truth = spoilt_at(problem, each, index, number).truth(supports_statistics=False)
    exact = problem.truth(supports_statistics=False).exact
    return truth, {stage: own.high.copy() for stage, own in exact.items() if stage in ROW_STAGES}


@pytest.mark.parametrize("each", ["key", "value"])
@pytest.mark.parametrize("name", MASKED)
def test_behind_a_mask_the_numbers_without_that_key_are_right_and_so_is_nan_and_no_other(name: str, each: str) -> None:
    for number in (np.nan, np.inf, -np.inf):
        truth, stages = spoilt_behind(name, each, number)
        judged = judged_of(truth, stages)
        assert {(str(found.verdict), found.unjudged) for found in judged.values()} == {("agree", 0)}
        changed = 0
        for stage, array in stages.items():
            behind = truth.undefined.elements.flag_undefined_behind_mask(stage, array.shape)
            spread = {**stages, stage: np.where(behind, np.nan, array)}
            assert stage_agrees(truth.stage_reference(stage, "native", spread[stage]), spread[stage])
            found = judged_of(truth, spread)[stage]
            assert (found.verdict, found.unjudged) == (UNVERIFIED if behind.all() else AGREE, behind.sum())
            if behind.any():
                assert "only keys that may not be attended hold NaN or infinity" in found.message
                wrong = np.where(behind, array + 0.5, array)
                assert flag_failing_elements(truth.stage_reference(stage, "native", wrong), wrong)[behind].all()
                assert not stage_agrees(truth.stage_reference(stage, "native", wrong), wrong)
                changed += 1
        assert changed


def test_a_row_or_a_sum_over_queries_that_holds_nan_beside_other_numbers_is_not_judged_there() -> None:
    # As TensorFlow's softmax of a row with infinity in it, and the gradient of the output times such weights.
    for name, stage, number, places in (
        ("attention", "weights", np.inf, np.arange(6) == 5),
        ("gradients", "grad_value", np.nan, np.arange(6)[:, np.newaxis] == 5),
    ):
        truth, stages = spoilt_behind(name, "key", number)
        behind = truth.undefined.elements.flag_undefined_behind_mask(stage, stages[stage].shape)
        spread = np.where(behind, np.where(places, np.nan, 0.0), stages[stage])
        zeros = np.where(behind, 0.0, stages[stage])
        for array, is_right in ((spread, True), (zeros, False), (np.where(behind, spread, 0.0), False)):
            assert stage_agrees(truth.stage_reference(stage, "native", array), array) == is_right


# Rows without a key, by each convention.

SOFTMAX = Problem("softmax", {}, {"scores": np.array([[[[1.0, 2.0, 0.5], [-np.inf] * 3]]])})


@pytest.mark.parametrize(("convention", "weight"), [("zero", 0.0), ("uniform", 1 / 3), ("nan", np.nan)])
def test_a_softmax_of_minus_infinities_follows_the_convention(convention: str, weight: float) -> None:
    exact = Problem("softmax", {"empty_rows": convention}, SOFTMAX.inputs).truth(supports_statistics=False).exact
    np.testing.assert_array_equal(exact["weights"].high[0, 0, 1], [weight] * 3)
    assert exact["weights"].high[0, 0, 0].sum() == pytest.approx(1, rel=1e-15)
    # Only the convention of zero says what the sum of nothing is.
    total = exact["log_sum_exp"]
    assert np.isfinite(total.radius[0, 0]).tolist() == [True, convention == "zero"]
    assert convention != "zero" or (total.high[0, 0, 1], total.radius[0, 0, 1]) == (-np.inf, 0)
    if convention == "uniform":  # may be rounded, and no more
        weights = reference.softmax(SOFTMAX.inputs["scores"])["weights"]
        for by, verdicts in ((0.0, {}), (1e-13, {"weights": NUMERIC})):
            weights[0, 0, 1] = [1 / 3, 1 / 3, 1 / 3 + by]
            assert failing(SOFTMAX.judged({"weights": weights}, empty_rows=convention)) == verdicts


@pytest.fixture
def gradients() -> Problem:
    shapes = {"query": (1, 4, 3, 6), "key": (1, 2, 5, 6), "value": (1, 2, 5, 2), "grad_output": (1, 4, 3, 2)}
    mask = np.ones((1, 4, 3, 5), dtype=bool)
    mask[0, 2, 1] = False
    return Problem("attention_gradients", {}, {name: NORMAL(shape) for name, shape in shapes.items()} | {"mask": mask})


def through_the_scores(stages: Mapping[str, Array]) -> Arrays:
    """Return the gradients of NaN weights where the mask was added: NaN for query and keys, too."""
    changed = {name: array.copy() for name, array in stages.items()}
    changed["grad_query"][0, 2, 1] = changed["grad_key"][0, 1] = np.nan
    return changed


def test_gradients_of_nan_are_semantic_and_known_if_declared(gradients: Problem) -> None:
    right = reference.attention_gradients(**gradients.inputs)
    assert failing(gradients.judged(dict(right))) == {}
    # The empty row's weights are NaN: so is its query's gradient, and those of the key and value that its group shares.
    wrong = through_the_scores(right)
    wrong["grad_value"][0, 1] = np.nan
    # With uniform rows the gradients of query and key are open: what explains most counts.
    for own in (
        KnownEmptyRows("nan"),
        *(KnownEmptyRows(recorded_conventions=each) for each in (("uniform", "nan"), ("nan", "uniform"))),
    ):
        found = gradients.judged(wrong, own=own)
        assert failing(found) == dict.fromkeys(("grad_query", "grad_key", "grad_value"), SEMANTIC)
        assert found.excused_stages == (failing(found).keys() if own.declared_convention else set())
        assert {each.empty_rows for each in found.judgements if each.verdict.exit_code} == {"nan"}
    assert failing(gradients.judged(wrong, empty_rows="nan")) == {}
    wrong["grad_key"][0, 0, 0, 0] = np.nan
    found = gradients.judged(wrong, own=KnownEmptyRows("nan"))
    assert failing(found)["grad_key"] is Verdict.NONFINITE
    assert found.excused_stages == {"grad_query", "grad_value"}


def test_gradients_of_nan_rows_may_stop_at_the_mask_or_go_through(gradients: Problem) -> None:
    right = reference.attention_gradients(**gradients.inputs, empty_rows="nan")
    assert np.isnan(right["grad_value"][0, 1]).all()
    assert np.isfinite(right["grad_query"]).all()
    for stages in (dict(right), through_the_scores(right)):
        assert failing(gradients.judged(stages, empty_rows="nan")) == {}
    for stage, place, wrong in (
        ("grad_query", (0, 2, 1, 0), 1e-3),
        ("grad_key", (0, 1, 0, 0), 1e3),
        ("grad_query", (0, 0, 0, 0), np.nan),
        ("grad_key", (0, 0, 0, 0), np.nan),
        ("grad_value", (0, 1, 0, 0), 0.0),
    ):
        changed = through_the_scores(right) | {stage: right[stage].copy()}
        changed[stage][place] = wrong
        assert set(failing(gradients.judged(changed, empty_rows="nan"))) == {stage}, (stage, place)


def test_conventions_hold_where_some_rows_stand_for_all() -> None:
    shapes = {"query": (1, 1, 1030, 2), "key": (1, 1, 256, 2), "value": (1, 1, 256, 2)}
    mask = np.arange(1030).reshape(1, 1, 1030, 1) % 700 > 0
    problem = Problem("attention", {}, {name: NORMAL(shape) for name, shape in shapes.items()} | {"mask": mask})
    wrong = {"output": np.where(mask, problem.returned()["output"], np.nan)}
    found = problem.judged(wrong, own=KnownEmptyRows("nan"))
    assert (failing(found), found.excused_stages) == ({"output": SEMANTIC}, {"output"})
    assert found.judgements[0].judged_rows == 64
    assert failing(problem.judged(wrong, empty_rows="nan")) == {}


@pytest.mark.parametrize(
    ("options", "more"), [({"mask_fill": 0.0}, {}), ({}, {"sinks": np.zeros(1)})], ids=["fill", "sink"]
)
def test_of_nan_behind_a_fill_or_beside_a_sink_alone_nothing_is_said(options: Options, more: Arrays) -> None:
    """Where a mask selects, numbers are left of a query without a key of its own; where it is added, NaN."""
    inputs = {name: NORMAL((1, 1, 3, 2)) for name in ("query", "key", "value")} | more
    inputs["query"][0, 0, 1:] = np.nan
    inputs["mask"] = np.array([[True, True, True], [True, False, False], [False, False, False]])
    exact = dict(Problem("attention", options, inputs).truth(supports_statistics=False).exact)
    if not options:
        gradients = Problem("attention_gradients", {}, inputs | {"grad_output": NORMAL((1, 1, 3, 2))})
        exact |= gradients.truth(supports_statistics=False).exact
    for stage in {"log_sum_exp", "output", "grad_query"} & exact.keys():
        rows = exact[stage].map_arrays(lambda array: array.reshape(3, -1))
        assert np.isfinite(rows.radius).all(axis=-1).tolist() == [True, True, False], stage
        assert stage == "grad_query" or np.isnan(rows.high[1]).all(), stage


def test_nan_that_spreads_beyond_the_pair_of_a_rotation_is_found() -> None:
    problem = spoilt_at(draw("rotary, neighbours"), "query", (0, 1, 2, 3))
    stages = problem.returned()
    assert failing(problem.judged(stages)) == {}
    stages["rotated_query"] = stages["rotated_query"].copy()
    stages["rotated_query"][0, 1, 2] = np.nan
    assert failing(problem.judged(stages)) == {"rotated_query": Verdict.NONFINITE}
