"""Expected failures applied to rows: what is marked, what follows, what is stale."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from attncheck.judging.xfail import ExpectedFailureRecord, largest_ratio, reason_for
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
OTHER = "another reason for it"
NARROWER = ENTRY.replace("  verdict: semantic", "  dtypes: [float32]\n  stages: [output]\n  verdict: semantic")
OF_PROCESSOR = ENTRY.replace("  reason:", "  processor: amx_bf16\n  reason:")

MakeRow = Callable[..., Row]
Fields = Mapping[str, Any]


@pytest.fixture
def record(tmp_path: Path) -> Callable[[str], ExpectedFailureRecord]:
    def make(text: str) -> ExpectedFailureRecord:
        path = tmp_path / "known.yaml"
        path.write_text(text, encoding="utf-8")
        return ExpectedFailureRecord(load_expected_failures([path]))

    return make


@pytest.fixture
def row(make_row: MakeRow) -> MakeRow:
    standard = {"implementation": "torch.sdpa", "verdict": "semantic", "message": "another"}
    return lambda **fields: make_row(**{**standard, **fields})


def numeric(ratio: float | None = None, **fields: Any) -> Fields:
    return {"verdict": "numeric", "ratio": ratio, **fields}


def pair(stage: str, one: str, other: str, verdict: str = "numeric") -> Fields:
    return {"comparison": "pair", "stage": stage, "implementation": one, "other": other, "verdict": verdict}


def number(stage: str, **fields: Any) -> Fields:
    return {"comparison": "known", "stage": stage, "verdict": "numeric", **fields}


NOTHING: Fields = {}
WEIGHTS, OUTPUT, NUMPY = {"stage": "weights"}, {"stage": "output"}, "numpy.eager"
MEMBER, DECLARED = ("torch.sdpa", NUMPY), {"xfail": True, "reason": "declared"}
MARKED: dict[str, tuple[str, Sequence[tuple[Fields, bool]]]] = {
    "an entry names an implementation, cases and a verdict": (
        ENTRY,
        [
            (NOTHING, True),
            ({"implementation": NUMPY}, False),
            ({"case": "other/one"}, False),
            ({"verdict": "numeric"}, False),
            ({"verdict": "agree"}, False),
            ({"verdict": "unsupported", "stage": ""}, False),
        ],
    ),
    "and perhaps dtypes and stages": (
        NARROWER,
        [
            (WEIGHTS | {"dtype": "float32"}, False),
            (OUTPUT | {"dtype": "float64"}, False),
            (OUTPUT | {"dtype": "float32"}, True),
        ],
    ),
    "a whole evaluation": (
        ENTRY.replace("verdict: semantic", "verdict: error"),
        [({"stage": "", "verdict": "error"}, True)],
    ),
    "pairs with a member at that stage or a later one": (
        ENTRY,
        [
            (WEIGHTS, True),
            (OUTPUT, True),
            (pair("weights", *MEMBER), True),
            (pair("weights", *reversed(MEMBER)), True),
            (pair("output", *MEMBER), True),
            (pair("masked", *MEMBER), False),
            (pair("weights", NUMPY, "jax.eager"), False),
            (pair("weights", *MEMBER, verdict="agree"), False),
        ],
    ),
    "a member that fails unknown to anybody leaves its own row failing": (
        ENTRY,
        [
            (NOTHING, True),
            ({"implementation": "jax.eager", "verdict": "numeric"}, False),
            (pair("weights", "jax.eager", "torch.sdpa"), True),
        ],
    ),
    "numbers at that stage or a later one": (
        ENTRY,
        [(WEIGHTS, True), (number("output"), True), (number("row_maxima"), True), (number("masked"), False)],
    ),
    "a declared convention": ("[]\n", [(DECLARED, True), (pair("output", *MEMBER), True)]),
    "a document's erratum excuses no pair": (
        "[]\n",
        [({"comparison": "printed", "verdict": "misprint", "xfail": True}, True), (pair("output", *MEMBER), False)],
    ),
    "errors up to a limit, those of the step included": (
        LIMITED,
        [
            (numeric(1000.0, introduced_ratio=2.0), True),
            (numeric(2000.0), False),
            (numeric(2.5, introduced_ratio=2e9), False),
            (numeric(2e9, introduced_ratio=2.5), False),
            (numeric(math.inf), False),
            (numeric(2000.0, case="other/one"), False),
            ({"verdict": "nonfinite", "ratio": 1.0}, False),
        ],
    ),
    "an error that statistics alone find, whatever its size": (
        LIMITED.replace("1000", "0.01"),
        [(numeric(0.3, tier="statistical", introduced_ratio=0.2), True)],
    ),
    "numbers, of the size of their own difference": (
        LIMITED,
        [
            (number("weights", difference=0.5, allowed=1e-3), True),
            (number("weights", difference=1.0, allowed=1e-3), True),
            (number("weights", difference=1.5, allowed=1e-3), False),
        ],
    ),
    "a pair within the limit": (LIMITED, [(numeric(1000.0), True), (pair("output", *MEMBER), True)]),
    "a pair beyond it": (LIMITED, [(numeric(2000.0), False), (pair("output", *MEMBER), False)]),
    "a wider limit": (LIMITED + LIMITED.replace("1000", "5000"), [(numeric(2000.0), True)]),
    "no limit": (LIMITED + LIMITED.replace("  max_ratio: 1000\n", ""), [(numeric(2000.0), True)]),
}
"""Entries, and rows with what is known of each."""


@pytest.mark.parametrize("situation", MARKED)
def test_what_is_known(situation: str, record: Callable[[str], ExpectedFailureRecord], row: MakeRow) -> None:
    text, rows = MARKED[situation]
    given = [row(**fields) for fields, _ in rows]
    found = record(text).mark(given)
    assert [each.xfail for each in found] == [is_known for _, is_known in rows]
    for before, after in zip(given, found, strict=True):
        if not after.xfail and "allows errors up to" not in after.message:
            assert after == before


def test_reasons_and_messages(record: Callable[[str], ExpectedFailureRecord], row: MakeRow) -> None:
    first, of_pair = record(ENTRY + ENTRY.replace(REASON, OTHER)).mark([row(), row(**pair("output", *MEMBER))])
    assert (first.message, first.reason) == (f"another; expected failure: {REASON}", REASON)
    assert (first.thread, of_pair.reason) == ("pytorch/pytorch#1", f"torch.sdpa: {REASON}")
    _, of_declared = record("[]\n").mark([row(**DECLARED), row(**pair("output", *MEMBER))])
    assert of_declared.reason == "torch.sdpa: declared"
    for text, ratio, says in (
        (LIMITED, 2000.0, "known.yaml:1) allows errors up to 1000 times their bound, and this is 2000 times"),
        (LIMITED, 2e9, "known.yaml:1) allows errors up to 1000 times their bound, and this is 2e+09 times"),
        (LIMITED, math.inf, "known.yaml:1) allows errors up to 1000 times their bound, and this is inf times"),
        (LIMITED + LIMITED.replace("1000", "1500"), 2000.0, "known.yaml:8) allows errors up to 1500 times"),
        (LIMITED + LIMITED.replace("1000", "5000").replace(REASON, OTHER), 2000.0, f"expected failure: {OTHER}"),
    ):
        (found,) = record(text).mark([row(**numeric(ratio))])
        assert found.message.startswith("another; ")
        assert says in found.message
    entries, place = record(LIMITED).expected_failures, ("torch.sdpa", "file/one", "float32", "output", "numeric")
    assert reason_for(entries, *place, ratio=7.0) is entries[0]
    assert reason_for(entries, *place) is reason_for(entries, *place, ratio=7e3) is None
    assert (largest_ratio(None, 3.0, 2.0), largest_ratio(None, None)) == (3.0, math.inf)


# Stale entries.

TWO, RUN, FAILED = {"case": "file/two"}, {"verdict": "agree"}, {"stage": ""}
GONE = "known.yaml:1: this expected failure no longer happens: torch.* in file/*"
STALE: dict[str, tuple[str, Sequence[Fields], str]] = {
    "what ran and did not happen": (ENTRY, [RUN, RUN | TWO], GONE),
    "in whatever order": (ENTRY, [RUN | TWO, RUN], GONE),
    "what happens once is not": (ENTRY, [RUN, TWO], ""),
    "nor what was not judged": (ENTRY, [{"verdict": "unverified"}], ""),
    "nor what failed": (ENTRY, [FAILED | {"verdict": "error"}, FAILED | {"verdict": "timeout"}], ""),
    "nor what did not run": (ENTRY, [RUN | {"case": "other/one"}, RUN | {"implementation": NUMPY}], ""),
    "nothing of it is supported": (ENTRY, [FAILED | {"verdict": "unsupported"}], "in file/* supports none of it"),
    "but what else may be": (ENTRY, [FAILED | {"verdict": "unsupported"}, FAILED | TWO | {"verdict": "timeout"}], ""),
    "another verdict than the recorded one": (ENTRY, [{"verdict": "numeric"}], GONE),
    "an error that is larger than excused happens": (LIMITED, [RUN, numeric(2000.0) | TWO], ""),
    "two entries of one failure": (ENTRY + ENTRY.replace(REASON, OTHER), [NOTHING], ""),
}
"""Entries, rows, and what is said of an entry that is stale."""


@pytest.mark.parametrize("situation", STALE)
def test_an_entry_that_ran_and_did_not_happen_is_one_failing_row(
    situation: str, record: Callable[[str], ExpectedFailureRecord], row: MakeRow
) -> None:
    text, rows, says = STALE[situation]
    known = record(text)
    for fields in rows:
        known.mark([row(**{"case": "file/one", **fields})])
    found = known.xpass_rows()
    assert len(found) == bool(says)
    for stale in found:
        place = (stale.verdict, stale.xfail, stale.case, stale.implementation, stale.stage, stale.comparison)
        assert place == ("xpass", False, "file/one", "torch.sdpa", "", "stage")
        assert says in stale.message
        assert REASON in stale.message


@pytest.mark.parametrize("flags", [None, frozenset({"avx2"}), frozenset({"amx_bf16"})])
def test_an_entry_of_a_processor_is_stale_where_there_is_such_a_one_alone(
    record: Callable[[str], ExpectedFailureRecord],
    row: MakeRow,
    monkeypatch: pytest.MonkeyPatch,
    flags: frozenset[str] | None,
) -> None:
    monkeypatch.setattr("attncheck.reading.expected_failures.processor_flags", lambda: flags)
    known = record(OF_PROCESSOR)
    known.mark([row(verdict="agree")])
    is_such = flags == {"amx_bf16"}
    assert len(known.xpass_rows()) == is_such
    (marked,) = known.mark([row()])
    assert marked.xfail is (flags is None or is_such)
