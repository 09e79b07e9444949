"""What the failing cases of an implementation have in common, and the passing ones have not.

A line is made only where it is no story: every failing case has the feature, or nine of ten, and no passing case of all
has it, or at least three quarters of those that have it fail. Beyond that, fewer than one in a hundred random choices
of so many failing cases may have anything in common as well: every feature that was looked at counts against the one
that fits (``_Test``). Of two features together, each has to stand that test among the cases that have the other. What
describes the same cases is said once, in the simplest words. Where all failing cases have nothing in common, those that
fail alike may have: with wrong numbers or none, with one verdict at one stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import combinations

import numpy as np

from attncheck.errors import ExitCode
from attncheck.reports.cells import State, cell_table
from attncheck.reports.features import Feature, Holds, case_features, dtype_features
from attncheck.reports.frames import Column, Frames, once_for_frames
from attncheck.verdicts import Verdict

MIN_CASES = 3
"""That fail, and that pass."""
_MIN_SHARE = 0.75
"""Of the cases with a feature, that fail where not all do."""
_ODDS = 100
"""One in so many random choices may have something in common by chance."""
_MAX_TELLING = 100
"""Features that are tried two by two: the simplest ones."""
_PASSING = frozenset({State.AGREE, State.ERRATUM, State.MISPRINT, State.XPASS})
_FAILS, _IS_WRONG, _CANNOT_RUN = "fails", "is wrong", "could not be run"
_EXCEPTIONS = 10
"""One of so many failing cases may lack what the others have in common."""


@dataclass(frozen=True)
class InCommon:
    """Where an implementation fails: in ``failing`` of the ``holding`` that have it, in ``exceptions`` of ``others``.

    ``noun`` is what was counted: cases, or where some fail in some of their dtypes alone, evaluations.
    """

    column: Column
    verb: str
    where: str
    failing: int
    holding: int
    others: int
    noun: str = "case"
    tile: int = 0
    """The tile that explains it, where one does."""
    exceptions: int = 0

    @property
    def passing_elsewhere(self) -> int:
        """How many pass that have it not."""
        return self.others - self.exceptions

    def text(self, *, with_environment: bool) -> str:
        """Say it as a line, without the last full stop."""
        name = self.column.title(with_environment=with_environment, with_version=False)
        only = "" if self.failing == self.holding else " only"
        counted = "" if self.noun == "case" else f" {self.noun}s"
        return (
            f"{name} {self.verb}{only} where {self.where}: {self.failing:,} of {self.holding:,}{counted}; "
            f"passes elsewhere: {self.passing_elsewhere:,} of {self.others:,}"
        )


@dataclass(frozen=True)
class Judged:
    """What was judged of a column: case, dtype, verdict and first failing stage of every evaluation.

    The verdict is empty where it passes.
    """

    cases: Sequence[str]
    dtypes: Sequence[str]
    verdicts: Sequence[str]
    stages: Sequence[str]

    @property
    def failing(self) -> Holds:
        """Which of the evaluations fail."""
        return np.array([bool(verdict) for verdict in self.verdicts], dtype=bool)

    def part(self, chosen: Holds) -> Judged:
        """Return some of the evaluations."""
        columns = (self.cases, self.dtypes, self.verdicts, self.stages)
        kept = np.flatnonzero(chosen).tolist()
        return Judged(*([column[number] for number in kept] for column in columns))


@once_for_frames
def in_common(frames: Frames) -> tuple[InCommon, ...]:
    """Return what can be said, at most a line for each implementation, or one for each way in which it fails."""
    return tuple(found for column in frames.columns for found in _of_column(frames, column))


def in_common_lines(frames: Frames) -> list[str]:
    """Say it, a line each."""
    many = len(frames.environments) > 1
    return [found.text(with_environment=many) for found in in_common(frames)]


def _of_column(frames: Frames, column: Column) -> Iterator[InCommon]:
    judged = judged_of(frames, column)
    yield from _told(frames, column, judged, judged.failing, _FAILS, (_way, _kind))


_Label = Callable[[str, str], str]


def _way(verdict: str, stage: str) -> str:
    return _IS_WRONG if Verdict(verdict).exit_code is ExitCode.DISAGREE else _CANNOT_RUN


def _kind(verdict: str, stage: str) -> str:
    way = _way(verdict, stage)
    return f"{way} ({verdict}{f' at {stage}' if stage else ''})" if way == _IS_WRONG else way


def _told(
    frames: Frames, column: Column, judged: Judged, failing: Holds, verb: str, finer: Sequence[_Label]
) -> Iterator[InCommon]:
    """Yield what some failing evaluations have in common against all that pass, or else what smaller groups have."""
    chosen = failing | ~judged.failing
    if not _are_enough(judged.part(chosen)):
        return
    if found := _separated(frames, column, judged.part(chosen), verb):
        yield found
    elif finer:
        labels = np.array([finer[0](*of) if of[0] else "" for of in zip(judged.verdicts, judged.stages, strict=True)])
        for label in dict.fromkeys(labels[failing]):
            yield from _told(frames, column, judged, failing & (labels == label), label, finer[1:])


def judged_of(frames: Frames, column: Column) -> Judged:
    """Return what passes or fails; what fails as expected, or was not tried or judged, says nothing."""
    cases, dtypes, verdicts, stages = [], [], [], []
    for case, cells in cell_table(frames).items():
        for dtype, cell in cells.get(column, {}).items():
            fails = cell.state is State.FAILING and cell.verdict != Verdict.UNTRIED
            if fails or cell.state in _PASSING:
                cases.append(case)
                dtypes.append(dtype)
                verdicts.append(cell.verdict if fails else "")
                stages.append(cell.stage if fails else "")
    return Judged(cases, dtypes, verdicts, stages)


def _are_enough(judged: Judged) -> bool:
    of, failing = np.array(judged.cases, dtype=object), judged.failing
    return len(set(of[failing])) >= MIN_CASES and len(set(of[~failing])) >= MIN_CASES


def _separated(frames: Frames, column: Column, judged: Judged, verb: str) -> InCommon | None:
    """Return the simplest that every failing evaluation has, or nearly every one, and no passing one, or few."""
    failing = judged.failing
    index = {case: number for number, case in enumerate(dict.fromkeys(judged.cases))}
    of_case = np.array([index[case] for case in judged.cases])
    cases = [frames.cases[case] for case in index]
    fails, passes = np.zeros(len(cases), dtype=bool), np.zeros(len(cases), dtype=bool)
    fails[of_case[failing]] = passes[of_case[~failing]] = True
    if not (fails & passes).any():  # all dtypes of a case are alike: cases are counted
        found = _fitting(case_features(cases), fails, 1.0)
        noun = "case"
    else:
        of_evaluations = (Feature(each.text, each.holds[of_case], each.tile) for each in case_features(cases))
        features = (each for part in (dtype_features(judged.dtypes), of_evaluations) for each in part)
        found = _fitting(features, failing, len(cases) / len(failing))  # dtypes of a case are no cases of their own
        noun = "evaluation"
    if found is None:
        return None
    of = fails if noun == "case" else failing
    failed, held = int((of & found.holds).sum()), int(found.holds.sum())
    exceptions = int(of.sum()) - failed
    return InCommon(column, verb, found.text, failed, held, len(found.holds) - held, noun, found.tile, exceptions)


def _fitting(features: Iterator[Feature], failing: Holds, weight: float) -> Feature | None:
    """Return the feature that tells failing from passing, else what comes closest, of single features and pairs."""
    candidates: list[Feature] = []
    nearly_all: list[Feature] = []
    seen: set[bytes] = set()
    most = int(failing.sum()) - int(failing.sum()) // _EXCEPTIONS
    for feature in features:
        count = int(feature.holds.sum())
        mark = blake2b(np.packbits(feature.holds).tobytes(), digest_size=16).digest()
        if not 0 < count < len(failing) or mark in seen:
            continue
        seen.add(mark)
        if feature.holds[failing].all():
            candidates.append(feature)
        elif int(feature.holds[failing].sum()) >= most:
            nearly_all.append(feature)
    test = _Test(int(failing.sum()), len(failing), len(seen), weight)
    for feature in candidates:
        if int(feature.holds.sum()) == test.failing:
            return feature if test.is_evident(test.failing, test.all) else None
    near = [*_nearly(candidates, test), *_pairs(candidates, test)]
    near = near or [feature for feature in nearly_all if test.is_evident_but_for(feature.holds, failing)]
    return min(near, key=lambda feature: int(feature.holds.sum()), default=None)


@dataclass(frozen=True)
class _Test:
    """So many evaluations fail of all, and so many features were looked at; each has the weight of a part of a case."""

    failing: int
    all: int
    features: int
    weight: float

    def is_evident(self, holding: int, among: int) -> bool:
        """Whether it is no chance that the failing of ``among`` cases are all in the ``holding`` of them."""
        bits = _bits(among, self.failing) - _bits(holding, self.failing)
        return bits * self.weight >= math.log2(self.features * _ODDS)

    def is_evident_but_for(self, holds: Holds, failing: Holds) -> bool:
        """Whether it is no chance that nearly all that fail are among those that hold, and nearly all of these fail."""
        holding, hits = int(holds.sum()), int((holds & failing).sum())
        chosen = _bits(holding, hits) + _bits(self.all - holding, self.failing - hits)
        bits = _bits(self.all, self.failing) - chosen
        choices = self.features * (self.failing // _EXCEPTIONS + 1)
        return hits >= _MIN_SHARE * holding and bits * self.weight >= math.log2(choices * _ODDS)


def _nearly(candidates: Sequence[Feature], test: _Test) -> Iterator[Feature]:
    """Yield what holds wherever something fails, and hardly anywhere else."""
    for feature in candidates:
        holding = int(feature.holds.sum())
        if test.failing >= _MIN_SHARE * holding and test.is_evident(holding, test.all):
            yield feature


def _pairs(candidates: Sequence[Feature], test: _Test) -> Iterator[Feature]:
    """Yield two together that hold wherever something fails, and hardly anywhere else, the simplest first.

    Each of the two has to tell something among the cases that have the other.
    """
    held = [(feature, int(feature.holds.sum())) for feature in candidates]
    telling = [each for each in held if test.is_evident(test.failing, each[1])][:_MAX_TELLING]
    for one, other in sorted(combinations(range(len(telling)), 2), key=sum):
        (first, of_first), (second, of_second) = telling[one], telling[other]
        both = first.holds & second.holds
        holding = int(both.sum())
        if test.failing >= _MIN_SHARE * holding and test.is_evident(holding, min(of_first, of_second)):
            yield Feature(f"{first.text} and {second.text}", both, first.tile or second.tile)


def _bits(of: int, chosen: int) -> float:
    """Return the logarithm, to base 2, of the number of ways to choose."""
    return (math.lgamma(of + 1) - math.lgamma(chosen + 1) - math.lgamma(of - chosen + 1)) / math.log(2)
