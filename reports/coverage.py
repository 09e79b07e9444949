"""What was judged of what was asked, per implementation, and what the rest lacks; and which printed numbers hold.

A case is judged on an implementation where it is in any dtype. Cases of an operation that the implementation does not
offer are counted apart. What another unsupported case lacks is known by name where the implementation has no such
parameter, dtype or capability; a reason of its own words is grouped with those that differ from it in numbers only.
Cases that were padded to the shapes that an implementation requires are counted by what they were padded with.

A number that a document prints is counted once, and holds only where every comparison of it holds. One that was not
compared on some implementation is unverified there, and one that some implementation alone misses is no fault of the
document.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from attncheck.common.errors import ExitCode
from attncheck.common.wording import at_most, counted, listed, told_apart
from attncheck.reports.frames import (
    Column,
    Frames,
    document_cases,
    element_in,
    failing,
    groups,
    of_column,
    once_for_frames,
    records,
    stage_order,
    under_erratum,
)
from attncheck.results.coverage import is_not_offered, lacks_function, shortfalls
from attncheck.spec import DTYPES, OPERATIONS
from attncheck.spec.verdicts import ALL_CASES, Verdict

_MAX_PICKS = 4
"""What was picked, as far as one sentence spells it out."""
_MAX_LACKS = 8
"""Lacks that are spelt out in one sentence."""
_MAX_OPERATIONS = 2
"""Operations that one sentence names."""
_MAX_LETTERS = 100
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_KEYS = ["environment", "implementation", "case"]
STOPPED = [verdict for verdict in Verdict if verdict.exit_code is ExitCode.NOT_RUN]


@dataclass(frozen=True)
class Lacks:
    """Why cases are unsupported: ``singly`` counts for each lack the cases that have it, the most frequent first.

    A case may lack several things; ``cases`` counts it once. Not among them are cases that are ``not_offered``, by
    ``functions`` that are not there or ``in_other_dtypes`` alone, and those that standard cases have ``stood_for``.
    """

    cases: int = 0
    singly: tuple[tuple[str, int], ...] = ()
    not_offered: int = 0
    functions: int = 0
    in_other_dtypes: int = 0
    stood_for: int = 0

    @classmethod
    def of(cls, reasons: Collection[tuple[str, str]]) -> Lacks:
        """Count reasons, each a comma-separated list of what a case lacks, and a message where that is not known."""
        stood_for = sum(lacks == ALL_CASES for lacks, _ in reasons)
        functions = [lacks for lacks, _ in reasons if lacks_function(lacks)]
        dtypes = sum(lacks in DTYPES for lacks, _ in reasons)
        rest = [each for each in reasons if each[0] != ALL_CASES and not is_not_offered(each[0])]
        named = Counter(name for lacks, _ in rest if lacks for name in lacks.split(", "))
        unnamed = _alike(message for lacks, message in rest if not lacks)
        singly = sorted({**named, **unnamed}.items(), key=lambda item: (-item[1], item[0]))
        return cls(len(rest), tuple(singly), len(functions) + dtypes, len(set(functions)), dtypes, stood_for)

    def __str__(self) -> str:
        texts = [f"{what} {count:,}" for what, count in self.singly]
        return ", ".join(texts if len(texts) == _MAX_LACKS + 1 else at_most(_MAX_LACKS, texts))


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
        """How many of these are of operations and in dtypes that it offers."""
        return self.standard - self.lacks.not_offered

    @property
    def is_whole(self) -> bool:
        """Whether every case was judged that it was asked for."""
        return self.judged >= self.standard - self.lacks.in_other_dtypes

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
        few = (
            listed(self.operations) if len(self.operations) <= _MAX_OPERATIONS else f"{len(self.operations)} operations"
        )
        of = f" of {few}" if self.lacks.not_offered and self.operations else ""
        return "; ".join(filter(None, (f"judged {self.judged:,} of {cases}{self.in_dtypes}{of}{rest}", self.rest)))

    @property
    def in_dtypes(self) -> str:
        """Say that cases in other dtypes alone are not counted; empty where there are none."""
        return " in its dtypes" if self.lacks.in_other_dtypes and self.offered else ""


@once_for_frames
def coverage(frames: Frames) -> tuple[Coverage, ...]:
    """Return what each implementation was judged in, in the order of the columns."""
    wanted = [*_KEYS, "dtype", "stage", "verdict", "lacks", "message"]
    stages = frames.results[wanted]
    judged = pd.MultiIndex.from_frame(judged_rows(frames)[_KEYS].drop_duplicates())
    left = stages[~pd.MultiIndex.from_frame(stages[_KEYS]).isin(judged)]
    counts, rest = judged.to_frame(index=False).groupby(_KEYS[:2]).size().to_dict(), groups(left, _KEYS[:2])
    return tuple(
        _of(frames, column, int(counts.get(key, 0)), rest.get(key)) for column in frames.columns for key in [column.key]
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
    stopped = int(sum(bool(each & set(STOPPED)) for each in verdicts))
    unverified = int(sum(not each & set(STOPPED) and Verdict.UNVERIFIED in each for each in verdicts))
    only = set(verdicts.index[[each <= {Verdict.UNSUPPORTED.value, Verdict.XPASS.value} for each in verdicts]])
    reasons = _reasons(left[left["case"].isin(only) & left["verdict"].eq(Verdict.UNSUPPORTED)])
    operations: tuple[str, ...] = ()
    if absent := {case for case, (lacks, _) in reasons.items() if lacks_function(lacks)}:
        cases = set(of_column(frames.results, column)["case"]) - absent
        offered = {frames.cases[case]["operation"] for case in cases}  # what is folded into another is that one
        operations = tuple(sorted(each for each in offered if each not in OPERATIONS or not OPERATIONS[each].is_folded))
    return Coverage(column, asked, judged, Lacks.of(reasons.values()), unverified, stopped, operations)


def _reasons(unsupported: pd.DataFrame) -> dict[str, tuple[str, str]]:
    """Return what each case lacks: that a dtype is lacking says least, as other dtypes of the case tell more."""
    reasons: dict[str, tuple[str, str]] = {}
    for row in records(unsupported.drop_duplicates(["case", "lacks", "message"])):
        if row["case"] not in reasons or reasons[row["case"]][0] in DTYPES:
            reasons[row["case"]] = (row["lacks"] or "", str(row["message"]))
    return reasons


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
    stopped = bad[bad["verdict"].isin(STOPPED)]
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


def stood_for(frames: Frames) -> Iterable[str]:
    """Count the evaluations that an implementation was not asked for, which others cover, a sentence each."""
    results = frames.results
    rows = results[results["lacks"].eq(ALL_CASES) & results["verdict"].eq(Verdict.UNSUPPORTED)]
    rows = rows.drop_duplicates([*_KEYS, "dtype"])
    for column in frames.columns:
        if count := len(of_column(rows, column)):
            few = f"{frames.title(column, with_version=False)} was not asked for {counted(count, 'evaluation')}"
            yield f"{few}, which others cover; {ALL_CASES} asks for all."


def untested(frames: Frames) -> Iterable[str]:
    """Name the dtypes in which an implementation was asked for nothing, because it declares them not."""
    results = frames.results
    rows = results[results["lacks"].isin(DTYPES) & results["verdict"].eq(Verdict.UNSUPPORTED)]
    together: dict[tuple[tuple[str, ...], bool], list[str]] = {}
    for column in frames.columns:
        lacks = set(of_column(rows, column)["lacks"])
        if dtypes := tuple(dtype for dtype in DTYPES if dtype in lacks):
            names = together.setdefault((dtypes, column.key in frames.sources), [])
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
        "searched": "what a search drew,",
    }
    for environment, asked in frames.asked.items():
        where = f"{environment}, partial run" if len(frames.asked) > 1 else "Partial run"
        quoted = {**asked.picked, "match": tuple(f'"{each}"' for each in asked.picked.get("match", ()))}
        parts = [_picks(words[name], picks) for name, picks in quoted.items() if picks]
        if parts:
            yield f"{where}: only {'; '.join(parts)}."


def _picks(what: str, picks: tuple[str, ...]) -> str:
    shown = listed(at_most(_MAX_PICKS, picks, "{} more"))
    return f"{what}{'s' if len(picks) > 1 and not what.endswith('s') else ''} {shown}"


_KIND = re.compile(r"([a-z ]+) \([^)]*\)(?:, |$)")
"""What was added, and to which axes: zero columns (D 5 to 8, Dv 3 to 8), masked keys (T 7 to 16)."""
_FOLDED = "a block mask"
"""What packed sequences are called with where there is no function for them. Nothing requires it."""


@once_for_frames
def padded_cases(frames: Frames) -> dict[Column, pd.DataFrame]:
    """Return, for every implementation that was padded at all, the cases in which it was, a row for each kind."""
    results = frames.results
    rows = results[results["padded"].notna() & results["verdict"].ne(Verdict.UNSUPPORTED)]
    rows = rows[[*_KEYS, "padded"]].drop_duplicates()
    rows = rows.assign(kind=rows["padded"].str.findall(_KIND)).explode("kind").drop_duplicates([*_KEYS, "kind"])
    return {column: own for column in frames.columns if len(own := of_column(rows, column))}


def padded_sentences(frames: Frames) -> Iterator[str]:
    """Say of each implementation in how many cases it was padded with what."""
    for column, rows in padded_cases(frames).items():
        on, is_folded = f"On {frames.title(column, with_version=False)}", rows["kind"].eq(_FOLDED)
        counts = rows.loc[~is_folded, "kind"].value_counts().sort_index().sort_values(ascending=False, kind="stable")
        if is_folded.any():
            folded = _cases(int(is_folded.sum()))
            yield f"{on}, which has no function for packed sequences, {folded} called with {_FOLDED} instead."
        if (~is_folded).any():
            parts = [f"{count:,} with {kind}" for kind, count in counts.items()]
            how = f" with {counts.index[0]}, as it requires" if len(parts) == 1 else ""
            how = (
                f", as it requires: {listed(parts)}" if len(parts) > 1 else how
            )  # without a kind, somebody else's rows
            yield f"{on}, {_cases(rows.loc[~is_folded, 'case'].nunique())} padded{how}."


def _cases(count: int) -> str:
    return "1 case was" if count == 1 else f"{count:,} cases were"


_PLACE = ["case", "stage", "called", "index"]
_MAX_NUMBERS = 3
OF_DOCUMENTS = (Verdict.MISPRINT, Verdict.XPASS)
"""Verdicts of numbers that no implementation is to blame for: what is printed or recorded is wrong."""


@dataclass(frozen=True)
class NumberCounts:
    """How many printed numbers there are of which kind; ``errata`` are no part of ``printed``."""

    printed: int
    hold: int
    misprints: int
    missed: int
    unverified: int
    errata: int
    outdated: int
    not_returned: int
    """Printed matrices of which nothing was compared: no implementation returned their stage."""


@dataclass(frozen=True)
class Misprint:
    """What a document prints otherwise than it is, or a recorded erratum that no longer is one: one per matrix."""

    case: str
    stage: str
    called: str
    verdict: str
    message: str
    numbers: tuple[tuple[str, str, str], ...]
    """The place of each number, what is printed there, and the exact answer."""
    rows: int
    """How many comparisons fail because of it."""


@once_for_frames
def number_counts(frames: Frames) -> NumberCounts:
    """Count the printed numbers of documents, and every other printed number that is wrong or was not compared."""
    return number_counts_of(frames, list(frames.cases))


def number_counts_of(frames: Frames, cases: Collection[str]) -> NumberCounts:
    """Count those of some cases."""
    printed = printed_numbers(frames)
    printed = printed[printed["case"].isin(cases)]
    wrong_call = under_erratum(frames, printed) | (
        printed["verdict"].eq(Verdict.MISPRINT) & printed["xfail"].astype(bool)
    )
    errata = printed[wrong_call & printed["verdict"].eq(Verdict.MISPRINT)]
    states = _states(printed[~wrong_call])
    return NumberCounts(
        printed=len(states),
        **{name: int(states.eq(state).sum()) for state, name in enumerate(_STATES)},
        errata=len(errata[_PLACE].drop_duplicates()),
        outdated=sum(each.verdict == Verdict.XPASS and each.case in cases for each in misprints(frames)),
        not_returned=sum(case in cases for case, _ in _printed_and_not_returned(frames)),
    )


@once_for_frames
def printed_numbers(frames: Frames) -> pd.DataFrame:
    """Return the comparisons with printed numbers: of documents, and of other sources where they do not hold."""
    documents = document_cases(frames).keys()
    numbers = frames.numbers[frames.numbers["basis"].eq("printed")]
    doubtful = numbers["verdict"].isin([Verdict.MISPRINT, Verdict.UNVERIFIED])
    return numbers[numbers["case"].isin(documents) | doubtful]


def unverified_on(frames: Frames, column: Column) -> int:
    """Count the numbers, printed or not, that were not compared on an implementation."""
    own = of_column(frames.numbers, column)
    return len(own[own["verdict"].eq(Verdict.UNVERIFIED)][_PLACE].drop_duplicates())


_STATES = ("hold", "unverified", "missed", "misprints")
"""Of a printed number, from harmless to severe."""


def _states(numbers: pd.DataFrame) -> pd.Series[int]:
    """Return one state per printed number: the worst of its comparisons."""
    state = pd.Series(_STATES.index("hold"), index=numbers.index)
    state[numbers["verdict"].eq(Verdict.UNVERIFIED)] = _STATES.index("unverified")
    state[numbers.index.isin(failing(numbers).index)] = _STATES.index("missed")
    state[numbers["verdict"].eq(Verdict.MISPRINT)] = _STATES.index("misprints")
    return state.groupby([numbers[name] for name in _PLACE], dropna=False).max()


@once_for_frames
def _printed_and_not_returned(frames: Frames) -> tuple[tuple[str, str], ...]:
    """Return the cases and names of what is printed, and was returned by nothing that ran."""
    numbers = frames.numbers[frames.numbers["basis"].eq("printed")]
    returned = set(zip(numbers["case"], numbers["stage"], strict=True))
    ran = set(frames.results["case"])
    return tuple(
        (identity, expected["name"])
        for identity, case in frames.cases.items()
        if identity in ran
        for expected in case["expected"]
        if expected["basis"] == "printed" and (identity, expected["name"]) not in returned
    )


@once_for_frames
def misprints(frames: Frames) -> tuple[Misprint, ...]:
    """Return what documents print wrongly and what is recorded wrongly, once for all implementations and dtypes."""
    bad = failing(frames.numbers)
    bad = bad[bad["verdict"].isin(OF_DOCUMENTS)]
    found = [_misprint(frames, key, records(part)) for key, part in groups(bad, ["case", "stage", "verdict"]).items()]
    return tuple(sorted(found, key=lambda each: (each.case, stage_order(each.stage))))


def _misprint(frames: Frames, key: tuple[str, str, str], rows: Sequence[Mapping[str, Any]]) -> Misprint:
    case, stage, verdict = key
    widest = min((str(row["dtype"]) for row in rows), key=DTYPES.index)
    by_index = {str(row["index"]): row for row in rows if row["dtype"] == widest}
    numbers = tuple((index, str(row["printed"]), _value_text(row["exact"])) for index, row in by_index.items())
    called = rows[0]["called"] or stage
    if verdict == Verdict.XPASS:
        return Misprint(case, stage, called, verdict, str(rows[0]["message"]), (), len(rows))
    sentences = [
        f"{element_in(frames.cases[case], row, called)} is printed as {text}, should be {_beside(row)}"
        for row, (_, text, _) in zip(by_index.values(), numbers, strict=True)
    ]
    more = len(sentences) - _MAX_NUMBERS
    rest = [f"And {counted(more, 'more number')} of it"] if more > 0 else []
    hints = Counter(row["hint"] for row in by_index.values() if row["hint"] is not None)
    rest += [
        f"{hint[0].upper()}{hint[1:]}"
        if count == len(numbers)
        else f"For {count} of these {len(numbers)} numbers: {hint}"
        for hint, count in hints.items()
    ]
    return Misprint(case, stage, called, verdict, ". ".join([*sentences[:_MAX_NUMBERS], *rest]), numbers, len(rows))


def _beside(row: Mapping[str, Any]) -> str:
    """Write an exact answer with as many digits as tell it from what is printed, which may be no plain number."""
    try:
        return told_apart(float(row["printed"]), row["exact"])[1]
    except (TypeError, ValueError):
        return _value_text(row["exact"])


def _value_text(value: float) -> str:
    """Write an exact answer, rounded to float64, with all of its digits."""
    return str(value) if not math.isfinite(value) else f"{value:.17g}"
