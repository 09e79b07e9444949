"""What the soundness campaign writes down: a row for every stage of every evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from soundness_problems import DrawnProblem

from attncheck.common.wording import format_index
from attncheck.diagnosis.examine import judge_and_diagnose
from attncheck.execution.implementations import Implementation
from attncheck.execution.worker import Failure, Outcome
from attncheck.judging.compare import MeasuredErrors
from attncheck.judging.judge_stages import StageJudgement
from attncheck.judging.truth import Truth, find_truth
from attncheck.judging.units import find_known_empty_rows
from attncheck.judging.xfail import find_excusing_failure
from attncheck.reading.expected_failures import ExpectedFailure
from attncheck.reading.problem import Problem
from attncheck.searching.concrete import operation_and_score
from attncheck.spec.verdicts import Verdict


@dataclass(frozen=True)
class Unit:
    """One problem in one dtype: what is judged at once."""

    number: int
    dtype: str


@dataclass(frozen=True)
class Row:
    """One stage of one evaluation, measured against the exact answer, and against the exact step (``step_``).

    An evaluation that failed has one row without a stage. ``tier`` is empty where there is no such comparison.
    ``xfail`` marks a failure that is expected, for a ``reason``. ``causes`` as in ``Measured``, ``empty_rows`` as
    in ``StageJudgement``. ``width`` is that of a head, and ``largest_score`` the largest exact score without its sign;
    0 where a problem has none.
    """

    number: int
    dtype: str
    implementation: str
    rounding_model: str
    operation: str
    regime: str
    asked: str
    supports_statistics: bool
    scores: str
    stage: str
    verdict: str
    message: str = ""
    xfail: bool = False
    reason: str = ""
    tier: str = ""
    ratio: float = 0.0
    z: float = 0.0
    rms: float = 0.0
    elements: int = 0
    causes: int = 0
    empty_rows: str | None = None
    step_tier: str = ""
    step_ratio: float = 0.0
    step_z: float = 0.0
    step_rms: float = 0.0
    step_elements: int = 0
    step_causes: int = 0
    index: str = ""
    value: float | None = None
    exact: float | None = None
    error: float | None = None
    bound: float | None = None
    width: int = 0
    largest_score: float = 0.0


@dataclass(frozen=True)
class Judge:
    """Judges all implementations on one problem after the other; ``expected_failures`` are no alarms."""

    implementations: Mapping[str, Implementation]
    expected_failures: Sequence[ExpectedFailure]

    def rows_of(self, unit: Unit, drawn: DrawnProblem, outcomes: Mapping[str, Outcome]) -> list[Row]:
        """Judge every implementation's stages in one unit; the truth is worked out once."""
        stored = Problem(drawn.operation, drawn.options, drawn.stored(unit.dtype), unit.dtype)
        truth = find_truth(replace(stored, supports_statistics=drawn.supports_statistics))
        found = [
            row
            for name, outcome in sorted(outcomes.items())
            for row in _rows(unit, drawn, truth, self.implementations[name], outcome, self.expected_failures)
        ]
        return [self._marked(row, drawn.id) for row in found]

    def _marked(self, row: Row, problem: str) -> Row:
        """Mark a failing row that an expected failure explains."""
        if row.xfail or not Verdict(row.verdict).exit_code:
            return row
        place = (row.implementation, problem, row.dtype, row.stage, row.verdict)
        ratio = max(row.ratio, row.step_ratio) if row.tier or row.step_tier else math.inf
        found = find_excusing_failure(self.expected_failures, *place, ratio=ratio, empty_rows=row.empty_rows)
        return row if found is None else replace(row, xfail=True, reason=found.entry.reason)


def _rows(
    unit: Unit,
    drawn: DrawnProblem,
    truth: Truth,
    implementation: Implementation,
    outcome: Outcome,
    expected_failures: Sequence[ExpectedFailure],
) -> list[Row]:
    rounding_model = implementation.rounding_model(unit.dtype)
    assert rounding_model is not None, "an implementation is asked for the dtypes that it declares"
    common: dict[str, Any] = {
        "number": unit.number,
        "dtype": unit.dtype,
        "implementation": implementation.name,
        "rounding_model": rounding_model,
        "operation": operation_and_score(drawn),
        "regime": drawn.drawing_regime,
        "asked": drawn.asked,
        "supports_statistics": drawn.supports_statistics,
        "scores": "x".join(map(str, drawn.scores)),
        "width": _head_width(drawn),
        "largest_score": _largest_score(truth, drawn),
    }
    if isinstance(outcome, Failure):
        return [Row(**common, stage="", verdict=outcome.verdict, message=outcome.message)]
    own = find_known_empty_rows(implementation, expected_failures, drawn.id, unit.dtype)
    own = replace(own, accepts_convention_option=not outcome.ignored_conventions)
    judged = judge_and_diagnose(truth, outcome.stages, drawn.stage_shapes, rounding_model, own)
    rows = [Row(**common, **_stage_fields(judgement)) for judgement in judged.judgements]
    return [
        replace(row, xfail=True, reason=judged.excuse_reason) if row.stage in judged.excused_stages else row
        for row in rows
    ]


def _head_width(drawn: DrawnProblem) -> int:
    found = drawn.stage_shapes.get("query") or (drawn.inputs["query"].shape if "query" in drawn.inputs else ())
    return int(found[-1]) if found else 0


def _largest_score(truth: Truth, drawn: DrawnProblem) -> float:
    """Return the size of the largest finite score, where scores are a stage or an input."""
    exact = truth.exact.get("scores")
    scores = drawn.inputs.get("scores", 0.0) if exact is None else exact.high
    sizes = np.abs(np.asarray(scores, dtype=np.float64))
    return float(sizes[np.isfinite(sizes)].max(initial=0.0))


def _stage_fields(judgement: StageJudgement) -> dict[str, Any]:
    return {
        "stage": judgement.stage,
        "verdict": str(judgement.verdict),
        "message": judgement.message,
        "empty_rows": judgement.empty_rows,
        **_measured_fields("", judgement.accumulated),
        **_measured_fields("step_", judgement.introduced),
        "index": "" if judgement.index is None else format_index(judgement.index),
        "value": judgement.value,
        "exact": judgement.exact,
        "error": judgement.error,
        "bound": judgement.bound,
    }


def _measured_fields(prefix: str, measured: MeasuredErrors | None) -> dict[str, Any]:
    if measured is None:
        return {}
    found = {
        "tier": str(measured.tier),
        "ratio": measured.ratio,
        "z": measured.largest_z,
        "rms": measured.mean_z,
        "elements": measured.elements,
        "causes": measured.causes,
    }
    return {f"{prefix}{name}": value for name, value in found.items()}
