"""Defects, each once in however many cases it shows; expected failures; and the commands that show them again.

Failures belong to one defect if they have the same diagnosis. Failures without a diagnosis belong together if they
begin at the same stage with the same verdict, and failures of calls that raised, if their messages differ only in
numbers and shapes. A wrongly printed number and an outdated record are a defect each. Expected failures and
conventions for queries without a key are no defects.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from attncheck.common.errors import ExitCode
from attncheck.common.wording import (
    CONVENTIONS_SEPARATOR,
    DESCRIPTIONS_SEPARATOR,
    EXCEPTION_PREFIX,
    SINGLE_CASE_PREFIX,
    DocumentLayout,
    count_noun,
    join_words,
)
from attncheck.execution.user_code import declaration_code
from attncheck.reports.failure_patterns import MISSING_CAPABILITIES, confirmed_patterns
from attncheck.reports.failures import find_failures
from attncheck.reports.frames import (
    Column,
    Frames,
    cached_for_frames,
    document_layout,
    first_failing_stages,
    group_by_key,
    is_document,
    select_expected_failures,
    select_failing,
    split_by,
    stage_sort_key,
    to_records,
)
from attncheck.reports.json_documents import Failure
from attncheck.reports.one_failure import wrong_element_text
from attncheck.spec import (
    ACCURACY_OF_FLOAT32,
    ACCURACY_PREFIX,
    CONVENTION_OF_READING,
    DEFAULT_EMPTY_ROWS,
    DTYPES,
    EMPTY_ROWS,
)
from attncheck.spec.verdicts import Verdict

Row = Mapping[str, Any]
DiagnosedRows = Mapping[tuple[str, str, str], Row]
"""Rows with a diagnosis, by case, environment and implementation."""
_MAX_CAUSES = 5
"""Causes that are named for one implementation."""
_SCALE_PATTERN = re.compile(r"is that of scale (\S+) \(given (\S+)\)")
_EXACT_SCALE_PATTERN = re.compile(r"is exactly that of scale ([^\s,]+)(?:, (.+),)? instead of")
_DEFAULT_SCALE = "the default scale is"
_OTHER_SCALE = "the scale is another one"
_SCALE_TOLERANCE = 2e-3
"""Scales are written with four digits."""
_SHARE_WITH_ONE_SCALE = 0.9
"""A kernel whose scale is a constant shows it in 228 of 229 stages; a choice."""
_CALL_SPECIFIC_PATTERN = re.compile(r"\([^()]*\)|\[[^][]*\]|\d[\d.,e+-]*")
"""The parts of an error's message that differ between calls: shapes, indices and numbers."""


_WRONG_NUMBERS = (Verdict.NUMERIC, Verdict.NONFINITE, Verdict.SEMANTIC)
"""Verdicts of calls that come to an end, with wrong numbers."""


@dataclass(frozen=True)
class Defect:
    """One thing that is wrong, and the cases and dtypes that show it; ``first`` is the failure of the simplest case."""

    first: Failure
    diagnosis: str
    text: str
    """The convention or mistake; without one, the message of the simplest case."""
    cases: tuple[str, ...]
    dtypes: tuple[str, ...]
    evaluations: int
    rows: int
    """The number of failing comparisons in all evaluations."""
    wrong_element_sentence: str
    """The worst element of the simplest case, in a sentence, with the index that a document counts."""

    @property
    def name(self) -> str:
        """The name of the diagnosis, or the verdict."""
        return self.diagnosis or self.first.verdict

    @property
    def further_case_count(self) -> int:
        """The number of further cases."""
        return len(self.cases) - 1

    @property
    def is_shown_by_calls(self) -> bool:
        """Return whether an implementation has the defect, and not a document or a list."""
        return _is_shown_by_calls(self.first)

    @property
    def is_size_of_error(self) -> bool:
        """Return whether the diagnosis is only an accuracy; the cause of an error matters more than its size."""
        return self.diagnosis.startswith(ACCURACY_PREFIX)

    @property
    def is_computed_in_float32(self) -> bool:
        """Return whether the defect is that float64 is only as accurate as float32."""
        return self.diagnosis == ACCURACY_OF_FLOAT32 and self.dtypes == ("float64",)

    @property
    def column(self) -> tuple[str, str]:
        """The environment and the implementation; both are empty for a defect of a document."""
        return self.first.environment, self.first.implementation


