"""The table of verdicts: whole where it can be read, and of very many cases what does not agree."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from attncheck.reports.frames import Frames
from attncheck.reports.markdown import verdicts
from attncheck.reports.markdown.verdicts import verdict_section
from attncheck.results.format import Row

MakeRow = Callable[..., Row]
Report = Callable[..., list[str]]


@pytest.fixture
def section_of(make_row: MakeRow, write_run: Callable[..., Path], frames_of: Callable[..., Frames]) -> Report:
    """Return the section over cases that agree but for some that fail and some that are unsupported."""

    def make(cases: int, failing: Iterable[int] = (), unsupported: Iterable[int] = ()) -> list[str]:
        special = dict.fromkeys(failing, "numeric") | dict.fromkeys(unsupported, "unsupported")
        rows = [
            make_row(case=f"file/case-{number:03d}", verdict=special.get(number, "agree")) for number in range(cases)
        ]
        return verdict_section(frames_of(write_run(rows)))

    return make


def listed(lines: list[str]) -> list[int]:
    return [int(line.split()[1].removeprefix("case-")) for line in lines if line.startswith("| case-")]


def test_as_many_cases_as_can_be_read_are_all_there(section_of: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "_MAX_CASES", 8)
    lines = section_of(8, failing=[3])
    assert listed(lines) == list(range(8))
    assert not any("too many" in line for line in lines)


def test_of_more_only_those_that_do_not_agree_are_there_and_all_are_counted(
    section_of: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdicts, "_MAX_CASES", 8)
    lines = section_of(9, failing=[3, 7], unsupported=[1])
    assert listed(lines) == [1, 3, 7]
    assert lines[2].startswith("9 cases on 1 implementations are too many")
    assert "show the 3 in which some implementation does not agree" in lines[2]
    assert "| implementation | agree | numeric | unsupported |" in lines
    assert "| numpy.eager 1.0 | 6 | 2 | 1 |" in lines


def test_what_fails_comes_first_where_even_that_is_too_much(
    section_of: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdicts, "_MAX_CELLS", 4)
    lines = section_of(9, failing=[6, 7, 8], unsupported=[0, 1, 2])
    assert listed(lines) == [0, 6, 7, 8]
    assert "show 4 of the 6 in which" in lines[2]
