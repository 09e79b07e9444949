"""Defects, each once in however many cases it shows; expected failures; and the commands that show them again.

Failures are of one defect where they have one diagnosis; without one, where they begin alike, with one verdict at one
stage; of calls that raised, where the messages differ in numbers and shapes only. What a document prints wrongly, and
a record that no longer holds, each stand for themselves. Expected failures and conventions for queries without a key
are no defects.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from attncheck.common.errors import ExitCode
from attncheck.common.wording import AND, BESIDE, BUT, BY_ITSELF, counted, listed
from attncheck.execution.user_code import declaration
from attncheck.reports.failure_patterns import LACKING, in_common
from attncheck.reports.failures import failures
from attncheck.reports.frames import (
    Column,
    Frames,
    begins_of,
    by_key,
    expected_failures,
    failing,
    groups,
    once_for_frames,
    records,
    stage_order,
)
from attncheck.reports.json_documents import Failure
from attncheck.reports.one_failure import how_wrong
from attncheck.spec import DECLARED_READINGS, DEFAULT_EMPTY_ROWS, DTYPES, EMPTY_ROWS
from attncheck.spec.verdicts import Verdict

Row = Mapping[str, Any]
Diagnosed = Mapping[tuple[str, str, str], Row]
"""A row that has a diagnosis, by case, environment and implementation."""
_MAX_CAUSES = 5
"""Causes that are named for one implementation."""
_SCALES = re.compile(r"is that of scale (\S+) \(given (\S+)\)")
_EXACT_SCALE = re.compile(r"is exactly that of scale ([^\s,]+)(?:, (.+),)? instead of")
_DEFAULT_SCALE = "the default scale is"
_NEARLY = 2e-3
"""Scales are written with four digits."""
_OF_ONE_CALL = re.compile(r"\([^()]*\)|\[[^][]*\]|\d[\d.,e+-]*")
"""What differs between messages of one error: shapes, indices and numbers."""


_OF_NUMBERS = (Verdict.NUMERIC, Verdict.NONFINITE, Verdict.SEMANTIC)
"""Verdicts of calls that come to an end, with wrong numbers."""


@dataclass(frozen=True)
class Defect:
    """One thing that is wrong, and the cases and dtypes that show it; ``first`` is the failure of the simplest case."""

    first: Failure
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
        return self.diagnosis or self.first.verdict

    @property
    def others(self) -> int:
        """How many further cases there are."""
        return len(self.cases) - 1

    @property
    def is_shown_by_calls(self) -> bool:
        """Whether it is an implementation's, and no document's or list's."""
        return _is_shown_by_calls(self.first)

    @property
    def column(self) -> tuple[str, str]:
        """The environment and the implementation; both are empty where it is a document's."""
        return self.first.environment, self.first.implementation

    @property
    def how_wrong(self) -> str:
        """The worst element of the simplest case, in a sentence."""
        return how_wrong(self.first, of_several=len(self.dtypes) > 1)


@once_for_frames
def defects(frames: Frames) -> tuple[Defect, ...]:
    """Return what is wrong: wrong numbers first, then what could not be run, that of most cases first.

    What documents print and lists record wrongly comes last.
    """
    rows = failing(frames.results)
    rows = rows[rows["diagnosis"].notna() & rows["diagnosis"].ne("")]
    first = {itemgetter(*_PLACE)(row): row for row in reversed(records(rows))}
    # What was not tried comes after what it was not tried for.
    return tuple(
        sorted(
            grouped(frames, failures(frames), first),
            key=lambda of: (not of.is_shown_by_calls, _raised(of.first), of.name == Verdict.UNTRIED, -of.others),
        )
    )


def grouped(frames: Frames, found: Iterable[Failure], diagnosed: Diagnosed) -> list[Defect]:
    """Put failures together where they are of one defect, in the order of the first ones."""
    alike = by_key(enumerate(found), lambda each: _key(each[1], diagnosed, each[0]))
    return [_defect(frames, [failure for _, failure in of], diagnosed) for of in alike.values()]