@cached_for_frames
def find_defects(frames: Frames) -> tuple[Defect, ...]:
    """Return the defects: wrong numbers, then calls that did not run, then wrong documents and lists.

    Among each of these, the defect of most cases comes first, and an accuracy without a cause comes last.
    """
    rows = select_failing(frames.results)
    rows = rows[rows["diagnosis"].notna() & rows["diagnosis"].ne("")]
    first = {itemgetter(*_EVALUATION_FIELDS)(row): row for row in reversed(to_records(rows))}
    # An untried call comes after the failure because of which it was not tried.
    return tuple(
        sorted(
            group_by_defect(frames, find_failures(frames), first),
            key=lambda of: (
                not of.is_shown_by_calls,
                _did_not_run(of.first),
                of.name == Verdict.UNTRIED,
                of.is_size_of_error,
                -of.further_case_count,
            ),
        )
    )


def group_by_defect(frames: Frames, all_failures: Iterable[Failure], diagnosed: DiagnosedRows) -> list[Defect]:
    """Group failures by defect, in the order of each defect's first failure."""
    numbered_groups = group_by_key(enumerate(all_failures), lambda pair: _defect_key(pair[1], diagnosed, pair[0]))
    return [_make_defect(frames, [failure for _, failure in pairs], diagnosed) for pairs in numbered_groups.values()]


def causes_by_column(frames: Frames) -> dict[Column, list[str]]:
    """Return the causes of each wrong implementation whose causes are known, as ``cause_texts`` lists them."""
    texts = {column: cause_texts(defects_of_column(frames, column)) for column in frames.columns}
    return {column: causes for column, causes in texts.items() if causes}


def cause_texts(causing: Sequence[Defect]) -> list[str]:
    """Return why one implementation's numbers are wrong: a text for each cause, none if no cause is known."""
    wrong = [defect for defect in causing if defect.is_shown_by_calls and defect.first.verdict in _WRONG_NUMBERS]
    named, unnamed = (
        [defect for defect in wrong if defect.diagnosis],
        [defect for defect in wrong if not defect.diagnosis],
    )
    hint = unnamed[0].first.message.partition(SINGLE_CASE_PREFIX)[2] if unnamed else ""
    if not named and not hint:
        return []
    if len(wrong) == 1 and named:
        return [named[0].text]
    meant = {  # readings that an author may intend: conventions, and readings that can be declared
        part
        for defect in named
        for part, option in zip(
            defect.diagnosis.split(CONVENTIONS_SEPARATOR), _convention_declarations(defect), strict=True
        )
        if option or defect.first.verdict == Verdict.SEMANTIC
    }
    rest = list(dict.fromkeys(case for defect in unnamed for case in defect.cases))
    causes = _cases_by_cause(named)
    unexplained = {case for cause in causes if cause.name not in meant for case in cause.cases}.union(rest)
    if len(unexplained) > len({case for cause in causes if cause.name in meant for case in cause.cases}):
        meant = set()  # more likely, another fault makes these cases look like a convention
    texts = _count_causes_text([cause for cause in causes if cause.name in meant])
    others = _count_causes_text([cause for cause in causes if cause.name not in meant])
    if rest:
        where = f": {rest[0]}" if len(rest) == 1 else f", the first {rest[0]}"
        taken = f"{SINGLE_CASE_PREFIX}{hint}" if hint else ""
        others.append(f"no cause found ({count_noun(len(rest), 'case')}{where}{taken})")
    if not texts:
        return others
    them = "this" if len(texts) == 1 else "these"
    outcome = f"it is right if it means {them}"
    if unexplained:
        outcome = f"if it means {them}, it is wrong in {count_noun(len(unexplained), 'case')}"
    return [f"{outcome}: {texts[0]}", *texts[1:], *(f"what is left: {text}" for text in others[:1]), *others[1:]]


def _count_causes_text(causes: Sequence[_CauseCases]) -> list[str]:
    """Return the causes of most cases, each with its number of cases, and the number of cases with other causes."""
    more = {case for cause in causes[_MAX_CAUSES:] for case in cause.cases}
    texts = [f"{cause.text} ({count_noun(len(cause.cases), 'case')})" for cause in causes[:_MAX_CAUSES]]
    return [*texts, *([f"other causes ({count_noun(len(more), 'case')})"] if more else [])]


def declaration_lines(frames: Frames) -> list[str]:
    """Return the declarations that explain all failing cases of a user's function, as lines.

    Further lines name functions of the frameworks that are recorded to fail the same way.
    """
    failing = [column for column in frames.columns if defects_of_column(frames, column)]
    alike = {
        column: frames.requests[column.environment].similar_known_failures.get(column.implementation)
        for column in failing
    }
    lines = [
        (column, line)
        for column in failing
        for line in (_convention_declaration(frames, column), _capability_declaration(frames, column), alike[column])
    ]
    return [f"{frames.title(column, with_version=False)}: {line}" for column, line in lines if line]


