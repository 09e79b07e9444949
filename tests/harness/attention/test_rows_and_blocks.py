"""Query rows that stand for all, and keys in blocks: what is said of them is what is said of the whole."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent))
from problems import LK, LQ, NAMES, H, Problem, draw

from attncheck.attention import bounds, oracle, sampling
from attncheck.attention.enclosure import Enclosure
from attncheck.attention.oracle import OutsideDomain, are_blocked, exact_results, exact_stages
from attncheck.attention.sampling import MAX_ELEMENTS, rows_of_stage, sampled_rows
from attncheck.execution.worker import Computed
from attncheck.judging.judge import judge, judge_pairs, worst_bounds
from attncheck.judging.judge_stages import StageJudgement, judge_stages
from attncheck.judging.truth import Truth, find_truth, truth_of_case
from attncheck.reading.case import Case
from attncheck.reading.inputs import Inputs
from attncheck.verdicts import Verdict

Array = NDArray[Any]
Arrays = dict[str, Array]
Options = dict[str, Any]
LoadText = Callable[[str], list[Case]]
Compute = Callable[[Case, str], tuple[Inputs, Arrays]]
DTYPE = "float32"
QUERIES, KEYS = 150, 70


def assert_same(own: Enclosure, other: Enclosure) -> None:
    """Whatever the order of their sums, both enclose the same number."""
    assert own.shape == other.shape
    same = np.isinf(own.high) & (own.high == other.high)
    with np.errstate(invalid="ignore"):
        apart = np.abs((own.high - other.high) + (own.low - other.low))
    # Each low is itself rounded, by less than its radius.
    assert (same | (apart <= 2 * (own.radius + other.radius))).all()


# Which rows.


def scores(*shape: int) -> Arrays:
    """Return an array of this shape that takes no memory."""
    return {"scores": np.broadcast_to(np.float32(0), shape)}


def test_the_ends_the_edges_of_tiles_and_rows_at_random_make_sixty_four() -> None:
    rows = sampled_rows(Problem("softmax", {}, scores(1, 1, 1000, 1000)))
    assert rows is not None
    assert {0, 15, 16, 31, 32, 63, 64, 127, 128, 255, 256, 511, 512, 999} < set(rows.tolist())
    assert (np.diff(rows) > 0).all()
    np.testing.assert_array_equal(rows, sampled_rows(Problem("softmax", {}, scores(2, 3, 1000, 5000))))
    for queries in (65, 66, 128, 129, 1000, 1 << 20):
        rows = sampled_rows(Problem("softmax", {}, scores(1, 1, queries, 1 << 18)))
        assert rows is not None
        assert (len(np.unique(rows)), len(rows), rows[0], rows[-1]) == (64, 64, 0, queries - 1)


def test_few_rows_few_scores_and_sums_over_rows_are_judged_whole() -> None:
    for shape in ((1, 1, 64, 1 << 20), (1, 1, 512, 512), (0, 1, 512, 512)):
        assert sampled_rows(Problem("softmax", {}, scores(*shape))) is None
    assert sampled_rows(Problem("softmax", {}, scores(1, 1, 512, 513))) is not None
    assert MAX_ELEMENTS == 4 * 256 * 256
    for heads, is_whole in ((4, True), (5, False)):
        inputs = {"query": np.zeros((1, 256, 20)), "key": np.zeros((1, 256, 20))}
        assert (sampled_rows(Problem("multi_head_attention", {"heads": heads}, inputs)) is None) is is_whole
        per_head = {name: np.broadcast_to(np.float32(0), (1, heads, 256, 8)) for name in ("query", "key")}
        assert (sampled_rows(Problem("attention", {}, per_head)) is None) is is_whole
    inputs = {name: np.broadcast_to(np.float32(0), (1, 1, 1000, 8)) for name in ("query", "key", "value")}
    assert sampled_rows(Problem("attention", {}, inputs)) is not None
    assert sampled_rows(Problem("attention_gradients", {}, inputs)) is None


# What is said of them.


@dataclass(frozen=True)
class Sampled:
    """One computation, judged whole and by some rows, and NumPy's stages of it."""

    problem: Problem
    stages: Arrays
    whole: Truth
    part: Truth

    @property
    def rows(self) -> NDArray[np.intp]:
        assert self.part.query_rows is not None
        return self.part.query_rows

    @property
    def unjudged(self) -> int:
        return next(row for row in range(QUERIES) if row not in self.rows)

    def judge(self, **changed: Array) -> dict[str, StageJudgement]:
        """Judge by some rows what NumPy returned, with some stages changed."""
        shapes = {name: array.shape for name, array in self.stages.items()}
        return {item.stage: item for item in judge_stages(self.part, self.stages | changed, shapes, "native")}

    def moved(self, stage: str, index: tuple[int, ...], by: float = 0.25) -> Array:
        array = self.stages[stage].copy()
        array[index] += by
        return array