def cause_line(found: Sequence[Defect]) -> str:
    """Return why one implementation's numbers are wrong, without the last full stop; empty where nothing is known."""
    wrong = [each for each in found if each.is_shown_by_calls and each.first.verdict in _OF_NUMBERS]
    named, unnamed = [each for each in wrong if each.diagnosis], [each for each in wrong if not each.diagnosis]
    hint = unnamed[0].first.message.partition(BY_ITSELF)[2] if unnamed else ""
    if not named and not hint:
        return ""
    if len(wrong) == 1 and named:
        return named[0].text
    meant = {part for each in named for part in _meant_parts(each)}
    rest = list(dict.fromkeys(case for each in unnamed for case in each.cases))
    causes = _cases_by_cause(named)
    unexplained = {case for cause in causes if cause.name not in meant for case in cause.cases}.union(rest)
    if len(unexplained) > len({case for cause in causes if cause.name in meant for case in cause.cases}):
        meant = set()  # more likely another fault gives these cases what somebody might mean
    texts = _counted_texts([cause for cause in causes if cause.name in meant])
    others = _counted_texts([cause for cause in causes if cause.name not in meant])
    if rest:
        where = f": {rest[0]}" if len(rest) == 1 else f", the first {rest[0]}"
        taken = f"{BY_ITSELF}{hint}" if hint else ""
        others.append(f"no cause found ({counted(len(rest), 'case')}{where}{taken})")
    if not texts:
        return "; ".join(others)
    them = "this" if len(texts) == 1 else "these"
    outcome = f"it is right if it means {them}"
    if unexplained:
        outcome = f"if it means {them}, it is wrong in {counted(len(unexplained), 'case')}"
    return f"{outcome}: {'; '.join(texts)}{'; what is left: ' if others else ''}{'; '.join(others)}"


def _counted_texts(causes: Sequence[_Cause]) -> list[str]:
    """Return the causes of most cases, each with their number, and how many cases have others."""
    more = {case for cause in causes[_MAX_CAUSES:] for case in cause.cases}
    texts = [f"{cause.text} ({counted(len(cause.cases), 'case')})" for cause in causes[:_MAX_CAUSES]]
    return [*texts, *([f"other causes ({counted(len(more), 'case')})"] if more else [])]


def declaration_lines(frames: Frames) -> list[str]:
    """Return the lines by which users' functions declare what all of their failing cases show that they mean.

    And those that say which functions of their frameworks are recorded to fail alike.
    """
    failing = [column for column in frames.columns if defects_of(frames, column)]
    alike = {column: frames.asked[column.environment].alike.get(column.implementation) for column in failing}
    lines = [
        (column, line)
        for column in failing
        for line in (_declaration(frames, column), _capabilities(frames, column), alike[column])
    ]
    return [f"{frames.title(column, with_version=False)}: {line}" for column, line in lines if line]


def _declaration(frames: Frames, column: Column) -> str:
    asked = frames.asked[column.environment]
    if column.implementation not in asked.own:
        return ""
    own = sorted(defects_of(frames, column), key=lambda each: -len(each.cases))
    options = [_declarations(each) for each in own if each.is_shown_by_calls and each.first.verdict in _OF_NUMBERS]
    conventions = [option for of in options for option in of if option is not None]
    if not options or not all(options) or len(conventions) < sum(map(len, options)):
        return ""  # a convention explains some of the failing cases only: more likely it is a fault
    found: dict[str, str] = {}
    for name, value in conventions:
        found.setdefault(name, value)
    table = {**asked.conventions.get(column.implementation, {}), **found}
    them = "this" if len(found) == 1 else "these"
    return f"if it means {them}, declare it: {_declared(frames, column, 'conventions', table)}"


_LACKS = {
    "grouped_heads": "takes no keys that heads share",
    "value_width": "takes no values of another width than the keys",
    "dtypes": "is meant for float32 alone",
}
"""A capability that is not there, in words."""


def _capabilities(frames: Frames, column: Column) -> str:
    """Return the line by which a user's function declares that it lacks what it fails in wherever that is asked."""
    if column.implementation not in frames.asked[column.environment].own:
        return ""
    own = defects_of(frames, column)
    where = [each for each in in_common(frames) if each.column == column and each.failing == each.holding]
    found: dict[str, Any] = {LACKING[each.where]: False for each in where if each.where in LACKING}
    if any(each.diagnosis == "accuracy-of-float32" and each.dtypes == ("float64",) for each in own):
        found["dtypes"] = ["float32"]
    words = listed([_LACKS[name] for name in found])
    return f"if it {words}, declare it: {_declared(frames, column, 'capabilities', found)}" if found else ""


def _declared(frames: Frames, column: Column, name: str, table: Mapping[str, Any]) -> str:
    file, *_ = frames.again.get(column.environment, {}).get(column.implementation, [""])
    return declaration(file, column.implementation.partition(".")[2], name, table)


class _Cause(NamedTuple):
    """A reading, its words, and the cases that show it."""

    name: str
    text: str
    cases: Collection[str]


