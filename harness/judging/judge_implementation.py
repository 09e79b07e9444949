"""One implementation's stages, judged, and what fails said to be another convention or a known mistake where it is one.

What a query without a key gives is a convention. An implementation is judged by the case's. What fails by that is
judged by what it is known to give instead: because it declares so (a mode of ``attncheck.backends``), because an
expected failure says so, or because it was never asked for the case's convention, having no keyword for it. A stage
that is right by that is ``semantic``; any other error fails as it would by the case's own convention.

For an implementation that fails, every other reading of its case is evaluated in float64 NumPy, and those that come
near enough are compared with their own exact answers, nearest first (``wrong_result.py``). One case names a cause where
a single reading fits it; of several, all decide together (``diagnosis.py``). Each trial costs an evaluation of the
oracle, so there are few, and none on large problems.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from attncheck.execution.operations import OVERWRITTEN, is_of_shape, is_of_state
from attncheck.judging.alternatives import Alternative
from attncheck.judging.diagnosis import NO_FINDINGS, Findings
from attncheck.judging.judge_stages import StageJudgement, judge_stages, sound_stages, where_it_begins
from attncheck.judging.readings import undefined_row_conventions
from attncheck.judging.residuals import approximate, residual, truth_of
from attncheck.judging.truth import Stages, Truth
from attncheck.judging.undefined_rows import scores_shape
from attncheck.judging.wrong_result import (
    WrongResult,
    does_fit,
    fitted_numbers,
    is_only_in_empty_rows,
    judge_accuracy,
    judge_trades,
    stages_behind,
    try_reading,
    would_show,
)
from attncheck.judging.xfail import OwnEmptyRows as OwnEmptyRows
from attncheck.spec import DEFAULT_EMPTY_ROWS, EMPTY_ROWS, Shape
from attncheck.spec.rounding import FORMATS
from attncheck.verdicts import WRONG_NUMBERS, Verdict

MAX_ELEMENTS = 1 << 15
"""Elements of a score matrix up to which readings are tried; the oracle takes a tenth of a second for so many."""
MAX_FITTED = 1 << 17
"""Elements of the judged rows of a score matrix up to which numbers are fitted, which takes a few evaluations."""
MAX_TRIALS = 8
_MARGIN = 2.0**10
"""How many times its bound a mean difference may be until a reading is not worth a trial."""


def diagnose_case(truth: Truth, failed: Stages, rounding_model: str, right: Stages | None = None) -> Findings:
    """Return the readings of a case under which all failing stages agree, and those that would have shown.

    ``failed`` are the judged rows of the stages that fail, ``right`` of those that do not.
    """
    if truth.problem is None:
        return NO_FINDINGS
    wrong = WrongResult(truth, truth.problem, failed, rounding_model, right or {})
    if is_only_in_empty_rows(wrong):
        of_rows = undefined_row_conventions(wrong.problem)
        found = next((each for each in of_rows if does_fit(wrong, each, truth_of(truth, each))), None)
        return Findings((*([] if found is None else [found]), *_giving_rows_a_key(wrong)))
    if not failed.keys() <= truth.exact.keys():
        return NO_FINDINGS
    if _is_small(truth):
        return _regular(wrong)
    if math.prod(scores_shape(truth.computation)) > MAX_FITTED:
        return NO_FINDINGS
    fits, refuted = _fitted(wrong)
    return Findings(tuple(fits), frozenset(refuted - {each.name for each in fits}))


def _regular(wrong: WrongResult) -> Findings:
    near, refuted = _near(wrong)
    fits: list[Alternative] = []
    for convention in near[:MAX_TRIALS]:
        if found := try_reading(wrong, convention):
            fits.append(found)
        elif would_show(wrong, convention):
            refuted.add(convention)
    open_ = frozenset(each.name for each in near[MAX_TRIALS:])
    names = _refuted_in_every_form(wrong, refuted)
    if not fits:
        fits, fitted_refuted = _fitted(wrong)
        names |= fitted_refuted
    return Findings(tuple(fits), frozenset(names - {each.name for each in fits}), open_)


def _refuted_in_every_form(wrong: WrongResult, refuted: Set[Alternative]) -> set[str]:
    """Return the names that are refuted: some have several forms, as causality aligned alone or with a window."""
    return {each.name for each in refuted} - {each.name for each in wrong.possible if each not in refuted}


def _giving_rows_a_key(wrong: WrongResult) -> list[Alternative]:
    """Return what else may be behind rows without a key that are wrong: what lets them attend, and changes no other.

    A reading whose distance is not known is tried, too: what may be the cause of such a row is not left out for that. A
    number in the place of minus infinity makes such a row uniform, which the convention says.
    """
    if not _is_small(wrong.truth):
        return []
    near = [
        each
        for each in wrong.possible
        if not wrong.readings.is_open(each)
        and each.problem.options.get("mask_fill") == wrong.problem.options.get("mask_fill")
        and wrong.readings.residual(each, wrong.stages) <= _MARGIN * wrong.allowed
        and _gives_rows_a_key(wrong, each)
    ]
    worth_trying = [*near[:MAX_TRIALS], *filter(wrong.readings.is_open, wrong.possible)]
    return [found for each in worth_trying if (found := try_reading(wrong, each))]


def _gives_rows_a_key(wrong: WrongResult, reading: Alternative) -> bool:
    """Whether fewer rows have no key under a reading, or those that have none give something else."""
    if reading.problem.options.get("empty_rows") != wrong.problem.options.get("empty_rows"):
        return True
    return bool(
        wrong.readings.approximation(reading).undefined_rows.empty.sum() < wrong.readings.own.undefined_rows.empty.sum()
    )


def _is_small(truth: Truth) -> bool:
    size = int(np.prod(scores_shape(truth.computation), dtype=np.int64))
    return truth.query_rows is None and size <= MAX_ELEMENTS


def _near(wrong: WrongResult) -> tuple[list[Alternative], set[Alternative]]:
    """Return the readings that are worth a trial, nearest first, and those that are refuted by distance."""
    readings, refuted = wrong.readings, set[Alternative]()
    own = residual(readings.own, wrong.stages)
    unit, allowed = FORMATS[wrong.truth.dtype].unit_roundoff, wrong.allowed
    ranked, open_ = [], []
    for order, convention in enumerate(wrong.possible):
        if readings.is_open(convention):
            open_.append(convention)
            continue
        far = readings.residual(convention, wrong.stages, min(own, _MARGIN * allowed))
        if far < own and far <= _MARGIN * allowed:
            ranked.append((max(far, 64 * unit), order, convention))  # nearer than that, rounding decides
        elif readings.separation(convention, stages_behind(convention, wrong.judged)) > _MARGIN * allowed:
            refuted.add(convention)
    return [
        *(each for *_, each in sorted(ranked, key=lambda entry: entry[:2])),
        *_steps(wrong, open_, refuted),
    ], refuted


def _steps(wrong: WrongResult, steps: list[Alternative], refuted: set[Alternative]) -> list[Alternative]:
    """Return the steps that fit: no trial of theirs needs the oracle, so that none is left out for its number."""
    left = []
    for convention in steps:
        if convention.replacement is None or try_reading(wrong, convention):
            left.append(convention)
        elif would_show(wrong, convention):
            refuted.add(convention)
    return left


def _fitted(wrong: WrongResult) -> tuple[list[Alternative], set[str]]:
    """Return what fits with a number that is found for it, else the accuracy that it has; and what does not."""
    missed = set[str]()
    fits: dict[str, Alternative] = {}
    for convention in fitted_numbers(wrong):
        if convention.replacement is None and not _is_near(wrong, convention):
            missed.add(convention.name)
        elif convention.name not in fits and (found := try_reading(wrong, convention)):
            fits[convention.name] = found
        elif would_show(wrong, convention):
            missed.add(convention.name)
    if fits:
        return list(fits.values()), missed - fits.keys()
    accuracy, refuted = judge_accuracy(wrong)
    trades, others = judge_trades(wrong)
    return ([] if accuracy is None else [accuracy]) + trades, refuted | others | missed


def _is_near(wrong: WrongResult, convention: Alternative) -> bool:
    nearest = approximate(convention.problem, wrong.truth.query_rows)
    return residual(nearest, wrong.stages) <= _MARGIN * wrong.allowed


DIAGNOSABLE = (*WRONG_NUMBERS, Verdict.SEMANTIC)
"""The same, recognised or not."""

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
    another. ``reason`` says which, ``source`` where that is documented. ``findings`` are what the case says of what
    else fails, ``plain`` the judgements, and where they begin, as they are where nothing is recognised.
    """

    judgements: tuple[StageJudgement, ...]
    begins_at: str
    diagnosis: Alternative | None = None
    excused: frozenset[str] = frozenset()
    reason: str = ""
    source: str | None = None
    findings: Findings = NO_FINDINGS
    plain: tuple[StageJudgement, ...] = ()
    plain_begins_at: str = ""


