"""Query rows that stand for all: what is said of them is what is said of them where every row is judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from attncheck.attention.bounds import Bound
from attncheck.backends import numpy_backend
from attncheck.execution.worker import Computed
from attncheck.judging import judge as judging
from attncheck.judging.judge import judge, judge_pairs, worst_bounds
from attncheck.judging.judge_stages import StageJudgement, judge_stages
from attncheck.judging.truth import Truth, find_truth, truth_of_case
from attncheck.oracle import sampling
from attncheck.oracle.enclosure import Enclosure
from attncheck.oracle.sampling import MAX_ELEMENTS, index_in_all, rows_of_stage, sampled_rows
from attncheck.reading.case import Case
from attncheck.reading.inputs import Inputs
from attncheck.verdicts import Verdict

Array = NDArray[Any]
Stages = dict[str, Array]

DTYPE = "float32"
QUERIES, KEYS = 150, 70
OPERATIONS = ("attention", "multi_head_attention", "masking", "softmax", "scoring")


# Which rows.


def scores(*shape: int) -> dict[str, Array]:
    """An array of this shape that takes no memory."""
    return {"scores": np.broadcast_to(np.float32(0), shape)}


def test_the_ends_the_edges_of_tiles_and_rows_at_random_make_sixty_four() -> None:
    rows = sampled_rows("softmax", {}, scores(1, 1, 1000, 1000))
    assert rows is not None
    wanted = {0, 15, 16, 31, 32, 63, 64, 127, 128, 255, 256, 511, 512, 999}
    assert wanted < set(rows.tolist())
    assert len(rows) == len(set(rows.tolist())) == 64
    assert (np.diff(rows) > 0).all()
    again = sampled_rows("softmax", {}, scores(2, 3, 1000, 5000))
    assert again is not None
    assert (rows == again).all()


@pytest.mark.parametrize("queries", [65, 66, 128, 129, 1 << 20])
def test_there_are_sixty_four_rows_of_any_number(queries: int) -> None:
    rows = sampled_rows("softmax", {}, scores(1, 1, queries, 1 << 18))
    assert rows is not None
    assert (len(np.unique(rows)), rows[0], rows[-1]) == (64, 0, queries - 1)


@pytest.mark.parametrize("shape", [(1, 1, 64, 1 << 20), (1, 1, 512, 512), (0, 1, 512, 512)])
def test_few_rows_and_few_scores_are_judged_whole(shape: tuple[int, ...]) -> None:
    assert sampled_rows("softmax", {}, scores(*shape)) is None
    assert sampled_rows("softmax", {}, scores(1, 1, 512, 513)) is not None


@pytest.mark.parametrize(("heads", "is_whole"), [(4, True), (5, False)])
def test_the_scores_of_all_heads_are_counted(heads: int, is_whole: bool) -> None:
    inputs = {"query": np.zeros((1, 256, 20)), "key": np.zeros((1, 256, 20))}
    assert MAX_ELEMENTS == 4 * 256 * 256
    assert (sampled_rows("multi_head_attention", {"heads": heads}, inputs) is None) is is_whole
    per_head = {name: np.broadcast_to(np.float32(0), (1, heads, 256, 8)) for name in ("query", "key")}
    assert (sampled_rows("attention", {}, per_head) is None) is is_whole


def test_gradients_are_sums_over_rows_and_judged_whole() -> None:
    inputs = {name: np.broadcast_to(np.float32(0), (1, 1, 1000, 8)) for name in ("query", "key", "value")}
    assert sampled_rows("attention", {}, inputs) is not None
    assert sampled_rows("attention_gradients", {}, inputs) is None


def test_an_index_is_moved_along_the_axis_of_queries_and_no_other() -> None:
    rows = np.array([0, 15, 99])
    assert index_in_all("weights", (1, 2, 2, 7), rows) == (1, 2, 99, 7)
    assert index_in_all("log_sum_exp", (1, 2, 1), rows) == (1, 2, 15)
    assert index_in_all("key", (1, 2, 1, 0), rows) == (1, 2, 1, 0)
    assert index_in_all("output", None, rows) is None
    assert index_in_all("output", (0, 1, 2), None) == (0, 1, 2)


# What is said of them.


@dataclass(frozen=True)
class AttentionProblem:
    """One computation, judged whole and by some rows, and NumPy's stages of it."""

    options: dict[str, Any]
    inputs: Stages
    stages: Stages
    whole: Truth
    part: Truth

    @property
    def rows(self) -> NDArray[np.intp]:
        assert self.part.query_rows is not None
        return self.part.query_rows

    def judge(self, **changed: Array) -> dict[str, StageJudgement]:
        """Judge by some rows what NumPy returned, with some stages changed."""
        shapes = {name: array.shape for name, array in self.stages.items()}
        return {item.stage: item for item in judge_stages(self.part, self.stages | changed, shapes, "native")}


