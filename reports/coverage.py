"""Coverage: the judged cases of each implementation, what the others lack, and the printed numbers that hold.

A case is judged on an implementation if it is judged in any dtype. Cases of an operation that the implementation does
not offer are counted separately. For other unsupported cases, the missing parameter, dtype or capability is counted by
name; messages are grouped with messages that differ from them only in numbers. Cases that were padded to the shapes
that an implementation requires are counted by their padding.

A number that a document prints is counted once, and holds only if every comparison of it holds. A number that was not
compared on some implementation is unverified there. A number that only some implementation misses is no fault of the
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
from attncheck.common.wording import count_noun, format_distinct, join_words, truncate_list
from attncheck.reports.frames import (
    Column,
    Frames,
    are_under_erratum,
    cached_for_frames,
    document_cases,
    element_text,
    rows_of_column,
    select_failing,
    split_by,
    stage_sort_key,
    to_records,
)
from attncheck.results.coverage import is_function_missing, is_function_or_dtype_missing, shortfall_sentences
from attncheck.spec import DTYPES, OPERATIONS
from attncheck.spec.verdicts import ALL_CASES, Verdict

_MAX_LISTED_PICKS = 4
"""Selected names that one sentence lists."""
_MAX_LISTED_LACKS = 8
"""Missing features that one sentence lists."""
_MAX_OPERATIONS = 2
"""Operations that one sentence names."""
_IN_DTYPES = "declared dtypes only"
"""The note on a number of cases that does not count the cases that exist only in undeclared dtypes."""
_MAX_REASON_LETTERS = 100
_NUMBER_PATTERN = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_CASE_KEYS = ["environment", "implementation", "case"]
STOPPING_VERDICTS = [verdict for verdict in Verdict if verdict.exit_code is ExitCode.NOT_RUN]


@dataclass(frozen=True)
class UnsupportedReasons:
    """The reasons why cases are unsupported, and the number of cases for each.

    ``missing_feature_counts`` has the number of cases per missing feature, most frequent first.

    A case may lack several features; ``cases`` counts it once. It does not count cases that are
    ``not_offered`` (because of ``missing_functions``, or as ``cases_in_other_dtypes``) or that standard cases
    cover (``cases_covered_by_standard``).
    """

    cases: int = 0
    missing_feature_counts: tuple[tuple[str, int], ...] = ()
    not_offered: int = 0
    missing_functions: int = 0
    cases_in_other_dtypes: int = 0
    cases_covered_by_standard: int = 0

    @classmethod
    def from_reasons(cls, reasons: Collection[tuple[str, str]]) -> UnsupportedReasons:
        """Count reasons, each a comma-separated list of missing features, and a message if the list is empty."""
        stood_for = sum(lacks == ALL_CASES for lacks, _ in reasons)
        functions = [lacks for lacks, _ in reasons if is_function_missing(lacks)]
        dtypes = sum(lacks in DTYPES for lacks, _ in reasons)
        rest = [reason for reason in reasons if reason[0] != ALL_CASES and not is_function_or_dtype_missing(reason[0])]
        named = Counter(name for lacks, _ in rest if lacks for name in lacks.split(", "))
        unnamed = _count_similar(message for lacks, message in rest if not lacks)
        singly = sorted({**named, **unnamed}.items(), key=lambda item: (-item[1], item[0]))
        return cls(len(rest), tuple(singly), len(functions) + dtypes, len(set(functions)), dtypes, stood_for)

    def __str__(self) -> str:
        texts = [f"{what} {count:,}" for what, count in self.missing_feature_counts]
        return ", ".join(texts if len(texts) == _MAX_LISTED_LACKS + 1 else truncate_list(_MAX_LISTED_LACKS, texts))


@dataclass(frozen=True)
class Coverage:
    """The number of requested cases in which one implementation was judged, and the outcomes of the others.

    ``stopped`` raised, crashed or ran out of time, ``unverified`` have no exact answer; ``operations`` are the
    requested ones that the implementation offers.
    """

    column: Column
    asked: int
    judged: int
    lacks: UnsupportedReasons = UnsupportedReasons()
    unverified: int = 0
    stopped: int = 0
    operations: tuple[str, ...] = ()

    @property
    def covered_by_standard_cases(self) -> int:
        """The number of cases that were not requested because the standard cases cover them."""
        return self.lacks.cases_covered_by_standard

    @property
    def requested_cases(self) -> int:
        """The number of requested cases."""
        return self.asked - self.covered_by_standard_cases

    @property
    def offered_cases(self) -> int:
        """The number of requested cases with an operation and a dtype that the implementation offers."""
        return self.requested_cases - self.lacks.not_offered

    @property
    def judged_all_requested(self) -> bool:
        """Return whether every requested case was judged."""
        return self.judged >= self.requested_cases - self.lacks.cases_in_other_dtypes

    @property
    def not_run(self) -> int:
        """The number of cases without a result."""
        return max(0, self.offered_cases - self.judged - self.lacks.cases - self.unverified - self.stopped)

    @property
    def unjudged_text(self) -> str:
        """List the outcomes of unjudged cases; empty if there are none."""
        parts = [f"{self.lacks.cases:,} unsupported: {self.lacks}"] if self.lacks.cases else []
        parts += [f"{self.unverified:,} unverified: no exact answer"] if self.unverified else []
        parts += [f"{self.stopped:,} could not be run"] if self.stopped else []
        parts += [f"{self.not_run:,} not run"] if self.not_run else []
        not_offered = "other operations" if self.offered_cases else "operations"
        parts += [f"{not_offered} not offered: {self.lacks.missing_functions}"] if self.lacks.missing_functions else []
        return "; ".join(parts)

    @property
    def summary_text(self) -> str:
        """Return how many cases of the offered operations were judged, and what the rest lacks."""
        cases = count_noun(
            self.offered_cases or self.requested_cases, "standard case" if self.covered_by_standard_cases else "case"
        )
        rest = ", which cover the rest" if self.covered_by_standard_cases else ""
        few = (
            join_words(self.operations)
            if len(self.operations) <= _MAX_OPERATIONS
            else f"{len(self.operations)} operations"
        )
        kinds = [few] if self.lacks.not_offered and self.operations else []
        kinds += [_IN_DTYPES] if self.lacks.cases_in_other_dtypes and self.offered_cases else []
        only = f" ({', '.join(kinds)})" if kinds else ""
        return "; ".join(filter(None, (f"judged {self.judged:,} of {cases}{only}{rest}", self.unjudged_text)))

    @property
    def dtypes_note(self) -> str:
        """Return the note that cases that have only other dtypes are not counted; empty if there are none."""
        return f" ({_IN_DTYPES})" if self.lacks.cases_in_other_dtypes and self.offered_cases else ""


@cached_for_frames
def coverage_by_column(frames: Frames) -> tuple[Coverage, ...]:
    """Return the coverage of each implementation, in the order of the columns."""
    wanted = [*_CASE_KEYS, "dtype", "stage", "verdict", "lacks", "message"]
    stages = frames.results[wanted]
    judged = pd.MultiIndex.from_frame(select_judged_rows(frames)[_CASE_KEYS].drop_duplicates())
    unjudged_rows = split_by(stages[~pd.MultiIndex.from_frame(stages[_CASE_KEYS]).isin(judged)], _CASE_KEYS[:2])
    counts = judged.to_frame(index=False).groupby(_CASE_KEYS[:2]).size().to_dict()
    return tuple(
        _column_coverage(frames, column, int(counts.get(column.key, 0)), unjudged_rows.get(column.key))
        for column in frames.columns
    )


def select_judged_rows(frames: Frames) -> pd.DataFrame:
    """Return the rows that prove that their case was judged (``is_judged``)."""
    keys = [*_CASE_KEYS, "dtype"]
    stages, numbers = frames.results, frames.numbers
    held = stages[stages["stage"].ne("") & stages["verdict"].ne(Verdict.UNVERIFIED)]
    wrong = numbers[~numbers["verdict"].isin([Verdict.AGREE, Verdict.UNVERIFIED])]
    return pd.concat([held[keys], wrong[keys]])


def _column_coverage(frames: Frames, column: Column, judged: int, unjudged_rows: pd.DataFrame | None) -> Coverage:
    asked = frames.requests[column.environment].cases
    if unjudged_rows is None:
        return Coverage(column, asked, judged)
    verdict_sets = unjudged_rows.groupby("case")["verdict"].agg(set)
    stopped = sum(bool(verdicts & set(STOPPING_VERDICTS)) for verdicts in verdict_sets)
    unverified = sum(
        not verdicts & set(STOPPING_VERDICTS) and Verdict.UNVERIFIED in verdicts for verdicts in verdict_sets
    )
    lacking = {Verdict.UNSUPPORTED.value, Verdict.XPASS.value}
    only = set(verdict_sets.index[[verdicts <= lacking for verdicts in verdict_sets]])
    unsupported = unjudged_rows[unjudged_rows["case"].isin(only) & unjudged_rows["verdict"].eq(Verdict.UNSUPPORTED)]
    reasons: dict[str, tuple[str, str]] = {}
    for row in to_records(unsupported.drop_duplicates(["case", "lacks", "message"])):
        # A missing dtype is the weakest reason: other dtypes of the case tell more.
        if row["case"] not in reasons or reasons[row["case"]][0] in DTYPES:
            reasons[row["case"]] = (row["lacks"] or "", str(row["message"]))
    operations: tuple[str, ...] = ()
    if absent := {case for case, (lacks, _) in reasons.items() if is_function_missing(lacks)}:
        cases = set(rows_of_column(frames.results, column)["case"]) - absent
        offered = {frames.cases[case]["operation"] for case in cases}  # without operations folded into another one
        operations = tuple(
            sorted(
                operation
                for operation in offered
                if operation not in OPERATIONS or not OPERATIONS[operation].may_run_as_lowered
            )
        )
    return Coverage(
        column, asked, judged, UnsupportedReasons.from_reasons(reasons.values()), unverified, stopped, operations
    )


def _count_similar(messages: Iterable[str]) -> dict[str, int]:
    """Count messages; those that differ only in numbers count as one, with N for the numbers.

    Example:
        >>> _count_similar(["needs 16 keys", "needs 32 keys", "has no mask"])
        {'"needs N keys"': 2, '"has no mask"': 1}
    """
    groups: dict[tuple[str, ...], list[list[str]]] = {}
    for message in messages:
        reason = message.removeprefix("NotImplementedError: ").removeprefix("NotImplementedError") or "no reason"
        groups.setdefault(tuple(_NUMBER_PATTERN.split(reason)), []).append(_NUMBER_PATTERN.findall(reason))
    counts = {}
    for texts, numbers in groups.items():
        shown = [column[0] if len(set(column)) == 1 else "N" for column in zip(*numbers, strict=True)]
        text = "".join(part for pair in zip(texts, [*shown, ""], strict=True) for part in pair)
        text = text if len(text) <= _MAX_REASON_LETTERS else f"{text[: _MAX_REASON_LETTERS - 3]}..."
        counts[f'"{text}"'] = len(numbers)
    return counts


def shortfall_lines(frames: Frames) -> tuple[str, ...]:
    """Return a line for each shortfall of judged cases; any shortfall makes the exit code 3."""
    lines: list[str] = []
    bad = select_failing(frames.results)
    stopped = bad[bad["verdict"].isin(STOPPING_VERDICTS)]
    failed = set(zip(stopped["environment"], stopped["implementation"], strict=True))
    for environment, asked in frames.requests.items():
        covered = [entry for entry in coverage_by_column(frames) if entry.column.environment == environment]
        judged = {entry.column.implementation: entry.judged for entry in covered}
        absent = {entry.column.implementation: entry.lacks.not_offered for entry in covered}
        where = f"{environment}: " if len(frames.requests) > 1 else ""
        # An error that fails a comparison already explains why its implementation was not judged.
        if asked.minimum_judged is None:
            judged = {name: count for name, count in judged.items() if count or (environment, name) not in failed}
        lines += [where + line for line in shortfall_sentences(judged, asked, absent)]
    return tuple(lines)


def covered_by_others_sentences(frames: Frames) -> Iterable[str]:
    """Count the evaluations that were not requested because others cover them, in a sentence per implementation."""
    results = frames.results
    rows = results[results["lacks"].eq(ALL_CASES) & results["verdict"].eq(Verdict.UNSUPPORTED)]
    rows = rows.drop_duplicates([*_CASE_KEYS, "dtype"])
    for column in frames.columns:
        if count := len(rows_of_column(rows, column)):
            few = f"{frames.title(column, with_version=False)} was not asked for {count_noun(count, 'evaluation')}"
            yield f"{few}, which others cover; {ALL_CASES} asks for all."


def undeclared_dtype_sentences(frames: Frames) -> Iterable[str]:
    """Name the dtypes in which an implementation was not tested, because it does not declare them."""
    results = frames.results
    rows = results[results["lacks"].isin(DTYPES) & results["verdict"].eq(Verdict.UNSUPPORTED)]
    together: dict[tuple[tuple[str, ...], bool], list[str]] = {}
    for column in frames.columns:
        lacks = set(rows_of_column(rows, column)["lacks"])
        if dtypes := tuple(dtype for dtype in DTYPES if dtype in lacks):
            names = together.setdefault((dtypes, column.key in frames.sources), [])
            names.append(frames.title(column, with_version=False))
    for (dtypes, is_own), names in together.items():
        whose = f", which {'does' if len(names) == 1 else 'do'} not declare {'it' if len(dtypes) == 1 else 'them'}."
        yield f"{join_words(dtypes)} not tested on {join_words(names)}{': declare `dtypes`.' if is_own else whose}"


def selection_sentences(frames: Frames) -> Iterable[str]:
    """Return a sentence for each environment that ran only a selection of cases."""
    words = {
        "cases": "the cases",
        "tags": "the tag",
        "dtypes": "the dtype",
        "match": "the cases that match",
        "failed": "what failed last time in",
        "searched": "what a search drew,",
    }
    for environment, asked in frames.requests.items():
        where = f"{environment}, partial run" if len(frames.requests) > 1 else "Partial run"
        quoted = {
            **asked.case_selection,
            "match": tuple(f'"{pattern}"' for pattern in asked.case_selection.get("match", ())),
        }
        parts = [
            f"{words[name]}{'s' if len(picks) > 1 and not words[name].endswith('s') else ''} "
            f"{join_words(truncate_list(_MAX_LISTED_PICKS, picks, '{} more'))}"
            for name, picks in quoted.items()
            if picks
        ]
        if parts:
            yield f"{where}: only {'; '.join(parts)}."


_PADDING_PATTERN = re.compile(r"([a-z ]+) \([^)]*\)(?:, |$)")
"""The padding and its axes, such as zero columns (D 5 to 8, Dv 3 to 8) or masked keys (T 7 to 16)."""
_FOLDED_MASK_WORDS = "a block mask"
"""The mask for packed sequences if there is no function for them. No implementation requires it."""


@cached_for_frames
def padded_cases(frames: Frames) -> dict[Column, pd.DataFrame]:
    """Return the padded cases of every implementation that has any, a row for each kind of padding."""
    results = frames.results
    rows = results[results["padded"].notna() & results["verdict"].ne(Verdict.UNSUPPORTED)]
    rows = rows[[*_CASE_KEYS, "padded"]].drop_duplicates()
    rows = (
        rows.assign(kind=rows["padded"].str.findall(_PADDING_PATTERN))
        .explode("kind")
        .drop_duplicates([*_CASE_KEYS, "kind"])
    )
    return {column: padded for column in frames.columns if len(padded := rows_of_column(rows, column))}


def padded_sentences(frames: Frames) -> Iterator[str]:
    """Count the padded cases of each implementation by their padding, a sentence each."""
    for column, rows in padded_cases(frames).items():
        on, is_folded = f"On {frames.title(column, with_version=False)}", rows["kind"].eq(_FOLDED_MASK_WORDS)
        counts = rows.loc[~is_folded, "kind"].value_counts().sort_index().sort_values(ascending=False, kind="stable")
        if is_folded.any():
            folded = f"{_case_count_text(int(is_folded.sum()))} called with {_FOLDED_MASK_WORDS}"
            yield f"{on}, which has no function for packed sequences, {folded} instead."
        if (~is_folded).any():
            parts = [f"{count:,} with {kind}" for kind, count in counts.items()]
            how = f" with {counts.index[0]}, as it requires" if len(parts) == 1 else ""
            how = (
                f", as it requires: {join_words(parts)}" if len(parts) > 1 else how
            )  # without a kind, somebody else's rows
            yield f"{on}, {_case_count_text(rows.loc[~is_folded, 'case'].nunique())} padded{how}."


def _case_count_text(count: int) -> str:
    return "1 case was" if count == 1 else f"{count:,} cases were"


_NUMBER_PLACE = ["case", "stage", "called", "index"]
_PLAIN_DECIMAL = re.compile(r"[-+]?\d*\.\d+")
_MAX_NUMBERS = 3
DOCUMENT_VERDICTS = (Verdict.MISPRINT, Verdict.XPASS)
"""Verdicts of numbers that are printed or recorded wrongly, so that no implementation is to blame."""


@dataclass(frozen=True)
class NumberCounts:
    """The counts of printed numbers of each kind; ``errata`` are not part of ``printed``."""

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
    """A matrix that a document prints wrongly, or a recorded erratum that no longer is one."""

    case: str
    stage: str
    called: str
    verdict: str
    message: str
    numbers: tuple[tuple[str, str, str], ...]
    """The index of each number, the printed number, and the exact answer."""
    rows: int
    """The number of comparisons that fail because of it."""


@cached_for_frames
def count_printed_numbers(frames: Frames) -> NumberCounts:
    """Count the printed numbers of documents, and every other printed number that is wrong or was not compared."""
    return count_numbers_of_cases(frames, list(frames.cases))


def count_numbers_of_cases(frames: Frames, cases: Collection[str]) -> NumberCounts:
    """Count the printed numbers of some cases."""
    printed = printed_numbers(frames)
    printed = printed[printed["case"].isin(cases)]
    wrong_call = are_under_erratum(frames, printed) | (
        printed["verdict"].eq(Verdict.MISPRINT) & printed["xfail"].astype(bool)
    )
    errata = printed[wrong_call & printed["verdict"].eq(Verdict.MISPRINT)]
    states = _number_states(printed[~wrong_call])
    return NumberCounts(
        printed=len(states),
        **{name: int(states.eq(state).sum()) for state, name in enumerate(_NUMBER_STATES)},
        errata=len(errata[_NUMBER_PLACE].drop_duplicates()),
        outdated=sum(misprint.verdict == Verdict.XPASS and misprint.case in cases for misprint in misprints(frames)),
        not_returned=sum(case in cases for case, _ in _printed_stages_not_returned(frames)),
    )


@cached_for_frames
def printed_numbers(frames: Frames) -> pd.DataFrame:
    """Return the comparisons with printed numbers: all of documents, and those of other sources that do not hold."""
    documents = document_cases(frames).keys()
    numbers = frames.numbers[frames.numbers["basis"].eq("printed")]
    doubtful = numbers["verdict"].isin([Verdict.MISPRINT, Verdict.UNVERIFIED])
    return numbers[numbers["case"].isin(documents) | doubtful]


def count_unverified(frames: Frames, column: Column) -> int:
    """Count the numbers, printed or not, that were not compared on an implementation."""
    numbers = rows_of_column(frames.numbers, column)
    return len(numbers[numbers["verdict"].eq(Verdict.UNVERIFIED)][_NUMBER_PLACE].drop_duplicates())


_NUMBER_STATES = ("hold", "unverified", "missed", "misprints")
"""States of a printed number, from harmless to severe."""


def _number_states(numbers: pd.DataFrame) -> pd.Series[int]:
    """Return one state per printed number: the worst of its comparisons."""
    state = pd.Series(_NUMBER_STATES.index("hold"), index=numbers.index)
    state[numbers["verdict"].eq(Verdict.UNVERIFIED)] = _NUMBER_STATES.index("unverified")
    state[numbers.index.isin(select_failing(numbers).index)] = _NUMBER_STATES.index("missed")
    state[numbers["verdict"].eq(Verdict.MISPRINT)] = _NUMBER_STATES.index("misprints")
    return state.groupby([numbers[name] for name in _NUMBER_PLACE], dropna=False).max()


@cached_for_frames
def _printed_stages_not_returned(frames: Frames) -> tuple[tuple[str, str], ...]:
    """Return the cases and names of printed stages that no implementation returned."""
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


@cached_for_frames
def misprints(frames: Frames) -> tuple[Misprint, ...]:
    """Return the wrongly printed matrices and the outdated errata, once for all implementations and dtypes."""
    bad = select_failing(frames.numbers)
    bad = bad[bad["verdict"].isin(DOCUMENT_VERDICTS)]
    wrong = [
        _make_misprint(frames, key, to_records(part))
        for key, part in split_by(bad, ["case", "stage", "verdict"]).items()
    ]
    return tuple(sorted(wrong, key=lambda misprint: (misprint.case, stage_sort_key(misprint.stage))))


def _make_misprint(frames: Frames, key: tuple[str, str, str], rows: Sequence[Mapping[str, Any]]) -> Misprint:
    case, stage, verdict = key
    widest = min((str(row["dtype"]) for row in rows), key=DTYPES.index)
    by_index = {str(row["index"]): row for row in rows if row["dtype"] == widest}
    numbers = tuple((index, str(row["printed"]), _value_text(row["exact"])) for index, row in by_index.items())
    called = rows[0]["called"] or stage
    if verdict == Verdict.XPASS:
        return Misprint(case, stage, called, verdict, str(rows[0]["message"]), (), len(rows))
    rounded = {expected["name"] for expected in frames.cases[case]["expected"] if not expected.get("digits")}
    sentences = [
        f"{element_text(frames.cases[case], row, called)} is printed as {text}, "
        f"should be {_correct_print(row) if called in rounded else _distinct_exact_text(row)}"
        for row, (_, text, _) in zip(by_index.values(), numbers, strict=True)
    ]
    more = len(sentences) - _MAX_NUMBERS
    rest = [f"And {count_noun(more, 'more number')} of it"] if more > 0 else []
    hints = Counter(row["hint"] for row in by_index.values() if row["hint"] is not None)
    rest += [
        f"{hint[0].upper()}{hint[1:]}"
        if count == len(numbers)
        else f"For {count} of these {len(numbers)} numbers: {hint}"
        for hint, count in hints.items()
    ]
    return Misprint(case, stage, called, verdict, ". ".join([*sentences[:_MAX_NUMBERS], *rest]), numbers, len(rows))


def _correct_print(row: Mapping[str, Any]) -> str:
    """Write the number that a document should print: the exact answer, rounded to the printed decimals.

    The exact answer follows, unless it is the same number. Only the exact answer is written if the printed text is no
    plain decimal number, or if both round to the same text.
    """
    text, exact = str(row["printed"]), _distinct_exact_text(row)
    if not _PLAIN_DECIMAL.fullmatch(text) or not math.isfinite(row["exact"]):
        return exact
    rounded = f"{row['exact']:.{len(text.partition('.')[2])}f}"
    if float(rounded) == float(text) or float(rounded) == float(exact):
        return exact
    return f"{rounded} ({exact} rounded)"


def _distinct_exact_text(row: Mapping[str, Any]) -> str:
    """Write an exact answer with enough digits to differ from the printed text, which may not be a number."""
    try:
        return format_distinct(float(row["printed"]), row["exact"])[1]
    except (TypeError, ValueError):
        return _value_text(row["exact"])


def _value_text(value: float) -> str:
    """Write an exact answer, rounded to float64, with all of its digits."""
    return str(value) if not math.isfinite(value) else f"{value:.17g}"