def pose(operation: str) -> Sampled:
    random = np.random.RandomState(7)

    def drawn(*shape: int) -> Array:
        return random.randn(*shape).astype(DTYPE)

    mask = random.rand(1, 2, QUERIES, KEYS) < 0.7
    mask[:, 1, 64] = False  # a row without a key, among those that are judged
    options: Options = {"is_causal": True}
    if operation == "attention":
        inputs = {name: drawn(1, 2, length, 6) for name, length in (("query", QUERIES), ("key", KEYS))}
        inputs |= {"value": drawn(1, 2, KEYS, 5), "mask": mask, "bias": drawn(2, 1, KEYS)}
    elif operation == "softmax":
        options, inputs = {}, {"scores": np.where(mask, drawn(1, 2, QUERIES, KEYS), np.float32(-np.inf))}
    else:
        options |= {"heads": 2}
        inputs = {"query": drawn(1, QUERIES, 7), "key": drawn(1, KEYS, 5), "value": drawn(1, KEYS, 4)}
        inputs |= {"query_weight": drawn(7, 6), "key_weight": drawn(5, 6), "value_weight": drawn(4, 8)}
        inputs |= {"query_bias": drawn(6), "output_weight": drawn(8, 3), "mask": mask[:, :1]}
    problem = Problem(operation, options, inputs)
    whole = problem.truth(DTYPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "MAX_ELEMENTS", 1000)
        part = problem.truth(DTYPE)
    assert whole.query_rows is None
    return Sampled(problem, problem.returned(), whole, part)


@pytest.fixture(scope="module", params=["attention", "multi_head_attention", "softmax"])
def problem(request: pytest.FixtureRequest) -> Sampled:
    return pose(request.param)


@pytest.fixture(scope="module")
def attention() -> Sampled:
    return pose("attention")


def test_numpy_is_right_and_every_stage_says_how_many_rows_were_judged(problem: Sampled) -> None:
    for stage, found in problem.judge().items():
        assert found.verdict is Verdict.AGREE, (stage, found.message)
        counts = (None, None) if stage in ("key", "value") else (64, QUERIES)
        assert (found.judged_rows, found.query_rows) == counts
        assert found.accumulated is not None
        kept = rows_of_stage(stage, problem.stages[stage], problem.rows)
        assert found.accumulated.elements == int(np.isfinite(kept).sum())


def test_bounds_that_are_kept_are_those_of_whole_stages_and_infinite_where_nothing_was_judged(problem: Sampled) -> None:
    for stage, max_error in worst_bounds(problem.part, "native").items():
        assert max_error.shape == problem.stages[stage].shape
        assert (rows_of_stage(stage, max_error, problem.rows) == problem.part.bounds("native")[stage].max_error).all()
        if stage not in ("key", "value"):
            rest = np.setdiff1d(np.arange(QUERIES), problem.rows)
            assert np.isinf(rows_of_stage(stage, max_error, rest)).all()
    # Two runs that are compared later compare the rows that were judged.
    bounds = dict.fromkeys("ab", worst_bounds(problem.part, "native"))
    stage = next(iter(problem.stages))
    for row, verdict in ((128, Verdict.NUMERIC), (problem.unjudged, Verdict.AGREE)):
        sides = {"a": {stage: problem.stages[stage]}, "b": {stage: problem.moved(stage, (0, 0, row, 0))}}
        (found,) = judge_pairs(sides, bounds).values()
        assert found.verdict is verdict


