"""What was judged of what was asked, per implementation, and what the rest lacks: said before anything else.

A case is judged on an implementation where it is in any dtype. What an unsupported case lacks is known by name where
the implementation has no such parameter, function, dtype or capability; a reason of its own words is grouped with
those that differ from it in numbers alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import pandas as pd

from attncheck.errors import ExitCode
from attncheck.reports.frames import Column, Frames, failing, once_for_frames, records
from attncheck.reports.padded import padded_cases
from attncheck.results.coverage import shortfalls
from attncheck.spec import DTYPES
from attncheck.verdicts import ALL_CASES, Verdict
from attncheck.wording import counted, listed

MAX_REASONS = 4
"""Reasons that are spelt out in one sentence."""
_MAX_LETTERS = 100
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_KEYS = ["environment", "implementation", "case"]
_STOOD_FOR = f"need {ALL_CASES}"
_STOPPED = [verdict for verdict in Verdict if verdict.exit_code is ExitCode.NOT_RUN]


@dataclass(frozen=True)
class Coverage:
    """How many of the cases that were asked for one implementation was judged in, and what became of the others.

    ``lacks`` counts the unsupported by what they need, the most frequent first; ``stopped`` raised, crashed or ran out
    of time, ``unverified`` have no exact answer.
    """

    column: Column
    asked: int
    judged: int
    lacks: tuple[tuple[str, int], ...] = ()
    unverified: int = 0
    stopped: int = 0

    @property
    def stood_for(self) -> int:
        """How many cases it was not asked for because the standard cases cover them."""
        return dict(self.lacks).get(_STOOD_FOR, 0)

    @property
    def standard(self) -> int:
        """How many cases it was asked for."""
        return self.asked - self.stood_for

    @property
    def is_whole(self) -> bool:
        """Whether every case was judged that it was asked for."""
        return self.judged >= self.standard

    @property
    def unsupported(self) -> int:
        """How many cases are unsupported in every dtype."""
        return sum(count for _, count in self.lacks)

    @property
    def not_run(self) -> int:
        """How many cases there is no result of."""
        return max(0, self.asked - self.judged - self.unsupported - self.unverified - self.stopped)

    @property
    def rest(self) -> str:
        """Say what became of what was not judged; empty where all was."""
        unsupported = self.unsupported - self.stood_for
        parts = [f"{unsupported:,} unsupported: {self._reasons()}"] if unsupported else []
        parts += [f"{self.unverified:,} unverified: no exact answer"] if self.unverified else []
        parts += [f"{self.stopped:,} could not be run"] if self.stopped else []
        parts += [f"{self.not_run:,} not run"] if self.not_run else []
        return "; ".join(parts)

    @property
    def words(self) -> str:
        """Say how much was judged, and what the rest lacks."""
        judged = f"judged {self.judged:,} of {counted(self.asked, 'case')}"
        if self.stood_for:
            judged = f"judged {self.judged:,} of {counted(self.standard, 'standard case')}, which cover the rest"
        return "; ".join(filter(None, (judged, self.rest)))

    def _reasons(self) -> str:
        lacks = [each for each in self.lacks if each[0] != _STOOD_FOR]
        shown = lacks[:MAX_REASONS] if len(lacks) > MAX_REASONS + 1 else lacks
        parts = [f"{count:,} {what if count > 1 else _singular(what)}" for what, count in shown]
        if others := lacks[len(shown) :]:
            parts.append(f"{sum(count for _, count in others):,} for other reasons")
        return ", ".join(parts)


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
        _of(column, frames.asked[column.environment].cases, int(counts.get(key, 0)), rest.get(key))
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


def _of(column: Column, asked: int, judged: int, left: pd.DataFrame | None) -> Coverage:
    if left is None:
        return Coverage(column, asked, judged)
    verdicts = left.groupby("case")["verdict"].agg(set)
    stopped = int(sum(bool(each & set(_STOPPED)) for each in verdicts))
    unverified = int(sum(not each & set(_STOPPED) and Verdict.UNVERIFIED in each for each in verdicts))
    only = set(verdicts.index[[each <= {Verdict.UNSUPPORTED.value, Verdict.XPASS.value} for each in verdicts]])
    unsupported = left[left["case"].isin(only) & left["verdict"].eq(Verdict.UNSUPPORTED)]
    return Coverage(column, asked, judged, _lacks(unsupported), unverified, stopped)


def _lacks(unsupported: pd.DataFrame) -> tuple[tuple[str, int], ...]:
    """Count cases by what they need: that a dtype is lacking says least, as other dtypes of the case tell more."""
    reasons: dict[str, tuple[str, str]] = {}
    for row in records(unsupported.drop_duplicates(["case", "lacks", "message"])):
        lacks = row["lacks"] if isinstance(row["lacks"], str) else ""
        if row["case"] not in reasons or reasons[row["case"]][0] in DTYPES:
            reasons[row["case"]] = (lacks, str(row["message"]))
    return counted_lacks(reasons.values())


def counted_lacks(reasons: Collection[tuple[str, str]]) -> tuple[tuple[str, int], ...]:
    """Count reasons, each a comma-separated list of what is lacking, and a message where that is not known."""
    named = Counter(f"need {listed(lacks.split(', '))}" for lacks, _ in reasons if lacks)
    unnamed = _alike(message for lacks, message in reasons if not lacks)
    return tuple(sorted({**named, **unnamed}.items(), key=lambda item: (-item[1], item[0])))


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
        counts[f'say "{text}"'] = len(numbers)
    return counts


def _singular(what: str) -> str:
    verb, _, rest = what.partition(" ")
    return f"{verb}s {rest}"


def unjudged(frames: Frames) -> tuple[str, ...]:
    """Say where less was judged than was asked for, which ends a comparison with 3; a line each."""
    lines: list[str] = []
    bad = failing(frames.results)
    stopped = bad[bad["verdict"].isin(_STOPPED)]
    failed = set(zip(stopped["environment"], stopped["implementation"], strict=True))
    for environment, asked in frames.asked.items():
        found = {
            each.column.implementation: each.judged
            for each in coverage(frames)
            if each.column.environment == environment
        }
        where = f"{environment}: " if len(frames.asked) > 1 else ""
        # An error that fails a comparison says itself why its implementation was not judged.
        if asked.minimum is None:
            found = {name: count for name, count in found.items() if count or (environment, name) not in failed}
        lines += [where + line for line in shortfalls(found, asked)]
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
            name = column.title(with_environment=len(frames.asked) > 1, with_version=False)
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
            names.append(column.title(with_environment=len(frames.asked) > 1, with_version=False))
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
        where = f"{environment}: only" if len(frames.asked) > 1 else "Only"
        quoted = {**asked.picked, "match": tuple(f'"{each}"' for each in asked.picked.get("match", ()))}
        parts = [_picks(words[name], picks) for name, picks in quoted.items() if picks]
        if parts:
            yield f"{where} what was picked ran: {'; '.join(parts)}."


def _picks(what: str, picks: tuple[str, ...]) -> str:
    shown = listed(picks if len(picks) <= MAX_REASONS else [*picks[:MAX_REASONS], f"{len(picks) - MAX_REASONS} more"])
    return f"{what}{'s' if len(picks) > 1 and not what.endswith('s') else ''} {shown}"


def judged_counts(frames: Frames) -> dict[Column, Mapping[str, object]]:
    """Return the same as plain data."""
    padded = padded_cases(frames)
    return {
        each.column: {
            "asked": each.asked,
            "judged": each.judged,
            "unsupported": each.unsupported,
            "lacks": dict(each.lacks),
            "unverified": each.unverified,
            "stopped": each.stopped,
            "not_run": each.not_run,
            "padded": padded[each.column].cases if each.column in padded else 0,
        }
        for each in coverage(frames)
    }
