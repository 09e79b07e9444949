"""Properties for every format of a report: implementation by property, and what fails, with the calls and numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from attncheck.commands import joined, words_of
from attncheck.errors import ExitCode
from attncheck.reports.frames import Frames, once_for_frames
from attncheck.results.format import Row
from attncheck.spec import PROPERTIES
from attncheck.verdicts import PropertyOutcome
from attncheck.wording import counted, written_element

OUTCOMES_NOTE = (
    "Bitwise: every bit is the same. Within bounds: some bits differ, and each call is within the error bound of its "
    "own exact answer. NaN: NaN that no query may read makes the output NaN, a convention. "
    "Broken: one is not. What an implementation claims beyond that has to hold."
)


def worst_of(rows: Iterable[Row]) -> Row | None:
    """Return the row that stands for several: a failing one, or the most severe."""
    ordered = sorted(rows, key=lambda row: (row.fails_run, row.fails, PropertyOutcome(row.verdict).severity))
    return ordered[-1] if ordered else None


def exit_code_of(rows: Sequence[Row]) -> ExitCode:
    """Return what the rows make of a run: 1 where a property is broken, or less than is claimed."""
    if any(row.fails_run for row in rows):
        return ExitCode.DISAGREE
    judged = [row for row in rows if row.verdict != PropertyOutcome.UNSUPPORTED]
    if not judged or any(row.verdict == PropertyOutcome.FAILED for row in rows):
        return ExitCode.NOT_RUN
    return ExitCode.AGREE


def sentence_of(rows: Sequence[Row]) -> str:
    """Sum up in a line what properties come to."""
    asked = [row for row in rows if row.verdict != PropertyOutcome.UNSUPPORTED]
    names = {row.property_name for row in asked}
    failing = [row for row in asked if row.fails_run]
    if not asked:
        return "No property was judged."
    properties = "1 property" if len(names) == 1 else f"{len(names)} properties"
    what = f"{properties}, {counted(len(asked), 'comparison')}"
    if not failing:
        return f"Properties hold: {what}."
    broken = list(dict.fromkeys(f"{row.implementation}: {row.property_name}" for row in failing))
    return f"Properties do not hold: {'; '.join(broken)} ({what})."


@dataclass(frozen=True)
class PropertyCell:
    """The outcome of a property on one implementation: the worst of all variants, and how many had each outcome.

    ``word`` is the outcome; ``state`` says whether it fails, is expected to, holds, or was not judged.
    """

    word: str
    state: str
    detail: str
    claim: str = ""

    @property
    def text(self) -> str:
        """The outcome with what is claimed."""
        return f"{self.word} (claims {self.claim})" if self.claim else self.word


PropertyTable = Mapping[str, Mapping[str, PropertyCell]]
"""What each property comes to on each implementation."""


def property_table(rows: Sequence[Row]) -> PropertyTable:
    """Lay rows out: by property that was asked, then by implementation."""
    by_cell: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        by_cell.setdefault((row.property_name, row.implementation), []).append(row)
    columns = dict.fromkeys(row.implementation for row in rows)
    asked = [name for name in PROPERTIES if any(name == key[0] for key in by_cell)]
    return {name: {column: _cell(by_cell.get((name, column), [])) for column in columns} for name in asked}


def _cell(rows: Sequence[Row]) -> PropertyCell:
    worst = worst_of(rows)
    if worst is None:
        return PropertyCell("-", "unsupported", "not asked")
    counts = {word: sum(row.verdict == word for row in rows) for word in PropertyOutcome}
    detail = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    return PropertyCell(worst.verdict, _state(worst), detail, worst.claim)


def _state(row: Row) -> str:
    if row.fails:
        return "xfail" if row.xfail else "failing"
    if row.verdict in (PropertyOutcome.BITWISE, PropertyOutcome.WITHIN_BOUNDS):
        return "agree"
    return "unsupported" if row.verdict == PropertyOutcome.UNSUPPORTED else "unverified"


def asked_rows(frames: Frames) -> list[Row]:
    """Return what was found of properties in all environments, each implementation called as its column is."""
    return [
        replace(row, implementation=frames.named(row.implementation, label))
        for label, rows in frames.properties.items()
        for row in rows
    ]


def words_by_title(frames: Frames) -> dict[str, Sequence[str]]:
    """Return what names each implementation on a command line, by its column's title."""
    found: dict[str, Sequence[str]] = {}
    for label, rows in frames.properties.items():
        for name in dict.fromkeys(row.implementation for row in rows):
            if words := words_of(name, frames.again.get(label, {})):
                found[frames.named(name, label)] = words
    return found


@once_for_frames
def broken_properties(frames: Frames) -> tuple[tuple[Row, str], ...]:
    """Return what fails of properties, a row for each property, case and implementation, and the command for each."""
    again = words_by_title(frames)
    return tuple((row, command_for(row, again)) for row in failing_first(asked_rows(frames)))


def named_numbers(row: Row) -> list[tuple[str, str]]:
    """Return the numbers of the element that a row names, as people read them, by what they are."""
    named = {
        "the first call": row.value,
        "the further calls": row.reference,
        "the exact answer": row.exact,
        "bound of the first": row.first_bound,
        "bound of the further": row.second_bound,
    }
    element = [("the element", written_element(row.index, row.stage))] if row.index else []
    return [*element, *((name, f"{value:.9g}") for name, value in named.items() if value is not None)]


def failing_first(rows: Iterable[Row]) -> list[Row]:
    """Return a row for each property, case and implementation that fails: the worst of its variants and dtypes."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row.fails_run:
            groups.setdefault((row.implementation, row.property_name, row.case), []).append(row)
    found = (worst_of(group) for group in groups.values())
    return [row for row in found if row is not None]


def command_for(row: Row, again: Mapping[str, Sequence[str]]) -> str:
    """Return the command that asks again and explains; empty where no command line names the implementation."""
    words = words_of(row.implementation, again)
    if not words:
        return ""
    where = ["--cases", row.case, "--property", row.property_name, "--dtype", row.dtype, "--explain"]
    return joined(["attncheck", "properties", *words, *where])
