"""What changed between two results: verdicts, errors, cases, expected failures and versions, and what that is worth."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from here import command_here
from tables import tables_beside

from attncheck.common.errors import UsageError
from attncheck.judging.compare import z_failure_limit, z_warning_limit
from attncheck.reports import difference
from attncheck.reports.difference import (
    Difference,
    compare_frames,
    difference_sentences,
    error_changes,
    render_diff_markdown,
    write_difference,
)
from attncheck.reports.frames import make_frames
from attncheck.reports.merge import merge_runs
from attncheck.reports.outcome import to_json_rows
from attncheck.results.reader import read_runs, with_matching_labels

Side = Path | list[Path]


def compared(before: Side, after: Side) -> Difference:
    paths = [[side] if isinstance(side, Path) else side for side in (before, after)]
    sides = with_matching_labels(read_runs(paths[0]), read_runs(paths[1]))
    frames = [make_frames(merge_runs(runs, across=False)) for runs in sides]
    return compare_frames(frames[0], frames[1], ("A", "B"))


@pytest.fixture
def pair(hand: Any) -> Callable[..., Difference]:
    """Compare two runs of one evaluation, each given by the fields of its row."""
    return lambda before, after: compared(hand.run([before]), hand.run([after], exit_code=1))


TABLES = tables_beside(__file__)
FAILS, KNOWN = TABLES["fails"], TABLES["expected"]
STALE = {"verdict": "xpass", "stage": "", "message": "no longer happens"}


def test_a_verdict_got_worse_where_it_fails_and_did_not_or_gives_nothing_and_did(hand: Any) -> None:
    cases = {f"file/{number:02}": row for number, row in enumerate(TABLES["changes"])}
    sides = [[{"case": case} | row[side] for case, row in cases.items()] for side in (0, 1)]
    found = compared(*map(hand.run, sides))
    assert {row.case: [row.change, row.before, row.after] for row in found.verdicts.itertuples()} == {
        case: words for case, (_, _, *words) in cases.items()
    }
    assert found.exit_code == 1
    spared = [[row for row in side if cases[row["case"]][2] != "worse"] for side in sides]
    assert compared(*map(hand.run, spared)).exit_code == 0


def test_another_stage_is_a_change_and_another_message_is_none(pair: Callable[..., Difference], hand: Any) -> None:
    assert list(pair(FAILS, FAILS | {"begins_at": "scores"}).verdicts["change"]) == ["other"]
    assert pair(FAILS, FAILS | {"message": "wrong by another digit"}).verdicts.empty
    # A stale entry does not hide what fails beside it.
    assert list(compared(hand.run([KNOWN]), hand.run([STALE, FAILS])).verdicts["change"]) == ["worse"]
    # A pair that differs counts although no stage is blamed.
    rows = [{"verdict": "unverified", "implementation": name} for name in ("one", "two")]
    apart = {"comparison": "pair", "implementation": "one", "other": "two", "verdict": "nonfinite", "message": "NaN"}
    (row,) = compared(hand.run(rows), hand.run([*rows, apart])).verdicts.to_dict("records")
    assert (row["before"], row["after"], row["change"]) == ("unverified", "nonfinite", "worse")
    assert row["message"] == "differs from two: NaN"


def test_cases_that_one_lacks_or_that_are_not_the_same_are_told_and_their_errors_not_compared(hand: Any) -> None:
    noisy = {"shape": "1x1x1x3", "tier": "within", "ratio": 0.5}
    before, after = (
        [{"case": f"file/{name}", "largest_z": z} | noisy for name in ("changed", "same")] for z in (0.1, 9.0)
    )
    cases = [
        hand.case("file/changed", options={"is_causal": True}),
        hand.case("file/same", title="Another title", tags=["new"], line=99),
        hand.case("file/new"),
    ]
    new = [FAILS | {"case": "file/new", "dtype": dtype} for dtype in ("float64", "float32")]
    difference = compared(hand.run([*before, FAILS | {"case": "file/old"}]), hand.run([*after, *new], cases=cases))
    assert [tuple(row.values()) for row in difference.cases.to_dict("records")] == [
        ("changed", "file/changed", 0, "options nothing became {'is_causal': True}"),
        ("added", "file/new", 2, ""),
        ("removed", "file/old", 1, ""),
    ]
    assert list(difference.errors["case"]) == ["file/same"]
    assert difference.exit_code == 0  # a case that is new has not got worse
    case = {"case": "file/fails"}
    other = hand.case("file/fails", inputs={"scores": [1, 1, 1, 4]})
    (row,) = compared(hand.run([case]), hand.run([FAILS | case], cases=[other])).verdicts.to_dict("records")
    assert (row["case_changed"], row["change"]) == (True, "worse")


def test_expected_failures_that_differ_are_told_by_their_reasons(hand: Any) -> None:
    before = hand.run([KNOWN, KNOWN | {"case": "file/two"}])
    after = hand.run([KNOWN, KNOWN | {"case": "file/two", "reason": "something else"}])
    known = {
        (row.change, row.reason, row.before_cases, row.after_cases)
        for row in compared(before, after).expected_failures.itertuples()
    }
    assert known == {("changed", "it always was", 2, 1), ("appeared", "something else", 0, 1)}


def test_single_runs_are_matched_whatever_their_labels_and_folders_by_label_and_what_only_one_has_is_counted(
    hand: Any,
) -> None:
    one, other = hand.run([{}], label="old"), hand.run([FAILS], label="new")
    assert list(compared(one, other).verdicts["environment"]) == ["old -> new"]
    difference = compared([one, hand.run([{}], label="new")], [other, one])
    assert [(row.environment, row.change) for row in difference.verdicts.itertuples()] == [("new", "worse")]
    assert difference.compared == 2
    difference = compared(hand.run([{}, {"dtype": "float32"}]), hand.run([{}], summary=False))
    assert (difference.compared, difference.only) == (1, (1, 0))
    assert difference.verdicts.empty
    assert difference_sentences(difference) == [
        "0 verdicts got worse, 0 got better, 0 changed otherwise; 1 evaluation compared.",
        "1 evaluation only in A, 0 only in B.",
        "B: this run was interrupted, or is still going on: its results are not complete.",
    ]


def test_results_that_have_nothing_in_common_are_refused_with_what_differs(
    pair: Callable[..., Difference], hand: Any
) -> None:
    for fields, said in (
        ({"implementation": "torch.eager"}, r"no implementation is in both \(A has numpy.eager; B has torch.eager\)"),
        ({"case": "file/two"}, "no case is in both"),
        ({"dtype": "float32"}, "no dtype is in both"),
    ):
        with pytest.raises(UsageError, match=f"^nothing can be compared: {said}"):
            pair({}, fields)
    with pytest.raises(UsageError, match="nothing can be compared: B has no results"):
        compared(hand.run([{}]), hand.run())


HOSTILE = "<script>alert(1)</script> | `x` *y* \n=1+1"


@pytest.fixture
def everything(hand: Any) -> Difference:
    """Compare two runs that differ in every way."""
    noisy = {"shape": "1x1x1x3", "tier": "within", "ratio": 0.5, "case": "file/noisy"}
    before = [{}, noisy | {"largest_z": 0.1}, {"case": "file/old"}]
    after = [
        FAILS | {"message": HOSTILE},
        noisy | {"largest_z": float("inf")},
        {"case": "file/new"},
        KNOWN | {"reason": HOSTILE, "implementation": "torch.eager"},
    ]
    return compared(hand.run(before), hand.run(after))


def test_every_frame_has_its_columns_and_any_text_is_shown_as_it_is(everything: Difference, tmp_path: Path) -> None:
    tables = everything.tables()
    wanted = tuple(f"{kind}_CHANGE_COLUMNS" for kind in ("VERDICT", "ERROR", "KNOWN", "CASE", "ENVIRONMENT"))
    write_difference(everything, tmp_path / "first")
    write_difference(everything, tmp_path / "second")
    for (name, frame), columns in zip(tables.items(), wanted, strict=True):
        assert len(frame)
        assert tuple(frame.columns) == getattr(difference, columns)
        empty = difference.to_typed_frame(frame.head(0), getattr(difference, columns))
        assert list(empty.dtypes) == list(frame.dtypes)
        pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "first" / f"diff_{name}.parquet"), frame)
        assert [len(row) for row in to_json_rows(frame)] == [len(frame.columns)] * len(frame)
    text = render_diff_markdown(everything)
    assert "<script>" not in text.replace("\\<script\\>", "")
    assert all(line.endswith("|") for line in text.splitlines() if line.startswith("|"))
    assert to_json_rows(tables["errors"])[0]["after_z"] == float("inf")
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("first", "second")]
    assert files[0] == files[1]
    assert files[0].keys() == {"diff.md"} | {f"diff_{name}.{kind}" for name in tables for kind in ("csv", "parquet")}


def test_the_command_ends_with_one_where_something_got_worse_and_only_then(hand: Any) -> None:
    good, bad = hand.run([{}], name="good"), hand.run([FAILS], name="bad")
    assert command_here(["diff", bad, good, "--quiet"]) == (0, "", "")
    code, out, _ = command_here(["diff", good, bad, "--quiet"])
    assert (code, "wrong now" in out) == (1, True)


def changes_of(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> pd.DataFrame:
    return error_changes(*(pd.DataFrame([TABLES["stage"] | fields for fields in side]) for side in (before, after)))


def test_an_error_grew_where_it_doubled_and_is_beyond_noise_and_the_largest_comes_first() -> None:
    for before, after, changes in TABLES["errors"]:
        assert list(changes_of([before], [after])["change"]) == changes, (before, after)
    # A stage has one line with the measure in which it is larger.
    larger = {"largest_z": 5.0, "introduced_z": 7.0, "introduced_ratio": 0.4}
    (row,) = changes_of([{}], [larger]).to_dict("records")
    assert (row["measure"], row["before_z"], row["after_z"]) == ("introduced", 1.0, 7.0)
    assert (row["before_ratio"], row["after_ratio"]) == (0.01, 0.4)
    after = [{"case": name, "largest_z": z} for name, z in (("a", 4.0), ("b", 8.0), ("c", 6.0))]
    assert list(changes_of([{"case": name} for name in "abc"], after)["case"]) == ["b", "c", "a"]
    # The limit of noise is that of the third tier.
    assert z_warning_limit(1) == 3.0  # lambda(1) / 2 = sqrt(2 ln(2e6)) / 2 = 2.69
    assert z_failure_limit(1024) / 2 == pytest.approx(3.2742, abs=1e-4)  # ln(2 1024 / 1e-6) = 7.6246 + 13.8155
    assert z_failure_limit(1024) / 2 == z_warning_limit(1024)
