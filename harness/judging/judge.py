"""One case in one dtype, judged: every implementation against the exact answer, against each other, against numbers.

Two implementations disagree where they differ by more than the sum of their bounds. Where some query rows stand for
all, shape, dtype and the places of NaN and infinity are still compared everywhere, values in those rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.sampling import Rows, has_rows, index_in_all, queries_of, rows_of_stage, spread
from attncheck.common.store import NO_STORE, Store
from attncheck.common.wording import READ_AS, stored_index, told_apart, written_element
from attncheck.execution.operations import OVERWRITTEN, SECOND_CALL, UNWRITTEN
from attncheck.execution.worker import Computed, Failure, Outcome
from attncheck.judging.compare import Comparison, Index, Measured, compare_arrays, compare_forms
from attncheck.judging.exact_stages import Stages
from attncheck.judging.judge_implementation import JudgedStages, OwnEmptyRows, judge_implementation, with_faults
from attncheck.judging.judge_numbers import judge_numbers
from attncheck.judging.judge_stages import StageJudgement, in_order
from attncheck.judging.truth import Truth, truth_of_case
from attncheck.judging.undefined import JudgedProblem, holds_nonfinite
from attncheck.judging.xfail import ExpectedFailureRecord, blank_row, failure_row
from attncheck.reading.case import Case
from attncheck.reading.expected_failures import ExpectedFailure
from attncheck.reading.inputs import Inputs
from attncheck.reading.shapes import show
from attncheck.results.format import Row, disagrees
from attncheck.spec import wide_dtype
from attncheck.spec.verdicts import HARMLESS, Verdict

Bounds = Mapping[str, NDArray[Any]]
"""Stage -> the largest error that an implementation's class allows, per element."""

MAX_KEPT = 1 << 22
"""Elements of the largest array that a results directory keeps: 32 MiB of float64. Score matrices of long sequences are
larger, and are nothing that a report draws."""


@dataclass(frozen=True)
class CaseJudgement:
    """All rows of one case in one dtype, and the truth behind them."""

    rows: tuple[Row, ...]
    truth: Truth

    @property
    def disagrees(self) -> bool:
        """Whether any of the rows disagrees."""
        return disagrees(self.rows)


def judge(
    case: Case,
    dtype: str,
    inputs: Inputs,
    outcomes: Mapping[str, Outcome],
    classes: Mapping[str, str],
    own_empty_rows: Mapping[str, OwnEmptyRows] | None = None,
    *,
    conventions: Mapping[str, Mapping[str, str]] | None = None,
    store: Store = NO_STORE,
    expected_failures: Mapping[str, Sequence[ExpectedFailure]] = MappingProxyType({}),
    diagnosis: Diagnosis | None = None,
) -> CaseJudgement:
    """Judge what the implementations returned for one case in one dtype.

    ``classes`` are their rounding models, ``own_empty_rows`` what they are known to give for a query without a key,
    ``conventions`` the others that they declare: who reads the case otherwise is compared with no other and no number.
    ``expected_failures`` are, by implementation, the entries that concern the case: they may name what it does instead,
    which the ``diagnosis`` says.
    """
    if diagnosis is None and (conventions or expected_failures):
        raise TypeError("only a diagnosis reads what is declared, and names what fails")
    truth = truth_of_case(case, inputs, returned_stages(outcomes), store)
    blank = blank_row(case, dtype)
    rows: list[Row] = []
    computed: dict[str, Stages] = {}
    for name, outcome in outcomes.items():
        if isinstance(outcome, Failure):
            rows.append(failure_row(blank, name, outcome))
        elif isinstance(outcome, Computed):
            computed[name] = outcome.stages
            known = replace((own_empty_rows or {}).get(name, OwnEmptyRows()), is_asked=not outcome.not_asked)
            own = replace(blank, implementation=name)
            declared = (conventions or {}).get(name)
            own_truth = diagnosis.truth_as_declared(truth, declared) if diagnosis is not None and declared else truth
            call = own, case, own_truth, outcome, classes[name], known
            own_rows = judge_to_rows(*call)
            if diagnosis is not None and name in expected_failures and disagrees(own_rows):
                own_rows = _as_expected(own_rows, diagnosis.rows(*call), expected_failures[name])
            rows += own_rows
            if own_truth is not truth:
                del computed[name]
    several = computed if len(computed) > 1 else {}  # of one alone there are no pairs
    bounds = {name: _bounds_of_judged(truth.for_returned(stages), classes[name]) for name, stages in several.items()}
    pairs = judge_pairs(computed, bounds, truth.judged.query_rows, is_finite=not holds_nonfinite(truth.judged.problem))
    rows += [pair_row(blank, first, second, stage, pair) for (first, second, stage), pair in pairs.items()]
    rows += _following(rows, judge_numbers(case, inputs, truth, computed, classes, blank))
    return CaseJudgement(tuple(rows), truth)


