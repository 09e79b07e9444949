"""The documents at a glance: how many of each one's printed numbers hold on each implementation."""

from __future__ import annotations

import pandas as pd

from attncheck.reports.frames import Column, Frames, count_numbers, documents_of, under_erratum
from attncheck.reports.markdown.text import escape, table
from attncheck.reports.printed_numbers import number_counts_of
from attncheck.verdicts import Verdict

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
    counted = ["printed", "hold", "do not hold", "unverified", "errata"]
    headings = ["document", *counted, *titles, "computed, not printed"]
    return ["## Documents at a glance", "", _EXPLAINED, "", *table(headings, rows, "l" + "r" * len(headings))]


def _cell(printed: pd.DataFrame, column: Column) -> str:
    own = printed[printed["environment"].eq(column.environment) & printed["implementation"].eq(column.implementation)]
    return f"{int(own['verdict'].eq(Verdict.AGREE).sum())} of {len(own)}" if len(own) else "-"


def _count(number: int) -> str:
    return str(number or "-")
