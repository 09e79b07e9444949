"""One case in one dtype, judged: every implementation against the exact answer, against each other, against numbers.

Two implementations disagree if they differ by more than the sum of their bounds. If some query rows stand for all,
shape, dtype and the places of NaN and infinity are still compared everywhere, values only in those rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.sampling import (
    RowIndices,
    count_queries,
    index_in_whole_stage,
    is_long_enough_for_rows,
    scatter_rows,
    select_stage_rows,
)
from attncheck.common.store import NO_STORE, Store
from attncheck.common.wording import READ_AS_PREFIX, format_distinct, format_element, format_index
from attncheck.execution.operations import OVERWRITTEN_FAULT, SECOND_CALL_FAULT, UNWRITTEN_FAULT
from attncheck.execution.worker import Computed, Failure, Outcome
from attncheck.judging.compare import Comparison, Index, MeasuredErrors, compare_arrays, compare_shapes_and_nonfinite
from attncheck.judging.exact_stages import Stages
from attncheck.judging.judge_implementation import (
    JudgedStages,
    KnownEmptyRows,
    judge_implementation,
    mark_faulty_stages,
)
from attncheck.judging.judge_numbers import judge_numbers
from attncheck.judging.judge_stages import StageJudgement, sort_stages
from attncheck.judging.truth import Truth, truth_of_case
from attncheck.judging.undefined import JudgedProblem, has_nonfinite_inputs
from attncheck.judging.xfail import ExpectedFailureRecord, make_blank_row, make_failure_row
from attncheck.reading.case import Case
from attncheck.reading.expected_failures import ExpectedFailure
from attncheck.reading.inputs import RoundedInputs
from attncheck.reading.shapes import format_shape
from attncheck.results.format import Row, has_failure
from attncheck.spec import wide_dtype
from attncheck.spec.verdicts import HARMLESS_VERDICTS, Verdict

Bounds = Mapping[str, NDArray[Any]]
"""Stage -> the largest error that an implementation's class allows, per element."""

MAX_STORED_ELEMENTS = 1 << 22
"""Elements of the largest array that a results directory keeps: 32 MiB of float64. Score matrices of long sequences are
larger, and no report draws them."""


@dataclass(frozen=True)
class CaseJudgement:
    """All rows of one case in one dtype, and the truth that they were judged by."""

    rows: tuple[Row, ...]
    truth: Truth

    @property
    def has_disagreement(self) -> bool:
        """True if any of the rows disagrees."""
        return has_failure(self.rows)


def judge_case(
    case: Case,
    dtype: str,
    inputs: RoundedInputs,
    outcomes: Mapping[str, Outcome],
    classes: Mapping[str, str],
    known_empty_rows: Mapping[str, KnownEmptyRows] | None = None,
    *,
    conventions: Mapping[str, Mapping[str, str]] | None = None,
    store: Store = NO_STORE,
    expected_failures: Mapping[str, Sequence[ExpectedFailure]] = MappingProxyType({}),
    diagnosis: Diagnoser | None = None,
) -> CaseJudgement:
    """Judge the results of all implementations for one case in one dtype.

    All mappings are by implementation. ``classes`` are rounding models, ``known_empty_rows`` the known results of a
    query without a key, ``conventions`` the other conventions that are declared: such an implementation is not compared
    with others, or with numbers. ``expected_failures`` are the entries that concern the case. They may name a
    diagnosis, which ``diagnosis`` finds.
    """
    if diagnosis is None and (conventions or expected_failures):
        raise TypeError("only a diagnosis reads what is declared, and names what fails")
    truth = truth_of_case(case, inputs, returned_stages(outcomes), store)
    blank = make_blank_row(case, dtype)
    rows: list[Row] = []
    computed: dict[str, Stages] = {}
    for name, outcome in outcomes.items():
        if isinstance(outcome, Failure):
            rows.append(make_failure_row(blank, name, outcome))
        elif isinstance(outcome, Computed):
            computed[name] = outcome.stages
            known = replace(
                (known_empty_rows or {}).get(name, KnownEmptyRows()),
                accepts_convention_option=not outcome.ignored_conventions,
            )
            template = replace(blank, implementation=name)
            declared = (conventions or {}).get(name)
            own_truth = (
                diagnosis.truth_under_declared_conventions(truth, declared)
                if diagnosis is not None and declared
                else truth
            )
            call = template, case, own_truth, outcome, classes[name], known
            own_rows = judge_outcome_to_rows(*call)
            if diagnosis is not None and name in expected_failures and has_failure(own_rows):
                own_rows = _select_expected_diagnoses(
                    own_rows, diagnosis.judge_and_diagnose_rows(*call), expected_failures[name]
                )
            rows += own_rows
            if own_truth is not truth:
                del computed[name]
    several = computed if len(computed) > 1 else {}  # of one alone there are no pairs
    bounds = {
        name: _max_errors_of_judged_rows(truth.for_returned_dtypes(stages), classes[name])
        for name, stages in several.items()
    }
    pairs = compare_all_pairs(
        computed,
        bounds,
        truth.judged_problem.judged_rows,
        is_finite=not has_nonfinite_inputs(truth.judged_problem.problem_without_layout),
    )
    rows += [make_pair_row(blank, first, second, stage, pair) for (first, second, stage), pair in pairs.items()]
    rows += _mark_numbers_of_semantic_stages(rows, judge_numbers(case, inputs, truth, computed, classes, blank))
    return CaseJudgement(tuple(rows), truth)


