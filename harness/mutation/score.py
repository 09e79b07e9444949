"""The mutation score: which cases catch which fault, at which stage, and what common tolerances would have said."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TypeAlias
from zlib import crc32

from attncheck.errors import UsageError
from attncheck.mutation.catalogue import CONTROLS, EQUIVALENT, MUTANTS
from attncheck.mutation.judgement import (
    MAX_CASES,
    ExactJudge,
    JudgeStages,
    Naming,
    UnitFindings,
    asked_for_names,
    has_wrong_numbers,
    is_caught,
)
from attncheck.mutation.mutant import REFERENCE, Mutant, Subject, is_generated
from attncheck.mutation.scoring import CatchQuestion, Pending, Scorers, ScorersHere, SweepQuestion
from attncheck.mutation.summary import MutationFrames, summarise
from attncheck.mutation.unit import MAX_SCORES_FOR_ALL, count_scores, judged_dtypes, serves_naming
from attncheck.reading.case import Case

SEED_STEP = 1_000_003
"""Fresh seeds lie so far apart (an odd number) that no case's k-th seed is another case's own."""

ENOUGH_SMALL_CASES = 4
"""Small cases that have to catch a fault, in a dtype and a seed, before others are put to it to name it alone."""
ENOUGH_CASES = 2
"""Cases that have to catch a fault, in a dtype and a seed, before no large one is put to it."""
RIGHT_CASES, ENOUGH_RIGHT_CASES = 256, 12
"""Cases that a right variant is put to: so many of all, and in each dtype the first where it is not the reference."""
FAULTS_OF_A_SWEEP = 48
"""Faults that follow from the specification and are put to the same cases by one process."""
SMALL_AT_A_TIME, LARGE_AT_A_TIME = 16, 16
"""Cases that are put to faults before it is seen which of them are caught often enough."""


@dataclass(frozen=True)
class _PlannedUnit:
    """One case in one dtype and seed; faults that enough cases of rounds before ``round`` catch are not asked.

    Where it is ``exhaustive`` and small, all are. One in ``share`` of right variants is asked.
    """

    round: int
    case: Case
    seed: int
    dtype: str
    elements: int
    exhaustive: bool
    share: int = 1

    @property
    def is_small(self) -> bool:
        return self.elements <= MAX_SCORES_FOR_ALL

    @property
    def names(self) -> bool:
        """Whether what fails here may name a fault."""
        return self.is_small and serves_naming(self.case, self.dtype, self.elements)


@dataclass
class _Caught:
    """In which rounds each fault is caught so far, by name, dtype and seed, and by units that name it.

    Of right variants, in which rounds something else is found of them than of the reference.
    """

    _rounds: dict[tuple[str, str, int], list[int]] = field(default_factory=dict)
    _naming: dict[str, list[int]] = field(default_factory=dict)
    _right: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    def add(self, number: int, part: UnitFindings) -> None:
        """Take note of what a unit of a round catches; rounds come in their order."""
        reference = dict(part.found).get(REFERENCE)
        for subject, findings in part.found:
            if is_caught(findings):
                self._rounds.setdefault((subject, part.dtype, part.seed), []).append(number)
                if part.serves_naming and has_wrong_numbers(findings):
                    self._naming.setdefault(subject, []).append(number)
            elif findings != reference:
                self._right.setdefault((subject, part.dtype), []).append(number)

    def is_asked(self, subject: Subject, unit: _PlannedUnit) -> bool:
        """Whether a unit is put to a subject: to faults until enough cases catch them.

        A small case that may name a fault is also put to one for which fewer than ``MAX_CASES`` speak yet. Right
        variants are put to a share of the cases, and to the first ones where they are not the reference.
        """
        is_fault = isinstance(subject, Mutant)
        if unit.exhaustive and (unit.is_small or not is_fault):
            return True
        if not is_fault:
            is_new = not _came_before(unit.round, self._right.get((subject.name, unit.dtype), []), ENOUGH_RIGHT_CASES)
            return is_new or subject.name == REFERENCE or _is_in_turn(subject, unit)
        rounds = self._rounds.get((subject.name, unit.dtype, unit.seed), [])
        if not _came_before(unit.round, rounds, ENOUGH_SMALL_CASES if unit.is_small else ENOUGH_CASES):
            return True
        return unit.names and not _came_before(unit.round, self._naming.get(subject.name, []), MAX_CASES)


def _is_in_turn(subject: Subject, unit: _PlannedUnit) -> bool:
    """Whether a unit is in a subject's share, which is another one for each subject, and the same in every run."""
    return crc32(f"{subject.name} {unit.case.id} {unit.dtype} {unit.seed}".encode()) % unit.share == 0