@pytest.fixture(scope="module", params=OPERATIONS)
def posed(request: pytest.FixtureRequest) -> AttentionProblem:
    return pose(str(request.param))


@pytest.fixture(scope="module")
def attention() -> AttentionProblem:
    return pose("attention")


@pytest.fixture(scope="module")
def multi_head_attention() -> AttentionProblem:
    return pose("multi_head_attention")


def pose(operation: str) -> AttentionProblem:
    random = np.random.RandomState(7)

    def drawn(*shape: int) -> Array:
        return random.randn(*shape).astype(DTYPE)

    mask = random.rand(1, 2, QUERIES, KEYS) < 0.7
    mask[:, 1, 64] = False  # a row without a key, among those that are judged
    options: dict[str, Any] = {"is_causal": True}
    masking = {"mask": mask, "bias": drawn(2, 1, KEYS)}
    match operation:
        case "attention":
            inputs = {name: drawn(1, 2, length, 6) for name, length in (("query", QUERIES), ("key", KEYS))}
            inputs |= {"value": drawn(1, 2, KEYS, 5), **masking}
            stages = numpy_backend.attention(**inputs, **options)
        case "multi_head_attention":
            options |= {"heads": 2}
            inputs = {"query": drawn(1, QUERIES, 7), "key": drawn(1, KEYS, 5), "value": drawn(1, KEYS, 4)}
            inputs |= {"query_weight": drawn(7, 6), "key_weight": drawn(5, 6), "value_weight": drawn(4, 8)}
            inputs |= {"query_bias": drawn(6), "output_weight": drawn(8, 3), "mask": mask[:, :1]}
            stages = numpy_backend.multi_head_attention(**inputs, **options)
        case "masking":
            inputs = {"scores": drawn(1, 2, QUERIES, KEYS), **masking}
            stages = numpy_backend.mask_scores(**inputs, **options)
        case "softmax":
            options, inputs = {}, {"scores": np.where(mask, drawn(1, 2, QUERIES, KEYS), np.float32(-np.inf))}
            stages = numpy_backend.softmax(**inputs)
        case _:
            options, inputs = {"scale": 0.3}, {"query": drawn(1, 2, QUERIES, 6), "key": drawn(1, 2, KEYS, 6)}
            stages = numpy_backend.dot_scores(**inputs, **options)
    whole = find_truth(operation, options, inputs, DTYPE, supports_statistics=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "MAX_ELEMENTS", 1000)
        part = find_truth(operation, options, inputs, DTYPE, supports_statistics=True)
    assert whole.query_rows is None
    return AttentionProblem(options, inputs, dict(stages), whole, part)


def assert_same_truth(stage: str, part: Enclosure, whole: Enclosure, rows: NDArray[np.intp]) -> None:
    """Whatever the order of its sums, each encloses the same number."""
    high, low, radius = (rows_of_stage(stage, array, rows) for array in (whole.high, whole.low, whole.radius))
    assert part.shape == high.shape
    same = np.isinf(high) & (part.high == high)
    with np.errstate(invalid="ignore"):
        apart = np.abs((part.high - high) + (part.low - low))
    # Each low is itself rounded, by less than its radius.
    assert (same | (apart <= 2 * (part.radius + radius))).all()


