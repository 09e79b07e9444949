"""Examines one failing case: finds the readings under which the returned stages are right.

``diagnose_case`` evaluates every reading of the case in float64 and computes its distance to the returned stages. Exact
arithmetic is expensive, so only the nearest readings are compared with their exact answers (``wrong_result.py``), at
most ``MAX_READINGS_TO_TRY``, and none on large problems. If no reading fits, ``diagnose_case`` fits a number, such as a
scale, or estimates an accuracy. One case has a diagnosis if a single reading fits it; in a run, all failing cases
decide together (``decision.py``).
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Self

from attncheck.diagnosis.case_evidence import Evidence
from attncheck.diagnosis.decision import DIAGNOSABLE_VERDICTS, NO_FINDINGS, Findings, collect_evidence
from attncheck.diagnosis.readings import apply_other_empty_row_conventions
from attncheck.diagnosis.residuals import approximate, relative_distance
from attncheck.diagnosis.wrong_result import (
    WrongResult,
    fitted_readings,
    is_distinguishable,
    is_match,
    is_only_in_empty_rows,
    judge_accuracy,
    judge_approximations,
    stages_from_departure,
    try_reading,
)
from attncheck.execution.worker import Computed
from attncheck.judging.alternatives import AppliedReading
from attncheck.judging.exact_stages import Stages
from attncheck.judging.judge import make_stage_rows
from attncheck.judging.judge_implementation import (
    ConventionStartingPoint,
    JudgedStages,
    excuse_convention,
    judge_implementation,
    mark_faulty_stages,
    name_reading_in_message,
    stages_with_wrong_numbers,
)
from attncheck.judging.judge_stages import StageJudgement, select_well_formed_stages
from attncheck.judging.truth import Truth, truth_of_reading
from attncheck.judging.undefined import scores_shape
from attncheck.judging.xfail import KnownEmptyRows
from attncheck.reading.case import Case
from attncheck.results.format import Row
from attncheck.spec import Shape
from attncheck.spec.rounding import FORMATS
from attncheck.spec.verdicts import Verdict

MAX_SCORES_TO_TRY = 1 << 15
"""Maximum size of a score matrix for which readings are tried; the exact answer then takes a tenth of a second."""
MAX_SCORES_TO_FIT = 1 << 17
"""Maximum size of the judged rows of a score matrix for which numbers are fitted, which takes a few evaluations."""
MAX_READINGS_TO_TRY = 8
"""Maximum number of readings that are compared with their exact answers; each takes an evaluation of the oracle."""
_MAX_BOUND_RATIO = 2.0**10
"""A reading is worth a trial if its mean difference is at most this many times the bound.