def _convention_declaration(frames: Frames, column: Column) -> str:
    asked = frames.requests[column.environment]
    if column.implementation not in asked.user_implementations:
        return ""
    by_cases = sorted(defects_of_column(frames, column), key=lambda defect: -len(defect.cases))
    numeric = [defect for defect in by_cases if defect.is_shown_by_calls and defect.first.verdict in _WRONG_NUMBERS]
    options = [_convention_declarations(defect) for defect in numeric]
    conventions = [option for of in options for option in of if option is not None]
    if not options or not all(options) or len(conventions) < sum(map(len, options)):
        return ""  # a convention explains only some of the failing cases: more likely it is a fault
    declared: dict[str, str] = {}
    for name, value in conventions:
        declared.setdefault(name, value)
    table = {**asked.conventions.get(column.implementation, {}), **declared}
    them = "this" if len(declared) == 1 else "these"
    return f"if it means {them}, declare it: {_declaration_code(frames, column, 'conventions', table)}"


_LACKING_CAPABILITY_WORDS = {
    "grouped_heads": "does not support grouped-query attention",
    "value_width": "requires values as wide as the keys",
    "dtypes": "supports only float32",
}
"""Missing capabilities, in words."""


def _capability_declaration(frames: Frames, column: Column) -> str:
    """Return the declaration of the capabilities that a user's function lacks: those whose cases all fail."""
    if column.implementation not in frames.requests[column.environment].user_implementations:
        return ""
    own_defects = defects_of_column(frames, column)
    where = [
        pattern
        for pattern in confirmed_patterns(frames)
        if pattern.column == column and pattern.failing == pattern.cases_with_feature
    ]
    lacking: dict[str, Any] = {
        MISSING_CAPABILITIES[pattern.where]: False for pattern in where if pattern.where in MISSING_CAPABILITIES
    }
    if any(defect.is_computed_in_float32 for defect in own_defects):
        lacking["dtypes"] = ["float32"]
    words = join_words([_LACKING_CAPABILITY_WORDS[name] for name in lacking])
    return f"if it {words}, declare it: {_declaration_code(frames, column, 'capabilities', lacking)}" if lacking else ""


def _declaration_code(frames: Frames, column: Column, name: str, table: Mapping[str, Any]) -> str:
    file, *_ = frames.command_words.get(column.environment, {}).get(column.implementation, [""])
    return declaration_code(file, column.implementation.partition(".")[2], name, table)


class _CauseCases(NamedTuple):
    """A reading, its words, and the cases that show it."""

    name: str
    text: str
    cases: Collection[str]


def _cases_by_cause(named: Sequence[Defect]) -> list[_CauseCases]:
    """Return the causes, that of most cases first and an accuracy last; a case counts for each of its causes."""
    pairs = [
        (defect.diagnosis.split(CONVENTIONS_SEPARATOR), defect.text.split(DESCRIPTIONS_SEPARATOR)) for defect in named
    ]
    texts = dict(chain.from_iterable(zip(*pair, strict=True) for pair in pairs if len(pair[0]) == len(pair[1]) > 1))
    texts |= {defect.diagnosis: defect.text for defect in named}
    cases: dict[str, dict[str, None]] = {}
    for defect in named:
        parts = defect.diagnosis.split(CONVENTIONS_SEPARATOR)
        for part in parts if texts.keys() >= set(parts) else [defect.diagnosis]:
            cases.setdefault(part, {}).update(dict.fromkeys(defect.cases))
    causes = (_CauseCases(name, texts[name], of_it) for name, of_it in cases.items())
    return sorted(causes, key=lambda cause: (cause.name.startswith(ACCURACY_PREFIX), -len(cause.cases)))


def _convention_declarations(defect: Defect) -> list[tuple[str, str] | None]:
    """Return the convention and value that declare each reading of a defect; None for undeclarable readings."""
    if not defect.diagnosis:
        return []
    if EXCEPTION_PREFIX in defect.text:  # no author intends a reading that fits only some cases
        return [None for _ in defect.diagnosis.split(CONVENTIONS_SEPARATOR)]
    options = [CONVENTION_OF_READING.get(name) for name in defect.diagnosis.split(CONVENTIONS_SEPARATOR)]
    is_default = _DEFAULT_SCALE in defect.text
    return [option if option is None or option[0] != "scale" or is_default else None for option in options]