def judge_and_diagnose(
    truth: Truth,
    stages: Stages,
    shapes: Mapping[str, Shape],
    rounding_model: str,
    own: OwnEmptyRows | None = None,
    *,
    diagnoses: bool = True,
    judgements: list[StageJudgement] | None = None,
) -> JudgedStages:
    """Judge every stage, and say of what fails which convention or mistake it is, where that can be told.

    ``own`` is what the implementation is known to give for a query without a key. Unless it ``diagnoses``, what it
    does instead is left open: that takes several exact answers. ``judgements`` of the stages may be known.
    """
    truth = truth.for_returned(stages)
    judgements = judgements or judge_stages(truth, stages, shapes, rounding_model)
    if not _failed(judgements) or truth.problem is None:
        return JudgedStages(tuple(judgements), where_it_begins(judgements))
    bases = [_Base(truth, judgements)]
    possible = _by_own_conventions(truth, judgements, stages, shapes, rounding_model, own or OwnEmptyRows())
    other = _nearest(bases[0], possible)
    if other is not None:
        bases = [other] if other.explained else [*bases, other]
    sound, findings = sound_stages(truth, stages, shapes), NO_FINDINGS
    unexplained = _unexplained(bases[-1], own)
    for base in bases if diagnoses else ():
        failed = {stage: sound[stage] for stage in _failed(base.judgements)}
        right = {each.stage: sound[each.stage] for each in base.judgements if each.verdict is Verdict.AGREE}
        findings = diagnose_case(base.truth, failed, rounding_model, right) if failed else NO_FINDINGS
        found = findings.named
        if found is not None:
            description = found.description.format(stage=next(iter(failed)))
            # Beside a mistake, what is known of rows without a key adds nothing to its size.
            sized = other if other is not None and found.option == other.convention.option else base
            judgements = [
                _with_convention(each, found, description) if each.stage in failed else each
                for each in sized.judgements
            ]
            plain, begins_at = unexplained.judgements, unexplained.begins_at
            # A stage that is right in this case does not show where a reading begins.
            is_shown = found.stage and found.stage not in right
            judged = _judged(judgements, found.stage if is_shown else begins_at, found, base, own)
            return replace(judged, findings=findings, plain=plain, plain_begins_at=begins_at)
    return replace(unexplained, findings=findings)


