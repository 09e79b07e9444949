"""Decides the diagnosis of each failing case from the evidence of all failing cases of an implementation.

One case is rarely enough. For example, weights of zero fit every large scale, and a single query that sees all keys
fits both "causality is ignored" and "aligned bottom-right". So each failing case only contributes its ``Evidence``
(``examine.py``): the readings that fit it, and the names of the readings that it refutes. ``decide`` takes the evidence
of all failing cases of one implementation. For each case it returns a ``Decision``: a fit, no name (``UNNAMED``), or
``KEEP``, if the message that was written for this one case stays.

The rules, which ``docs/diagnoses.md`` gives in detail:

1. ``_drop_refuted`` drops the readings that at least as many cases refute as they explain. Of the others, it keeps a
   reading if it explains ``MIN_RATIO`` times as many cases as refute it. It also keeps a reading if another kept
   reading accounts for its refuting cases: then the implementation may have two faults.
2. ``_drop_rare`` drops a reading if it explains fewer cases than remain unnamed with the same first failing stage: one
   other cause of all these cases is more likely. It also drops a reading that explains one or two cases if another
   reading explains many.
3. ``_decision`` compares the remaining readings of each case. A reading whose cases are a proper subset of the cases of
   another reading is dropped. If the remaining readings give the same result in this case, the fit lists all of their
   names.

A kernel of one operation is separate code, so the rules apply to each operation separately. Only an accuracy counts
over all operations. Passing cases are not evaluated again, so they refute no reading here; ``conditions.py`` uses them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TypeVar

from attncheck.diagnosis.case_evidence import Evidence, Fit
from attncheck.judging.alternatives import Alternative
from attncheck.spec import ACCURACY
from attncheck.spec.verdicts import WRONG_NUMBERS, Verdict

Unit = TypeVar("Unit")
MIN_RATIO = 3
"""A reading that explains this many times as many cases as refute it is kept: those may have a second fault."""
CERTAIN = 6
"""A reading is not rare if it explains this many pairs of case and dtype and none refutes it."""
ODD, MANY = 2, 10
"""A reading of up to ``ODD`` pairs is dropped if another one explains more than ``MANY`` times as many."""
FEW = 3
"""Maximum number of mistakes that are listed together if each of them explains all failing cases."""
OR = " or "
"""Separator of the names of readings that the cases cannot distinguish."""


DIAGNOSABLE = (*WRONG_NUMBERS, Verdict.SEMANTIC)
"""Verdicts of stages that a diagnosis examines."""


@dataclass(frozen=True)
class Decision:
    """The diagnosis of one case: a fit or none; or the message that was written for this one case stays."""

    fit: Fit | None = None
    keep_own_message: bool = False


UNNAMED = Decision()
KEEP = Decision(keep_own_message=True)


def evidence_of(findings: Findings, stage: str, operation: str) -> Evidence:
    """Return the evidence of a case from its findings, its first failing stage and its operation."""
    fits = (fit_of(alternative, stage) for alternative in findings.fits)
    return Evidence(tuple(fits), findings.refuted, stage, operation)


def fit_of(alternative: Alternative, stage: str) -> Fit:
    """Return the fit of a reading to a case, in words for the first failing stage of the case."""
    description, unsure = (text.format(stage=stage) for text in (alternative.description, alternative.unsure))
    kind = alternative.stage, alternative.verdict.value, alternative.its_answer
    return Fit(
        alternative.name, description, *kind, unsure, alternative.is_fitted, alternative.factor, alternative.shared
    )


def decide(cases: Mapping[Unit, Evidence]) -> dict[Unit, Decision]:
    """Return the decision for each failing case of one implementation."""
    explained: dict[_ReadingKey, set[Unit]] = {}
    refuting: dict[_ReadingKey, set[Unit]] = {}
    for unit, evidence in cases.items():
        for fit in evidence.fits:
            explained.setdefault(_reading_key(fit.name, evidence), set()).add(unit)
        for name in evidence.refuted:
            refuting.setdefault(_reading_key(name, evidence), set()).add(unit)
    _drop_refuted(explained, refuting)
    _drop_rare(explained, refuting, cases)
    everywhere: dict[str, set[Unit]] = {}
    for (_, name), units in explained.items():
        everywhere.setdefault(name, set()).update(units)
    stages = {
        (evidence.operation, fit.stage)
        for evidence in cases.values()
        for fit in evidence.fits
        if not fit.is_fitted and _reading_key(fit.name, evidence) in explained
    }
    shared = {
        reading: _shared_description(reading[1], [cases[unit] for unit in units])
        for reading, units in explained.items()
    }
    return {
        unit: _decision(evidence, explained, everywhere, stages, shared, len(cases)) for unit, evidence in cases.items()
    }


_ReadingKey = tuple[str, str]
"""Operation and name of a reading; the operation of an accuracy is empty, since it counts over all operations."""


def _reading_key(name: str, evidence: Evidence) -> _ReadingKey:
    return ("" if name.startswith(ACCURACY) else evidence.operation), name


def _drop_refuted(explained: dict[_ReadingKey, set[Unit]], refuting: Mapping[_ReadingKey, set[Unit]]) -> None:
    """Drop refuted readings, except those that explain many more cases, and those of a second fault."""
    for reading in list(explained):
        # Count the cases of this operation, and those of all operations together.
        explaining, against = (
            sum(len(units) for (_, name), units in cases.items() if name == reading[1])
            for cases in (explained, refuting)
        )
        if against >= explaining or len(refuting.get(reading, ())) >= len(explained[reading]):
            del explained[reading]
    kept = {reading for reading, units in explained.items() if MIN_RATIO * len(refuting.get(reading, ())) <= len(units)}
    while dropped := [
        reading
        for reading in explained.keys() - kept
        if reading[1].startswith(ACCURACY) or not _may_be_second_fault(reading, explained, refuting)
    ]:
        for reading in dropped:
            del explained[reading]


def _may_be_second_fault(
    reading: _ReadingKey, explained: Mapping[_ReadingKey, set[Unit]], refuting: Mapping[_ReadingKey, set[Unit]]
) -> bool:
    """Return whether every case that refutes a reading also refutes another reading, which explains other cases."""
    disjoint = [name for name, units in explained.items() if not units & explained[reading]]
    return refuting.get(reading, set()) <= set().union(*(refuting.get(name, set()) for name in disjoint))


def _drop_rare(
    explained: dict[_ReadingKey, set[Unit]], refuting: Mapping[_ReadingKey, set[Unit]], cases: Mapping[Unit, Evidence]
) -> None:
    """Drop readings that explain fewer cases than remain unnamed: one other cause of all of them is more likely.

    Also drop a reading of very few cases if another reading explains very many.
    """
    named = set().union(*explained.values())
    unnamed = [(evidence.operation, evidence.failing) for unit, evidence in cases.items() if unit not in named]
    most = max((len(units) for (_, name), units in explained.items() if not name.startswith(ACCURACY)), default=0)
    for reading, units in list(explained.items()):
        stages = {(cases[unit].operation, cases[unit].failing) for unit in units}
        if reading[1].startswith(ACCURACY):  # one larger error would have refuted it
            if len(units) < most:
                del explained[reading]
            continue
        if len(units) <= ODD and most > MANY * len(units):
            del explained[reading]
            continue
        is_certain = len(units) >= CERTAIN and not refuting.get(reading)
        if len(units) == 1:  # a single case is compared with all that remain, whatever their operation
            stages |= {evidence for evidence in unnamed if evidence[1] == cases[next(iter(units))].failing}
        if not is_certain and sum(failing in stages for failing in unnamed) > len(units):
            del explained[reading]


def _shared_description(name: str, cases: Sequence[Evidence]) -> str:
    """Return the description that a reading has in all cases that it explains; empty if the descriptions differ.

    For a fitted number, the cases must state different values: in a single case, a ratio fits any value.
    """
    fits = [fit for evidence in cases for fit in evidence.fits if fit.name == name]
    is_enough = not any(fit.is_fitted for fit in fits) or len({fit.description for fit in fits}) > 1
    texts = {fit.shared for fit in fits}
    return texts.pop() if is_enough and len(texts) == 1 else ""


def _decision(
    evidence: Evidence,
    explained: Mapping[_ReadingKey, set[Unit]],
    everywhere: Mapping[str, set[Unit]],
    stages: Set[tuple[str, str]],
    shared: Mapping[_ReadingKey, str],
    count: int,
) -> Decision:
    """Return the decision for one of ``count`` failing cases.

    ``explained`` has the units of each kept reading in its operation, ``everywhere`` in all operations by name.
    ``stages`` are the pairs of operation and stage at which a kept reading without a fitted number begins.
    """
    keys = {fit: _reading_key(fit.name, evidence) for fit in evidence.fits}
    named = {fit: explained[key] for fit, key in keys.items() if key in explained}
    remaining = [fit for fit in named if not (fit.is_fitted and (evidence.operation, fit.stage) in stages)]
    for units_of in (named, {fit: everywhere[fit.name] for fit in named}):
        remaining = [fit for fit in remaining if not any(units_of[fit] < units_of[wider] for wider in remaining)]
    if not remaining:
        return UNNAMED
    if all(fit.name.startswith(ACCURACY) for fit in remaining):  # each is within the next one: the tightest is first
        remaining = remaining[:1]
    answers = {fit.answer for fit in remaining}
    has_convention = any(fit.verdict == Verdict.SEMANTIC for fit in remaining)
    all_explain_all = all(len(everywhere[fit.name]) == count for fit in remaining)
    if len(answers) == 1 or (len(answers) <= FEW and not has_convention and all_explain_all):
        joined, texts = remaining[0], {shared[keys[fit]] for fit in remaining}
        if len(remaining) > 1:  # for example, two formulas of the scale with the same value in every case
            by_answer = {fit.answer: fit for fit in reversed(remaining)}
            description = OR.join(fit.unsure or fit.description for fit in reversed(by_answer.values()))
            joined = replace(joined, name=OR.join(sorted({fit.name for fit in remaining})), description=description)
        return Decision(replace(joined, description=texts.pop() or joined.description) if len(texts) == 1 else joined)
    return KEEP if has_convention else UNNAMED


@dataclass(frozen=True)
class Wording:
    """The columns of a stage's row that a diagnosis changes."""

    verdict: str
    message: str
    begins_at: str
    diagnosis: str | None = None