def assert_same_bound(stage: str, part: Bound, whole: Bound, rows: NDArray[np.intp]) -> None:
    for own, other in ((part.max_error, whole.max_error), (part.sigma, whole.sigma)):
        np.testing.assert_allclose(own, rows_of_stage(stage, other, rows), rtol=1e-10)


def test_the_exact_values_and_bounds_of_a_row_are_those_of_the_whole(posed: AttentionProblem) -> None:
    assert list(posed.part.exact) == list(posed.whole.exact)
    assert posed.part.queries == QUERIES
    for stage, exact in posed.whole.exact.items():
        assert_same_truth(stage, posed.part.exact[stage], exact, posed.rows)
        assert_same_bound(stage, posed.part.bounds("native")[stage], posed.whole.bounds("native")[stage], posed.rows)


def test_a_step_of_a_row_has_the_exact_value_and_bound_that_it_has_in_the_whole(posed: AttentionProblem) -> None:
    kept = {stage: rows_of_stage(stage, array, posed.rows) for stage, array in posed.stages.items()}
    for stage in posed.stages:
        part, whole = (
            posed.part.introduced(stage, kept, "native"),
            posed.whole.introduced(stage, posed.stages, "native"),
        )
        assert part is not None
        assert whole is not None
        assert_same_truth(stage, part[0], whole[0], posed.rows)
        assert_same_bound(stage, part[1], whole[1], posed.rows)


def test_numpy_is_right_and_every_stage_says_how_many_rows_were_judged(posed: AttentionProblem) -> None:
    for stage, found in posed.judge().items():
        assert found.verdict is Verdict.AGREE, (stage, found.message)
        counts = (None, None) if stage in ("key", "value") else (64, QUERIES)
        assert (found.judged_rows, found.query_rows) == counts
        assert found.accumulated is not None
        kept = rows_of_stage(stage, posed.stages[stage], posed.rows)
        assert found.accumulated.elements == int(np.isfinite(kept).sum())


# Faults.


def moved(array: Array, index: tuple[int, ...], by: float = 0.25) -> Array:
    array = array.copy()
    array[index] += by
    return array


@pytest.mark.parametrize("row", [0, 63, 128, 149])
@pytest.mark.parametrize("stage", ["raw_scores", "scores", "biased", "weights", "output"])
def test_a_fault_in_a_judged_row_is_found_at_its_place_in_the_whole(
    attention: AttentionProblem, stage: str, row: int
) -> None:
    index = (0, 1, row, 0)
    found = attention.judge(**{stage: moved(attention.stages[stage], index)})[stage]
    assert (found.verdict, found.index) == (Verdict.NUMERIC, index)
    assert found.value == float(attention.stages[stage][index] + np.float32(0.25))
    assert found.accumulated is not None
    assert found.accumulated.index == index


@pytest.mark.parametrize("row", [0, 63, 128, 149])
def test_a_fault_in_log_sum_exp_is_found_whose_last_axis_is_that_of_queries(
    attention: AttentionProblem, row: int
) -> None:
    changed = moved(attention.stages["log_sum_exp"], (0, 0, row))
    found = attention.judge(log_sum_exp=changed)["log_sum_exp"]
    assert (found.verdict, found.index) == (Verdict.NUMERIC, (0, 0, row))


@pytest.mark.parametrize(
    ("stage", "index"),
    [
        ("query", (0, 1, 64, 2)),
        ("key", (0, 1, 41, 2)),  # of a key all rows are judged, 41 too
        ("value", (0, 0, 41, 3)),
        ("context", (0, 0, 149, 3)),
        ("output", (0, 149, 2)),
    ],
)
def test_a_fault_in_a_projection_is_found(
    multi_head_attention: AttentionProblem, stage: str, index: tuple[int, ...]
) -> None:
    assert 41 not in multi_head_attention.rows
    found = multi_head_attention.judge(**{stage: moved(multi_head_attention.stages[stage], index)})[stage]
    assert (found.verdict, found.index) == (Verdict.NUMERIC, index)


