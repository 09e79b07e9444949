"""Explains failing cases by several readings at once.

An implementation may have several faults, and then no single reading explains the cases that show two of them.
``explain_by_combinations`` works in rounds:

1. It applies the readings that other cases name to each unnamed case, several at once. If the result matches, their
   joined names are the diagnosis of the case.
2. It examines the other cases again, compared with the exact answer under the known readings. All these cases decide
   together on one more reading, as in ``decision.py``.
3. It starts again with this reading among the known ones, for at most ``MAX_SEARCH_ROUNDS`` further readings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, islice
from typing import TypeVar

from attncheck.common.wording import CONVENTIONS_SEPARATOR, DESCRIPTIONS_SEPARATOR
from attncheck.diagnosis.case_evidence import Evidence, Match
from attncheck.diagnosis.decision import MIN_EXPLAINED_PER_REFUTED, NAME_SEPARATOR, collect_evidence, make_match
from attncheck.diagnosis.examine import diagnose_case
from attncheck.diagnosis.readings import apply_readings_named
from attncheck.diagnosis.wrong_result import WrongResult, try_reading
from attncheck.judging.alternatives import AppliedReading
from attncheck.judging.judge_stages import stage_agrees
from attncheck.reading.problem import Problem
from attncheck.spec import ACCURACY_PREFIX, stage_position
from attncheck.spec.verdicts import Verdict

CaseKey = TypeVar("CaseKey")
MAX_SEARCH_ROUNDS = 4
"""Maximum number of further readings. A choice: each costs a round of examinations."""
MIN_CASES_OF_CONVENTION, MIN_CASES_OF_MISTAKE = 1, 2
"""Minimum number of cases that must name a further reading, if it is a convention or a mistake."""
MAX_EXAMINED = 24
"""Maximum number of cases that are examined again in a round: as many as ``run.MAX_EXAMINED``. A choice, like that."""
MAX_READING_FORMS = 6
"""Maximum number of combined forms tried on a case: causality and a window, for example, may use different corners.

A choice: each costs one exact answer; with fewer, a form that comes late is missed.
"""
MAX_COMBINATIONS = 600
"""Maximum number of combinations tried on the cases of one implementation.

