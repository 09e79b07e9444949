"""The mutation score: which cases catch which fault, at which stage, and what common tolerances would have said."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from attncheck.errors import UsageError
from attncheck.mutation.catalogue import CONTROLS, EQUIVALENT, MUTANTS
from attncheck.mutation.findings import UnitFindings, is_caught
from attncheck.mutation.judgement import ExactJudge, JudgeStages
from attncheck.mutation.mutant import Mutant, Subject
from attncheck.mutation.naming import Naming, asked_for_names
from attncheck.mutation.scoring import Pending, Question, Scorers, ScorersHere
from attncheck.mutation.summary import MutationFrames, summarise
from attncheck.mutation.unit import MAX_SCORES_FOR_ALL, count_scores, judged_dtypes
from attncheck.reading.case import Case

SEED_STEP = 1_000_003
"""Fresh seeds lie so far apart (an odd number) that no case's k-th seed is another case's own."""

ENOUGH_CASES = 2
"""Cases that have to catch a fault, in a dtype and a seed, before it is caught often enough."""
LARGE_AT_A_TIME = 16
"""Large cases that are put to faults before it is seen which of them are caught often enough."""


@dataclass(frozen=True)
class _PlannedUnit:
    """One case in one dtype and seed; faults that enough cases of rounds before ``round`` catch are not asked."""

    round: int
    case: Case
    seed: int
    dtype: str


@dataclass
class _Caught:
    """In which rounds each fault is caught so far, by name, dtype and seed."""

    _rounds: dict[tuple[str, str, int], list[int]] = field(default_factory=dict)

    def add(self, number: int, part: UnitFindings) -> None:
        """Take note of what a unit of a round catches."""
        for subject, findings in part.found:
            if is_caught(findings):
                self._rounds.setdefault((subject, part.dtype, part.seed), []).append(number)

    def is_asked(self, subject: Subject, unit: _PlannedUnit) -> bool:
        """Whether a unit is put to a subject: right kernels always are, faults until enough cases catch them."""
        if not isinstance(subject, Mutant):
            return True
        rounds = self._rounds.get((subject.name, unit.dtype, unit.seed), [])
        return sum(each < unit.round for each in rounds) < ENOUGH_CASES


def run_mutants(
    cases: Iterable[Case],
    seeds: Sequence[int] = (0,),
    *,
    judge_stages: JudgeStages | None = None,
    scorers: Scorers | None = None,
    subjects: Sequence[Subject] = (*MUTANTS, *CONTROLS),
    visible: Collection[str] | None = None,
) -> MutationFrames:
    """Run every subject on every case, dtype and seed.

    Seed 0 is the case's own; seed k redraws what is drawn. Cases that draw nothing count in every seed. Large cases
    come last, some at a time, and are put to faults alone that fewer than ``ENOUGH_CASES`` others caught. ``visible``
    hides all other stages, to see what a fault leaves for somebody who has the output alone. ``scorers`` may put cases
    to subjects in several processes (``workers.py``); what comes of it is the same.
    """
    scorers = scorers or ScorersHere({each.name: each for each in subjects}, judge_stages or ExactJudge())
    shown = None if visible is None else frozenset(visible)
    plan = _planned(cases, seeds)
    parts = _exactly_asked(plan, list(_judged(plan, subjects, shown, scorers)), subjects)
    names = _named(plan, parts, shown, scorers).names()
    return summarise(parts, subjects, seeds, names)


def _judged(
    plan: Sequence[_PlannedUnit], subjects: Sequence[Subject], visible: frozenset[str] | None, scorers: Scorers
) -> Iterator[UnitFindings]:
    """Yield what is found of each unit in turn.

    Nobody waits for the end of a round: faults may be asked that turn out to have been caught often enough.
    """
    caught = _Caught()
    waiting: deque[tuple[_PlannedUnit, Pending[UnitFindings]]] = deque()

    def first() -> UnitFindings:
        unit, pending = waiting.popleft()
        part = pending.result()
        caught.add(unit.round, part)
        return part

    for unit in plan:
        while waiting and (waiting[0][1].done() or len(waiting) >= scorers.at_a_time):
            yield first()
        asked = (each.name for each in subjects if unit.dtype in each.dtypes and caught.is_asked(each, unit))
        waiting.append((unit, scorers.judge(_question(unit, tuple(asked), visible))))
    while waiting:
        yield first()


def _exactly_asked(
    plan: Sequence[_PlannedUnit], parts: Sequence[UnitFindings], subjects: Sequence[Subject]
) -> list[UnitFindings]:
    """Drop what a round would not have asked, had it waited for those before it: in any order the same remains."""
    named, caught, found = {each.name: each for each in subjects}, _Caught(), list[UnitFindings]()
    for _, group in groupby(zip(plan, parts, strict=True), key=lambda each: each[0].round):
        of_round = [
            (unit, part.of(lambda name, unit=unit: caught.is_asked(named[name], unit)))  # type: ignore[misc]
            for unit, part in group
        ]
        for unit, part in of_round:
            caught.add(unit.round, part)
            found.append(part)
    return found


def _named(
    plan: Sequence[_PlannedUnit],
    parts: Sequence[UnitFindings],
    visible: frozenset[str] | None,
    scorers: Scorers,
) -> Naming:
    """Ask the first cases that each subject fails what they say of its fault; those that are put to all of them."""
    small = [(unit, part) for unit, part in zip(plan, parts, strict=True) if not unit.round]
    asked = zip(small, asked_for_names(part for _, part in small), strict=True)
    pending = [(unit, scorers.evidence(_question(unit, names, visible))) for (unit, _), names in asked if names]
    naming = Naming()
    for unit, found in pending:
        for name, evidence in found.result().items():
            if evidence is not None:
                naming.add(name, (unit.case.id, unit.dtype, unit.seed), evidence)
    return naming


def _question(unit: _PlannedUnit, subjects: tuple[str, ...], visible: frozenset[str] | None) -> Question:
    return Question(unit.case, unit.seed, unit.dtype, subjects, visible)


def _planned(cases: Iterable[Case], seeds: Sequence[int]) -> list[_PlannedUnit]:
    """Return what is asked: cases that every fault is put to, then the larger ones by size, in rounds."""
    small, large = _by_size(cases, seeds)
    rounds = [(0, *each) for each in small]
    rounds += [(1 + position // LARGE_AT_A_TIME, *each) for position, each in enumerate(large)]
    return [_PlannedUnit(number, case, seed, dtype) for number, case, seed in rounds for dtype in judged_dtypes(case)]


def subjects_of(topics: Collection[str]) -> tuple[Subject, ...]:
    """Return the faults of these topics, or of all, with every control and every equivalent variant.

    Raises ``UsageError`` for a topic that does not exist.
    """
    known = {mutant.topic for mutant in MUTANTS}
    unknown = [topic for topic in topics if topic not in known]
    if unknown:
        raise UsageError(f"no fault has the topic {unknown[0]!r}; expected {', '.join(sorted(known))}")
    faults = [mutant for mutant in MUTANTS if not topics or mutant.topic in topics]
    return (*faults, *CONTROLS, *EQUIVALENT)


def redrawn(case: Case, seed: int) -> Case:
    """Return the case with its k-th fresh seed; k = 0 is its own."""
    if case.random is None or seed == 0:
        return case
    fresh = (case.random.seed + seed * SEED_STEP) % 2**32
    return replace(case, random=case.random.model_copy(update={"seed": fresh}))


def _by_size(cases: Iterable[Case], seeds: Sequence[int]) -> tuple[list[tuple[Case, int]], list[tuple[Case, int]]]:
    """Return the cases that every fault is put to, each with its seeds, and the larger ones by size."""
    small, large = [], []
    for case in cases:
        elements = count_scores(case)
        for seed in seeds if case.random is not None else seeds[:1]:
            drawn = (redrawn(case, seed), seed)
            if elements > MAX_SCORES_FOR_ALL:
                large.append((elements, drawn))
            else:
                small.append(drawn)
    return small, [drawn for _, drawn in sorted(large, key=lambda each: each[0])]