def test_causality_counts_the_rows_of_the_whole(attention: AttentionProblem) -> None:
    # Query 16 is the third row that is judged; were it taken for query 2, it would attend to three keys.
    position = int(np.flatnonzero(attention.rows == 16)[0])
    allowed = attention.inputs["mask"][0, 0, 16] & (np.arange(KEYS) <= 16)
    assert position != 16
    assert allowed.sum() > 3
    assert (np.isfinite(attention.part.exact["masked"].high[0, 0, position]) == allowed).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_nan_in_a_judged_row_is_told_with_its_place(attention: AttentionProblem, value: float) -> None:
    changed = attention.stages["output"].copy()
    changed[0, 1, 128, 3] = value
    found = attention.judge(output=changed)["output"]
    assert (found.verdict, found.index, found.against) == (Verdict.NONFINITE, (0, 1, 128, 3), "exact")


def test_a_fault_in_a_row_that_is_not_judged_is_not_found(attention: AttentionProblem) -> None:
    row = unjudged(attention)
    found = attention.judge(output=moved(attention.stages["output"], (0, 1, row, 0)))["output"]
    assert found.verdict is Verdict.AGREE


def unjudged(posed: AttentionProblem) -> int:
    return next(row for row in range(QUERIES) if row not in posed.rows)


def test_shape_and_dtype_are_those_of_whole_arrays(attention: AttentionProblem) -> None:
    shapes = {name: array.shape for name, array in attention.stages.items()}
    changed = {"weights": attention.stages["weights"][..., :64, :], "output": attention.stages["output"].astype("f8")}
    found = {item.stage: item for item in judge_stages(attention.part, attention.stages | changed, shapes, "native")}
    assert (found["weights"].verdict, found["output"].verdict) == (Verdict.SHAPE, Verdict.DTYPE)
    assert found["weights"].message == "expected shape 1x2x150x70, got 1x2x64x70"
    assert found["weights"].judged_rows is None


# Two implementations.


def pair(posed: AttentionProblem, changed: Array) -> Any:
    bounds = {stage: bound.max_error for stage, bound in posed.part.bounds("native").items()}
    computed = {"a": {"output": posed.stages["output"]}, "b": {"output": changed}}
    (found,) = judge_pairs(computed, dict.fromkeys("ab", bounds), posed.rows).values()
    return found


def test_a_pair_that_differs_in_a_judged_row_is_told_with_its_place(attention: AttentionProblem) -> None:
    index = (0, 1, 128, 3)
    found = pair(attention, moved(attention.stages["output"], index))
    assert (found.verdict, found.index, found.difference) == (Verdict.NUMERIC, index, pytest.approx(0.25, rel=1e-5))
    assert pair(attention, attention.stages["output"]).verdict is Verdict.AGREE


def test_of_a_pair_the_places_of_nan_are_compared_everywhere_and_values_in_judged_rows(
    attention: AttentionProblem,
) -> None:
    index = (0, 0, unjudged(attention), 1)
    assert pair(attention, moved(attention.stages["output"], index)).verdict is Verdict.AGREE
    found = pair(attention, moved(attention.stages["output"], index, np.nan))
    assert (found.verdict, found.index) == (Verdict.NONFINITE, index)


