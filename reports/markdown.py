"""The report for people, in Markdown that reads well on a forge.

The answer; the verdict of every case; each document's printed numbers beside each framework's; the largest differences;
versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from attncheck.reports.answer import make_answer, verdict_table, what_is_wrong
from attncheck.reports.frames import Column, Frames, records, rows_judged
from attncheck.reports.markdown_documents import document_sections
from attncheck.reports.markdown_known import empty_rows_section, known_section
from attncheck.reports.markdown_overview import document_overview
from attncheck.reports.markdown_text import code, escape, number, table

_MOST_LISTED = 50
_LARGEST = 15


def render_markdown(frames: Frames) -> str:
    """Return the whole report. The same frames give the same text."""
    sections = [
        _opening(frames),
        _wrong(frames),
        known_section(frames),
        empty_rows_section(frames),
        document_overview(frames),
        _verdicts(frames),
        *document_sections(frames),
        _largest(frames),
        _environments(frames),
    ]
    return "\n".join(line for section in sections if section for line in [*section, ""])


def _opening(frames: Frames) -> list[str]:
    answer = make_answer(frames)
    lines = ["# Attention conformance report", "", f"**{answer.word}.**", ""]
    lines += [f"- {escape(sentence)}" for sentence in answer.sentences]
    lines += [f"- {escape(note)}." for note in frames.notes]
    return lines


def _wrong(frames: Frames) -> list[str]:
    wrong = what_is_wrong(frames)
    if wrong.empty:
        return []
    many = len(frames.environments) > 1
    rows = [
        [
            code(row["case"]),
            escape(f"{row['implementation']} ({row['environment']})" if many else row["implementation"]),
            row["dtype"],
            f"**{row['verdict']}**",
            code(row["stage"]),
            escape(row["message"]),
            str(row["rows"]),
        ]
        for row in records(wrong.head(_MOST_LISTED))
    ]
    lines = [
        "## What is wrong",
        "",
        "Each line is the first stage at which an implementation goes wrong in a case; the last column counts all its "
        "failing comparisons there.",
        "",
        *table(["case", "implementation", "dtype", "verdict", "stage", "what happened", "rows"], rows, "llllllr"),
    ]
    if len(wrong) > _MOST_LISTED:
        lines += ["", f"And {len(wrong) - _MOST_LISTED} more, in `results.csv` and `numbers.csv`."]
    return lines


def _verdicts(frames: Frames) -> list[str]:
    with_environment = len({column.environment for column in frames.columns}) > 1
    headings = ["case", *(escape(column.title(with_environment=with_environment)) for column in frames.columns)]
    lines = ["## Verdicts", ""]
    sampled = _sampled(frames)
    by_file: dict[str, list[tuple[str, dict[Column, str]]]] = {}
    for case, cells in verdict_table(frames).items():
        by_file.setdefault(frames.cases[case]["file"], []).append((case, cells))
    for file, cases in by_file.items():
        title = frames.cases[cases[0][0]]["title"]
        lines += [f"### {escape(title)} ({code(file)})", ""]
        rows = [
            [escape(frames.cases[case]["name"] + sampled.get(case, "")), *(cells[column] for column in frames.columns)]
            for case, cells in cases
        ]
        lines += [*table(headings, rows), ""]
    lines += [
        "An implementation agrees where every stage is within its derived error bound of the exact answer, "
        "statistically too on inputs for which that can be said, and where every printed number holds. Without another "
        "word, both dtypes agree.",
    ]
    return lines


def _sampled(frames: Frames) -> dict[str, str]:
    """Say of each case in which some query rows stand for all how many."""
    rows = frames.results[frames.results["query_rows"].notna()].drop_duplicates("case")
    return {row["case"]: f" ({rows_judged(row['judged_rows'], row['query_rows'])})" for row in records(rows)}


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
    environments = frames.environments
    hidden = {"environment", "complete"}
    names = [name for name in environments.columns if name not in hidden]
    rows = [
        [escape(name.removeprefix("version_").replace("_", " ")), *(_cell(value) for value in environments[name])]
        for name in names
    ]
    headings = ["", *(escape(label) for label in environments["environment"])]
    return ["## Environments", "", *table(headings, rows)]


def _cell(value: Any) -> str:
    if pd.isna(value):
        return ""
    return escape(int(value) if isinstance(value, float) and value.is_integer() else value)
