"""One case in one dtype, judged: every implementation among the others, then against the numbers that are known.

Each implementation is compared with every other one, stage by stage. Until there is an oracle, the majority decides: an
implementation that agrees with fewer than half of the others is the one that disagrees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from numpy.typing import NDArray

from attncheck.harness.errors import ExitCode
from attncheck.harness.judging.compare import Comparison, Index, compare_stage
from attncheck.harness.judging.interim_rule import UNITS
from attncheck.harness.judging.judge_numbers import judge_numbers
from attncheck.harness.reading.case import Case
from attncheck.harness.reading.inputs import Inputs
from attncheck.harness.reading.shapes import show
from attncheck.harness.results.writer import Row
from attncheck.harness.running.worker import Computed, Failure, Outcome
from attncheck.harness.verdicts import Verdict
from attncheck.harness.vocabulary import STAGES

Stages = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Judged:
    """All rows of one case in one dtype, and whether any of them disagrees."""

    rows: tuple[Row, ...]
    disagrees: bool


def judge(case: Case, dtype: str, inputs: Inputs, outcomes: Mapping[str, Outcome]) -> Judged:
    """Compare what the implementations returned for one case in one dtype."""
    blank = Row(case.id, case.operation, dtype, "", "stage", "", Verdict.AGREE)
    computed = {name: outcome.stages for name, outcome in outcomes.items() if isinstance(outcome, Computed)}
    rows = [
        replace(blank, implementation=name, verdict=Verdict(outcome.verdict), message=outcome.message)
        for name, outcome in outcomes.items()
        if isinstance(outcome, Failure)
    ]
    pairs = judge_pairs(computed)
    rows += [pair_row(blank, first, second, stage, pair) for (first, second, stage), pair in pairs.items()]
    stage_rows = _stage_rows(case, blank, computed, pairs)
    rows += stage_rows
    rows += judge_numbers(case, inputs, computed, blank, _agreeing(stage_rows))
    failing = any(Verdict(row.verdict).exit_code is not ExitCode.AGREE for row in rows)
    return Judged(tuple(rows), failing)


def judge_pairs(computed: Mapping[str, Stages]) -> dict[tuple[str, str, str], Comparison]:
    """Compare every two implementations at every stage that both return; keys are (first, second, stage)."""
    return {
        (first, second, stage): compare_stage(stage, computed[first], computed[second])
        for first, second in combinations(computed, 2)
        for stage in in_order(computed[first])
        if stage in computed[second]
    }


def in_order(stages: Stages) -> list[str]:
    """Return the stages' names in the order in which attention computes them; names of their own come last."""
    return sorted(stages, key=lambda stage: STAGES.index(stage) if stage in STAGES else len(STAGES))


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
        units=comparison.units,
        message=comparison.message,
    )


def show_index(index: Index | None) -> str | None:
    """Write an element's index as 0,0,2,3."""
    return None if index is None else ",".join(map(str, index))


def _stage_rows(
    case: Case,
    blank: Row,
    computed: Mapping[str, Stages],
    pairs: Mapping[tuple[str, str, str], Comparison],
) -> list[Row]:
    rows = []
    for name, stages in computed.items():
        for stage in in_order(stages):
            array = stages[stage]
            row = replace(blank, implementation=name, stage=stage, shape=show(array.shape))
            rows.append(_judge_form(case, row, array) or judge_among(row, pairs))
    return rows


def _judge_form(case: Case, row: Row, array: NDArray[Any]) -> Row | None:
    """Hold a stage's shape and dtype against what the case itself says they are."""
    wanted = case.stage_shapes.get(row.stage)
    if wanted is not None and array.shape != wanted:
        message = f"expected shape {show(wanted)}, got {show(array.shape)}"
        return replace(row, verdict=Verdict.SHAPE, message=message)
    if str(array.dtype) != row.dtype:
        return replace(row, verdict=Verdict.DTYPE, message=f"expected {row.dtype}, got {array.dtype}")
    return None


def judge_among(row: Row, pairs: Mapping[tuple[str, str, str], Comparison]) -> Row:
    """Hold a stage against the majority of the other implementations."""
    compared = {
        (second if first == row.implementation else first): (comparison, first == row.implementation)
        for (first, second, stage), comparison in pairs.items()
        if stage == row.stage and row.implementation in (first, second)
    }
    if not compared:
        return replace(row, verdict=Verdict.UNVERIFIED, message="no other implementation to compare with")
    apart = {name: pair for name, pair in compared.items() if pair[0].verdict is not Verdict.AGREE}
    if 2 * len(apart) <= len(compared):
        return row
    other, (worst, is_first) = max(apart.items(), key=lambda item: (item[1][0].verdict.severity, item[1][0].units or 0))
    value, reference = (worst.first, worst.second) if is_first else (worst.second, worst.first)
    return replace(
        row,
        other=other,
        verdict=worst.verdict,
        index=show_index(worst.index),
        value=value,
        reference=reference,
        difference=worst.difference,
        units=worst.units,
        message=_explain(sorted(apart), other, worst, value, reference),
    )


def _explain(apart: list[str], other: str, worst: Comparison, value: float | None, reference: float | None) -> str:
    text = f"differs from {', '.join(apart)}"
    if worst.index is None:
        return f"{text}: {worst.message}"
    text += f"; at [{show_index(worst.index)}] {value:.9g} instead of {reference:.9g} ({other})"
    return text if worst.units is None else f"{text}, {worst.units:.3g} units of which {UNITS} are allowed"


def _agreeing(stage_rows: list[Row]) -> frozenset[tuple[str, str]]:
    """Return the (implementation, stage) that agree with the majority of at least one other."""
    return frozenset((row.implementation, row.stage) for row in stage_rows if row.verdict is Verdict.AGREE)
