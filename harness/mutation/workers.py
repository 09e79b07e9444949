"""The mutation score in several processes: each puts some of the cases to all subjects, and the parts are joined.

What comes of it is what one process finds: every n-th case goes to the same process, so that no kind of case is left to
one of them, and rows and evidence come back in the order of the cases.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context

from attncheck.mutation.catalogue import SUBJECTS
from attncheck.mutation.judgement import ExactJudge
from attncheck.mutation.naming import joined
from attncheck.mutation.score import CaseScorer, JudgeCases, ScoredCases
from attncheck.reading.case import Case

_THREADS = "OPENBLAS_NUM_THREADS"


@dataclass(frozen=True)
class _Job:
    """Some cases with their seeds, and by name the subjects that they are put to."""

    cases: tuple[tuple[Case, int], ...]
    subjects: tuple[str, ...]
    visible: frozenset[str] | None
    caught_enough: frozenset[tuple[str, str, int]]


@contextmanager
def in_processes(count: int) -> Iterator[JudgeCases]:
    """Offer what puts cases to subjects of the catalogue in so many processes."""
    os.environ.setdefault(_THREADS, "1")  # each process has a core, and its products are small
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:

        def judge(scorer: CaseScorer, cases: Sequence[tuple[Case, int]]) -> ScoredCases:
            return _judge_in(pool, count, scorer, cases)

        yield judge


def _judge_in(pool: Executor, count: int, scorer: CaseScorer, cases: Sequence[tuple[Case, int]]) -> ScoredCases:
    names = tuple(subject.name for subject in scorer.subjects)
    visible = None if scorer.visible is None else frozenset(scorer.visible)
    shares = [tuple(cases[first::count]) for first in range(min(count, len(cases)))]
    parts = list(pool.map(_judge, [_Job(share, names, visible, scorer.caught_enough) for share in shares]))
    order = {(case.id, seed): number for number, (case, seed) in enumerate(cases)}
    rows = sorted((row for part in parts for row in part.rows), key=lambda row: order[row["case"], row["seed"]])
    return ScoredCases(rows, joined([part.naming for part in parts], order))


def _judge(job: _Job) -> ScoredCases:
    scorer = CaseScorer([SUBJECTS[name] for name in job.subjects], job.visible, job.caught_enough)
    return scorer.judge(job.cases, ExactJudge())
