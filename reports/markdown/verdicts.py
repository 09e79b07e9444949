"""The report's section on verdicts: every case on every implementation, or, of very many, what does not agree."""

from __future__ import annotations

from collections.abc import Mapping

from attncheck.reports.answer import verdict_table
from attncheck.reports.frames import Column, Frames, records, rows_judged
from attncheck.reports.markdown.text import code, escape, table
from attncheck.reports.terminal import verdict_counts

_MAX_CASES, _MAX_CELLS = 2_000, 40_000
"""A forge shows no file of many megabytes, and nobody reads one."""

Verdicts = Mapping[str, Mapping[Column, str]]


def verdict_section(frames: Frames) -> list[str]:
    """Return the verdict of every case on every implementation, a table per topic."""
    verdicts: Verdicts = verdict_table(frames)
    most = min(_MAX_CASES, max(1, _MAX_CELLS // max(1, len(frames.columns))))
    lines = ["## Verdicts", ""]
    if len(verdicts) > most:
        shown = _not_agreeing(verdicts, most)
        lines += _instead_of_all(frames, verdicts, len(shown))
        verdicts = shown
    return [
        *lines,
        *_tables(frames, verdicts),
        "An implementation agrees where every stage is within its derived error bound of the exact answer, "
        "statistically too on inputs for which that can be said, and where every printed number holds. Without another "
        "word, all dtypes agree.",
    ]


def _not_agreeing(verdicts: Verdicts, most: int) -> Verdicts:
    """Return the first cases in which some implementation does not agree: what fails before the rest."""
    failing = [case for case, cells in verdicts.items() if any("**" in cell for cell in cells.values())]
    others = [case for case, cells in verdicts.items() if set(cells.values()) != {"agree"}]
    chosen = set(list(dict.fromkeys([*failing, *others]))[:most])
    return {case: cells for case, cells in verdicts.items() if case in chosen}


def _instead_of_all(frames: Frames, verdicts: Verdicts, shown: int) -> list[str]:
    """Say that not all is shown, and count what is not."""
    others = sum(set(cells.values()) != {"agree"} for cells in verdicts.values())
    which = f"the {shown:,}" if shown == others else f"{shown:,} of the {others:,}"
    headings, counts = verdict_counts(frames)
    return [
        f"{len(verdicts):,} cases on {len(frames.columns):,} implementations are too many to be read one by one. The "
        f"tables below show {which} in which some implementation does not agree or did not run, those that fail first; "
        "every verdict is in `results.csv`. This is how many cases have which verdict:",
        "",
        *table([escape(heading) for heading in headings], [[escape(cell) for cell in line] for line in counts]),
        "",
    ]


def _tables(frames: Frames, verdicts: Verdicts) -> list[str]:
    with_environment = len({column.environment for column in frames.columns}) > 1
    headings = ["case", *(escape(column.title(with_environment=with_environment)) for column in frames.columns)]
    sampled = _sampled(frames)
    by_file: dict[str, list[str]] = {}
    for case in verdicts:
        by_file.setdefault(frames.cases[case]["file"], []).append(case)
    lines = []
    for file, cases in by_file.items():
        title = frames.cases[cases[0]]["title"]
        rows = [
            [
                escape(frames.cases[case]["name"] + sampled.get(case, "")),
                *(_cell(verdicts[case][column]) for column in frames.columns),
            ]
            for case in cases
        ]
        lines += [f"### {escape(title)} ({code(file)})", "", *table(headings, rows), ""]
    return lines


def _cell(words: str) -> str:
    """Show a cell; a stage in it may have any name, only the stars around a verdict are markup."""
    return escape(words).replace(r"\*\*", "**")


def _sampled(frames: Frames) -> dict[str, str]:
    """Say of each case in which some query rows stand for all how many."""
    rows = frames.results[frames.results["query_rows"].notna()].drop_duplicates("case")
    return {row["case"]: f" ({rows_judged(row['judged_rows'], row['query_rows'])})" for row in records(rows)}
