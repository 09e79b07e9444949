"""The report for people, in Markdown that reads well on a forge.

The answer; the verdict of every case; each document's printed numbers beside each framework's; the largest differences;
versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attncheck.reports.alike import count_evaluations, group_alike
from attncheck.reports.answer import findings, make_summary
from attncheck.reports.commands import first_commands
from attncheck.reports.environments import environment_facts
from attncheck.reports.frames import Frames, records
from attncheck.reports.markdown.documents import document_sections
from attncheck.reports.markdown.expected_failures import empty_rows_section, expected_failures_section
from attncheck.reports.markdown.overview import document_overview
from attncheck.reports.markdown.text import code, commands, escape, number, table
from attncheck.reports.markdown.verdicts import verdict_section

_MAX_LISTED = 50
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
        *document_sections(frames),
        _largest(frames),
        _environments(frames),
    ]
    return "\n".join(line for section in sections if section for line in [*section, ""])


def _opening(frames: Frames) -> list[str]:
    answer = make_summary(frames)
    lines = ["# Attention conformance report", "", f"**{escape(answer.first_line)}**", ""]
    lines += [f"- {escape(sentence)}" for sentence in answer.sentences]
    lines += [f"- {escape(note)}." for note in frames.notes]
    return lines


def wrong_section(frames: Frames) -> list[str]:
    """Return what fails, a line per case, dtype and implementation; nothing where nothing does."""
    wrong = findings(frames)
    if wrong.empty:
        return []
    many = len(frames.environments) > 1
    alike = group_alike(wrong)[:_MAX_LISTED]
    rows = [
        [
            code(row["case"]) + (f" and {each.others:,} more" if each.others else ""),
            escape(
                f"{row['implementation']} ({row['environment']})"
                if many and row["environment"]
                else row["implementation"]
            ),
            ", ".join(each.dtypes),
            f"**{row['verdict']}**",
            code(row["stage"]),
            escape(row["message"]),
            str(each.rows),
        ]
        for each in alike
        for row in [each.row]
    ]
    more = len(wrong) - count_evaluations(alike)
    lines = [
        "## What is wrong",
        "",
        "Each line is the first stage at which an implementation goes wrong in a case, or what a document prints "
        "wrongly; the last column counts all failing comparisons there. What could not be run for one reason in many "
        "cases is one line.",
        "",
        *table(["case", "implementation", "dtype", "verdict", "stage", "what happened", "rows"], rows, "llllllr"),
    ]
    if more:
        lines += ["", f"And {more} more, in `results.csv` and `numbers.csv`."]
    again = commands(first_commands(frames, wrong))
    return [*lines, "", *again[:-1]] if again else lines


def _largest(frames: Frames) -> list[str]:
    """The pairs that differ most, whether or not they still agree."""
    pairs = frames.pairs[frames.pairs["ratio"].notna()]
    if pairs.empty:
        return []
    pairs = pairs.sort_values(["ratio", "difference"], ascending=False, kind="stable").head(_LARGEST)
    many = frames.environments.shape[0] > 1
    rows = [_pair_cells(row, many) for row in records(pairs)]
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


def _pair_cells(row: Mapping[str, Any], many: bool) -> list[str]:
    one = f"{row['implementation']} ({row['environment']})" if many else row["implementation"]
    other = f"{row['other']} ({row['other_environment']})" if many else row["other"]
    return [
        code(row["case"]),
        code(row["stage"]),
        row["dtype"],
        escape(one),
        escape(other),
        f"[{row['index']}]",
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