class Diagnosis(Protocol):
    """The diagnosis as verdicts use it: truths under declared conventions, and rows with what is done instead."""

    def truth_as_declared(self, truth: Truth, conventions: Mapping[str, str]) -> Truth:
        """Return the exact answer of a case as an implementation reads it that declares conventions."""

    def rows(
        self, blank: Row, case: Case, truth: Truth, outcome: Computed, rounding_model: str, known: OwnEmptyRows
    ) -> list[Row]:
        """Judge as ``judge_to_rows`` does, and say what is done instead where stages fail."""


def _as_expected(
    plain: Sequence[Row], diagnosed: Sequence[Row], expected_failures: Sequence[ExpectedFailure]
) -> list[Row]:
    """Return rows of stages with their diagnosis where that is what is expected; the others are as they were judged."""
    marked = ExpectedFailureRecord(expected_failures).mark(diagnosed)
    return [named if mark.xfail else row for row, named, mark in zip(plain, diagnosed, marked, strict=True)]


def judge_to_rows(
    blank: Row, case: Case, truth: Truth, outcome: Computed, rounding_model: str, known: OwnEmptyRows
) -> list[Row]:
    """Judge the stages that one implementation returned, each in a row that begins as a blank one."""
    judged = judge_implementation(truth, outcome.stages, case.stage_shapes, rounding_model, known)
    return stage_rows(blank, with_faults(judged, outcome.faults), outcome, case, truth.read_as)


def stage_rows(blank: Row, judged: JudgedStages, outcome: Computed, case: Case, read_as: str) -> list[Row]:
    """Lay judged stages out as rows; ``read_as`` says how the implementation reads the case, if otherwise."""
    rows = _laid_out(replace(blank, padded=outcome.padded or None), judged, outcome.stages, case)
    if not read_as:
        return rows
    said = f"{READ_AS}{read_as}"
    return [replace(row, message=said) if row.verdict is Verdict.AGREE else row for row in rows]


def returned_stages(outcomes: Mapping[str, Outcome]) -> set[str]:
    """Return the stages that any implementation returned."""
    return {stage for outcome in outcomes.values() if isinstance(outcome, Computed) for stage in outcome.stages}


def _following(stages: list[Row], numbers: list[Row]) -> list[Row]:
    """Say of numbers that miss only because a stage means something else that they mean something else too."""
    failing: dict[str, list[Row]] = {}
    for row in stages:
        if row.comparison == "stage" and row.verdict not in HARMLESS:
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


def worst_bounds(truth: Truth, rounding_model: str) -> Bounds:
    """Return B of every whole stage, infinite in rows that were not judged; nothing where there is no exact answer.

    In those rows it is NaN where the inputs hold NaN or infinity: what is right there was not looked at.

    Stages that are too large to be kept are left out, here and below.
    """
    elsewhere = np.nan if holds_nonfinite(truth.judged.problem) else np.inf
    return _kept_whole(_bounds_of_judged(truth, rounding_model), truth.judged, elsewhere)


def exact_values(truth: Truth) -> Stages:
    """Return the exact value of every whole stage, rounded to float64, NaN where there is none, or no row judged."""
    known = {stage: np.where(np.isfinite(each.radius), each.high, np.nan) for stage, each in truth.exact.items()}
    return _kept_whole(known, truth.judged, np.nan)


def kept_stages(stages: Stages) -> Stages:
    """Return the stages of an implementation that are not too large to be kept."""
    return {stage: array for stage, array in stages.items() if array.size <= MAX_KEPT}


