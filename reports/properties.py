"""Properties for every format of a report: implementation by property, and what fails, with the calls and numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from attncheck.common.errors import ExitCode
from attncheck.common.wording import count_noun, format_element
from attncheck.reports.frames import Frames, cached_for_frames, group_by_key
from attncheck.results.format import Row
from attncheck.settings.commands import command_words_of, shell_command
from attncheck.spec import PROPERTIES
from attncheck.spec.verdicts import PropertyOutcome

OUTCOMES_NOTE = (
    "Bitwise: every bit is the same. Within bounds: some bits differ, and each call is within the error bound of its "
    "own exact answer. NaN: NaN that no query may read makes the output NaN, a convention. "
    "Broken: one is not. What an implementation claims beyond that has to hold."
)


def worst_row(rows: Iterable[Row]) -> Row | None:
    """Return the worst of several rows: a failing one, or the most severe."""
    ordered = sorted(rows, key=lambda row: (row.fails_run, row.fails, PropertyOutcome(row.verdict).severity))
    return ordered[-1] if ordered else None


def properties_exit_code(rows: Sequence[Row]) -> ExitCode:
    """Return the exit code of a run with these rows: 1 if a property is broken, or weaker than claimed."""
    if any(row.fails_run for row in rows):
        return ExitCode.DISAGREE
    judged = [row for row in rows if row.verdict != PropertyOutcome.UNSUPPORTED]
    if not judged or any(row.verdict == PropertyOutcome.FAILED for row in rows):
        return ExitCode.NOT_RUN
    return ExitCode.AGREE


def properties_sentence(rows: Sequence[Row]) -> str:
    """Summarize the outcome of properties in a line."""
    asked = [row for row in rows if row.verdict != PropertyOutcome.UNSUPPORTED]
    names = {row.property_name for row in asked}
    failing = [row for row in asked if row.fails_run]
    if not asked:
        return "No property was judged."
    properties = "1 property" if len(names) == 1 else f"{len(names)} properties"
    what = f"{properties}, {count_noun(len(asked), 'comparison')}"
    if not failing:
        return f"Properties hold: {what}."
    broken = list(dict.fromkeys(f"{row.implementation}: {row.property_name}" for row in failing))
    return f"Properties do not hold: {'; '.join(broken)} ({what})."


def group_by_property(rows: Sequence[Row]) -> Mapping[str, Mapping[str, Sequence[Row]]]:
    """Group rows by property, then by implementation."""
    by_cell = group_by_key(rows, lambda row: (row.property_name, row.implementation))
    columns = dict.fromkeys(row.implementation for row in rows)
    asked = [name for name in PROPERTIES if any(name == key[0] for key in by_cell)]
    return {name: {column: by_cell.get((name, column), []) for column in columns} for name in asked}


def property_state(row: Row) -> str:
    """Return the state of a row: it fails, is expected to, holds, or was not judged."""
    if row.fails:
        return "xfail" if row.xfail else "failing"
    if row.verdict in (PropertyOutcome.BITWISE, PropertyOutcome.WITHIN_BOUNDS):
        return "agree"
    return "unsupported" if row.verdict == PropertyOutcome.UNSUPPORTED else "unverified"


def property_rows(frames: Frames) -> list[Row]:
    """Return the rows of properties of all environments, with the implementations named as their columns."""
    return [
        replace(row, implementation=frames.name_with_environment(row.implementation, label))
        for label, rows in frames.properties.items()
        for row in rows
    ]


@cached_for_frames
def broken_properties(frames: Frames) -> tuple[tuple[Row, str], ...]:
    """Return a row for each failing property, case and implementation, with the command that explains it."""
    return tuple(
        (
            replace(row, implementation=frames.name_with_environment(row.implementation, label)),
            explain_command(row, frames.command_words.get(label, {})),
        )
        for label, rows in frames.properties.items()
        for row in worst_failing_rows(rows)
    )


def worst_failing_rows(rows: Iterable[Row]) -> list[Row]:
    """Return a row for each property, case and implementation that fails: the worst of its variants and dtypes."""
    failing = (row for row in rows if row.fails_run)
    groups = group_by_key(failing, lambda row: (row.implementation, row.property_name, row.case))
    worst_rows = (worst_row(group) for group in groups.values())
    return [row for row in worst_rows if row is not None]


def property_facts(row: Row) -> dict[str, str]:
    """Return the facts of a row by name: the further calls, the element, its numbers, the bounds."""
    numbers = {
        "the first call": row.value,
        "the further calls": row.reference,
        "the exact answer": row.exact,
        "bound of the first": row.first_bound,
        "bound of the further": row.second_bound,
    }
    facts = {"further calls": row.variant}
    facts |= {"the element": format_element(row.index, row.stage)} if row.index else {}
    facts |= {name: f"{value:.9g}" for name, value in numbers.items() if value is not None}
    differing = f"{row.differing} of {row.elements} elements in some bits"
    return facts | ({"what differs": differing} if row.elements else {})


def explain_command(row: Row, again: Mapping[str, Sequence[str]]) -> str:
    """Return the command that explains a row; empty if no command line can name the implementation."""
    words = command_words_of(row.implementation, again)
    if not words:
        return ""
    where = ["--cases", row.case, "--property", row.property_name, "--dtype", row.dtype, "--explain"]
    return shell_command(["attncheck", "properties", *words, *where])
