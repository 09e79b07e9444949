"""One implementation's stages, judged by the exact answer of the case.

What a query without a key gives is a convention. An implementation is judged by the case's. What fails by that is
judged by what it is known to give instead: because it declares so (a mode of ``attncheck.backends``), because an
expected failure says so, or because it was never asked for the case's convention, having no keyword for it. A stage
that is right by that is ``semantic``; any other error fails as it would by the case's own convention.

What else an implementation does that fails is a question of its own (``diagnosis.examine``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeVar

from numpy.typing import NDArray

from attncheck.execution.operations import OVERWRITTEN, is_of_shape, is_of_state
from attncheck.judging.alternatives import Alternative
from attncheck.judging.empty_row_conventions import other_empty_rows
from attncheck.judging.exact_stages import Stages
from attncheck.judging.judge_stages import StageJudgement, judge_stages, where_it_begins
from attncheck.judging.truth import Truth, truth_of_reading
from attncheck.judging.xfail import OwnEmptyRows as OwnEmptyRows
from attncheck.reading.problem import Problem
from attncheck.spec import DEFAULT_EMPTY_ROWS, EMPTY_ROWS, Shape
from attncheck.spec.verdicts import WRONG_NUMBERS, Verdict

_Basis = Literal["declared", "recorded", "not asked"]
"""Why an implementation may give something else for a query without a key."""
_BECAUSE: Mapping[_Basis, str] = {
    "declared": " (declared)",
    "recorded": "",
    "not asked": ", for which it has no keyword empty_rows",
}


@dataclass(frozen=True)
class JudgedStages:
    """The stages of one implementation, where it goes wrong, and what it is recognised as.

    ``excused`` are the stages that follow a convention of its own and fail no run: it declares it, or was not asked for
    another. ``reason`` says which, ``source`` where that is documented. A diagnosis begins at the
    ``starting_points``.
    """

    judgements: tuple[StageJudgement, ...]
    begins_at: str
    diagnosis: Alternative | None = None
    excused: frozenset[str] = frozenset()
    reason: str = ""
    source: str | None = None
    starting_points: tuple[StartingPoint, ...] = ()

    def without_diagnosis(self) -> Self:
        """Return the same stages, recognised as nothing."""
        return replace(self, diagnosis=None)


def judge_implementation(
    truth: Truth,
    stages: Stages,
    shapes: Mapping[str, Shape],
    rounding_model: str,
    own: OwnEmptyRows | None = None,
    *,
    judgements: list[StageJudgement] | None = None,
) -> JudgedStages:
    """Judge every stage that an implementation returned, without a diagnosis.

    ``own`` is what the implementation is known to give for a query without a key. ``judgements`` of the stages may be
    known.
    """
    truth = truth.for_returned(stages)
    judgements = judgements or judge_stages(truth, stages, shapes, rounding_model)
    if not failed_stages(judgements):
        return JudgedStages(tuple(judgements), where_it_begins(judgements))
    starting_points = [StartingPoint(truth, judgements)]
    possible = _by_own_conventions(truth, judgements, stages, shapes, rounding_model, own or OwnEmptyRows())
    other = _nearest(starting_points[0], possible)
    if other is not None:
        starting_points = [other] if other.explained else [*starting_points, other]
    return replace(_unexplained(starting_points[-1], own), starting_points=tuple(starting_points))


AnyStages = TypeVar("AnyStages", bound=JudgedStages)


def with_faults(judged: AnyStages, faults: Mapping[str, str]) -> AnyStages:
    """Let stages be wrong whose numbers may be right: padding that is not 0, or a call that shows another's state."""
    if not faults:
        return judged
    judgements = [_spoilt(each, faults[each.stage]) if each.stage in faults else each for each in judged.judgements]
    if any(map(is_of_state, faults.values())):
        judged = judged.without_diagnosis()
    return replace(
        judged,
        judgements=tuple(judgements),
        begins_at=judged.begins_at or where_it_begins(judgements),
        excused=judged.excused - faults.keys(),
    )


def _spoilt(judgement: StageJudgement, fault: str) -> StageJudgement:
    if is_of_state(fault) and judgement.verdict in WRONG_NUMBERS:  # they are another call's, whatever else fits them
        verdict = Verdict.NONFINITE if judgement.error is None else Verdict.NUMERIC
        return replace(judgement, verdict=verdict, message=fault)
    if is_of_shape(fault):
        return replace(judgement, verdict=Verdict.SHAPE, message=fault, accumulated=None, introduced=None, index=None)
    if judgement.verdict.exit_code:
        joint = "; " if fault.startswith(OVERWRITTEN) else "; it "
        return replace(judgement, message=f"{judgement.message}{joint}{fault}")
    return replace(judgement, verdict=Verdict.NUMERIC, message=fault, accumulated=None, introduced=None, index=None)


