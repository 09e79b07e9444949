"""The verdict of every case, implementation and dtype."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attncheck.reports.cells import Cell, State, cell_table, worst_cell
from attncheck.reports.frames import Frames
from attncheck.results.format import Row


@pytest.mark.parametrize(
    ("rows", "cell", "text"),
    [
        ([{}], Cell(State.AGREE, "agree", ""), "agree"),
        ([{"verdict": "unverified"}], Cell(State.UNVERIFIED, "unverified", ""), "unverified"),
        ([{}, {"verdict": "unverified", "stage": "own"}], Cell(State.AGREE, "agree", ""), "agree"),
        ([{"verdict": "unsupported", "stage": ""}], Cell(State.UNSUPPORTED, "unsupported", ""), "unsupported"),
        (
            [{}, {"verdict": "misprint", "xfail": True, "comparison": "printed"}],
            Cell(State.ERRATUM, "agree", ""),
            "agree (erratum)",
        ),
        (
            [{"verdict": "semantic", "xfail": True}, {"verdict": "error", "xfail": True, "comparison": "known"}],
            Cell(State.XFAIL, "semantic", ""),
            "xfail semantic",
        ),
        (
            [{"verdict": "numeric", "stage": "output", "begins_at": "scores"}, {"verdict": "shape"}],
            Cell(State.FAILING, "shape", "scores"),
            "shape at scores",
        ),
        (
            [{"verdict": "numeric", "xfail": True}, {"verdict": "timeout", "stage": ""}],
            Cell(State.FAILING, "timeout", ""),
            "timeout",
        ),
    ],
)
def test_a_cell_says_the_worst_of_its_rows(
    rows: list[dict[str, Any]],
    cell: Cell,
    text: str,
    make_row: Callable[..., Row],
    write_run: Callable[..., Path],
    frames_of: Callable[..., Frames],
) -> None:
    table = cell_table(frames_of(write_run([make_row(**fields) for fields in rows])))
    ((cells,),) = [row.values() for row in table.values()]
    assert cells == {"float64": cell}
    assert cell.text == text


def test_the_worst_of_several_dtypes_is_the_most_severe() -> None:
    known, failing = Cell(State.XFAIL, "crash", ""), Cell(State.FAILING, "numeric", "scores")
    assert worst_cell({"float64": known, "float32": failing}) == failing