def with_faults(judged: JudgedStages, faults: Mapping[str, str]) -> JudgedStages:
    """Let stages be wrong whose numbers may be right: padding that is not 0, or a call that shows another's state."""
    if not faults:
        return judged
    judgements = [_spoilt(each, faults[each.stage]) if each.stage in faults else each for each in judged.judgements]
    if any(map(is_of_state, faults.values())):
        judged = replace(judged, diagnosis=None, findings=NO_FINDINGS)
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


def _unexplained(base: _Base, own: OwnEmptyRows | None) -> JudgedStages:
    """What nothing explains is judged by what is known."""
    begins_at = where_it_begins([each for each in base.judgements if each.stage not in base.explained])
    if not isinstance(base, _OwnBase) or not base.explained:
        return JudgedStages(tuple(base.judgements), begins_at)
    return _judged(base.judgements, begins_at or base.convention.stage, base.convention, base, own)


@dataclass(frozen=True, eq=False)
class _Base:
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
class _OwnBase(_Base):
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
) -> Iterator[_OwnBase]:
    """Yield the judgements by every convention that the implementation may follow, the likeliest first."""
    bases = _bases_of(truth, known)
    if not bases or truth.problem is None:
        return
    possible = {each.empty_rows: each for each in undefined_row_conventions(truth.problem)}
    for value, basis in bases.items():
        if convention := possible.get(value):
            other = truth_of(truth, convention)
            under = {each.stage: each for each in judge_stages(other, stages, shapes, rounding_model)}
            yield _explaining(_OwnBase(other, own, convention=convention, basis=basis), under)


