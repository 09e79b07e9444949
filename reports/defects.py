"""What is wrong, once each: a defect of an implementation is one, in however many cases and dtypes it shows.

Failures are of one defect where they have one diagnosis; without one, where they begin alike, with one verdict at one
stage; of calls that raised, where the messages differ in numbers and shapes only. What a document prints wrongly, and
a record that no longer holds, each stand for themselves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attncheck.errors import ExitCode
from attncheck.reports.frames import Column, Frames, failing, once_for_frames, records
from attncheck.reports.summary import findings
from attncheck.spec import BY_SCORE, DTYPES
from attncheck.verdicts import Verdict
from attncheck.wording import BY_ITSELF, counted

if TYPE_CHECKING:
    import pandas as pd

Row = Mapping[str, Any]
Diagnosed = Mapping[tuple[str, str, str], Row]
"""A row that has a diagnosis, by case, environment and implementation."""
_MAX_CAUSES = 3
"""Causes that are named for one implementation."""
_SCALES = re.compile(r"is that of scale (\S+) \(given (\S+)\)")
_EXACT_SCALE = re.compile(r"is exactly that of scale ([^\s,]+)(?:, (.+),)? instead of")
_NEARLY = 2e-3
"""Scales are written with four digits."""
_LARGEST = 64
"""A factor that nearly is the root of a whole number up to this, or one over it, is said to be that."""
_OF_SCORES = frozenset({"scoring", *BY_SCORE})
"""Operations whose default scale depends on the score."""
_OF_ONE_CALL = re.compile(r"\([^()]*\)|\[[^][]*\]|\d[\d.,e+-]*")
"""What differs between messages of one error: shapes, indices and numbers."""


@dataclass(frozen=True)
class Defect:
    """One thing that is wrong, and the cases and dtypes that show it; ``row`` is that of the simplest, of findings."""

    row: Row
    diagnosis: str
    text: str
    """The convention or mistake; without one, what happened in the simplest case."""
    cases: tuple[str, ...]
    dtypes: tuple[str, ...]
    evaluations: int
    rows: int
    """How many comparisons fail in all of them."""

    @property
    def name(self) -> str:
        """The name of the diagnosis, or the verdict."""
        return self.diagnosis or str(self.row["verdict"])

    @property
    def others(self) -> int:
        """How many further cases there are."""
        return len(self.cases) - 1

    @property
    def is_shown_by_calls(self) -> bool:
        """Whether it is an implementation's, and no document's or list's."""
        return _is_shown_by_calls(self.row)

    @property
    def column(self) -> tuple[str, str]:
        """The environment and the implementation; both are empty where it is a document's."""
        return self.row["environment"], self.row["implementation"]


@once_for_frames
def defects(frames: Frames) -> tuple[Defect, ...]:
    """Return what is wrong: wrong numbers first, then what could not be run, that of most cases first.

    What documents print and lists record wrongly comes last.
    """
    return tuple(sorted(grouped(frames, findings(frames), _diagnosed(frames)), key=_order))


def grouped(frames: Frames, rows: pd.DataFrame, diagnosed: Diagnosed) -> list[Defect]:
    """Put rows such as those of ``findings`` together where they are of one defect, in the order of the first ones."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for number, row in enumerate(records(rows)):
        groups.setdefault(_key(row, diagnosed, number), []).append(row)
    return [_defect(frames, of, diagnosed) for of in groups.values()]


def _order(defect: Defect) -> tuple[bool, bool, bool, int]:
    """Sort key; what was not tried comes after what it was not tried for."""
    is_untried = defect.name == Verdict.UNTRIED
    return not defect.is_shown_by_calls, _raised(defect.row), is_untried, -defect.others


def cause_line(found: Sequence[Defect]) -> str:
    """Return why one implementation's numbers are wrong, without the last full stop; empty where nothing is known."""
    wrong = [each for each in found if _has_wrong_numbers(each)]
    named, unnamed = [each for each in wrong if each.diagnosis], [each for each in wrong if not each.diagnosis]
    hint = str(unnamed[0].row["message"]).partition(BY_ITSELF)[2] if unnamed else ""
    if not named and not hint:
        return ""
    if len(wrong) == 1 and named:
        return named[0].text
    texts = [f"{each.text} ({counted(len(each.cases), 'case')})" for each in named[:_MAX_CAUSES]]
    more = {case for each in named[_MAX_CAUSES:] for case in each.cases}
    texts += [f"other causes ({counted(len(more), 'case')})"] if more else []
    if rest := list(dict.fromkeys(case for each in unnamed for case in each.cases)):
        where = f": {rest[0]}" if len(rest) == 1 else f", the first {rest[0]}"
        taken = f"{BY_ITSELF}{hint}" if hint else ""
        texts.append(f"no cause found ({counted(len(rest), 'case')}{where}{taken})")
    return "; ".join(texts)


