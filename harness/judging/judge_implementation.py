"""One implementation's stages, judged by the exact answer of the case.

The result of a query without a key is a convention. An implementation is judged by the convention of the case. If a
stage fails, it is judged by another convention that the implementation may follow: because it declares it (a mode of
``attncheck.backends``), because an expected failure records it, or because the function has no keyword by which to
request the case's convention. A stage that is right by that is ``semantic``; any other error fails as it would by the
convention of the case.

``diagnosis.examine`` finds other causes of failures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeVar

from numpy.typing import NDArray

from attncheck.execution.operations import OVERWRITTEN_FAULT, is_shape_fault, is_state_fault
from attncheck.judging.alternatives import AppliedReading
from attncheck.judging.empty_row_conventions import other_empty_rows
from attncheck.judging.exact_stages import Stages
from attncheck.judging.judge_stages import StageJudgement, first_faulty_stage, judge_stages
from attncheck.judging.truth import Truth, truth_of_reading
from attncheck.judging.xfail import KnownEmptyRows as KnownEmptyRows
from attncheck.reading.problem import Problem
from attncheck.spec import DEFAULT_EMPTY_ROWS, EMPTY_ROWS, Shape
from attncheck.spec.verdicts import WRONG_NUMBER_VERDICTS, Verdict

_ConventionBasis = Literal["declared", "recorded", "not asked"]
"""Why an implementation may follow another convention for a query without a key."""
_BASIS_TEXTS: Mapping[_ConventionBasis, str] = {
    "declared": " (declared)",
    "recorded": "",
    "not asked": ", for which it has no keyword empty_rows",
}


@dataclass(frozen=True)
class JudgedStages:
    """The stages of one implementation, the stage at which it goes wrong, and its diagnosis.

    ``excused_stages`` follow a convention that the implementation declares, or that no keyword could change;
    they fail no run. ``excuse_reason`` names the convention, ``excuse_source`` documents it. A diagnosis begins at the
    ``starting_points``.
    """

    judgements: tuple[StageJudgement, ...]
    begins_at: str
    diagnosis: AppliedReading | None = None
    excused_stages: frozenset[str] = frozenset()
    excuse_reason: str = ""
    excuse_source: str | None = None
    starting_points: tuple[StartingPoint, ...] = ()

    def without_diagnosis(self) -> Self:
        """Return the same stages without a diagnosis."""
        return replace(self, diagnosis=None)


def judge_implementation(
    truth: Truth,
    stages: Stages,
    shapes: Mapping[str, Shape],
    rounding_model: str,
    known: KnownEmptyRows | None = None,
    *,
    judgements: list[StageJudgement] | None = None,
) -> JudgedStages:
    """Judge every stage that an implementation returned, without a diagnosis.

    ``known`` are the implementation's known results of a query without a key. ``judgements`` of the stages are passed
    if they are known already.
    """
    truth = truth.for_returned_dtypes(stages)
    judgements = judgements or judge_stages(truth, stages, shapes, rounding_model)
    if not stages_with_wrong_numbers(judgements):
        return JudgedStages(tuple(judgements), first_faulty_stage(judgements))
    case = StartingPoint(truth, judgements)
    starting_points = [case]
    possible = _starting_points_by_convention(
        truth, judgements, stages, shapes, rounding_model, known or KnownEmptyRows()
    )
    # Smallest errors first, then most explained stages; no other point if none is better than the case itself.
    better = [start for start in possible if start.explained_stages or start.unexplained_ratio < case.unexplained_ratio]
    nearest = min(better, key=lambda start: (start.unexplained_ratio, -len(start.explained_stages)), default=None)
    if nearest is not None:
        starting_points = [nearest] if nearest.explained_stages else [*starting_points, nearest]
    start = starting_points[-1]
    begins_at = first_faulty_stage(
        [judgement for judgement in start.judgements if judgement.stage not in start.explained_stages]
    )
    judged = JudgedStages(tuple(start.judgements), begins_at)
    if isinstance(start, ConventionStartingPoint) and start.explained_stages:
        judged = excuse_convention(
            start.judgements, begins_at or start.convention.first_stage, start.convention, start, known
        )
    return replace(judged, starting_points=tuple(starting_points))


AnyStages = TypeVar("AnyStages", bound=JudgedStages)


def mark_faulty_stages(judged: AnyStages, faults: Mapping[str, str]) -> AnyStages:
    """Mark stages with a fault as wrong, even if their numbers are right: padding that is not 0, or state of calls."""
    if not faults:
        return judged
    judgements = [
        _mark_fault(judgement, faults[judgement.stage]) if judgement.stage in faults else judgement
        for judgement in judged.judgements
    ]
    if any(map(is_state_fault, faults.values())):
        judged = judged.without_diagnosis()
    return replace(
        judged,
        judgements=tuple(judgements),
        begins_at=judged.begins_at or first_faulty_stage(judgements),
        excused_stages=judged.excused_stages - faults.keys(),
    )


def _mark_fault(judgement: StageJudgement, fault: str) -> StageJudgement:
    if (
        is_state_fault(fault) and judgement.verdict in WRONG_NUMBER_VERDICTS
    ):  # numbers of another call, even if a diagnosis fits
        verdict = Verdict.NONFINITE if judgement.error is None else Verdict.NUMERIC
        return replace(judgement, verdict=verdict, message=fault)
    if is_shape_fault(fault):
        return replace(judgement, verdict=Verdict.SHAPE, message=fault, accumulated=None, introduced=None, index=None)
    if judgement.verdict.exit_code:
        joint = "; " if is_state_fault(fault) or fault.startswith(OVERWRITTEN_FAULT) else "; it "
        return replace(judgement, message=f"{judgement.message}{joint}{fault}")
    return replace(judgement, verdict=Verdict.NUMERIC, message=fault, accumulated=None, introduced=None, index=None)


@dataclass(frozen=True, eq=False)
class StartingPoint:
    """The start of a diagnosis: a truth, the judgements by it, and the stages that are explained already."""

    truth: Truth
    judgements: Sequence[StageJudgement]
    explained_stages: frozenset[str] = frozenset()

    @property
    def unexplained_ratio(self) -> float:
        """The largest unexplained error over its bound; infinite if a value is not a finite number."""
        wrong = [judged for judged in self.judgements if judged.verdict in WRONG_NUMBER_VERDICTS]
        errors = [judged.accumulated for judged in wrong if judged.stage not in self.explained_stages]
        return max((measured.ratio if measured else math.inf for measured in errors), default=0.0)


@dataclass(frozen=True, eq=False, kw_only=True)
class ConventionStartingPoint(StartingPoint):
    """Judgement under another convention that the implementation may follow, and why it may follow it."""

    convention: AppliedReading
    basis: _ConventionBasis

    @property
    def description(self) -> str:
        """The convention in words, the convention of the case, and why the implementation may follow another."""
        return self.convention.description + _BASIS_TEXTS[self.basis]


def _starting_points_by_convention(
    truth: Truth,
    judgements: Sequence[StageJudgement],
    stages: Mapping[str, NDArray[Any]],
    shapes: Mapping[str, Shape],
    rounding_model: str,
    known: KnownEmptyRows,
) -> Iterator[ConventionStartingPoint]:
    """Yield the judgements by every convention that the implementation may follow, the likeliest first.

    Stages that are right by the convention are explained. The others that fail are judged by it too.
    """
    bases = _possible_conventions(truth.judged_problem.problem_without_layout, known)
    if not bases:
        return
    possible = {
        convention.empty_rows: convention
        for convention in other_empty_rows(truth.judged_problem.problem_without_layout)
    }
    for value, basis in bases.items():
        if convention := possible.get(value):
            other_truth = truth_of_reading(truth, convention.problem)
            under = {judged.stage: judged for judged in judge_stages(other_truth, stages, shapes, rounding_model)}
            explained = frozenset(
                stage for stage in stages_with_wrong_numbers(judgements) if under[stage].verdict is Verdict.AGREE
            )
            start = ConventionStartingPoint(other_truth, judgements, explained, convention=convention, basis=basis)
            both = [
                name_reading_in_message(judged, convention, start.description)
                if judged.stage in explained
                else under[judged.stage]
                if judged.verdict in WRONG_NUMBER_VERDICTS
                else judged
                for judged in judgements
            ]
            yield replace(start, judgements=both)


def _possible_conventions(problem: Problem, known: KnownEmptyRows) -> dict[str, _ConventionBasis]:
    """Return the conventions that an implementation may follow for a query without a key, and why, likeliest first."""
    case = problem.options.get("empty_rows")
    was_asked = (
        case is not None and known.accepts_convention_option
    )  # a function with the keyword has to obey it, whatever it declares
    bases: dict[str, _ConventionBasis] = (
        {} if known.declared_convention is None or was_asked else {known.declared_convention: "declared"}
    )
    bases |= {value: "recorded" for value in known.recorded_conventions if value not in bases}
    if not known.accepts_convention_option and case not in (None, DEFAULT_EMPTY_ROWS):  # the default needs no keyword
        bases |= {value: "not asked" for value in (DEFAULT_EMPTY_ROWS, *EMPTY_ROWS) if value not in bases}
    return bases


def excuse_convention(
    judgements: Sequence[StageJudgement],
    begins_at: str,
    convention: AppliedReading,
    start: StartingPoint,
    known: KnownEmptyRows | None,
) -> JudgedStages:
    """Return stages with excuses; recorded conventions are excused later, by the list of expected failures."""
    judged = JudgedStages(tuple(judgements), begins_at, convention)
    if not isinstance(start, ConventionStartingPoint) or start.basis == "recorded":
        return judged
    declared = known if known is not None and start.basis == "declared" else KnownEmptyRows()
    return replace(
        judged,
        excused_stages=start.explained_stages,
        excuse_reason=declared.reason or start.description,
        excuse_source=declared.source,
    )


def stages_with_wrong_numbers(judgements: Sequence[StageJudgement]) -> list[str]:
    """Return the stages whose numbers are wrong."""
    return [judgement.stage for judgement in judgements if judgement.verdict in WRONG_NUMBER_VERDICTS]


def name_reading_in_message(judgement: StageJudgement, convention: AppliedReading, description: str) -> StageJudgement:
    """Name the reading in the message of a stage that fails; its verdict is semantic if the reading is a convention."""
    if convention.verdict is Verdict.SEMANTIC:
        return replace(judgement, verdict=Verdict.SEMANTIC, message=description, empty_rows=convention.empty_rows)
    return replace(judgement, message=f"{description}; {judgement.message}")
