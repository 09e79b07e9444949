"""The report for people, in Markdown that reads well on a forge.

The answer; the verdict of every case; each document's printed numbers beside each framework's; the largest differences;
versions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from attncheck.reports.answer import make_summary
from attncheck.reports.commands import first_commands
from attncheck.reports.defects import Defect, defects
from attncheck.reports.expected_failures import (
    EMPTY_ROWS_NOTE,
    EXPECTED_FAILURES_NOTE,
    address_of,
    count_following,
    empty_rows,
    expected_failure_groups,
)
from attncheck.reports.frames import (
    Column,
    Frames,
    count_numbers,
    documents_of,
    element_in,
    environment_facts,
    records,
    under_erratum,
)
from attncheck.reports.in_common import in_common_lines
from attncheck.reports.markdown.text import code, commands, escape, number, table
from attncheck.reports.markdown.verdicts import verdict_section
from attncheck.reports.printed_numbers import number_counts_of
from attncheck.reports.simplest import described
from attncheck.verdicts import Verdict
from attncheck.wording import counted

_EXPLAINED = (
    "Printed numbers, each counted once: those that hold wherever they were compared, that do not hold, and that are "
    "unverified because there is no exact answer to compare with. Errata are numbers that a document prints for "
    "another call than the one it shows: recorded, run as written, and not holding there. Below an implementation "
    "stand the comparisons that hold, of all, in all dtypes together."
)


def document_overview(frames: Frames) -> list[str]:
    """Return a table with a line per document, or nothing where no document was run."""
    with_environment = len({column.environment for column in frames.columns}) > 1
    rows = []
    for cases in documents_of(frames).values():
        own = frames.numbers[frames.numbers["case"].isin([case["id"] for case in cases])]
        wrong_call = under_erratum(frames, own)
        found = number_counts_of(frames, [case["id"] for case in cases])
        printed = own[own["printed"].notna() & own["basis"].eq("printed") & ~wrong_call]
        cells = [_cell(printed, column) for column in frames.columns]
        counts = [found.printed, found.hold, found.misprints + found.missed, found.unverified, found.errata]
        unprinted = own[own["basis"].eq("exact")]
        rows.append([escape(cases[0]["title"]), *map(_count, counts), *cells, _count(count_numbers(unprinted))])
    if not rows:
        return []
    titles = [escape(column.title(with_environment=with_environment)) for column in frames.columns]
    kinds = ["printed", "hold", "do not hold", "unverified", "errata"]
    headings = ["document", *kinds, *titles, "computed, not printed"]
    return ["## Documents at a glance", "", _EXPLAINED, "", *table(headings, rows, "l" + "r" * len(headings))]


def _cell(printed: pd.DataFrame, column: Column) -> str:
    own = printed[printed["environment"].eq(column.environment) & printed["implementation"].eq(column.implementation)]
    return f"{int(own['verdict'].eq(Verdict.AGREE).sum())} of {len(own)}" if len(own) else "-"


def _count(number: int) -> str:
    return str(number or "-")


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
        what = counted(following, "comparison")
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


_MAX_LISTED = 50
_MAX_CASES = 200
_LARGEST = 15


def render_markdown(frames: Frames) -> str:
    """Return the whole report. The same frames give the same text."""
    sections = [
        _opening(frames),
        wrong_section(frames),
        expected_failures_section(frames),
        empty_rows_section(frames),
        document_overview(frames),
        verdict_section(frames),
        *_properties(frames),
        *_documents(frames),
        _largest(frames),
        _environments(frames),
    ]
    return "\n".join(line for section in sections if section for line in [*section, ""])


def _properties(frames: Frames) -> list[list[str]]:
    if not frames.properties:
        return []
    from attncheck.reports.markdown.properties import properties_section

    return [properties_section(frames)]


def _documents(frames: Frames) -> list[list[str]]:
    if not documents_of(frames):
        return []
    from attncheck.reports.markdown.documents import document_sections

    return document_sections(frames)


def _opening(frames: Frames) -> list[str]:
    answer = make_summary(frames)
    lines = ["# Attention conformance report", "", f"**{escape(answer.first_line)}**", ""]
    lines += [f"- {escape(sentence)}" for sentence in answer.sentences]
    lines += [f"- {escape(note)}." for note in frames.notes]
    return lines


def wrong_section(frames: Frames) -> list[str]:
    """Return what fails, a line per case, dtype and implementation; nothing where nothing does."""
    found = defects(frames)
    if not found:
        return []
    many = len(frames.environments) > 1
    listed = found[:_MAX_LISTED]
    rows = [_defect_cells(frames, each, many=many) for each in listed]
    more = len(found) - len(listed)
    headings = ["what is wrong", "implementation", "cases", "dtype", "verdict", "stage", "simplest case", "rows"]
    lines = [
        "## What is wrong",
        "",
        "Each line is one thing that an implementation does wrong, with the first stage that shows it, or what a "
        "document prints wrongly; the last column counts all failing comparisons.",
        "",
        *(line for said in in_common_lines(frames) for line in (f"**{escape(said)}.**", "")),
        *table(headings, rows, "llrllllr"),
        *(line for each in listed if each.others for line in _cases_of(each)),
    ]
    if more:
        lines += ["", f"And {counted(more, 'more defect')}, in `results.csv` and `numbers.csv`."]
    again = commands(first_commands(frames))
    return [*lines, "", *again[:-1]] if again else lines


def _defect_cells(frames: Frames, defect: Defect, *, many: bool) -> list[str]:
    row = defect.row
    environment = f" ({row['environment']})" if many and row["environment"] else ""
    return [
        escape(defect.text),
        escape(f"{row['implementation']}{environment}"),
        str(len(defect.cases)),
        ", ".join(defect.dtypes),
        f"**{row['verdict']}**",
        code(row["stage"]),
        code(row["case"]) + _shape_and_tags(frames, row),
        str(defect.rows),
    ]


def _cases_of(defect: Defect) -> list[str]:
    """Fold the cases of a defect away, where Markdown shows them on demand."""
    who = escape(str(defect.row["implementation"]))
    rest = len(defect.cases) - _MAX_CASES
    return [
        "",
        "<details>",
        f"<summary>The {len(defect.cases):,} cases: {defect.name}, {who}</summary>",
        "",
        *(f"- {code(case)}" for case in defect.cases[:_MAX_CASES]),
        *([f"- and {rest:,} more"] if rest > 0 else []),
        "",
        "</details>",
    ]


def _shape_and_tags(frames: Frames, row: Mapping[str, Any]) -> str:
    """Say below a failing case what shape it has and what it probes."""
    text = described(frames.cases[row["case"]]) if row["implementation"] else ""
    return f"<br>{escape(text)}" if text else ""


def _largest(frames: Frames) -> list[str]:
    """The pairs that differ most, whether or not they still agree."""
    pairs = frames.pairs[frames.pairs["ratio"].notna()]
    if pairs.empty:
        return []
    pairs = pairs.sort_values(["ratio", "difference"], ascending=False, kind="stable").head(_LARGEST)
    many = frames.environments.shape[0] > 1
    rows = [_pair_cells(row, frames.cases[row["case"]], many) for row in records(pairs)]
    headings = [
        "case",
        "stage",
        "dtype",
        "one",
        "other",
        "at",
        "value",
        "other value",
        "difference",
        "of the allowed",
        "verdict",
    ]
    return [
        "## Largest differences between two implementations",
        "",
        "Two implementations disagree where they differ by more than the sum of their error bounds; the column before "
        "the last says what part of that sum the difference is.",
        "",
        *table(headings, rows, "llllllrrrrl"),
    ]


def _pair_cells(row: Mapping[str, Any], case: Mapping[str, Any], many: bool) -> list[str]:
    one = f"{row['implementation']} ({row['environment']})" if many else row["implementation"]
    other = f"{row['other']} ({row['other_environment']})" if many else row["other"]
    return [
        code(row["case"]),
        code(row["stage"]),
        row["dtype"],
        escape(one),
        escape(other),
        element_in(case, row),
        number(row["value"], 9 if row["dtype"] == "float32" else 17),
        number(row["reference"], 9 if row["dtype"] == "float32" else 17),
        number(row["difference"]),
        number(row["ratio"]),
        row["verdict"],
    ]


def _environments(frames: Frames) -> list[str]:
    rows = [[escape(name), *map(escape, texts)] for name, texts in environment_facts(frames)]
    headings = ["", *map(escape, frames.environments["environment"])]
    return ["## Environments", "", *table(headings, rows)]
