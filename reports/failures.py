"""Failures: each is one case that fails on one implementation in one dtype, in plain words and with its numbers.

Every format of a report writes the fields of the same ``Failure``, and selects nothing from the rows itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import pandas as pd

from attncheck.reports.coverage import OF_DOCUMENTS, misprints
from attncheck.reports.failure_patterns import simplicity
from attncheck.reports.frames import Frames, by_key, element_in, failing, once_for_frames, records
from attncheck.reports.json_documents import Failure
from attncheck.reports.one_failure import KEYS, first_failing_row, make_failure
from attncheck.settings.commands import command, words_of
from attncheck.spec.verdicts import Verdict

AGAIN = ("explain", "repro")
"""Commands that explain the failure of one case on one implementation."""
_Row = Mapping[str, Any]


@once_for_frames
def failures(frames: Frames) -> tuple[Failure, ...]:
    """Return the failures of implementations, the simplest case first, then each wrong document and record once.

    A wrong document has neither implementation nor dtype, because all of them show it.
    """
    of_documents = [
        _failure(frames, dict.fromkeys(KEYS, "") | vars(misprint), misprint.rows) for misprint in misprints(frames)
    ]
    outdated = [first for first, *_ in by_key(outdated_records(frames), lambda record: record.message).values()]
    return (*wrong_implementations(frames), *of_documents, *outdated)


@once_for_frames
def wrong_implementations(frames: Frames) -> tuple[Failure, ...]:
    """Return the failures that implementations are to blame for, the simplest case first."""
    wrong = failures_by_case(frames, with_records=False)
    order = {case: simplicity(frames.cases[case]) for case in {failure.case for failure in wrong}}
    return tuple(sorted(wrong, key=lambda failure: order[failure.case]))


def outdated_records(frames: Frames) -> list[Failure]:
    """Return the stages whose expected failure no longer happens."""
    rows = failing(frames.results)
    return failures_of(frames, rows[rows["verdict"].eq(Verdict.XPASS)])


def failures_by_case(frames: Frames, *, with_records: bool = True) -> list[Failure]:
    """Return a failure for each failing case, dtype and implementation, with the number of its failing rows.

    A pair is listed only if no stage is blamed. ``with_records`` also lists misprints and outdated records, for every
    implementation that shows them.
    """
    left_out = () if with_records else OF_DOCUMENTS
    rows_of = _failing_rows(frames)
    every = (row for rows in rows_of.values() for row in rows)
    blamed = {_STAGE(row) for row in every if row.get("other") is None and row["verdict"] not in left_out}
    wrong = []
    for key in sorted(rows_of):
        bad = [row for row in rows_of[key] if row["verdict"] not in left_out]
        bad = [row for row in bad if row.get("other") is None or _STAGE(row) not in blamed]
        if bad:
            wrong.append(_failure(frames, min(bad, key=first_failing_row), len(bad)))
    return wrong


def failures_of(frames: Frames, rows: pd.DataFrame) -> list[Failure]:
    """Return a failure for each of some rows of results."""
    return [_failure(frames, row, 1) for row in records(rows)]


_STAGE = itemgetter("case", "dtype", "stage")


@once_for_frames
def _failing_rows(frames: Frames) -> dict[tuple[str, ...], list[dict[str, Any]]]:
    """Return the rows that fail, by ``KEYS``: of stages, then of numbers, then of pairs."""
    tables = (frames.results, frames.numbers, frames.pairs)
    return by_key((row for frame in tables for row in records(failing(frame))), itemgetter(*KEYS))


def _failure(frames: Frames, row: _Row, failing_comparisons: int) -> Failure:
    rows = _failing_rows(frames).get(itemgetter(*KEYS)(row), [])
    if row.get("other") is not None:
        size = f": {row['message']}" if row["message"] else ""
        size = size or f" by {row['difference']:.3g} at {element_in(frames.cases[row['case']], row)}"
        row = {**row, "message": f"differs from {row['other']}{size}"}
    commands = commands_again(frames, row, AGAIN) if row["implementation"] and row["dtype"] else ()
    return make_failure(rows, row, failing_comparisons, frames.cases[row["case"]], commands)


def commands_again(frames: Frames, cell: Mapping[str, Any], names: Sequence[str]) -> tuple[str, ...]:
    """Return commands about a cell, a record with its case, dtype, environment and implementation.

    There are none if no command line can name the implementation, because it was passed as an object.
    """
    words = words_of(cell["implementation"], frames.again.get(cell["environment"], {}))
    case = frames.cases[cell["case"]]
    return tuple(command(name, case, words, cell["dtype"]) for name in names) if words else ()