def test_bounds_that_are_kept_are_those_of_whole_stages_and_infinite_where_nothing_was_judged(
    posed: AttentionProblem,
) -> None:
    for stage, max_error in worst_bounds(posed.part, "native").items():
        assert max_error.shape == posed.stages[stage].shape
        assert (rows_of_stage(stage, max_error, posed.rows) == posed.part.bounds("native")[stage].max_error).all()
        if stage not in ("key", "value"):
            rest = np.setdiff1d(np.arange(QUERIES), posed.rows)
            assert np.isinf(rows_of_stage(stage, max_error, rest)).all()
    # Two runs that are compared later compare the rows that were judged.
    bounds = dict.fromkeys("ab", worst_bounds(posed.part, "native"))
    stage = next(iter(posed.stages))
    for row, verdict in ((128, Verdict.NUMERIC), (unjudged(posed), Verdict.AGREE)):
        changed = moved(posed.stages[stage], (0, 0, row, 0))
        (found,) = judge_pairs({"a": {stage: posed.stages[stage]}, "b": {stage: changed}}, bounds).values()
        assert found.verdict is verdict


def test_what_is_too_large_is_not_kept(posed: AttentionProblem, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = {stage: array for stage, array in posed.stages.items() if array.size <= 2 * QUERIES * 8}
    monkeypatch.setattr(judging, "MAX_KEPT", 2 * QUERIES * 8)
    assert judging.kept_stages(posed.stages) == stages
    assert worst_bounds(posed.part, "native").keys() == stages.keys()
    assert judging.exact_values(posed.part).keys() == stages.keys()
    assert {"scores", "weights", "masked"}.isdisjoint(stages)


# Cases.

CASE = """
title: A case with many queries
source: {kind: derivation, title: none}
operation: softmax
cases:
  - name: Many rows
    random: {generator: numpy-legacy, seed: 3}
    inputs: {scores: {draw: randn, shape: [150, 7]}}
"""


def test_the_row_of_a_stage_says_how_many_query_rows_were_judged(
    load_text: Callable[[str], list[Case]],
    compute: Callable[[Case, str], tuple[Inputs, Stages]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampling, "MAX_ELEMENTS", 1000)
    (case,) = load_text(CASE)
    inputs, stages = compute(case, DTYPE)
    wrong = stages | {"weights": moved(stages["weights"], (0, 0, 149, 6))}
    found = judge(case, DTYPE, inputs, {"a": Computed(stages), "b": Computed(wrong)}, dict.fromkeys("ab", "native"))
    rows = [row for row in found.rows if row.comparison == "stage"]
    assert {(row.judged_rows, row.query_rows, row.shape) for row in rows} == {
        (64, 150, "1x1x150x7"),
        (64, 150, "1x1x150"),
    }
    failing = [(row.comparison, row.index) for row in found.rows if row.verdict != Verdict.AGREE]
    assert failing == [("stage", "0,0,149,6"), ("pair", "0,0,149,6")]
    monkeypatch.setattr(sampling, "MAX_ELEMENTS", 10_000)
    found = judge(case, DTYPE, inputs, {"a": Computed(stages)}, {"a": "native"})
    assert {(row.judged_rows, row.query_rows) for row in found.rows} == {(None, None)}


def test_a_case_whose_numbers_are_known_is_judged_whole(
    load_text: Callable[[str], list[Case]],
    compute: Callable[[Case, str], tuple[Inputs, Stages]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampling, "MAX_ELEMENTS", 100)
    inputs_only = CASE.replace("{draw: randn, shape: [150, 7]}", "{constant: 0, shape: [150, 2]}")
    numbers = " ".join(["0.6931"] * 150)
    expected = f"    expect: [{{stage: log_sum_exp, because: the logarithm of two, known: {numbers}}}]\n"
    for text, is_whole in ((inputs_only, False), (inputs_only + expected, True)):
        (case,) = load_text(text)
        inputs, stages = compute(case, "float64")
        assert (truth_of_case(case, "float64", inputs).query_rows is None) is is_whole
        found = judge(case, "float64", inputs, {"a": Computed(stages)}, {"a": "native"})
        assert {row.verdict for row in found.rows} == {Verdict.AGREE}
        assert sum(row.comparison == "known" for row in found.rows) == (150 if is_whole else 0)