def _cases_by_cause(named: Sequence[Defect]) -> list[_Cause]:
    """Return the causes, that of most cases first; a case that shows several at once is counted for each of them."""
    pairs = [(each.diagnosis.split(AND), each.text.split(BESIDE)) for each in named]
    texts = dict(chain.from_iterable(zip(*pair, strict=True) for pair in pairs if len(pair[0]) == len(pair[1]) > 1))
    texts |= {each.diagnosis: each.text for each in named}
    cases: dict[str, dict[str, None]] = {}
    for each in named:
        parts = each.diagnosis.split(AND)
        for part in parts if texts.keys() >= set(parts) else [each.diagnosis]:
            cases.setdefault(part, {}).update(dict.fromkeys(each.cases))
    causes = (_Cause(name, texts[name], of_it) for name, of_it in cases.items())
    return sorted(causes, key=lambda cause: -len(cause.cases))


def _declarations(defect: Defect) -> list[tuple[str, str] | None]:
    """Return the convention and value by which each reading of a defect is declared; None where none does."""
    if not defect.diagnosis:
        return []
    if BUT in defect.text:  # a reading that does not hold everywhere is meant by nobody
        return [None for _ in defect.diagnosis.split(AND)]
    found = [DECLARED_READINGS.get(name) for name in defect.diagnosis.split(AND)]
    is_default = _DEFAULT_SCALE in defect.text
    return [option if option is None or option[0] != "scale" or is_default else None for option in found]


def _meant_parts(defect: Defect) -> list[str]:
    """Return those of a defect's readings that somebody may mean: conventions, and what can be declared."""
    parts, is_convention = defect.diagnosis.split(AND), bool(defect.first.verdict == Verdict.SEMANTIC)
    return [part for part, option in zip(parts, _declarations(defect), strict=True) if is_convention or option]


def defects_of(frames: Frames, column: Column) -> list[Defect]:
    """Return the defects of one implementation."""
    return [each for each in defects(frames) if each.column == column.key]


def _is_shown_by_calls(failure: Failure) -> bool:
    return bool(failure.implementation and failure.dtype) and failure.verdict != Verdict.XPASS


def _raised(failure: Failure) -> bool:
    return not failure.stage and Verdict(failure.verdict).exit_code is ExitCode.NOT_RUN


_PLACE = ("case", "environment", "implementation")
_place = attrgetter(*_PLACE)


def _key(failure: Failure, diagnosed: Diagnosed, number: int) -> tuple[object, ...]:
    if not _is_shown_by_calls(failure):
        return (number,)
    if _raised(failure):
        alike: tuple[object, ...] = (failure.verdict, _OF_ONE_CALL.sub("", failure.message))
    elif found := diagnosed.get(_place(failure)):
        alike = (found["diagnosis"],)
    else:
        alike = (failure.verdict, failure.stage)
    return failure.environment, failure.implementation, *alike


def _defect(frames: Frames, found: Sequence[Failure], diagnosed: Diagnosed) -> Defect:
    first, dtypes = found[0], {each.dtype for each in found}
    named = [] if _raised(first) else [diagnosed[place] for each in found if (place := _place(each)) in diagnosed]
    return Defect(
        first,
        diagnosis=named[0]["diagnosis"] if named else "",
        text=_text(frames, list({row["case"]: row for row in named}.values())) if named else first.message,
        cases=tuple(dict.fromkeys(each.case for each in found)),
        dtypes=tuple(sorted(dtypes, key=[*DTYPES, *sorted(dtypes - set(DTYPES))].index)),
        evaluations=len(found),
        rows=sum(each.rows for each in found),
    )


def _text(frames: Frames, rows: Sequence[Row]) -> str:
    """Describe the cause that rows of one diagnosis share."""
    default = "default " if all(frames.cases[row["case"]]["options"].get("scale") is None for row in rows) else ""
    scales = [found for row in rows if (found := _SCALES.search(row["message"]))]
    if len(scales) == len(rows):  # the right one times the same number in every case, or something else
        first, *others = [float(each[1]) / float(each[2]) for each in scales if float(each[2])] or [math.nan]
        if not all(abs(each - first) <= _NEARLY * abs(first) for each in (first, *others)):
            return "the scale is another one"
        return f"the {default}scale is {first:.4g} times the right one"
    exact = [(found[2] or found[1]).split(" or ") for row in rows if (found := _EXACT_SCALE.search(row["message"]))]
    if len(exact) == len(rows) and (alike := [each for each in exact[0] if all(each in other for other in exact)]):
        return f"the {default}scale is {' or '.join(alike)}"
    if AND in str(rows[0]["diagnosis"]):
        *texts, last = str(rows[0]["message"]).split(BESIDE)
        is_meant = rows[0]["verdict"] == Verdict.SEMANTIC
        return BESIDE.join([*texts, last if is_meant else last.partition("; ")[0]])
    # What follows the first part of a mistake's description are its numbers.
    parts = [str(row["message"]).split("; ")[: None if row["verdict"] == Verdict.SEMANTIC else 1] for row in rows]
    if len({first for first, *_ in parts}) > 1:
        said, *more = {first.rpartition(": ")[0] for first, *_ in parts}
        return min(map("; ".join, parts), key=len) if more or not said else said
    return "; ".join(part for part in parts[0] if all(part in each for each in parts))


