"""What changed between two results: verdicts, errors, cases, expected failures and versions, and what that is worth."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from here import command_here

from attncheck.errors import UsageError
from attncheck.judging.compare import noise_limit, threshold
from attncheck.merge import merge_runs
from attncheck.reports import difference
from attncheck.reports.build_frames import make_frames
from attncheck.reports.difference import (
    CASE_CHANGES,
    ENVIRONMENT_CHANGES,
    ERROR_CHANGES,
    KNOWN_CHANGES,
    VERDICT_CHANGES,
    Difference,
    error_changes,
    make_difference,
    typed,
)
from attncheck.reports.difference_text import (
    WIDTH,
    change_lines,
    render_diff_markdown,
    rows_of,
    sentences,
    shortened,
    write_difference,
)
from attncheck.results.reader import matched_runs, read_runs

Side = Path | list[Path]


def compared(before: Side, after: Side) -> Difference:
    paths = [[side] if isinstance(side, Path) else side for side in (before, after)]
    sides = matched_runs(read_runs(paths[0]), read_runs(paths[1]))
    frames = [make_frames(merge_runs(runs, across=False)) for runs in sides]
    return make_difference(frames[0], frames[1], ("A", "B"))


@pytest.fixture
def pair(hand: Any) -> Callable[..., Difference]:
    """Compare two runs of one evaluation, each given by the fields of its row."""

    def make(before: dict[str, Any], after: dict[str, Any]) -> Difference:
        return compared(
            hand.run([hand.row(**before)], name="before"), hand.run([hand.row(**after)], name="after", exit_code=1)
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


CHANGES = [
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
]


def test_a_verdict_got_worse_where_it_fails_and_did_not_or_gives_nothing_and_did(hand: Any) -> None:
    wanted, rows = {}, ([], [])
    for number, (before, after, change, words) in enumerate(CHANGES):
        wanted[f"file/{number:02}"] = (change, *words)
        for side, fields in zip(rows, (before, after), strict=True):
            side.append(hand.row(case=f"file/{number:02}", **fields))
    sides = [hand.run(each, name=name) for each, name in zip(rows, ("before", "after"), strict=True)]
    found = compared(*sides)
    assert {row.case: (row.change, row.before, row.after) for row in found.verdicts.itertuples()} == wanted
    assert set(found.verdicts["implementation"]) == {"numpy.eager"}
    assert found.exit_code == 1
    spared = [number for number, (_, _, change, _) in enumerate(CHANGES) if change != "worse"]
    sides = [hand.run([each[number] for number in spared], name=f"spared {place}") for place, each in enumerate(rows)]
    assert compared(*sides).exit_code == 0


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


def test_a_stale_entry_does_not_hide_what_fails_beside_it(hand: Any) -> None:
    before = hand.run([hand.row(**KNOWN)], name="before")
    difference = compared(before, hand.run([hand.row(**STALE), hand.row(**FAILS)], name="after"))
    assert list(difference.verdicts["change"]) == ["worse"]


def test_a_pair_that_differs_although_no_stage_is_blamed_counts(hand: Any) -> None:
    rows = [hand.row(verdict="unverified", implementation=name) for name in ("one", "two")]
    apart = hand.row(comparison="pair", implementation="one", other="two", verdict="nonfinite", message="NaN")
    difference = compared(hand.run(rows, name="before"), hand.run([*rows, apart], name="after"))
    (row,) = difference.verdicts.to_dict("records")
    assert (row["before"], row["after"], row["change"]) == ("unverified", "nonfinite", "worse")
    assert row["message"] == "differs from two: NaN"


def test_results_that_say_the_same_have_no_difference(document_run: Path) -> None:
    difference = compared(document_run, document_run)
    assert all(frame.empty for frame in difference.tables().values())
    assert difference.exit_code == 0
    assert difference.only == (0, 0)
    assert difference.compared > 0


def test_cases_that_one_lacks_or_that_are_not_the_same_are_told_with_what_fails_in_them(hand: Any) -> None:
    causal = hand.case("file/both", options={"is_causal": True})
    retitled = hand.case("file/same", title="Another title", tags=["new"], line=99)
    before = hand.run(
        [hand.row(case=f"file/{name}") for name in ("both", "same")] + [hand.row(case="file/old", **FAILS)],
        name="before",
    )
    after = hand.run(
        [hand.row(case=f"file/{name}") for name in ("both", "same")]
        + [hand.row(case="file/new", dtype=dtype, **FAILS) for dtype in ("float64", "float32")],
        name="after",
        cases=[causal, retitled, hand.case("file/new")],
    )
    difference = compared(before, after)
    assert [tuple(row.values()) for row in difference.cases.to_dict("records")] == [
        ("changed", "file/both", 0, "options nothing became {'is_causal': True}"),
        ("added", "file/new", 2, ""),
        ("removed", "file/old", 1, ""),
    ]
    assert difference.exit_code == 0  # a case that is new has not got worse


def test_a_changed_case_is_marked_and_its_errors_are_not_compared(hand: Any) -> None:
    noisy = {"shape": "1x1x1x3", "tier": "within", "ratio": 0.5}
    rows = [hand.row(case=f"file/{name}", largest_z=0.1, **noisy) for name in ("changed", "same")]
    before = hand.run([*rows, hand.row(case="file/fails")], name="before")
    cases = [hand.case(f"file/{name}", inputs={"scores": [1, 1, 1, 4]}) for name in ("changed", "fails")]
    rows = [hand.row(case=f"file/{name}", largest_z=9.0, **noisy) for name in ("changed", "same")]
    after = hand.run(
        [*rows, hand.row(case="file/fails", **FAILS)], name="after", cases=[*cases, hand.case("file/same")]
    )
    difference = compared(before, after)
    assert list(difference.errors["case"]) == ["file/same"]
    (row,) = difference.verdicts.to_dict("records")
    assert (row["case"], row["case_changed"], row["change"]) == ("file/fails", True, "worse")


def test_versions_processors_and_implementations_that_differ_are_told(hand: Any) -> None:
    rows = [hand.row(), hand.row(implementation="torch.eager")]
    before = hand.run(rows, name="before", versions={"numpy.eager": "2.0", "torch.eager": "2.5"})
    after = hand.run(
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


def test_expected_failures_that_appear_and_go_are_told(hand: Any) -> None:
    other = KNOWN | {"reason": "something else"}
    cases = ("file/one", "file/two")
    before = hand.run([hand.row(case=case, **KNOWN) for case in cases], name="before")
    after = hand.run([hand.row(**KNOWN), hand.row(case="file/two", **other)], name="after")
    found = {
        (row.change, row.reason, row.before_cases, row.after_cases)
        for row in compared(before, after).expected_failures.itertuples()
    }
    assert found == {("changed", "it always was", 2, 1), ("appeared", "something else", 0, 1)}


def test_single_runs_are_matched_whatever_their_labels_and_folders_by_label(hand: Any) -> None:
    one, other = hand.run([hand.row()], label="old"), hand.run([hand.row(**FAILS)], label="new")
    difference = compared(one, other)
    assert list(difference.verdicts["environment"]) == ["old -> new"]
    third = hand.run([hand.row()], label="new", name="third")
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


def test_results_without_a_row_are_refused(hand: Any) -> None:
    with pytest.raises(UsageError, match="nothing can be compared: B has no results"):
        compared(hand.run([hand.row()], name="before"), hand.run(name="after"))


def test_what_only_one_has_is_counted_and_an_interrupted_run_is_told(hand: Any) -> None:
    rows = [hand.row(), hand.row(dtype="float32")]
    before, after = hand.run(rows, name="before"), hand.run(rows[:1], name="after", summary=False)
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
def everything(hand: Any) -> Difference:
    """Compare two runs that differ in every way."""
    noisy = {"shape": "1x1x1x3", "tier": "within", "ratio": 0.5, "case": "file/noisy"}
    before = [hand.row(), hand.row(largest_z=0.1, **noisy), hand.row(case="file/old")]
    after = [
        hand.row(**FAILS | {"message": HOSTILE}),
        hand.row(largest_z=float("inf"), **noisy),
        hand.row(case="file/new"),
        hand.row(**KNOWN | {"reason": HOSTILE}, implementation="torch.eager"),
    ]
    return compared(hand.run(before, name="before"), hand.run(after, name="after"))


def test_every_frame_has_documented_columns_of_their_types(everything: Difference) -> None:
    tables = everything.tables()
    wanted = ("VERDICT_CHANGES", "ERROR_CHANGES", "KNOWN_CHANGES", "CASE_CHANGES", "ENVIRONMENT_CHANGES")
    for frame, name in zip(tables.values(), wanted, strict=True):
        assert len(frame)
        assert tuple(frame.columns) == getattr(difference, name)
        assert set(frame.columns) <= difference.DIFF_COLUMNS.keys()
        empty = difference.typed(frame.head(0), getattr(difference, name))
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
def attncheck_diff() -> Callable[..., Said]:
    """Run `attncheck diff`; return its exit code, and what it prints to both streams."""
    return lambda *arguments: command_here(["diff", *arguments])


def test_the_command_ends_with_one_where_something_got_worse_and_only_then(
    attncheck_diff: Callable[..., Said], tmp_path: Path, hand: Any
) -> None:
    good, bad = hand.run([hand.row()], name="good"), hand.run([hand.row(**FAILS)], name="bad")
    code, out, err = attncheck_diff(good, bad, "--output", tmp_path / "out")
    assert (code, err) == (1, "")
    assert out.splitlines()[0] == f"{good} -> {bad}"
    lines = out.splitlines()
    assert "Verdicts, numpy.eager" in lines
    assert any(line.split()[:2] == ["worse", "file/one"] for line in lines)
    assert out.endswith(f"Difference: {tmp_path / 'out' / 'diff.md'}\n")
    assert attncheck_diff(bad, good)[0] == 0
    assert attncheck_diff(bad, good, "--quiet") == (0, "", "")
    assert "wrong now" in attncheck_diff(good, bad, "--quiet")[1]
    code, out, _ = attncheck_diff(good, bad, "--json")
    assert (code, json.loads(out)["verdicts"][0]["change"]) == (1, "worse")


def test_the_command_ends_with_two_and_one_line_where_it_cannot_compare(
    attncheck_diff: Callable[..., Said], tmp_path: Path, hand: Any
) -> None:
    good = hand.run([hand.row()], name="good")
    (tmp_path / "empty").mkdir()
    other = hand.run([hand.row(implementation="torch.eager")], name="other")
    for place in (tmp_path / "nowhere", tmp_path / "empty", good / "environment.json", other):
        code, out, err = attncheck_diff(good, place)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("attncheck: ")
    assert attncheck_diff(good)[0] == 2


Stage = Callable[..., pd.DataFrame]


@pytest.fixture
def stage() -> Stage:
    """Return a frame of one stage of 2x2x16x16 = 1024 elements."""

    def make(**fields: Any) -> pd.DataFrame:
        standard = {
            "environment": "here",
            "implementation": "numpy.eager",
            "case": "file/one",
            "dtype": "float32",
            "stage": "weights",
            "shape": "2x2x16x16",
            "ratio": 0.01,
            "tier": "within",
            "largest_z": 1.0,
            "mean_z": 0.3,
            "introduced_tier": "within",
            "introduced_ratio": 0.01,
            "introduced_z": 1.0,
        }
        return pd.DataFrame([standard | fields])

    return make


LIMIT = noise_limit(1024)


def test_the_limit_of_noise_is_that_of_the_third_tier() -> None:
    assert noise_limit(1) == 3.0  # lambda(1) / 2 = sqrt(2 ln(2e6)) / 2 = 2.69
    assert threshold(1024) / 2 == pytest.approx(3.2742, abs=1e-4)  # ln(2 1024 / 1e-6) = 7.6246 + 13.8155
    assert threshold(1024) / 2 == LIMIT


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        ({}, {}, []),
        ({"largest_z": 1.0}, {"largest_z": LIMIT}, []),  # rounding noise still
        ({"largest_z": 1.0}, {"largest_z": LIMIT + 0.01}, ["grew"]),
        ({"largest_z": LIMIT + 0.01}, {"largest_z": 1.0}, ["shrank"]),
        ({"largest_z": 2.0}, {"largest_z": 3.9}, []),  # beyond noise, and not twice as much
        ({"largest_z": 2.0}, {"largest_z": 4.1}, ["grew"]),
        ({"ratio": 0.01}, {"ratio": 0.99}, []),  # a bound of one rounding is reached by one rounding
        ({"largest_z": 0.1}, {"largest_z": 1.5}, []),
        ({"introduced_z": 1.0}, {"introduced_z": 4.0}, ["grew"]),
        ({"mean_z": 0.3}, {"mean_z": 0.7, "tier": "warning"}, ["grew"]),
        ({"mean_z": 0.5}, {"mean_z": 0.7, "tier": "warning"}, []),
        ({"mean_z": 0.7, "tier": "warning"}, {"mean_z": 0.3}, ["shrank"]),
        ({"largest_z": 50.0, "tier": "proven"}, {"largest_z": 200.0, "tier": "proven"}, ["grew"]),
        ({"largest_z": 50.0, "tier": "proven"}, {"largest_z": 60.0, "tier": "proven"}, []),
        ({"largest_z": 1.0}, {"largest_z": float("inf"), "tier": "proven"}, ["grew"]),
        ({"largest_z": float("nan")}, {"largest_z": 9.0}, []),  # was not measured
    ],
)
def test_an_error_grew_where_it_doubled_and_is_beyond_noise(
    before: dict[str, Any], after: dict[str, Any], changes: list[str], stage: Stage
) -> None:
    assert list(error_changes(stage(**before), stage(**after))["change"]) == changes


def test_a_stage_has_one_line_with_the_measure_in_which_it_is_larger(stage: Stage) -> None:
    (row,) = error_changes(stage(), stage(largest_z=5.0, introduced_z=7.0, introduced_ratio=0.4)).to_dict("records")
    assert (row["measure"], row["before_z"], row["after_z"]) == ("introduced", 1.0, 7.0)
    assert (row["before_ratio"], row["after_ratio"]) == (0.01, 0.4)


def test_a_scalar_and_what_has_no_shape_are_compared_or_not(stage: Stage) -> None:
    assert len(error_changes(stage(shape="scalar"), stage(shape="scalar", largest_z=3.1))) == 1
    assert error_changes(stage(shape=None), stage(shape=None, largest_z=3.1)).empty


def test_the_largest_comes_first(stage: Stage) -> None:
    before = pd.concat([stage(case=name) for name in "abc"])
    after = pd.concat([stage(case=name, largest_z=z) for name, z in (("a", 4.0), ("b", 8.0), ("c", 6.0))])
    assert list(error_changes(before, after)["case"]) == ["b", "c", "a"]


LONG = "kernel_shapes/tiles/no-edge-shows-{}-the-other-corner-of-a-rather-large-tile-128-double-by-under"


def changed(cases: list[str], implementation: str = "torch.compile", message: str = "") -> pd.DataFrame:
    rows = [
        ("worse", "local", implementation, case, "bfloat16", "agree", "", "numeric", "output", False, message)
        for case in cases
    ]
    return typed(pd.DataFrame(rows, columns=list(VERDICT_CHANGES)), VERDICT_CHANGES)


def test_a_verdict_is_one_line_that_says_from_what_to_what() -> None:
    (line,) = change_lines("verdicts", changed(["attention/one"], message="off by 2"), WIDTH)
    assert line == "worse  attention/one  bfloat16  agree -> numeric at output  off by 2"


def test_names_are_cut_in_their_middle_and_stay_apart() -> None:
    lines = change_lines("verdicts", changed([LONG.format("at"), LONG.format("behind")], message="x" * 300), WIDTH)
    assert len(set(lines)) == 2
    for line in lines:
        assert len(line) <= WIDTH
        assert line.startswith("worse  kernel_shapes/")
        assert line.endswith("-by-under  bfloat16  agree -> numeric at output")


def test_several_implementations_stand_in_each_line() -> None:
    frame = pd.concat([changed(["a/b"], "torch.compile"), changed(["a/b"], "jax.jit")])
    lines = change_lines("verdicts", frame, WIDTH)
    assert [line.split()[1] for line in lines] == ["torch.compile", "jax.jit"]


def test_without_a_width_everything_is_in_full() -> None:
    (line,) = change_lines("verdicts", changed([LONG.format("at")], message="off by 2\u2026 " * 30), None)
    assert LONG.format("at") in line
    assert "torch.compile" in line
    assert line.endswith(("off by 2\u2026 " * 30).rstrip())


@pytest.mark.parametrize(
    ("name", "columns", "row", "parts"),
    [
        (
            "errors",
            ERROR_CHANGES,
            ("grew", "e", "i", "a/b", "float32", "scores", "introduced", 1.0, 9.0, 0.1, 0.9, "within", "warning"),
            ("grew", "z 1 -> 9", "0.1 -> 0.9 of the bound (introduced)", "within -> warning"),
        ),
        (
            "expected_failures",
            KNOWN_CHANGES,
            ("appeared", "e", "i", "numeric", "weights", 0, 12, "known", "owner/name#3"),
            ("appeared", "numeric at weights", "0 -> 12 cases", "known owner/name#3"),
        ),
        ("cases", CASE_CHANGES, ("changed", "a/b", 2, "mask differs"), ("changed", "2 failing", "mask differs")),
        (
            "environments",
            ENVIRONMENT_CHANGES,
            ("changed", "local", "torch", "2.9.0", "2.9.1"),
            ("local", "torch", "2.9.0 -> 2.9.1"),
        ),
    ],
)
def test_every_kind_of_change_has_its_line(
    name: str, columns: tuple[str, ...], row: tuple[object, ...], parts: tuple[str, ...]
) -> None:
    (line,) = change_lines(name, typed(pd.DataFrame([row], columns=list(columns)), columns), WIDTH)
    assert all(part in line for part in parts)


def test_a_short_name_stays_and_a_long_one_keeps_both_ends() -> None:
    assert shortened("abcdef", 6) == "abcdef"
    assert shortened("abcdefghij", 7) == "abc\u2026hij"
    assert shortened("abcdefghij", 7, 0.7) == "abcd\u2026ij"
