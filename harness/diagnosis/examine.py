"""What an implementation that fails a case does instead, as far as this case tells.

For an implementation that fails, every other reading of its case is evaluated in float64 NumPy, and those that come
near enough are compared with their own exact answers, nearest first (``wrong_result.py``). One case names a cause where
a single reading fits it; of several, all decide together (``decision.py``). Each trial costs an evaluation of the
oracle, so there are few, and none on large problems.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import Self

from attncheck.diagnosis.case_evidence import Evidence
from attncheck.diagnosis.decision import DIAGNOSABLE, NO_FINDINGS, Findings, evidence_of
from attncheck.diagnosis.readings import undefined_row_conventions
from attncheck.diagnosis.residuals import approximate, residual
from attncheck.diagnosis.wrong_result import (
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
from attncheck.execution.worker import Computed
from attncheck.judging.alternatives import Alternative
from attncheck.judging.exact_stages import Stages
from attncheck.judging.judge import stage_rows
from attncheck.judging.judge_implementation import (
    JudgedStages,
    OwnStartingPoint,
    failed_stages,
    judge_implementation,
    with_convention,
    with_excuses,
    with_faults,
)
from attncheck.judging.judge_stages import StageJudgement, sound_stages
from attncheck.judging.truth import Truth, truth_of_reading
from attncheck.judging.undefined import scores_shape
from attncheck.judging.xfail import OwnEmptyRows
from attncheck.reading.case import Case
from attncheck.results.format import Row
from attncheck.spec import Shape
from attncheck.spec.rounding import FORMATS
from attncheck.spec.verdicts import Verdict

MAX_ELEMENTS = 1 << 15
"""Elements of a score matrix up to which readings are tried; the oracle takes a tenth of a second for so many."""
MAX_FITTED = 1 << 17
"""Elements of the judged rows of a score matrix up to which numbers are fitted, which takes a few evaluations."""
MAX_TRIALS = 8
_MARGIN = 2.0**10
"""How many times its bound a mean difference may be until a reading is not worth a trial."""


def diagnose_case(wrong: WrongResult) -> Findings:
    """Return the readings of a case under which all failing stages agree, and those that would have shown."""
    if is_only_in_empty_rows(wrong):
        of_rows = undefined_row_conventions(wrong.problem)
        found = next(
            (each for each in of_rows if does_fit(wrong, each, truth_of_reading(wrong.truth, each.problem))), None
        )
        return Findings((*([] if found is None else [found]), *_giving_rows_a_key(wrong)))
    if not wrong.stages.keys() <= wrong.truth.exact.keys():
        return NO_FINDINGS
    if _is_small(wrong):
        return _regular(wrong)
    if math.prod(scores_shape(wrong.truth.stages.computation)) > MAX_FITTED:
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
    if not _is_small(wrong):
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


def _is_small(wrong: WrongResult) -> bool:
    size = math.prod(scores_shape(wrong.truth.stages.computation))
    return wrong.truth.judged.query_rows is None and size <= MAX_ELEMENTS


def _near(wrong: WrongResult) -> tuple[list[Alternative], set[Alternative]]:
    """Return the readings that are worth a trial, nearest first, and those that are refuted by distance."""
    readings, refuted = wrong.readings, set[Alternative]()
    own = residual(readings.own, wrong.stages)
    unit, allowed = FORMATS[wrong.truth.bounds.dtype].unit_roundoff, wrong.allowed
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
    nearest = approximate(convention.problem, wrong.truth.judged.query_rows)
    return residual(nearest, wrong.stages) <= _MARGIN * wrong.allowed


@dataclass(frozen=True)
class DiagnosedStages(JudgedStages):
    """Judged stages, with what the case says of what else fails."""

    findings: Findings = NO_FINDINGS

    @property
    def diagnosis_name(self) -> str | None:
        """The names of the readings that give these numbers, joined by ``or``; None if there is no diagnosis."""
        return None if self.diagnosis is None else self.findings.name or self.diagnosis.name

    def without_diagnosis(self) -> Self:
        """Return the same stages, recognised as nothing."""
        return replace(self, diagnosis=None, findings=NO_FINDINGS)


def judge_and_diagnose(
    truth: Truth,
    stages: Stages,
    shapes: Mapping[str, Shape],
    rounding_model: str,
    own: OwnEmptyRows | None = None,
    *,
    judgements: list[StageJudgement] | None = None,
) -> DiagnosedStages:
    """Judge every stage, and say of what fails which convention or mistake it is, where that can be told.

    ``own`` is what the implementation is known to give for a query without a key. ``judgements`` of the stages may be
    known.
    """
    judged = judge_implementation(truth, stages, shapes, rounding_model, own, judgements=judgements)
    unexplained = DiagnosedStages(**vars(judged))
    if not judged.starting_points:
        return unexplained
    last = judged.starting_points[-1]
    other = last if isinstance(last, OwnStartingPoint) else None
    sound, findings = sound_stages(truth.for_returned(stages), stages, shapes), NO_FINDINGS
    for start in judged.starting_points:
        failed = {stage: sound[stage] for stage in failed_stages(start.judgements)}
        right = {each.stage: sound[each.stage] for each in start.judgements if each.verdict is Verdict.AGREE}
        wrong = WrongResult(start.truth, failed, rounding_model, right)
        findings = diagnose_case(wrong) if failed else NO_FINDINGS
        found = findings.named
        if found is not None:
            description = found.description.format(stage=next(iter(failed)))
            # Beside a mistake, what is known of rows without a key adds nothing to its size.
            sized = other if other is not None and found.option == other.convention.option else start
            named = [
                with_convention(each, found, description) if each.stage in failed else each for each in sized.judgements
            ]
            # A stage that is right in this case does not show where a reading begins.
            begins_at = found.stage if found.stage and found.stage not in right else judged.begins_at
            return DiagnosedStages(
                **vars(with_excuses(named, begins_at, found, start, own)),
                findings=findings,
            )
    return replace(unexplained, findings=findings)


@dataclass(frozen=True)
class ExaminedOutcome:
    """The diagnosed stages of one implementation, as judgements and as rows.

    Attributes:
        judged: The judgement of every stage.
        rows: The same as rows; a failing one names the diagnosis.
        evidence: The readings that the case supports and refutes; None if no stage fails, or if there are none.
    """

    judged: DiagnosedStages
    rows: tuple[Row, ...]
    evidence: Evidence | None


def examine(
    blank: Row, case: Case, truth: Truth, outcome: Computed, rounding_model: str, known: OwnEmptyRows
) -> ExaminedOutcome:
    """Judge the stages of one implementation and diagnose them."""
    judged = judge_and_diagnose(truth, outcome.stages, case.stage_shapes, rounding_model, known)
    judged = with_faults(judged, outcome.faults)
    rows = stage_rows(blank, judged, outcome, case, truth.read_as)
    failing = [row for row in rows if row.verdict in DIAGNOSABLE and not row.xfail]
    if not failing or not (judged.findings.fits or judged.findings.refuted):
        return ExaminedOutcome(judged, tuple(rows), None)
    rows = [replace(row, diagnosis=judged.diagnosis_name) if row in failing else row for row in rows]
    evidence = evidence_of(judged.findings, failing[0].stage, failing[0].operation)
    return ExaminedOutcome(judged, tuple(rows), evidence)