class Diagnoser(Protocol):
    """The diagnosis as verdicts use it: truths under declared conventions, and rows with a diagnosis."""

    def truth_under_declared_conventions(self, truth: Truth, conventions: Mapping[str, str]) -> Truth:
        """Return the exact answer of a case under the conventions that an implementation declares."""

    def judge_and_diagnose_rows(
        self, blank: Row, case: Case, truth: Truth, outcome: Computed, rounding_model: str, known: KnownEmptyRows
    ) -> list[Row]:
        """Judge as ``judge_outcome_to_rows`` does, and diagnose stages that fail."""


def _select_expected_diagnoses(
    plain: Sequence[Row], diagnosed: Sequence[Row], expected_failures: Sequence[ExpectedFailure]
) -> list[Row]:
    """Return the diagnosed row of each stage whose diagnosis is an expected failure, and the plain row of others."""
    marked = ExpectedFailureRecord(expected_failures).mark_expected_rows(diagnosed)
    return [named if mark.xfail else row for row, named, mark in zip(plain, diagnosed, marked, strict=True)]


def judge_outcome_to_rows(
    blank: Row, case: Case, truth: Truth, outcome: Computed, rounding_model: str, known: KnownEmptyRows
) -> list[Row]:
    """Judge the stages that one implementation returned; each becomes a row that is filled in from ``blank``."""
    judged = judge_implementation(truth, outcome.stages, case.stage_shapes, rounding_model, known)
    return make_stage_rows(blank, mark_faulty_stages(judged, outcome.faults), outcome, case, truth.declared_conventions)


def make_stage_rows(
    blank: Row, judged: JudgedStages, outcome: Computed, case: Case, declared_conventions: str
) -> list[Row]:
    """Return judged stages as rows; ``declared_conventions`` names those of the implementation."""
    template = replace(blank, padded=outcome.padded or None)
    rows = []
    for judgement in judged.judgements:
        array = outcome.stages[judgement.stage]
        row = replace(
            template,
            **_select_column_values(judgement, _JUDGEMENT_COLUMNS),
            **_select_column_values(judgement.accumulated, _ACCUMULATED_COLUMNS),
            **_select_column_values(judgement.introduced, _INTRODUCED_COLUMNS),
            shape=format_shape(array.shape),
            index=_format_index(judgement.index),
            begins_at=judged.begins_at or None,
            message=describe_failing_element(judgement, array, case),
        )
        if judgement.stage in judged.excused_stages:
            row = replace(row, xfail=True, reason=judged.excuse_reason, thread=judged.excuse_source)
        diagnosis = next((name for begin, name in MEMORY_DIAGNOSES.items() if row.message.startswith(begin)), "")
        row = replace(row, diagnosis=diagnosis) if diagnosis else row
        rows.append(
            replace(row, message=f"{READ_AS_PREFIX}{declared_conventions}")
            if declared_conventions and row.verdict is Verdict.AGREE
            else row
        )
    return rows


