"""Query rows that stand for all, and keys in blocks: what is said of them is what is said of the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from problems import LENGTHS, LK, LQ, NAMES, Array, Arrays, H, Options, Problem, draw
from tables import tables_beside

from attncheck.attention import bounds, oracle, sampling
from attncheck.attention.oracle import OutsideDomain, enclose_exact_stages, evaluate_by_key_blocks, needs_key_blocks
from attncheck.attention.sampling import MAX_UNSAMPLED_ELEMENTS, choose_sampled_rows, select_stage_rows
from attncheck.execution.worker import Computed
from attncheck.judging.judge import CaseJudgement, compare_all_pairs, judge_case, max_errors_of_whole_stages
from attncheck.judging.judge_stages import StageJudgement, judge_stages
from attncheck.judging.truth import Truth
from attncheck.reading.case import Case
from attncheck.reading.inputs import RoundedInputs
from attncheck.spec.verdicts import Verdict

LoadText = Callable[[str], list[Case]]
Compute = Callable[[Case, str], tuple[RoundedInputs, Arrays]]
DTYPE = "float32"
QUERIES, KEYS = 150, 70

# Which rows.


def of_shape(operation: str, shapes: dict[str, tuple[int, ...]], **options: Any) -> Problem:
    """Return a problem whose arrays take no memory."""
    return Problem(operation, options, {name: np.broadcast_to(np.float32(0), each) for name, each in shapes.items()})


def rows_of(*shape: int) -> list[int] | None:
    rows = choose_sampled_rows(of_shape("softmax", {"scores": shape}))
    return None if rows is None else rows.tolist()


def test_the_ends_the_edges_of_tiles_and_rows_at_random_make_sixty_four() -> None:
    rows = rows_of(1, 1, 1000, 1000)
    assert {0, 15, 16, 31, 32, 63, 64, 127, 128, 255, 256, 511, 512, 999} < set(rows)
    assert rows == rows_of(2, 3, 1000, 5000)
    for queries in (65, 66, 128, 129, 1000, 1 << 20):
        rows = rows_of(1, 1, queries, 1 << 18)
        assert (rows, len(rows), rows[0], rows[-1]) == (sorted(set(rows)), 64, 0, queries - 1)


def test_few_rows_few_scores_and_sums_over_rows_are_judged_whole() -> None:
    shapes = ((1, 1, 64, 1 << 20), (1, 1, 512, 512), (0, 1, 512, 512), (1, 1, 512, 513))
    assert [rows_of(*shape) is None for shape in shapes] == [True, True, True, False]
    assert MAX_UNSAMPLED_ELEMENTS == 4 * 256 * 256
    attended = ("query", "key", "value")
    for problem, is_whole in (
        (of_shape("multi_head_attention", dict.fromkeys(attended, (1, 256, 20)), heads=4), True),
        (of_shape("multi_head_attention", dict.fromkeys(attended, (1, 256, 20)), heads=5), False),
        (of_shape("attention", dict.fromkeys(attended, (1, 4, 256, 8))), True),
        (of_shape("attention", dict.fromkeys(attended, (1, 5, 256, 8))), False),
        (of_shape("attention_gradients", dict.fromkeys(attended, (1, 1, 1000, 8))), True),
    ):
        assert (choose_sampled_rows(problem) is None) is is_whole


# What is said of them.


@dataclass(frozen=True)
class Sampled:
    """One computation judged by some rows, and NumPy's stages of it."""

    problem: Problem
    stages: Arrays
    part: Truth

    @property
    def rows(self) -> NDArray[np.intp]:
        return self.part.judged_problem.judged_rows

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


def pose(name: str) -> Sampled:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(LENGTHS, "Lq", QUERIES)
        patch.setitem(LENGTHS, "Lk", KEYS)
        patch.setattr(sampling, "MAX_UNSAMPLED_ELEMENTS", 1000)
        problem = draw(name).stored(DTYPE)
        return Sampled(problem, problem.returned(), problem.truth(DTYPE))


@pytest.fixture(scope="module")
def attention() -> Sampled:
    return pose("attention, all")


@pytest.mark.parametrize("name", ["attention, all", "layer, all", "softmax, empty row"])
def test_numpy_is_right_stages_say_how_many_rows_were_judged_and_bounds_are_infinite_elsewhere(name: str) -> None:
    problem = pose(name)
    worst, rest = max_errors_of_whole_stages(problem.part, "native"), np.setdiff1d(np.arange(QUERIES), problem.rows)
    for stage, found in problem.judge().items():
        assert found.verdict is Verdict.AGREE, (stage, found.message)
        is_whole = stage in ("key", "value")
        assert (found.judged_rows, found.query_rows) == ((None, None) if is_whole else (64, QUERIES))
        kept = select_stage_rows(stage, problem.stages[stage], problem.rows)
        assert found.accumulated.elements == int(np.isfinite(kept).sum())
        bound = problem.part.bounds.bounds_by_stage("native")[stage].max_error
        assert worst[stage].shape == problem.stages[stage].shape
        assert (select_stage_rows(stage, worst[stage], problem.rows) == bound).all()
        assert is_whole or np.isinf(select_stage_rows(stage, worst[stage], rest)).all()


