"""The numbers that documents print, each counted once: it holds, is a misprint, is missed, or was not compared.

A number holds only where every comparison of it holds. One that was not compared on some implementation is unverified
there, and one that some implementation alone misses is no fault of the document.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from attncheck.elements import told_apart
from attncheck.reports.frames import (
    Column,
    Frames,
    document_cases,
    element_in,
    failing,
    groups,
    once_for_frames,
    records,
    stage_order,
    under_erratum,
)
from attncheck.spec import DTYPES
from attncheck.verdicts import Verdict
from attncheck.wording import counted

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
    count = {state: int(states.eq(state).sum()) for state in (*_STATES,)}
    return NumberCounts(
        printed=len(states),
        hold=count[_HOLDS],
        misprints=count[_MISPRINT],
        missed=count[_MISSED],
        unverified=count[_UNVERIFIED],
        errata=len(errata[_PLACE].drop_duplicates()),
        outdated=sum(each.verdict == Verdict.XPASS and each.case in cases for each in misprints(frames)),
        not_returned=_not_returned(frames, cases),
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
    numbers = frames.numbers
    own = numbers["environment"].eq(column.environment) & numbers["implementation"].eq(column.implementation)
    return len(numbers[own & numbers["verdict"].eq(Verdict.UNVERIFIED)][_PLACE].drop_duplicates())


_HOLDS, _UNVERIFIED, _MISSED, _MISPRINT = _STATES = range(4)


def _states(numbers: pd.DataFrame) -> pd.Series[int]:
    """Return one state per printed number: the worst of its comparisons."""
    state = pd.Series(_HOLDS, index=numbers.index)
    state[numbers["verdict"].eq(Verdict.UNVERIFIED)] = _UNVERIFIED
    fails = numbers.index.isin(failing(numbers).index)
    state[fails] = _MISSED
    state[numbers["verdict"].eq(Verdict.MISPRINT)] = _MISPRINT
    return state.groupby([numbers[name] for name in _PLACE], dropna=False).max()


def _not_returned(frames: Frames, cases: Collection[str]) -> int:
    return sum(case in cases for case, _ in _printed_and_not_returned(frames))


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
    numbers = tuple((index, str(row["printed"]), value_text(row["exact"])) for index, row in by_index.items())
    called = rows[0]["called"] if isinstance(rows[0]["called"], str) and rows[0]["called"] else stage
    if verdict == Verdict.XPASS:
        return Misprint(case, stage, called, verdict, str(rows[0]["message"]), (), len(rows))
    sentences = [
        f"{element_in(frames.cases[case], row, called)} is printed as {text}, should be {_beside(row)}"
        for row, (_, text, _) in zip(by_index.values(), numbers, strict=True)
    ]
    more = len(sentences) - _MAX_NUMBERS
    rest = [f"And {counted(more, 'more number')} of it"] if more > 0 else []
    message = ". ".join([*sentences[:_MAX_NUMBERS], *rest, *_hints(list(by_index.values()))])
    return Misprint(case, stage, called, verdict, message, numbers, len(rows))


def _beside(row: Mapping[str, Any]) -> str:
    """Write an exact answer with as many digits as tell it from what is printed, which may be no plain number."""
    try:
        return told_apart(float(row["printed"]), row["exact"])[1]
    except ValueError:
        return value_text(row["exact"])


def _hints(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say what would explain misprints, each thing once and of how many of them."""
    counts = Counter(str(row["hint"]) for row in rows if isinstance(row["hint"], str))
    return [
        f"{hint[0].upper()}{hint[1:]}" if count == len(rows) else f"For {count} of these {len(rows)} numbers: {hint}"
        for hint, count in counts.items()
    ]


def value_text(value: float) -> str:
    """Write an exact answer, rounded to float64, with all of its digits."""
    return str(value) if not math.isfinite(value) else f"{value:.17g}"
