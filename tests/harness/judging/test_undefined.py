"""What has no exact answer: as much as NaN reaches in NumPy, and nothing beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from attncheck.backends import BACKENDS
from attncheck.execution.operations import run_operation
from attncheck.judging.judge import exact_values, judge_pairs, worst_bounds
from attncheck.judging.judge_stages import agrees, failing_elements, judge_stages
from attncheck.judging.truth import Truth, find_truth
from attncheck.judging.undefined import find_undefined
from attncheck.verdicts import Verdict

Array = NDArray[Any]
NUMPY = BACKENDS["numpy"].load()

RANDOM = np.random.RandomState(5)


def drawn(*shape: int) -> Array:
    return RANDOM.randn(*shape)


ATTENTION = {"query": drawn(2, 4, 3, 5), "key": drawn(2, 2, 6, 5), "value": drawn(2, 2, 6, 4)}
PROJECTED = {
    "query": drawn(2, 3, 5),
    "key": drawn(2, 4, 5),
    "value": drawn(2, 4, 5),
    "query_weight": drawn(5, 12),
    "key_weight": drawn(5, 6),
    "value_weight": drawn(5, 8),
    "query_bias": drawn(12),
    "key_bias": drawn(6),
    "value_bias": drawn(8),
}
VECTORS = {"query": drawn(1, 2, 3, 5), "key": drawn(1, 2, 4, 5)}
PROBLEMS: dict[str, tuple[str, dict[str, Any], dict[str, Array]]] = {
    "dot": ("scoring", {"score": "dot"}, VECTORS),
    "cosine": ("scoring", {"score": "cosine"}, VECTORS),
    "general": ("scoring", {"score": "general"}, {**VECTORS, "weight": drawn(5, 5)}),
    "additive": (
        "scoring",
        {"score": "additive"},
        {**VECTORS, "query_weight": drawn(5, 2), "key_weight": drawn(5, 2), "score_vector": drawn(2)},
    ),
    "cosine attention": ("cosine_attention", {}, {**VECTORS, "value": drawn(1, 2, 4, 3), "bias": drawn(1, 1, 3, 4)}),
    "bilinear attention": (
        "general_attention",
        {},
        {**VECTORS, "value": drawn(1, 2, 4, 3), "weight": drawn(5, 5), "score_bias": drawn(2)},
    ),
    "softmax": ("softmax", {}, {"scores": drawn(1, 2, 3, 4)}),
    "masking": ("masking", {}, {"scores": drawn(1, 2, 3, 4), "bias": drawn(1, 1, 3, 4)}),
    "attention": ("attention", {}, {**ATTENTION, "bias": drawn(1, 4, 1, 6)}),
    "multi_head_attention": ("multi_head_attention", {"heads": 4, "kv_heads": 2}, PROJECTED),
    "projected": (
        "multi_head_attention",
        {"heads": 4, "kv_heads": 2},
        {**PROJECTED, "output_weight": drawn(16, 3), "output_bias": drawn(3)},
    ),
    "gradients": (
        "attention_gradients",
        {},
        {**ATTENTION, "bias": drawn(2, 1, 3, 6), "grad_output": drawn(2, 4, 3, 4)},
    ),
}
PLACES = [(problem, name) for problem, (_, _, inputs) in PROBLEMS.items() for name in inputs]


def run(operation: str, options: Mapping[str, Any], inputs: Mapping[str, Array]) -> dict[str, Array]:
    with np.errstate(all="ignore"):
        return dict(run_operation(NUMPY, operation, inputs, options))


@pytest.mark.parametrize(("problem", "name"), PLACES)
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_as_much_is_undefined_as_nan_reaches(problem: str, name: str, data: st.DataObject) -> None:
    operation, options, inputs = PROBLEMS[problem]
    index = tuple(data.draw(st.integers(0, length - 1)) for length in inputs[name].shape)
    spoilt = inputs[name].copy()
    spoilt[index] = np.nan
    given_inputs = {**inputs, name: spoilt}
    undefined = find_undefined(operation, options, given_inputs)
    assert undefined is not None
    assert undefined.reason == f"{name} holds NaN or an infinity that no mask explains"
    for stage, array in run(operation, options, given_inputs).items():
        np.testing.assert_array_equal(undefined.of(stage, array.shape), np.isnan(array), stage)
    filled = undefined.filled(given_inputs)
    assert np.isfinite(filled[name]).all()
    assert (filled[name] != inputs[name]).sum() == 1


@pytest.mark.parametrize("problem", PROBLEMS)
def test_nothing_is_undefined_in_finite_inputs_nor_by_what_forbids_a_key(problem: str) -> None:
    operation, options, inputs = PROBLEMS[problem]
    assert find_undefined(operation, options, inputs) is None
    for name in {"scores", "bias"} & inputs.keys():
        forbidding = inputs[name].copy()
        forbidding[..., 0] = -np.inf
        assert find_undefined(operation, options, {**inputs, name: forbidding}) is None


def test_a_vector_of_length_zero_takes_its_row_or_column_of_cosines_alone() -> None:
    inputs = {name: array.copy() for name, array in VECTORS.items()}
    inputs["query"][0, 0, 1] = 0
    inputs["key"][0, 1, 3] = 0
    undefined = find_undefined("scoring", {"score": "cosine"}, inputs)
    assert undefined is not None
    wanted = np.zeros((1, 2, 3, 4), dtype=np.bool_)
    wanted[0, 0, 1] = wanted[0, 1, :, 3] = True
    np.testing.assert_array_equal(undefined.of("scores", wanted.shape), wanted)
    assert undefined.reason == (
        "query has a vector of length 0, which has no direction; key has a vector of length 0, which has no direction"
    )
    assert find_undefined("scoring", {"score": "dot"}, inputs) is None


@pytest.fixture(scope="module")
def infinite() -> Truth:
    """Attention of which one query and one value are infinite."""
    _, _, inputs = PROBLEMS["attention"]
    query, value = inputs["query"].copy(), inputs["value"].copy()
    query[0, 3, 2, 1], value[1, 0, 4, 2] = np.inf, -np.inf
    return find_truth("attention", {}, {**inputs, "query": query, "value": value}, "float64", supports_statistics=False)


def stages_of(truth: Truth) -> dict[str, Array]:
    assert truth.posed is not None
    return run("attention", {}, truth.posed.inputs)


def judged_of(truth: Truth, stages: Mapping[str, Array]) -> dict[str, Any]:
    shapes = {stage: array.shape for stage, array in stages.items()}
    return {each.stage: each for each in judge_stages(truth, stages, shapes, "native")}


def test_elements_beside_keep_the_exact_answer_that_they_have_without(infinite: Truth) -> None:
    finite = find_truth("attention", {}, PROBLEMS["attention"][2], "float64", supports_statistics=False)
    for stage, enclosure in infinite.exact.items():
        known = np.isfinite(enclosure.radius)
        assert known.any()
        assert not known.all()
        np.testing.assert_array_equal(enclosure.high[known], finite.exact[stage].high[known])
        assert np.isnan(exact_values(infinite)[stage][~known]).all()


def test_a_stage_says_how_many_elements_were_not_judged_and_why(infinite: Truth) -> None:
    judged = judged_of(infinite, stages_of(infinite))
    assert {each.verdict for each in judged.values()} == {Verdict.AGREE}
    # A row of six keys, or of four columns; and the column of a value in both heads that share it, three rows each.
    assert {stage: each.unjudged for stage, each in judged.items()} == {
        "raw_scores": 6, "scores": 6, "biased": 6, "weights": 6, "log_sum_exp": 1, "output": 4 + 6,
    }  # fmt: skip
    assert judged["output"].message == (
        "10 of 96 elements were not judged, for want of an exact answer: query holds NaN or an infinity that no mask "
        "explains; value holds NaN or an infinity that no mask explains"
    )


@pytest.mark.parametrize("stage", ["scores", "weights", "log_sum_exp", "output"])
def test_beside_what_is_undefined_a_wrong_number_is_found_and_there_nothing_is(infinite: Truth, stage: str) -> None:
    stages = stages_of(infinite)
    for places, wrong in ((infinite.undefined, False), (None, True)):
        flags = infinite.undefined.of(stage, stages[stage].shape) if infinite.undefined else np.zeros(())
        index = tuple(np.argwhere(flags == (places is not None))[0])
        changed = stages[stage].copy()
        changed[index] = 0.25
        assert failing_elements(infinite, stage, changed, "native").any() == wrong
        assert agrees(infinite, stage, changed, "native") != wrong
        verdict = judged_of(infinite, {**stages, stage: changed})[stage].verdict
        assert verdict == (Verdict.NUMERIC if wrong else Verdict.AGREE)


def test_a_stage_of_which_nothing_was_judged_is_unverified() -> None:
    inputs = {"query": np.full((1, 1, 1, 2), np.inf), "key": np.ones((1, 1, 3, 2))}
    truth = find_truth("scoring", {}, inputs, "float32", supports_statistics=False)
    scores = np.zeros((1, 1, 1, 3), np.float32)
    (judged,) = judge_stages(truth, {"scores": scores}, {"scores": scores.shape}, "native")
    assert (judged.verdict, judged.unjudged, judged.accumulated) == (Verdict.UNVERIFIED, 3, None)
    assert judged.message == "there is no exact answer: query holds NaN or an infinity that no mask explains"


def test_what_lies_beyond_the_range_of_a_dtype_is_not_judged_and_says_so() -> None:
    inputs = {
        "query": np.full((1, 1, 2, 1), [[1e30], [1.0]], np.float32),
        "key": np.full((1, 1, 1, 1), 1e30, np.float32),
    }
    truth = find_truth("scoring", {"score": "dot"}, inputs, "float32", supports_statistics=False)
    scores = np.array([[[[7.0], [1e30]]]], np.float32)
    (judged,) = judge_stages(truth, {"scores": scores}, {"scores": scores.shape}, "native")
    assert (judged.verdict, judged.unjudged) == (Verdict.AGREE, 1)
    assert judged.message.endswith("1 of 2 elements were not judged, for want of an exact answer: "
                                   "it is beyond the range of float32")  # fmt: skip


def test_two_implementations_that_differ_only_where_nothing_is_known_are_told_so(infinite: Truth) -> None:
    first = stages_of(infinite)
    second = {stage: np.nan_to_num(array, nan=5.0, posinf=6.0, neginf=7.0) for stage, array in first.items()}
    bounds = dict.fromkeys(("first", "second"), worst_bounds(infinite, "native"))
    pairs = judge_pairs({"first": first, "second": second}, bounds)
    weights = pairs["first", "second", "weights"]
    assert (weights.verdict, weights.unjudged) == (Verdict.AGREE, 6)
    assert weights.message == "6 elements differ and were not compared: there is no exact answer there"
    alone = {"output": first["output"][:1, 3:, 2:]}, {"output": second["output"][:1, 3:, 2:]}
    some = {name: {"output": max_error["output"][:1, 3:, 2:]} for name, max_error in bounds.items()}
    only = judge_pairs(dict(zip(("first", "second"), alone, strict=True)), some)["first", "second", "output"]
    assert (only.verdict, only.unjudged) == (Verdict.UNVERIFIED, 4)


def test_a_step_is_followed_beside_what_is_undefined(infinite: Truth) -> None:
    stages = stages_of(infinite)
    for stage in ("weights", "output"):
        step = infinite.introduced(stage, {name: array for name, array in stages.items() if name != stage}, "native")
        assert step is not None
        exact, _ = step
        assert infinite.undefined is not None
        np.testing.assert_array_equal(np.isinf(exact.radius), infinite.undefined.of(stage, exact.shape))


# Behind a mask.

MASKED: dict[str, tuple[str, dict[str, Any], dict[str, Array]]] = {
    "attention": ("attention", {}, {**ATTENTION, "mask": np.arange(6).reshape(1, 1, 1, 6) < 4}),
    "causal": ("attention", {"is_causal": True}, ATTENTION),
    "lengths": ("attention", {}, {**ATTENTION, "key_lengths": np.array([4, 3])}),
    "bias": ("attention", {}, {**ATTENTION, "bias": np.array([0.0, 1, 2, 3, -np.inf, -np.inf]).reshape(1, 1, 1, 6)}),
    "multi_head_attention": (
        "multi_head_attention",
        {"heads": 4, "kv_heads": 2},
        {**PROJECTED, "output_weight": drawn(16, 3), "mask": np.array([True, True, True, False]).reshape(1, 1, 1, 4)},
    ),
    "attention_gradients": (
        "attention_gradients",
        {},
        {
            **ATTENTION,
            "bias": drawn(1, 4, 1, 6),
            "grad_output": drawn(2, 4, 3, 4),
            "mask": np.arange(6).reshape(1, 1, 1, 6) < 4,
        },
    ),
}
ROW_STAGES = ("weights", "log_sum_exp", "context", "output", "grad_query", "grad_key", "grad_value", "grad_bias")


def spoilt_behind(problem: str, name: str, number: float) -> tuple[Truth, dict[str, Array]]:
    """Return the truth where the last key or value holds a number, and what is right where it is left out."""
    operation, options, inputs = MASKED[problem]
    spoilt = inputs[name].copy()
    spoilt[0, ..., -1, 1] = number
    truth = find_truth(operation, options, {**inputs, name: spoilt}, "float64", supports_statistics=False)
    plain = truth.posed and find_truth(operation, options, inputs, "float64", supports_statistics=False)
    assert plain
    return truth, {stage: each.high.copy() for stage, each in plain.exact.items() if stage in ROW_STAGES}


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["key", "value"])
@pytest.mark.parametrize("problem", MASKED)
def test_behind_a_mask_the_numbers_without_that_key_are_right_and_so_is_nan(
    problem: str, name: str, number: float
) -> None:
    truth, stages = spoilt_behind(problem, name, number)
    shapes = {stage: array.shape for stage, array in stages.items()}
    judged = {each.stage: each for each in judge_stages(truth, stages, shapes, "native")}
    assert {(str(each.verdict), each.unjudged) for each in judged.values()} == {("agree", 0)}
    assert truth.undefined is not None
    for stage, array in stages.items():
        behind = truth.undefined.behind_a_mask(stage, array.shape)
        spread = {**stages, stage: np.where(behind, np.nan, array)}
        assert agrees(truth, stage, spread[stage], "native")
        judged = {each.stage: each for each in judge_stages(truth, spread, shapes, "native")}
        assert judged[stage].verdict == (Verdict.UNVERIFIED if behind.all() else Verdict.AGREE)
        assert judged[stage].unjudged == behind.sum()
        if behind.any():
            assert "only keys that may not be attended hold NaN or infinity" in judged[stage].message


@pytest.mark.parametrize("name", ["key", "value"])
@pytest.mark.parametrize("problem", MASKED)
def test_behind_a_mask_any_other_number_is_wrong(problem: str, name: str) -> None:
    truth, stages = spoilt_behind(problem, name, np.nan)
    assert truth.undefined is not None
    changed = 0
    for stage, array in stages.items():
        behind = truth.undefined.behind_a_mask(stage, array.shape)
        if behind.any():
            wrong = np.where(behind, array + 0.5, array)
            assert failing_elements(truth, stage, wrong, "native")[behind].all()
            assert not agrees(truth, stage, wrong, "native")
            changed += 1
    assert changed


def test_a_key_that_some_queries_may_attend_to_is_undefined_for_these_alone() -> None:
    operation, _, inputs = MASKED["causal"]
    value = inputs["value"].copy()
    value[0, 1, 1, 2] = np.nan  # from the second query on
    truth = find_truth(operation, {"is_causal": True}, {**inputs, "value": value}, "float64", supports_statistics=False)
    assert truth.undefined is not None
    reached = np.zeros((2, 4, 3, 4), dtype=np.bool_)
    reached[0, 2:, :, 2] = True
    np.testing.assert_array_equal(truth.undefined.of("output", reached.shape), reached)
    behind = reached & (np.arange(3) == 0)[:, np.newaxis]
    np.testing.assert_array_equal(truth.undefined.behind_a_mask("output", reached.shape), behind)


def test_a_row_that_holds_nan_beside_other_numbers_is_not_judged_there() -> None:
    truth, stages = spoilt_behind("attention", "key", np.inf)
    weights = stages["weights"]
    assert truth.undefined is not None
    behind = truth.undefined.behind_a_mask("weights", weights.shape)
    # As TensorFlow's softmax of a row with infinity in it.
    spread = np.where(behind, np.where(np.arange(6) == 5, np.nan, 0.0), weights)
    assert agrees(truth, "weights", spread, "native")
    assert not agrees(truth, "weights", np.where(behind, 0.0, weights), "native")


def test_a_head_whose_sums_over_queries_hold_nan_is_not_judged_there() -> None:
    truth, stages = spoilt_behind("attention_gradients", "key", np.nan)
    gradient = stages["grad_value"]
    assert truth.undefined is not None
    behind = truth.undefined.behind_a_mask("grad_value", gradient.shape)
    # The weights of such a softmax, times the gradient of the output.
    spread = np.where(behind, np.where(np.arange(6)[:, np.newaxis] == 5, np.nan, 0.0), gradient)
    assert agrees(truth, "grad_value", spread, "native")
    assert not agrees(truth, "grad_value", np.where(behind, 0.0, gradient), "native")
    assert not agrees(truth, "grad_value", np.where(behind, spread, 0.0), "native")
