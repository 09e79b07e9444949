"""Tests of properties: the cases that have them, the calls in workers, and the rows of the results."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attncheck.common.errors import CaseError, Diagnostic
from attncheck.common.store import NO_STORE, Store
from attncheck.common.wording import format_element, format_index
from attncheck.diagnosis.declared import problem_under_conventions, rewrite_for_conventions
from attncheck.execution.call import Limits
from attncheck.execution.implementations import Implementation
from attncheck.execution.runner import GroupRunner
from attncheck.execution.sessions import StepResult
from attncheck.execution.worker import Computed, Failure, Outcome
from attncheck.execution.workers import WorkerPool
from attncheck.properties.calls import VARIANTS_BY_PROPERTY
from attncheck.properties.judging import StageArrays, TruthCache, VariantResult, judge_variant
from attncheck.properties.variants import (
    AnyVariant,
    FurtherCall,
    NotApplicable,
    PropertyVariant,
    ResultPair,
    SessionVariant,
    call_returning,
    result_stage_names,
)
from attncheck.reading.case import Case
from attncheck.reading.expected_failures import ExpectedFailure
from attncheck.reading.inputs import convert_inputs, make_exact_inputs, make_problem_of_case
from attncheck.reading.problem import Problem
from attncheck.reading.selection import PROPERTIES_FILE, CaseSelection, select_cases
from attncheck.results.format import Row
from attncheck.settings.config import load_expected_failures_of, read_config
from attncheck.spec.verdicts import PropertyOutcome

_FRAMEWORK_WITH_NEGATIVE_STRIDES = "numpy"
"""The only framework whose arrays have negative strides; every other copies such an array."""


@dataclass(frozen=True, eq=False)
class PropertyQuestion:
    """A property of a case in a dtype: the first call, and the variants of further calls."""

    name: str
    case: Case
    dtype: str
    problem: Problem
    variants: Sequence[AnyVariant]


@dataclass(frozen=True)
class PropertyRequest:
    """The requested properties and dtypes, all if none are named, and the limits of workers."""

    property_names: Collection[str] = ()
    dtypes: Collection[str] = ()
    limits: Limits = field(default_factory=Limits)
    store: Store = NO_STORE


def property_questions(cases: Sequence[Case], request: PropertyRequest) -> list[PropertyQuestion]:
    """Return every property of the cases, by dtype. Raises ``CaseError`` for properties that do not apply."""
    faults: list[Diagnostic] = []
    questions = []
    for case in cases:
        exact = make_exact_inputs(case)
        for dtype in case.dtypes:
            if request.dtypes and dtype not in request.dtypes:
                continue
            problem = make_problem_of_case(case, convert_inputs(case, exact, dtype))
            for name in (
                name for name in case.properties if not request.property_names or name in request.property_names
            ):
                try:
                    questions.append(PropertyQuestion(name, case, dtype, problem, VARIANTS_BY_PROPERTY[name](problem)))
                except NotApplicable as error:
                    message = f"{name}: {error} ({dtype})"
                    faults.append(Diagnostic(case.file, message, case.line, case.name, "properties"))
    if faults:
        raise CaseError(faults)
    return questions


def judge_implementations(
    implementations: Sequence[Implementation], questions: Sequence[PropertyQuestion], request: PropertyRequest
) -> list[Row]:
    """Test every property of every implementation, in worker processes."""
    truths = TruthCache(request.store)
    return [
        row
        for implementation in implementations
        for row in _judge_implementation(implementation, questions, request.limits, truths)
    ]


def _judge_implementation(
    implementation: Implementation, questions: Sequence[PropertyQuestion], limits: Limits, truths: TruthCache
) -> Iterator[Row]:
    for dtype in dict.fromkeys(question.dtype for question in questions):
        of_dtype = [question for question in questions if question.dtype == dtype]
        model = implementation.rounding_model(dtype)
        if model is None:
            lacking = VariantResult(PropertyOutcome.UNSUPPORTED, f"declares no {dtype}")
            yield from (_property_row(implementation, question, "", lacking) for question in of_dtype)
            continue
        with closing(WorkerPool(limits, probes_state=False)) as workers:
            for question in of_dtype:
                judge = _VariantJudge(implementation, question, workers, truths)
                for variant in question.variants:
                    yield _property_row(implementation, question, variant.description, judge.judge(variant))


def _property_row(
    implementation: Implementation, question: PropertyQuestion, variant_description: str, result: VariantResult
) -> Row:
    claim: str = getattr(implementation.entry, "properties", {}).get(question.name, "")
    place = (question.case.id, question.case.operation, question.dtype, implementation.name)
    row = Row(
        *place,
        comparison="property",
        property_name=question.name,
        variant=variant_description,
        claim=claim,
        **vars(result),
    )
    if row.fails and row.verdict != PropertyOutcome.BROKEN:
        return replace(row, message=f"claimed to be {row.claim}, and is {row.verdict}: {row.message}")
    return row


class _VariantJudge:
    """Judges the variants of one question on one implementation; the first call is made once for all of them."""

    def __init__(
        self, implementation: Implementation, question: PropertyQuestion, workers: WorkerPool, truths: TruthCache
    ) -> None:
        self._implementation, self._question, self._workers, self._truths = implementation, question, workers, truths
        self._model = implementation.rounding_model(question.dtype) or "none"
        self._conventions = implementation.declared_readings
        self._problems_under_conventions: dict[int, tuple[Problem, Problem]] = {}  # by problem, which stays alive
        self._first_outcomes: dict[tuple[str, ...], Outcome] = {}
        self._new_process_outcomes: dict[int, Outcome] = {}  # by problem; the question holds them all

    def judge(self, variant: AnyVariant) -> VariantResult:
        """Make the calls of a variant, and judge the results."""
        try:
            return self._judge_session(variant) if isinstance(variant, SessionVariant) else self._judge_calls(variant)
        except _MissingResult as reason:
            return reason.result

    @property
    def _shared_worker(self) -> GroupRunner[Any]:
        """The worker of calls without special needs."""
        return self._worker_with_threads(None)

    def _worker_with_threads(self, threads: int | None) -> GroupRunner[Any]:
        return self._workers.worker_for(self._implementation, self._question.dtype, threads)

    def _new_worker(self) -> AbstractContextManager[GroupRunner[Any]]:
        return self._workers.new_process_worker(self._implementation, self._question.dtype)

    def _judge_calls(self, variant: PropertyVariant) -> VariantResult:
        question, usual = self._question, self._shared_worker
        framework = self._implementation.entry.framework
        kinds = {kind for call in variant.calls for kind in call.problem.memory_layout.values()}
        if "reversed" in kinds and framework != _FRAMEWORK_WITH_NEGATIVE_STRIDES:
            return VariantResult(PropertyOutcome.UNSUPPORTED, f"{framework} has no negative strides")
        stages = variant.stages or result_stage_names(question.problem)
        if stages not in self._first_outcomes:
            self._first_outcomes[stages] = usual.evaluate(
                call_returning(self._call_under_conventions(question.problem), stages)
            )
        first = _returned_stages(self._first_outcomes[stages], stages, "the first call")
        worker = self._worker_with_threads(variant.threads) if variant.process_kind == "threads" else usual
        with self._new_worker() if variant.process_kind == "fresh process" else nullcontext(worker) as runner:
            others = [
                _returned_stages(
                    runner.evaluate(call_returning(self._call_under_conventions(call.problem), stages)),
                    stages,
                    call.description,
                )
                for call in variant.calls
            ]
        return judge_variant(variant, question.problem, first, others, self._model, self._truths)

    def _problem_under_conventions(self, problem: Problem) -> Problem:
        """Return the problem that the function computes if it is called with ``problem``, by its declarations."""
        if id(problem) not in self._problems_under_conventions:
            reading = problem_under_conventions(problem, self._conventions) if self._conventions else None
            read = problem if reading is None else reading.problem
            self._problems_under_conventions[id(problem)] = problem, read
        return self._problems_under_conventions[id(problem)][1]

    def _call_under_conventions(self, problem: Problem) -> Problem:
        """Return the call by which the function computes ``problem``. Raises ``_MissingResult`` if there is none."""
        call = rewrite_for_conventions(problem, self._conventions) if self._conventions else problem
        if call is None:
            declared = ", ".join(f"{name}={value}" for name, value in self._conventions.items())
            reason = f"declares {declared}, by which no call means what the property asks"
            raise _MissingResult(Failure("unsupported", reason), "the first call")
        return call

    def _judge_session(self, variant: SessionVariant) -> VariantResult:
        answer = self._shared_worker.evaluate_session(variant.session)
        if isinstance(answer, Failure):
            raise _MissingResult(answer, variant.description)
        judged = list(self._judge_memory_changes(variant, answer)) if variant.problem is not None else []
        judged += [self._judge_pair(pair, answer) for pair in variant.pairs]
        return max(judged, key=lambda result: result.verdict.severity)

    def _judge_memory_changes(self, variant: SessionVariant, answer: Sequence[StepResult]) -> Iterator[VariantResult]:
        """Judge if a call changed its inputs, or if its output changed or shares memory with them."""
        result = answer[0]
        is_of_inputs = self._question.name == "inputs_unchanged"
        changed = result.changed_inputs if is_of_inputs else result.altered_stages
        if not isinstance(result.outcome, Computed) and not changed:
            raise _MissingResult(result.outcome, variant.description)
        when = "after the call" if is_of_inputs else "after the next call"
        for element in changed:
            at, place = format_element(element.index, element.name), (element.name, format_index(element.index))
            message = f"{at} is {element.after:.9g} {when}, and was {element.before:.9g}"
            yield VariantResult(PropertyOutcome.BROKEN, message, *place, element.before, element.after)
        for stage, name in () if is_of_inputs else result.stages_sharing_inputs:
            yield VariantResult(PropertyOutcome.BROKEN, f"{stage} is memory of the input {name}", stage)
        yield VariantResult(PropertyOutcome.BITWISE, f"as before: {variant.description}")

    def _judge_pair(self, pair: ResultPair, answer: Sequence[StepResult]) -> VariantResult:
        stages = result_stage_names(pair.problem)
        second = _returned_stages(answer[pair.second_step].outcome, stages, pair.description)
        if pair.first_step is None:
            if id(pair.problem) not in self._new_process_outcomes:  # one call in a new process serves all pairs
                with self._new_worker() as runner:
                    self._new_process_outcomes[id(pair.problem)] = runner.evaluate(call_returning(pair.problem))
            first = _returned_stages(
                self._new_process_outcomes[id(pair.problem)], stages, f"{pair.description}, in a process of its own"
            )
        else:
            first = _returned_stages(answer[pair.first_step].outcome, stages, "the first call")
        again = PropertyVariant(
            pair.description, (FurtherCall(pair.description, self._problem_under_conventions(pair.problem)),)
        )
        return judge_variant(
            again, self._problem_under_conventions(pair.problem), first, [second], self._model, self._truths
        )


class _MissingResult(Exception):
    """A call returned no result to judge."""

    def __init__(self, outcome: Outcome, description: str) -> None:
        assert isinstance(outcome, Failure), "a call that gave a result is judged"
        kind = PropertyOutcome.UNSUPPORTED if outcome.verdict == "unsupported" else PropertyOutcome.FAILED
        self.result = VariantResult(kind, f"{outcome.verdict}: {outcome.message} ({description})")
        super().__init__(self.result.message)


def _returned_stages(outcome: Outcome, stages: Sequence[str], description: str) -> StageArrays:
    """Return the stages that a call returned. Raises ``_MissingResult``."""
    if isinstance(outcome, Failure):
        raise _MissingResult(outcome, description)
    if missing := [stage for stage in stages if stage not in outcome.stages]:
        raise _MissingResult(Failure("unsupported", f"returns no {missing[0]}"), description)
    return dict(outcome.stages)


def select_property_cases(
    patterns: Sequence[str], expected_failure_lists: Sequence[Path] = (), store: Store = NO_STORE
) -> CaseSelection:
    """Read the named cases with properties: by default the bundled ones, and those of the project.

    Raises ``UsageError`` as ``select_cases`` does.
    """
    config = read_config()
    named = patterns or (PROPERTIES_FILE, *config.cases)
    return select_cases(
        named, expected_failures=(*config.expected_failure_lists, *expected_failure_lists), store=store, properties=True
    )


def run_properties(
    implementations: Sequence[Implementation],
    questions: Sequence[PropertyQuestion],
    request: PropertyRequest,
    expected_failure_lists: Sequence[Path] = (),
    *,
    complete: bool = False,
) -> list[Row]:
    """Test every property, and mark expected failures.

    If the questions are ``complete``, an expected failure that no longer happens is outdated, and fails. Raises
    ``CaseError`` for lists that cannot be read.
    """
    backends = [item.entry.name for item in implementations]
    expected = [
        entry
        for entry in load_expected_failures_of(backends, expected_failure_lists)
        if entry.entry.property is not None
    ]
    rows = [mark_expected_failure(row, expected) for row in judge_implementations(implementations, questions, request)]
    outdated = []
    for entry in expected if complete else ():
        asked = [row for row in rows if _expects_failure_of(entry, row) and row.verdict in _JUDGED_OUTCOMES]
        if asked and entry.must_still_happen and not any(row.verdict == PropertyOutcome.BROKEN for row in asked):
            message = f"an expected failure ({entry.location}) no longer happens; remove it"
            outdated.append(replace(asked[0], verdict=PropertyOutcome.XPASS.value, message=message, claim=""))
    return [*rows, *outdated]


def mark_expected_failure(row: Row, expected: Iterable[ExpectedFailure]) -> Row:
    """Mark a failing row with the expected failure that covers it, if any."""
    entry = next((listed for listed in expected if _expects_failure_of(listed, row)), None)
    if entry is None or row.verdict != PropertyOutcome.BROKEN:
        return row
    return replace(row, xfail=True, message=f"{row.message}; expected: {entry.entry.reason}")


def _expects_failure_of(expected: ExpectedFailure, row: Row) -> bool:
    return expected.applies_to_evaluation(row.implementation, row.case, row.dtype, row.property_name)


_JUDGED_OUTCOMES = (PropertyOutcome.BITWISE, PropertyOutcome.WITHIN_BOUNDS, PropertyOutcome.NAN, PropertyOutcome.BROKEN)


def describe_call(question: PropertyQuestion) -> str:
    """Describe the first call of a question in a line."""
    problem = question.problem
    shapes = [f"{name} {'x'.join(map(str, array.shape))}" for name, array in problem.inputs.items()]
    options = [f"{name}={value}" for name, value in problem.options.items()]
    return f"{problem.operation}({', '.join([*shapes, *options])}) in {question.dtype}"
