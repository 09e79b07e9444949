"""Failing cases that show several readings at once: named by those that others show one by one, and by one more.

What decided cases name is taken together and read into the cases that are left without a name. Where nothing fails
any more, these readings are the name. Where something does, the case is diagnosed again by the exact answer of the case
as it is read so far, and all such cases decide together, as those of a run do (``diagnosis.py``). What they name is one
more reading, and the cases that are left are tried again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, islice
from typing import TypeVar

from attncheck.common.wording import AND, BESIDE
from attncheck.diagnosis.case_evidence import Evidence, Fit
from attncheck.diagnosis.decision import ACCURACY, MOST, OR, evidence_of, fit_of
from attncheck.diagnosis.examine import diagnose_case
from attncheck.diagnosis.readings import readings_named
from attncheck.diagnosis.wrong_result import WrongResult, try_reading
from attncheck.judging.alternatives import Alternative
from attncheck.judging.judge_stages import agrees
from attncheck.reading.problem import Problem
from attncheck.spec import stage_position
from attncheck.spec.verdicts import Verdict

Unit = TypeVar("Unit")
MAX_ROUNDS = 4
"""So many readings, one after the other, are found beside those that cases show by themselves."""
LEAST_OF_CONVENTIONS, LEAST_OF_MISTAKES = 1, 2
"""Cases that name one more reading."""
MAX_EXAMINED = 24
"""Cases that are diagnosed again in a round."""
MAX_FORMS = 6
"""Forms of readings together that are tried on a case: causality and a window may count from corners of their own."""
MAX_TRIED = 600
"""Readings that are tried together on the cases of one implementation."""


@dataclass(eq=False)
class ComposedCase:
    """A failing case of an operation, whose first failing stage is given, and what it comes to as it is read so far."""

    wrong: WrongResult
    stage: str
    operation: str
    _diagnosed: dict[tuple[str, ...], tuple[Alternative, Evidence] | None] = field(default_factory=dict)

    def fit(self, names: Sequence[str]) -> Fit | None:
        """Return readings as one, if the case agrees with all of them together."""
        readings = islice(together(self.wrong.problem, names), MAX_FORMS)
        found = next(filter(None, (try_reading(self.wrong, each) for each in readings)), None)
        return None if found is None else fit_of(found, self.stage)

    def beside(self, names: Sequence[str]) -> tuple[Alternative, Evidence] | None:
        """Return the readings of these names that it has, and what it says beside them; None where it has none."""
        reading = next(together(self.wrong.problem, names), None) if names else Alternative(self.wrong.problem)
        if reading is None:
            return None
        key = tuple(reading.name.split(AND))
        if key not in self._diagnosed:
            evidence = self._evidence(reading)
            self._diagnosed[key] = None if evidence is None else (reading, evidence)
        return self._diagnosed[key]

    def _evidence(self, reading: Alternative) -> Evidence | None:
        rounding_model, stages = self.wrong.rounding_model, {**self.wrong.stages, **self.wrong.right}
        is_read = bool(reading.name)
        truth = self.wrong.readings.truth_of(reading, rounding_model, stages) if is_read else self.wrong.truth
        if truth is None or not stages.keys() <= truth.exact.keys():
            return None
        if any(truth.exact[stage].shape != array.shape for stage, array in stages.items()):
            return None
        references = ((stage, truth.reference(stage, rounding_model, array)) for stage, array in stages.items())
        right = {stage: stages[stage] for stage, reference in references if agrees(reference, stages[stage])}
        failing = {stage: array for stage, array in stages.items() if stage not in right}
        if not failing:
            return None
        findings = diagnose_case(WrongResult(truth, failing, rounding_model, right))
        return evidence_of(findings, min(failing, key=stage_position), self.operation)


def compose(cases: Mapping[Unit, ComposedCase], counts: Counter[str]) -> dict[Unit, Fit]:
    """Return what cases of one implementation show together; ``counts`` are cases that others name one reading of.

    Cases come with the simplest first. Where no other names anything, what explains the most of them comes first, and
    is said if most of them have a name then.
    """
    found = _composed(cases, counts)
    return found if counts or 2 * len(found) > len(cases) else {}


def _composed(cases: Mapping[Unit, ComposedCase], counts: Counter[str]) -> dict[Unit, Fit]:
    settled = list(dict.fromkeys(_one_of(name) for name, _ in counts.most_common()))
    found: dict[Unit, Fit] = {}
    tries = iter(range(MAX_TRIED))
    for _ in range(MAX_ROUNDS + 1):
        left = {unit: case for unit, case in cases.items() if unit not in found}
        found |= _by_settled(left, settled, tries)
        left = {unit: case for unit, case in left.items() if unit not in found}
        more = _beside_settled(left, settled)
        new = Counter(_one_of(fit.name.rpartition(AND)[2]) for fit in more.values())
        found |= more
        new_names = [name for name, _ in new.most_common() if name not in settled]
        if not new_names:
            break
        settled += new_names
    return {unit: _in_order(fit) for unit, fit in found.items()}


def _one_of(name: str) -> str:
    """Return the first of names that are one answer in all cases, as 1/D and the square of 1/sqrt(D)."""
    return name.partition(OR)[0]


def _in_order(fit: Fit) -> Fit:
    """Return a reading of several with its parts in an order that is the same in every case."""
    names, texts = fit.name.split(AND), fit.description.split(BESIDE)
    if len(names) != len(texts):
        return fit
    parts = sorted(zip(names, texts, strict=True))
    return replace(fit, name=AND.join(name for name, _ in parts), description=BESIDE.join(text for _, text in parts))


def _by_settled(cases: Mapping[Unit, ComposedCase], settled: Sequence[str], tries: Iterator[int]) -> dict[Unit, Fit]:
    """Return the cases that are those readings, of which the most are tried first."""
    found: dict[Unit, Fit] = {}
    for unit, case in cases.items():
        own = [name for name in settled if _is_late(name) or [*readings_named(name, case.wrong.problem)]]
        sizes = dict.fromkeys(size for size in (len(own), len(own) - 1, len(own) - 2, 2, 1) if 0 < size <= len(own))
        for names in (names for size in sizes for names in combinations(own, size)):
            if next(tries, None) is None:
                return found
            if fit := case.fit(names):
                found[unit] = fit
                break
    return found


def _is_late(name: str) -> bool:
    """Return whether another reading may make a reading possible: by a corner there may be rows without a key."""
    return name.startswith("empty-rows-")


def _beside_settled(cases: Mapping[Unit, ComposedCase], settled: Sequence[str]) -> dict[Unit, Fit]:
    """Return the cases that agree with the readings that are settled and one more, which explains the most of them.

    Of two that explain as many, and the same ones, none is named, unless one is a convention and the other is not.
    """
    every = ((unit, both) for unit, case in cases.items() if (both := _read_so_far(case, settled)))
    read = dict(islice(every, MAX_EXAMINED))
    explained: dict[str, dict[Unit, Fit]] = {}
    refuting = Counter(name for _, evidence in read.values() for name in evidence.refuted)
    for unit, (_, evidence) in read.items():
        for fit in evidence.fits:
            if not fit.name.startswith(ACCURACY):
                explained.setdefault(fit.name, {}).setdefault(unit, fit)
    enough = {name: fits for name, fits in explained.items() if _is_enough(fits, refuting[name])}
    best = sorted(enough.values(), key=_weight, reverse=True)
    if not best or any(_weight(best[0]) == _weight(other) and _disagree(best[0], other) for other in best[1:]):
        return {}
    return {unit: _with(read[unit][0], fit) for unit, fit in best[0].items()}


def _read_so_far(case: ComposedCase, settled: Sequence[str]) -> tuple[Alternative, Evidence] | None:
    """Return what a case says beside what is settled; by itself, if that is more: causality alone may have a corner."""
    both = case.beside(settled)
    return both if both is not None and both[1].fits else case.beside(()) or both


def _disagree(one: Mapping[Unit, Fit], other: Mapping[Unit, Fit]) -> bool:
    """Return whether a case has both readings, of which it does not tell which it is."""
    return any(one[unit].answer != other[unit].answer for unit in one.keys() & other.keys())


def _is_enough(fits: Mapping[Unit, Fit], refuting: int) -> bool:
    """Return whether so many cases name a reading that it is no chance: of few keys several readings are one."""
    least = LEAST_OF_CONVENTIONS if _is_meant(fits) else LEAST_OF_MISTAKES
    return len(fits) >= least and MOST * len(fits) >= refuting


def _is_meant(fits: Mapping[Unit, Fit]) -> bool:
    return all(fit.verdict == Verdict.SEMANTIC for fit in fits.values())


def _weight(fits: Mapping[Unit, Fit]) -> tuple[int, bool]:
    return len(fits), _is_meant(fits)


def _with(reading: Alternative, fit: Fit) -> Fit:
    if not reading.name:
        return fit
    stage = min(reading.stage, fit.stage, key=stage_position)
    verdict = max(reading.verdict.value, fit.verdict, key=lambda each: each != Verdict.SEMANTIC)
    description = f"{reading.description}{BESIDE}{fit.description}"
    return replace(fit, name=f"{reading.name}{AND}{fit.name}", description=description, stage=stage, verdict=verdict)


def together(problem: Problem, names: Sequence[str]) -> Iterator[Alternative]:
    """Yield readings that are taken one behind the other, those that a problem has, in each of their forms."""
    for parts in _each_behind_other(problem, names, ()):
        if not parts:
            return
        first = min(parts, key=lambda each: stage_position(each.stage))
        name, description = AND.join(each.name for each in parts), BESIDE.join(each.description for each in parts)
        verdict = Verdict.SEMANTIC if all(each.verdict is Verdict.SEMANTIC for each in parts) else Verdict.NUMERIC
        problem, stage = parts[-1].problem, first.stage
        yield Alternative(problem, stage=stage, name=name, description=description, verdict=verdict)


def _each_behind_other(
    problem: Problem, names: Sequence[str], parts: tuple[Alternative, ...]
) -> Iterator[tuple[Alternative, ...]]:
    if not names:
        yield parts
        return
    said = {part.option[0] for part in parts if part.option is not None}
    forms = (each for each in readings_named(names[0], problem) if each.option is None or each.option[0] not in said)
    found = False
    for form in forms:
        found = True
        yield from _each_behind_other(form.problem, names[1:], (*parts, form))
    if not found:
        yield from _each_behind_other(problem, names[1:], parts)