A choice: combinations grow exponentially with the known readings, and each costs at least one exact answer. Cases that
are left over stay unnamed.
"""


@dataclass(eq=False)
class ComposedCase:
    """A failing case with its first failing stage and its operation; caches the evidence under known readings."""

    wrong_result: WrongResult
    first_failing_stage: str
    operation: str
    _evidence_cache: dict[tuple[str, ...], tuple[AppliedReading, Evidence] | None] = field(default_factory=dict)

    def match_together(self, names: Sequence[str]) -> Match | None:
        """Return the fit of several readings at once; None if they do not match the case together."""
        readings = islice(combined_readings(self.wrong_result.problem, names), MAX_READING_FORMS)
        fitting = next(filter(None, (try_reading(self.wrong_result, reading) for reading in readings)), None)
        return None if fitting is None else make_match(fitting, self.first_failing_stage)

    def evidence_under(self, names: Sequence[str]) -> tuple[AppliedReading, Evidence] | None:
        """Return the named readings combined, and the further evidence of the case under them.

        None if no named reading applies to the case, or if nothing fails under them.
        """
        reading = (
            next(combined_readings(self.wrong_result.problem, names), None)
            if names
            else AppliedReading(self.wrong_result.problem)
        )
        if reading is None:
            return None
        key = tuple(reading.name.split(CONVENTIONS_SEPARATOR))
        if key not in self._evidence_cache:
            evidence = self._examine_under(reading)
            self._evidence_cache[key] = None if evidence is None else (reading, evidence)
        return self._evidence_cache[key]

    def _examine_under(self, reading: AppliedReading) -> Evidence | None:
        rounding_model, stages = (
            self.wrong_result.rounding_model,
            {**self.wrong_result.failing_stages, **self.wrong_result.right_stages},
        )
        is_read = bool(reading.name)
        truth = (
            self.wrong_result.case_readings.truth_of(reading, rounding_model, stages)
            if is_read
            else self.wrong_result.truth
        )
        if truth is None or not stages.keys() <= truth.exact.keys():
            return None
        if any(truth.exact[stage].shape != array.shape for stage, array in stages.items()):
            return None
        references = ((stage, truth.stage_reference(stage, rounding_model, array)) for stage, array in stages.items())
        right = {stage: stages[stage] for stage, reference in references if stage_agrees(reference, stages[stage])}
        failing = {stage: array for stage, array in stages.items() if stage not in right}
        if not failing:
            return None
        findings = diagnose_case(WrongResult(truth, failing, rounding_model, right))
        return collect_evidence(findings, min(failing, key=stage_position), self.operation)


def explain_by_combinations(cases: Mapping[CaseKey, ComposedCase], counts: Counter[str]) -> dict[CaseKey, Match]:
    """Return the combined fits of the unnamed cases of one implementation, the simplest cases first.

    ``counts`` is the number of cases that name each known reading. Without known readings, the reading that explains
    the most cases is the first one, and the fits are returned only if more than half of the cases have one.
    """
    matches = _find_combinations(cases, counts)
    return matches if counts or 2 * len(matches) > len(cases) else {}


def _find_combinations(cases: Mapping[CaseKey, ComposedCase], counts: Counter[str]) -> dict[CaseKey, Match]:
    known_names = list(dict.fromkeys(_first_joined_name(name) for name, _ in counts.most_common()))
    matches: dict[CaseKey, Match] = {}
    tries = iter(range(MAX_COMBINATIONS))
    for _ in range(MAX_SEARCH_ROUNDS + 1):
        unnamed = {unit: case for unit, case in cases.items() if unit not in matches}
        matches |= _match_known_readings(unnamed, known_names, tries)
        unnamed = {unit: case for unit, case in unnamed.items() if unit not in matches}
        more = _match_one_more_reading(unnamed, known_names)
        new = Counter(_first_joined_name(match.name.rpartition(CONVENTIONS_SEPARATOR)[2]) for match in more.values())
        matches |= more
        new_names = [name for name, _ in new.most_common() if name not in known_names]
        if not new_names:
            break
        known_names += new_names
    return {unit: _sort_combined_readings(match) for unit, match in matches.items()}


def _first_joined_name(name: str) -> str:
    """Return the first of the joined names of readings that no case distinguishes."""
    return name.partition(NAME_SEPARATOR)[0]


def _sort_combined_readings(match: Match) -> Match:
    """Return a combined fit with its parts sorted by name, so that they have the same order in every case."""
    names, texts = match.name.split(CONVENTIONS_SEPARATOR), match.description.split(DESCRIPTIONS_SEPARATOR)
    if len(names) != len(texts):
        return match
    parts = sorted(zip(names, texts, strict=True))
    return replace(
        match,
        name=CONVENTIONS_SEPARATOR.join(name for name, _ in parts),
        description=DESCRIPTIONS_SEPARATOR.join(text for _, text in parts),
    )


def _match_known_readings(
    cases: Mapping[CaseKey, ComposedCase], known_names: Sequence[str], tries: Iterator[int]
) -> dict[CaseKey, Match]:
    """Return the fits of the cases that known readings explain together; larger combinations are tried first."""
    matches: dict[CaseKey, Match] = {}
    for unit, case in cases.items():
        # A reading of rows without a key may apply only together with another reading, which makes rows empty.
        of_rows = {name for name in known_names if name.startswith("empty-rows-")}
        applicable = [
            name
            for name in known_names
            if name in of_rows or any(apply_readings_named(name, case.wrong_result.problem))
        ]
        count = len(applicable)
        sizes = dict.fromkeys(size for size in (count, count - 1, count - 2, 2, 1) if 0 < size <= count)
        for names in (names for size in sizes for names in combinations(applicable, size)):
            if next(tries, None) is None:
                return matches
            if match := case.match_together(names):
                matches[unit] = match
                break
    return matches


def _match_one_more_reading(cases: Mapping[CaseKey, ComposedCase], known_names: Sequence[str]) -> dict[CaseKey, Match]:
    """Return the fits of the cases that the known readings and one more explain: the one that explains most cases.

    If two readings explain equally many cases and disagree in one, the result is empty, unless only one of them is a
    convention.
    """
    every = ((unit, both) for unit, case in cases.items() if (both := _best_evidence(case, known_names)))
    read = dict(islice(every, MAX_EXAMINED))
    explained: dict[str, dict[CaseKey, Match]] = {}
    refuting = Counter(name for _, evidence in read.values() for name in evidence.refuted_names)
    for unit, (_, evidence) in read.items():
        for match in evidence.matches:
            if not match.name.startswith(ACCURACY_PREFIX):
                explained.setdefault(match.name, {}).setdefault(unit, match)
    enough = (matches for name, matches in explained.items() if _is_supported(matches, refuting[name]))
    best = sorted(enough, key=_rank_of_matches, reverse=True)
    for rival in best[1:]:
        shared = best[0].keys() & rival.keys()
        if _rank_of_matches(best[0]) == _rank_of_matches(rival) and any(
            best[0][unit].result_key != rival[unit].result_key for unit in shared
        ):
            return {}
    return {unit: _combine_with_match(read[unit][0], match) for unit, match in best[0].items()} if best else {}


def _best_evidence(case: ComposedCase, known_names: Sequence[str]) -> tuple[AppliedReading, Evidence] | None:
    """Return the evidence of a case under the known readings, or if that has no fit, under none of them."""
    both = case.evidence_under(known_names)
    return both if both is not None and both[1].matches else case.evidence_under(()) or both


def _is_supported(matches: Mapping[CaseKey, Match], refuting: int) -> bool:
    """Return whether enough cases name a reading: with few keys, several readings give the same result by chance."""
    least = MIN_CASES_OF_CONVENTION if _is_convention(matches) else MIN_CASES_OF_MISTAKE
    return len(matches) >= least and MIN_EXPLAINED_PER_REFUTED * len(matches) >= refuting


def _is_convention(matches: Mapping[CaseKey, Match]) -> bool:
    return all(match.verdict == Verdict.SEMANTIC for match in matches.values())


def _rank_of_matches(matches: Mapping[CaseKey, Match]) -> tuple[int, bool]:
    return len(matches), _is_convention(matches)


def _combine_with_match(reading: AppliedReading, match: Match) -> Match:
    if not reading.name:
        return match
    stage = min(reading.first_stage, match.first_failing_stage, key=stage_position)
    verdict = max(reading.verdict.value, match.verdict, key=lambda name: name != Verdict.SEMANTIC)
    description = f"{reading.description}{DESCRIPTIONS_SEPARATOR}{match.description}"
    return replace(
        match,
        name=f"{reading.name}{CONVENTIONS_SEPARATOR}{match.name}",
        description=description,
        first_failing_stage=stage,
        verdict=verdict,
    )


def combined_readings(problem: Problem, names: Sequence[str]) -> Iterator[AppliedReading]:
    """Yield the combination of the named readings that apply to a problem, in each of their forms.

    Example:
        >>> import numpy as np
        >>> ones = {name: np.ones((1, 1, 3, 4)) for name in ("query", "key", "value")}
        >>> problem = Problem("attention", {"is_causal": True, "scale": 2.0}, ones)
        >>> both = next(combined_readings(problem, ["causality-ignored", "scale-one"]))
        >>> both.name, both.first_stage, dict(both.problem.options)
        ('causality-ignored and scale-one', 'scores', {'is_causal': False, 'scale': 1.0})
    """
    for parts in _reading_sequences(problem, names, ()):
        if not parts:
            return
        first = min(parts, key=lambda part: stage_position(part.first_stage))
        name, description = (
            CONVENTIONS_SEPARATOR.join(part.name for part in parts),
            DESCRIPTIONS_SEPARATOR.join(part.description for part in parts),
        )
        verdict = Verdict.SEMANTIC if all(part.verdict is Verdict.SEMANTIC for part in parts) else Verdict.NUMERIC
        problem, stage = parts[-1].problem, first.first_stage
        yield AppliedReading(problem, first_stage=stage, name=name, description=description, verdict=verdict)


def _reading_sequences(
    problem: Problem, names: Sequence[str], parts: tuple[AppliedReading, ...]
) -> Iterator[tuple[AppliedReading, ...]]:
    if not names:
        yield parts
        return
    options = {part.declarable_convention[0] for part in parts if part.declarable_convention is not None}
    forms = (
        form
        for form in apply_readings_named(names[0], problem)
        if form.declarable_convention is None or form.declarable_convention[0] not in options
    )
    has_form = False
    for form in forms:
        has_form = True
        yield from _reading_sequences(form.problem, names[1:], (*parts, form))
    if not has_form:
        yield from _reading_sequences(problem, names[1:], parts)
