"""Every fault is caught, by its recorded case at its recorded stage or as one that follows from the specification.

No right variant is flagged.
"""

from __future__ import annotations

import sys
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent))
from catches import HOW_TO_ACCEPT, Catch, read_catches

from attncheck.diagnosis.case_evidence import Evidence
from attncheck.execution.worker import Computed, evaluate_on_backend
from attncheck.mutation.catalogue import CONTROLS, EQUIVALENTS, HAND_WRITTEN_FAULTS, MUTANTS, SUBJECTS_BY_NAME
from attncheck.mutation.judgement import RIGHTLY, WRONGLY, diagnoses_by_subject, first_wrong_stage, judge_diagnosis
from attncheck.mutation.kernel import MixedPrecisionKernel
from attncheck.mutation.mutant import REFERENCE_NAME, WIDE_DTYPES, BackendVariant, Subject
from attncheck.mutation.narrow import RIGHT_KERNEL
from attncheck.mutation.score import run_mutants
from attncheck.mutation.unit import SeededUnit, UnitScorer, count_case_scores
from attncheck.planning.plan import fault_catching_dtypes_by_case
from attncheck.reading.case import Case
from attncheck.reading.selection import select_cases

_MOST = 20
_WRONGLY, _RIGHTLY = 0.03, 0.25
"""Shares of the faults that their recorded case names, in a sample of the cases: 0.3 in all of them."""
_SMALL = 3000
_DIFFERS_ELSEWHERE = {"scales_multiplied_into_queries_and_output"}
"""With scales that are no round numbers (``tests/harness/mutation/test_catalogue.py``)."""
_ONE_IN = 12
"""Of the recorded cases, which are of all operations, options and sizes, right variants are put to so many."""


_NAMED_ONE_IN = 3
"""Of the recorded cases, so many are asked what a fault is, and the same ones when cases are added.

`attncheck mutants` asks of all. One case of all is often wrong: where a query sees one key, its gradients are 0, and
faults of them are as small as errors of 16 bits.
"""


def _recorded() -> tuple[dict[tuple[str, str], list[Catch]], dict[str, Case]]:
    """Return the table by unit, and its cases."""
    units: dict[tuple[str, str], list[Catch]] = defaultdict(list)
    for catch in read_catches():
        units[catch.case, catch.dtype].append(catch)
    cases = {case.id: case for case in select_cases([]).cases}
    gone = sorted({case for case, _ in units} - cases.keys())
    assert not gone, f"these cases are recorded and are not there: {', '.join(gone[:_MOST])}. {HOW_TO_ACCEPT}."
    return units, cases


def test_every_fault_is_caught_by_a_standard_case_also_where_numbers_are_wide_and_no_other_is_recorded() -> None:
    recorded = {catch.fault for catch in read_catches() if catch.dtype in WIDE_DTYPES}
    lacking = sorted({fault.name for fault in HAND_WRITTEN_FAULTS if {*fault.dtypes} & {*WIDE_DTYPES}} - recorded)
    assert not lacking, f"no case is recorded for {lacking[:_MOST]}, {len(lacking)} in all. {HOW_TO_ACCEPT}."
    units = {(case, dtype) for case, dtypes in fault_catching_dtypes_by_case().items() for dtype in dtypes}
    catches = read_catches()
    assert {(catch.case, catch.dtype) for catch in catches} == units
    assert {catch.fault for catch in catches} == {fault.name for fault in HAND_WRITTEN_FAULTS}


def test_every_fault_is_caught_by_its_recorded_case_at_its_recorded_stage() -> None:
    units, cases = _recorded()
    offenders = []
    for (case, dtype), catches in units.items():
        scorer = UnitScorer(SeededUnit(cases[case], dtype))
        right = _stages(scorer, SUBJECTS_BY_NAME[REFERENCE_NAME].backend).keys()
        for catch in catches:
            findings = scorer.judge_subject(SUBJECTS_BY_NAME[catch.fault])
            returned = {each.stage for each in findings or ()}
            if catch.stage and (lost := right - SUBJECTS_BY_NAME[catch.fault].backend.hidden_stages ^ returned):
                offenders.append(
                    f"{catch.fault} and the reference do not both return {', '.join(sorted(lost))} of {case}"
                )
            wrong = first_wrong_stage(findings or ())
            if wrong is None or wrong.stage != catch.stage:
                found = "is not caught" if wrong is None else f"is wrong at {wrong.stage or 'all of it'}"
                offenders.append(
                    f"{catch.fault} {found} by {case} in {dtype}, recorded at {catch.stage or 'all of it'}"
                )
    assert not offenders, "\n".join([*offenders[:_MOST], f"{len(offenders)} in all. {HOW_TO_ACCEPT}."])