def test_a_fault_in_a_judged_row_is_found_at_its_place_in_the_whole_and_in_no_other_row(attention: Sampled) -> None:
    for stage in ("raw_scores", "capped", "weights", "log_sum_exp", "output"):
        for row in (0, 63, 128, 149):
            index = (0, 1, row, 0) if stage != "log_sum_exp" else (0, 0, row)
            found = attention.judge(**{stage: attention.moved(stage, index)})[stage]
            assert (found.verdict, found.index) == (Verdict.NUMERIC, index)
            assert found.value == float(attention.stages[stage][index] + np.float32(0.25))
    found = attention.judge(output=attention.moved("output", (0, 1, attention.unjudged, 0)))["output"]
    assert found.verdict is Verdict.AGREE
    for value in (np.nan, np.inf):
        found = attention.judge(output=attention.moved("output", (0, 1, 128, 2), value))["output"]
        assert (found.verdict, found.index, found.against) == (Verdict.NONFINITE, (0, 1, 128, 2), "exact")


def test_of_a_pair_values_are_compared_in_judged_rows_and_the_places_of_nan_everywhere(attention: Sampled) -> None:
    of_rows = {stage: bound.max_error for stage, bound in attention.part.bounds.bounds_by_stage("native").items()}
    judged, unjudged = (0, 1, 128, 2), (0, 0, attention.unjudged, 1)
    for index, by, verdict in (
        (judged, 0.25, Verdict.NUMERIC),
        (judged, 0.0, Verdict.AGREE),
        (unjudged, 0.25, Verdict.AGREE),
        (unjudged, np.nan, Verdict.NONFINITE),
    ):
        computed = {"a": {"output": attention.stages["output"]}, "b": {"output": attention.moved("output", index, by)}}
        (found,) = compare_all_pairs(computed, dict.fromkeys("ab", of_rows), attention.rows).values()
        # Two runs that are compared later have bounds of whole stages.
        (later,) = compare_all_pairs(
            computed, dict.fromkeys("ab", max_errors_of_whole_stages(attention.part, "native"))
        ).values()
        assert found.verdict is later.verdict is verdict
        assert verdict is Verdict.AGREE or found.index == index


CASE = tables_beside(__file__)["many rows"]
KNOWN = f"""\
    expect: [{{stage: log_sum_exp, because: the logarithm of seven, known: {" ".join(["1.9459"] * 150)}}}]
"""


def judged_with(case: Case, compute: Compute, *, dtype: str = "float64", **wrong: float) -> CaseJudgement:
    """Judge NumPy's stages, and the same with the last element of some moved."""
    inputs, stages = compute(case, dtype)
    moved = {stage: stages[stage].copy() for stage in wrong}
    for stage, by in wrong.items():
        moved[stage][(-1,) * moved[stage].ndim] += by
    sides = {"a": Computed(stages)} | ({"b": Computed(stages | moved)} if wrong else {})
    return judge_case(case, dtype, inputs, sides, dict.fromkeys(sides, "native"))


