"""The diagnosis of failing implementations, decided when all is judged, by all failing cases of each together.

A row is written as its case is judged: verdict and numbers, and not why. Why takes several exact answers, and one case
seldom tells. So of each operation, first failing stage and verdict the simplest cases are examined, until one reading
is named by ``SETTLED`` of them and refuted by none (``diagnosis.decision``). It is handed on to the other cases that it
explains (``diagnosis.wrong_result``), and what it does not explain is examined next. Where several cases in a row say
nothing, the rest is left without a name; ``attncheck explain`` says of each what that case says by itself.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from attncheck.common.errors import ResultsError
from attncheck.common.store import UnreadableEntry
from attncheck.common.wording import AND, BY_ITSELF
from attncheck.diagnosis.case_evidence import Evidence, Fit
from attncheck.diagnosis.decision import (
    ACCURACY,
    CERTAIN,
    MOST,
    NAMELESS,
    OR,
    Decision,
    Wording,
    decide,
    fit_of,
    reworded,
)
from attncheck.diagnosis.on_demand import DIAGNOSIS
from attncheck.execution.worker import Computed
from attncheck.judging.remembered import key_of
from attncheck.judging.units import Evaluation, Judge, is_undiagnosed
from attncheck.planning.plan import Plan, Unit
from attncheck.reading.case import Case
from attncheck.reading.inputs import problem_of
from attncheck.reading.problem import Problem
from attncheck.reading.shapes import score_elements
from attncheck.results.format import CHANGED_BY_DIAGNOSIS, Row
from attncheck.results.parts import ArrayParts
from attncheck.spec import DTYPES, EMPTY_ROWS
from attncheck.spec.verdicts import WRONG_NUMBERS, Verdict

if TYPE_CHECKING:
    from attncheck.diagnosis.compositions import ComposedCase
    from attncheck.diagnosis.examine import ExaminedOutcome

SETTLED = 3
"""Cases that name the same before it is handed on to others."""
MAX_EXAMINED = 24
"""Cases of one operation, stage and verdict that are examined."""
MAX_SCORES = 1 << 17
"""Elements of a score matrix up to which anything is handed on to a case."""
MAX_NAMELESS = 6
"""Cases one after the other that fit nothing, until the rest is left without a name."""
MANY_NUMBERS = 64
"""Numbers of a stage from which an accuracy is told; of the simplest cases, few have so many."""

Returned: TypeAlias = Callable[[Evaluation], Computed | None]
"""Gives what was returned, where it is still known."""


@dataclass(frozen=True, eq=False)
class FailingEvaluation:
    """One failing evaluation: the rows of its failing stages as they were judged, and what was returned, if known.

    ``right`` are the stages that do not fail.
    """

    unit: Unit
    case: Case
    rows: tuple[Row, ...]
    returned: Computed | None
    right: frozenset[str]

    @property
    def key(self) -> Evaluation:
        """The evaluation: implementation, case and dtype."""
        return _evaluation(self.rows[0])

    @property
    def kind(self) -> tuple[str, str, str]:
        """Operation, first failing stage and verdict: cases that share them are examined together."""
        first = self.rows[0]
        return first.operation, first.stage, Verdict(first.verdict).value

    @property
    def simplicity(self) -> tuple[int, int, int, int]:
        """Sort key: how many elements the inputs have, how much is given, and the place in the plan."""
        shapes = self.case.input_shapes
        given = len(shapes) + sum(value is not None for value in self.case.options.values())
        elements = sum(math.prod(shape) for shape in shapes.values())
        return elements, given, self.unit.case, DTYPES.index(self.unit.dtype)

    @property
    def numbers(self) -> int:
        """How many numbers were returned of the first stage that fails."""
        return 0 if self.returned is None else self.returned.stages[self.rows[0].stage].size

    @property
    def is_whole(self) -> bool:
        """True if all query rows were judged."""
        return all(row.judged_rows is None for row in self.rows)

    @property
    def nothing(self) -> Evidence:
        """The evidence of a case that says nothing."""
        return Evidence((), frozenset(), self.rows[0].stage, self.case.operation)


@dataclass(frozen=True)
class ReturnedStages:
    """Returned stages of failing evaluations: from memory, else from the arrays that an earlier run kept."""

    directory: Path
    known: Mapping[Evaluation, Computed]

    def __call__(self, evaluation: Evaluation) -> Computed | None:
        """Return what one implementation returned for a case in a dtype; None where nobody knows any more."""
        if evaluation in self.known:
            return self.known[evaluation]
        name, case, dtype = evaluation
        try:
            stages = {stage: array for (of, stage), array in self._kept.of(case, dtype).items() if of == name}
        except ResultsError:
            return None
        return Computed(stages) if stages else None

    @cached_property
    def _kept(self) -> ArrayParts:
        return ArrayParts(self.directory)


Ask: TypeAlias = Callable[[str], Sequence[str]]
"""Gives the names of readings that an implementation shows when it is asked by itself (``conventions.py``)."""


Judged: TypeAlias = Mapping[str, Collection[str]]
"""The cases in which each implementation was judged."""


def diagnose(
    rows: Sequence[Row],
    plan: Plan,
    judge: Judge,
    returned: Returned,
    ask: Ask = lambda name: (),
    judged: Judged = MappingProxyType({}),
) -> list[Row]:
    """Name in the failing rows of a run what implementations do instead; the rows come back in their order.

    Implementations of which cases are left without a name are asked by themselves. Workers answer in any order, which
    counts for nothing. Cases that were ``judged`` and do not fail say where a reading does not hold.
    """
    order = sorted(range(len(rows)), key=lambda number: _sort_key(rows[number]))
    found = _diagnose([rows[number] for number in order], plan, judge, returned, ask, judged)
    return [row for _, row in sorted(zip(order, found, strict=True), key=lambda each: each[0])]


def _sort_key(row: Row) -> tuple[str, ...]:
    parts = (*_evaluation(row), row.comparison, row.stage, row.other, row.called, row.index, row.message)
    return tuple(part or "" for part in parts)


def _diagnose(rows: Sequence[Row], plan: Plan, judge: Judge, returned: Returned, ask: Ask, judged: Judged) -> list[Row]:
    """Diagnose rows in a certain order; the same failures are not diagnosed again while the store knows them."""
    failing = _failing(rows, plan, returned)
    if not failing:
        return list(rows)

    def compute() -> list[Row]:
        searches = _Searches(plan, judge, ask)
        evidence = searches.evidence
        for name in dict.fromkeys(each.key[0] for each in failing):
            searches.search([each for each in failing if each.key[0] == name])
        decisions = _decided(searches.evidence)
        decisions |= searches.composed([each for each in failing if decisions[each.key].fit is None], decisions)
        failed = {(row.implementation, row.case) for row in rows}
        conditions = _Conditions(plan, judge, judged, failed)
        decisions = _without_few_accuracies(decisions)
        decisions = conditions.added({each.key: each for each in failing}, decisions, evidence)
        nameless = (key for key in evidence if decisions[key] == NAMELESS)
        by_itself = {key: fit.description for key in nameless if (fit := decide({"": evidence[key]})[""].fit)}
        final = [_final(row, decisions.get(_evaluation(row)), searches.examined) for row in rows]
        return follow([_with_hint(row, by_itself.get(_evaluation(row), "")) for row in final])

    def key() -> object:
        inputs = [plan.inputs(each.unit) for each in failing]
        stages = [None if each.returned is None else replace(each.returned, seconds=None) for each in failing]
        passed = {name: sorted(cases) for name, cases in judged.items()}
        digests = [each.case.digest for each in failing]
        return [[replace(row, seconds=None) for row in rows], digests, inputs, stages, sorted(passed.items())]

    found: list[Row] = judge.store.remembered(
        lambda: key_of("diagnoses", key()),
        compute,
        lambda after: json.dumps([[getattr(row, name) for name in CHANGED_BY_DIAGNOSIS] for row in after]).encode(),
        lambda data: _with_changes(rows, data),
    )
    return found


def _with_changes(rows: Sequence[Row], data: bytes) -> list[Row]:
    try:
        changes = [dict(zip(CHANGED_BY_DIAGNOSIS, each, strict=True)) for each in json.loads(data)]
        return [
            replace(row, **{**each, "verdict": Verdict(each["verdict"])})
            for row, each in zip(rows, changes, strict=True)
        ]
    except (ValueError, TypeError, KeyError) as error:
        raise UnreadableEntry from error


def _evaluation(row: Row) -> Evaluation:
    return row.implementation, row.case, row.dtype


def _failing(rows: Sequence[Row], plan: Plan, returned: Returned) -> list[FailingEvaluation]:
    """Return the evaluations that are to be diagnosed, the simplest first."""
    found: dict[Evaluation, list[Row]] = defaultdict(list)
    failed: dict[Evaluation, set[str]] = defaultdict(set)
    for row in rows:
        failed[_evaluation(row)].add(row.stage)
        if is_undiagnosed(row):
            found[_evaluation(row)].append(row)
    units = {(plan.case(unit).id, unit.dtype): unit for unit in plan} if found else {}
    failing = []
    for key, of in found.items():
        if (unit := units.get(key[1:])) is not None:
            computed = returned(key)
            right = frozenset() if computed is None else frozenset(computed.stages.keys() - failed[key])
            failing.append(FailingEvaluation(unit, plan.case(unit), tuple(of), computed, right))
    return sorted(failing, key=lambda each: each.simplicity)


@dataclass(eq=False)
class _Searches:
    """Evidence of the examined cases, one implementation after the other, and of those that it is handed on to."""

    plan: Plan
    judge: Judge
    ask: Ask
    evidence: dict[Evaluation, Evidence] = field(default_factory=dict)
    examined: dict[Evaluation, Mapping[str, Row]] = field(default_factory=dict)
    """The rows by stage as the case names its fault by itself."""

    def search(self, failing: Sequence[FailingEvaluation]) -> None:
        """Examine cases of each kind until what they name is settled, and hand it on."""
        settled: dict[str, dict[str, float | None]] = defaultdict(dict)
        kinds: dict[tuple[str, str, str], list[FailingEvaluation]] = defaultdict(list)
        for each in failing:
            kinds[each.kind].append(each)
        for kind, members in sorted(kinds.items(), key=lambda entry: -len(entry[1])):
            self._search_kind(members, settled[kind[0]])

    def _search_kind(self, members: Sequence[FailingEvaluation], settled: dict[str, float | None]) -> None:
        """Examine the simplest; ``settled`` are the readings that are handed on, with the numbers that were fitted."""
        left = self._without_explained(members, settled)
        examined: list[FailingEvaluation] = []
        nameless, least = 0, 0
        while left and len(examined) < MAX_EXAMINED:
            if nameless == MAX_NAMELESS and not any(each.numbers >= MANY_NUMBERS for each in examined[-MAX_NAMELESS:]):
                nameless, least = 0, MANY_NUMBERS
            seen = {each.case.id for each in examined}
            possible = [one for one in left if one.numbers >= least]
            if nameless == MAX_NAMELESS or not possible:
                break
            each = next((one for one in possible if one.case.id not in seen), possible[0])
            left.remove(each)
            if not self._examine(each):
                continue
            examined.append(each)
            nameless = 0 if self.evidence[each.key].fits else nameless + 1
            if names := self._agreed(examined, settled):
                settled |= names
                left = self._without_explained(left, names)
                # Few numbers tell no accuracy by themselves.
                self._without_explained([one for one in examined if not self.evidence[one.key].fits], names)
        self.evidence |= {each.key: each.nothing for each in left}

    def _examine(self, each: FailingEvaluation) -> bool:
        """Take up what a case says by itself; false where what was returned is not known any more."""
        self.evidence[each.key] = each.nothing
        if each.returned is None:
            return False
        examined = self._examined(each, each.returned)
        self.evidence[each.key] = examined.evidence or each.nothing
        self.examined[each.key] = {row.stage: row for row in examined.rows}
        return True

    def _examined(self, each: FailingEvaluation, returned: Computed) -> ExaminedOutcome:
        """Judge one implementation again, and say what it does instead."""
        from attncheck.diagnosis.examine import examine
        from attncheck.judging.truth import truth_of_case
        from attncheck.judging.xfail import blank_row

        (name, _, dtype), judge = each.key, self.judge
        truth = truth_of_case(each.case, self.plan.inputs(each.unit), returned.stages, judge.store)
        return examine(
            replace(blank_row(each.case, dtype), implementation=name),
            each.case,
            DIAGNOSIS.truth_as_declared(truth, judge.declared_conventions(name)),
            returned,
            judge.rounding_model(name, dtype),
            judge.known_of(each.case, dtype, name, returned),
        )

    def _agreed(self, examined: Sequence[FailingEvaluation], settled: Mapping[str, object]) -> dict[str, float | None]:
        """Return what enough of the examined cases name, if it is new, and nothing that any of them refutes."""
        decisions = decide({key: each for key, each in self.evidence.items() if key[0] == examined[0].key[0]})
        named: dict[str, dict[str, list[Fit]]] = {}
        for each in examined:
            if fit := decisions[each.key].fit:
                named.setdefault(fit.name, {}).setdefault(each.case.id, []).append(fit)
        for name, by_case in named.items():
            if len(by_case) >= SETTLED and not settled.keys() >= set(name.split(OR)):
                factor = _common_factor([fit.factor for fits in by_case.values() for fit in fits])
                return dict.fromkeys(name.split(OR), factor)
        return {}

    def _without_explained(
        self, left: Sequence[FailingEvaluation], names: Mapping[str, float | None]
    ) -> list[FailingEvaluation]:
        """Hand readings on to the cases that they explain, and return the others."""
        return [each for each in left if not (names and self._explain(each, names))]

    def _explain(self, each: FailingEvaluation, names: Mapping[str, float | None]) -> bool:
        from attncheck.diagnosis.declared import read_as_declared
        from attncheck.diagnosis.wrong_result import FailingCase

        if each.returned is None or not each.is_whole:
            return False
        inputs, dtype = self.plan.inputs(each.unit), each.unit.dtype
        if self._is_large(each):
            return False
        stages, failing = each.returned.stages, {row.stage for row in each.rows}
        problem = problem_of(each.case, inputs)
        reading = read_as_declared(problem, self.judge.declared_conventions(each.key[0]))
        case = FailingCase(
            *(problem if reading is None else reading.problem, dtype),
            {stage: array for stage, array in stages.items() if stage in failing},
            {stage: array for stage, array in stages.items() if stage in each.right},
            self.judge.rounding_model(each.key[0], dtype),
        )
        stage = each.rows[0].stage
        fits = tuple(fit_of(found, stage) for found in case.explained_by(names))
        if fits:
            self.evidence[each.key] = Evidence(fits, frozenset(), stage, each.case.operation)
        return bool(fits)

    def composed(
        self, unnamed: Sequence[FailingEvaluation], decisions: Mapping[Evaluation, Decision]
    ) -> dict[Evaluation, Decision]:
        """Name cases by the readings that others show: several at once, and then one more beside them."""
        known: dict[str, Counter[str]] = {}
        for key, decision in decisions.items():
            fit = decision.fit
            if fit is not None and not fit.name.startswith(ACCURACY):
                known.setdefault(key[0], Counter())[fit.name] += 1
        found: dict[Evaluation, Decision] = {}
        for name in dict.fromkeys(each.key[0] for each in unnamed):
            cases = {each.key: case for each in unnamed if each.key[0] == name and (case := self._composed_case(each))}
            fits = self._composed_fits(name, cases, known.get(name, Counter()))
            shared = Counter(fit.name for fit in fits.values())
            # What one case alone does not tell from something else stays as it was written, with both.
            found |= {
                key: Decision(fit) for key, fit in fits.items() if not decisions[key].stands or shared[fit.name] > 1
            }
        return found

    def _composed_fits(
        self, name: str, cases: Mapping[Evaluation, ComposedCase], counts: Counter[str]
    ) -> dict[Evaluation, Fit]:
        """Compose what cases name, and if some are left without a name, what the implementation is asked for, too."""
        from attncheck.diagnosis.compositions import compose

        found = compose(cases, counts)
        left = {key: case for key, case in cases.items() if key not in found}
        known = counts.keys() | {part for fit in found.values() for part in fit.name.split(AND)}
        more = [each for each in (self.ask(name) if left else ()) if each not in known]
        return found | (compose(left, Counter([*counts.elements(), *known, *more])) if more else {})

    def _composed_case(self, each: FailingEvaluation) -> ComposedCase | None:
        """Return a failing case with its exact answer; None where it is large, or not all of it is known."""
        from attncheck.diagnosis.compositions import ComposedCase
        from attncheck.diagnosis.declared import truth_as_declared
        from attncheck.diagnosis.wrong_result import WrongResult
        from attncheck.judging.truth import truth_of_case

        name, _, dtype = each.key
        if each.returned is None or not each.is_whole or self._is_large(each):
            return None
        stages, failing = each.returned.stages, {row.stage for row in each.rows}
        truth = truth_of_case(each.case, self.plan.inputs(each.unit), stages, self.judge.store)
        truth = truth_as_declared(truth, self.judge.declared_conventions(name)).for_returned(stages)
        if not failing <= truth.exact.keys():
            return None
        failed, right = ({stage: stages[stage] for stage in names & stages.keys()} for names in (failing, each.right))
        wrong = WrongResult(truth, failed, self.judge.rounding_model(name, dtype), right)
        return ComposedCase(wrong, each.rows[0].stage, each.case.operation)

    def _is_large(self, each: FailingEvaluation) -> bool:
        arrays = self.plan.inputs(each.unit).arrays
        return score_elements(each.case.operation, each.case.options, arrays) > MAX_SCORES


_MOST_PASSING = 96
"""Cases that pass of which it is asked whether a reading would show in them: the first ones."""
_MAX_PASSING_SCORES = 1 << 13


@dataclass(frozen=True)
class _Conditions:
    """Finds out where readings do not hold, by the cases that pass."""

    plan: Plan
    judge: Judge
    judged: Judged
    failed: Collection[tuple[str, str]]

    def added(
        self,
        failing: Mapping[Evaluation, FailingEvaluation],
        decisions: Mapping[Evaluation, Decision],
        evidence: Mapping[Evaluation, Evidence],
    ) -> dict[Evaluation, Decision]:
        """Add conditions to readings. A reading that passing cases refute is a mistake and no convention.

        One that passing cases refute, and that names few cases beside another that names many, is none at all: the odd
        case of one fault often looks like another.
        """
        of_reading: dict[tuple[str, str, str], list[Evaluation]] = defaultdict(list)
        fits: dict[Evaluation, Fit] = {}
        for key, decision in decisions.items():
            fit = _meant_by_itself(evidence[key]) if decision.stands and key in evidence else decision.fit
            if fit is not None and key in failing and _may_have_condition(fit):
                of_reading[key[0], failing[key].case.operation, fit.name].append(key)
                fits[key] = fit
        found = dict(decisions)
        named = Counter((key[0], decision.fit.name) for key, decision in decisions.items() if decision.fit is not None)
        most = {name: max(count for (of, _), count in named.items() if of == name) for name, _ in named}
        for (name, operation, reading), keys in of_reading.items():
            from attncheck.diagnosis.conditions import condition_of  # of which a run without failures has no need

            passing = self._passing(name, operation, reading)
            explained = {failing[key].case.id: self._problem(name, failing[key].unit) for key in keys}
            if (condition := condition_of([*explained.values()], passing)) is None:
                continue
            if not condition.words and len(keys) < CERTAIN and MOST * len(keys) < most.get(name, 0):
                found |= dict.fromkeys(keys, NAMELESS)
                continue
            for key in keys:
                text = condition.text(fits[key].description)
                found[key] = Decision(replace(fits[key], description=text, verdict=Verdict.NUMERIC.value))
        return found

    def _passing(self, name: str, operation: str, reading: str) -> list[Problem]:
        """Return the problems of cases that pass and would not if the reading held there."""
        from attncheck.diagnosis.conditions import is_refuted_by

        units: dict[str, Unit] = {}
        for unit in self.plan:
            case = self.plan.case(unit)
            is_passing = case.id in self.judged.get(name, ()) and (name, case.id) not in self.failed
            if is_passing and case.operation == operation and self.judge.rounding_model(name, unit.dtype) != "none":
                units.setdefault(case.id, unit)
        found, asked = list[Problem](), 0
        for unit in units.values():
            case, arrays = self.plan.case(unit), self.plan.inputs(unit).arrays
            if not 0 < score_elements(case.operation, case.options, arrays) <= _MAX_PASSING_SCORES:
                continue
            problem = self._problem(name, unit)
            refutes = is_refuted_by(reading, problem)
            found += [problem] if refutes else []
            asked += refutes is not None
            if asked == _MOST_PASSING:
                break
        return found

    def _problem(self, name: str, unit: Unit) -> Problem:
        """Return a case as an implementation reads it that declares its conventions."""
        from attncheck.diagnosis.declared import read_as_declared

        problem = problem_of(self.plan.case(unit), self.plan.inputs(unit))
        reading = read_as_declared(problem, self.judge.declared_conventions(name))
        return problem if reading is None else reading.problem


def _meant_by_itself(evidence: Evidence) -> Fit | None:
    """Return the convention that a case names by itself."""
    return next((fit for fit in evidence.fits if fit.verdict == Verdict.SEMANTIC), None)


def _may_have_condition(fit: Fit) -> bool:
    """Return whether a name is that of one reading, which is no number that was fitted."""
    is_one = AND not in fit.name and OR not in fit.name
    return is_one and not fit.is_fitted and not fit.name.startswith((ACCURACY, "empty-rows-"))


def _common_factor(factors: Iterable[float | None]) -> float | None:
    """Return the factor that all have, as the first and most precise says it; None where they differ."""
    known = [factor for factor in factors if factor is not None]
    if not known or any(abs(factor - known[0]) > 0.01 * abs(known[0]) for factor in known):
        return None
    return known[0]


def _decided(evidence: Mapping[Evaluation, Evidence]) -> dict[Evaluation, Decision]:
    """Decide for every implementation."""
    decisions: dict[Evaluation, Decision] = {}
    for name in dict.fromkeys(key[0] for key in evidence):
        decisions |= decide({key: each for key, each in evidence.items() if key[0] == name})
    return decisions


def _without_few_accuracies(decisions: Mapping[Evaluation, Decision]) -> dict[Evaluation, Decision]:
    """Drop an accuracy diagnosis of fewer than ``SETTLED`` cases if other failing cases have no diagnosis.

    A real accuracy fault shows in many cases.
    """
    cases: dict[str, set[str]] = defaultdict(set)
    for (name, case, _), decision in decisions.items():
        if _is_accuracy(decision):
            cases[name].add(case)
    nameless = {key[0] for key, decision in decisions.items() if decision == NAMELESS}
    few = {name for name in nameless if len(cases[name]) < SETTLED}
    return {
        key: NAMELESS if key[0] in few and _is_accuracy(decision) else decision for key, decision in decisions.items()
    }


def _is_accuracy(decision: Decision) -> bool:
    return decision.fit is not None and decision.fit.name.startswith(ACCURACY)


def _final(row: Row, decision: Decision | None, examined: Mapping[Evaluation, Mapping[str, Row]]) -> Row:
    """Return how the row of a stage reads in the end; numbers follow their stages (``follow``)."""
    is_open = row.comparison == "stage" and not row.xfail and row.verdict in (*WRONG_NUMBERS, Verdict.SEMANTIC)
    if decision is None or not is_open:
        return row
    changed = reworded(decision, Wording(row.verdict, row.message, row.begins_at or ""))
    if changed is None:
        return replace(examined.get(_evaluation(row), {}).get(row.stage, row), seconds=row.seconds)
    convention = (changed.diagnosis or "").removeprefix("empty-rows-")
    return replace(
        row,
        verdict=changed.verdict,
        message=changed.message,
        begins_at=changed.begins_at or None,
        diagnosis=changed.diagnosis,
        empty_rows=convention if convention in EMPTY_ROWS else row.empty_rows,
    )


def _with_hint(row: Row, hint: str) -> Row:
    """Add to a row without a name what its case says by itself: `check` says no less than `explain`."""
    is_wrong = row.verdict in WRONG_NUMBERS and row.comparison == "stage" and not row.xfail
    return replace(row, message=f"{row.message}{BY_ITSELF}{hint}") if hint and is_wrong else row


def follow(rows: Sequence[Row]) -> list[Row]:
    """Mark numbers that fail only because their stage was read differently."""
    stages: dict[Evaluation, list[Row]] = {}
    for row in rows:
        if row.comparison == "stage":
            stages.setdefault(_evaluation(row), []).append(row)
    reasons = {key: of[0] for key, of in stages.items() if all(row.verdict == Verdict.SEMANTIC for row in of)}

    def followed(row: Row) -> Row:
        reason = reasons.get(_evaluation(row))
        if reason is None or row.comparison in ("stage", "pair") or row.verdict not in WRONG_NUMBERS or row.xfail:
            return row
        message = f"{row.message}; {reason.message}"
        return replace(row, verdict=Verdict.SEMANTIC, message=message, diagnosis=reason.diagnosis)

    return [followed(row) for row in rows]
