"""The mutation score in several processes: each answers the next question, one case in one dtype at a time."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Generic, TypeVar

from attncheck.execution.call import end_with_parent
from attncheck.judging.diagnosis import Evidence
from attncheck.mutation.catalogue import SUBJECTS
from attncheck.mutation.findings import UnitFindings
from attncheck.mutation.judgement import ExactJudge
from attncheck.mutation.scoring import CatchQuestion, Scorer
from attncheck.store import NO_STORE, Store

_THREADS = "OPENBLAS_NUM_THREADS"
_OPEN_QUESTIONS = 8
"""Questions per process that are open at a time: more keep it from waiting, fewer know better what is caught so far."""

Found = TypeVar("Found")


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