def test_rows_say_how_many_and_known_numbers_are_judged_whole(
    load_text: LoadText, compute: Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    constant = CASE.replace("{draw: randn, shape: [150, 7]}", "{constant: 0, shape: [150, 7]}")
    for text, most, rows in (
        (CASE, 1000, (64, 150)),
        (CASE, 10_000, (None, None)),
        (constant, 100, (64, 150)),
        (constant + KNOWN, 100, (None, None)),
    ):
        monkeypatch.setattr(sampling, "MAX_UNSAMPLED_ELEMENTS", most)
        (case,) = load_text(text)
        found = judged_with(case, compute, dtype=DTYPE, weights=0.25)
        of_stages = [row for row in found.rows if row.comparison == "stage"]
        assert {(row.judged_rows, row.query_rows) for row in of_stages} == {rows}
        failing = [(row.comparison, row.index) for row in found.rows if row.verdict != Verdict.AGREE]
        assert failing == [("stage", "0,0,149,6"), ("pair", "0,0,149,6")]
        assert sum(row.comparison == "known" for row in found.rows) == (300 if text.endswith(KNOWN) else 0)


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
    monkeypatch.setattr(oracle, "MAX_BLOCK_ELEMENTS", 1)
    monkeypatch.setattr(oracle, "_MIN_KEYS", 3)
    monkeypatch.setattr(bounds, "MAX_ELEMENTS_AT_A_TIME", 2 * H * LK * 2)
    monkeypatch.setattr(oracle, "MIN_ELEMENTS", 0)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", BLOCKED)
def test_blocks_enclose_what_the_whole_encloses_and_their_bounds_are_no_wider(name: str) -> None:
    of, more, dtype = BLOCKED[name]
    problem = draw(of).stored(dtype)
    problem = Problem("attention", problem.options | more, problem.inputs)
    given = problem.canonical()
    given.options.update({each: problem.options[each] for each in ("empty_rows",) if each in problem.options})
    found, whole = evaluate_by_key_blocks(given, RESULTS), enclose_exact_stages(given)
    assert found.exact_stages.keys() == set(RESULTS)
    for stage in RESULTS if "empty_rows" not in more else ("output",):  # no convention says what the sum is there
        own, other = found.exact_stages[stage], whole[stage]
        with np.errstate(invalid="ignore"):
            apart = np.abs((own.high - other.high) + (own.low - other.low))
        same = np.isinf(own.high) & (own.high == other.high)
        # Whatever the order of sums, both enclose the same number; each low is itself rounded, by less than its radius.
        assert (same | (apart <= 2 * (own.radius + other.radius))).all()
    # What bounds need besides: the last logits and the weights, and what the last logits follow from.
    assert found.inner_stages.keys() == whole.keys() - {*RESULTS, "raw_scores", "rotated_query", "rotated_key"}
    places = whole[next(stage for stage in ("masked", "biased", "capped", "scores") if stage in whole)].high > -np.inf
    for stage, array in found.inner_stages.items():
        np.testing.assert_allclose(array[places], whole[stage].high[places], rtol=2.0**-42, atol=1e-300)
    assert (found.inner_stages["weights"][~places] == whole["weights"].high[~places]).all()
    model = "fused" if dtype == "float16" else "native"
    blocked, plain = problem.truth(dtype, returned=[*RESULTS]), problem.truth(dtype)
    assert (bool(blocked.stages.inner_stages), bool(plain.stages.inner_stages)) == (True, False)
    for stage, bound in blocked.bounds.bounds_by_stage(model).items():
        other_bound = plain.bounds.bounds_by_stage(model)[stage]
        # The logarithm of a sum of weights just below 1 comes in steps of 2^-53.
        step = 2.0**-51 if stage == "log_sum_exp" else 0.0
        assert (bound.max_error <= other_bound.max_error * (1 + 1e-9) + step).all()
        # Tighter, but never by more than the extremes of the values and the lowest bits of the keys explain.
        assert (bound.max_error >= 0.2 * other_bound.max_error).all()
        # Of huge scores one weight is 1: the variance of the values is then the rounding of the terms that cancel.
        relative = 0.1 if name == "huge scores" else 1e-6
        np.testing.assert_allclose(bound.sigma, np.minimum(other_bound.sigma, bound.max_error), rtol=relative)


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
        assert needs_key_blocks(Problem(operation, options, dict(PLAIN)), stages) is blocked
    truth = Problem("attention", {"is_causal": True}, PLAIN).truth(returned=["output"])
    step = truth.step_reference("output", {"output": np.zeros(truth.exact["output"].shape)}, "native")
    assert step is not None, "a step that follows from nothing returned is the accumulated one"
    assert (step.exact is truth.exact["output"], step.bound is truth.bounds.bounds_by_stage("native")["output"]) == (
        True,
        True,
    )
    nan = PLAIN | {"value": np.where(np.arange(6)[:, np.newaxis] == 2, np.nan, PLAIN["value"])}
    with pytest.raises(OutsideDomain, match="value holds NaN"):
        evaluate_by_key_blocks(Problem("attention", {}, nan), RESULTS)
    for scale, least in ((1e17, 0), (1e300, 0), (1.0, 2 * H * LQ * LK)):
        monkeypatch.setattr(oracle, "MIN_ELEMENTS", least)  # small problems keep every stage
        problem = Problem("attention", {"scale": scale}, PLAIN)
        truth = problem.truth(returned=["output"])
        assert (bool(truth.stages.inner_stages), "weights" in truth.exact) == (False, True)
        if least == 0:  # logits that two numbers do not hold are worked out as ever
            assert evaluate_by_key_blocks(problem, RESULTS) is None


NUMBERS = tables_beside(__file__)["equal scores"]


@pytest.mark.usefixtures("small_blocks")
def test_stages_with_known_numbers_are_always_worked_out(load_text: LoadText, compute: Compute) -> None:
    (case,) = load_text(NUMBERS)
    inputs, stages = compute(case, "float64")
    for expected, is_whole in ((case.expected, True), ((), False)):
        outcomes = {"a": Computed({"output": stages["output"]})}
        found = judge_case(replace(case, expected=expected), "float64", inputs, outcomes, {"a": "native"})
        assert not found.has_disagreement
        assert ("weights" in found.truth.exact, bool(found.truth.stages.inner_stages)) == (is_whole, not is_whole)