# Faults.


def test_a_fault_in_a_judged_row_is_found_at_its_place_in_the_whole_and_in_no_other_row(attention: Sampled) -> None:
    for stage in ("raw_scores", "biased", "weights", "log_sum_exp", "output"):
        for row in (0, 63, 128, 149):
            index = (0, 1, row, 0) if stage != "log_sum_exp" else (0, 0, row)
            found = attention.judge(**{stage: attention.moved(stage, index)})[stage]
            assert (found.verdict, found.index) == (Verdict.NUMERIC, index)
            assert found.value == float(attention.stages[stage][index] + np.float32(0.25))
            assert found.accumulated is not None
            assert found.accumulated.index == index
    found = attention.judge(output=attention.moved("output", (0, 1, attention.unjudged, 0)))["output"]
    assert found.verdict is Verdict.AGREE
    for value in (np.nan, np.inf):
        found = attention.judge(output=attention.moved("output", (0, 1, 128, 3), value))["output"]
        assert (found.verdict, found.index, found.against) == (Verdict.NONFINITE, (0, 1, 128, 3), "exact")


def test_of_a_pair_values_are_compared_in_judged_rows_and_the_places_of_nan_everywhere(attention: Sampled) -> None:
    bounds = {stage: bound.max_error for stage, bound in attention.part.bounds("native").items()}

    def pair(index: tuple[int, ...], by: float) -> Any:
        computed = {"a": {"output": attention.stages["output"]}, "b": {"output": attention.moved("output", index, by)}}
        (found,) = judge_pairs(computed, dict.fromkeys("ab", bounds), attention.rows).values()
        return found

    judged, unjudged = (0, 1, 128, 3), (0, 0, attention.unjudged, 1)
    found = pair(judged, 0.25)
    assert (found.verdict, found.index, found.difference) == (Verdict.NUMERIC, judged, pytest.approx(0.25, rel=1e-5))
    assert pair(judged, 0.0).verdict is pair(unjudged, 0.25).verdict is Verdict.AGREE
    found = pair(unjudged, np.nan)
    assert (found.verdict, found.index) == (Verdict.NONFINITE, unjudged)


CASE = """
title: A case with many queries
source: {kind: derivation, title: none}
operation: softmax
cases:
  - name: Many rows
    random: {generator: numpy-legacy, seed: 3}
    inputs: {scores: {draw: randn, shape: [150, 7]}}
"""


def test_a_stage_says_how_many_rows(load_text: LoadText, compute: Compute, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "MAX_ELEMENTS", 1000)
    (case,) = load_text(CASE)
    inputs, stages = compute(case, DTYPE)
    weights = stages["weights"].copy()
    weights[0, 0, 149, 6] += 0.25
    sides = {"a": Computed(stages), "b": Computed(stages | {"weights": weights})}
    found = judge(case, DTYPE, inputs, sides, dict.fromkeys("ab", "native"))
    rows = {(row.judged_rows, row.query_rows, row.shape) for row in found.rows if row.comparison == "stage"}
    assert rows == {(64, 150, "1x1x150x7"), (64, 150, "1x1x150")}
    failing = [(row.comparison, row.index) for row in found.rows if row.verdict != Verdict.AGREE]
    assert failing == [("stage", "0,0,149,6"), ("pair", "0,0,149,6")]
    monkeypatch.setattr(sampling, "MAX_ELEMENTS", 10_000)
    found = judge(case, DTYPE, inputs, {"a": Computed(stages)}, {"a": "native"})
    assert {(row.judged_rows, row.query_rows) for row in found.rows} == {(None, None)}