A choice: a larger ratio costs more trials; a smaller one misses readings of kernels that also round more than allowed.
"""


def diagnose_case(wrong: WrongResult, confirmed: Container[str] = ()) -> Findings:
    """Return the readings of a case under which all failing stages are right, and the refuted ones.

    In a large case, of which some rows are judged, only readings with a fitted number are tried, and before them the
    readings that other cases of the implementation have ``confirmed``.
    """
    if is_only_in_empty_rows(wrong):
        conventions = apply_other_empty_row_conventions(wrong.problem)
        first = next(
            (rule for rule in conventions if is_match(wrong, rule, truth_of_reading(wrong.truth, rule.problem))), None
        )
        return Findings((*([] if first is None else [first]), *_readings_that_fill_empty_rows(wrong)))
    if not wrong.failing_stages.keys() <= wrong.truth.exact.keys():
        return NO_FINDINGS
    if _is_small_enough_to_try(wrong):
        return _try_readings(wrong)
    if math.prod(scores_shape(wrong.truth.stages.computation)) > MAX_SCORES_TO_FIT:
        return NO_FINDINGS
    known = wrong.case_readings.apply_readings(confirmed) if confirmed else ()
    if explaining := tuple(fitting for alternative in known if (fitting := try_reading(wrong, alternative))):
        return Findings(explaining)
    matches, refuted = _fit_readings_with_numbers(wrong)
    return Findings(tuple(matches), frozenset(refuted - {alternative.name for alternative in matches}))


def _try_readings(wrong: WrongResult) -> Findings:
    """Compare the nearest readings of a small case with their exact answers."""
    candidates, refuted = _rank_readings(wrong)
    matches: list[AppliedReading] = []
    for alternative in candidates[:MAX_READINGS_TO_TRY]:
        if fitting := try_reading(wrong, alternative):
            matches.append(fitting)
        elif is_distinguishable(wrong, alternative):
            refuted.add(alternative)
    untried = frozenset(alternative.name for alternative in candidates[MAX_READINGS_TO_TRY:])
    # A name is refuted if all of its forms are, such as causality aligned separately or together with a window.
    not_refuted = {alternative.name for alternative in wrong.possible_readings if alternative not in refuted}
    names = {alternative.name for alternative in refuted} - not_refuted
    if not matches:
        matches, fitted_refuted = _fit_readings_with_numbers(wrong)
        names |= fitted_refuted
    return Findings(tuple(matches), frozenset(names - {alternative.name for alternative in matches}), untried)


def _readings_that_fill_empty_rows(wrong: WrongResult) -> list[AppliedReading]:
    """Return the readings that explain wrong rows without a key: fewer rows are empty, or empty rows give other values.

    Readings without a known distance are tried, too. A reading with another ``mask_fill`` is not tried: it makes such a
    row uniform, which is already a convention for empty rows.
    """
    if not _is_small_enough_to_try(wrong):
        return []
    readings, options = wrong.case_readings, wrong.problem.options
    candidates = [
        alternative
        for alternative in wrong.possible_readings
        if not readings.has_no_distance(alternative)
        and alternative.problem.options.get("mask_fill") == options.get("mask_fill")
        and readings.distance_from_reading(alternative, wrong.failing_stages)
        <= _MAX_BOUND_RATIO * wrong.allowed_relative_difference
        and (
            alternative.problem.options.get("empty_rows") != options.get("empty_rows")
            or readings.approximate_reading(alternative).undefined_rows.empty_rows.sum()
            < readings.case_approximation.undefined_rows.empty_rows.sum()
        )
    ]
    worth_trying = [*candidates[:MAX_READINGS_TO_TRY], *filter(readings.has_no_distance, wrong.possible_readings)]
    return [fitting for alternative in worth_trying if (fitting := try_reading(wrong, alternative))]


def _is_small_enough_to_try(wrong: WrongResult) -> bool:
    size = math.prod(scores_shape(wrong.truth.stages.computation))
    return wrong.truth.judged_problem.judged_rows is None and size <= MAX_SCORES_TO_TRY


def _rank_readings(wrong: WrongResult) -> tuple[list[AppliedReading], set[AppliedReading]]:
    """Return the readings that are worth a trial, nearest first, and the readings that their distance refutes."""
    readings, refuted = wrong.case_readings, set[AppliedReading]()
    own_distance = relative_distance(readings.case_approximation, wrong.failing_stages)
    unit, allowed = FORMATS[wrong.truth.bounds.dtype].unit_roundoff, wrong.allowed_relative_difference
    ranked, without_distance = [], []
    for order, alternative in enumerate(wrong.possible_readings):
        if readings.has_no_distance(alternative):
            without_distance.append(alternative)
            continue
        distance = readings.distance_from_reading(
            alternative, wrong.failing_stages, min(own_distance, _MAX_BOUND_RATIO * allowed)
        )
        if distance < own_distance and distance <= _MAX_BOUND_RATIO * allowed:
            ranked.append((max(distance, 64 * unit), order, alternative))  # below 64 units, rounding decides
        elif (
            readings.distance_from_exact(alternative, stages_from_departure(alternative, wrong.judged_stage_names))
            > _MAX_BOUND_RATIO * allowed
        ):
            refuted.add(alternative)
    nearest = [alternative for *_, alternative in sorted(ranked, key=lambda entry: entry[:2])]
    # A step needs no exact arithmetic, so all steps are tried, and only those that fit count as candidates.
    for alternative in without_distance:
        if alternative.step_replacement is None or try_reading(wrong, alternative):
            nearest.append(alternative)
        elif is_distinguishable(wrong, alternative):
            refuted.add(alternative)
    return nearest, refuted


def _fit_readings_with_numbers(wrong: WrongResult) -> tuple[list[AppliedReading], set[str]]:
    """Return the readings with a fitted number that fit, or else the accuracies; and the names that do not fit."""
    missed = set[str]()
    matches: dict[str, AppliedReading] = {}
    for alternative in fitted_readings(wrong):
        is_near = alternative.step_replacement is not None or (
            relative_distance(
                approximate(alternative.problem, wrong.truth.judged_problem.judged_rows), wrong.failing_stages
            )
            <= _MAX_BOUND_RATIO * wrong.allowed_relative_difference
        )
        if not is_near:
            missed.add(alternative.name)
        elif alternative.name not in matches and (fitting := try_reading(wrong, alternative)):
            matches[alternative.name] = fitting
        elif is_distinguishable(wrong, alternative):
            missed.add(alternative.name)
    if matches:
        return list(matches.values()), missed - matches.keys()
    accuracy, refuted = judge_accuracy(wrong)
    trades, refuted_trades = judge_approximations(wrong)
    return ([] if accuracy is None else [accuracy]) + trades, refuted | refuted_trades | missed


@dataclass(frozen=True)
class DiagnosedStages(JudgedStages):
    """Judged stages, with the findings of the case."""

    findings: Findings = NO_FINDINGS

    @property
    def diagnosis_name(self) -> str | None:
        """The names of the readings that give these numbers, joined by ``or``; None if there is no diagnosis."""
        return None if self.diagnosis is None else self.findings.diagnosis_name or self.diagnosis.name

    def without_diagnosis(self) -> Self:
        """Return the same stages without a diagnosis and without findings."""
        return replace(self, diagnosis=None, findings=NO_FINDINGS)


def judge_and_diagnose(
    truth: Truth,
    stages: Stages,
    shapes: Mapping[str, Shape],
    rounding_model: str,
    known_empty_rows: KnownEmptyRows | None = None,
    *,
    judgements: list[StageJudgement] | None = None,
    confirmed: Container[str] = (),
) -> DiagnosedStages:
    """Judge every stage, and diagnose the failing ones.

    ``known_empty_rows`` is the known result of the implementation for a query without a key. ``judgements`` of the
    stages are passed if they are already known. ``confirmed`` has the names of readings that other cases confirmed.
    """
    judged = judge_implementation(truth, stages, shapes, rounding_model, known_empty_rows, judgements=judgements)
    unexplained = DiagnosedStages(**vars(judged))
    if not judged.starting_points:
        return unexplained
    last = judged.starting_points[-1]
    empty_rows = last if isinstance(last, ConventionStartingPoint) else None
    sound, findings = select_well_formed_stages(truth.for_returned_dtypes(stages), stages, shapes), NO_FINDINGS
    for start in judged.starting_points:
        failed = {stage: sound[stage] for stage in stages_with_wrong_numbers(start.judgements)}
        right = {
            judgement.stage: sound[judgement.stage]
            for judgement in start.judgements
            if judgement.verdict is Verdict.AGREE
        }
        wrong = WrongResult(start.truth, failed, rounding_model, right)
        findings = diagnose_case(wrong, confirmed) if failed else NO_FINDINGS
        diagnosis = findings.diagnosis
        if diagnosis is not None:
            description = diagnosis.description.format(stage=next(iter(failed)))
            # If the diagnosis is a mistake, the known result of rows without a key does not change its size.
            sized = start
            if (
                empty_rows is not None
                and diagnosis.declarable_convention == empty_rows.convention.declarable_convention
            ):
                sized = empty_rows
            named = [
                name_reading_in_message(judgement, diagnosis, description) if judgement.stage in failed else judgement
                for judgement in sized.judgements
            ]
            # A stage that is right in this case does not show where a reading begins.
            begins_at = (
                diagnosis.first_stage
                if diagnosis.first_stage and diagnosis.first_stage not in right
                else judged.begins_at
            )
            return DiagnosedStages(
                **vars(excuse_convention(named, begins_at, diagnosis, start, known_empty_rows)),
                findings=findings,
            )
    return replace(unexplained, findings=findings)


@dataclass(frozen=True)
class ExaminedOutcome:
    """The diagnosed stages of one implementation, as judgements and as rows.

    Attributes:
        diagnosed_stages: The judgement of every stage.
        rows: The same as rows; a failing one names the diagnosis.
        evidence: The readings that the case supports and refutes; None if no stage fails, or if there are none.
    """

    diagnosed_stages: DiagnosedStages
    rows: tuple[Row, ...]
    evidence: Evidence | None


def judge_and_diagnose_outcome(
    blank: Row,
    case: Case,
    truth: Truth,
    outcome: Computed,
    rounding_model: str,
    known: KnownEmptyRows,
    *,
    confirmed: Container[str] = (),
) -> ExaminedOutcome:
    """Judge the stages of one implementation and diagnose them; ``confirmed`` readings explain other cases of it."""
    shapes = case.stage_shapes
    judged = judge_and_diagnose(truth, outcome.stages, shapes, rounding_model, known, confirmed=confirmed)
    judged = mark_faulty_stages(judged, outcome.faults)
    rows = make_stage_rows(blank, judged, outcome, case, truth.declared_conventions)
    failing = [row for row in rows if row.verdict in DIAGNOSABLE_VERDICTS and not row.xfail]
    if not failing or not (judged.findings.matches or judged.findings.refuted_names):
        return ExaminedOutcome(judged, tuple(rows), None)
    rows = [replace(row, diagnosis=judged.diagnosis_name) if row in failing else row for row in rows]
    evidence = collect_evidence(judged.findings, failing[0].stage, failing[0].operation)
    return ExaminedOutcome(judged, tuple(rows), evidence)
