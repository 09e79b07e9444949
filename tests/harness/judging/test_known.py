"""Known divergences applied to rows: what is marked, what follows, what is stale."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attncheck.harness.judging.known import DivergenceRecord
from attncheck.harness.reading.divergences import Divergence, load_divergences
from attncheck.harness.results.writer import Row

REASON = "aligned to the lower right corner"
ENTRY = f"""\
- implementation: torch.*
  cases: [file/*]
  verdict: semantic
  reason: {REASON}
  decided: semantic
  thread: pytorch/pytorch#1
"""

MakeRow = Callable[..., Row]


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., DivergenceRecord]:
    def make(text: str = ENTRY, **changes: str) -> DivergenceRecord:
        for old, new in changes.items():
            text = text.replace(f"  {old}: ", f"  {new}\n  {old}: ", 1)
        path = tmp_path / "known.yaml"
        path.write_text(text, encoding="utf-8")
        divergences: tuple[Divergence, ...] = load_divergences([path])
        return DivergenceRecord(divergences)

    return make


@pytest.fixture
def row(make_row: MakeRow) -> MakeRow:
    def make(**fields: Any) -> Row:
        return make_row(**{"implementation": "torch.sdpa", "verdict": "semantic", "message": "another"} | fields)

    return make


def test_what_an_entry_names_is_known_with_its_reason(record: Callable[..., DivergenceRecord], row: MakeRow) -> None:
    (found,) = record().mark([row()])
    assert found.known
    assert found.message == f"another; known: {REASON}"
    assert (found.reason, found.thread) == (REASON, "pytorch/pytorch#1")


@pytest.mark.parametrize(
    "fields",
    [
        {"implementation": "numpy.eager"},
        {"case": "other/one"},
        {"verdict": "numeric"},
        {"verdict": "agree"},
        {"verdict": "unsupported", "stage": ""},
    ],
)
def test_what_it_does_not_name_stays_as_it_is(
    record: Callable[..., DivergenceRecord], row: MakeRow, fields: dict[str, str]
) -> None:
    given = row(**fields)
    assert record().mark([given]) == (given,)


def test_dtypes_and_stages_narrow_an_entry(record: Callable[..., DivergenceRecord], row: MakeRow) -> None:
    known = record(verdict="dtypes: [float32]\n  stages: [output]")
    rows = [row(stage=stage, dtype=dtype) for stage in ("weights", "output") for dtype in ("float64", "float32")]
    assert [each.known for each in known.mark(rows)] == [False, False, False, True]


def test_an_error_of_a_whole_evaluation_can_be_known(record: Callable[..., DivergenceRecord], row: MakeRow) -> None:
    known = record(ENTRY.replace("verdict: semantic", "verdict: error"))
    (found,) = known.mark([row(stage="", verdict="error")])
    assert found.known
    assert known.stale_rows() == []


def pair(row: MakeRow, stage: str, one: str, other: str, **fields: Any) -> Row:
    fields = {"verdict": "numeric"} | fields
    return row(comparison="pair", stage=stage, implementation=one, other=other, **fields)


@pytest.mark.parametrize(
    ("stage", "one", "other", "known"),
    [
        ("weights", "torch.sdpa", "numpy.eager", True),
        ("weights", "numpy.eager", "torch.sdpa", True),
        ("output", "numpy.eager", "torch.sdpa", True),
        ("masked", "numpy.eager", "torch.sdpa", False),
        ("weights", "numpy.eager", "jax.eager", False),
    ],
)
def test_a_pair_inherits_what_is_known_of_a_member_at_that_stage_or_before(
    record: Callable[..., DivergenceRecord], row: MakeRow, stage: str, one: str, other: str, known: bool
) -> None:
    *_, found = record().mark([row(stage="weights"), row(stage="output"), pair(row, stage, one, other)])
    assert found.known is known
    assert (found.reason == f"torch.sdpa: {REASON}") is known


def test_a_pair_that_agrees_is_not_marked(record: Callable[..., DivergenceRecord], row: MakeRow) -> None:
    *_, found = record().mark([row(), pair(row, "weights", "torch.sdpa", "numpy.eager", verdict="agree")])
    assert not found.known


def test_a_member_that_fails_unknown_to_anybody_leaves_its_own_row_failing(
    record: Callable[..., DivergenceRecord], row: MakeRow
) -> None:
    rows = [row(), row(implementation="jax.eager", verdict="numeric"), pair(row, "weights", "jax.eager", "torch.sdpa")]
    assert [each.known for each in record().mark(rows)] == [True, False, True]


@pytest.mark.parametrize(("stage", "known"), [("output", True), ("row_maxima", True), ("masked", False)])
def test_a_number_inherits_what_is_known_of_its_implementation(
    record: Callable[..., DivergenceRecord], row: MakeRow, stage: str, known: bool
) -> None:
    number = row(comparison="known", stage=stage, verdict="numeric")
    *_, found = record().mark([row(stage="weights"), number])
    assert found.known is known


def test_what_is_declared_is_inherited_as_well(record: Callable[..., DivergenceRecord], row: MakeRow) -> None:
    declared = row(known=True, reason="declared", message="another (declared)")
    first, found = record("[]\n").mark([declared, pair(row, "output", "torch.sdpa", "numpy.eager")])
    assert first == declared
    assert (found.known, found.reason) == (True, "torch.sdpa: declared")


def test_an_erratum_of_a_document_excuses_no_pair(record: Callable[..., DivergenceRecord], row: MakeRow) -> None:
    erratum = row(comparison="printed", verdict="misprint", known=True)
    *_, found = record("[]\n").mark([erratum, pair(row, "output", "torch.sdpa", "numpy.eager")])
    assert not found.known


# Stale entries.


def test_an_entry_that_ran_and_did_not_happen_is_one_failing_row(
    record: Callable[..., DivergenceRecord], row: MakeRow
) -> None:
    known = record()
    for case in ("file/one", "file/two"):
        known.mark([row(case=case, verdict="agree", message="")])
    (stale,) = known.stale_rows()
    assert (stale.verdict, stale.known, stale.case, stale.implementation) == (
        "stale",
        False,
        "file/one",
        "torch.sdpa",
    )
    assert (stale.stage, stale.comparison) == ("", "stage")
    assert "known.yaml:1: this known divergence no longer happens: torch.* in file/*" in stale.message
    assert REASON in stale.message


def test_an_entry_that_happens_once_is_not_stale(record: Callable[..., DivergenceRecord], row: MakeRow) -> None:
    known = record()
    known.mark([row(case="file/one", verdict="agree")])
    known.mark([row(case="file/two")])
    assert known.stale_rows() == []


@pytest.mark.parametrize(
    "fields",
    [
        {"verdict": "unsupported", "stage": ""},
        {"verdict": "unverified"},
        {"verdict": "error", "stage": ""},
        {"verdict": "timeout", "stage": ""},
        {"case": "other/one", "verdict": "agree"},
        {"implementation": "numpy.eager", "verdict": "agree"},
    ],
)
def test_what_was_not_judged_makes_no_entry_stale(
    record: Callable[..., DivergenceRecord], row: MakeRow, fields: dict[str, str]
) -> None:
    known = record()
    known.mark([row(**fields)])
    assert known.stale_rows() == []


def test_another_verdict_than_the_recorded_one_is_stale_and_fails(
    record: Callable[..., DivergenceRecord], row: MakeRow
) -> None:
    known = record()
    (found,) = known.mark([row(verdict="numeric")])
    assert not found.known
    assert len(known.stale_rows()) == 1


def test_two_entries_for_the_same_row_both_happen(record: Callable[..., DivergenceRecord], row: MakeRow) -> None:
    known = record(ENTRY + ENTRY.replace(REASON, "another reason for it"))
    (found,) = known.mark([row()])
    assert found.reason == REASON
    assert known.stale_rows() == []
