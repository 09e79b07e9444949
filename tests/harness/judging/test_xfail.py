"""Expected failures applied to rows: what is marked, what follows, what is stale."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attncheck.judging.xfail import ExpectedFailureRecord, beyond_expected, largest_ratio, reason_for
from attncheck.reading.expected_failures import ExpectedFailure, load_expected_failures
from attncheck.results.format import Row

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
def record(tmp_path: Path) -> Callable[..., ExpectedFailureRecord]:
    def make(text: str = ENTRY, **changes: str) -> ExpectedFailureRecord:
        for old, new in changes.items():
            text = text.replace(f"  {old}: ", f"  {new}\n  {old}: ", 1)
        path = tmp_path / "known.yaml"
        path.write_text(text, encoding="utf-8")
        expected_failures: tuple[ExpectedFailure, ...] = load_expected_failures([path])
        return ExpectedFailureRecord(expected_failures)

    return make


@pytest.fixture
def row(make_row: MakeRow) -> MakeRow:
    def make(**fields: Any) -> Row:
        return make_row(**{"implementation": "torch.sdpa", "verdict": "semantic", "message": "another"} | fields)

    return make


def test_what_an_entry_names_is_known_with_its_reason(
    record: Callable[..., ExpectedFailureRecord], row: MakeRow
) -> None:
    (found,) = record().mark([row()])
    assert found.xfail
    assert found.message == f"another; expected failure: {REASON}"
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
    record: Callable[..., ExpectedFailureRecord], row: MakeRow, fields: dict[str, str]
) -> None:
    given = row(**fields)
    assert record().mark([given]) == (given,)


def test_dtypes_and_stages_narrow_an_entry(record: Callable[..., ExpectedFailureRecord], row: MakeRow) -> None:
    known = record(verdict="dtypes: [float32]\n  stages: [output]")
    rows = [row(stage=stage, dtype=dtype) for stage in ("weights", "output") for dtype in ("float64", "float32")]
    assert [each.xfail for each in known.mark(rows)] == [False, False, False, True]


def test_an_error_of_a_whole_evaluation_can_be_known(
    record: Callable[..., ExpectedFailureRecord], row: MakeRow
) -> None:
    known = record(ENTRY.replace("verdict: semantic", "verdict: error"))
    (found,) = known.mark([row(stage="", verdict="error")])
    assert found.xfail
    assert known.xpass_rows() == []


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
    record: Callable[..., ExpectedFailureRecord], row: MakeRow, stage: str, one: str, other: str, known: bool
) -> None:
    *_, found = record().mark([row(stage="weights"), row(stage="output"), pair(row, stage, one, other)])
    assert found.xfail is known
    assert (found.reason == f"torch.sdpa: {REASON}") is known


def test_a_pair_that_agrees_is_not_marked(record: Callable[..., ExpectedFailureRecord], row: MakeRow) -> None:
    *_, found = record().mark([row(), pair(row, "weights", "torch.sdpa", "numpy.eager", verdict="agree")])
    assert not found.xfail


def test_a_member_that_fails_unknown_to_anybody_leaves_its_own_row_failing(
    record: Callable[..., ExpectedFailureRecord], row: MakeRow
) -> None:
    rows = [row(), row(implementation="jax.eager", verdict="numeric"), pair(row, "weights", "jax.eager", "torch.sdpa")]
    assert [each.xfail for each in record().mark(rows)] == [True, False, True]


@pytest.mark.parametrize(("stage", "known"), [("output", True), ("row_maxima", True), ("masked", False)])
def test_a_number_inherits_what_is_known_of_its_implementation(
    record: Callable[..., ExpectedFailureRecord], row: MakeRow, stage: str, known: bool
) -> None:
    number = row(comparison="known", stage=stage, verdict="numeric")
    *_, found = record().mark([row(stage="weights"), number])
    assert found.xfail is known


def test_what_is_declared_is_inherited_as_well(record: Callable[..., ExpectedFailureRecord], row: MakeRow) -> None:
    declared = row(xfail=True, reason="declared", message="another (declared)")
    first, found = record("[]\n").mark([declared, pair(row, "output", "torch.sdpa", "numpy.eager")])
    assert first == declared
    assert (found.xfail, found.reason) == (True, "torch.sdpa: declared")


def test_an_erratum_of_a_document_excuses_no_pair(record: Callable[..., ExpectedFailureRecord], row: MakeRow) -> None:
    erratum = row(comparison="printed", verdict="misprint", xfail=True)
    *_, found = record("[]\n").mark([erratum, pair(row, "output", "torch.sdpa", "numpy.eager")])
    assert not found.xfail


# Entries that limit what they excuse.

LIMITED = ENTRY.replace("verdict: semantic", "verdict: numeric\n  max_ratio: 1000")


def test_an_error_within_the_limit_is_known(record: Callable[..., ExpectedFailureRecord], row: MakeRow) -> None:
    (found,) = record(LIMITED).mark([row(verdict="numeric", ratio=1000.0, introduced_ratio=2.0)])
    assert (found.xfail, found.message) == (True, f"another; expected failure: {REASON}")


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ({"ratio": 2000.0}, "2000"),
        ({"ratio": 2.5, "introduced_ratio": 2e9}, "2e+09"),
        ({"ratio": 2e9, "introduced_ratio": 2.5}, "2e+09"),
        ({"ratio": math.inf}, "inf"),
    ],
)
def test_a_larger_error_fails_and_says_that_something_is_known(
    record: Callable[..., ExpectedFailureRecord], row: MakeRow, ratios: dict[str, float], said: str
) -> None:
    known = record(LIMITED)
    (found,) = known.mark([row(verdict="numeric", **ratios)])
    (expected,) = known.expected_failures
    assert not found.xfail
    assert found.message == (
        f"another; an expected failure ({expected.location}) allows errors up to 1000 times their bound, "
        f"and this is {said} times"
    )
    assert expected.location.endswith("known.yaml:1")


def test_an_error_that_statistics_alone_find_is_known(
    record: Callable[..., ExpectedFailureRecord], row: MakeRow
) -> None:
    known = record(LIMITED.replace("1000", "0.01"))
    (found,) = known.mark([row(verdict="numeric", ratio=0.3, tier="statistical", introduced_ratio=0.2)])
    assert found.xfail


def test_a_limit_says_nothing_of_another_case_dtype_or_verdict(
    record: Callable[..., ExpectedFailureRecord], row: MakeRow
) -> None:
    for fields in ({"case": "other/one"}, {"implementation": "jax.eager"}, {"verdict": "nonfinite"}):
        given = row(**{"verdict": "numeric", "ratio": 2000.0} | fields)
        assert record(LIMITED).mark([given]) == (given,)


def test_a_wider_limit_or_none_excuses_what_a_narrower_one_does_not(
    record: Callable[..., ExpectedFailureRecord], row: MakeRow
) -> None:
    given = row(verdict="numeric", ratio=2000.0)
    wider = "another reason for it"
    for other in ("  max_ratio: 5000\n", ""):
        text = LIMITED + LIMITED.replace("  max_ratio: 1000\n", other).replace(REASON, wider)
        (found,) = record(text).mark([given])
        assert (found.xfail, found.reason) == (True, wider)
    (found,) = record(LIMITED + LIMITED.replace("1000", "1500")).mark([given])
    assert "known.yaml:8) allows errors up to 1500 times" in found.message


def test_an_entry_that_happens_larger_than_it_excuses_is_not_stale(
    record: Callable[..., ExpectedFailureRecord], row: MakeRow
) -> None:
    known = record(LIMITED)
    known.mark([row(case="file/one", verdict="agree"), row(case="file/two", verdict="numeric", ratio=2000.0)])
    assert known.xpass_rows() == []


@pytest.mark.parametrize(("difference", "known"), [(0.5, True), (1.0, True), (1.5, False)])
def test_a_number_of_a_document_has_the_size_of_its_own_difference(
    record: Callable[..., ExpectedFailureRecord], row: MakeRow, difference: float, known: bool
) -> None:
    number = row(comparison="known", verdict="numeric", difference=difference, allowed=1e-3)
    (found,) = record(LIMITED).mark([number])
    assert found.xfail is known
    assert ("allows errors up to" in found.message) is not known


def test_a_pair_that_differs_because_of_a_larger_error_is_not_known(
    record: Callable[..., ExpectedFailureRecord], row: MakeRow
) -> None:
    given = pair(row, "output", "torch.sdpa", "numpy.eager")
    for ratio, known in ((1000.0, True), (2000.0, False)):
        first, second = record(LIMITED).mark([row(verdict="numeric", ratio=ratio), given])
        assert (first.xfail, second.xfail) == (known, known)
    assert second == given


def test_the_first_reason_of_that_size_is_given(record: Callable[..., ExpectedFailureRecord]) -> None:
    expected_failures = record(LIMITED).expected_failures
    place = ("torch.sdpa", "file/one", "float32", "output", "numeric")
    assert reason_for(expected_failures, *place, ratio=7.0) is expected_failures[0]
    assert reason_for(expected_failures, *place, ratio=7e3) is None
    assert reason_for(expected_failures, *place) is None
    assert beyond_expected(expected_failures, *place, ratio=7.0) == ""
    assert beyond_expected(expected_failures, *place, ratio=7e3).endswith("and this is 7000 times")
    assert beyond_expected((), *place, ratio=7e3) == ""


def test_the_largest_of_what_was_compared_counts() -> None:
    assert largest_ratio(None, 3.0, 2.0) == 3.0
    assert largest_ratio(None, None) == math.inf


# Stale entries.


@pytest.mark.parametrize("cases", [("file/one", "file/two"), ("file/two", "file/one")])
def test_an_entry_that_ran_and_did_not_happen_is_one_failing_row(
    record: Callable[..., ExpectedFailureRecord], row: MakeRow, cases: tuple[str, str]
) -> None:
    known = record()
    for case in cases:
        known.mark([row(case=case, verdict="agree", message="")])
    (stale,) = known.xpass_rows()
    assert (stale.verdict, stale.xfail, stale.case, stale.implementation) == (
        "xpass",
        False,
        "file/one",
        "torch.sdpa",
    )
    assert (stale.stage, stale.comparison) == ("", "stage")
    assert "known.yaml:1: this expected failure no longer happens: torch.* in file/*" in stale.message
    assert REASON in stale.message


def test_an_entry_that_happens_once_is_not_stale(record: Callable[..., ExpectedFailureRecord], row: MakeRow) -> None:
    known = record()
    known.mark([row(case="file/one", verdict="agree")])
    known.mark([row(case="file/two")])
    assert known.xpass_rows() == []


@pytest.mark.parametrize("flags", [None, frozenset({"avx2"})])
def test_what_no_processor_here_is_known_to_do_is_not_stale(
    record: Callable[..., ExpectedFailureRecord],
    row: MakeRow,
    monkeypatch: pytest.MonkeyPatch,
    flags: frozenset[str] | None,
) -> None:
    monkeypatch.setattr("attncheck.reading.expected_failures.processor_flags", lambda: flags)
    known = record(reason="processor: amx_bf16")
    known.mark([row(verdict="agree")])
    assert known.xpass_rows() == []
    (marked,) = known.mark([row()])
    assert marked.xfail is (flags is None)


def test_what_a_processor_here_no_longer_does_is_stale(
    record: Callable[..., ExpectedFailureRecord], row: MakeRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attncheck.reading.expected_failures.processor_flags", lambda: frozenset({"amx_bf16"}))
    known = record(reason="processor: amx_bf16")
    known.mark([row(verdict="agree")])
    assert len(known.xpass_rows()) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"verdict": "unverified"},
        {"verdict": "error", "stage": ""},
        {"verdict": "timeout", "stage": ""},
        {"case": "other/one", "verdict": "agree"},
        {"implementation": "numpy.eager", "verdict": "agree"},
    ],
)
def test_what_was_not_judged_makes_no_entry_stale(
    record: Callable[..., ExpectedFailureRecord], row: MakeRow, fields: dict[str, str]
) -> None:
    known = record()
    known.mark([row(**fields)])
    assert known.xpass_rows() == []


def test_an_entry_of_which_nothing_is_supported_is_stale(
    record: Callable[..., ExpectedFailureRecord], row: MakeRow
) -> None:
    known = record()
    known.mark([row(case="file/one", verdict="unsupported", stage="")])
    (stale,) = known.xpass_rows()
    assert "torch.* in file/* supports none of it" in stale.message
    known.mark([row(case="file/two", verdict="timeout", stage="")])
    assert known.xpass_rows() == []


def test_another_verdict_than_the_recorded_one_is_stale_and_fails(
    record: Callable[..., ExpectedFailureRecord], row: MakeRow
) -> None:
    known = record()
    (found,) = known.mark([row(verdict="numeric")])
    assert not found.xfail
    assert len(known.xpass_rows()) == 1


def test_two_entries_for_the_same_row_both_happen(record: Callable[..., ExpectedFailureRecord], row: MakeRow) -> None:
    known = record(ENTRY + ENTRY.replace(REASON, "another reason for it"))
    (found,) = known.mark([row()])
    assert found.reason == REASON
    assert known.xpass_rows() == []