def test_every_fault_that_follows_from_the_specification_is_caught_by_some_case() -> None:
    generated = [fault for fault in MUTANTS if fault not in HAND_WRITTEN_FAULTS]
    assert len(generated) > 600
    frames = run_mutants(select_cases([]).cases, subjects=generated)
    assert frames.survivors[["subject", "reached_by"]].to_dict("records") == []


def test_what_a_recorded_case_says_of_a_fault_is_seldom_wrong() -> None:
    """One case knows less than a run, of which ``attncheck mutants`` allows 1 % to be named wrongly."""
    units, cases = _recorded()
    found: dict[str, dict[tuple[str, str, int], Evidence]] = defaultdict(dict)
    for case, dtype in sorted(unit for unit in units if zlib.crc32(unit[0].encode()) % _NAMED_ONE_IN == 0):
        catches = units[case, dtype]
        scorer = UnitScorer(SeededUnit(cases[case], dtype))
        if scorer.unit.gives_diagnosis_evidence:
            for catch in catches:
                if (evidence := scorer.diagnosis_evidence(SUBJECTS_BY_NAME[catch.fault])) is not None:
                    found[catch.fault][case, dtype, 0] = evidence
    names = diagnoses_by_subject(found)
    how = {fault: judge_diagnosis(SUBJECTS_BY_NAME[fault], said) for fault, said in names.items()}
    wrongly = {fault: names[fault] for fault, each in how.items() if each == WRONGLY}
    assert len(wrongly) <= _WRONGLY * len(how), wrongly
    assert sum(each == RIGHTLY for each in how.values()) >= _RIGHTLY * len(how)


def test_right_variants_are_not_flagged_and_equivalent_ones_are_the_reference() -> None:
    units, cases = _recorded()
    flagged, differing = [], {REFERENCE_NAME}
    for case, dtype in sorted(units)[::_ONE_IN]:
        scorer = UnitScorer(SeededUnit(cases[case], dtype))
        for subject in (*CONTROLS, *EQUIVALENTS):
            if dtype in subject.dtypes:
                findings = scorer.judge_subject(subject) or ()
                flagged += [f"{subject.name} at {each.stage} of {case} in {dtype}" for each in findings if each.caught]
                # A softmax that takes its sinks as keys adds them up in another order, whatever else it does.
                is_compared = subject not in EQUIVALENTS or "sinks" not in scorer.inputs.arrays
                is_compared &= subject.name not in differing
                differing |= {subject.name} if is_compared and _differs(subject, scorer) else set()
    assert not flagged, "\n".join(flagged[:_MOST])
    other = sorted({each.name for each in EQUIVALENTS} & differing)
    assert not other, f"these are not the reference: {other}"
    others = [each for each in CONTROLS if each.name not in (*differing, *_DIFFERS_ELSEWHERE)]
    alike = _never_differing(others, cases.values())
    assert not alike, f"these give the reference's bits in every small case: {[each.name for each in alike]}"


def _never_differing(subjects: Iterable[Subject], cases: Iterable[Case]) -> list[Subject]:
    """Return the right variants that are the reference, bit for bit, in every small case."""
    left = list(subjects)
    for case in (case for case in cases if count_case_scores(case) <= _SMALL):
        for dtype in case.dtypes:
            if any(dtype in subject.dtypes for subject in left):
                scorer = UnitScorer(SeededUnit(case, dtype))
                left = [subject for subject in left if dtype not in subject.dtypes or not _differs(subject, scorer)]
    return left


def _differs(subject: Subject, scorer: UnitScorer) -> bool:
    """Whether a variant returns other numbers than what it is a variant of: the reference, or a plain kernel."""
    is_kernel = (
        isinstance(subject.backend, MixedPrecisionKernel)
        and scorer.unit.dtype != "float64"
        and "float64" in subject.dtypes
    )
    plain = _plain_stages(scorer, RIGHT_KERNEL if is_kernel else SUBJECTS_BY_NAME[REFERENCE_NAME].backend)
    found = {stage: array for stage, array in _stages(scorer, subject.backend).items() if stage in plain}
    return any(not np.array_equal(array, plain[stage], equal_nan=True) for stage, array in found.items())


@lru_cache(maxsize=4)
def _plain_stages(scorer: UnitScorer, backend: BackendVariant) -> Mapping[str, NDArray[Any]]:
    """Return the same of what many variants of a unit are compared with, one after the other."""
    return _stages(scorer, backend)


def _stages(scorer: UnitScorer, backend: BackendVariant) -> Mapping[str, NDArray[Any]]:
    """Return the stages that an implementation returns; none where it raises."""
    with np.errstate(all="ignore"):
        outcome = evaluate_on_backend(backend, scorer.call)
    return outcome.stages if isinstance(outcome, Computed) else {}