def _came_before(number: int, rounds: Sequence[int], count: int) -> bool:
    """Whether so many entries of rounds, which are in order, lie before one."""
    return len(rounds) >= count and rounds[count - 1] < number


def run_mutants(
    cases: Iterable[Case],
    seeds: Sequence[int] = (0,),
    *,
    judge_stages: JudgeStages | None = None,
    scorers: Scorers | None = None,
    subjects: Sequence[Subject] = (*MUTANTS, *CONTROLS),
    visible: Collection[str] | None = None,
    exhaustive: bool = False,
) -> MutationFrames:
    """Run every subject on every case, dtype and seed, except for faults that enough cases caught before.

    Seed 0 is the case's own; seed k redraws what is drawn. Cases that draw nothing count in every seed. Cases come some
    at a time: a small one is put to faults that fewer than ``ENOUGH_SMALL_CASES`` others caught, large ones come last
    and to those that fewer than ``ENOUGH_CASES`` caught. A right variant is put to about ``RIGHT_CASES``. Where this is
    ``exhaustive``, small cases are put to everything, and large ones to every right variant. ``visible``
    hides all other stages, to see what a fault leaves for somebody who has the output alone. ``scorers`` may put cases
    to subjects in several processes (``workers.py``); what comes of it is the same.
    """
    scorers = scorers or ScorersHere({each.name: each for each in subjects}, judge_stages or ExactJudge())
    shown, cases = None if visible is None else frozenset(visible), list(cases)
    generated = [each for each in subjects if is_generated(each)]
    by_hand = [each for each in subjects if not is_generated(each)]
    sweeps = [scorers.sweep(each) for each in _sweeps(cases, seeds, generated, shown, exhaustive=exhaustive)]
    plan = _planned(cases, seeds, exhaustive=exhaustive)
    parts = _exactly_asked(plan, list(_judged(plan, by_hand, shown, scorers)), by_hand)
    names = _named(plan, parts, shown, scorers).names()
    spared = frozenset() if exhaustive else _spared(plan, parts, by_hand)
    if not exhaustive:
        spared |= {(each.name, dtype) for each in generated for dtype in each.dtypes}
    parts += [part for sweep in sweeps for part in sweep.result()]
    return summarise(parts, subjects, seeds, names, spared, exhaustive=exhaustive)


def _sweeps(
    cases: Sequence[Case],
    seeds: Sequence[int],
    faults: Sequence[Mutant],
    visible: frozenset[str] | None,
    *,
    exhaustive: bool,
) -> Iterator[SweepQuestion]:
    """Yield the faults of each operation with its cases in each seed, the smallest first; exhaustive, no large ones."""
    most = MAX_SCORES_FOR_ALL if exhaustive else math.inf
    of_operation: dict[str, list[_Sized]] = defaultdict(list)
    for elements, case, seed in (each for sizes in _by_size(cases, seeds) for each in sizes):
        if elements <= most:
            of_operation[case.operation].append((elements, case, seed))
    for (operation, dtype), group in _grouped(faults).items():
        sized = sorted(of_operation[operation], key=lambda each: each[0])
        for seed in seeds:
            chosen = tuple(case for _, case, own in sized if own == seed and dtype in judged_dtypes(case))
            for start in range(0, len(group), FAULTS_OF_A_SWEEP):
                names = tuple(fault.name for fault in group[start : start + FAULTS_OF_A_SWEEP])
                yield SweepQuestion(chosen, seed, dtype, names, visible, exhaustive)


