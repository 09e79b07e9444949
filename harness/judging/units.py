"""A unit, one case in one dtype, judged on every implementation of a run; rows of earlier runs come from the store.

The modules that judge are imported only if there is anything to judge.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

from attncheck.common.store import NO_STORE, Store, StoreKey, UnreadableEntry
from attncheck.execution.implementations import Implementation
from attncheck.execution.worker import Computed, Failure, Outcome
from attncheck.judging.remembered import make_store_key_of_rows, rows_from_bytes, rows_to_bytes
from attncheck.judging.xfail import KnownEmptyRows, make_blank_row, make_failure_row
from attncheck.reading.case import Case
from attncheck.reading.expected_failures import ExpectedFailure, find_recorded_empty_rows
from attncheck.reading.inputs import RoundedInputs
from attncheck.results.format import EXACT, INPUTS, Row, StoredArray, bound_array_name, has_failure
from attncheck.spec.verdicts import WRONG_NUMBER_VERDICTS

if TYPE_CHECKING:
    from attncheck.judging.judge import Diagnoser
    from attncheck.judging.judge_stages import StageJudgement
    from attncheck.judging.single_stage import SingleStage
    from attncheck.judging.truth import Truth

Evaluation: TypeAlias = tuple[str, str, str]
"""An implementation, a case and a dtype."""

_MAX_UNDIAGNOSED_BYTES = 1 << 20
"""Largest stages of an implementation in one case that are kept for a later diagnosis. A choice: larger ones
are read from the results directory, if it has them; a larger number takes memory for every failing case."""


@dataclass(frozen=True)
class UnitResult:
    """The rows and arrays of one case in one dtype, and the stages of evaluations that are not diagnosed yet."""

    rows: tuple[Row, ...]
    arrays: tuple[StoredArray, ...]
    undiagnosed: Mapping[str, Computed] = field(default_factory=dict)


@dataclass(frozen=True)
class StoredUnit:
    """The rows of a unit in the store, None if it has none; the result, if it needs nothing else."""

    rows: tuple[Row, ...] | None
    result: UnitResult | None


@dataclass(frozen=True)
class Judge:
    """Judges one case in one dtype on every implementation; anywhere, in any order.

    Judging uses only the conventions in ``expected_failures``; other failures that they excuse are marked later. Rows
    and exact answers in the ``store`` are not computed again.

    The cause of failures follows from all failing cases of an implementation (``diagnosis.run``), so it is left open
    here. If a failure is expected, its entry may name the cause, which the ``diagnosis`` then finds. The ``diagnosis``
    also applies the conventions that implementations declare.
    """

    implementations: Sequence[Implementation]
    keep_all_arrays: bool = False
    expected_failures: Sequence[ExpectedFailure] = ()
    store: Store = NO_STORE
    diagnosis: Diagnoser | None = None

    def judge_unit(
        self,
        case: Case,
        dtype: str,
        inputs: RoundedInputs,
        collected: Mapping[str, Outcome],
        stored_unit: StoredUnit | None = None,
    ) -> UnitResult:
        """Return the rows, and the arrays if any row disagrees, or if all arrays are kept.

        ``stored_unit`` is the result of ``look_up_stored_unit``, if it was called before.
        """
        question = self._make_evaluated_unit(case, dtype, inputs, collected)
        rows, truth = question.load_rows(self.store) if stored_unit is None else stored_unit.rows, None
        single_stage = None if rows is not None or self.store.folder is None else question.single_stage
        if single_stage is not None and (judgement := single_stage.judge_if_right(self.store)) is not None:
            rows = question.rows_of_right_stage(judgement)
            question.store_rows(self.store, rows)
        if rows is None:
            from attncheck.judging.judge import judge_case

            judged = judge_case(
                *(case, dtype, inputs, question.outcomes, question.rounding_models, question.known_empty_rows),
                conventions=question.conventions,
                store=self.store,
                expected_failures=question.expected_failures,
                diagnosis=self.diagnosis,
            )
            rows, truth = judged.rows, judged.truth
            question.store_rows(self.store, rows)
            if single_stage is not None and not has_failure(rows):
                single_stage.store_reference(self.store, truth)
        arrays = question.arrays_to_store(truth, self) if self._should_keep_arrays(case, rows) else ()
        return UnitResult(
            _add_durations(rows, question.outcomes), tuple(arrays), _undiagnosed_outcomes(rows, question.outcomes)
        )

    def known_empty_rows_of(self, case: Case, dtype: str, name: str, returned: Computed) -> KnownEmptyRows:
        """Return the known results of an implementation for a query without a key in a case."""
        item = next(item for item in self.implementations if item.name == name)
        expected = self._expected_failures_of(name, case, dtype)
        return replace(
            find_known_empty_rows(item, expected, case.id, dtype),
            accepts_convention_option=not returned.ignored_conventions,
        )

    def _expected_failures_of(self, name: str, case: Case, dtype: str) -> list[ExpectedFailure]:
        return [
            item
            for item in self.expected_failures
            if item.applies_to_implementation(name) and item.applies_to_evaluation(name, case.id, dtype)
        ]

    def judge_failures_only(self, case: Case, dtype: str, collected: Mapping[str, Outcome]) -> UnitResult | None:
        """Return the result of ``judge`` for a unit without any stage or array to keep; None for any other unit."""
        if case.is_document or any(isinstance(outcome, Computed) for outcome in collected.values()):
            return None
        outcomes, blank = self._ordered_outcomes(dtype, collected), make_blank_row(case, dtype)
        failures = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Failure)}
        rows = tuple(make_failure_row(blank, name, failure) for name, failure in failures.items())
        # Without any returned array there is nothing to compare an exact one with, even if all are kept.
        if has_failure(rows):
            return None
        return UnitResult(_add_durations(rows, outcomes), ())

    def look_up_stored_unit(
        self, case: Case, dtype: str, inputs: RoundedInputs, collected: Mapping[str, Outcome]
    ) -> StoredUnit | None:
        """Look up the result of ``judge`` in the store; None if all arrays are kept, which requires judging."""
        if self.store.folder is None or self.keep_all_arrays:
            return None
        question = self._make_evaluated_unit(case, dtype, inputs, collected)
        rows, outcomes = question.load_rows(self.store), question.outcomes
        if rows is None or self._should_keep_arrays(case, rows):
            return StoredUnit(rows, None)
        return StoredUnit(rows, UnitResult(_add_durations(rows, outcomes), (), _undiagnosed_outcomes(rows, outcomes)))

    def rounding_model_of(self, name: str, dtype: str) -> str:
        """Return the rounding model by which an implementation is judged in a dtype."""
        return next(item.rounding_model(dtype) or "none" for item in self.implementations if item.name == name)

    def declared_conventions_of(self, name: str) -> Mapping[str, str]:
        """Return the conventions that an implementation declares, except for queries without a key."""
        return next(item.declared_readings for item in self.implementations if item.name == name)

    def _should_keep_arrays(self, case: Case, rows: Sequence[Row]) -> bool:
        return self.keep_all_arrays or case.is_document or has_failure(rows)

    def _make_evaluated_unit(
        self, case: Case, dtype: str, inputs: RoundedInputs, collected: Mapping[str, Outcome]
    ) -> _EvaluatedUnit:
        outcomes = self._ordered_outcomes(dtype, collected)
        asked = {item.name: item for item in self.implementations if item.name in outcomes}
        classes = {name: model for name, item in asked.items() if (model := item.rounding_model(dtype))}
        concerning = {name: self._expected_failures_of(name, case, dtype) for name in asked}
        known = {name: find_known_empty_rows(item, concerning[name], case.id, dtype) for name, item in asked.items()}
        expected = {name: entries for name, entries in concerning.items() if entries}
        conventions = {name: dict(item.declared_readings) for name, item in asked.items() if item.declared_readings}
        return _EvaluatedUnit(case, dtype, inputs, outcomes, classes, known, expected, conventions)

    def _ordered_outcomes(self, dtype: str, collected: Mapping[str, Outcome]) -> dict[str, Outcome]:
        """Return the outcomes in order; implementations that do not declare the dtype are unsupported."""
        absent = Failure("unsupported", f"declares no {dtype}", (dtype,))
        return {
            item.name: collected.get(item.name, absent)
            for item in self.implementations
            if item.name in collected or not item.rounding_model(dtype)
        }


@dataclass(frozen=True)
class _EvaluatedUnit:
    """The outcomes of one case in one dtype, and everything else on which their rows depend."""

    case: Case
    dtype: str
    inputs: RoundedInputs
    outcomes: Mapping[str, Outcome]
    rounding_models: Mapping[str, str]
    known_empty_rows: Mapping[str, KnownEmptyRows]
    expected_failures: Mapping[str, Sequence[ExpectedFailure]] = field(default_factory=dict)
    conventions: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @cached_property
    def _key(self) -> StoreKey:
        judged_by = [self.rounding_models, self.known_empty_rows, self.expected_failures, self.conventions]
        return make_store_key_of_rows(self.case, self.dtype, self.inputs, self.outcomes, judged_by)

    def load_rows(self, store: Store) -> tuple[Row, ...] | None:
        """Return the rows in the store, which contain no durations."""
        data = None if store.folder is None else store.get(self._key)
        try:
            return None if data is None else rows_from_bytes(data)
        except UnreadableEntry:
            store.count_as_damaged()
            return None

    def store_rows(self, store: Store, rows: Sequence[Row]) -> None:
        """Put the rows into the store."""
        if store.folder is not None:
            store.put(self._key, rows_to_bytes(rows))

    @cached_property
    def single_stage(self) -> SingleStage | None:
        """The returned stage, if nothing else is judged and only its numbers decide; else None."""
        if len(self.outcomes) != 1:
            return None
        case, [(name, outcome)] = self.case, self.outcomes.items()
        if not isinstance(outcome, Computed) or len(outcome.stages) != 1 or outcome.faults:
            return None
        [(stage, array)] = outcome.stages.items()
        if self.conventions or case.expected or case.stage_shapes.get(stage) != array.shape:
            return None
        from attncheck.judging.single_stage import SingleStage

        return SingleStage(case, self.dtype, self.inputs, stage, array, self.rounding_models[name])

    def rows_of_right_stage(self, judgement: StageJudgement) -> tuple[Row, ...]:
        """Return the row of the single stage, which is right."""
        from attncheck.judging.judge import make_stage_rows
        from attncheck.judging.judge_implementation import JudgedStages

        [(name, outcome)] = self.outcomes.items()
        assert isinstance(outcome, Computed)
        blank = replace(make_blank_row(self.case, self.dtype), implementation=name)
        return tuple(make_stage_rows(blank, JudgedStages((judgement,), ""), outcome, self.case, ""))

    def arrays_to_store(self, truth: Truth | None, judge: Judge) -> Iterator[StoredArray]:
        """Return the stages of the implementations, exact values and bounds, which reports draw and compare."""
        from attncheck.judging.judge import (
            drop_large_stages,
            exact_values_of_whole_stages,
            max_errors_of_whole_stages,
            returned_stages,
        )

        if truth is None:
            from attncheck.judging.truth import truth_of_case

            truth = truth_of_case(self.case, self.inputs, returned_stages(self.outcomes), judge.store)
        # With several implementations, the exact answer is that of the case as it is meant.
        if len(self.rounding_models) == 1 and self.conventions and judge.diagnosis is not None:
            truth = judge.diagnosis.truth_under_declared_conventions(truth, next(iter(self.conventions.values())))
        computed = {name: outcome for name, outcome in self.outcomes.items() if isinstance(outcome, Computed)}
        kept = {name: drop_large_stages(outcome.stages) for name, outcome in computed.items()}
        kept |= {INPUTS: self.inputs.arrays, EXACT: exact_values_of_whole_stages(truth)}
        kept |= {
            bound_array_name(name): max_errors_of_whole_stages(truth, name)
            for name in sorted(set(self.rounding_models.values()))
        }
        return (
            StoredArray(self.case.id, self.dtype, name, stage, array)
            for name, stages in kept.items()
            for stage, array in stages.items()
        )


def _undiagnosed_outcomes(rows: Sequence[Row], outcomes: Mapping[str, Outcome]) -> dict[str, Computed]:
    """Return the outcomes of implementations that fail by their numbers, unless these are large."""
    failing = {row.implementation for row in rows if is_undiagnosed(row)}
    return {
        name: outcome
        for name, outcome in outcomes.items()
        if name in failing
        and isinstance(outcome, Computed)
        and sum(array.nbytes for array in outcome.stages.values()) <= _MAX_UNDIAGNOSED_BYTES
    }


def is_undiagnosed(row: Row) -> bool:
    """Return whether a row's stage fails by its numbers and is not diagnosed yet."""
    is_open = row.verdict in WRONG_NUMBER_VERDICTS and not row.xfail and row.diagnosis is None
    return is_open and row.comparison == "stage"


def _add_durations(rows: Sequence[Row], outcomes: Mapping[str, Outcome]) -> tuple[Row, ...]:
    """Set the duration of its evaluation in the first row of each implementation."""
    untimed = {name: outcome.seconds for name, outcome in outcomes.items() if outcome.seconds is not None}
    if not untimed:
        return tuple(rows)
    return tuple(
        replace(row, seconds=untimed.pop(row.implementation))
        if row.comparison == "stage" and row.implementation in untimed
        else row
        for row in rows
    )


def find_known_empty_rows(
    implementation: Implementation, expected_failures: Sequence[ExpectedFailure], case: str, dtype: str
) -> KnownEmptyRows:
    """Return the known results of an implementation for a query without a key in a case."""
    declared = implementation.mode_declarations.conventions.get("empty_rows")
    recorded = find_recorded_empty_rows(expected_failures, implementation.name, case, dtype)
    if declared is None:
        return KnownEmptyRows(recorded_conventions=recorded)
    return KnownEmptyRows(declared.value, recorded, reason=declared.reason, source=declared.source or None)