def _kept_whole(stages: Stages, judged: JudgedProblem, elsewhere: float) -> Stages:
    """Return whole stages that are not too large to be kept, with a number in the rows that were not judged."""
    rows, queries = judged.query_rows, queries_of(judged.problem.inputs)
    return {
        stage: spread(stage, array, rows, queries, elsewhere)
        for stage, array in stages.items()
        if (array.size if rows is None else array.size // len(rows) * queries) <= MAX_KEPT
    }


def _bounds_of_judged(truth: Truth, rounding_model: str) -> Bounds:
    """Return B of the judged rows; NaN where the exact answer leaves open what is right."""
    return {stage: truth.reference(stage, rounding_model).max_error for stage in truth.bounds.of(rounding_model)}


def judge_pairs(
    computed: Mapping[str, Stages],
    bounds: Mapping[str, Bounds],
    query_rows: Rows | None = None,
    *,
    is_finite: bool = True,
) -> dict[tuple[str, str, str], Comparison]:
    """Compare every two implementations at every stage that both return; keys are (first, second, stage).

    ``computed`` are whole arrays; where ``query_rows`` are given, ``bounds`` are those of these rows. Unless the inputs
    are finite, NaN and infinity may stand in other rows by right.
    """
    return {
        (first, second, stage): _compare(
            stage,
            *in_one_dtype(stage, computed[first][stage], computed[second][stage]),
            _allowed(bounds, first, second, stage),
            query_rows,
            is_finite=is_finite,
        )
        for first, second in combinations(computed, 2)
        for stage in in_order(computed[first])
        if stage in computed[second]
    }


def in_one_dtype(stage: str, first: NDArray[Any], second: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Widen one of two log_sum_exps where the other is a wider one by right."""
    if str(first.dtype) == wide_dtype(stage, str(second.dtype)):
        return first, second.astype(first.dtype)
    if str(second.dtype) == wide_dtype(stage, str(first.dtype)):
        return first.astype(second.dtype), second
    return first, second


def _compare(
    stage: str,
    first: NDArray[Any],
    second: NDArray[Any],
    allowed: NDArray[Any] | None,
    rows: Rows | None,
    *,
    is_finite: bool,
) -> Comparison:
    if rows is None or allowed is None:
        return compare_arrays(first, second, allowed)
    differing = compare_forms(first, second, None if is_finite else np.ones(first.shape, dtype=np.bool_))
    if differing is not None:
        return differing
    if not has_rows(stage, first, rows):
        return compare_arrays(first, second, None)
    found = compare_arrays(rows_of_stage(stage, first, rows), rows_of_stage(stage, second, rows), allowed)
    return replace(found, index=index_in_all(stage, found.index, rows))


def _allowed(bounds: Mapping[str, Bounds], first: str, second: str, stage: str) -> NDArray[Any] | None:
    one, other = bounds[first].get(stage), bounds[second].get(stage)
    return None if one is None or other is None else one + other


def pair_row(blank: Row, first: str, second: str, stage: str, comparison: Comparison) -> Row:
    """Lay one pair's comparison out as a row."""
    found = {**vars(comparison), "index": _kept(comparison.index)}
    return replace(blank, comparison="pair", implementation=first, other=second, stage=stage, **found)


def _kept(index: Index | None) -> str | None:
    return None if index is None else stored_index(index)


def _laid_out(own: Row, judged: JudgedStages, stages: Stages, case: Case) -> list[Row]:
    begins_at = judged.begins_at or None
    said = {each.stage: explain_element(each, stages[each.stage], case) for each in judged.judgements}
    rows = [_stage_row(own, each, stages[each.stage], begins_at, said[each.stage]) for each in judged.judgements]
    reason, source = judged.reason, judged.source
    rows = [
        replace(row, xfail=True, reason=reason, thread=source) if row.stage in judged.excused else row for row in rows
    ]
    return [replace(row, diagnosis=name) if (name := _of_memory(row.message)) else row for row in rows]


def _of_memory(message: str) -> str:
    """Return the diagnosis of a stage whose message says that memory is not as it has to be; empty for any other."""
    known = {OVERWRITTEN: NEXT_CALL, UNWRITTEN: NEVER_WRITTEN, SECOND_CALL: OTHER_CALL}
    return next((name for begin, name in known.items() if message.startswith(begin)), "")


OTHER_CALL = "numbers-of-another-call"
"""The diagnosis of a stage that shows what another call left behind; no case names it by itself."""
NEVER_WRITTEN = "memory-left-unwritten"
NEXT_CALL = "overwritten-by-the-next-call"


def _stage_row(own: Row, judgement: StageJudgement, array: NDArray[Any], begins_at: str | None, message: str) -> Row:
    return replace(
        own,
        **_columns(judgement, _OF_JUDGEMENT),
        **_columns(judgement.accumulated, _OF_ACCUMULATED),
        **_columns(judgement.introduced, _OF_INTRODUCED),
        shape=show(array.shape),
        index=_kept(judgement.index),
        begins_at=begins_at,
        message=message,
    )


_ALIKE = ("stage", "verdict", "value", "against", "judged_rows", "query_rows", "unjudged", "empty_rows")
_OF_JUDGEMENT = {"reference": "exact", "difference": "error", "allowed": "bound"} | {name: name for name in _ALIKE}
_OF_ACCUMULATED = {name: name for name in ("tier", "ratio", "largest_z", "mean_z", "elements")}
_OF_INTRODUCED = {"introduced_tier": "tier", "introduced_ratio": "ratio", "introduced_z": "largest_z"}
"""Columns of ``Row``, and what they are in a judgement, and in what was measured against the exact answer and step."""


def _columns(found: StageJudgement | Measured | None, names: Mapping[str, str]) -> dict[str, Any]:
    return {} if found is None else {column: getattr(found, name) for column, name in names.items()}


def explain_element(judgement: StageJudgement, array: NDArray[Any], case: Case) -> str:
    """Add the element to a failing stage's message: computed and exact, with the digits that tell them apart."""
    if judgement.verdict is not Verdict.NUMERIC or judgement.index is None:
        return judgement.message
    if judgement.value is None or judgement.exact is None:
        return judgement.message
    at = written_element(judgement.index, layout=case.layout_of(judgement.stage, array.shape))
    computed, exact = told_apart(judgement.value, judgement.exact)
    return (
        f"{judgement.message}; at {at} computed {computed}, exact {exact}, off by {judgement.error:.3g}, "
        f"bound {judgement.bound:.3g}"
    )