def defects_of_column(frames: Frames, column: Column) -> list[Defect]:
    """Return the defects of one implementation."""
    return [defect for defect in find_defects(frames) if defect.column == column.key]


def _is_shown_by_calls(failure: Failure) -> bool:
    return bool(failure.implementation and failure.dtype) and failure.verdict != Verdict.XPASS


def _did_not_run(failure: Failure) -> bool:
    return not failure.stage and Verdict(failure.verdict).exit_code is ExitCode.NOT_RUN


_EVALUATION_FIELDS = ("case", "environment", "implementation")
_evaluation_of = attrgetter(*_EVALUATION_FIELDS)


def _defect_key(failure: Failure, diagnosed: DiagnosedRows, number: int) -> tuple[object, ...]:
    if not _is_shown_by_calls(failure):
        return (number,)
    if _did_not_run(failure):
        alike: tuple[object, ...] = (failure.verdict, _CALL_SPECIFIC_PATTERN.sub("", failure.message))
    elif diagnosis := diagnosed.get(_evaluation_of(failure)):
        alike = (diagnosis["diagnosis"],)
    else:
        alike = (failure.verdict, failure.stage)
    return failure.environment, failure.implementation, *alike


def _make_defect(frames: Frames, group: Sequence[Failure], diagnosed: DiagnosedRows) -> Defect:
    first, dtypes = group[0], {failure.dtype for failure in group}
    places = [] if _did_not_run(first) else map(_evaluation_of, group)
    named = [diagnosed[place] for place in places if place in diagnosed]
    text = _cause_text(frames, list({row["case"]: row for row in named}.values())) if named else first.message
    defect = Defect(
        first,
        diagnosis=named[0]["diagnosis"] if named else "",
        text=text,
        cases=tuple(dict.fromkeys(failure.case for failure in group)),
        dtypes=tuple(sorted(dtypes, key=[*DTYPES, *sorted(dtypes - set(DTYPES))].index)),
        evaluations=len(group),
        rows=sum(failure.rows for failure in group),
        wrong_element_sentence=wrong_element_text(first, _layout_of_element(frames, first), of_several=len(dtypes) > 1),
    )
    return replace(defect, text="float64 is as accurate as float32") if defect.is_computed_in_float32 else defect


def _layout_of_element(frames: Frames, failure: Failure) -> DocumentLayout | None:
    """Return the layout in which the document of a failing case counts the elements of its worst stage."""
    case = frames.cases.get(failure.case)
    if case is None or not is_document(case):
        return None
    rows = select_failing(frames.results)
    of_stage = rows[rows["case"].eq(failure.case) & rows["stage"].eq(failure.element_stage or "")]
    return next((document_layout(case, row) for row in to_records(of_stage)), None)


def _cause_text(frames: Frames, rows: Sequence[Row]) -> str:
    """Describe the cause that rows of one diagnosis share."""
    default = "default " if all(frames.cases[row["case"]]["options"].get("scale") is None for row in rows) else ""
    scales = [match for row in rows if (match := _SCALE_PATTERN.search(row["message"]))]
    if len(scales) == len(rows):  # every case may have the right scale times the same number
        first, *others = [float(match[1]) / float(match[2]) for match in scales if float(match[2])] or [math.nan]
        if not all(abs(scale - first) <= _SCALE_TOLERANCE * abs(first) for scale in (first, *others)):
            # A scale is fitted to few digits if the scores hardly depend on it, so most of the cases decide.
            (scale, count), *_ = Counter(match[1] for match in scales).most_common()
            is_constant = count >= _SHARE_WITH_ONE_SCALE * len(scales)
            return f"the {default}scale is always {scale}" if is_constant else _OTHER_SCALE
        return f"the {default}scale is {first:.4g} times the right one"
    exact = [
        (match[2] or match[1]).split(" or ") for row in rows if (match := _EXACT_SCALE_PATTERN.search(row["message"]))
    ]
    if len(exact) == len(rows) and (alike := [text for text in exact[0] if all(text in texts for texts in exact)]):
        return f"the {default}scale is {' or '.join(alike)}"
    if CONVENTIONS_SEPARATOR in str(rows[0]["diagnosis"]):
        *texts, last = str(rows[0]["message"]).split(DESCRIPTIONS_SEPARATOR)
        is_meant = rows[0]["verdict"] == Verdict.SEMANTIC
        return DESCRIPTIONS_SEPARATOR.join([*texts, last if is_meant else last.partition("; ")[0]])
    # The parts of a mistake's description after the first are its numbers.
    parts = [str(row["message"]).split("; ")[: None if row["verdict"] == Verdict.SEMANTIC else 1] for row in rows]
    if len({first for first, *_ in parts}) > 1:
        opening, *more = {first.rpartition(": ")[0] for first, *_ in parts}
        return min(map("; ".join, parts), key=len) if more or not opening else opening
    return "; ".join(part for part in parts[0] if all(part in texts for texts in parts))


