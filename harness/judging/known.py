"""Known divergences applied to what was judged: marked where they happen, told where they no longer do.

A failing row of an implementation is known where an entry names it with this verdict. Rows that only follow from it are
known with it: those of pairs with that implementation, and of numbers held against it, at that stage or a later one. An
entry is ``stale`` where its implementation ran a case that it names and nothing failed as it says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from attncheck.harness.errors import ExitCode
from attncheck.harness.reading.divergences import Divergence
from attncheck.harness.results.writer import Row
from attncheck.harness.verdicts import Verdict
from attncheck.harness.vocabulary import stage_place

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
    divergences: Sequence[Divergence], implementation: str, case: str, dtype: str, stage: str, verdict: str
) -> Divergence | None:
    """Return the first divergence that explains a verdict; an evaluation that failed as a whole has the stage ''."""
    return next(
        (each for each in divergences if each.concerns(implementation, case, dtype) and each.excuses(stage, verdict)),
        None,
    )


@dataclass
class DivergenceRecord:
    """Which entries happened during a run, and the first row that could have shown each."""

    divergences: Sequence[Divergence]
    happened: set[int] = field(default_factory=set)
    judged: dict[int, Row] = field(default_factory=dict)

    def mark(self, rows: Sequence[Row]) -> tuple[Row, ...]:
        """Return the rows of one case in one dtype, those that are known marked and explained."""
        marked = [self._marked(row) for row in rows]
        known = known_stages(marked)
        return tuple(
            inherited(row, [known[name] for name in (row.implementation, row.other) if name in known]) for row in marked
        )

    def stale_rows(self) -> list[Row]:
        """Return a failing row for every entry that ran and did not happen."""
        return [
            _stale(self.divergences[number], row)
            for number, row in sorted(self.judged.items())
            if number not in self.happened
        ]

    def _marked(self, row: Row) -> Row:
        if row.comparison == "pair":
            return row
        found: Divergence | None = None
        for number, divergence in enumerate(self.divergences):
            if not divergence.concerns(row.implementation, row.case, row.dtype):
                continue
            if _fails(row) and divergence.excuses(row.stage, row.verdict):
                self.happened.add(number)
                found = found or divergence
            elif row.comparison == "stage" and row.verdict not in _SAYS_NOTHING:
                self.judged.setdefault(number, row)
        return row if found is None else _known(row, found.entry.reason, found.entry.thread)


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


def _fails(row: Row) -> bool:
    return not row.known and Verdict(row.verdict).exit_code is not ExitCode.AGREE


def _known(row: Row, reason: str, thread: str | None) -> Row:
    message = f"{row.message}; known: {reason}" if row.message else f"known: {reason}"
    return replace(row, known=True, message=message, reason=reason, thread=thread)


def _stale(divergence: Divergence, row: Row) -> Row:
    entry = divergence.entry
    message = (
        f"{divergence.place}: this known divergence no longer happens: {entry.implementation} in "
        f"{', '.join(entry.cases)} no longer gives {entry.verdict} ({entry.reason}); remove the entry, or narrow it"
    )
    blank = Row(row.case, row.operation, row.dtype, row.implementation, "stage", "", Verdict.STALE)
    return replace(blank, message=message, reason=entry.reason, thread=entry.thread)
