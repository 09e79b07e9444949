"""Decides the diagnosis of each failing case from the evidence of all failing cases of an implementation.

One case is rarely enough. For example, weights of zero fit every large scale, and a single query that sees all keys
fits both "causality is ignored" and "aligned bottom-right". So each failing case only contributes its ``Evidence``
(``examine.py``): the readings that fit it, and the names of the readings that it refutes. ``decide_diagnoses``
takes the evidence of all failing cases of one implementation. For each case it returns a ``Decision``: a match, no name
(``NO_DIAGNOSIS``), or ``KEEP_OWN_MESSAGE``, if the message that was written for this one case stays.

The rules, which ``docs/diagnoses.md`` gives in detail:

1. ``_drop_refuted_readings`` drops the readings that at least as many cases refute as they explain. Of the others,
   it keeps a reading if it explains ``MIN_EXPLAINED_PER_REFUTED`` times as many cases as refute it. It also keeps a
   reading if another kept reading accounts for its refuting cases: then the implementation may have two faults.
2. ``_drop_rare_readings`` drops a reading if it explains fewer cases than remain unnamed with the same first failing
   stage: one other cause of all these cases is more likely. It also drops a reading that explains one or two cases if
   another reading explains many.
3. ``_decide_case`` compares the remaining readings of each case. It drops a reading whose cases are a proper subset of
   the cases of another reading. If the remaining readings give the same result in this case, the match lists all of
   their names.

A kernel of one operation is separate code, so the rules apply to each operation separately. Only an accuracy counts
over all operations. Passing cases are not evaluated again, so they refute no reading here; ``conditions.py`` uses them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TypeVar

from attncheck.diagnosis.case_evidence import Evidence, Match
from attncheck.judging.alternatives import AppliedReading
from attncheck.spec import ACCURACY_PREFIX
from attncheck.spec.verdicts import WRONG_NUMBER_VERDICTS, Verdict

CaseKey = TypeVar("CaseKey")
MIN_EXPLAINED_PER_REFUTED = 3
"""A reading that explains this many times as many cases as refute it is kept: those may have a second fault.

A choice: a smaller ratio keeps more wrong names, a larger one drops names of kernels with two faults.
"""
MIN_CERTAIN_PAIRS = 6
"""A reading is not rare if it explains this many pairs of case and dtype and none refutes it."""
MAX_CHANCE_PAIRS, MAX_CHANCE_RATIO = 2, 10
"""A reading of up to ``MAX_CHANCE_PAIRS`` pairs is dropped if another explains ``MAX_CHANCE_RATIO`` times more."""
MAX_LISTED_MISTAKES = 3
"""Maximum number of mistakes that are listed together if each of them explains all failing cases.

