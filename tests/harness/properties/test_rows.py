"""Rows: what fails by what is claimed, what that makes of a run, and the same rows read back."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from attncheck.errors import ExitCode, ResultsError
from attncheck.properties.rows import (
    PropertyOutcome,
    PropertyRow,
    exit_code_of,
    read_property_rows,
    sentence_of,
    worst_of,
    write_property_rows,
)
from attncheck.results.format import PROPERTIES_TABLE

pytestmark = pytest.mark.usefixtures("forked_workers")

ROW = PropertyRow("own.attention", "repeated", "mine/a", "float32", "20 calls", "bitwise", message="all 5, elements")


@pytest.mark.parametrize(
    ("outcome", "claim", "fails"),
    [
        ("bitwise", "", False),
        ("within bounds", "", False),
        ("broken", "", True),
        ("xpass", "", True),
        ("bitwise", "bitwise", False),
        ("within bounds", "bitwise", True),
        ("not judged", "bitwise", True),
        ("unsupported", "bitwise", False),
        ("failed", "bitwise", False),
        ("within bounds", "within bounds", False),
        ("broken", "within bounds", True),
        ("nan", "", False),
        ("nan", "within bounds", True),
    ],
)
def test_what_fails_follows_from_the_outcome_and_the_claim(outcome: str, claim: str, fails: bool) -> None:
    row = replace(ROW, outcome=outcome, claim=claim)
    assert row.fails is fails
    assert replace(row, xfail=True).fails_run is False


def test_a_claim_that_fails_is_named_in_the_sentence() -> None:
    row = replace(ROW, outcome="within bounds", claim="bitwise", message="they differ")
    assert row.sentence == "claimed to be bitwise, and is within bounds: they differ"


def test_a_run_disagrees_where_something_fails_and_did_not_run_where_a_call_failed() -> None:
    assert exit_code_of([ROW]) is ExitCode.AGREE
    assert exit_code_of([ROW, replace(ROW, outcome="failed")]) is ExitCode.NOT_RUN
    assert exit_code_of([replace(ROW, outcome="unsupported")]) is ExitCode.NOT_RUN
    assert exit_code_of([replace(ROW, outcome="failed"), replace(ROW, outcome="broken")]) is ExitCode.DISAGREE
    assert exit_code_of([replace(ROW, outcome="broken", xfail=True)]) is ExitCode.AGREE


def test_the_worst_row_stands_for_several_and_an_expected_one_comes_behind() -> None:
    expected = replace(ROW, outcome="broken", xfail=True)
    claimed = replace(ROW, outcome="within bounds", claim="bitwise")
    assert worst_of([ROW, expected, claimed]) is claimed
    assert worst_of([ROW, expected]) is expected
    assert worst_of([]) is None


def test_rows_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    rows = [
        ROW,
        replace(ROW, outcome="broken", first=0.1, second=math.inf, exact=-1e-310, xfail=True, index="0,1", differing=3),
        replace(ROW, message='quotes "and", commas\nand lines', claim="bitwise"),
    ]
    write_property_rows(tmp_path, rows)
    assert read_property_rows(tmp_path) == rows


def test_a_run_without_properties_has_no_rows(tmp_path: Path) -> None:
    assert read_property_rows(tmp_path) == []


@pytest.mark.parametrize(
    "change", [("implementation", "implementations"), ("bitwise", "splendid"), ("repeated", "unheard_of")]
)
def test_a_table_that_is_none_of_ours_is_refused(change: tuple[str, str], tmp_path: Path) -> None:
    path = write_property_rows(tmp_path, [ROW])
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(ResultsError, match=PROPERTIES_TABLE):
        read_property_rows(tmp_path)


def test_the_sentence_names_what_does_not_hold() -> None:
    assert sentence_of([ROW]) == "Properties hold: 1 property, 1 comparison."
    assert "own.attention: repeated" in sentence_of([ROW, replace(ROW, outcome="broken")])
    assert sentence_of([replace(ROW, outcome="unsupported")]) == "No property was judged."


def test_outcomes_are_ordered_from_harmless_to_severe() -> None:
    assert PropertyOutcome.BITWISE.severity < PropertyOutcome.WITHIN_BOUNDS.severity < PropertyOutcome.BROKEN.severity
