"""Rows of properties taken together: the one that stands for several, the exit code, and a sentence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attncheck.errors import ExitCode
from attncheck.results.format import Row
from attncheck.verdicts import PropertyOutcome
from attncheck.wording import counted


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
    """Say in a line what properties come to."""
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