A choice: a longer list does not help the user to find the mistake.
"""
NAME_SEPARATOR = " or "
"""Separator of the names of readings that the cases cannot distinguish."""


DIAGNOSABLE_VERDICTS = (*WRONG_NUMBER_VERDICTS, Verdict.SEMANTIC)
"""Verdicts of stages that a diagnosis examines."""


@dataclass(frozen=True)
class Decision:
    """The diagnosis of one case: a fit or none; or the message that was written for this one case stays."""

    match: Match | None = None
    keep_own_message: bool = False


NO_DIAGNOSIS = Decision()
KEEP_OWN_MESSAGE = Decision(keep_own_message=True)


def collect_evidence(findings: Findings, stage: str, operation: str) -> Evidence:
    """Return the evidence of a case from its findings, its first failing stage and its operation."""
    matches = (make_match(alternative, stage) for alternative in findings.matches)
    return Evidence(tuple(matches), findings.refuted_names, stage, operation)


def make_match(alternative: AppliedReading, stage: str) -> Match:
    """Return the fit of a reading to a case, in words for the first failing stage of the case."""
    description, unsure = (
        text.format(stage=stage) for text in (alternative.description, alternative.ambiguous_description)
    )
    kind = alternative.first_stage, alternative.verdict.value, alternative.comparison_key
    return Match(
        alternative.name,
        description,
        *kind,
        unsure,
        alternative.is_fitted,
        alternative.factor,
        alternative.common_description,
        alternative.scale,
    )


def decide_diagnoses(cases: Mapping[CaseKey, Evidence]) -> dict[CaseKey, Decision]:
    """Return the decision for each failing case of one implementation.

    Example:
        >>> causal = Match("causality-ignored", "causality is ignored", "masked", "numeric", "1")
        >>> scale = Match("scale-one", "the scale is 1", "scores", "numeric", "2")
        >>> first = Evidence((causal, scale), operation="attention")
        >>> second = Evidence((causal,), frozenset({"scale-one"}), operation="attention")
        >>> [decision.match.name for decision in decide_diagnoses({1: first, 2: second}).values()]
        ['causality-ignored', 'causality-ignored']
    """
    explained: dict[_ReadingKey, set[CaseKey]] = {}
    refuting: dict[_ReadingKey, set[CaseKey]] = {}
    for unit, evidence in cases.items():
        for match in evidence.matches:
            explained.setdefault(_reading_key(match.name, evidence), set()).add(unit)
        for name in evidence.refuted_names:
            refuting.setdefault(_reading_key(name, evidence), set()).add(unit)
    _drop_refuted_readings(explained, refuting)
    _drop_rare_readings(explained, refuting, cases)
    everywhere: dict[str, set[CaseKey]] = {}
    for (_, name), units in explained.items():
        everywhere.setdefault(name, set()).update(units)
    stages = {
        (evidence.operation, match.first_failing_stage)
        for evidence in cases.values()
        for match in evidence.matches
        if not match.is_fitted and _reading_key(match.name, evidence) in explained
    }
    shared = {
        reading: _shared_description(reading[1], [cases[unit] for unit in units])
        for reading, units in explained.items()
    }
    return {
        unit: _decide_case(evidence, explained, everywhere, stages, shared, len(cases))
        for unit, evidence in cases.items()
    }


_ReadingKey = tuple[str, str]
"""Operation and name of a reading; the operation of an accuracy is empty, since it counts over all operations."""


def _reading_key(name: str, evidence: Evidence) -> _ReadingKey:
    return ("" if name.startswith(ACCURACY_PREFIX) else evidence.operation), name


def _drop_refuted_readings(
    explained: dict[_ReadingKey, set[CaseKey]], refuting: Mapping[_ReadingKey, set[CaseKey]]
) -> None:
    """Drop refuted readings, except those that explain many more cases, and those of a second fault."""
    for reading in list(explained):
        # Count the cases of this operation, and those of all operations together.
        explaining, against = (
            sum(len(units) for (_, name), units in cases.items() if name == reading[1])
            for cases in (explained, refuting)
        )
        if against >= explaining or len(refuting.get(reading, ())) >= len(explained[reading]):
            del explained[reading]
    kept = {
        reading
        for reading, units in explained.items()
        if MIN_EXPLAINED_PER_REFUTED * len(refuting.get(reading, ())) <= len(units)
    }
    while dropped := [
        reading
        for reading in explained.keys() - kept
        if reading[1].startswith(ACCURACY_PREFIX) or not _may_be_second_fault(reading, explained, refuting)
    ]:
        for reading in dropped:
            del explained[reading]


def _may_be_second_fault(
    reading: _ReadingKey, explained: Mapping[_ReadingKey, set[CaseKey]], refuting: Mapping[_ReadingKey, set[CaseKey]]
) -> bool:
    """Return whether every case that refutes a reading also refutes another reading, which explains other cases."""
    disjoint = [name for name, units in explained.items() if not units & explained[reading]]
    return refuting.get(reading, set()) <= set().union(*(refuting.get(name, set()) for name in disjoint))


def _drop_rare_readings(
    explained: dict[_ReadingKey, set[CaseKey]],
    refuting: Mapping[_ReadingKey, set[CaseKey]],
    cases: Mapping[CaseKey, Evidence],
) -> None:
    """Drop readings that explain fewer cases than remain unnamed: one other cause of all of them is more likely.

    Also drop a reading of very few cases if another reading explains very many.
    """
    named = set().union(*explained.values())
    unnamed = [
        (evidence.operation, evidence.first_failing_stage) for unit, evidence in cases.items() if unit not in named
    ]
    most = max(
        (len(units) for (_, name), units in explained.items() if not name.startswith(ACCURACY_PREFIX)), default=0
    )
    for reading, units in list(explained.items()):
        stages = {(cases[unit].operation, cases[unit].first_failing_stage) for unit in units}
        if reading[1].startswith(ACCURACY_PREFIX):  # one larger error would have refuted it
            if len(units) < most:
                del explained[reading]
            continue
        if len(units) <= MAX_CHANCE_PAIRS and most > MAX_CHANCE_RATIO * len(units):
            del explained[reading]
            continue
        is_certain = len(units) >= MIN_CERTAIN_PAIRS and not refuting.get(reading)
        if len(units) == 1:  # a single case is compared with all that remain, whatever their operation
            stages |= {evidence for evidence in unnamed if evidence[1] == cases[next(iter(units))].first_failing_stage}
        if not is_certain and sum(failing in stages for failing in unnamed) > len(units):
            del explained[reading]


def _shared_description(name: str, cases: Sequence[Evidence]) -> str:
    """Return the description that a reading has in all cases that it explains; empty if the descriptions differ.

    For a fitted number, the cases must state different values: in a single case, a ratio fits any value.
    """
    matches = [match for evidence in cases for match in evidence.matches if match.name == name]
    is_enough = not any(match.is_fitted for match in matches) or len({match.description for match in matches}) > 1
    texts = {match.common_description for match in matches}
    return texts.pop() if is_enough and len(texts) == 1 else ""


def _decide_case(
    evidence: Evidence,
    explained: Mapping[_ReadingKey, set[CaseKey]],
    everywhere: Mapping[str, set[CaseKey]],
    stages: Set[tuple[str, str]],
    shared: Mapping[_ReadingKey, str],
    count: int,
) -> Decision:
    """Return the decision for one of ``count`` failing cases.

    ``explained`` has the units of each kept reading in its operation, ``everywhere`` in all operations by name.
    ``stages`` are the pairs of operation and stage at which a kept reading without a fitted number begins.
    """
    keys = {match: _reading_key(match.name, evidence) for match in evidence.matches}
    named = {match: explained[key] for match, key in keys.items() if key in explained}
    remaining = [
        match for match in named if not (match.is_fitted and (evidence.operation, match.first_failing_stage) in stages)
    ]
    for units_of in (named, {match: everywhere[match.name] for match in named}):
        remaining = [match for match in remaining if not any(units_of[match] < units_of[wider] for wider in remaining)]
    if not remaining:
        return NO_DIAGNOSIS
    if all(
        match.name.startswith(ACCURACY_PREFIX) for match in remaining
    ):  # each is within the next one: the tightest is first
        remaining = remaining[:1]
    answers = {match.result_key for match in remaining}
    has_convention = any(match.verdict == Verdict.SEMANTIC for match in remaining)
    all_explain_all = all(len(everywhere[match.name]) == count for match in remaining)
    if len(answers) == 1 or (len(answers) <= MAX_LISTED_MISTAKES and not has_convention and all_explain_all):
        joined, texts = remaining[0], {shared[keys[match]] for match in remaining}
        if len(remaining) > 1:  # for example, two formulas of the scale with the same value in every case
            by_answer = {match.result_key: match for match in reversed(remaining)}
            description = NAME_SEPARATOR.join(
                match.ambiguous_description or match.description for match in reversed(by_answer.values())
            )
            joined = replace(
                joined, name=NAME_SEPARATOR.join(sorted({match.name for match in remaining})), description=description
            )
        return Decision(replace(joined, description=texts.pop() or joined.description) if len(texts) == 1 else joined)
    return KEEP_OWN_MESSAGE if has_convention else NO_DIAGNOSIS


@dataclass(frozen=True)
class DiagnosisColumns:
    """The columns of a stage's row that a diagnosis changes."""

    verdict: str
    message: str
    begins_at: str
    diagnosis: str | None = None