def returned_stages(outcomes: Mapping[str, Outcome]) -> set[str]:
    """Return the stages that any implementation returned."""
    return {stage for outcome in outcomes.values() if isinstance(outcome, Computed) for stage in outcome.stages}


def _mark_numbers_of_semantic_stages(stages: list[Row], numbers: list[Row]) -> list[Row]:
    """Mark failing numbers as semantic if all failures of the implementation's stages are semantic."""
    failing: dict[str, list[Row]] = {}
    for row in stages:
        if row.comparison == "stage" and row.verdict not in HARMLESS_VERDICTS:
            failing.setdefault(row.implementation, []).append(row)
    reasons = {
        name: rows[0].message for name, rows in failing.items() if all(row.verdict is Verdict.SEMANTIC for row in rows)
    }
    missed = (Verdict.NUMERIC, Verdict.NONFINITE)

    def followed(row: Row) -> Row:
        if row.verdict not in missed or row.implementation not in reasons:
            return row
        return replace(row, verdict=Verdict.SEMANTIC, message=f"{row.message}; {reasons[row.implementation]}")

    return [followed(row) for row in numbers]


def max_errors_of_whole_stages(truth: Truth, rounding_model: str) -> Bounds:
    """Return B of every whole stage that has an exact answer.

    In rows that were not judged it is infinite, or NaN if the inputs hold NaN or infinity: then nothing is known there.

    Stages that are too large to be kept are left out, here and below.
    """
    elsewhere = np.nan if has_nonfinite_inputs(truth.judged_problem.problem_without_layout) else np.inf
    return _scatter_judged_rows(_max_errors_of_judged_rows(truth, rounding_model), truth.judged_problem, elsewhere)


def exact_values_of_whole_stages(truth: Truth) -> Stages:
    """Return the exact value of every whole stage in float64; NaN if there is none, or the row was not judged."""
    known = {stage: np.where(np.isfinite(exact.radius), exact.high, np.nan) for stage, exact in truth.exact.items()}
    return _scatter_judged_rows(known, truth.judged_problem, np.nan)


def drop_large_stages(stages: Stages) -> Stages:
    """Return the stages of an implementation that are not too large to be kept."""
    return {stage: array for stage, array in stages.items() if array.size <= MAX_STORED_ELEMENTS}