def defects_of(frames: Frames, column: Column) -> list[Defect]:
    """Return the defects of one implementation."""
    return [each for each in defects(frames) if each.column == (column.environment, column.implementation)]


def _is_shown_by_calls(row: Row) -> bool:
    return bool(row["implementation"] and row["dtype"]) and row["verdict"] != Verdict.XPASS


def _raised(row: Row) -> bool:
    return not row["stage"] and Verdict(row["verdict"]).exit_code is ExitCode.NOT_RUN


def _has_wrong_numbers(defect: Defect) -> bool:
    return defect.is_shown_by_calls and defect.row["verdict"] in (
        Verdict.NUMERIC,
        Verdict.NONFINITE,
        Verdict.SEMANTIC,
    )


def _diagnosed(frames: Frames) -> Diagnosed:
    """Return the first row of results that has a diagnosis, by case, environment and implementation."""
    rows = failing(frames.results)
    rows = rows[rows["diagnosis"].notna() & rows["diagnosis"].ne("")]
    return {_place(row): row for row in reversed(records(rows))}


def _place(row: Row) -> tuple[str, str, str]:
    return row["case"], row["environment"], row["implementation"]


def _key(row: Row, diagnosed: Diagnosed, number: int) -> tuple[object, ...]:
    if not _is_shown_by_calls(row):
        return (number,)
    if _raised(row):
        alike: tuple[object, ...] = (row["verdict"], _OF_ONE_CALL.sub("", row["message"]))
    elif found := diagnosed.get(_place(row)):
        alike = (found["diagnosis"],)
    else:
        alike = (row["verdict"], row["stage"])
    return row["environment"], row["implementation"], *alike


def _defect(frames: Frames, rows: Sequence[Row], diagnosed: Diagnosed) -> Defect:
    first, dtypes = rows[0], {row["dtype"] for row in rows}
    cases = tuple(dict.fromkeys(row["case"] for row in rows))
    named = [] if _raised(first) else [diagnosed[place] for row in rows if (place := _place(row)) in diagnosed]
    return Defect(
        row=first,
        diagnosis=named[0]["diagnosis"] if named else "",
        text=_text(frames, list({row["case"]: row for row in named}.values())) if named else first["message"],
        cases=cases,
        dtypes=tuple(sorted(dtypes, key=[*DTYPES, *sorted(dtypes - set(DTYPES))].index)),
        evaluations=len(rows),
        rows=sum(row["rows"] for row in rows),
    )


def _text(frames: Frames, rows: Sequence[Row]) -> str:
    """Describe the cause that rows of one diagnosis share."""
    scales = [found for row in rows if (found := _SCALES.search(row["message"]))]
    if len(scales) == len(rows):
        return _of_scales(frames, rows, [float(each[1]) / float(each[2]) for each in scales if float(each[2])])
    exact = [(found[2] or found[1]).split(" or ") for row in rows if (found := _EXACT_SCALE.search(row["message"]))]
    if len(exact) == len(rows) and (alike := [each for each in exact[0] if all(each in other for other in exact)]):
        return f"the {'default ' if _is_default(frames, rows) else ''}scale is {' or '.join(alike)}"
    common = set.intersection(*(set(_parts(row)) for row in rows))
    shared = [part for part in _parts(rows[0]) if part in common]
    return "; ".join(shared) or next(_parts(rows[0]), "")


def _parts(row: Row) -> Iterator[str]:
    """Yield the parts of a description, which the numbers of a mistake follow."""
    parts = str(row["message"]).split("; ")
    yield from parts if row["verdict"] == Verdict.SEMANTIC else parts[:1]


def _of_scales(frames: Frames, rows: Sequence[Row], factors: Sequence[float]) -> str:
    """Describe the scale that was used, where it is the right one times the same number in every case."""
    first = factors[0] if factors else math.nan
    if not all(abs(each - first) <= _NEARLY * abs(first) for each in factors):
        return "the scale is another one"
    is_default = _is_default(frames, rows)
    whole = _whole(first * first)
    if is_default and whole and not any(frames.cases[row["case"]]["operation"] in _OF_SCORES for row in rows):
        part = f"1/sqrt({whole[1]} D)" if whole[0] == 1 else f"sqrt({whole[0]}/D)"
        return f"the default scale is {'-' if first < 0 else ''}{part}, not 1/sqrt(D)"
    return f"the {'default ' if is_default else ''}scale is {first:.4g} times the right one"


def _is_default(frames: Frames, rows: Sequence[Row]) -> bool:
    return all(frames.cases[row["case"]]["options"].get("scale") is None for row in rows)


def _whole(square: float) -> tuple[int, int] | None:
    """Return a whole number and 1, or 1 and a whole number, of which a number is the quotient; None where it is not."""
    for over, number in ((False, square), (True, 1 / square if square else 0.0)):
        nearest = round(number)
        if 2 <= nearest <= _LARGEST and abs(number - nearest) <= 4 * _NEARLY * nearest:
            return (1, nearest) if over else (nearest, 1)
    return None
