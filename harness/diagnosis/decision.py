"""The mistake of an implementation, by all of its failing cases together: the reading that explains all it can.

One case is seldom enough. Weights of zero are those of every large scale, and one query that sees all keys ignores
causality or aligns it bottom right. So each failing case only says which readings fit it and which it refutes
(``examine.py``), and a run decides, for each implementation, by the rule of ``docs/diagnoses.md``. Cases
that agree refute nothing: what was right is not computed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TypeVar

from attncheck.diagnosis.case_evidence import Evidence, Fit
from attncheck.judging.alternatives import Alternative
from attncheck.spec.verdicts import WRONG_NUMBERS, Verdict

Unit = TypeVar("Unit")
ACCURACY = "accuracy-of-"
"""What names begin with that say how large errors are, and not why."""
MOST = 3
"""So many times as many cases as refute a reading it has to explain, until these count as having another fault, too."""
CERTAIN = 6
"""So many cases and dtypes name a reading that none refutes, whatever else is wrong."""
ODD, MANY = 2, 10
"""A reading of so few cases and dtypes is none beside one of so many times as many: an odd case looks like anything."""
FEW = 3
"""So many mistakes are named together where no case tells them apart."""
OR = " or "
"""Between names of which no case tells which it is."""


DIAGNOSABLE = (*WRONG_NUMBERS, Verdict.SEMANTIC)
"""Verdicts of stages that a diagnosis examines."""


@dataclass(frozen=True)
class Decision:
    """What is named of one case: a reading, or nothing; or what the case says by itself is to stand."""

    fit: Fit | None = None
    stands: bool = False


NAMELESS = Decision()
STANDS = Decision(stands=True)


def evidence_of(findings: Findings, stage: str, operation: str) -> Evidence:
    """Return what findings say, for a case whose first failing stage is given."""
    fits = (fit_of(each, stage) for each in findings.fits)
    return Evidence(tuple(fits), findings.refuted, stage, operation)


def fit_of(found: Alternative, stage: str) -> Fit:
    """Return what is kept of a reading that explains a case whose first failing stage is given."""
    description, unsure = (text.format(stage=stage) for text in (found.description, found.unsure))
    kind = found.stage, found.verdict.value, found.its_answer
    return Fit(found.name, description, *kind, unsure, found.is_fitted, found.factor, found.shared)


def decide(cases: Mapping[Unit, Evidence]) -> dict[Unit, Decision]:
    """Decide what to name of each failing case of one implementation."""
    explained: dict[_Reading, set[Unit]] = {}
    refuting: dict[_Reading, set[Unit]] = {}
    for unit, evidence in cases.items():
        for fit in evidence.fits:
            explained.setdefault(_reading(fit.name, evidence), set()).add(unit)
        for name in evidence.refuted:
            refuting.setdefault(_reading(name, evidence), set()).add(unit)
    _leave_out_refuted(explained, refuting)
    _leave_out_rare(explained, refuting, cases)
    everywhere: dict[str, set[Unit]] = {}
    for (_, name), units in explained.items():
        everywhere.setdefault(name, set()).update(units)
    stages = {
        (evidence.operation, fit.stage)
        for evidence in cases.values()
        for fit in evidence.fits
        if not fit.is_fitted and _reading(fit.name, evidence) in explained
    }
    shared = {reading: _shared(reading[1], [cases[unit] for unit in units]) for reading, units in explained.items()}
    return {
        unit: _decision(evidence, explained, everywhere, stages, shared, len(cases)) for unit, evidence in cases.items()
    }


_Reading = tuple[str, str]
"""An operation, whose function is code of its own, and a name; an accuracy is that of all operations."""


def _reading(name: str, evidence: Evidence) -> _Reading:
    return ("" if name.startswith(ACCURACY) else evidence.operation), name


def _leave_out_refuted(explained: dict[_Reading, set[Unit]], refuting: Mapping[_Reading, set[Unit]]) -> None:
    """Leave out what cases refute, except for what explains most, and where a case has two faults with a name each."""
    for reading in list(explained):
        if _is_refuted(reading, explained, refuting):
            del explained[reading]
    most = {reading for reading, units in explained.items() if MOST * len(refuting.get(reading, ())) <= len(units)}
    while out := [
        reading
        for reading in explained.keys() - most
        if reading[1].startswith(ACCURACY) or not _is_beside_others(reading, explained, refuting)
    ]:
        for reading in out:
            del explained[reading]


def _is_refuted(
    reading: _Reading, explained: Mapping[_Reading, set[Unit]], refuting: Mapping[_Reading, set[Unit]]
) -> bool:
    """Return whether as many cases refute a reading as it explains, of its operation or of all together."""
    explaining, against = (
        sum(len(units) for (_, name), units in cases.items() if name == reading[1]) for cases in (explained, refuting)
    )
    return against >= explaining or len(refuting.get(reading, ())) >= len(explained[reading])


def _is_beside_others(
    reading: _Reading, explained: Mapping[_Reading, set[Unit]], refuting: Mapping[_Reading, set[Unit]]
) -> bool:
    """Whether every case that refutes a reading refutes another one, too, which explains other cases."""
    others = [refuting.get(other, set()) for other, units in explained.items() if not units & explained[reading]]
    return refuting.get(reading, set()) <= set().union(*others)


def _leave_out_rare(
    explained: dict[_Reading, set[Unit]], refuting: Mapping[_Reading, set[Unit]], cases: Mapping[Unit, Evidence]
) -> None:
    """Leave out what explains fewer cases than nothing explains: more likely they have all one cause, another one.

    The same holds of an odd case beside what explains very many.
    """
    named = set().union(*explained.values())
    nameless = [(each.operation, each.failing) for unit, each in cases.items() if unit not in named]
    most = max((len(units) for (_, name), units in explained.items() if not name.startswith(ACCURACY)), default=0)
    for reading, units in list(explained.items()):
        stages = {(cases[unit].operation, cases[unit].failing) for unit in units}
        if reading[1].startswith(ACCURACY):  # which one error that is larger would have refuted
            if len(units) < most:
                del explained[reading]
            continue
        if len(units) <= ODD and most > MANY * len(units):
            del explained[reading]
            continue
        is_certain = len(units) >= CERTAIN and not refuting.get(reading)
        if len(units) == 1:  # a single case is compared with all that remain, whatever their operation
            stages |= {each for each in nameless if each[1] == cases[next(iter(units))].failing}
        if not is_certain and sum(failing in stages for failing in nameless) > len(units):
            del explained[reading]


def _shared(name: str, cases: Sequence[Evidence]) -> str:
    """Return the description that all cases share which a reading explains; empty where they share none.

    Of a number that was fitted they have to mean different ones: some ratio is that of every single one.
    """
    fits = [fit for evidence in cases for fit in evidence.fits if fit.name == name]
    is_enough = not any(fit.is_fitted for fit in fits) or len({fit.description for fit in fits}) > 1
    texts = {fit.shared for fit in fits}
    return texts.pop() if is_enough and len(texts) == 1 else ""


def _decision(
    evidence: Evidence,
    explained: Mapping[_Reading, set[Unit]],
    everywhere: Mapping[str, set[Unit]],
    stages: Set[tuple[str, str]],
    shared: Mapping[_Reading, str],
    count: int,
) -> Decision:
    named = {fit: explained[reading] for fit in evidence.fits if (reading := _reading(fit.name, evidence)) in explained}
    left = [fit for fit in named if not (fit.is_fitted and (evidence.operation, fit.stage) in stages)]
    for units_of in (named, {fit: everywhere[fit.name] for fit in named}):
        left = [fit for fit in left if not any(units_of[fit] < units_of[other] for other in left)]
    if not left:
        return NAMELESS
    if all(fit.name.startswith(ACCURACY) for fit in left):  # one is within the next; they come the tightest first
        left = left[:1]
    if len({fit.answer for fit in left}) == 1 or _is_one_of_few(left, everywhere, count):
        found = left[0] if len(left) == 1 else _with_all_names(left)
        texts = {shared[_reading(fit.name, evidence)] for fit in left}
        return Decision(replace(found, description=texts.pop() or found.description) if len(texts) == 1 else found)
    return STANDS if any(fit.verdict == Verdict.SEMANTIC for fit in left) else NAMELESS


def _is_one_of_few(fits: Sequence[Fit], everywhere: Mapping[str, set[Unit]], count: int) -> bool:
    """Return whether each of a few mistakes explains all failing cases, so that none tells them apart."""
    is_few = len({fit.answer for fit in fits}) <= FEW and not any(fit.verdict == Verdict.SEMANTIC for fit in fits)
    return is_few and all(len(everywhere[fit.name]) == count for fit in fits)


def _with_all_names(fits: Sequence[Fit]) -> Fit:
    """Bring readings together that no case tells apart, such as scales that are the same number in every case."""
    first, by_answer = fits[0], {fit.answer: fit for fit in reversed(fits)}
    description = OR.join(fit.unsure or fit.description for fit in reversed(by_answer.values()))
    return replace(first, name=OR.join(sorted({fit.name for fit in fits})), description=description)


@dataclass(frozen=True)
class Wording:
    """How the row of a stage reads."""

    verdict: str
    message: str
    begins_at: str
    diagnosis: str | None = None


def reworded(decision: Decision, judged: Wording) -> Wording | None:
    """Return how a row reads under a decision, of which it is known how it was judged; None where it stays as it is."""
    if decision.stands:
        return None
    fit = decision.fit
    if fit is None:
        return judged
    begins_at = fit.stage or judged.begins_at
    if fit.verdict != Verdict.SEMANTIC:
        return Wording(judged.verdict, f"{fit.description}; {judged.message}", begins_at, fit.name)
    return Wording(Verdict.SEMANTIC, fit.description, begins_at, fit.name)


@dataclass(frozen=True, eq=False)
class Findings:
    """What one failing case says: the readings that fit, nearest first, and the names of those that it refutes.

    Those that are ``open`` may fit as well: they were not tried, because there were too many as near.
    """

    fits: tuple[Alternative, ...] = ()
    refuted: frozenset[str] = frozenset()
    open: frozenset[str] = frozenset()

    @property
    def name(self) -> str | None:
        """The names of all readings with the answer that this case names, as ``decide`` joins them; None for none."""
        if (named := self.named) is None:
            return None
        return OR.join(sorted({reading.name for reading in self.fits if reading.its_answer == named.its_answer}))

    @property
    def named(self) -> Alternative | None:
        """What this case names by itself: the reading that fits, if it is the only one, and a convention in any case.

        A result that is right under another convention is that, whatever else gives the same numbers here.
        """
        answers = {each.its_answer: each for each in reversed(self.fits)}
        if not answers:
            return None
        if len(answers) == 1:
            first, shared = self.fits[0], {"" if each.is_fitted else each.shared for each in self.fits}
            if len(shared) == 1 and (text := shared.pop()):
                return replace(first, description=text)
            return replace(first, description=first.unsure) if len(self.fits) > 1 and first.unsure else first
        convention = next((each for each in self.fits if each.verdict is Verdict.SEMANTIC), None)
        if convention is None:
            return None
        others = [each.description for each in answers.values() if each.its_answer != convention.its_answer][::-1]
        description = f"{convention.description} (or {', or '.join(others)}: this case does not tell them apart)"
        return replace(convention, description=description)


NO_FINDINGS = Findings()