def test_known_numbers_are_judged_whole(load_text: LoadText, compute: Compute, monkeypatch: pytest.MonkeyPatch) -> None:
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


# Keys in blocks.

RESULTS = ("log_sum_exp", "output")
BLOCKED: dict[str, tuple[str, Options, str]] = {
    **{name: (name, {}, "float64") for name in NAMES if draw(name).operation == "attention"},
    "large scores": ("attention", {"scale": 1e4}, "float64"),
    "huge scores": ("attention", {"scale": 1e12}, "float64"),
    "even rows": ("attention, query mask", {"empty_rows": "uniform"}, "float64"),
    "float32": ("attention, all", {}, "float32"),
    "float16": ("attention, past", {}, "float16"),
}
"""Problems, what options they have besides, and their dtype."""
del BLOCKED["sinks"], BLOCKED["fill"]  # which are not blocked
PLAIN = draw("attention").inputs


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make several blocks of a few keys, and bound a few rows at a time."""
    monkeypatch.setattr(oracle, "ELEMENTS_AT_A_TIME", 1)
    monkeypatch.setattr(oracle, "_MIN_KEYS", 3)
    monkeypatch.setattr(bounds, "ELEMENTS_AT_A_TIME", 2 * H * LK * 2)
    monkeypatch.setattr(oracle, "MIN_ELEMENTS", 0)


def truth_of(options: Options, inputs: Arrays, dtype: str = "float64", **more: Any) -> Truth:
    return find_truth(Problem("attention", options, inputs), dtype, supports_statistics=True, **more)


def results(options: Options, inputs: Arrays) -> Any:
    found = exact_results(Problem("attention", options, inputs), RESULTS)
    assert found is not None
    return found


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", BLOCKED)
def test_blocks_enclose_what_the_whole_encloses_and_their_bounds_are_no_wider(name: str) -> None:
    of, more, dtype = BLOCKED[name]
    problem = draw(of).stored(dtype)
    options, inputs = problem.options | more, problem.inputs
    given = Problem("attention", options, inputs).canonical()
    given.options.update({each: options[each] for each in ("empty_rows",) if each in options})
    found, whole = results(given.options, given.inputs), exact_stages(Problem("attention", given.options, given.inputs))
    assert found.exact.keys() == set(RESULTS)
    for stage in RESULTS if "empty_rows" not in options else ("output",):  # no convention says what the sum is there
        assert_same(found.exact[stage], whole[stage])
    # What bounds need besides: the last logits and the weights, and what the last logits follow from.
    assert found.inner.keys() == whole.keys() - {*RESULTS, "raw_scores", "rotated_query", "rotated_key"}
    places = whole[next(stage for stage in ("masked", "biased", "capped", "scores") if stage in whole)].high > -np.inf
    for stage, array in found.inner.items():
        np.testing.assert_allclose(array[places], whole[stage].high[places], rtol=2.0**-42, atol=1e-300)
    assert (found.inner["weights"][~places] == whole["weights"].high[~places]).all()
    model = "fused" if dtype == "float16" else "native"
    blocked, plain = truth_of(options, inputs, dtype, returned=[*RESULTS]), truth_of(options, inputs, dtype)
    assert blocked.inner
    assert not plain.inner
    for stage, bound in blocked.bounds(model).items():
        other = plain.bounds(model)[stage]
        # The logarithm of a sum of weights just below 1 comes in steps of 2^-53.
        step = 2.0**-51 if stage == "log_sum_exp" else 0.0
        assert (bound.max_error <= other.max_error * (1 + 1e-9) + step).all()
        # Tighter, but never by more than the extremes of the values and the lowest bits of the keys explain.
        assert (bound.max_error >= 0.2 * other.max_error).all()
        assert (bound.sigma <= bound.max_error).all()
        np.testing.assert_allclose(bound.sigma, np.minimum(other.sigma, bound.max_error), rtol=1e-6)


@pytest.mark.usefixtures("small_blocks")
def test_a_step_that_follows_from_nothing_returned_is_the_accumulated_one() -> None:
    truth = truth_of({"is_causal": True}, PLAIN, returned=["output"])
    step = truth.introduced("output", {"output": np.zeros(truth.exact["output"].shape)}, "native")
    assert step is not None
    assert step[0] is truth.exact["output"]
    assert step[1] is truth.bounds("native")["output"]


@pytest.mark.usefixtures("small_blocks")
def test_what_is_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    for operation, options, stages, blocked in (
        ("attention", {}, {"output"}, True),
        ("attention", {}, {"output", "log_sum_exp"}, True),
        ("attention", {}, {"output", "weights"}, False),
        ("attention", {"softcap_follows": "biased"}, {"output"}, False),
        ("multi_head_attention", {}, {"output"}, False),
        ("softmax", {}, {"log_sum_exp"}, False),
    ):
        assert are_blocked(Problem(operation, options, dict(PLAIN)), stages) is blocked
    for scale in (1e17, 1e300):  # logits that two numbers do not hold are worked out as ever
        assert exact_results(Problem("attention", {"scale": scale}, dict(PLAIN)), RESULTS) is None
        truth = truth_of({"scale": scale}, dict(PLAIN), returned=["output"])
        assert not truth.inner
        assert "weights" in truth.exact
    nan = PLAIN | {"value": np.where(np.arange(6)[:, np.newaxis] == 2, np.nan, PLAIN["value"])}
    with pytest.raises(OutsideDomain, match="value holds NaN"):
        exact_results(Problem("attention", {}, nan), RESULTS)
    monkeypatch.setattr(oracle, "MIN_ELEMENTS", 2 * H * LQ * LK)  # small problems keep every stage
    truth = truth_of({}, dict(PLAIN), returned=["output"])
    assert not truth.inner
    assert "weights" in truth.exact


NUMBERS = """
title: A case with numbers
source: {kind: derivation, title: none}
operation: attention
cases:
  - name: Equal scores
    inputs:
      query: {constant: 0, shape: [2, 1]}
      key: {constant: 1, shape: [4, 1]}
      value: {ascending: [0, 1], shape: [4, 1]}
    expect: [{stage: weights, because: one over the number of keys, known: "0.25 0.25 0.25 0.25\\n0.25 0.25 0.25 0.25"}]