_MAX_SHOWN = 3


def first_commands(frames: Frames) -> list[str]:
    """Return a command for the first defect of each of some implementations.

    What a document prints wrongly is no implementation's, and has no dtype.
    """
    of_columns = by_key((each for each in defects(frames) if each.is_shown_by_calls), lambda each: each.column)
    found = (line for each, *_ in of_columns.values() for line in each.first.next[:1])
    return list(islice(found, _MAX_SHOWN))


EXPECTED_FAILURES_NOTE = (
    "These fail as expected, and fail no run: each is declared by the implementation, or recorded with its "
    "reason, or is a convention of its own where it has no keyword to be asked for the case's. A recorded one that no "
    "longer happened would be reported as xpass."
)
EMPTY_ROWS_NOTE = (
    "What a query that may attend to no key gives is a convention: nothing says what the weights of no key are. "
    "Counted are the cases in which each implementation gives what. One with the keyword empty_rows gives what a case "
    "asks for. The own convention of another fails no run where it is declared or recorded, or where a case asks for "
    "uniform or nan."
)
_KEYS = ["environment", "implementation", "verdict", "reason", "thread"]
_OTHERWISE = "something else"
EMPTY_ROWS_WORDS = (*reversed([*EMPTY_ROWS.values()]), _OTHERWISE)
_OF_ADDRESSES = ":/?#[]@!$&'*+,;=%~"
"""What an address has as it is: not what ends one in Markdown or HTML, such as brackets."""
_ISSUE = re.compile(r"([\w.-]+/[\w.-]+)#([0-9]+)", re.ASCII)


def expected_failure_groups(frames: Frames) -> list[Row]:
    """Return the expected failures of stages, a row for each implementation, verdict and reason.

    It has their cases and dtypes, and the first stage at which one begins.
    """
    expected = expected_failures(frames.results)
    texts = {name: expected[name].fillna("") for name in ("reason", "thread")}
    groups = expected.assign(**texts, begins_at=begins_of(expected)).astype(object).groupby(_KEYS, as_index=False)
    found = groups.agg(
        cases=("case", lambda cases: tuple(sorted(set(cases)))),
        dtypes=("dtype", lambda dtypes: tuple(dtype for dtype in DTYPES if dtype in set(dtypes))),
        begins_at=("begins_at", lambda stages: min(set(stages), key=stage_order)),
    )
    return list(records(found))


def address_of(thread: str) -> str:
    """Return where owner/name#number or an https address leads; empty for anything else, which is shown as text."""
    if issue := _ISSUE.fullmatch(thread):
        repository, number = issue.groups()
        return f"https://github.com/{repository}/issues/{number}"
    try:
        parts = urlsplit(thread)
    except ValueError:
        return ""
    plain = not any(character.isspace() or not character.isprintable() for character in thread)
    return quote(thread, safe=_OF_ADDRESSES) if parts.scheme == "https" and parts.hostname and plain else ""


def empty_rows(frames: Frames) -> Mapping[Column, Counter[str]] | None:
    """Return in how many cases each implementation gives what for a query without a key.

    None where all give what the cases mean.
    """
    results = frames.results
    differing = results.loc[results["empty_rows"].notna(), "case"].unique()
    results = results[results["case"].isin(differing) & results["stage"].ne("")]
    counts: dict[tuple[str, ...], Counter[str]] = {}
    for (case, *key), part in groups(results, ["case", "environment", "implementation"]).items():
        given = {value for value in part["empty_rows"].dropna() if value in EMPTY_ROWS}
        if not given and part["verdict"].eq(Verdict.AGREE).all():
            meant = frames.cases[case]["options"].get("empty_rows")
            given = {meant if meant in EMPTY_ROWS else DEFAULT_EMPTY_ROWS}
        word = EMPTY_ROWS[given.pop()] if len(given) == 1 else _OTHERWISE
        counts.setdefault(tuple(key), Counter())[word] += 1
    return {column: counts[column.key] for column in frames.columns if column.key in counts} or None
