"""The report's section on expected failures: what was wrong and does not count, and why."""

from __future__ import annotations

from collections.abc import Sequence

from attncheck.reports.expected_failures import (
    EMPTY_ROWS_NOTE,
    EXPECTED_FAILURES_NOTE,
    address_of,
    count_following,
    empty_rows,
    expected_failure_groups,
)
from attncheck.reports.frames import Frames
from attncheck.reports.markdown.text import code, escape, table

_MAX_CASES = 3


def expected_failures_section(frames: Frames) -> list[str]:
    """Return a line per implementation and reason; nothing where no failure was expected."""
    expected = expected_failure_groups(frames)
    if not expected:
        return []
    many = len(frames.environments) > 1
    rows = [
        [
            escape(f"{group.implementation} ({group.environment})" if many else group.implementation),
            group.verdict,
            _cases(group.cases),
            " ".join(group.dtypes),
            code(group.begins_at),
            escape(group.reason),
            link(group.thread),
        ]
        for group in expected
    ]
    headings = ["implementation", "verdict", "cases", "dtypes", "begins at", "reason", "thread"]
    lines = [
        "## Expected failures",
        "",
        EXPECTED_FAILURES_NOTE,
        "",
        *table(headings, rows),
    ]
    if following := count_following(frames):
        what = "1 comparison" if following == 1 else f"{following:,} comparisons"
        lines += ["", f"In {what} with other implementations or numbers, these are the reason for the difference."]
    return lines


def empty_rows_section(frames: Frames) -> list[str]:
    """Return what each implementation gives for a query without a key, where not all give the same."""
    found = empty_rows(frames)
    if found is None:
        return []
    with_environment = len(frames.environments) > 1
    rows = [
        [escape(column.title(with_environment=with_environment)), *(str(counts[word] or "-") for word in found.words)]
        for column, counts in found.given.items()
    ]
    return [
        "## Queries without a key",
        "",
        EMPTY_ROWS_NOTE,
        "",
        *table(["implementation", *found.words], rows, "l" + "r" * len(found.words)),
    ]


def _cases(cases: Sequence[str]) -> str:
    shown = "<br>".join(code(case) for case in cases[:_MAX_CASES])
    return shown if len(cases) <= _MAX_CASES else f"{shown}<br>and {len(cases) - _MAX_CASES} more"


def link(thread: str) -> str:
    """Make a link of owner/name#number, or of an address."""
    address = address_of(thread)
    if address and address != thread:
        return f"[{escape(thread)}]({address})"
    return f"<{thread}>" if address else escape(thread)
