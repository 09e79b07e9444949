"""What changed between two results: verdicts, cases, expected failures and versions, and what that is worth."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from attncheck.cli import main
from attncheck.errors import UsageError
from attncheck.merge import merge_runs
from attncheck.reports.diff import frames
from attncheck.reports.diff.difference import Difference, make_difference
from attncheck.reports.diff.text import render_diff_markdown, sentences, write_difference
from attncheck.reports.machine.of_differences import rows_of
from attncheck.reports.making import make_frames
from attncheck.results.format import Row
from attncheck.results.reader import matched_runs, read_runs

MakeRow = Callable[..., Row]
WriteRun = Callable[..., Path]
Side = Path | list[Path]


def compared(before: Side, after: Side) -> Difference:
    paths = [[side] if isinstance(side, Path) else side for side in (before, after)]
    sides = matched_runs(read_runs(paths[0]), read_runs(paths[1]))
    frames = [make_frames(merge_runs(runs, across=False)) for runs in sides]
    return make_difference(frames[0], frames[1], ("A", "B"))


@pytest.fixture
def pair(make_row: MakeRow, write_run: WriteRun) -> Callable[..., Difference]:
    """Compare two runs of one evaluation, each given by the fields of its row."""

    def make(before: dict[str, Any], after: dict[str, Any]) -> Difference:
        return compared(
            write_run([make_row(**before)], name="before"), write_run([make_row(**after)], name="after", exit_code=1)
        )

    return make


AGREES: dict[str, Any] = {}
FAILS = {"verdict": "numeric", "message": "wrong now", "begins_at": "weights"}
KNOWN = FAILS | {"xfail": True, "reason": "it always was", "message": "wrong as ever"}
NONFINITE = FAILS | {"verdict": "nonfinite"}
CRASHES = {"verdict": "crash", "stage": "", "message": "signal 11"}
RAISES = {"verdict": "error", "stage": "", "message": "ValueError"}
UNSUPPORTED = {"verdict": "unsupported", "stage": "", "message": "no such option"}
STALE = {"verdict": "xpass", "stage": "", "message": "no longer happens"}


@pytest.mark.parametrize(
    ("before", "after", "change", "words"),
    [
        (AGREES, FAILS, "worse", ("agree", "numeric")),
        (KNOWN, FAILS, "worse", ("xfail numeric", "numeric")),
        (UNSUPPORTED, FAILS, "worse", ("unsupported", "numeric")),
        (AGREES, CRASHES, "worse", ("agree", "crash")),
        (FAILS, CRASHES, "worse", ("numeric", "crash")),
        (FAILS, RAISES, "worse", ("numeric", "error")),
        (FAILS, AGREES, "better", ("numeric", "agree")),
        (FAILS, KNOWN, "better", ("numeric", "xfail numeric")),
        (CRASHES, FAILS, "better", ("crash", "numeric")),
        (RAISES, UNSUPPORTED, "better", ("error", "unsupported")),
        (FAILS, NONFINITE, "other", ("numeric", "nonfinite")),
        (RAISES, CRASHES, "other", ("error", "crash")),
        (AGREES, KNOWN, "other", ("agree", "xfail numeric")),
        (AGREES, UNSUPPORTED, "other", ("agree", "unsupported")),
        (KNOWN, STALE, "other", ("xfail numeric", "xpass")),
    ],
)
def test_a_verdict_got_worse_where_it_fails_and_did_not_or_gives_nothing_and_did(
    before: dict[str, Any], after: dict[str, Any], change: str, words: tuple[str, str], pair: Callable[..., Difference]
) -> None:
    difference = pair(before, after)
    (row,) = difference.verdicts.to_dict("records")
    assert (row["change"], row["before"], row["after"]) == (change, *words)
    assert (row["case"], row["implementation"], row["dtype"]) == ("file/one", "numpy.eager", "float64")
    assert difference.exit_code == (1 if change == "worse" else 0)


def test_a_failure_says_where_it_begins_and_what_happened(pair: Callable[..., Difference]) -> None:
    (row,) = pair(AGREES, FAILS).verdicts.to_dict("records")
    assert (row["before_stage"], row["after_stage"], row["message"]) == ("", "weights", "wrong now")
    (row,) = pair(FAILS, AGREES).verdicts.to_dict("records")
    assert (row["before_stage"], row["after_stage"], row["message"]) == ("weights", "", "before: wrong now")


def test_what_fails_at_another_stage_changed_and_what_says_it_in_other_words_did_not(
    pair: Callable[..., Difference],
) -> None:
    difference = pair(FAILS, FAILS | {"begins_at": "scores"})
    assert list(difference.verdicts["change"]) == ["other"]
    assert pair(FAILS, FAILS | {"message": "wrong by another digit"}).verdicts.empty


def test_a_stale_entry_does_not_hide_what_fails_beside_it(make_row: MakeRow, write_run: WriteRun) -> None:
    before = write_run([make_row(**KNOWN)], name="before")
    difference = compared(before, write_run([make_row(**STALE), make_row(**FAILS)], name="after"))
    assert list(difference.verdicts["change"]) == ["worse"]


def test_a_pair_that_differs_although_no_stage_is_blamed_counts(make_row: MakeRow, write_run: WriteRun) -> None:
    rows = [make_row(verdict="unverified", implementation=name) for name in ("one", "two")]
    apart = make_row(comparison="pair", implementation="one", other="two", verdict="nonfinite", message="NaN")
    difference = compared(write_run(rows, name="before"), write_run([*rows, apart], name="after"))
    (row,) = difference.verdicts.to_dict("records")
    assert (row["before"], row["after"], row["change"]) == ("unverified", "nonfinite", "worse")
    assert row["message"] == "differs from two: NaN"


def test_results_that_say_the_same_have_no_difference(document_run: Path) -> None:
    difference = compared(document_run, document_run)
    assert all(frame.empty for frame in difference.tables().values())
    assert difference.exit_code == 0
    assert difference.only == (0, 0)
    assert difference.compared > 0


def test_cases_that_one_lacks_or_that_are_not_the_same_are_told_with_what_fails_in_them(
    make_row: MakeRow, write_run: WriteRun, make_case_record: Callable[..., dict[str, Any]]
) -> None:
    causal = make_case_record("file/both", options={"is_causal": True})
    retitled = make_case_record("file/same", title="Another title", tags=["new"], line=99)
    before = write_run(
        [make_row(case=f"file/{name}") for name in ("both", "same")] + [make_row(case="file/old", **FAILS)],
        name="before",
    )
    after = write_run(
        [make_row(case=f"file/{name}") for name in ("both", "same")]
        + [make_row(case="file/new", dtype=dtype, **FAILS) for dtype in ("float64", "float32")],
        name="after",
        cases=[causal, retitled, make_case_record("file/new")],
    )
    difference = compared(before, after)
    assert [tuple(row.values()) for row in difference.cases.to_dict("records")] == [
        ("changed", "file/both", 0, "options nothing became {'is_causal': True}"),
        ("added", "file/new", 2, ""),
        ("removed", "file/old", 1, ""),
    ]
    assert difference.exit_code == 0  # a case that is new has not got worse


def test_a_changed_case_is_marked_and_its_errors_are_not_compared(
    make_row: MakeRow, write_run: WriteRun, make_case_record: Callable[..., dict[str, Any]]
) -> None:
    noisy = {"shape": "1x1x1x3", "tier": "within", "ratio": 0.5}
    rows = [make_row(case=f"file/{name}", largest_z=0.1, **noisy) for name in ("changed", "same")]
    before = write_run([*rows, make_row(case="file/fails")], name="before")
    cases = [make_case_record(f"file/{name}", inputs={"scores": [1, 1, 1, 4]}) for name in ("changed", "fails")]
    rows = [make_row(case=f"file/{name}", largest_z=9.0, **noisy) for name in ("changed", "same")]
    after = write_run(
        [*rows, make_row(case="file/fails", **FAILS)], name="after", cases=[*cases, make_case_record("file/same")]
    )
    difference = compared(before, after)
    assert list(difference.errors["case"]) == ["file/same"]
    (row,) = difference.verdicts.to_dict("records")
    assert (row["case"], row["case_changed"], row["change"]) == ("file/fails", True, "worse")


def test_versions_processors_and_implementations_that_differ_are_told(make_row: MakeRow, write_run: WriteRun) -> None:
    rows = [make_row(), make_row(implementation="torch.eager")]
    before = write_run(rows, name="before", versions={"numpy.eager": "2.0", "torch.eager": "2.5"})
    after = write_run(
        rows[:1], name="after", versions={"numpy.eager": "2.4"}, cpu_features=["AVX2", "AMX"], processors=4
    )
    found = {(row.change, row.what, row.before, row.after) for row in compared(before, after).environments.itertuples()}
    assert found == {
        ("changed", "numpy.eager", "2.0", "2.4"),
        ("removed", "torch.eager", "2.5", ""),
        ("changed", "processors", "2", "4"),
        ("changed", "cpu features", "", "AMX"),
        ("changed", "implementation numpy.eager", "2.0", "2.4"),
        ("removed", "implementation torch.eager", "2.5", ""),
    }


def test_expected_failures_that_appear_and_go_are_told(make_row: MakeRow, write_run: WriteRun) -> None:
    other = KNOWN | {"reason": "something else"}
    cases = ("file/one", "file/two")
    before = write_run([make_row(case=case, **KNOWN) for case in cases], name="before")
    after = write_run([make_row(**KNOWN), make_row(case="file/two", **other)], name="after")
    found = {
        (row.change, row.reason, row.before_cases, row.after_cases)
        for row in compared(before, after).expected_failures.itertuples()
    }
    assert found == {("changed", "it always was", 2, 1), ("appeared", "something else", 0, 1)}


def test_single_runs_are_matched_whatever_their_labels_and_folders_by_label(
    make_row: MakeRow, write_run: WriteRun
) -> None:
    one, other = write_run([make_row()], label="old"), write_run([make_row(**FAILS)], label="new")
    difference = compared(one, other)
    assert list(difference.verdicts["environment"]) == ["old -> new"]
    third = write_run([make_row()], label="new", name="third")
    difference = compared([one, third], [other, one])
    assert [(row.environment, row.change) for row in difference.verdicts.itertuples()] == [("new", "worse")]
    assert difference.compared == 2


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"implementation": "torch.eager"}, "no implementation is in both (A has numpy.eager; B has torch.eager)"),
        ({"case": "file/two"}, "no case is in both"),
        ({"dtype": "float32"}, "no dtype is in both"),
    ],
)
def test_results_that_have_nothing_in_common_are_refused_with_what_differs(
    fields: dict[str, str], said: str, pair: Callable[..., Difference]
) -> None:
    with pytest.raises(UsageError) as refusal:
        pair({}, fields)
    assert str(refusal.value).startswith(f"nothing can be compared: {said}")


def test_results_without_a_row_are_refused(make_row: MakeRow, write_run: WriteRun) -> None:
    with pytest.raises(UsageError, match="nothing can be compared: B has no results"):
        compared(write_run([make_row()], name="before"), write_run(name="after"))


def test_what_only_one_has_is_counted_and_an_interrupted_run_is_told(make_row: MakeRow, write_run: WriteRun) -> None:
    rows = [make_row(), make_row(dtype="float32")]
    before, after = write_run(rows, name="before"), write_run(rows[:1], name="after", summary=False)
    difference = compared(before, after)
    assert (difference.compared, difference.only) == (1, (1, 0))
    assert difference.verdicts.empty
    assert sentences(difference) == [
        "0 verdicts got worse, 0 got better, 0 changed otherwise; 1 evaluation compared.",
        "1 evaluation only in A, 0 only in B.",
        "B: this run was interrupted, or is still going on: its results are not complete.",
    ]


HOSTILE = "<script>alert(1)</script> | `x` *y* \n=1+1"


@pytest.fixture
def everything(make_row: MakeRow, write_run: WriteRun) -> Difference:
    """Compare two runs that differ in every way."""
    noisy = {"shape": "1x1x1x3", "tier": "within", "ratio": 0.5, "case": "file/noisy"}
    before = [make_row(), make_row(largest_z=0.1, **noisy), make_row(case="file/old")]
    after = [
        make_row(**FAILS | {"message": HOSTILE}),
        make_row(largest_z=float("inf"), **noisy),
        make_row(case="file/new"),
        make_row(**KNOWN | {"reason": HOSTILE}, implementation="torch.eager"),
    ]
    return compared(write_run(before, name="before"), write_run(after, name="after"))


def test_every_frame_has_documented_columns_of_their_types(everything: Difference) -> None:
    tables = everything.tables()
    wanted = ("VERDICT_CHANGES", "ERROR_CHANGES", "KNOWN_CHANGES", "CASE_CHANGES", "ENVIRONMENT_CHANGES")
    for frame, name in zip(tables.values(), wanted, strict=True):
        assert len(frame)
        assert tuple(frame.columns) == getattr(frames, name)
        assert set(frame.columns) <= frames.DIFF_COLUMNS.keys()
        empty = frames.typed(frame.head(0), getattr(frames, name))
        assert list(empty.dtypes) == list(frame.dtypes)


def test_markdown_shows_any_text_as_it_is(everything: Difference) -> None:
    text = render_diff_markdown(everything)
    assert "<script>" not in text.replace("\\<script\\>", "")
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in tables)
    assert "| **worse** | numpy.eager | `file/one` | float64 | agree | numeric | `weights` |" in text


def test_rows_for_programs_are_all_rows_and_have_no_nan(everything: Difference) -> None:
    found = {name: rows_of(frame) for name, frame in everything.tables().items()}
    assert [len(rows) for rows in found.values()] == [len(frame) for frame in everything.tables().values()]
    assert found["errors"][0]["after_z"] == float("inf")
    assert not [value for rows in found.values() for row in rows for value in row.values() if value != value]  # noqa: PLR0124


def test_files_are_the_same_bytes_each_time_and_the_frames_come_back(everything: Difference, tmp_path: Path) -> None:
    path = write_difference(everything, tmp_path / "first")
    write_difference(everything, tmp_path / "second")
    assert path == tmp_path / "first" / "diff.md"
    names = sorted(item.name for item in (tmp_path / "first").iterdir())
    assert names == sorted(
        ["diff.md", *(f"diff_{name}.{suffix}" for name in everything.tables() for suffix in ("csv", "parquet"))]
    )
    for name in names:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    for name, frame in everything.tables().items():
        pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "first" / f"diff_{name}.parquet"), frame)


Said = tuple[int, str, str]


@pytest.fixture
def attncheck_diff(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """Run `attncheck diff`; return its exit code, and what it prints to both streams."""

    def run(*arguments: str | Path) -> Said:
        monkeypatch.setattr("sys.argv", ["attncheck", "diff", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        printed = capsys.readouterr()
        return int(end.value.code or 0), printed.out, printed.err

    return run


def test_the_command_ends_with_one_where_something_got_worse_and_only_then(
    attncheck_diff: Callable[..., Said], make_row: MakeRow, write_run: WriteRun, tmp_path: Path
) -> None:
    good, bad = write_run([make_row()], name="good"), write_run([make_row(**FAILS)], name="bad")
    code, out, err = attncheck_diff(good, bad, "--output", tmp_path / "out")
    assert (code, err) == (1, "")
    assert out.splitlines()[0] == f"{good} -> {bad}"
    assert any(line.split()[:2] == ["worse", "numpy.eager"] for line in out.splitlines())
    assert out.endswith(f"Difference: {tmp_path / 'out' / 'diff.md'}\n")
    assert attncheck_diff(bad, good)[0] == 0
    assert attncheck_diff(bad, good, "--quiet") == (0, "", "")
    assert "wrong now" in attncheck_diff(good, bad, "--quiet")[1]
    code, out, _ = attncheck_diff(good, bad, "--json")
    assert (code, json.loads(out)["verdicts"][0]["change"]) == (1, "worse")


def test_the_command_ends_with_two_and_one_line_where_it_cannot_compare(
    attncheck_diff: Callable[..., Said], make_row: MakeRow, write_run: WriteRun, tmp_path: Path
) -> None:
    good = write_run([make_row()], name="good")
    (tmp_path / "empty").mkdir()
    other = write_run([make_row(implementation="torch.eager")], name="other")
    for place in (tmp_path / "nowhere", tmp_path / "empty", good / "environment.json", other):
        code, out, err = attncheck_diff(good, place)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("attncheck: ")
    assert attncheck_diff(good)[0] == 2
