"""What the failing cases of an implementation have in common, and the passing ones have not.

A line is made only where it is no story: every failing case has the feature, and no passing case of all has it, or at
least three quarters of those that have it fail. Beyond that, fewer than one in a hundred random choices of so many
failing cases may have anything in common as well: every feature that was looked at counts against the one that fits
(``_Test``). Of two features together, each has to stand that test among the cases that have the other. What describes
the same cases is said once, in the simplest words.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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


@dataclass(frozen=True)
class InCommon:
    """Where an implementation fails: in ``failing`` of the ``holding`` cases that have it, in none of the ``others``.

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

    def text(self, *, with_environment: bool) -> str:
        """Say it as a line, without the last full stop."""
        name = self.column.title(with_environment=with_environment, with_version=False)
        only = "" if self.failing == self.holding else " only"
        counted = "" if self.noun == "case" else f" {self.noun}s"
        return (
            f"{name} {self.verb}{only} where {self.where}: {self.failing:,} of {self.holding:,}{counted}; "
            f"passes elsewhere: {self.others:,} of {self.others:,}"
        )


@dataclass(frozen=True)
class Judged:
    """What was judged of a column: the case and dtype of every evaluation, and the verdict, empty where it passes."""

    cases: Sequence[str]
    dtypes: Sequence[str]
    verdicts: Sequence[str]


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
    failing = np.array([bool(verdict) for verdict in judged.verdicts], dtype=bool)
    if not _are_enough(judged, failing):
        return
    if found := _separated(frames, column, judged, failing, _FAILS):
        yield found
        return
    is_wrong = np.array([Verdict(verdict or "agree").exit_code is ExitCode.DISAGREE for verdict in judged.verdicts])
    if is_wrong.any() and (failing & ~is_wrong).any():  # two faults, perhaps: each is held against what passes
        for kind, verb in ((is_wrong, _IS_WRONG), (failing & ~is_wrong, _CANNOT_RUN)):
            kept = np.flatnonzero(kind | ~failing).tolist()
            part = Judged(*([each[number] for number in kept] for each in _columns(judged)))
            if _are_enough(part, kind[kept]) and (found := _separated(frames, column, part, kind[kept], verb)):
                yield found


def _columns(judged: Judged) -> tuple[Sequence[str], ...]:
    return judged.cases, judged.dtypes, judged.verdicts


def judged_of(frames: Frames, column: Column) -> Judged:
    """Return what passes or fails; what fails as expected, or was not tried or judged, says nothing."""
    cases, dtypes, verdicts = [], [], []
    for case, cells in cell_table(frames).items():
        for dtype, cell in cells.get(column, {}).items():
            fails = cell.state is State.FAILING and cell.verdict != Verdict.UNTRIED
            if fails or cell.state in _PASSING:
                cases.append(case)
                dtypes.append(dtype)
                verdicts.append(cell.verdict if fails else "")
    return Judged(cases, dtypes, verdicts)


def _are_enough(judged: Judged, failing: Holds) -> bool:
    of = np.array(judged.cases, dtype=object)
    return len(set(of[failing])) >= MIN_CASES and len(set(of[~failing])) >= MIN_CASES


def _separated(frames: Frames, column: Column, judged: Judged, failing: Holds, verb: str) -> InCommon | None:
    """Return the simplest that every failing evaluation has, and no passing one, or few."""
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
    failed, held = int((fails if noun == "case" else failing).sum()), int(found.holds.sum())
    return InCommon(column, verb, found.text, failed, held, len(found.holds) - held, noun, found.tile)


def _fitting(features: Iterator[Feature], failing: Holds, weight: float) -> Feature | None:
    """Return the feature that tells failing from passing, else what comes closest, of single features and pairs."""
    candidates: list[Feature] = []
    seen: set[bytes] = set()
    for feature in features:
        count = int(feature.holds.sum())
        mark = blake2b(np.packbits(feature.holds).tobytes(), digest_size=16).digest()
        if not 0 < count < len(failing) or mark in seen:
            continue
        seen.add(mark)
        if feature.holds[failing].all():
            candidates.append(feature)
    test = _Test(int(failing.sum()), len(failing), len(seen), weight)
    for feature in candidates:
        if int(feature.holds.sum()) == test.failing:
            return feature if test.is_evident(test.failing, test.all) else None
    near = [*_nearly(candidates, test), *_pairs(candidates, test)]
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