def apply_decision(decision: Decision, judged: DiagnosisColumns) -> DiagnosisColumns | None:
    """Return the columns of a judged row under a decision; None if the row keeps its own message.

    Example:
        >>> row = DiagnosisColumns("numeric", "3 times the bound", "output")
        >>> mistake = Match("scale-one", "the scale is 1", "scores", "numeric", "")
        >>> changed = apply_decision(Decision(mistake), row)
        >>> changed.message, changed.begins_at, changed.verdict
        ('the scale is 1; 3 times the bound', 'scores', 'numeric')
    """
    if decision.keep_own_message:
        return None
    match = decision.match
    if match is None:
        return judged
    begins_at = match.first_failing_stage or judged.begins_at
    if match.verdict != Verdict.SEMANTIC:
        return DiagnosisColumns(judged.verdict, f"{match.description}; {judged.message}", begins_at, match.name)
    return DiagnosisColumns(Verdict.SEMANTIC, match.description, begins_at, match.name)


@dataclass(frozen=True, eq=False)
class Findings:
    """The result of examining one failing case: the readings that fit, nearest first, and the names of refuted ones.

    The ``untried_names`` readings were not tried, because too many others were nearer; they may match as well.
    """

    matches: tuple[AppliedReading, ...] = ()
    refuted_names: frozenset[str] = frozenset()
    untried_names: frozenset[str] = frozenset()

    @property
    def diagnosis_name(self) -> str | None:
        """The joined names of all readings with the same answer as ``named``; None if there is no diagnosis."""
        if (named := self.diagnosis) is None:
            return None
        return NAME_SEPARATOR.join(
            sorted({reading.name for reading in self.matches if reading.comparison_key == named.comparison_key})
        )

    @property
    def diagnosis(self) -> AppliedReading | None:
        """The diagnosis of this one case: the only reading that fits; if several fit, the first convention among them.

        A result that is right under another convention gets the verdict ``semantic``, even if a mistake fits, too.
        """
        answers = {match.comparison_key: match for match in reversed(self.matches)}
        if not answers:
            return None
        if len(answers) == 1:
            first = self.matches[0]
            shared = {"" if match.is_fitted else match.common_description for match in self.matches}
            if len(shared) == 1 and (text := shared.pop()):
                return replace(first, description=text)
            return (
                replace(first, description=first.ambiguous_description)
                if len(self.matches) > 1 and first.ambiguous_description
                else first
            )
        convention = next((match for match in self.matches if match.verdict is Verdict.SEMANTIC), None)
        if convention is None:
            return None
        others = [match.description for match in answers.values() if match.comparison_key != convention.comparison_key][
            ::-1
        ]
        description = f"{convention.description} (or {', or '.join(others)}: this case does not tell them apart)"
        return replace(convention, description=description)


NO_FINDINGS = Findings()
