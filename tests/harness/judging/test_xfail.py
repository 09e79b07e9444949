"""Expected failures applied to rows: what is marked, what follows, what is stale."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attncheck.judging.xfail import ExpectedFailureRecord, beyond_expected, largest_ratio, reason_for
from attncheck.reading.expected_failures import load_expected_failures
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
LIMITED = ENTRY.replace("verdict: semantic", "verdict: numeric\n  max_ratio: 1000")

MakeRow = Callable[..., Row]
Record = Callable[..., ExpectedFailureRecord]


@pytest.fixture
def record(tmp_path: Path) -> Record:
    def make(text: str = ENTRY, **changes: str) -> ExpectedFailureRecord:
        for old, new in changes.items():
            text = text.replace(f"  {old}: ", f"  {new}\n  {old}: ", 1)
        path = tmp_path / "known.yaml"
        path.write_text(text, encoding="utf-8")
        return ExpectedFailureRecord(load_expected_failures([path]))

    return make


@pytest.fixture
def row(make_row: MakeRow) -> MakeRow:
    def make(**fields: Any) -> Row:
        return make_row(**{"implementation": "torch.sdpa", "verdict": "semantic", "message": "another"} | fields)

    return make


def pair(row: MakeRow, stage: str, one: str, other: str, **fields: Any) -> Row:
    given = {"verdict": "numeric"} | fields
    return row(comparison="pair", stage=stage, implementation=one, other=other, **given)


def test_what_an_entry_names_is_known_with_its_reason_and_the_rest_stays_as_it_is(record: Record, row: MakeRow) -> None:
    (found,) = record().mark([row()])
    assert (found.xfail, found.message) == (True, f"another; expected failure: {REASON}")
    assert (found.reason, found.thread) == (REASON, "pytorch/pytorch#1")
    for fields in (
        {"implementation": "numpy.eager"},
        {"case": "other/one"},
        {"verdict": "numeric"},
        {"verdict": "agree"},
        {"verdict": "unsupported", "stage": ""},
    ):
        given = row(**fields)
        assert record().mark([given]) == (given,)
    known = record(verdict="dtypes: [float32]\n  stages: [output]")
    rows = [row(stage=stage, dtype=dtype) for stage in ("weights", "output") for dtype in ("float64", "float32")]
    assert [each.xfail for each in known.mark(rows)] == [False, False, False, True]
    known = record(ENTRY.replace("verdict: semantic", "verdict: error"))  # of a whole evaluation
    (found,) = known.mark([row(stage="", verdict="error")])
    assert found.xfail
    assert known.xpass_rows() == []
    known = record(ENTRY + ENTRY.replace(REASON, "another reason for it"))  # both happen
    (found,) = known.mark([row()])
    assert found.reason == REASON
    assert known.xpass_rows() == []


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
    record: Record, row: MakeRow, stage: str, one: str, other: str, known: bool
) -> None:
    *_, found = record().mark([row(stage="weights"), row(stage="output"), pair(row, stage, one, other)])
    assert found.xfail is known
    assert (found.reason == f"torch.sdpa: {REASON}") is known


def test_what_follows_from_what_is_known(record: Record, row: MakeRow) -> None:
    *_, found = record().mark([row(), pair(row, "weights", "torch.sdpa", "numpy.eager", verdict="agree")])
    assert not found.xfail
    # A member that fails unknown to anybody leaves its own row failing.
    rows = [row(), row(implementation="jax.eager", verdict="numeric"), pair(row, "weights", "jax.eager", "torch.sdpa")]
    assert [each.xfail for each in record().mark(rows)] == [True, False, True]
    for stage, known in (("output", True), ("row_maxima", True), ("masked", False)):
        number = row(comparison="known", stage=stage, verdict="numeric")
        *_, found = record().mark([row(stage="weights"), number])
        assert found.xfail is known
    declared = row(xfail=True, reason="declared", message="another (declared)")
    first, found = record("[]\n").mark([declared, pair(row, "output", "torch.sdpa", "numpy.eager")])
    assert first == declared
    assert (found.xfail, found.reason) == (True, "torch.sdpa: declared")
    erratum = row(comparison="printed", verdict="misprint", xfail=True)  # of a document excuses no pair
    *_, found = record("[]\n").mark([erratum, pair(row, "output", "torch.sdpa", "numpy.eager")])
    assert not found.xfail


# Entries that limit what they excuse.


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ({"ratio": 1000.0, "introduced_ratio": 2.0}, ""),
        ({"ratio": 2000.0}, "2000"),
        ({"ratio": 2.5, "introduced_ratio": 2e9}, "2e+09"),
        ({"ratio": 2e9, "introduced_ratio": 2.5}, "2e+09"),
        ({"ratio": math.inf}, "inf"),
    ],
)
def test_a_larger_error_fails_and_says_that_something_is_known(
    record: Record, row: MakeRow, ratios: dict[str, float], said: str
) -> None:
    known = record(LIMITED)
    (found,) = known.mark([row(verdict="numeric", **ratios)])
    (expected,) = known.expected_failures
    assert found.xfail is not bool(said)
    assert expected.location.endswith("known.yaml:1")
    limit = f"an expected failure ({expected.location}) allows errors up to 1000 times their bound"
    words = f"{limit}, and this is {said} times" if said else f"expected failure: {REASON}"
    assert found.message == f"another; {words}"


def test_what_a_limit_says_nothing_of(record: Record, row: MakeRow) -> None:
    # An error that statistics alone find is known, whatever its size.
    (found,) = record(LIMITED.replace("1000", "0.01")).mark(
        [row(verdict="numeric", ratio=0.3, tier="statistical", introduced_ratio=0.2)]
    )
    assert found.xfail
    for fields in ({"case": "other/one"}, {"implementation": "jax.eager"}, {"verdict": "nonfinite"}):
        given = row(**{"verdict": "numeric", "ratio": 2000.0} | fields)
        assert record(LIMITED).mark([given]) == (given,)


def test_a_wider_limit_or_none_excuses_what_a_narrower_one_does_not(record: Record, row: MakeRow) -> None:
    given, wider = row(verdict="numeric", ratio=2000.0), "another reason for it"
    for other in ("  max_ratio: 5000\n", ""):
        text = LIMITED + LIMITED.replace("  max_ratio: 1000\n", other).replace(REASON, wider)
        (found,) = record(text).mark([given])
        assert (found.xfail, found.reason) == (True, wider)
    (found,) = record(LIMITED + LIMITED.replace("1000", "1500")).mark([given])
    assert "known.yaml:8) allows errors up to 1500 times" in found.message
    known = record(LIMITED)  # what happens larger than it excuses is not stale
    known.mark([row(case="file/one", verdict="agree"), row(case="file/two", verdict="numeric", ratio=2000.0)])
    assert known.xpass_rows() == []


def test_numbers_and_pairs_beyond_a_limit_are_not_known(record: Record, row: MakeRow) -> None:
    for difference, known in ((0.5, True), (1.0, True), (1.5, False)):  # of the size of its own difference
        number = row(comparison="known", verdict="numeric", difference=difference, allowed=1e-3)
        (found,) = record(LIMITED).mark([number])
        assert found.xfail is known
        assert ("allows errors up to" in found.message) is not known
    given = pair(row, "output", "torch.sdpa", "numpy.eager")
    for ratio, known in ((1000.0, True), (2000.0, False)):
        first, second = record(LIMITED).mark([row(verdict="numeric", ratio=ratio), given])
        assert (first.xfail, second.xfail) == (known, known)
    assert second == given


def test_the_first_reason_of_that_size_is_given_and_the_largest_ratio_counts(record: Record) -> None:
    expected_failures = record(LIMITED).expected_failures
    place = ("torch.sdpa", "file/one", "float32", "output", "numeric")
    assert reason_for(expected_failures, *place, ratio=7.0) is expected_failures[0]
    assert reason_for(expected_failures, *place, ratio=7e3) is None
    assert reason_for(expected_failures, *place) is None
    assert beyond_expected(expected_failures, *place, ratio=7.0) == ""
    assert beyond_expected(expected_failures, *place, ratio=7e3).endswith("and this is 7000 times")
    assert beyond_expected((), *place, ratio=7e3) == ""
    assert largest_ratio(None, 3.0, 2.0) == 3.0
    assert largest_ratio(None, None) == math.inf


# Stale entries.


@pytest.mark.parametrize("cases", [("file/one", "file/two"), ("file/two", "file/one")])
def test_an_entry_that_ran_and_did_not_happen_is_one_failing_row(
    record: Record, row: MakeRow, cases: tuple[str, str]
) -> None:
    known = record()
    for case in cases:
        known.mark([row(case=case, verdict="agree", message="")])
    (stale,) = known.xpass_rows()
    found = (stale.verdict, stale.xfail, stale.case, stale.implementation, stale.stage, stale.comparison)
    assert found == ("xpass", False, "file/one", "torch.sdpa", "", "stage")
    assert "known.yaml:1: this expected failure no longer happens: torch.* in file/*" in stale.message
    assert REASON in stale.message


def test_an_entry_that_happens_once_or_was_not_judged_is_not_stale(record: Record, row: MakeRow) -> None:
    known = record()
    known.mark([row(case="file/one", verdict="agree")])
    known.mark([row(case="file/two")])
    assert known.xpass_rows() == []
    for fields in (
        {"verdict": "unverified"},
        {"verdict": "error", "stage": ""},
        {"verdict": "timeout", "stage": ""},
        {"case": "other/one", "verdict": "agree"},
        {"implementation": "numpy.eager", "verdict": "agree"},
    ):
        known = record()
        known.mark([row(**fields)])
        assert known.xpass_rows() == []
    known = record()  # nothing of it is supported
    known.mark([row(case="file/one", verdict="unsupported", stage="")])
    (stale,) = known.xpass_rows()
    assert "torch.* in file/* supports none of it" in stale.message
    known.mark([row(case="file/two", verdict="timeout", stage="")])
    assert known.xpass_rows() == []
    known = record()  # another verdict than the recorded one fails, and leaves it stale
    (found,) = known.mark([row(verdict="numeric")])
    assert not found.xfail
    assert len(known.xpass_rows()) == 1


@pytest.mark.parametrize("flags", [None, frozenset({"avx2"}), frozenset({"amx_bf16"})])
def test_an_entry_of_a_processor_is_stale_where_there_is_such_a_one_alone(
    record: Record, row: MakeRow, monkeypatch: pytest.MonkeyPatch, flags: frozenset[str] | None
) -> None:
    monkeypatch.setattr("attncheck.reading.expected_failures.processor_flags", lambda: flags)
    known = record(reason="processor: amx_bf16")
    known.mark([row(verdict="agree")])
    is_such = flags == {"amx_bf16"}
    assert len(known.xpass_rows()) == is_such
    (marked,) = known.mark([row()])
    assert marked.xfail is (flags is None or is_such)