def _bases_of(truth: Truth, known: OwnEmptyRows) -> dict[str, _Basis]:
    """Return what an implementation may give for a query without a key, and why, the likeliest first."""
    case = truth.problem.options.get("empty_rows") if truth.problem else None
    was_asked = case is not None and known.is_asked  # who can be asked gives what it is asked for, whatever it declares
    found: dict[str, _Basis] = {} if known.declared is None or was_asked else {known.declared: "declared"}
    found |= {value: "recorded" for value in known.recorded if value not in found}
    if not known.is_asked and case not in (None, DEFAULT_EMPTY_ROWS):  # that one is asked for by saying nothing
        found |= {value: "not asked" for value in (DEFAULT_EMPTY_ROWS, *EMPTY_ROWS) if value not in found}
    return found


def _explaining(base: _OwnBase, under: Mapping[str, StageJudgement]) -> _OwnBase:
    """Explain what is right by a convention of the implementation's own, and judge what else fails by it too."""
    explained = frozenset(stage for stage in _failed(base.judgements) if under[stage].verdict is Verdict.AGREE)
    judgements = [
        _with_convention(found, base.convention, base.description)
        if found.stage in explained
        else under[found.stage]
        if found.verdict in WRONG_NUMBERS
        else found
        for found in base.judgements
    ]
    return replace(base, judgements=judgements, explained=explained)


def _nearest(case: _Base, bases: Iterator[_OwnBase]) -> _OwnBase | None:
    """Return what leaves the smallest errors, and of several what explains most; None where nothing beats the case."""
    better = (base for base in bases if base.explained or base.size < case.size)
    return min(better, key=lambda base: (base.size, -len(base.explained)), default=None)


def _judged(
    judgements: Sequence[StageJudgement], begins_at: str, found: Alternative, base: _Base, own: OwnEmptyRows | None
) -> JudgedStages:
    """Say which stages are excused, and why; what is recorded is for the list of expected failures to excuse."""
    judged = JudgedStages(tuple(judgements), begins_at, found)
    if not isinstance(base, _OwnBase) or base.basis == "recorded":
        return judged
    declared = own if own is not None and base.basis == "declared" else OwnEmptyRows()
    return replace(judged, excused=base.explained, reason=declared.reason or base.description, source=declared.source)


def _failed(judgements: Sequence[StageJudgement]) -> list[str]:
    return [found.stage for found in judgements if found.verdict in WRONG_NUMBERS]


def _with_convention(judgement: StageJudgement, convention: Alternative, description: str) -> StageJudgement:
    if convention.verdict is Verdict.SEMANTIC:
        return replace(judgement, verdict=Verdict.SEMANTIC, message=description, empty_rows=convention.empty_rows)
    return replace(judgement, message=f"{description}; {judgement.message}")
