"""What was judged of what was asked, per implementation, and what the rest lacks: said before anything else.

A case is judged on an implementation where it is in any dtype. Cases of an operation that the implementation does not
offer are counted apart. What another unsupported case lacks is known by name where the implementation has no such
parameter, dtype or capability; a reason of its own words is grouped with those that differ from it in numbers only.
Cases that were padded to what an implementation requires (docs/kernels.md) are counted by what they were padded with.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import pandas as pd

from attncheck.errors import ExitCode
from attncheck.reports.frames import Column, Frames, failing, once_for_frames, records
from attncheck.results.coverage import lacks_function, shortfalls
from attncheck.spec import DTYPES, OPERATIONS
from attncheck.verdicts import ALL_CASES, Verdict
from attncheck.wording import counted, listed

MAX_REASONS = 4
"""What was picked, as far as one sentence spells it out."""
_MAX_LACKS = 8
"""Lacks that are spelt out in one sentence."""
_MAX_OPERATIONS = 2
"""Operations that one sentence names."""
_MAX_LETTERS = 100
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_KEYS = ["environment", "implementation", "case"]
_STOPPED = [verdict for verdict in Verdict if verdict.exit_code is ExitCode.NOT_RUN]


@dataclass(frozen=True)
class Lacks:
    """Why cases are unsupported: ``singly`` counts for each lack the cases that have it, the most frequent first.

    A case may lack several things; ``cases`` counts it once. Not among them are cases of operations that are
    ``not_offered``, by ``functions`` that are not there, and those that standard cases have ``stood_for``.
    """

    cases: int = 0
    singly: tuple[tuple[str, int], ...] = ()
    not_offered: int = 0
    functions: int = 0
    stood_for: int = 0

    @classmethod
    def of(cls, reasons: Collection[tuple[str, str]]) -> Lacks:
        """Count reasons, each a comma-separated list of what a case lacks, and a message where that is not known."""
        stood_for = sum(lacks == ALL_CASES for lacks, _ in reasons)
        functions = [lacks for lacks, _ in reasons if lacks_function(lacks)]
        rest = [each for each in reasons if each[0] != ALL_CASES and not lacks_function(each[0])]
        named = Counter(name for lacks, _ in rest if lacks for name in lacks.split(", "))
        unnamed = _alike(message for lacks, message in rest if not lacks)
        singly = sorted({**named, **unnamed}.items(), key=lambda item: (-item[1], item[0]))
        return cls(len(rest), tuple(singly), len(functions), len(set(functions)), stood_for)

    def __str__(self) -> str:
        shown = self.singly[:_MAX_LACKS] if len(self.singly) > _MAX_LACKS + 1 else self.singly
        more = len(self.singly) - len(shown)
        return ", ".join([f"{what} {count:,}" for what, count in shown] + ([f"and {more} more"] if more else []))


@dataclass(frozen=True)
class Coverage:
    """How many of the cases that were asked for one implementation was judged in, and what became of the others.

    ``stopped`` raised, crashed or ran out of time, ``unverified`` have no exact answer; ``operations`` are those that
    it offers, of those that were asked for.
    """

    column: Column
    asked: int
    judged: int
    lacks: Lacks = Lacks()
    unverified: int = 0
    stopped: int = 0
    operations: tuple[str, ...] = ()

    @property
    def stood_for(self) -> int:
        """How many cases it was not asked for because the standard cases cover them."""
        return self.lacks.stood_for

    @property
    def standard(self) -> int:
        """How many cases it was asked for."""
        return self.asked - self.stood_for

    @property
    def offered(self) -> int:
        """How many of these are of operations that it offers."""
        return self.standard - self.lacks.not_offered

    @property
    def is_whole(self) -> bool:
        """Whether every case was judged that it was asked for."""
        return self.judged >= self.standard

    @property
    def not_run(self) -> int:
        """How many cases there is no result of."""
        return max(0, self.offered - self.judged - self.lacks.cases - self.unverified - self.stopped)

    @property
    def rest(self) -> str:
        """Say what became of what was not judged; empty where all was."""
        parts = [f"{self.lacks.cases:,} unsupported: {self.lacks}"] if self.lacks.cases else []
        parts += [f"{self.unverified:,} unverified: no exact answer"] if self.unverified else []
        parts += [f"{self.stopped:,} could not be run"] if self.stopped else []
        parts += [f"{self.not_run:,} not run"] if self.not_run else []
        other = "other operations" if self.offered else "operations"
        parts += [f"{other} not offered: {self.lacks.functions}"] if self.lacks.functions else []
        return "; ".join(parts)

    @property
    def words(self) -> str:
        """Say how much was judged of the operations that it offers, and what the rest lacks."""
        cases = counted(self.offered or self.standard, "standard case" if self.stood_for else "case")
        rest = ", which cover the rest" if self.stood_for else ""
        judged = f"judged {self.judged:,} of {cases}{self._of_operations()}{rest}"
        return "; ".join(filter(None, (judged, self.rest)))

    def _of_operations(self) -> str:
        if not (self.lacks.not_offered and self.operations):
            return ""
        many = len(self.operations) > _MAX_OPERATIONS
        return f" of {f'{len(self.operations)} operations' if many else listed(self.operations)}"


@once_for_frames
def coverage(frames: Frames) -> tuple[Coverage, ...]:
    """Return what each implementation was judged in, in the order of the columns."""
    wanted = [*_KEYS, "dtype", "stage", "verdict", "lacks", "message"]
    stages = frames.results[wanted]
    judged = pd.MultiIndex.from_frame(judged_rows(frames)[_KEYS].drop_duplicates())
    left = stages[~pd.MultiIndex.from_frame(stages[_KEYS]).isin(judged)]
    counts = judged.to_frame(index=False).groupby(_KEYS[:2]).size().to_dict() if len(judged) else {}
    rest = dict(iter(left.groupby(_KEYS[:2]))) if len(left) else {}
    return tuple(
        _of(frames, column, int(counts.get(key, 0)), rest.get(key))
        for column in frames.columns
        for key in [(column.environment, column.implementation)]
    )


def judged_rows(frames: Frames) -> pd.DataFrame:
    """Return the rows that say that their case was judged, as ``is_judged`` has it."""
    keys = [*_KEYS, "dtype"]
    stages, numbers = frames.results, frames.numbers
    held = stages[stages["stage"].ne("") & stages["verdict"].ne(Verdict.UNVERIFIED)]
    wrong = numbers[~numbers["verdict"].isin([Verdict.AGREE, Verdict.UNVERIFIED])]
    return pd.concat([held[keys], wrong[keys]])


def _of(frames: Frames, column: Column, judged: int, left: pd.DataFrame | None) -> Coverage:
    asked = frames.asked[column.environment].cases
    if left is None:
        return Coverage(column, asked, judged)
    verdicts = left.groupby("case")["verdict"].agg(set)
    stopped = int(sum(bool(each & set(_STOPPED)) for each in verdicts))
    unverified = int(sum(not each & set(_STOPPED) and Verdict.UNVERIFIED in each for each in verdicts))
    only = set(verdicts.index[[each <= {Verdict.UNSUPPORTED.value, Verdict.XPASS.value} for each in verdicts]])
    reasons = _reasons(left[left["case"].isin(only) & left["verdict"].eq(Verdict.UNSUPPORTED)])
    absent = {case for case, (lacks, _) in reasons.items() if lacks_function(lacks)}
    operations = _operations(frames, column, absent) if absent else ()
    return Coverage(column, asked, judged, Lacks.of(reasons.values()), unverified, stopped, operations)


def _reasons(unsupported: pd.DataFrame) -> dict[str, tuple[str, str]]:
    """Return what each case lacks: that a dtype is lacking says least, as other dtypes of the case tell more."""
    reasons: dict[str, tuple[str, str]] = {}
    for row in records(unsupported.drop_duplicates(["case", "lacks", "message"])):
        lacks = row["lacks"] if isinstance(row["lacks"], str) else ""
        if row["case"] not in reasons or reasons[row["case"]][0] in DTYPES:
            reasons[row["case"]] = (lacks, str(row["message"]))
    return reasons


def _operations(frames: Frames, column: Column, absent: Collection[str]) -> tuple[str, ...]:
    """Return the operations of the cases that are not absent; what is folded into another is that one."""
    results = frames.results
    own = results["environment"].eq(column.environment) & results["implementation"].eq(column.implementation)
    offered = {frames.cases[case]["operation"] for case in set(results.loc[own, "case"]) - set(absent)}
    return tuple(sorted(each for each in offered if each not in OPERATIONS or not OPERATIONS[each].is_folded))


def _alike(messages: Iterable[str]) -> dict[str, int]:
    """Count messages, those together that differ in numbers alone: these are written as N."""
    groups: dict[tuple[str, ...], list[list[str]]] = {}
    for message in messages:
        reason = message.removeprefix("NotImplementedError: ").removeprefix("NotImplementedError") or "no reason"
        groups.setdefault(tuple(_NUMBER.split(reason)), []).append(_NUMBER.findall(reason))
    counts = {}
    for texts, numbers in groups.items():
        shown = [each[0] if len(set(each)) == 1 else "N" for each in zip(*numbers, strict=True)]
        text = "".join(part for pair in zip(texts, [*shown, ""], strict=True) for part in pair)
        text = text if len(text) <= _MAX_LETTERS else f"{text[: _MAX_LETTERS - 3]}..."
        counts[f'"{text}"'] = len(numbers)
    return counts


def unjudged(frames: Frames) -> tuple[str, ...]:
    """Say where less was judged than was asked for, which ends a comparison with 3; a line each."""
    lines: list[str] = []
    bad = failing(frames.results)
    stopped = bad[bad["verdict"].isin(_STOPPED)]
    failed = set(zip(stopped["environment"], stopped["implementation"], strict=True))
    for environment, asked in frames.asked.items():
        covered = [each for each in coverage(frames) if each.column.environment == environment]
        found = {each.column.implementation: each.judged for each in covered}
        absent = {each.column.implementation: each.lacks.not_offered for each in covered}
        where = f"{environment}: " if len(frames.asked) > 1 else ""
        # An error that fails a comparison says itself why its implementation was not judged.
        if asked.minimum is None:
            found = {name: count for name, count in found.items() if count or (environment, name) not in failed}
        lines += [where + line for line in shortfalls(found, asked, absent)]
    return tuple(lines)


def narrowings(frames: Frames) -> tuple[str, ...]:
    """Say what else was left out, a sentence each: cases that others stand for, dtypes, what was not picked."""
    return (*stood_for(frames), *_untested(frames), *picked(frames))


def stood_for(frames: Frames) -> Iterable[str]:
    """Count the evaluations that an implementation was not asked for, which others cover, a sentence each."""
    results = frames.results
    rows = results[results["lacks"].eq(ALL_CASES) & results["verdict"].eq(Verdict.UNSUPPORTED)]
    counts = (
        rows.drop_duplicates([*_KEYS[:2], "case", "dtype"]).groupby(_KEYS[:2]).size().to_dict() if len(rows) else {}
    )
    for column in frames.columns:
        if count := counts.get((column.environment, column.implementation)):
            name = frames.title(column, with_version=False)
            few = counted(count, "evaluation")
            yield f"{name} was not asked for {few}, which others cover; {ALL_CASES} asks for all."


def _untested(frames: Frames) -> Iterable[str]:
    """Name the dtypes in which an implementation was asked for nothing, because it declares them not."""
    results = frames.results
    rows = results[results["lacks"].isin(DTYPES) & results["verdict"].eq(Verdict.UNSUPPORTED)]
    found = rows.groupby(_KEYS[:2])["lacks"].agg(set).to_dict() if len(rows) else {}
    together: dict[tuple[tuple[str, ...], bool], list[str]] = {}
    for column in frames.columns:
        key = (column.environment, column.implementation)
        if dtypes := tuple(dtype for dtype in DTYPES if dtype in found.get(key, ())):
            names = together.setdefault((dtypes, key in frames.sources), [])
            names.append(frames.title(column, with_version=False))
    for (dtypes, is_own), names in together.items():
        whose = f", which {'does' if len(names) == 1 else 'do'} not declare {'it' if len(dtypes) == 1 else 'them'}."
        yield f"{listed(dtypes)} not tested on {listed(names)}{': declare `dtypes`.' if is_own else whose}"


def picked(frames: Frames) -> Iterable[str]:
    """Return a sentence for each environment whose cases were narrowed."""
    words = {
        "cases": "the cases",
        "tags": "the tag",
        "dtypes": "the dtype",
        "match": "the cases that match",
        "failed": "what failed last time in",
    }
    for environment, asked in frames.asked.items():
        where = f"{environment}, partial run" if len(frames.asked) > 1 else "Partial run"
        quoted = {**asked.picked, "match": tuple(f'"{each}"' for each in asked.picked.get("match", ()))}
        parts = [_picks(words[name], picks) for name, picks in quoted.items() if picks]
        if parts:
            yield f"{where}: only {'; '.join(parts)}."


def _picks(what: str, picks: tuple[str, ...]) -> str:
    shown = listed(picks if len(picks) <= MAX_REASONS else [*picks[:MAX_REASONS], f"{len(picks) - MAX_REASONS} more"])
    return f"{what}{'s' if len(picks) > 1 and not what.endswith('s') else ''} {shown}"


_KIND = re.compile(r"([a-z ]+) \([^)]*\)(?:, |$)")
"""What was added, and to which axes: zero columns (D 5 to 8, Dv 3 to 8), masked keys (T 7 to 16)."""


_FOLDED = "a block mask"
"""What packed sequences are called with where there is no function for them. Nothing requires it."""


@dataclass(frozen=True)
class Padded:
    """The cases in which one implementation was padded, of these ``padded`` by kind, and those that were ``folded``."""

    cases: int
    padded: int
    kinds: dict[str, int]
    folded: int


@once_for_frames
def padded_cases(frames: Frames) -> dict[Column, Padded]:
    """Return, for every implementation that was padded at all, in how many cases, and in how many with what."""
    results = frames.results
    rows = results[results["padded"].notna() & results["verdict"].ne(Verdict.UNSUPPORTED)]
    found = {}
    for column in frames.columns:
        is_own = rows["environment"].eq(column.environment) & rows["implementation"].eq(column.implementation)
        own = rows[is_own].drop_duplicates(["case", "padded"])
        if len(own):
            kinds = {(row["case"], kind) for row in records(own) for kind in _KIND.findall(row["padded"]) or [""]}
            counts = Counter(kind for _, kind in kinds if kind)
            folded = counts.pop(_FOLDED, 0)
            others = len({case for case, kind in kinds if kind != _FOLDED})
            ordered = dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
            found[column] = Padded(own["case"].nunique(), others, ordered, folded)
    return found


def padded_sentences(frames: Frames) -> Iterator[str]:
    """Say of each implementation in how many cases it was padded with what."""
    for column, found in padded_cases(frames).items():
        name = frames.title(column, with_version=False)
        parts = [f"{count:,} with {kind}" for kind, count in found.kinds.items()]
        if found.folded:
            yield (
                f"On {name}, which has no function for packed sequences, {_cases(found.folded)} called with "
                f"{_FOLDED} instead."
            )
        if found.padded and not parts:  # rows that somebody else wrote
            yield f"On {name}, {_cases(found.padded)} padded."
        elif len(parts) == 1:
            yield f"On {name}, {_cases(found.padded)} padded with {next(iter(found.kinds))}, as it requires."
        elif parts:
            yield f"On {name}, {_cases(found.padded)} padded, as it requires: {listed(parts)}."


def _cases(count: int) -> str:
    return "1 case was" if count == 1 else f"{count:,} cases were"
