"""Expected failures applied to rows: what is marked, what follows, what is stale."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tables import tables_beside

from attncheck.judging.xfail import (
    ExpectedFailureRecord,
    describe_similar_failures,
    find_excusing_failure,
    largest_ratio,
)
from attncheck.reading.expected_failures import load_expected_failures
from attncheck.results.format import Row

REASON, OTHER = "aligned to the lower right corner", "another reason for it"
ENTRY = {
    **{"implementation": "torch.*", "cases": ["file/*"], "verdict": "semantic", "reason": REASON},
    **{"decided": "semantic", "thread": "pytorch/pytorch#1"},
}
LIMITED: Mapping[str, Any] = {"verdict": "numeric", "max_ratio": 1000}
PAIR = {"comparison": "pair", "stage": "output", "other": "numpy.eager", "verdict": "numeric"}
DECLARED = {"xfail": True, "reason": "declared"}
TABLES = tables_beside(__file__)

MakeRow = Callable[..., Row]
Record = Callable[[Iterable[Mapping[str, Any]]], ExpectedFailureRecord]


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """Read entries, each as what it changes of the standard one and in a line of its own."""

    def make(entries: Iterable[Mapping[str, Any]]) -> ExpectedFailureRecord:
        path = tmp_path / "known.yaml"
        text = "".join(f"- {json.dumps({**ENTRY, **changes})}\n" for changes in entries)
        path.write_text(text or "[]\n", encoding="utf-8")
        return ExpectedFailureRecord(load_expected_failures([path]))

    return make


@pytest.fixture
def row(make_row: MakeRow) -> MakeRow:
    standard = {"implementation": "torch.sdpa", "verdict": "semantic", "message": "another"}
    return lambda **fields: make_row(**{**standard, **fields})


@pytest.mark.parametrize("situation", TABLES["expected"])
def test_what_is_known(situation: str, record: Record, row: MakeRow) -> None:
    table = TABLES["expected"][situation]
    known, unknown = ([row(**fields) for fields in table.get(name, [])] for name in ("known", "unknown"))
    found = record(table["entries"]).mark_expected_rows([*known, *unknown])
    assert [each.xfail for each in found] == [True] * len(known) + [False] * len(unknown)
    for before, after in zip(unknown, found[len(known) :], strict=True):
        assert after == before or "allows errors up to" in after.message


def test_reasons_and_messages(record: Record, row: MakeRow) -> None:
    first, of_pair = record([{}, {"reason": OTHER}]).mark_expected_rows([row(), row(**PAIR)])
    assert (first.message, first.reason) == (f"another; expected failure: {REASON}", REASON)
    assert (first.thread, of_pair.reason) == ("pytorch/pytorch#1", f"torch.sdpa: {REASON}")
    _, of_declared = record([]).mark_expected_rows([row(**DECLARED), row(**PAIR)])
    assert of_declared.reason == "torch.sdpa: declared"
    for more, ratio, says in (
        ({}, 2000.0, "known.yaml:1) allows errors up to 1000 times their bound, and this is 2000 times"),
        ({}, 2e9, "known.yaml:1) allows errors up to 1000 times their bound, and this is 2e+09 times"),
        ({}, math.inf, "known.yaml:1) allows errors up to 1000 times their bound, and this is inf times"),
        ({"max_ratio": 1500}, 2000.0, "known.yaml:2) allows errors up to 1500 times"),
        ({"max_ratio": 5000, "reason": OTHER}, 2000.0, f"expected failure: {OTHER}"),
    ):
        (found,) = record([LIMITED, *([LIMITED | more] if more else [])]).mark_expected_rows(
            [row(verdict="numeric", ratio=ratio)]
        )
        assert found.message.startswith("another; ")
        assert says in found.message
    of_other = {"reason": OTHER, "cases": ["file/two"], "thread": None}
    entries = record([{}, of_other, {"verdict": "error"}]).expected_failures
    own = {"implementation": "mine.attention", "ratio": None}
    assert describe_similar_failures([row(case="file/two", **own), row(case="file/one", **own)], entries) == (
        f"torch.* has the same known failure in 2 of these 2 cases: {REASON} (pytorch/pytorch#1)"
    ), "an entry that fits half of the cases is not described"
    named = row(case="file/one", diagnosis="causality-ignored", **own)
    said = describe_similar_failures([row(case="file/two", **own), named], entries)
    assert f"torch.* has the same known failure in 1 of these 2 cases: {OTHER} (no thread known)" in said, (
        "a case with a diagnosis does not count"
    )
    assert not describe_similar_failures([named], entries), "nothing is left to explain"
    assert not describe_similar_failures([row(case="other/one", **own)], entries)
    entries = record([{"verdict": "error", "reason": "An axis of no key raises IndexError"}]).expected_failures
    raised = {"implementation": "mine.attention", "verdict": "error", "stage": "", "ratio": None}
    assert not describe_similar_failures([row(message="ValueError: no such thing", **raised)], entries), (
        "both raise, and no more"
    )
    assert "has the same known failure in this case" in describe_similar_failures(
        [row(message="IndexError: 0", **raised)], entries
    )
    entries, place = record([LIMITED]).expected_failures, ("torch.sdpa", "file/one", "float32", "output", "numeric")
    assert find_excusing_failure(entries, *place, ratio=7.0) is entries[0]
    assert find_excusing_failure(entries, *place) is find_excusing_failure(entries, *place, ratio=7e3) is None
    assert (largest_ratio(None, 3.0, 2.0), largest_ratio(None, None)) == (3.0, math.inf)


@pytest.mark.parametrize("situation", TABLES["stale"])
def test_an_entry_that_ran_and_did_not_happen_is_one_failing_row(situation: str, record: Record, row: MakeRow) -> None:
    table = TABLES["stale"][situation]
    known = record(table.get("entries", [{}]))
    for fields in table["rows"]:
        known.mark_expected_rows([row(**fields)])
    found = known.make_xpass_rows()
    assert len(found) == ("says" in table)
    for stale in found:
        place = (stale.verdict, stale.xfail, stale.case, stale.implementation, stale.stage, stale.comparison)
        assert place == ("xpass", False, "file/one", "torch.sdpa", "", "stage")
        assert table["says"] in stale.message
        assert REASON in stale.message


@pytest.mark.parametrize("flags", [None, frozenset({"avx2"}), frozenset({"amx_bf16"})])
def test_an_entry_of_a_processor_is_stale_where_there_is_such_a_one_alone(
    record: Record, row: MakeRow, monkeypatch: pytest.MonkeyPatch, flags: frozenset[str] | None
) -> None:
    monkeypatch.setattr("attncheck.reading.expected_failures.processor_flags", lambda: flags)
    for processor, such in (("amx_bf16", {"amx_bf16"}), ("not amx_bf16", {"avx2"})):
        known = record([{"processor": processor}])
        known.mark_expected_rows([row(verdict="agree")])
        assert len(known.make_xpass_rows()) == (flags == such)
        (marked,) = known.mark_expected_rows([row()])
        assert marked.xfail is (flags is None or flags == such)
