"""Known divergences applied to what was judged: marked where they happen, told where they no longer do.

A failing row of an implementation is known where an entry names it with this verdict. One whose error is larger than
the entry excuses (``up_to``) fails, and says so. Rows that only follow from a known one are known with it: those of
pairs with that implementation, and of numbers held against it, at that stage or a later one. An entry is ``stale``
where its implementation ran a case that it names and nothing failed as it says.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from attncheck.errors import ExitCode
from attncheck.reading.divergences import Divergence
from attncheck.results.format import Row
from attncheck.spec import DTYPES, stage_place
from attncheck.verdicts import Verdict

_SAYS_NOTHING = frozenset(
    {Verdict.UNSUPPORTED, Verdict.UNVERIFIED, Verdict.ERROR, Verdict.TIMEOUT, Verdict.CRASH, Verdict.MISPRINT}
)
"""Verdicts that neither confirm nor refute an entry, unless it names them."""


@dataclass(frozen=True)
class Known:
    """A known divergence that happened: at which stage it shows first, and why."""

    implementation: str
    stage: str
    reason: str
    thread: str | None


def reason_for(
    divergences: Iterable[Divergence],
    implementation: str,
    case: str,
    dtype: str,
    stage: str,
    verdict: str,
    *,
    ratio: float = math.inf,
    empty_rows: str | None = None,
) -> Divergence | None:
    """Return the first divergence that excuses a verdict; an evaluation that failed as a whole has the stage ''.

    ``ratio`` is the largest error over what rounding allows (``largest_ratio``), for divergences that limit it;
    ``empty_rows`` what rows without a key give, for those that name a convention.
    """
    found = (each for each in divergences if each.concerns(implementation, case, dtype))
    return next((each for each in found if each.excuses(stage, verdict, ratio, empty_rows)), None)


def largest_ratio(*ratios: float | None) -> float:
    """Return the largest error over what rounding allows of all comparisons of a stage; infinite if there is none."""
    return max((each for each in ratios if each is not None), default=math.inf)


def beyond_known(
    divergences: Iterable[Divergence],
    implementation: str,
    case: str,
    dtype: str,
    stage: str,
    verdict: str,
    *,
    ratio: float,
) -> str:
    """Say which divergence is known of a verdict whose error is larger than any excuses; empty where there is none."""
    found = [each for each in divergences if each.concerns(implementation, case, dtype)]
    found = [each for each in found if each.explains(stage, verdict)]
    if not found or any(each.excuses(stage, verdict, ratio) for each in found):
        return ""
    widest = max(found, key=lambda each: each.entry.up_to or 0.0)
    return (
        f"a known divergence ({widest.place}) excuses errors up to {widest.entry.up_to:g} times what rounding allows, "
        f"and this is {ratio:g} times"
    )


@dataclass
class DivergenceRecord:
    """Which entries happened during a run, and the first row that could have shown each, in any order of coming."""

    divergences: Sequence[Divergence]
    happened: set[int] = field(default_factory=set)
    judged: dict[int, Row] = field(default_factory=dict)
    unsupported: dict[int, Row] = field(default_factory=dict)
    tried: set[int] = field(default_factory=set)

    def mark(self, rows: Sequence[Row]) -> tuple[Row, ...]:
        """Return the rows of one case in one dtype, those that are known marked and explained."""
        marked = [self._marked(row) for row in rows]
        known = known_stages(marked)
        return tuple(
            self._told(inherited(row, [known[name] for name in (row.implementation, row.other) if name in known]))
            for row in marked
        )

    def remember(self, rows: Iterable[Row]) -> None:
        """Take note of rows that an earlier part of the run has judged and marked."""
        for row in rows:
            if row.comparison != "pair":
                self._explaining(replace(row, known=False))

    def stale_rows(self) -> list[Row]:
        """Return a failing row for every entry that ran and did not happen, or of which nothing is supported."""
        unable = {number: row for number, row in self.unsupported.items() if number not in self.tried}
        return [
            _stale(self.divergences[number], row)
            for number, row in sorted({**unable, **self.judged}.items())
            if number not in self.happened
        ]

    def _marked(self, row: Row) -> Row:
        if row.comparison == "pair":
            return row
        found = self._explaining(row)
        return row if found is None else _known(row, found.entry.reason, found.entry.thread)

    def _explaining(self, row: Row) -> Divergence | None:
        """Note what a row says of every entry, and return the first that excuses it."""
        found: Divergence | None = None
        for number, divergence in enumerate(self.divergences):
            if not divergence.concerns(row.implementation, row.case, row.dtype):
                continue
            if row.verdict == Verdict.UNSUPPORTED:
                _keep_first(self.unsupported, number, row)
                continue
            if row.verdict == Verdict.UNTRIED:  # whether it would happen is not known; an end that is known excuses it
                found = found or (divergence if divergence.entry.verdict in (Verdict.CRASH, Verdict.TIMEOUT) else None)
                continue
            self.tried.add(number)
            if _fails(row) and divergence.explains(row.stage, row.verdict, row.empty_rows):
                self.happened.add(number)  # at whatever size
                if divergence.excuses(row.stage, row.verdict, _ratio(row), row.empty_rows):
                    found = found or divergence
            elif row.comparison == "stage" and row.verdict not in _SAYS_NOTHING:
                _keep_first(self.judged, number, row)
        return found

    def _told(self, row: Row) -> Row:
        """Say of a row that fails although a divergence is known there that its error is larger than that."""
        if row.comparison == "pair" or not _fails(row):
            return row
        place = (row.implementation, row.case, row.dtype, row.stage, row.verdict)
        beyond = beyond_known(self.divergences, *place, ratio=_ratio(row))
        return replace(row, message="; ".join(filter(None, (row.message, beyond))))


def _keep_first(rows: dict[int, Row], number: int, row: Row) -> None:
    """Keep the row of the first case and dtype: workers that are side by side answer in any order."""
    kept = rows.setdefault(number, row)
    if place_of(row) < place_of(kept):
        rows[number] = row


def place_of(row: Row) -> tuple[str, int]:
    """Say where the unit of a row stands: by case, then by dtype."""
    return row.case, DTYPES.index(row.dtype)


def known_stages(rows: Iterable[Row]) -> dict[str | None, Known]:
    """Return, by implementation, the earliest stage at which it is known to diverge in one case and dtype."""
    earliest: dict[str | None, Known] = {}
    for row in rows:
        if row.comparison == "stage" and row.known and row.stage:
            found = Known(row.implementation, row.stage, row.reason or row.message, row.thread)
            first = earliest.get(row.implementation, found)
            earliest[row.implementation] = min(first, found, key=lambda each: stage_place(each.stage))
    return earliest


def inherited(row: Row, members: Iterable[Known]) -> Row:
    """Mark a pair or number that differs because a member is known to diverge, at this stage or an earlier one."""
    if not _fails(row) or row.comparison == "stage":
        return row
    for known in members:
        if stage_place(known.stage) <= stage_place(row.stage):
            return _known(row, f"{known.implementation}: {known.reason}", known.thread)
    return row


def _ratio(row: Row) -> float:
    """Return the largest error of a row over what is allowed; that of a number has its one difference alone."""
    if row.difference is not None and row.allowed and row.comparison != "stage":
        return row.difference / row.allowed
    return largest_ratio(row.ratio, row.introduced_ratio)


def _fails(row: Row) -> bool:
    return not row.known and Verdict(row.verdict).exit_code is not ExitCode.AGREE


def _known(row: Row, reason: str, thread: str | None) -> Row:
    message = f"{row.message}; known: {reason}" if row.message else f"known: {reason}"
    return replace(row, known=True, message=message, reason=reason, thread=thread)


def _stale(divergence: Divergence, row: Row) -> Row:
    entry = divergence.entry
    instead = "supports none of it" if row.verdict == Verdict.UNSUPPORTED else f"no longer gives {entry.verdict}"
    message = (
        f"{divergence.place}: this known divergence no longer happens: {entry.implementation} in "
        f"{', '.join(entry.cases)} {instead} ({entry.reason}); remove the entry, or narrow it"
    )
    blank = Row(row.case, row.operation, row.dtype, row.implementation, "stage", "", Verdict.STALE)
    return replace(blank, message=message, reason=entry.reason, thread=entry.thread)
