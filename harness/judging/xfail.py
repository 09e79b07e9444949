"""Rows of evaluations that failed, and expected failures applied to rows: marked, or reported if they no longer happen.

A failing row of an implementation is expected if an entry names it with this verdict. If its error is larger than the
entry allows (``max_ratio``), it fails, and its message says so. Rows that only follow from an expected failure are
expected too: pairs with that implementation, and its numbers, at that stage or a later one. An entry is ``xpass`` if
its implementation ran a case that it names and no row failed as the entry says.

Rows of evaluations that failed need no judging.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from attncheck.execution.worker import Failure
from attncheck.reading.case import Case
from attncheck.reading.expected_failures import ExpectedFailure
from attncheck.results.format import Row
from attncheck.spec import DTYPES, stage_position
from attncheck.spec.verdicts import Verdict


def make_blank_row(case: Case, dtype: str) -> Row:
    """Return an empty row of a case in a dtype."""
    return Row(case.id, case.operation, dtype, "", "stage", "", Verdict.AGREE)


def make_failure_row(blank: Row, implementation: str, failure: Failure) -> Row:
    """Return the one row of an evaluation that failed."""
    return Row(  # most evaluations of a user's function fail, and replacing fields takes three times as long
        *(blank.case, blank.operation, blank.dtype, implementation, blank.comparison, blank.stage),
        verdict=Verdict(failure.verdict),
        message=failure.message,
        lacks=", ".join(failure.lacks) or None,
        padded=failure.padded or None,
    )


_INCONCLUSIVE = frozenset(
    {Verdict.UNSUPPORTED, Verdict.UNVERIFIED, Verdict.ERROR, Verdict.TIMEOUT, Verdict.CRASH, Verdict.MISPRINT}
)
"""Verdicts that neither confirm nor refute an entry, unless it names them."""


@dataclass(frozen=True)
class ExpectedStageFailure:
    """An expected failure that happened: its first stage, and the reason."""

    implementation: str
    stage: str
    reason: str
    thread: str | None


@dataclass(frozen=True)
class KnownEmptyRows:
    """The known results of an implementation for a query without a key, independent of the case.

    ``declared_convention`` is the declared convention, ``reason`` and ``source`` say why, ``recorded_conventions`` are
    the conventions that lists of expected failures name. It ``accepts_convention_option`` for the case's convention if
    it has a keyword for it.
    """

    declared_convention: str | None = None
    recorded_conventions: tuple[str, ...] = ()
    accepts_convention_option: bool = True
    reason: str = ""
    source: str | None = None


def find_excusing_failure(
    expected_failures: Iterable[ExpectedFailure],
    implementation: str,
    case: str,
    dtype: str,
    stage: str,
    verdict: str,
    *,
    ratio: float = math.inf,
    empty_rows: str | None = None,
) -> ExpectedFailure | None:
    """Return the first expected failure that excuses a verdict; if the whole evaluation failed, the stage is ''.

    ``ratio`` is the largest error over its bound (``largest_ratio``), for entries that limit it; ``empty_rows`` the
    convention that rows without a key follow, for entries that name one.
    """
    entries = (entry for entry in expected_failures if entry.applies_to_evaluation(implementation, case, dtype))
    return next((entry for entry in entries if entry.excuses_error(stage, verdict, ratio, empty_rows)), None)


def largest_ratio(*ratios: float | None) -> float:
    """Return the largest error over its bound in all comparisons of a stage; infinite if there is no comparison.

    Example:
        >>> largest_ratio(0.5, None, 2.0), largest_ratio(None)
        (2.0, inf)
    """
    return max((ratio for ratio in ratios if ratio is not None), default=math.inf)


def describe_exceeded_ratio(
    expected_failures: Iterable[ExpectedFailure],
    implementation: str,
    case: str,
    dtype: str,
    stage: str,
    verdict: str,
    *,
    ratio: float,
) -> str:
    """Return a message if entries expect a verdict but its error is larger than all of them allow; else empty text."""
    concerning = [entry for entry in expected_failures if entry.applies_to_evaluation(implementation, case, dtype)]
    concerning = [entry for entry in concerning if entry.matches_verdict(stage, verdict)]
    if not concerning or any(entry.excuses_error(stage, verdict, ratio) for entry in concerning):
        return ""
    widest = max(concerning, key=lambda entry: entry.entry.max_ratio or 0.0)
    return (
        f"an expected failure ({widest.location}) allows errors up to {widest.entry.max_ratio:g} times their bound, "
        f"and this is {ratio:g} times"
    )


_MAX_SIMILAR_ENTRIES = 2
"""A choice: they share one line of the summary; entries that explain more of the failing cases come first."""


def describe_similar_failures(rows: Iterable[Row], expected_failures: Iterable[ExpectedFailure]) -> str:
    """Describe recorded failures, with threads, that fit rows of an implementation that calls the recorded one.

    A recorded failure is described only if it fits most of the failing cases that have no diagnosis: a few of them fit
    some recorded failure by chance.
    """
    cases: dict[str, set[str]] = {}
    rows = list(rows)
    diagnosed = {row.case for row in rows if row.diagnosis}
    failing, unnamed = {row.case for row in rows}, {row.case for row in rows} - diagnosed
    entries = {entry.location: entry for entry in expected_failures if not entry.entry.property}
    for row in rows:
        ratio = largest_ratio(row.ratio, row.introduced_ratio)
        for place, expected in entries.items():
            concerns = expected.applies_to_evaluation(expected.entry.implementation, row.case, row.dtype)
            # Wrong numbers fit any reason. The reason of an error has to name its kind.
            fits = concerns and (row.stage or row.message.partition(":")[0] in expected.entry.reason)
            if fits and expected.excuses_error(row.stage, row.verdict, ratio, row.empty_rows):
                cases.setdefault(place, set()).add(row.case)
    said = []
    fitting = [place for place, fitted in cases.items() if 2 * len(fitted & unnamed) > len(unnamed)]
    for place in sorted(fitting, key=lambda place: -len(cases[place]))[:_MAX_SIMILAR_ENTRIES]:
        entry, thread = entries[place].entry, entries[place].entry.thread or "no thread known"
        share = f"{len(cases[place]):,} of these {len(failing):,} cases" if len(failing) > 1 else "this case"
        said.append(
            f"{entry.implementation} has the same known failure in {share}: {entry.reason.rstrip('.')} ({thread})"
        )
    return "; ".join(said)


_NumberedEntry: TypeAlias = tuple[int, ExpectedFailure]
"""An entry with its position in the lists."""


@dataclass
class ExpectedFailureRecord:
    """The entries that happened during a run, and the first row that could have shown each; rows come in any order."""

    expected_failures: Sequence[ExpectedFailure]
    confirmed_entries: set[int] = field(default_factory=set)
    judged: dict[int, Row] = field(default_factory=dict)
    unsupported: dict[int, Row] = field(default_factory=dict)
    tried_entries: set[int] = field(default_factory=set)
    _entries_by_implementation: dict[str, list[_NumberedEntry]] = field(default_factory=dict)
    _entries_of_last_evaluation: tuple[tuple[str, str, str], list[_NumberedEntry]] = (("", "", ""), [])

    def mark_expected_rows(self, rows: Sequence[Row]) -> tuple[Row, ...]:
        """Return the rows of one case in one dtype, with expected failures marked and explained."""
        marked = []
        for row in rows:
            entry = None if row.comparison == "pair" else self._record_and_find_excuse(row)
            marked.append(row if entry is None else _mark_expected(row, entry.entry.reason, entry.entry.thread))
        if not any(row.fails_run for row in marked):
            return tuple(marked)
        stages = find_earliest_expected_failures(marked)
        explained = []
        for row in marked:
            member = mark_inherited_failure(
                row, [stages[name] for name in (row.implementation, row.other) if name in stages]
            )
            if member.fails_run and member.comparison != "pair":  # its error may be larger than an entry allows
                key = (member.implementation, member.case, member.dtype, member.stage, member.verdict)
                beyond = describe_exceeded_ratio(self.expected_failures, *key, ratio=_largest_row_ratio(member))
                member = replace(member, message="; ".join(filter(None, (member.message, beyond))))
            explained.append(member)
        return tuple(explained)

    def record_marked_rows(self, rows: Iterable[Row]) -> None:
        """Record rows that an earlier part of the run has judged and marked."""
        for row in rows:
            if row.comparison != "pair":
                self._record_and_find_excuse(replace(row, xfail=False))

    def make_xpass_rows(self) -> list[Row]:
        """Return a failing row for every entry that ran and did not happen, or whose cases are all unsupported."""
        unable = {number: row for number, row in self.unsupported.items() if number not in self.tried_entries}
        return [
            _make_xpass_row(self.expected_failures[number], row)
            for number, row in sorted({**unable, **self.judged}.items())
            if number not in self.confirmed_entries and self.expected_failures[number].must_still_happen
        ]

    def _record_and_find_excuse(self, row: Row) -> ExpectedFailure | None:
        """Record for every entry if the row confirms or refutes it, and return the first that excuses the row."""
        excusing: ExpectedFailure | None = None
        for number, expected in self._find_entries_of_evaluation(row.implementation, row.case, row.dtype):
            if row.verdict == Verdict.UNSUPPORTED:
                _keep_earliest(self.unsupported, number, row)
                continue
            if row.verdict == Verdict.UNTRIED:  # it is unknown if it would happen; an expected end excuses it
                is_end = expected.entry.verdict in (Verdict.CRASH, Verdict.TIMEOUT)
                excusing = excusing or (expected if is_end else None)
                continue
            self.tried_entries.add(number)
            if row.fails_run and expected.matches_verdict(row.stage, row.verdict, row.empty_rows):
                self.confirmed_entries.add(number)  # at whatever size
                if expected.excuses_error(row.stage, row.verdict, _largest_row_ratio(row), row.empty_rows):
                    excusing = excusing or expected
            elif row.comparison == "stage" and row.verdict not in _INCONCLUSIVE:
                _keep_earliest(self.judged, number, row)
        return excusing

    def _find_entries_of_evaluation(self, implementation: str, case: str, dtype: str) -> list[_NumberedEntry]:
        """Return the entries about an evaluation, of which there are hundreds.

        The last result is cached: the rows of one evaluation come one after the other.
        """
        evaluation = implementation, case, dtype
        if self._entries_of_last_evaluation[0] != evaluation:
            if implementation not in self._entries_by_implementation:
                numbered = enumerate(self.expected_failures)
                self._entries_by_implementation[implementation] = [
                    item for item in numbered if item[1].applies_to_implementation(implementation)
                ]
            concerning = [
                item
                for item in self._entries_by_implementation[implementation]
                if item[1].applies_to_evaluation(*evaluation)
            ]
            self._entries_of_last_evaluation = evaluation, concerning
        return self._entries_of_last_evaluation[1]


def _keep_earliest(rows: dict[int, Row], number: int, row: Row) -> None:
    """Keep the row of the first case and dtype: parallel workers return rows in any order."""
    kept = rows.setdefault(number, row)
    if unit_sort_key(row) < unit_sort_key(kept):
        rows[number] = row


def unit_sort_key(row: Row) -> tuple[str, int]:
    """Return the sort key of the unit of a row: by case, then by dtype."""
    return row.case, DTYPES.index(row.dtype)


def find_earliest_expected_failures(rows: Iterable[Row]) -> dict[str | None, ExpectedStageFailure]:
    """Return, by implementation, the earliest stage at which it is expected to fail in one case and dtype."""
    earliest: dict[str | None, ExpectedStageFailure] = {}
    for row in rows:
        if row.comparison == "stage" and row.xfail and row.stage:
            stage = ExpectedStageFailure(row.implementation, row.stage, row.reason or row.message, row.thread)
            first = earliest.get(row.implementation, stage)
            earliest[row.implementation] = min(first, stage, key=lambda expected: stage_position(expected.stage))
    return earliest


def mark_inherited_failure(row: Row, members: Iterable[ExpectedStageFailure]) -> Row:
    """Mark a pair or number that differs because a member is expected to fail, at this stage or an earlier one."""
    if not row.fails_run or row.comparison == "stage":
        return row
    for expected in members:
        if stage_position(expected.stage) <= stage_position(row.stage):
            return _mark_expected(row, f"{expected.implementation}: {expected.reason}", expected.thread)
    return row


def _largest_row_ratio(row: Row) -> float:
    """Return the largest error of a row over its bound; the row of a number has only one difference."""
    if row.difference is not None and row.allowed and row.comparison != "stage":
        return row.difference / row.allowed
    return largest_ratio(row.ratio, row.introduced_ratio)


def _mark_expected(row: Row, reason: str, thread: str | None) -> Row:
    message = f"{row.message}; expected failure: {reason}" if row.message else f"expected failure: {reason}"
    return replace(row, xfail=True, message=message, reason=reason, thread=thread)


def _make_xpass_row(expected: ExpectedFailure, row: Row) -> Row:
    entry = expected.entry
    instead = "supports none of it" if row.verdict == Verdict.UNSUPPORTED else f"no longer gives {entry.verdict}"
    message = (
        f"{expected.location}: this expected failure no longer happens: {entry.implementation} in "
        f"{', '.join(entry.cases)} {instead} ({entry.reason}); remove the entry, or narrow it"
    )
    blank = Row(row.case, row.operation, row.dtype, row.implementation, "stage", "", Verdict.XPASS)
    return replace(blank, message=message, reason=entry.reason, thread=entry.thread)
