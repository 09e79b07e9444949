"""Who puts a unit to subjects: this process, or others (``workers.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from attncheck.judging.diagnosis import Evidence
from attncheck.mutation.findings import UnitFindings
from attncheck.mutation.judgement import JudgeStages
from attncheck.mutation.mutant import Subject
from attncheck.mutation.unit import UnitScorer, unit_of
from attncheck.reading.case import Case
from attncheck.store import NO_STORE, Store

Found = TypeVar("Found")
Found_co = TypeVar("Found_co", covariant=True)


@dataclass(frozen=True)
class CatchQuestion:
    """A case in one dtype and seed, and by name the subjects that it is put to; ``visible`` hides other stages."""

    case: Case
    seed: int
    dtype: str
    subjects: tuple[str, ...]
    visible: frozenset[str] | None = None


class Pending(Protocol[Found_co]):
    """What has been asked for."""

    def done(self) -> bool:
        """Whether it is there."""

    def result(self) -> Found_co:
        """Wait for it."""


class Scorers(Protocol):
    """Who answers questions."""

    @property
    def at_a_time(self) -> int:
        """How many may be open."""

    def judge(self, question: CatchQuestion) -> Pending[UnitFindings]:
        """Ask what is found of subjects."""

    def evidence(self, question: CatchQuestion) -> Pending[Mapping[str, Evidence | None]]:
        """Ask what a unit says of the faults of subjects that fail it."""


@dataclass(frozen=True)
class Scorer:
    """Answers questions about subjects, one after the other."""

    subjects: Mapping[str, Subject]
    judge_stages: JudgeStages
    store: Store = NO_STORE

    def findings(self, question: CatchQuestion) -> UnitFindings:
        """Return what is found of each subject."""
        scorer = self._scorer(question)
        unit, asked = scorer.unit, ((name, scorer.findings(self.subjects[name])) for name in question.subjects)
        found = tuple((name, findings) for name, findings in asked if findings is not None)
        scorer.keep()
        drawn = unit.case.random is not None
        return UnitFindings(unit.case.id, unit.dtype, unit.seed, drawn, unit.is_for_all, unit.serves_naming, found)

    def evidence(self, question: CatchQuestion) -> dict[str, Evidence | None]:
        """Return what the unit says of the fault of each subject."""
        scorer = self._scorer(question)
        found = {name: scorer.evidence(self.subjects[name]) for name in question.subjects}
        scorer.keep()
        return found

    def _scorer(self, question: CatchQuestion) -> UnitScorer:
        unit = unit_of(question.case, question.seed, question.dtype)
        return UnitScorer(unit, self.judge_stages, question.visible, self.store)


@dataclass(frozen=True)
class Answered(Generic[Found]):
    """What is there as soon as it is asked for."""

    found: Found

    def done(self) -> bool:
        """It is."""
        return True

    def result(self) -> Found:
        """Return it."""
        return self.found


class ScorersHere:
    """Answers in this process."""

    at_a_time = 1

    def __init__(self, subjects: Mapping[str, Subject], judge_stages: JudgeStages, store: Store = NO_STORE) -> None:
        self._scorer = Scorer(subjects, judge_stages, store)

    def judge(self, question: CatchQuestion) -> Answered[UnitFindings]:
        """Return what is found of subjects."""
        return Answered(self._scorer.findings(question))

    def evidence(self, question: CatchQuestion) -> Answered[Mapping[str, Evidence | None]]:
        """Return what a unit says of the faults of subjects that fail it."""
        return Answered(self._scorer.evidence(question))
