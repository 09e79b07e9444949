"""Which cases were padded to what an implementation requires, in every report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attncheck.reports.answer import make_summary
from attncheck.reports.coverage import coverage, judged_counts
from attncheck.reports.frames import Frames
from attncheck.reports.html.render import render_html
from attncheck.results.format import Row

MakeRow = Callable[..., Row]
WriteRun = Callable[..., Path]
FramesOf = Callable[..., Frames]

COLUMNS, MORE = (
    "zero columns (D 5 to 8, Dv 3 to 8)",
    "zero columns (D 5 to 8), queries (Lq 3 to 16), masked keys (T 7 to 16)",
)


@pytest.mark.parametrize(
    ("padded", "sentence"),
    [
        ([COLUMNS, None], "On numpy.eager, 1 case was padded with zero columns, as it requires."),
        ([COLUMNS, COLUMNS], "On numpy.eager, 2 cases were padded with zero columns, as it requires."),
        (
            [COLUMNS, MORE, None],
            "On numpy.eager, 2 cases were padded, as it requires: 2 with zero columns, 1 with masked keys and "
            "1 with queries.",
        ),
        ([None, None], ""),
        (["with something else", None], "On numpy.eager, 1 case was padded."),  # as nobody here writes it
    ],
)
def test_the_facts_count_cases_by_what_was_added(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf, padded: list[str | None], sentence: str
) -> None:
    rows = [make_row(case=f"file/{number}", padded=each) for number, each in enumerate(padded)]
    rows += [make_row(case="file/0", dtype="float32", padded=padded[0])]  # another dtype is no other case
    frames = frames_of(write_run(rows))
    assert [said for said in make_summary(frames).sentences if "padded" in said] == ([sentence] if sentence else [])
    (counts,) = judged_counts(frames).values()
    assert counts["padded"] == len([each for each in padded if each])


def test_padded_cases_count_as_judged_and_unsupported_ones_are_not_padded(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    unsupported: dict[str, Any] = {"stage": "", "verdict": "unsupported", "message": "says no", "padded": COLUMNS}
    frames = frames_of(write_run([make_row(padded=COLUMNS), make_row(case="file/two", **unsupported)]))
    (found,) = coverage(frames)
    assert (found.judged, found.unsupported) == (1, 1)
    assert "On numpy.eager, 1 case was padded with zero columns, as it requires." in make_summary(frames).sentences


def test_the_page_of_a_case_says_what_was_added(make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf) -> None:
    rows = [make_row(padded=COLUMNS), make_row(dtype="float32", stage="", verdict="crash", message="died", padded=MORE)]
    page = render_html(frames_of(write_run(rows)))
    assert f"<small>padded with {COLUMNS}</small>" in page
    assert f"<small>padded with {MORE}</small>" in page