_MAX_COMMANDS = 3


def first_commands(frames: Frames) -> list[str]:
    """Return a command for the first defect of each of the first implementations; one with a cause, if there is one.

    A wrongly printed number belongs to no implementation and has no dtype, so it has no command.
    """
    of_columns = group_by_key(
        (defect for defect in find_defects(frames) if defect.is_shown_by_calls), lambda defect: defect.column
    )
    first = (next((defect for defect in group if defect.diagnosis), group[0]) for group in of_columns.values())
    commands = (line for defect in first for line in defect.first.next[:1])
    return list(islice(commands, _MAX_COMMANDS))


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
_EXPECTED_FAILURE_KEYS = ["environment", "implementation", "verdict", "reason", "thread"]
_OTHER_RESULT = "something else"
EMPTY_ROWS_WORDS = (*reversed([*EMPTY_ROWS.values()]), _OTHER_RESULT)
_ADDRESS_CHARACTERS = ":/?#[]@!$&'*+,;=%~"
"""Characters that stay unquoted in an address: none that ends it in Markdown or HTML, such as brackets."""
_ISSUE_PATTERN = re.compile(r"([\w.-]+/[\w.-]+)#([0-9]+)", re.ASCII)


def expected_failure_groups(frames: Frames) -> list[Row]:
    """Return the expected failures of stages, a row for each implementation, verdict and reason.

    A row has their cases and dtypes, and the first stage at which one begins.
    """
    expected = select_expected_failures(frames.results)
    texts = {name: expected[name].fillna("") for name in ("reason", "thread")}
    groups = (
        expected.assign(**texts, begins_at=first_failing_stages(expected))
        .astype(object)
        .groupby(_EXPECTED_FAILURE_KEYS, as_index=False)
    )
    rows = groups.agg(
        cases=("case", lambda cases: tuple(sorted(set(cases)))),
        dtypes=("dtype", lambda dtypes: tuple(dtype for dtype in DTYPES if dtype in set(dtypes))),
        begins_at=("begins_at", lambda stages: min(set(stages), key=stage_sort_key)),
    )
    return list(to_records(rows))


def thread_address(thread: str) -> str:
    """Return the address of owner/name#number or of an https link; empty for other texts, which are not linked.

    Example:
        >>> thread_address("pytorch/pytorch#12")
        'https://github.com/pytorch/pytorch/issues/12'
        >>> thread_address("a mail of May")
        ''
    """
    if issue := _ISSUE_PATTERN.fullmatch(thread):
        repository, number = issue.groups()
        return f"https://github.com/{repository}/issues/{number}"
    try:
        parts = urlsplit(thread)
    except ValueError:
        return ""
    plain = not any(character.isspace() or not character.isprintable() for character in thread)
    return quote(thread, safe=_ADDRESS_CHARACTERS) if parts.scheme == "https" and parts.hostname and plain else ""


def count_empty_row_results(frames: Frames) -> Mapping[Column, Counter[str]] | None:
    """Count, for each implementation, the cases by their result for a query without a key.

    Return None if all results are the requested ones.
    """
    results = frames.results
    differing = results.loc[results["empty_rows"].notna(), "case"].unique()
    results = results[results["case"].isin(differing) & results["stage"].ne("")]
    counts: dict[tuple[str, ...], Counter[str]] = {}
    for (case, *key), part in split_by(results, ["case", "environment", "implementation"]).items():
        values = {value for value in part["empty_rows"].dropna() if value in EMPTY_ROWS}
        if not values and part["verdict"].eq(Verdict.AGREE).all():
            meant = frames.cases[case]["options"].get("empty_rows")
            values = {meant if meant in EMPTY_ROWS else DEFAULT_EMPTY_ROWS}
        word = EMPTY_ROWS[values.pop()] if len(values) == 1 else _OTHER_RESULT
        counts.setdefault(tuple(key), Counter())[word] += 1
    return {column: counts[column.key] for column in frames.columns if column.key in counts} or None
