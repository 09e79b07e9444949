"""The causes of an implementation's failures in a line: the readings that its failing cases were diagnosed as."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attncheck.reports.alike import AlikeRows, group_faults
from attncheck.reports.frames import Column, Frames, failing, once_for_frames, records
from attncheck.reports.printed_numbers import OF_DOCUMENTS
from attncheck.spec import BY_SCORE
from attncheck.verdicts import Verdict
from attncheck.wording import counted

if TYPE_CHECKING:
    import pandas as pd

_MAX_CAUSES = 3
"""Causes that are named for one implementation."""
_SCALES = re.compile(r"is that of scale (\S+) \(given (\S+)\)")
_NEARLY = 2e-3
"""Scales are written with four digits."""
_LARGEST = 64
"""A factor that nearly is the root of a whole number up to this, or one over it, is said to be that."""
_OF_SCORES = frozenset({"scoring", *BY_SCORE})
"""Operations whose default scale depends on the score."""


@dataclass(frozen=True)
class Cause:
    """A cause and its failing cases; the text is empty where no cause was found."""

    text: str
    of: tuple[str, ...]

    @property
    def cases(self) -> int:
        """How many cases there are."""
        return len(self.of)

    @property
    def first(self) -> str:
        """The first case."""
        return self.of[0]


_DIAGNOSED = (Verdict.NUMERIC, Verdict.NONFINITE, Verdict.SEMANTIC)


@once_for_frames
def causes(frames: Frames) -> dict[Column, list[Cause]]:
    """Return the causes for each implementation that fails, the one of most cases first."""
    rows = failing(frames.results)
    found: dict[Column, list[Cause]] = {}
    for column in frames.columns:
        own = rows[rows["environment"].eq(column.environment) & rows["implementation"].eq(column.implementation)]
        own = own[own["verdict"].isin(_DIAGNOSED)]
        if len(own):
            found[column] = _causes_of(frames, records(own))
    return found


def faults(frames: Frames, wrong: pd.DataFrame) -> list[AlikeRows]:
    """Put rows of ``findings`` together by their cause, the fault of most cases first.

    Without a cause, those are together that an implementation gets wrong in one way at one stage, and what could not be
    run for one reason. What a document or a record says wrongly comes last, each thing alone.
    """
    cause_of = {
        (column.environment, column.implementation, case): cause.text
        for column, found in causes(frames).items()
        for cause in found
        for case in cause.of
    }
    texts = [
        cause_of.get((environment, implementation, case), "") if dtype and verdict in _DIAGNOSED else ""
        for environment, implementation, case, dtype, verdict in zip(
            *(wrong[name] for name in ("environment", "implementation", "case", "dtype", "verdict")), strict=True
        )
    ]
    return sorted(group_faults(wrong, texts), key=lambda each: (each.row["verdict"] in OF_DOCUMENTS, -len(each.cases)))


def cause_line(found: Sequence[Cause]) -> str:
    """Return the causes as a line without the last full stop; empty where none was found."""
    named = [each for each in found if each.text]
    if not named:
        return ""
    if len(found) == 1:
        return named[0].text
    texts = [f"{each.text} ({counted(each.cases, 'case')})" for each in named[:_MAX_CAUSES]]
    more = sum(each.cases for each in named[_MAX_CAUSES:])
    texts += [f"other causes ({counted(more, 'case')})"] if more else []
    for each in found:
        if not each.text:
            where = f": {each.first}" if each.cases == 1 else f", the first {each.first}"
            texts.append(f"no cause found ({counted(each.cases, 'case')}{where})")
    return "; ".join(texts)


def _causes_of(frames: Frames, rows: Sequence[Mapping[str, Any]]) -> list[Cause]:
    by_case: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        if row["case"] not in by_case or not _name(by_case[row["case"]]):
            by_case[row["case"]] = row
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in by_case.values():
        groups.setdefault(_name(row), []).append(row)
    found = [
        Cause(_text(frames, of) if name else "", tuple(str(row["case"]) for row in of)) for name, of in groups.items()
    ]
    return sorted(found, key=lambda each: (not each.text, -each.cases))


def _name(row: Mapping[str, Any]) -> str:
    """Return a row's diagnosis; in frames, what is not there is NaN."""
    return row["diagnosis"] if isinstance(row["diagnosis"], str) else ""


def _text(frames: Frames, rows: Sequence[Mapping[str, Any]]) -> str:
    """Describe the cause that rows of one diagnosis share."""
    scales = [found for row in rows if (found := _SCALES.search(row["message"]))]
    if len(scales) == len(rows):
        return _of_scales(frames, rows, [float(each[1]) / float(each[2]) for each in scales if float(each[2])])
    if len(rows) == 1 or len({row["message"] for row in rows}) == 1:
        return next(_parts(rows[0]), "")
    common = set.intersection(*(set(_parts(row)) for row in rows))
    shared = [part for part in _parts(rows[0]) if part in common]
    return "; ".join(shared) or next(_parts(rows[0]), "")


def _parts(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the parts of a description, which the numbers of a mistake follow."""
    parts = str(row["message"]).split("; ")
    yield from parts if row["verdict"] == Verdict.SEMANTIC else parts[:1]


def _of_scales(frames: Frames, rows: Sequence[Mapping[str, Any]], factors: Sequence[float]) -> str:
    """Describe the scale that was used, where it is the right one times the same number in every case."""
    first = factors[0] if factors else math.nan
    if not all(abs(each - first) <= _NEARLY * abs(first) for each in factors):
        return "the scale is another one"
    cases = [frames.cases[row["case"]] for row in rows]
    is_default = all(case["options"].get("scale") is None for case in cases)
    whole = _whole(first * first)
    if is_default and whole and not any(case["operation"] in _OF_SCORES for case in cases):
        part = f"1/sqrt({whole[1]} D)" if whole[0] == 1 else f"sqrt({whole[0]}/D)"
        return f"the default scale is {'-' if first < 0 else ''}{part}, not 1/sqrt(D)"
    return f"the {'default ' if is_default else ''}scale is {first:.4g} times the right one"


def _whole(square: float) -> tuple[int, int] | None:
    """Return a whole number and 1, or 1 and a whole number, of which a number is the quotient; None where it is not."""
    for over, number in ((False, square), (True, 1 / square if square else 0.0)):
        nearest = round(number)
        if 2 <= nearest <= _LARGEST and abs(number - nearest) <= 4 * _NEARLY * nearest:
            return (1, nearest) if over else (nearest, 1)
    return None
