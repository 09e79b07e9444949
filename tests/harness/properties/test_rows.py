"""Rows: what fails by what is claimed, what that makes of a run, and the same rows read back."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attncheck.errors import ExitCode, ResultsError
from attncheck.reports.properties import exit_code_of, sentence_of, worst_of
from attncheck.results import parts
from attncheck.results.format import PROPERTY_PART, Row
from attncheck.results.parts import read_property_rows
from attncheck.results.writer import write_property_rows
from attncheck.verdicts import PropertyOutcome

pytestmark = pytest.mark.usefixtures("forked_workers")

ROW = Row(
    *("mine/a", "attention", "float32", "own.attention", "property", "", "bitwise"),
    property_name="repeated",
    variant="20 calls",
    message="all 5, elements",
)


FAILS = {
    ("bitwise", ""): False,
    ("within bounds", ""): False,
    ("broken", ""): True,
    ("xpass", ""): True,
    ("bitwise", "bitwise"): False,
    ("within bounds", "bitwise"): True,
    ("not judged", "bitwise"): True,
    ("unsupported", "bitwise"): False,
    ("failed", "bitwise"): False,
    ("within bounds", "within bounds"): False,
    ("broken", "within bounds"): True,
    ("nan", ""): False,
    ("nan", "within bounds"): True,
}
"""Outcomes and claims, and whether a row of them fails."""


def test_what_fails_follows_from_the_outcome_and_the_claim() -> None:
    rows = {each: replace(ROW, verdict=each[0], claim=each[1]) for each in FAILS}
    assert {each: row.fails for each, row in rows.items()} == FAILS
    assert not any(replace(row, xfail=True).fails_run for row in rows.values())


def test_a_run_disagrees_where_something_fails_and_did_not_run_where_a_call_failed() -> None:
    assert exit_code_of([ROW]) is ExitCode.AGREE
    assert exit_code_of([ROW, replace(ROW, verdict="failed")]) is ExitCode.NOT_RUN
    assert exit_code_of([replace(ROW, verdict="unsupported")]) is ExitCode.NOT_RUN
    assert exit_code_of([replace(ROW, verdict="failed"), replace(ROW, verdict="broken")]) is ExitCode.DISAGREE
    assert exit_code_of([replace(ROW, verdict="broken", xfail=True)]) is ExitCode.AGREE


def test_the_worst_row_stands_for_several_and_an_expected_one_comes_behind() -> None:
    expected = replace(ROW, verdict="broken", xfail=True)
    claimed = replace(ROW, verdict="within bounds", claim="bitwise")
    assert worst_of([ROW, expected, claimed]) is claimed
    assert worst_of([ROW, expected]) is expected
    assert worst_of([]) is None


def test_rows_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    rows = [
        ROW,
        replace(
            ROW, verdict="broken", value=0.1, reference=math.inf, exact=-1e-310, xfail=True, index="0,1", differing=3
        ),
        replace(ROW, value=math.nan, reference=None),
        replace(ROW, message='quotes "and", commas\nand lines', claim="bitwise"),
    ]
    write_property_rows(tmp_path, rows)
    assert repr(read_property_rows(tmp_path)) == repr(rows)  # NaN is NaN there


@pytest.mark.parametrize("change", [{"verdict": "splendid"}, {"property_name": "unheard_of"}, {"comparison": "stage"}])
def test_a_table_that_is_none_of_ours_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    write_property_rows(tmp_path, [replace(ROW, **change)])
    with pytest.raises(ResultsError, match=f"{PROPERTY_PART} cannot be read"):
        read_property_rows(tmp_path)


def test_more_rows_than_any_run_asks_for_are_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_property_rows(tmp_path, [ROW, ROW])
    monkeypatch.setattr(parts, "_MAX_PROPERTY_ROWS", 1)
    with pytest.raises(ResultsError, match="it has 2 rows; expected at most 1"):
        read_property_rows(tmp_path)


def test_the_sentence_names_what_does_not_hold() -> None:
    assert sentence_of([ROW]) == "Properties hold: 1 property, 1 comparison."
    assert "own.attention: repeated" in sentence_of([ROW, replace(ROW, verdict="broken")])
    assert sentence_of([replace(ROW, verdict="unsupported")]) == "No property was judged."


def test_outcomes_are_ordered_from_harmless_to_severe() -> None:
    assert PropertyOutcome.BITWISE.severity < PropertyOutcome.WITHIN_BOUNDS.severity < PropertyOutcome.BROKEN.severity
