"""Failures: each is one case that fails on one implementation in one dtype, in plain words and with its numbers.

Every format of a report writes the fields of the same ``Failure``, and selects nothing from the rows itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import pandas as pd

from attncheck.reports.coverage import DOCUMENT_VERDICTS, misprints
from attncheck.reports.failure_patterns import simplicity_sort_key
from attncheck.reports.frames import Frames, cached_for_frames, element_text, group_by_key, select_failing, to_records
from attncheck.reports.json_documents import Failure
from attncheck.reports.one_failure import EVALUATION_KEYS, failing_row_sort_key, make_failure
from attncheck.settings.commands import case_command, command_words_of
from attncheck.spec.verdicts import Verdict

RERUN_COMMANDS = ("explain", "repro")
"""Commands that explain the failure of one case on one implementation."""
_Row = Mapping[str, Any]


@cached_for_frames
def find_failures(frames: Frames) -> tuple[Failure, ...]:
    """Return the failures of implementations, the simplest case first, then each wrong document and record once.

    A wrong document has neither implementation nor dtype, because all of them show it.
    """
    of_documents = [
        _make_failure(frames, dict.fromkeys(EVALUATION_KEYS, "") | vars(misprint), misprint.rows)
        for misprint in misprints(frames)
    ]
    outdated = [first for first, *_ in group_by_key(outdated_records(frames), lambda record: record.message).values()]
    return (*wrong_implementations(frames), *of_documents, *outdated)


@cached_for_frames
def wrong_implementations(frames: Frames) -> tuple[Failure, ...]:
    """Return the failures that implementations are to blame for, the simplest case first."""
    wrong = failures_by_case(frames, with_records=False)
    order = {case: simplicity_sort_key(frames.cases[case]) for case in {failure.case for failure in wrong}}
    return tuple(sorted(wrong, key=lambda failure: order[failure.case]))


def outdated_records(frames: Frames) -> list[Failure]:
    """Return the stages whose expected failure no longer happens."""
    rows = select_failing(frames.results)
    return failures_of(frames, rows[rows["verdict"].eq(Verdict.XPASS)])


def failures_by_case(frames: Frames, *, with_records: bool = True) -> list[Failure]:
    """Return a failure for each failing case, dtype and implementation, with the number of its failing rows.

    A pair is listed only if no stage is blamed. ``with_records`` also lists misprints and outdated records, for every
    implementation that shows them.
    """
    left_out = () if with_records else DOCUMENT_VERDICTS
    rows_of = _failing_rows(frames)
    every = (row for rows in rows_of.values() for row in rows)
    blamed = {_stage_key(row) for row in every if row.get("other") is None and row["verdict"] not in left_out}
    wrong = []
    for key in sorted(rows_of):
        bad = [row for row in rows_of[key] if row["verdict"] not in left_out]
        bad = [row for row in bad if row.get("other") is None or _stage_key(row) not in blamed]
        if bad:
            wrong.append(_make_failure(frames, min(bad, key=failing_row_sort_key), len(bad)))
    return wrong


def failures_of(frames: Frames, rows: pd.DataFrame) -> list[Failure]:
    """Return a failure for each of some rows of results."""
    return [_make_failure(frames, row, 1) for row in to_records(rows)]


_stage_key = itemgetter("case", "dtype", "stage")


@cached_for_frames
def _failing_rows(frames: Frames) -> dict[tuple[str, ...], list[dict[str, Any]]]:
    """Return the rows that fail, by ``KEYS``: of stages, then of numbers, then of pairs."""
    tables = (frames.results, frames.numbers, frames.pairs)
    return group_by_key(
        (row for frame in tables for row in to_records(select_failing(frame))), itemgetter(*EVALUATION_KEYS)
    )


def _make_failure(frames: Frames, row: _Row, failing_comparisons: int) -> Failure:
    rows = _failing_rows(frames).get(itemgetter(*EVALUATION_KEYS)(row), [])
    if row.get("other") is not None:
        size = f": {row['message']}" if row["message"] else ""
        size = size or f" by {row['difference']:.3g} at {element_text(frames.cases[row['case']], row)}"
        row = {**row, "message": f"differs from {row['other']}{size}"}
    commands = rerun_commands(frames, row, RERUN_COMMANDS) if row["implementation"] and row["dtype"] else ()
    return make_failure(rows, row, failing_comparisons, frames.cases[row["case"]], commands)


def rerun_commands(frames: Frames, cell: Mapping[str, Any], names: Sequence[str]) -> tuple[str, ...]:
    """Return commands about a cell, a record with its case, dtype, environment and implementation.

    There are none if no command line can name the implementation, because it was passed as an object.
    """
    words = command_words_of(cell["implementation"], frames.command_words.get(cell["environment"], {}))
    case = frames.cases[cell["case"]]
    return tuple(case_command(name, case, words, cell["dtype"]) for name in names) if words else ()
