"""Properties asked of implementations: which cases ask for them, the calls in workers, and the rows that come back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attncheck.asking.engine import Workers
from attncheck.common.errors import CaseError, Diagnostic
from attncheck.common.store import NO_STORE, Store
from attncheck.common.wording import stored_index, written_element
from attncheck.diagnosis.declared import read_as_declared, rewrite_for_conventions
from attncheck.execution.call import Limits
from attncheck.execution.implementations import Implementation
from attncheck.execution.runner import GroupRunner
from attncheck.execution.sessions import StepResult
from attncheck.execution.worker import Computed, Failure, Outcome
from attncheck.properties.calls import VARIANTS_OF
from attncheck.properties.judging import Results, Truths, VariantResult, judge_variant
from attncheck.properties.variants import (
    AnyVariant,
    FurtherCall,
    Pair,
    PropertyVariant,
    SaysNothing,
    SessionVariant,
    call_for,
    result_of,
)
from attncheck.reading.case import Case
from attncheck.reading.expected_failures import ExpectedFailure
from attncheck.reading.inputs import convert_inputs, make_exact_inputs, problem_of
from attncheck.reading.problem import Problem
from attncheck.reading.selection import PROPERTIES_FILE, Selection, select_cases
from attncheck.results.format import Row
from attncheck.settings.config import expected_failures_of, read_config
from attncheck.spec.verdicts import PropertyOutcome

_WITH_NEGATIVE_STRIDES = "numpy"
"""The only framework whose arrays have them; every other copies what it is given."""


@dataclass(frozen=True, eq=False)
class PropertyQuestion:
    """A property asked of a case in a dtype: the first call, and the ways in which further ones are made."""

    name: str
    case: Case
    dtype: str
    problem: Problem
    variants: Sequence[AnyVariant]


@dataclass(frozen=True)
class Asking:
    """The properties by name and the dtypes that are asked for, all where none are named, and the limits of workers."""

    names: Collection[str] = ()
    dtypes: Collection[str] = ()
    limits: Limits = field(default_factory=Limits)
    store: Store = NO_STORE


def questions_of(cases: Sequence[Case], asking: Asking) -> list[PropertyQuestion]:
    """Return every property that the cases ask for, by dtype. Raises ``CaseError`` for those that do not fit."""
    faults: list[Diagnostic] = []
    found = []
    for case in cases:
        exact = make_exact_inputs(case)
        for dtype in case.dtypes:
            if asking.dtypes and dtype not in asking.dtypes:
                continue
            problem = problem_of(case, convert_inputs(case, exact, dtype))
            for name in (name for name in case.properties if not asking.names or name in asking.names):
                try:
                    found.append(PropertyQuestion(name, case, dtype, problem, VARIANTS_OF[name](problem)))
                except SaysNothing as error:
                    message = f"{name}: {error} ({dtype})"
                    faults.append(Diagnostic(case.file, message, case.line, case.name, "properties"))
    if faults:
        raise CaseError(faults)
    return found


def ask_implementations(
    implementations: Sequence[Implementation], questions: Sequence[PropertyQuestion], asking: Asking
) -> list[Row]:
    """Ask every property of every implementation, in worker processes."""
    truths = Truths(asking.store)
    return [row for each in implementations for row in _ask(each, questions, asking.limits, truths)]


def _ask(
    implementation: Implementation, questions: Sequence[PropertyQuestion], limits: Limits, truths: Truths
) -> Iterator[Row]:
    for dtype in dict.fromkeys(question.dtype for question in questions):
        own = [question for question in questions if question.dtype == dtype]
        model = implementation.rounding_model(dtype)
        if model is None:
            lacking = VariantResult(PropertyOutcome.UNSUPPORTED, f"declares no {dtype}")
            yield from (_row(implementation, question, "", lacking) for question in own)
            continue
        with closing(Workers(limits, probes_state=False)) as workers:
            for question in own:
                judge = _VariantJudge(implementation, question, workers, truths)
                for variant in question.variants:
                    yield _row(implementation, question, variant.what, judge.finding(variant))


def _row(implementation: Implementation, question: PropertyQuestion, variant: str, finding: VariantResult) -> Row:
    claim: str = getattr(implementation.entry, "properties", {}).get(question.name, "")
    place = (question.case.id, question.case.operation, question.dtype, implementation.name)
    row = Row(*place, comparison="property", property_name=question.name, variant=variant, claim=claim, **vars(finding))
    if row.fails and row.verdict != PropertyOutcome.BROKEN:
        return replace(row, message=f"claimed to be {row.claim}, and is {row.verdict}: {row.message}")
    return row


class _VariantJudge:
    """One question of one implementation; its first call is made once, for all variants."""

    def __init__(
        self, implementation: Implementation, question: PropertyQuestion, workers: Workers, truths: Truths
    ) -> None:
        self._implementation, self._question, self._workers, self._truths = implementation, question, workers, truths
        self._model = implementation.rounding_model(question.dtype) or "none"
        self._conventions = implementation.reads_calls_as
        self._read: dict[int, tuple[Problem, Problem]] = {}  # by problem, which stays alive
        self._first: dict[tuple[str, ...], Outcome] = {}
        self._alone: dict[int, Outcome] = {}  # by problem; the question holds them all

    def finding(self, variant: AnyVariant) -> VariantResult:
        """Make the calls of a variant, and judge what comes back."""
        try:
            return self._of_session(variant) if isinstance(variant, SessionVariant) else self._of_calls(variant)
        except _NoResult as reason:
            return reason.finding

    @property
    def _usual(self) -> GroupRunner[Any]:
        """The worker of calls that need nothing of their own."""
        return self._worker(None)

    def _worker(self, threads: int | None) -> GroupRunner[Any]:
        return self._workers.worker_for(self._implementation, self._question.dtype, threads)

    def _fresh(self) -> AbstractContextManager[GroupRunner[Any]]:
        return self._workers.fresh(self._implementation, self._question.dtype)

    def _of_calls(self, variant: PropertyVariant) -> VariantResult:
        question, usual = self._question, self._usual
        framework = self._implementation.entry.framework
        kinds = {kind for call in variant.calls for kind in call.problem.memory_layout.values()}
        if "reversed" in kinds and framework != _WITH_NEGATIVE_STRIDES:
            return VariantResult(PropertyOutcome.UNSUPPORTED, f"{framework} has no negative strides")
        stages = variant.stages or result_of(question.problem)
        if stages not in self._first:
            self._first[stages] = usual.evaluate(call_for(self._call_of(question.problem), stages))
        first = _results(self._first[stages], stages, "the first call")
        own = self._worker(variant.threads) if variant.where == "threads" else usual
        with self._fresh() if variant.where == "fresh process" else nullcontext(own) as runner:
            others = [
                _results(runner.evaluate(call_for(self._call_of(call.problem), stages)), stages, call.what)
                for call in variant.calls
            ]
        return judge_variant(variant, question.problem, first, others, self._model, self._truths)

    def _as_read(self, problem: Problem) -> Problem:
        """Return the problem that the function computes if it is called with ``problem``, by its declarations."""
        if id(problem) not in self._read:
            found = read_as_declared(problem, self._conventions) if self._conventions else None
            read = problem if found is None else found.problem
            self._read[id(problem)] = problem, read
        return self._read[id(problem)][1]

    def _call_of(self, problem: Problem) -> Problem:
        """Return the call by which the function computes ``problem``. Raises ``_NoResult`` if there is none."""
        call = rewrite_for_conventions(problem, self._conventions) if self._conventions else problem
        if call is None:
            declared = ", ".join(f"{name}={value}" for name, value in self._conventions.items())
            reason = f"declares {declared}, by which no call means what the property asks"
            raise _NoResult(Failure("unsupported", reason), "the first call")
        return call

    def _of_session(self, variant: SessionVariant) -> VariantResult:
        answer = self._usual.evaluate_session(variant.session)
        if isinstance(answer, Failure):
            raise _NoResult(answer, variant.what)
        judged = list(self._of_memory(variant, answer)) if variant.problem is not None else []
        judged += [self._of_pair(pair, answer) for pair in variant.pairs]
        return max(judged, key=lambda result: result.verdict.severity)

    def _of_memory(self, variant: SessionVariant, answer: Sequence[StepResult]) -> Iterator[VariantResult]:
        """Judge what a call did to its inputs, and what became of its output."""
        result = answer[0]
        is_of_inputs = self._question.name == "inputs_unchanged"
        changed = result.changed if is_of_inputs else result.altered
        if not isinstance(result.outcome, Computed) and not changed:
            raise _NoResult(result.outcome, variant.what)
        when = "after the call" if is_of_inputs else "after the next call"
        for element in changed:
            at, place = written_element(element.index, element.name), (element.name, stored_index(element.index))
            message = f"{at} is {element.after:.9g} {when}, and was {element.before:.9g}"
            yield VariantResult(PropertyOutcome.BROKEN, message, *place, element.before, element.after)
        for stage, name in () if is_of_inputs else result.shared:
            yield VariantResult(PropertyOutcome.BROKEN, f"{stage} is memory of the input {name}", stage)
        yield VariantResult(PropertyOutcome.BITWISE, f"as before: {variant.what}")

    def _of_pair(self, pair: Pair, answer: Sequence[StepResult]) -> VariantResult:
        stages = result_of(pair.problem)
        second = _results(answer[pair.other].outcome, stages, pair.what)
        if pair.one is None:
            first = _results(self._in_own_process(pair.problem), stages, f"{pair.what}, in a process of its own")
        else:
            first = _results(answer[pair.one].outcome, stages, "the first call")
        again = PropertyVariant(pair.what, (FurtherCall(pair.what, self._as_read(pair.problem)),))
        return judge_variant(again, self._as_read(pair.problem), first, [second], self._model, self._truths)

    def _in_own_process(self, problem: Problem) -> Outcome:
        """Make a call in a process that has done nothing else; once, however many calls are compared with it."""
        if id(problem) not in self._alone:
            with self._fresh() as runner:
                self._alone[id(problem)] = runner.evaluate(call_for(problem))
        return self._alone[id(problem)]


class _NoResult(Exception):
    """A call gave nothing to judge."""

    def __init__(self, outcome: Outcome, what: str) -> None:
        assert isinstance(outcome, Failure), "a call that gave a result is judged"
        kind = PropertyOutcome.UNSUPPORTED if outcome.verdict == "unsupported" else PropertyOutcome.FAILED
        self.finding = VariantResult(kind, f"{outcome.verdict}: {outcome.message} ({what})")
        super().__init__(self.finding.message)


def _results(outcome: Outcome, stages: Sequence[str], what: str) -> Results:
    """Return the stages that came back. Raises ``_NoResult``."""
    if isinstance(outcome, Failure):
        raise _NoResult(outcome, what)
    if missing := [stage for stage in stages if stage not in outcome.stages]:
        raise _NoResult(Failure("unsupported", f"returns no {missing[0]}"), what)
    return dict(outcome.stages)


def select_property_cases(patterns: Sequence[str], lists: Sequence[Path] = (), store: Store = NO_STORE) -> Selection:
    """Read the cases with properties that are named: by default those bundled, and the project's own.

    Raises ``UsageError`` as ``select_cases`` does.
    """
    config = read_config()
    named = patterns or (PROPERTIES_FILE, *config.cases)
    return select_cases(named, expected_failures=(*config.expected_failure_lists, *lists), store=store, properties=True)


def ask_properties(
    implementations: Sequence[Implementation],
    questions: Sequence[PropertyQuestion],
    asking: Asking,
    lists: Sequence[Path] = (),
    *,
    complete: bool = False,
) -> list[Row]:
    """Ask every property, and mark what was expected to fail.

    Where the questions are ``complete``, an expected failure that shows in none of them is outdated, and fails. Raises
    ``CaseError`` for lists that cannot be read.
    """
    backends = [item.entry.name for item in implementations]
    expected = [each for each in expected_failures_of(backends, lists) if each.entry.property is not None]
    rows = [marked(row, expected) for row in ask_implementations(implementations, questions, asking)]
    return [*rows, *(_no_longer(rows, expected) if complete else ())]


def marked(row: Row, expected: Iterable[ExpectedFailure]) -> Row:
    """Mark a row that fails as a list of expected failures says, and say why."""
    entry = next((each for each in expected if _concerns(each, row)), None)
    if entry is None or row.verdict != PropertyOutcome.BROKEN:
        return row
    return replace(row, xfail=True, message=f"{row.message}; expected: {entry.entry.reason}")


def _concerns(expected: ExpectedFailure, row: Row) -> bool:
    return expected.concerns(row.implementation, row.case, row.dtype, row.property_name)


def _no_longer(rows: Sequence[Row], expected: Sequence[ExpectedFailure]) -> list[Row]:
    """Return a failing row for every entry that was asked for and did not happen."""
    found = []
    for each in expected:
        asked = [row for row in rows if _concerns(each, row) and row.verdict in _JUDGED]
        if asked and each.must_happen and not any(row.verdict == PropertyOutcome.BROKEN for row in asked):
            message = f"an expected failure ({each.location}) no longer happens; remove it"
            found.append(replace(asked[0], verdict=PropertyOutcome.XPASS.value, message=message, claim=""))
    return found


_JUDGED = (PropertyOutcome.BITWISE, PropertyOutcome.WITHIN_BOUNDS, PropertyOutcome.NAN, PropertyOutcome.BROKEN)


def described_call(question: PropertyQuestion) -> str:
    """Describe the first call of a question in a line."""
    problem = question.problem
    shapes = [f"{name} {'x'.join(map(str, array.shape))}" for name, array in problem.inputs.items()]
    given = [f"{name}={value}" for name, value in problem.options.items()]
    return f"{problem.operation}({', '.join([*shapes, *given])}) in {question.dtype}"
