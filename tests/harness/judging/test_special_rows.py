"""Rows without a key by each convention, in every operation: where it shows, how far it reaches, what bounds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.backends import numpy_backend as reference
from attncheck.judging import special_rows as module
from attncheck.judging.judge_implementation import JudgedStages, OwnEmptyRows, judge_and_diagnose
from attncheck.judging.special_rows import empty_rows
from attncheck.judging.truth import Truth, find_truth
from attncheck.reading.canonical import AttentionProblem
from attncheck.verdicts import Verdict

Array = NDArray[Any]
Stages = dict[str, Array]

DRAWN = np.random.default_rng(8)


def judged(
    operation: str,
    options: Mapping[str, Any],
    inputs: Mapping[str, Array],
    stages: Stages,
    own: OwnEmptyRows | None = None,
) -> JudgedStages:
    truth = find_truth(operation, options, inputs, "float64", supports_statistics=True)
    shapes = {name: array.shape for name, array in stages.items()}
    return judge_and_diagnose(truth, stages, shapes, "native", own)


def failing(found: JudgedStages) -> dict[str, Verdict]:
    return {each.stage: each.verdict for each in found.judgements if each.verdict.exit_code}


def assert_near(truth: Truth, stage: str, expected: Array) -> None:
    """Hold an enclosure against numbers that are right to a few units in the last place."""
    np.testing.assert_allclose(truth.exact[stage].high, expected, rtol=1e-13, atol=1e-13)


# softmax


SCORES = np.array([[[[1.0, 2.0, 0.5], [-np.inf] * 3]]])


@pytest.mark.parametrize(("convention", "weight"), [("zero", 0.0), ("uniform", 1 / 3), ("nan", np.nan)])
def test_a_softmax_of_minus_infinities_follows_the_convention(convention: str, weight: float) -> None:
    truth = find_truth("softmax", {"empty_rows": convention}, {"scores": SCORES}, "float64", supports_statistics=False)
    np.testing.assert_array_equal(truth.exact["weights"].high[0, 0, 1], [weight] * 3)
    assert truth.exact["weights"].high[0, 0, 0].sum() == pytest.approx(1, rel=1e-15)
    log_sum = truth.exact["log_sum_exp"]
    # Only the convention of zero says what the sum of nothing is.
    assert bool(np.isfinite(log_sum.radius[0, 0, 1])) is (convention == "zero")
    assert convention != "zero" or (log_sum.high[0, 0, 1], log_sum.radius[0, 0, 1]) == (-np.inf, 0)
    assert np.isfinite(log_sum.radius[0, 0, 0])


def test_uniform_weights_may_be_rounded_and_no_more() -> None:
    right = {"weights": np.vstack([reference.softmax(SCORES)["weights"][0, 0, 0], [1 / 3] * 3])[np.newaxis, np.newaxis]}
    options, inputs = {"empty_rows": "uniform"}, {"scores": SCORES}
    assert failing(judged("softmax", options, inputs, right)) == {}
    right["weights"][0, 0, 1, 2] += 1e-13
    assert failing(judged("softmax", options, inputs, right)) == {"weights": Verdict.NUMERIC}


# multi_head_attention: the row of one head alone

HEADS = {
    "query": DRAWN.standard_normal((2, 3, 4)),
    "key": DRAWN.standard_normal((2, 5, 4)),
    "value": DRAWN.standard_normal((2, 5, 4)),
    **{f"{name}_weight": DRAWN.standard_normal((4, 4)) for name in ("query", "key", "value")},
}
OUTPUT_WEIGHT = {"output_weight": DRAWN.standard_normal((4, 6))}
ONE_HEAD = np.ones((2, 2, 3, 5), dtype=bool)
ONE_HEAD[1, 0, 2] = False


def of_heads(convention: str, inputs: Mapping[str, Array]) -> Stages:
    """Multi-head attention by NumPy, whose empty row follows a convention."""
    stages = reference.multi_head_attention(**inputs, heads=2)
    fill = {"zero": 0.0, "uniform": 1 / 5, "nan": np.nan}[convention]
    stages["weights"] = np.where(inputs["mask"].any(axis=-1, keepdims=True), stages["weights"], fill)
    stages["context"] = stages["weights"] @ stages["value"]
    merged = stages["context"].swapaxes(1, 2).reshape(2, 3, 4)
    stages["output"] = merged @ inputs["output_weight"] if "output_weight" in inputs else merged
    return stages


@pytest.mark.parametrize("is_projected", [True, False])
@pytest.mark.parametrize("convention", ["zero", "uniform", "nan"])
def test_an_empty_row_of_one_head_reaches_the_output_of_its_query(convention: str, is_projected: bool) -> None:
    inputs = HEADS | {"mask": ONE_HEAD} | (OUTPUT_WEIGHT if is_projected else {})
    stages, options = of_heads(convention, inputs), {"heads": 2, "empty_rows": convention}
    truth = find_truth("multi_head_attention", options, inputs, "float64", supports_statistics=True)
    for stage in ("weights", "context", "output"):
        assert_near(truth, stage, stages[stage])
    found = judge_and_diagnose(truth, stages, {name: array.shape for name, array in stages.items()}, "native")
    assert failing(found) == {}
    if convention == "nan":
        reached = np.zeros((2, 3, 6 if is_projected else 4), dtype=bool)
        reached[1, 2, : 6 if is_projected else 2] = True
        np.testing.assert_array_equal(np.isnan(truth.exact["output"].high), reached)


@pytest.mark.parametrize("convention", ["uniform", "nan"])
def test_a_head_that_means_otherwise_is_semantic_and_known_if_declared(convention: str) -> None:
    inputs = HEADS | {"mask": ONE_HEAD} | OUTPUT_WEIGHT
    stages, declared = of_heads(convention, inputs), OwnEmptyRows(convention)
    found = judged("multi_head_attention", {"heads": 2}, inputs, stages, declared)
    assert failing(found) == dict.fromkeys(("weights", "context", "output"), Verdict.SEMANTIC)
    assert found.excused
    assert not judged("multi_head_attention", {"heads": 2}, inputs, stages).excused


def test_a_row_that_may_be_attended_is_no_matter_of_convention() -> None:
    inputs = HEADS | {"mask": ONE_HEAD} | OUTPUT_WEIGHT
    stages = of_heads("uniform", inputs)
    stages["output"][0, 0, 0] = np.nan
    assert failing(judged("multi_head_attention", {"heads": 2}, inputs, stages))["output"] is Verdict.NONFINITE


# gradients


def attention_problem() -> dict[str, Array]:
    shapes = {"query": (1, 4, 3, 6), "key": (1, 2, 5, 6), "value": (1, 2, 5, 2), "grad_output": (1, 4, 3, 2)}
    mask = np.ones((1, 4, 3, 5), dtype=bool)
    mask[0, 2, 1] = False
    return {name: DRAWN.standard_normal(shape) for name, shape in shapes.items()} | {"mask": mask}


def test_gradients_of_nan_are_semantic_and_known_if_declared() -> None:
    inputs = attention_problem()
    right = reference.attention_gradients(**inputs)
    assert failing(judged("attention_gradients", {}, inputs, dict(right))) == {}
    # The empty row's weights are NaN: so is its query's gradient, and those of the key and value that its group shares.
    wrong = {name: array.copy() for name, array in right.items()}
    wrong["grad_query"][0, 2, 1] = wrong["grad_key"][0, 1] = wrong["grad_value"][0, 1] = np.nan
    found = judged("attention_gradients", {}, inputs, wrong, OwnEmptyRows("nan"))
    assert failing(found) == dict.fromkeys(("grad_query", "grad_key", "grad_value"), Verdict.SEMANTIC)
    assert found.excused
    assert failing(judged("attention_gradients", {"empty_rows": "nan"}, inputs, wrong)) == {}
    wrong["grad_key"][0, 0, 0, 0] = np.nan
    found = judged("attention_gradients", {}, inputs, wrong, OwnEmptyRows("nan"))
    assert failing(found)["grad_key"] is Verdict.NONFINITE
    assert found.excused == {"grad_query", "grad_value"}


def test_of_several_conventions_that_are_known_the_one_counts_that_explains_most() -> None:
    # With uniform rows the gradients of query and key are open, so that NaN there would be right, too.
    inputs = attention_problem()
    wrong = through_the_scores(reference.attention_gradients(**inputs, empty_rows="nan"))
    for recorded in (("uniform", "nan"), ("nan", "uniform")):
        found = judged("attention_gradients", {}, inputs, wrong, OwnEmptyRows(recorded=recorded))
        assert set(failing(found).values()) == {Verdict.SEMANTIC}
        assert {each.empty_rows for each in found.judgements if each.verdict.exit_code} == {"nan"}


def through_the_scores(stages: Stages) -> Stages:
    """The gradients of NaN weights where the mask was added: NaN for query and keys, too."""
    changed = {name: array.copy() for name, array in stages.items()}
    changed["grad_query"][0, 2, 1] = changed["grad_key"][0, 1] = np.nan
    return changed


def test_gradients_of_nan_rows_may_stop_at_the_mask_or_go_through() -> None:
    inputs, options = attention_problem(), {"empty_rows": "nan"}
    right = reference.attention_gradients(**inputs, empty_rows="nan")
    assert np.isnan(right["grad_value"][0, 1]).all()
    assert np.isfinite(right["grad_query"]).all()
    for stages in (dict(right), through_the_scores(right)):
        assert failing(judged("attention_gradients", options, inputs, stages)) == {}
    for stage, place, wrong in (
        ("grad_query", (0, 2, 1, 0), 1e-3),
        ("grad_key", (0, 1, 0, 0), 1e3),
        ("grad_query", (0, 0, 0, 0), np.nan),
        ("grad_key", (0, 0, 0, 0), np.nan),
        ("grad_value", (0, 1, 0, 0), 0.0),
    ):
        changed = through_the_scores(right) | {stage: right[stage].copy()}
        changed[stage][place] = wrong
        assert set(failing(judged("attention_gradients", options, inputs, changed))) == {stage}, (stage, place)


def test_a_uniform_row_is_part_of_the_values_gradient_within_its_bound() -> None:
    inputs, options = attention_problem(), {"empty_rows": "uniform"}
    right = reference.attention_gradients(**inputs, empty_rows="uniform")
    assert failing(judged("attention_gradients", options, inputs, dict(right))) == {}
    without = reference.attention_gradients(**inputs)
    changed = dict(right) | {"grad_value": without["grad_value"]}
    assert set(failing(judged("attention_gradients", options, inputs, changed))) == {"grad_value"}
    moved = right["grad_value"].copy()
    moved[0, 1, 0, 0] *= 1 + 1e-12
    assert set(failing(judged("attention_gradients", options, inputs, dict(right) | {"grad_value": moved}))) == {
        "grad_value"
    }


@pytest.mark.parametrize("bias", [None, (1, 4, 3, 5), (1, 1, 1, 5), (1, 4, 1, 1)])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_where_no_query_has_a_key_a_values_gradient_is_a_mean_of_what_came_out(
    dtype: str, bias: tuple[int, ...] | None
) -> None:
    inputs = attention_problem() | {"mask": np.zeros((1, 4, 3, 1), dtype=bool)}
    if bias is not None:
        inputs["bias"] = DRAWN.standard_normal(bias)
    inputs = {name: array if array.dtype == bool else array.astype(dtype) for name, array in inputs.items()}
    truth = find_truth("attention_gradients", {"empty_rows": "uniform"}, inputs, dtype, supports_statistics=False)
    summed = inputs["grad_output"].astype(np.float64).reshape(1, 2, 6, 2).sum(axis=2, keepdims=True) / 5
    expected = np.broadcast_to(summed, (1, 2, 5, 2))
    np.testing.assert_allclose(truth.exact["grad_value"].high, expected, rtol=1e-14)
    bound, unit = truth.bounds("native")["grad_value"].max_error, 2.0**-53 if dtype == "float64" else 2.0**-24
    size = np.abs(inputs["grad_output"]).astype(np.float64).reshape(1, 2, 6, 2).sum(axis=2, keepdims=True) / 5
    assert (bound >= unit * np.abs(expected)).all()
    assert (bound <= 100 * unit * size).all()


def test_gradients_of_a_wrong_scale_are_told() -> None:
    inputs = attention_problem()
    wrong = reference.attention_gradients(**inputs, scale=1.0)
    found = judged("attention_gradients", {}, inputs, {"grad_query": wrong["grad_query"]})
    assert found.judgements[0].message.startswith("the grad_query is exactly that of scale 1 instead of 0.4082")
    assert found.begins_at == "scores"


def test_nan_in_a_query_reaches_the_gradients_of_what_it_attends_to() -> None:
    inputs = attention_problem()
    inputs["query"][0, 0, 0, 0] = np.nan
    truth = find_truth("attention_gradients", {}, inputs, "float64", supports_statistics=True)
    assert np.isnan(truth.exact["grad_query"].high[0, 0, 0]).all()
    assert np.isfinite(truth.exact["grad_query"].high).sum() == truth.exact["grad_query"].high.size - 6
    with np.errstate(all="ignore"):
        assert failing(judged("attention_gradients", {}, inputs, dict(reference.attention_gradients(**inputs)))) == {}


# Large shapes, of which some rows stand for all.


def test_conventions_hold_where_some_rows_stand_for_all() -> None:
    shapes = {"query": (1, 1, 1030, 2), "key": (1, 1, 256, 2), "value": (1, 1, 256, 2)}
    inputs = {name: DRAWN.standard_normal(shape) for name, shape in shapes.items()}
    inputs["mask"] = np.ones((1, 1, 1030, 1), dtype=bool)
    inputs["mask"][0, 0, [0, 700]] = False
    stages = reference.attention(**inputs)
    wrong = {"output": stages["output"].copy()}
    wrong["output"][0, 0, [0, 700]] = np.nan
    found = judged("attention", {}, inputs, wrong, OwnEmptyRows("nan"))
    assert (failing(found), found.excused) == ({"output": Verdict.SEMANTIC}, {"output"})
    assert found.judgements[0].judged_rows == 64
    assert failing(judged("attention", {"empty_rows": "nan"}, inputs, wrong)) == {}


def test_without_any_key_nothing_is_a_convention() -> None:
    inputs = {"query": np.ones((1, 1, 2, 2)), "key": np.ones((1, 1, 0, 2)), "value": np.ones((1, 1, 0, 3))}
    for convention in ("zero", "uniform", "nan"):
        truth = find_truth("attention", {"empty_rows": convention}, inputs, "float64", supports_statistics=False)
        np.testing.assert_array_equal(truth.exact["output"].high, np.zeros((1, 1, 2, 3)))


# Many rows


def test_rows_without_a_key_are_found_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.RandomState(3)
    inputs = {name: random.randn(2, 3, 11, 2) for name in ("query", "key", "value")}
    inputs |= {"mask": random.rand(2, 1, 11, 11) < 0.2, "query_mask": random.rand(1, 11) < 0.7}
    posed = AttentionProblem({"is_causal": True, "window": (3, 0)}, inputs)
    whole = empty_rows("attention", posed)
    assert whole.shape == (2, 3, 11)
    assert whole.any()
    assert not whole.all()
    for most in (1, 2 * 3 * 11 * 2):
        monkeypatch.setattr(module, "MAX_AT_A_TIME", most)
        np.testing.assert_array_equal(empty_rows("attention", posed), whole)


# NaN in one element of a query


_DRAWN_APART = np.random.default_rng(9)
ROTATED = {
    "query": _DRAWN_APART.normal(size=(1, 2, 3, 5)),
    "key": _DRAWN_APART.normal(size=(1, 2, 4, 5)),
    "value": _DRAWN_APART.normal(size=(1, 2, 4, 2)),
    "rotary_cos": np.cos(np.arange(8.0)).reshape(4, 2),
    "rotary_sin": np.sin(np.arange(8.0)).reshape(4, 2),
}
"""The first four of five elements are rotated: in halves 0 with 2 and 1 with 3, interleaved 0 with 1 and 2 with 3."""


@pytest.mark.parametrize(
    ("element", "interleaved", "pair"), [(0, False, [0, 2]), (0, True, [0, 1]), (4, False, [4])], ids=str
)
def test_nan_of_a_query_reaches_its_pair_and_every_score(element: int, interleaved: bool, pair: list[int]) -> None:
    query = ROTATED["query"].copy()
    query[0, 1, 2, element] = np.nan
    inputs, options = {**ROTATED, "query": query}, {"rotary_interleaved": interleaved}
    stages = reference.attention(**inputs, **options)
    assert failing(judged("attention", options, inputs, stages)) == {}
    exact = find_truth("attention", options, inputs, "float64", supports_statistics=True).exact
    assert np.flatnonzero(np.isnan(exact["rotated_query"].high[0, 1, 2])).tolist() == pair
    assert np.isnan(exact["raw_scores"].high[0, 1, 2]).all()
    assert np.isnan(exact["raw_scores"].high).sum() == 4


def test_nan_that_spreads_beyond_its_pair_is_found() -> None:
    query = ROTATED["query"].copy()
    query[0, 1, 2, 4] = np.nan
    inputs = {**ROTATED, "query": query}
    stages = dict(reference.attention(**inputs))
    stages["rotated_query"] = stages["rotated_query"].copy()
    stages["rotated_query"][0, 1, 2] = np.nan
    assert failing(judged("attention", {}, inputs, stages)) == {"rotated_query": Verdict.NONFINITE}


@pytest.mark.parametrize("over", ["head", "full"])
@pytest.mark.parametrize("behind", [False, True], ids=["before the rotation", "behind it"])
def test_nan_reaches_all_that_a_norm_brings_together(over: str, behind: bool) -> None:
    query = ROTATED["query"].copy()
    query[0, 1, 2, 4] = np.nan
    inputs = {**ROTATED, "query": query, "query_norm_weight": np.ones(5 if over == "head" else 10)}
    options = {"norm_over": over, "norm_after_rotation": behind}
    stages = reference.normalized_attention(**inputs, **options)
    assert failing(judged("normalized_attention", options, inputs, stages)) == {}
