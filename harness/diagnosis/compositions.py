"""Explains failing cases by several readings at once.

An implementation may have several faults, and then no single reading explains the cases that show two of them.
``compose`` first applies the readings that other cases name to each unnamed case, several at once. If the result
matches, their joined names are the diagnosis of the case. Otherwise ``compose`` examines the case again, compared with
the exact answer under the known readings, and all such cases decide together on one more reading, as in
``decision.py``. Then it tries the remaining cases again with this reading, for at most ``MAX_ROUNDS`` readings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, islice
from typing import TypeVar

from attncheck.common.wording import AND, BESIDE
from attncheck.diagnosis.case_evidence import Evidence, Fit
from attncheck.diagnosis.decision import MIN_RATIO, OR, evidence_of, fit_of
from attncheck.diagnosis.examine import diagnose_case
from attncheck.diagnosis.readings import readings_named
from attncheck.diagnosis.wrong_result import WrongResult, try_reading
from attncheck.judging.alternatives import Alternative
from attncheck.judging.judge_stages import agrees
from attncheck.reading.problem import Problem
from attncheck.spec import ACCURACY, stage_position
from attncheck.spec.verdicts import Verdict

Unit = TypeVar("Unit")
MAX_ROUNDS = 4
"""Maximum number of further readings that are found in addition to those that single cases name."""
LEAST_OF_CONVENTIONS, LEAST_OF_MISTAKES = 1, 2
"""Minimum number of cases that must name a further reading, if it is a convention or a mistake."""
MAX_EXAMINED = 24
"""Maximum number of cases that are examined again in a round."""
MAX_FORMS = 6
"""Maximum number of combined forms tried on a case: causality and a window, for example, may use different corners."""
MAX_TRIED = 600
"""Maximum number of combinations tried on the cases of one implementation."""


@dataclass(eq=False)
class ComposedCase:
    """A failing case with its first failing stage and its operation; caches the evidence under known readings."""

    wrong: WrongResult
    stage: str
    operation: str
    _diagnosed: dict[tuple[str, ...], tuple[Alternative, Evidence] | None] = field(default_factory=dict)

    def fit(self, names: Sequence[str]) -> Fit | None:
        """Return the fit of several readings at once; None if they do not match the case together."""
        readings = islice(together(self.wrong.problem, names), MAX_FORMS)
        fitting = next(filter(None, (try_reading(self.wrong, reading) for reading in readings)), None)
        return None if fitting is None else fit_of(fitting, self.stage)

    def evidence_under(self, names: Sequence[str]) -> tuple[Alternative, Evidence] | None:
        """Return the named readings combined, and the further evidence of the case under them.

        None if no named reading applies to the case, or if nothing fails under them.
        """
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
    """Return the combined fits of the unnamed cases of one implementation, the simplest cases first.

    ``counts`` is the number of cases that name each known reading. Without known readings, the reading that explains
    the most cases is the first one, and the fits are returned only if more than half of the cases have one.
    """
    fits = _compose(cases, counts)
    return fits if counts or 2 * len(fits) > len(cases) else {}


def _compose(cases: Mapping[Unit, ComposedCase], counts: Counter[str]) -> dict[Unit, Fit]:
    known_names = list(dict.fromkeys(_first_name(name) for name, _ in counts.most_common()))
    fits: dict[Unit, Fit] = {}
    tries = iter(range(MAX_TRIED))
    for _ in range(MAX_ROUNDS + 1):
        unnamed = {unit: case for unit, case in cases.items() if unit not in fits}
        fits |= _explain_known(unnamed, known_names, tries)
        unnamed = {unit: case for unit, case in unnamed.items() if unit not in fits}
        more = _explain_one_more(unnamed, known_names)
        new = Counter(_first_name(fit.name.rpartition(AND)[2]) for fit in more.values())
        fits |= more
        new_names = [name for name, _ in new.most_common() if name not in known_names]
        if not new_names:
            break
        known_names += new_names
    return {unit: _in_order(fit) for unit, fit in fits.items()}


def _first_name(name: str) -> str:
    """Return the first of the joined names of readings that no case distinguishes."""
    return name.partition(OR)[0]


def _in_order(fit: Fit) -> Fit:
    """Return a combined fit with its parts sorted by name, so that they have the same order in every case."""
    names, texts = fit.name.split(AND), fit.description.split(BESIDE)
    if len(names) != len(texts):
        return fit
    parts = sorted(zip(names, texts, strict=True))
    return replace(fit, name=AND.join(name for name, _ in parts), description=BESIDE.join(text for _, text in parts))


def _explain_known(
    cases: Mapping[Unit, ComposedCase], known_names: Sequence[str], tries: Iterator[int]
) -> dict[Unit, Fit]:
    """Return the fits of the cases that known readings explain together; larger combinations are tried first."""
    fits: dict[Unit, Fit] = {}
    for unit, case in cases.items():
        # A reading of rows without a key may apply only together with another reading, which makes rows empty.
        of_rows = {name for name in known_names if name.startswith("empty-rows-")}
        applicable = [name for name in known_names if name in of_rows or any(readings_named(name, case.wrong.problem))]
        count = len(applicable)
        sizes = dict.fromkeys(size for size in (count, count - 1, count - 2, 2, 1) if 0 < size <= count)
        for names in (names for size in sizes for names in combinations(applicable, size)):
            if next(tries, None) is None:
                return fits
            if fit := case.fit(names):
                fits[unit] = fit
                break
    return fits


def _explain_one_more(cases: Mapping[Unit, ComposedCase], known_names: Sequence[str]) -> dict[Unit, Fit]:
    """Return the fits of the cases that the known readings and one more explain: the one that explains most cases.

    If two readings explain equally many cases and disagree in one, the result is empty, unless only one of them is a
    convention.
    """
    every = ((unit, both) for unit, case in cases.items() if (both := _best_evidence(case, known_names)))
    read = dict(islice(every, MAX_EXAMINED))
    explained: dict[str, dict[Unit, Fit]] = {}
    refuting = Counter(name for _, evidence in read.values() for name in evidence.refuted)
    for unit, (_, evidence) in read.items():
        for fit in evidence.fits:
            if not fit.name.startswith(ACCURACY):
                explained.setdefault(fit.name, {}).setdefault(unit, fit)
    enough = (fits for name, fits in explained.items() if _is_enough(fits, refuting[name]))
    best = sorted(enough, key=_weight, reverse=True)
    for rival in best[1:]:
        shared = best[0].keys() & rival.keys()
        if _weight(best[0]) == _weight(rival) and any(best[0][unit].answer != rival[unit].answer for unit in shared):
            return {}
    return {unit: _joined_fit(read[unit][0], fit) for unit, fit in best[0].items()} if best else {}


def _best_evidence(case: ComposedCase, known_names: Sequence[str]) -> tuple[Alternative, Evidence] | None:
    """Return the evidence of a case under the known readings, or if that has no fit, under none of them."""
    both = case.evidence_under(known_names)
    return both if both is not None and both[1].fits else case.evidence_under(()) or both


def _is_enough(fits: Mapping[Unit, Fit], refuting: int) -> bool:
    """Return whether enough cases name a reading: with few keys, several readings give the same result by chance."""
    least = LEAST_OF_CONVENTIONS if _is_convention(fits) else LEAST_OF_MISTAKES
    return len(fits) >= least and MIN_RATIO * len(fits) >= refuting


def _is_convention(fits: Mapping[Unit, Fit]) -> bool:
    return all(fit.verdict == Verdict.SEMANTIC for fit in fits.values())


def _weight(fits: Mapping[Unit, Fit]) -> tuple[int, bool]:
    return len(fits), _is_convention(fits)


def _joined_fit(reading: Alternative, fit: Fit) -> Fit:
    if not reading.name:
        return fit
    stage = min(reading.stage, fit.stage, key=stage_position)
    verdict = max(reading.verdict.value, fit.verdict, key=lambda name: name != Verdict.SEMANTIC)
    description = f"{reading.description}{BESIDE}{fit.description}"
    return replace(fit, name=f"{reading.name}{AND}{fit.name}", description=description, stage=stage, verdict=verdict)


def together(problem: Problem, names: Sequence[str]) -> Iterator[Alternative]:
    """Yield the combination of the named readings that apply to a problem, in each of their forms."""
    for parts in _applied_in_turn(problem, names, ()):
        if not parts:
            return
        first = min(parts, key=lambda part: stage_position(part.stage))
        name, description = AND.join(part.name for part in parts), BESIDE.join(part.description for part in parts)
        verdict = Verdict.SEMANTIC if all(part.verdict is Verdict.SEMANTIC for part in parts) else Verdict.NUMERIC
        problem, stage = parts[-1].problem, first.stage
        yield Alternative(problem, stage=stage, name=name, description=description, verdict=verdict)


def _applied_in_turn(
    problem: Problem, names: Sequence[str], parts: tuple[Alternative, ...]
) -> Iterator[tuple[Alternative, ...]]:
    if not names:
        yield parts
        return
    options = {part.option[0] for part in parts if part.option is not None}
    forms = (form for form in readings_named(names[0], problem) if form.option is None or form.option[0] not in options)
    has_form = False
    for form in forms:
        has_form = True
        yield from _applied_in_turn(form.problem, names[1:], (*parts, form))
    if not has_form:
        yield from _applied_in_turn(problem, names[1:], parts)