"""


@pytest.mark.usefixtures("small_blocks")
def test_stages_with_known_numbers_are_always_worked_out(load_text: LoadText, compute: Compute) -> None:
    (case,) = load_text(NUMBERS)
    inputs, stages = compute(case, "float64")
    outcomes = {"a": Computed({"output": stages["output"]})}
    found = judge(case, "float64", inputs, outcomes, {"a": "native"})
    assert not found.disagrees
    assert "weights" in found.truth.exact
    assert judge(replace(case, expected=()), "float64", inputs, outcomes, {"a": "native"}).truth.inner


@pytest.mark.parametrize(
    "options", [{"is_causal": True}, {"window": (100, 0)}, {}], ids=["causal", "window", "lengths"]
)
def test_nothing_of_the_size_of_the_score_matrix_is_made(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (oracle, bounds):
        monkeypatch.setattr(module, "ELEMENTS_AT_A_TIME", 1 << 13)
    monkeypatch.setattr(oracle, "_MIN_KEYS", 64)
    monkeypatch.setattr(oracle, "MIN_ELEMENTS", 0)
    length = 3072
    random = np.random.RandomState(0)
    inputs = {name: random.randn(1, 1, length, 4).astype("float32") for name in ("query", "key", "value")}
    if not options:
        inputs |= {"key_lengths": np.array([1500]), "query_mask": np.arange(length)[np.newaxis] % 2 == 0}
    tracemalloc.start()
    try:
        truth = truth_of(options, inputs, "float32", returned=["output"])
        truth.bounds("native")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert truth.exact["output"].shape == (1, 1, 64, 4)
    assert truth.queries == length
    assert peak < length * length  # a byte for each score would be more
