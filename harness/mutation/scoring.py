"""The process that puts a unit to subjects: this one, or one of several that each answer the next question."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Generic, Protocol, TypeVar

from attncheck.execution.call import end_with_parent
from attncheck.judging.diagnosis import Evidence
from attncheck.mutation.catalogue import SUBJECTS
from attncheck.mutation.judgement import ExactJudge, JudgeStages, UnitFindings, is_caught
from attncheck.mutation.mutant import Mutant, Subject
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


@dataclass(frozen=True)
class SweepQuestion:
    """Cases of one operation in one dtype and seed, and faults of it that are put to them until one catches each."""

    cases: tuple[Case, ...]
    seed: int
    dtype: str
    subjects: tuple[str, ...]
    visible: frozenset[str] | None = None
    exhaustive: bool = False


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

    def sweep(self, question: SweepQuestion) -> Pending[list[UnitFindings]]:
        """Ask which cases reach faults, up to the first that catches each."""


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

    def sweep(self, question: SweepQuestion) -> list[UnitFindings]:
        """Return what is found of faults, each up to the case that catches it; where exhaustive, of all cases."""
        asked = ((name, self.subjects[name]) for name in question.subjects)
        left = {name: subject for name, subject in asked if isinstance(subject, Mutant)}
        parts = []
        for case in question.cases:
            shown = tuple(name for name, subject in left.items() if subject.is_shown_by(case))
            if shown:
                one = CatchQuestion(case, question.seed, question.dtype, shown, question.visible)
                parts.append(self.findings(one))
                if not question.exhaustive:
                    caught = {name for name, findings in parts[-1].found if is_caught(findings)}
                    left = {name: subject for name, subject in left.items() if name not in caught}
        return parts

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

    def sweep(self, question: SweepQuestion) -> Answered[list[UnitFindings]]:
        """Return which cases reach faults, up to the first that catches each."""
        return Answered(self._scorer.sweep(question))


_THREADS = "OPENBLAS_NUM_THREADS"
_OPEN_QUESTIONS = 8
"""Questions per process that are open at a time: more keep it from waiting, fewer know better what is caught so far."""


@contextmanager
def in_processes(count: int, store: Store = NO_STORE) -> Iterator[ScorersInProcesses]:
    """Offer so many processes that put cases to subjects of the catalogue; findings are kept in a store."""
    os.environ.setdefault(_THREADS, "1")  # each process has a core, and its products are small
    with ProcessPoolExecutor(count, get_context("spawn"), _prepare, (store,)) as pool:
        yield ScorersInProcesses(pool, count * _OPEN_QUESTIONS, store)
    store.trim()


@dataclass(frozen=True)
class _FromProcess(Generic[Found]):
    """What a process answers, with what its store did for it."""

    future: Future[tuple[Found, Counter[str]]]
    store: Store

    def done(self) -> bool:
        """Whether the process has answered."""
        return self.future.done()

    def result(self) -> Found:
        """Wait for the answer, once."""
        found, counts = self.future.result()
        self.store.counts.update(counts)
        return found


@dataclass(frozen=True)
class ScorersInProcesses:
    """Has questions answered by processes of a pool."""

    pool: ProcessPoolExecutor
    at_a_time: int
    store: Store

    def judge(self, question: CatchQuestion) -> _FromProcess[UnitFindings]:
        """Ask what is found of subjects."""
        return _FromProcess(self.pool.submit(_judge, question), self.store)

    def evidence(self, question: CatchQuestion) -> _FromProcess[Mapping[str, Evidence | None]]:
        """Ask what a unit says of the faults of subjects that fail it."""
        return _FromProcess(self.pool.submit(_find_evidence, question), self.store)

    def sweep(self, question: SweepQuestion) -> _FromProcess[list[UnitFindings]]:
        """Ask which cases reach faults, up to the first that catches each."""
        return _FromProcess(self.pool.submit(_sweep, question), self.store)


_scorer: Scorer | None = None


def _prepare(store: Store) -> None:
    """Called once in each process, which ends with the one that asks."""
    end_with_parent()
    global _scorer
    _scorer = Scorer(SUBJECTS, ExactJudge(), store)


def _judge(question: CatchQuestion) -> tuple[UnitFindings, Counter[str]]:
    assert _scorer is not None
    _scorer.store.counts.clear()
    return _scorer.findings(question), Counter(_scorer.store.counts)


def _find_evidence(question: CatchQuestion) -> tuple[Mapping[str, Evidence | None], Counter[str]]:
    assert _scorer is not None
    _scorer.store.counts.clear()
    return _scorer.evidence(question), Counter(_scorer.store.counts)


def _sweep(question: SweepQuestion) -> tuple[list[UnitFindings], Counter[str]]:
    assert _scorer is not None
    _scorer.store.counts.clear()
    return _scorer.sweep(question), Counter(_scorer.store.counts)
