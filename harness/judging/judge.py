"""One case in one dtype, judged: every implementation against the exact answer, against each other, against numbers.

Two implementations disagree where they differ by more than the sum of their bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from numpy.typing import NDArray

from attncheck.harness.errors import ExitCode
from attncheck.harness.judging.compare import Comparison, Index, compare_arrays
from attncheck.harness.judging.judge_numbers import judge_numbers
from attncheck.harness.judging.judge_stages import StageJudgement, in_order, judge_stages, where_it_begins
from attncheck.harness.judging.tiers import Measured
from attncheck.harness.judging.truth import Truth, find_truth
from attncheck.harness.reading.case import Case
from attncheck.harness.reading.inputs import Inputs
from attncheck.harness.reading.shapes import show
from attncheck.harness.results.writer import Row
from attncheck.harness.running.worker import Computed, Failure, Outcome
from attncheck.harness.verdicts import Verdict

Stages = Mapping[str, NDArray[Any]]
Bounds = Mapping[str, NDArray[Any]]
"""Stage -> the largest error that an implementation's class allows, per element."""


@dataclass(frozen=True)
class Judged:
    """All rows of one case in one dtype, the truth behind them, and whether any of them disagrees."""

    rows: tuple[Row, ...]
    truth: Truth
    disagrees: bool


def judge(
    case: Case, dtype: str, inputs: Inputs, outcomes: Mapping[str, Outcome], classes: Mapping[str, str]
) -> Judged:
    """Judge what the implementations returned for one case in one dtype; ``classes`` are their numerical classes."""
    truth = find_truth(case.operation, case.options, inputs.arrays, dtype, generic=case.generic)
    blank = Row(case.id, case.operation, dtype, "", "stage", "", Verdict.AGREE)
    rows: list[Row] = []
    computed: dict[str, Stages] = {}
    for name, outcome in outcomes.items():
        own = replace(blank, implementation=name)
        if isinstance(outcome, Failure):
            rows.append(replace(own, verdict=Verdict(outcome.verdict), message=outcome.message))
        elif isinstance(outcome, Computed):
            computed[name] = outcome.stages
            rows += _stage_rows(
                own, judge_stages(truth, outcome.stages, case.stage_shapes, classes[name]), outcome.stages
            )
    bounds = {name: worst_bounds(truth, classes[name]) for name in computed}
    pairs = judge_pairs(computed, bounds)
    rows += [pair_row(blank, first, second, stage, pair) for (first, second, stage), pair in pairs.items()]
    rows += judge_numbers(case, inputs, truth, computed, classes, blank)
    failing = any(Verdict(row.verdict).exit_code is not ExitCode.AGREE for row in rows)
    return Judged(tuple(rows), truth, failing)


def worst_bounds(truth: Truth, numerical_class: str) -> Bounds:
    """Return B of every stage; nothing where there is no exact answer."""
    if not truth.exact:
        return {}
    return {stage: bound.worst for stage, bound in truth.bounds(numerical_class).items()}


def judge_pairs(computed: Mapping[str, Stages], bounds: Mapping[str, Bounds]) -> dict[tuple[str, str, str], Comparison]:
    """Compare every two implementations at every stage that both return; keys are (first, second, stage)."""
    return {
        (first, second, stage): compare_arrays(
            computed[first][stage], computed[second][stage], _allowed(bounds, first, second, stage)
        )
        for first, second in combinations(computed, 2)
        for stage in in_order(computed[first])
        if stage in computed[second]
    }


def _allowed(bounds: Mapping[str, Bounds], first: str, second: str, stage: str) -> NDArray[Any] | None:
    one, other = bounds[first].get(stage), bounds[second].get(stage)
    return None if one is None or other is None else one + other


def pair_row(blank: Row, first: str, second: str, stage: str, comparison: Comparison) -> Row:
    """Lay one pair's comparison out as a row."""
    return replace(
        blank,
        comparison="pair",
        implementation=first,
        other=second,
        stage=stage,
        verdict=comparison.verdict,
        index=show_index(comparison.index),
        value=comparison.first,
        reference=comparison.second,
        difference=comparison.difference,
        allowed=comparison.allowed,
        ratio=comparison.ratio,
        message=comparison.message,
    )


def show_index(index: Index | None) -> str | None:
    """Write an element's index as 0,0,2,3."""
    return None if index is None else ",".join(map(str, index))


def _stage_rows(own: Row, judgements: list[StageJudgement], stages: Stages) -> list[Row]:
    begins_at = where_it_begins(judgements) or None
    return [_stage_row(own, judgement, stages[judgement.stage], begins_at) for judgement in judgements]


def _stage_row(own: Row, judgement: StageJudgement, array: NDArray[Any], begins_at: str | None) -> Row:
    row = replace(
        own,
        stage=judgement.stage,
        verdict=judgement.verdict,
        shape=show(array.shape),
        index=show_index(judgement.index),
        value=judgement.value,
        reference=judgement.exact,
        difference=judgement.error,
        allowed=judgement.bound,
        begins_at=begins_at,
        message=_explain(judgement, array),
    )
    if judgement.accumulated is not None:
        row = replace(row, **_of(judgement.accumulated))
    if judgement.introduced is not None:
        measured = judgement.introduced
        row = replace(
            row,
            introduced_tier=measured.tier,
            introduced_ratio=measured.ratio,
            introduced_z=measured.largest_z,
        )
    return row


def _of(measured: Measured) -> dict[str, Any]:
    return {
        "tier": measured.tier,
        "ratio": measured.ratio,
        "largest_z": measured.largest_z,
        "mean_z": measured.mean_z,
        "elements": measured.elements,
    }


def _explain(judgement: StageJudgement, array: NDArray[Any]) -> str:
    """Add the element to a failing stage's message: computed, in decimal and hex, and exact."""
    if judgement.verdict is not Verdict.NUMERIC or judgement.index is None or judgement.value is None:
        return judgement.message
    digits = 9 if array.dtype.itemsize <= 4 else 17
    return (
        f"{judgement.message}; at [{show_index(judgement.index)}] computed {judgement.value:.{digits}g} "
        f"({judgement.value.hex()}), exact {judgement.exact:.17g}, off by {judgement.error:.3g}, "
        f"bound {judgement.bound:.3g}"
    )