def reworded(decision: Decision, judged: Wording) -> Wording | None:
    """Return the columns of a judged row under a decision; None if the row keeps its own message."""
    if decision.keep_own_message:
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
    """The result of examining one failing case: the readings that fit, nearest first, and the names of refuted ones.

    The ``open`` readings were not tried, because too many others were nearer; they may fit as well.
    """

    fits: tuple[Alternative, ...] = ()
    refuted: frozenset[str] = frozenset()
    open: frozenset[str] = frozenset()

    @property
    def name(self) -> str | None:
        """The joined names of all readings with the same answer as ``named``; None if there is no diagnosis."""
        if (named := self.named) is None:
            return None
        return OR.join(sorted({reading.name for reading in self.fits if reading.its_answer == named.its_answer}))

    @property
    def named(self) -> Alternative | None:
        """The diagnosis of this one case: the only reading that fits; if several fit, the first convention among them.

        A result that is right under another convention gets the verdict ``semantic``, even if a mistake fits, too.
        """
        answers = {fit.its_answer: fit for fit in reversed(self.fits)}
        if not answers:
            return None
        if len(answers) == 1:
            first = self.fits[0]
            shared = {"" if fit.is_fitted else fit.shared for fit in self.fits}
            if len(shared) == 1 and (text := shared.pop()):
                return replace(first, description=text)
            return replace(first, description=first.unsure) if len(self.fits) > 1 and first.unsure else first
        convention = next((fit for fit in self.fits if fit.verdict is Verdict.SEMANTIC), None)
        if convention is None:
            return None
        others = [fit.description for fit in answers.values() if fit.its_answer != convention.its_answer][::-1]
        description = f"{convention.description} (or {', or '.join(others)}: this case does not tell them apart)"
        return replace(convention, description=description)


NO_FINDINGS = Findings()