def _grouped(faults: Iterable[Mutant]) -> dict[tuple[str, str], list[Mutant]]:
    """Return faults of one operation alone by it, and each dtype in which they are faults."""
    groups: dict[tuple[str, str], list[Mutant]] = defaultdict(list)
    for fault in faults:
        if fault.of:
            for dtype in fault.dtypes:
                groups[fault.of[0], dtype].append(fault)
    return groups


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


def _spared(
    plan: Sequence[_PlannedUnit], parts: Sequence[UnitFindings], subjects: Sequence[Subject]
) -> frozenset[tuple[str, str]]:
    """Return the faults, each with a dtype, that some unit was not put to."""
    caught = _Caught()
    for unit, part in zip(plan, parts, strict=True):
        caught.add(unit.round, part)
    last = {(unit.dtype, unit.seed, unit.names, unit.is_small): unit for unit in plan}.values()
    faults = [each for each in subjects if isinstance(each, Mutant)]
    return frozenset((each.name, unit.dtype) for each in faults for unit in last if not caught.is_asked(each, unit))


def _named(
    plan: Sequence[_PlannedUnit],
    parts: Sequence[UnitFindings],
    visible: frozenset[str] | None,
    scorers: Scorers,
) -> Naming:
    """Ask the first cases that each subject fails what they say of its fault; those that are put to all of them."""
    small = [(unit, part) for unit, part in zip(plan, parts, strict=True) if unit.is_small]
    asked = zip(small, asked_for_names(part for _, part in small), strict=True)
    pending = [(unit, scorers.evidence(_question(unit, names, visible))) for (unit, _), names in asked if names]
    naming = Naming()
    for unit, found in pending:
        for name, evidence in found.result().items():
            if evidence is not None:
                naming.add(name, (unit.case.id, unit.dtype, unit.seed), evidence)
    return naming


def _question(unit: _PlannedUnit, subjects: tuple[str, ...], visible: frozenset[str] | None) -> CatchQuestion:
    return CatchQuestion(unit.case, unit.seed, unit.dtype, subjects, visible)


def _planned(cases: Iterable[Case], seeds: Sequence[int], *, exhaustive: bool) -> list[_PlannedUnit]:
    """Return what is asked: cases in their order, then the large ones by size, in rounds."""
    small, large = _by_size(cases, seeds)
    share = 1 if exhaustive else max(1, (len(small) + len(large)) // RIGHT_CASES)
    rounds = [(position // SMALL_AT_A_TIME, *each) for position, each in enumerate(small)]
    first = 1 + (rounds[-1][0] if rounds else -1)
    rounds += [(first + position // LARGE_AT_A_TIME, *each) for position, each in enumerate(large)]
    return [
        _PlannedUnit(number, case, seed, dtype, elements, exhaustive, share)
        for number, elements, case, seed in rounds
        for dtype in judged_dtypes(case)
    ]


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


_Sized: TypeAlias = tuple[int, Case, int]
"""The elements of a case's score matrix, the case, and a seed."""


def _by_size(cases: Iterable[Case], seeds: Sequence[int]) -> tuple[list[_Sized], list[_Sized]]:
    """Return the small cases, each with its seeds, and the large ones by size."""
    small, large = list[_Sized](), list[_Sized]()
    for case in cases:
        elements = count_scores(case)
        for seed in seeds if case.random is not None else seeds[:1]:
            (large if elements > MAX_SCORES_FOR_ALL else small).append((elements, redrawn(case, seed), seed))
    return small, sorted(large, key=lambda each: each[0])