def _scatter_judged_rows(stages: Stages, judged: JudgedProblem, elsewhere: float) -> Stages:
    """Return whole stages that are not too large to be kept; rows that were not judged are ``elsewhere``."""
    rows, queries = judged.judged_rows, count_queries(judged.problem_without_layout.inputs)
    return {
        stage: scatter_rows(stage, array, rows, queries, elsewhere)
        for stage, array in stages.items()
        if (array.size if rows is None else array.size // len(rows) * queries) <= MAX_STORED_ELEMENTS
    }


def _max_errors_of_judged_rows(truth: Truth, rounding_model: str) -> Bounds:
    """Return B of the judged rows; NaN for elements without an exact answer."""
    return {
        stage: truth.stage_reference(stage, rounding_model).max_error
        for stage in truth.bounds.bounds_by_stage(rounding_model)
    }


def compare_all_pairs(
    computed: Mapping[str, Stages],
    bounds: Mapping[str, Bounds],
    query_rows: RowIndices | None = None,
    *,
    is_finite: bool = True,
) -> dict[tuple[str, str, str], Comparison]:
    """Compare every two implementations at every stage that both return; keys are (first, second, stage).

    ``computed`` are whole arrays; with ``query_rows``, ``bounds`` are only of these rows. Unless the inputs are finite,
    NaN and infinity may be right in other rows.
    """
    comparisons = {}
    for first, second in combinations(computed, 2):
        for stage in sort_stages(computed[first]):
            if stage in computed[second]:
                arrays = widen_to_common_dtype(stage, computed[first][stage], computed[second][stage])
                first_bound, second_bound = bounds[first].get(stage), bounds[second].get(stage)
                allowed = None if first_bound is None or second_bound is None else first_bound + second_bound
                compared = _compare_judged_rows(stage, *arrays, allowed, query_rows, is_finite=is_finite)
                comparisons[first, second, stage] = compared
    return comparisons


def widen_to_common_dtype(stage: str, first: NDArray[Any], second: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Widen one of two log_sum_exps if the other may be wider, and is."""
    if str(first.dtype) == wide_dtype(stage, str(second.dtype)):
        return first, second.astype(first.dtype)
    if str(second.dtype) == wide_dtype(stage, str(first.dtype)):
        return first.astype(second.dtype), second
    return first, second


def _compare_judged_rows(
    stage: str,
    first: NDArray[Any],
    second: NDArray[Any],
    allowed: NDArray[Any] | None,
    rows: RowIndices | None,
    *,
    is_finite: bool,
) -> Comparison:
    if rows is None or allowed is None:
        return compare_arrays(first, second, allowed)
    differing = compare_shapes_and_nonfinite(first, second, None if is_finite else np.ones(first.shape, dtype=np.bool_))
    if differing is not None:
        return differing
    if not is_long_enough_for_rows(stage, first, rows):
        return compare_arrays(first, second, None)
    comparison = compare_arrays(select_stage_rows(stage, first, rows), select_stage_rows(stage, second, rows), allowed)
    return replace(comparison, index=index_in_whole_stage(stage, comparison.index, rows))


def make_pair_row(blank: Row, first: str, second: str, stage: str, comparison: Comparison) -> Row:
    """Return one pair's comparison as a row."""
    columns = {**vars(comparison), "index": _format_index(comparison.index)}
    return replace(blank, comparison="pair", implementation=first, other=second, stage=stage, **columns)


def _format_index(index: Index | None) -> str | None:
    return None if index is None else format_index(index)


OTHER_CALL_DIAGNOSIS = "numbers-of-another-call"
"""The diagnosis of a stage with numbers of another call. One case alone does not give it."""
NEVER_WRITTEN_DIAGNOSIS = "memory-left-unwritten"
NEXT_CALL_DIAGNOSIS = "overwritten-by-the-next-call"
RIGHT_IN_NEW_PROCESS_DIAGNOSIS = "right-in-a-new-process"
"""The diagnosis of a stage that is right if the call is repeated in a new process (``asking.earlier_calls``)."""
MEMORY_DIAGNOSES = {
    OVERWRITTEN_FAULT: NEXT_CALL_DIAGNOSIS,
    UNWRITTEN_FAULT: NEVER_WRITTEN_DIAGNOSIS,
    SECOND_CALL_FAULT: OTHER_CALL_DIAGNOSIS,
}
"""The beginning of a message about wrong memory -> the diagnosis of its stage."""


_SAME_NAMED_COLUMNS = ("stage", "verdict", "value", "against", "judged_rows", "query_rows", "unjudged", "empty_rows")
_JUDGEMENT_COLUMNS = {"reference": "exact", "difference": "error", "allowed": "bound"} | {
    name: name for name in _SAME_NAMED_COLUMNS
}
_ACCUMULATED_COLUMNS = {name: name for name in ("tier", "ratio", "largest_z", "mean_z", "elements")}
_INTRODUCED_COLUMNS = {"introduced_tier": "tier", "introduced_ratio": "ratio", "introduced_z": "largest_z"}
"""Columns of ``Row`` -> attributes of a judgement, and of its measured errors against the exact answer and step."""


def _select_column_values(measured: StageJudgement | MeasuredErrors | None, names: Mapping[str, str]) -> dict[str, Any]:
    return {} if measured is None else {column: getattr(measured, name) for column, name in names.items()}


def describe_failing_element(judgement: StageJudgement, array: NDArray[Any], case: Case) -> str:
    """Return a failing stage's message with its element: computed and exact, with as many digits as differ."""
    if judgement.verdict is not Verdict.NUMERIC or judgement.index is None:
        return judgement.message
    if judgement.value is None or judgement.exact is None:
        return judgement.message
    at = format_element(judgement.index, layout=case.layout_of(judgement.stage, array.shape))
    computed, exact = format_distinct(judgement.value, judgement.exact)
    return (
        f"{judgement.message}; at {at} computed {computed}, exact {exact}, off by {judgement.error:.3g}, "
        f"bound {judgement.bound:.3g}"
    )
