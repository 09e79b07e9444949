"""Diagnoses the failures of a run, after all cases are judged.

A judged row has a verdict and numbers, but no cause. The cause is another reading of the case, such as "causality is
ignored". To test one reading on one case, attncheck computes the exact answer under that reading, which is expensive,
and one case rarely decides: many readings give the same numbers in it. So the failing cases of an implementation
decide together, and attncheck examines only a few of them:

1. Group the failing cases of an implementation by operation, first failing stage and verdict (``failure_kind``), the
   largest group first.
2. Examine the simplest case of the group (``diagnosis.examine``): try all readings on it. The result is its
   ``Evidence``: the readings that fit the case, and the names of the readings that it refutes.
3. Decide with the evidence of all cases of the implementation so far (``diagnosis.decision``). A reading that at least
   ``MIN_CONFIRMING_CASES`` examined cases name is confirmed.
4. Try a confirmed reading on the remaining cases of the group, in float64 instead of exact arithmetic
   (``FailingCase.find_explaining_readings`` in ``diagnosis.wrong_result``). The cases that it explains need no
   examination. A large case, of which some rows are judged, is examined, and confirmed readings are tried first.
5. Continue at step 2 with the next case. Stop after ``MAX_EXAMINED`` cases, or after ``MAX_UNNAMED_IN_A_ROW``
   consecutive cases that fit no reading: the remaining cases of the group have no evidence.
6. When all groups are done, decide again. Then try combinations of several readings on the cases without a name
   (``diagnosis.compositions``).
7. Use the passing cases: a reading that would change the result of a passing case does not apply there
   (``diagnosis.conditions``), so its message gets a condition, or the reading is dropped.

All steps see the rows in sorted order, so the order in which workers return results does not affect the diagnosis. The
message of a row without a name ends with the diagnosis of that one case, as ``attncheck explain`` prints it.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from attncheck.common.store import UnreadableEntry
from attncheck.common.wording import CONVENTIONS_SEPARATOR, SINGLE_CASE_PREFIX
from attncheck.diagnosis.case_evidence import Evidence, FittedNumber, Match
from attncheck.diagnosis.decision import (
    MIN_CERTAIN_PAIRS,
    MIN_EXPLAINED_PER_REFUTED,
    NAME_SEPARATOR,
    NO_DIAGNOSIS,
    Decision,
    DiagnosisColumns,
    apply_decision,
    decide_diagnoses,
    make_match,
)
from attncheck.diagnosis.failing_evaluations import (
    FailingEvaluation,
    ReturnedLookup,
    evaluation_of,
    find_failing_evaluations,
)
from attncheck.diagnosis.float64_in_float32 import decide_by_dtype, is_computed_in_float32
from attncheck.diagnosis.on_demand import LAZY_DIAGNOSER
from attncheck.judging.remembered import make_store_key
from attncheck.judging.units import Evaluation, Judge
from attncheck.planning.plan import Plan, Unit
from attncheck.reading.inputs import make_problem_of_case
from attncheck.reading.problem import Problem
from attncheck.reading.shapes import count_scores
from attncheck.results.format import CHANGED_BY_DIAGNOSIS, Row
from attncheck.spec import ACCURACY_PREFIX, EMPTY_ROWS
from attncheck.spec.verdicts import WRONG_NUMBER_VERDICTS, Verdict

if TYPE_CHECKING:
    from attncheck.diagnosis.compositions import ComposedCase

MIN_CONFIRMING_CASES = 3
"""Number of cases that must name a reading before it is tried on other cases."""
MAX_EXAMINED = 24
"""Maximum number of examined cases of one operation, stage and verdict."""
MAX_SCORES_TO_EXAMINE = 1 << 17
"""Maximum number of elements of the score matrix of a case on which a confirmed reading is tried."""
MAX_UNNAMED_IN_A_ROW = 6
"""Maximum number of consecutive cases that fit no reading; the remaining cases then get no name."""
MIN_NUMBERS_FOR_ACCURACY = 64
"""Number of elements of a stage that is enough to estimate an accuracy; few of the simplest cases have as many."""

ConventionLookup: TypeAlias = Callable[[str], Sequence[str]]
"""Measures the conventions of an implementation, and returns the names of these readings (``conventions.py``)."""


JudgedCases: TypeAlias = Mapping[str, Collection[str]]
"""Implementation -> cases in which it was judged."""


def diagnose_rows(
    rows: Sequence[Row],
    plan: Plan,
    judge: Judge,
    returned: ReturnedLookup,
    look_up_conventions: ConventionLookup = lambda name: (),
    judged: JudgedCases = MappingProxyType({}),
) -> list[Row]:
    """Return the rows of a run in their order, with the diagnosis in failing rows.

    If cases of an implementation get no name, ``look_up_conventions`` measures its conventions. The ``judged`` cases
    that pass show where a reading does not apply. The order of the rows does not affect the diagnosis.
    """
    order = sorted(range(len(rows)), key=lambda number: _sort_key(rows[number]))
    diagnosed = _diagnose_sorted([rows[number] for number in order], plan, judge, returned, look_up_conventions, judged)
    return [row for _, row in sorted(zip(order, diagnosed, strict=True), key=lambda numbered: numbered[0])]


def _sort_key(row: Row) -> tuple[str, ...]:
    parts = (*evaluation_of(row), row.comparison, row.stage, row.other, row.called, row.index, row.message)
    return tuple(part or "" for part in parts)


def _diagnose_sorted(
    rows: Sequence[Row],
    plan: Plan,
    judge: Judge,
    returned: ReturnedLookup,
    look_up_conventions: ConventionLookup,
    judged: JudgedCases,
) -> list[Row]:
    """Diagnose sorted rows, or take the diagnosis of the same failures from the store."""
    failing = find_failing_evaluations(rows, plan, returned)
    if not failing:
        return list(rows)

    def compute() -> list[Row]:
        searches, decisions = _EvidenceCollector(plan, judge, look_up_conventions), dict[Evaluation, Decision]()
        evidence = searches.evidence
        in_float32 = frozenset(plan.case(unit).id for unit in plan if unit.dtype == "float32")
        for name in dict.fromkeys(failure.key[0] for failure in failing):
            of_name = [failure for failure in failing if failure.key[0] == name]
            decisions |= decide_by_dtype(of_name, in_float32, searches.decide)
        undecided = [failure for failure in failing if decisions[failure.key].match is None]
        decisions |= searches.decide_compositions(undecided, decisions)
        failed = {
            (row.implementation, row.case)
            for row in rows
            if not is_computed_in_float32(evaluation_of(row), decisions.get(evaluation_of(row), NO_DIAGNOSIS))
        }
        conditions = _ConditionFinder(plan, judge, judged, failed)
        decisions = _drop_rare_accuracies(decisions)
        decisions = conditions.add_conditions({failure.key: failure for failure in failing}, decisions, evidence)
        unnamed = (key for key in evidence if decisions[key] == NO_DIAGNOSIS)
        of_one_case = {
            key: match.description for key in unnamed if (match := decide_diagnoses({"": evidence[key]})[""].match)
        }
        diagnosed = [_add_diagnosis_to_row(row, decisions.get(evaluation_of(row)), searches.examined) for row in rows]
        hinted = [_append_hint(row, of_one_case.get(evaluation_of(row), "")) for row in diagnosed]
        return mark_dependent_numbers(hinted)

    def key() -> object:
        inputs = [plan.inputs(failure.unit) for failure in failing]
        stages = [None if failure.returned is None else replace(failure.returned, seconds=None) for failure in failing]
        passed = {name: sorted(cases) for name, cases in judged.items()}
        digests = [failure.case.digest for failure in failing]
        return [[replace(row, seconds=None) for row in rows], digests, inputs, stages, sorted(passed.items())]

    diagnosed: list[Row] = judge.store.get_or_compute(
        lambda: make_store_key("diagnoses", key()),
        compute,
        lambda after: json.dumps([[getattr(row, name) for name in CHANGED_BY_DIAGNOSIS] for row in after]).encode(),
        lambda data: _apply_stored_changes(rows, data),
    )
    return diagnosed


def _apply_stored_changes(rows: Sequence[Row], data: bytes) -> list[Row]:
    try:
        changes = [dict(zip(CHANGED_BY_DIAGNOSIS, change, strict=True)) for change in json.loads(data)]
        return [
            replace(row, **{**change, "verdict": Verdict(change["verdict"])})
            for row, change in zip(rows, changes, strict=True)
        ]
    except (ValueError, TypeError, KeyError) as error:
        raise UnreadableEntry from error


@dataclass(eq=False)
class _EvidenceCollector:
    """Evidence of failing cases, one implementation after the other."""

    plan: Plan
    judge: Judge
    look_up_conventions: ConventionLookup
    evidence: dict[Evaluation, Evidence] = field(default_factory=dict)
    examined: dict[Evaluation, Mapping[str, Row]] = field(default_factory=dict)
    """The rows by stage, each with the diagnosis of that case only."""
    searched: Set[Evaluation] = frozenset()
    """The evaluations that decide together."""

    def decide(self, failing: Sequence[FailingEvaluation]) -> dict[Evaluation, Decision]:
        """Search failing evaluations of one implementation for readings, and decide their diagnoses."""
        self.searched = {failure.key for failure in failing}
        self._collect(failing)
        return decide_diagnoses({failure.key: self.evidence[failure.key] for failure in failing})

    def _collect(self, failing: Sequence[FailingEvaluation]) -> None:
        """Examine cases of each kind until they confirm a reading, and try it on the other cases."""
        confirmed: dict[str, dict[str, FittedNumber]] = defaultdict(dict)
        kinds: dict[tuple[str, str, str], list[FailingEvaluation]] = defaultdict(list)
        for failure in failing:
            kinds[failure.failure_kind].append(failure)
        for kind, members in sorted(kinds.items(), key=lambda entry: -len(entry[1])):
            self._examine_kind(members, confirmed[kind[0]])

    def _examine_kind(self, members: Sequence[FailingEvaluation], confirmed: dict[str, FittedNumber]) -> None:
        """Examine the simplest members; ``confirmed`` maps confirmed readings to their fitted numbers."""
        remaining = self._try_on_cases(members, confirmed)
        examined: list[FailingEvaluation] = []
        unnamed, least = 0, 0
        while remaining and len(examined) < MAX_EXAMINED:
            last = examined[-MAX_UNNAMED_IN_A_ROW:]
            if unnamed == MAX_UNNAMED_IN_A_ROW and all(
                failure.element_count < MIN_NUMBERS_FOR_ACCURACY for failure in last
            ):
                unnamed, least = 0, MIN_NUMBERS_FOR_ACCURACY
            seen = {failure.case.id for failure in examined}
            candidates = [failure for failure in remaining if failure.element_count >= least]
            if unnamed == MAX_UNNAMED_IN_A_ROW or not candidates:
                break
            failure = next((failure for failure in candidates if failure.case.id not in seen), candidates[0])
            remaining.remove(failure)
            if not self._examine(failure, confirmed):
                continue
            examined.append(failure)
            unnamed = 0 if self.evidence[failure.key].matches else unnamed + 1
            if readings := self._find_newly_confirmed(examined, confirmed):
                confirmed |= readings
                remaining = self._try_on_cases(remaining, readings)
                # An examined case may have too few numbers to estimate an accuracy.
                unmatched = [failure for failure in examined if not self.evidence[failure.key].matches]
                self._try_on_cases(unmatched, readings)
        self.evidence |= {failure.key: failure.empty_evidence for failure in remaining}

    def _examine(self, failure: FailingEvaluation, confirmed: Container[str] = ()) -> bool:
        """Store the evidence of one case; return False if the returned stages are not known any more."""
        from attncheck.diagnosis.examine import judge_and_diagnose_outcome
        from attncheck.judging.truth import truth_of_case
        from attncheck.judging.xfail import make_blank_row

        if failure.key in self.examined:
            return True
        self.evidence[failure.key] = failure.empty_evidence
        if (returned := failure.returned) is None:
            return False
        (name, _, dtype), judge = failure.key, self.judge
        truth = truth_of_case(failure.case, self.plan.inputs(failure.unit), returned.stages, judge.store)
        outcome = judge_and_diagnose_outcome(
            replace(make_blank_row(failure.case, dtype), implementation=name),
            failure.case,
            LAZY_DIAGNOSER.truth_under_declared_conventions(truth, judge.declared_conventions_of(name)),
            returned,
            judge.rounding_model_of(name, dtype),
            judge.known_empty_rows_of(failure.case, dtype, name, returned),
            confirmed=confirmed,
        )
        self.evidence[failure.key] = outcome.evidence or failure.empty_evidence
        self.examined[failure.key] = {row.stage: row for row in outcome.rows}
        return True

    def _find_newly_confirmed(
        self, examined: Sequence[FailingEvaluation], confirmed: Mapping[str, object]
    ) -> dict[str, FittedNumber]:
        """Return a reading that enough examined cases name and that is not confirmed yet, with its fitted number."""
        decisions = decide_diagnoses({key: evidence for key, evidence in self.evidence.items() if key in self.searched})
        named: dict[str, dict[str, list[Match]]] = {}
        for failure in examined:
            if match := decisions[failure.key].match:
                named.setdefault(match.name, {}).setdefault(failure.case.id, []).append(match)
        for name, by_case in named.items():
            if len(by_case) >= MIN_CONFIRMING_CASES and not confirmed.keys() >= set(name.split(NAME_SEPARATOR)):
                fitted = FittedNumber.shared_by([match for group in by_case.values() for match in group])
                return dict.fromkeys(name.split(NAME_SEPARATOR), fitted)
        return {}

    def _try_on_cases(
        self, failing: Sequence[FailingEvaluation], readings: Mapping[str, FittedNumber]
    ) -> list[FailingEvaluation]:
        """Store the evidence of the cases that the readings explain, and return the other cases."""
        return [failure for failure in failing if not (readings and self._try_on_case(failure, readings))]

    def _try_on_case(self, failure: FailingEvaluation, readings: Mapping[str, FittedNumber]) -> bool:
        """Store the evidence of a case if a reading explains it; return whether one does."""
        from attncheck.diagnosis.declared import problem_under_conventions
        from attncheck.diagnosis.wrong_result import FailingCase

        if failure.returned is None or not failure.has_all_rows_judged:
            return False
        inputs, dtype = self.plan.inputs(failure.unit), failure.unit.dtype
        if self._is_too_large(failure):
            return False
        stages, failing = failure.returned.stages, {row.stage for row in failure.rows}
        problem = make_problem_of_case(failure.case, inputs)
        reading = problem_under_conventions(problem, self.judge.declared_conventions_of(failure.key[0]))
        case = FailingCase(
            *(problem if reading is None else reading.problem, dtype),
            {stage: array for stage, array in stages.items() if stage in failing},
            {stage: array for stage, array in stages.items() if stage in failure.right_stages},
            self.judge.rounding_model_of(failure.key[0], dtype),
        )
        stage = failure.rows[0].stage
        matches = tuple(make_match(alternative, stage) for alternative in case.find_explaining_readings(readings))
        if matches:
            self.evidence[failure.key] = Evidence(matches, frozenset(), stage, failure.case.operation)
        return bool(matches)

    def decide_compositions(
        self, unnamed: Sequence[FailingEvaluation], decisions: Mapping[Evaluation, Decision]
    ) -> dict[Evaluation, Decision]:
        """Explain unnamed cases by several readings at once: those of named cases, and further ones."""
        known: dict[str, Counter[str]] = {}
        for key, decision in decisions.items():
            match = decision.match
            if match is not None and not match.name.startswith(ACCURACY_PREFIX):
                known.setdefault(key[0], Counter())[match.name] += 1
        composed: dict[Evaluation, Decision] = {}
        for name in dict.fromkeys(failure.key[0] for failure in unnamed):
            cases = {
                failure.key: case
                for failure in unnamed
                if failure.key[0] == name and (case := self._make_composed_case(failure))
            }
            matches = self._find_composed_matches(name, cases, known.get(name, Counter()))
            shared = Counter(match.name for match in matches.values())
            # If only one case shows a composition, its own message stays, which lists all readings that fit.
            composed |= {
                key: Decision(match)
                for key, match in matches.items()
                if not decisions[key].keep_own_message or shared[match.name] > 1
            }
        return composed

    def _find_composed_matches(
        self, name: str, cases: Mapping[Evaluation, ComposedCase], counts: Counter[str]
    ) -> dict[Evaluation, Match]:
        """Compose the readings of named cases; for cases still unnamed, add the measured conventions."""
        from attncheck.diagnosis.compositions import explain_by_combinations

        matches = explain_by_combinations(cases, counts)
        unnamed = {key: case for key, case in cases.items() if key not in matches}
        known = counts.keys() | {part for match in matches.values() for part in match.name.split(CONVENTIONS_SEPARATOR)}
        shown = [reading for reading in (self.look_up_conventions(name) if unnamed else ()) if reading not in known]
        return matches | (
            explain_by_combinations(unnamed, Counter([*counts.elements(), *known, *shown])) if shown else {}
        )

    def _make_composed_case(self, failure: FailingEvaluation) -> ComposedCase | None:
        """Return a failing case with its exact answer; None if it is large, or its returned stages are not known."""
        from attncheck.diagnosis.compositions import ComposedCase
        from attncheck.diagnosis.declared import truth_under_declared_conventions
        from attncheck.diagnosis.wrong_result import WrongResult
        from attncheck.judging.truth import truth_of_case

        name, _, dtype = failure.key
        if failure.returned is None or not failure.has_all_rows_judged or self._is_too_large(failure):
            return None
        stages, failing = failure.returned.stages, {row.stage for row in failure.rows}
        truth = truth_of_case(failure.case, self.plan.inputs(failure.unit), stages, self.judge.store)
        truth = truth_under_declared_conventions(truth, self.judge.declared_conventions_of(name)).for_returned_dtypes(
            stages
        )
        if not failing <= truth.exact.keys():
            return None
        failed, right = (
            {stage: stages[stage] for stage in names & stages.keys()} for names in (failing, failure.right_stages)
        )
        wrong = WrongResult(truth, failed, self.judge.rounding_model_of(name, dtype), right)
        return ComposedCase(wrong, failure.rows[0].stage, failure.case.operation)

    def _is_too_large(self, failure: FailingEvaluation) -> bool:
        arrays = self.plan.inputs(failure.unit).arrays
        return count_scores(failure.case.operation, failure.case.options, arrays) > MAX_SCORES_TO_EXAMINE


_MAX_PASSING_CASES = 96
"""Maximum number of passing cases that are checked for one reading: the first ones that use its option."""
_MAX_PASSING_SCORES = 1 << 13
"""Maximum number of elements of the score matrix of such a case."""


@dataclass(frozen=True)
class _ConditionFinder:
    """Finds the conditions under which readings apply, from the passing cases."""

    plan: Plan
    judge: Judge
    judged: JudgedCases
    failed: Collection[tuple[str, str]]

    def add_conditions(
        self,
        failing: Mapping[Evaluation, FailingEvaluation],
        decisions: Mapping[Evaluation, Decision],
        evidence: Mapping[Evaluation, Evidence],
    ) -> dict[Evaluation, Decision]:
        """Add conditions to the readings that passing cases refute; such a reading is a mistake and no convention.

        Drop such a reading if it names few cases and another one names many: a few cases of one fault often look like
        another fault.
        """
        keys_of_reading: dict[tuple[str, str, str], list[Evaluation]] = defaultdict(list)
        matches: dict[Evaluation, Match] = {}
        for key, decision in decisions.items():
            match = decision.match
            if decision.keep_own_message and key in evidence:  # the message names a convention
                match = next((match for match in evidence[key].matches if match.verdict == Verdict.SEMANTIC), None)
            # Only a single reading without a fitted number can have a condition.
            if (
                match is None
                or key not in failing
                or match.is_fitted
                or CONVENTIONS_SEPARATOR in match.name
                or NAME_SEPARATOR in match.name
            ):
                continue
            if not match.name.startswith((ACCURACY_PREFIX, "empty-rows-")):
                keys_of_reading[key[0], failing[key].case.operation, match.name].append(key)
                matches[key] = match
        changed = dict(decisions)
        named = Counter((key[0], match.name) for key, decision in decisions.items() if (match := decision.match))
        most = {name: max(count for (of, _), count in named.items() if of == name) for name, _ in named}
        for (name, operation, reading), keys in keys_of_reading.items():
            from attncheck.diagnosis.conditions import find_condition  # a run without failures does not load it

            passing = self._find_refuting_problems(name, operation, reading)
            explained = {
                failing[key].case.id: self._problem_under_declared_conventions(name, failing[key].unit) for key in keys
            }
            if (condition := find_condition([*explained.values()], passing)) is None:
                continue
            if (
                not condition.description
                and len(keys) < MIN_CERTAIN_PAIRS
                and MIN_EXPLAINED_PER_REFUTED * len(keys) < most.get(name, 0)
            ):
                changed |= dict.fromkeys(keys, NO_DIAGNOSIS)
                continue
            for key in keys:
                text = condition.insert_into(matches[key].description)
                changed[key] = Decision(replace(matches[key], description=text, verdict=Verdict.NUMERIC.value))
        return changed

    def _find_refuting_problems(self, name: str, operation: str, reading: str) -> list[Problem]:
        """Return the problems of passing cases whose result the reading would change."""
        from attncheck.diagnosis.conditions import is_reading_refuted

        units: dict[str, Unit] = {}
        for unit in self.plan:
            case = self.plan.case(unit)
            is_passing = case.id in self.judged.get(name, ()) and (name, case.id) not in self.failed
            if is_passing and case.operation == operation and self.judge.rounding_model_of(name, unit.dtype) != "none":
                units.setdefault(case.id, unit)
        refuting, checked = list[Problem](), 0
        for unit in units.values():
            case, arrays = self.plan.case(unit), self.plan.inputs(unit).arrays
            if not 0 < count_scores(case.operation, case.options, arrays) <= _MAX_PASSING_SCORES:
                continue
            problem = self._problem_under_declared_conventions(name, unit)
            refutes = is_reading_refuted(reading, problem)
            refuting += [problem] if refutes else []
            checked += refutes is not None
            if checked == _MAX_PASSING_CASES:
                break
        return refuting

    def _problem_under_declared_conventions(self, name: str, unit: Unit) -> Problem:
        """Return the problem of a case under the declared conventions of an implementation."""
        from attncheck.diagnosis.declared import problem_under_conventions

        problem = make_problem_of_case(self.plan.case(unit), self.plan.inputs(unit))
        reading = problem_under_conventions(problem, self.judge.declared_conventions_of(name))
        return problem if reading is None else reading.problem


def _drop_rare_accuracies(decisions: Mapping[Evaluation, Decision]) -> dict[Evaluation, Decision]:
    """Drop an accuracy diagnosis of fewer than ``MIN_CONFIRMING_CASES`` cases if other failing cases have no diagnosis.

    A real accuracy fault shows in many cases.
    """
    cases: dict[str, set[str]] = defaultdict(set)
    for (name, case, _), decision in decisions.items():
        if _is_accuracy(decision):
            cases[name].add(case)
    unnamed = {key[0] for key, decision in decisions.items() if decision == NO_DIAGNOSIS}
    few = {name for name in unnamed if len(cases[name]) < MIN_CONFIRMING_CASES}
    return {
        key: NO_DIAGNOSIS if key[0] in few and _is_accuracy(decision) else decision
        for key, decision in decisions.items()
    }


def _is_accuracy(decision: Decision) -> bool:
    return decision.match is not None and decision.match.name.startswith(ACCURACY_PREFIX)


def _add_diagnosis_to_row(row: Row, decision: Decision | None, examined: Mapping[Evaluation, Mapping[str, Row]]) -> Row:
    """Return the row of a stage with its diagnosis; ``mark_dependent_numbers`` handles the rows of numbers."""
    is_open = row.comparison == "stage" and not row.xfail and row.verdict in (*WRONG_NUMBER_VERDICTS, Verdict.SEMANTIC)
    if decision is None or not is_open:
        return row
    changed = apply_decision(decision, DiagnosisColumns(row.verdict, row.message, row.begins_at or ""))
    if changed is None:
        return replace(examined.get(evaluation_of(row), {}).get(row.stage, row), seconds=row.seconds)
    convention = (changed.diagnosis or "").removeprefix("empty-rows-")
    return replace(
        row,
        verdict=changed.verdict,
        message=changed.message,
        begins_at=changed.begins_at or None,
        diagnosis=changed.diagnosis,
        empty_rows=convention if convention in EMPTY_ROWS else row.empty_rows,
    )


def _append_hint(row: Row, hint: str) -> Row:
    """Append the diagnosis of one case to the message of an unnamed row, so that `check` reports it like `explain`."""
    is_wrong = row.verdict in WRONG_NUMBER_VERDICTS and row.comparison == "stage" and not row.xfail
    return replace(row, message=f"{row.message}{SINGLE_CASE_PREFIX}{hint}") if hint and is_wrong else row


def mark_dependent_numbers(rows: Sequence[Row]) -> list[Row]:
    """Mark failing numbers as semantic if their stage already failed as semantic."""
    stages: dict[Evaluation, list[Row]] = {}
    for row in rows:
        if row.comparison == "stage":
            stages.setdefault(evaluation_of(row), []).append(row)
    reasons = {key: of[0] for key, of in stages.items() if all(row.verdict == Verdict.SEMANTIC for row in of)}

    def marked(row: Row) -> Row:
        reason = reasons.get(evaluation_of(row))
        if (
            reason is None
            or row.comparison in ("stage", "pair")
            or row.verdict not in WRONG_NUMBER_VERDICTS
            or row.xfail
        ):
            return row
        message = f"{row.message}; {reason.message}"
        return replace(row, verdict=Verdict.SEMANTIC, message=message, diagnosis=reason.diagnosis)

    return [marked(row) for row in rows]