def _unexplained(start: StartingPoint, own: OwnEmptyRows | None) -> JudgedStages:
    """What nothing explains is judged by what is known."""
    begins_at = where_it_begins([each for each in start.judgements if each.stage not in start.explained])
    if not isinstance(start, OwnStartingPoint) or not start.explained:
        return JudgedStages(tuple(start.judgements), begins_at)
    return with_excuses(start.judgements, begins_at or start.convention.stage, start.convention, start, own)


@dataclass(frozen=True, eq=False)
class StartingPoint:
    """What other readings start from: a truth, the judgements by it, and the stages that are explained already."""

    truth: Truth
    judgements: Sequence[StageJudgement]
    explained: frozenset[str] = frozenset()

    @property
    def size(self) -> float:
        """The largest error that is left, over its bound; infinite where something is no number."""
        left = [each for each in self.judgements if each.stage not in self.explained and each.verdict in WRONG_NUMBERS]
        return max((each.accumulated.ratio if each.accumulated else math.inf for each in left), default=0.0)


@dataclass(frozen=True, eq=False, kw_only=True)
class OwnStartingPoint(StartingPoint):
    """The same by a convention of the implementation's own, and why it may have one."""

    convention: Alternative
    basis: _Basis

    @property
    def description(self) -> str:
        """What it gives, what the case means instead, and why it may."""
        return self.convention.description + _BECAUSE[self.basis]


def _by_own_conventions(
    truth: Truth,
    own: Sequence[StageJudgement],
    stages: Mapping[str, NDArray[Any]],
    shapes: Mapping[str, Shape],
    rounding_model: str,
    known: OwnEmptyRows,
) -> Iterator[OwnStartingPoint]:
    """Yield the judgements by every convention that the implementation may follow, the likeliest first."""
    bases = _possible_conventions(truth.judged.problem, known)
    if not bases:
        return
    possible = {each.empty_rows: each for each in other_empty_rows(truth.judged.problem)}
    for value, basis in bases.items():
        if convention := possible.get(value):
            other = truth_of_reading(truth, convention.problem)
            under = {each.stage: each for each in judge_stages(other, stages, shapes, rounding_model)}
            yield _explaining(OwnStartingPoint(other, own, convention=convention, basis=basis), under)


def _possible_conventions(problem: Problem, known: OwnEmptyRows) -> dict[str, _Basis]:
    """Return what an implementation may give for a query without a key, and why, the likeliest first."""
    case = problem.options.get("empty_rows")
    was_asked = case is not None and known.is_asked  # who can be asked gives what it is asked for, whatever it declares
    found: dict[str, _Basis] = {} if known.declared is None or was_asked else {known.declared: "declared"}
    found |= {value: "recorded" for value in known.recorded if value not in found}
    if not known.is_asked and case not in (None, DEFAULT_EMPTY_ROWS):  # that one is asked for by saying nothing
        found |= {value: "not asked" for value in (DEFAULT_EMPTY_ROWS, *EMPTY_ROWS) if value not in found}
    return found


def _explaining(start: OwnStartingPoint, under: Mapping[str, StageJudgement]) -> OwnStartingPoint:
    """Explain what is right by a convention of the implementation's own, and judge what else fails by it too."""
    explained = frozenset(stage for stage in failed_stages(start.judgements) if under[stage].verdict is Verdict.AGREE)
    judgements = [
        with_convention(found, start.convention, start.description)
        if found.stage in explained
        else under[found.stage]
        if found.verdict in WRONG_NUMBERS
        else found
        for found in start.judgements
    ]
    return replace(start, judgements=judgements, explained=explained)


def _nearest(case: StartingPoint, starting_points: Iterator[OwnStartingPoint]) -> OwnStartingPoint | None:
    """Return what leaves the smallest errors, and of several what explains most; None where nothing beats the case."""
    better = (start for start in starting_points if start.explained or start.size < case.size)
    return min(better, key=lambda start: (start.size, -len(start.explained)), default=None)


def with_excuses(
    judgements: Sequence[StageJudgement],
    begins_at: str,
    found: Alternative,
    start: StartingPoint,
    own: OwnEmptyRows | None,
) -> JudgedStages:
    """Say which stages are excused, and why; what is recorded is for the list of expected failures to excuse."""
    judged = JudgedStages(tuple(judgements), begins_at, found)
    if not isinstance(start, OwnStartingPoint) or start.basis == "recorded":
        return judged
    declared = own if own is not None and start.basis == "declared" else OwnEmptyRows()
    return replace(judged, excused=start.explained, reason=declared.reason or start.description, source=declared.source)


def failed_stages(judgements: Sequence[StageJudgement]) -> list[str]:
    """Return the stages whose numbers are wrong."""
    return [found.stage for found in judgements if found.verdict in WRONG_NUMBERS]


def with_convention(judgement: StageJudgement, convention: Alternative, description: str) -> StageJudgement:
    """Say of a stage that fails what it is recognised as: semantic, if that is a convention."""
    if convention.verdict is Verdict.SEMANTIC:
        return replace(judgement, verdict=Verdict.SEMANTIC, message=description, empty_rows=convention.empty_rows)
    return replace(judgement, message=f"{description}; {judgement.message}")
