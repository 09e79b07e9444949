"""The frames that every report is made of: complete, documented, and in one order whatever order they came in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from attncheck.merge import merge_runs
from attncheck.reports.columns import COLUMNS
from attncheck.reports.frames import (
    Column,
    Frames,
    case_order,
    count_numbers,
    documents_of,
    failing,
    once_for_frames,
    records,
    stage_order,
    under_erratum,
)
from attncheck.reports.making import make_frames
from attncheck.results.format import Row
from attncheck.results.reader import read_run, read_runs
from attncheck.verdicts import Verdict

MakeRow = Callable[..., Row]
WriteRun = Callable[..., Path]
FramesOf = Callable[..., Frames]


@pytest.fixture
def rows(make_row: MakeRow) -> Sequence[Row]:
    """One row of each kind, in two dtypes."""
    return [
        row
        for dtype in ("float32", "float64")
        for row in (
            make_row(dtype=dtype, comparison="known", index="0,0,0,1", value=0.5, reference_text="0.5"),
            make_row(dtype=dtype, comparison="printed", stage="output", index="0,0,0,10", reference_text="1.0"),
            make_row(dtype=dtype, comparison="printed", stage="output", index="0,0,0,9", reference_text="1.0"),
            make_row(dtype=dtype, comparison="exact", stage="output", index="0,0,0,11", reference=1.0),
            make_row(dtype=dtype, comparison="pair", other="torch.eager", ratio=1.0, difference=1e-9),
            make_row(dtype=dtype),
            make_row(dtype=dtype, implementation="torch.eager", stage="scores"),
            make_row(dtype=dtype, implementation="torch.eager", stage="weights"),
        )
    ]


def test_rows_are_parted_by_kind(rows: Sequence[Row], write_run: WriteRun, frames_of: FramesOf) -> None:
    frames = frames_of(write_run(rows, versions={"numpy.eager": "2.0", "torch.eager": "3.0"}))
    assert (len(frames.results), len(frames.pairs), len(frames.numbers)) == (6, 2, 8)
    assert list(frames.numbers["basis"]) == ["known", "exact", "printed", "printed"] * 2
    assert set(frames.results["version"]) == {"2.0", "3.0"}
    assert set(frames.pairs["other_version"]) == {"3.0"}
    assert frames.columns == (Column("local", "numpy.eager", "2.0"), Column("local", "torch.eager", "3.0"))


def test_rows_are_sorted_by_dtype_stage_and_index_as_people_count(
    rows: Sequence[Row], write_run: WriteRun, frames_of: FramesOf
) -> None:
    frames = frames_of(write_run(rows))
    assert list(frames.results["dtype"]) == ["float64"] * 3 + ["float32"] * 3
    own = frames.results[frames.results["implementation"] == "torch.eager"]
    assert list(own["stage"]) == ["scores", "weights"] * 2
    assert list(frames.numbers["index"]) == ["0,0,0,1", "0,0,0,11", "0,0,0,9", "0,0,0,10"] * 2


def test_the_order_in_which_results_were_written_does_not_matter(
    rows: Sequence[Row], write_run: WriteRun, frames_of: FramesOf
) -> None:
    wanted = frames_of(write_run(rows))
    for order in (rows[::-1], [*rows[5:], *rows[:5]], sorted(rows, key=repr)):
        found = frames_of(write_run(order, versions={"numpy.eager": "1.0", "torch.eager": "1.0"}, name="again"))
        for name, frame in found.tables().items():
            pd.testing.assert_frame_equal(frame, wanted.tables()[name])


def test_real_results_give_the_same_frames_when_their_rows_are_shuffled(document_run: Path) -> None:
    run = read_run(document_run)
    wanted = make_frames(merge_runs([run])).tables()
    shuffled = replace(run, rows=run.rows.sample(frac=1, random_state=1))
    for name, frame in make_frames(merge_runs([shuffled])).tables().items():
        pd.testing.assert_frame_equal(frame, wanted[name])


def test_every_column_is_documented(document_frames: Frames) -> None:
    for name in ("results", "pairs", "numbers"):
        columns = set(document_frames.tables()[name].columns)
        undocumented = {column.removeprefix("other_") for column in columns} - COLUMNS.keys()
        assert not undocumented, name


def test_two_environments_are_told_apart(write_run: WriteRun, make_row: MakeRow, frames_of: FramesOf) -> None:
    frames = frames_of(
        write_run([make_row()], label="old", versions={"numpy.eager": "1.0"}, exit_code=1),
        write_run(
            [make_row()], label="new", versions={"numpy.eager": "2.0"}, summary=False, flags={"B": "2", "A": "1"}
        ),
    )
    assert frames.columns == (Column("new", "numpy.eager", "2.0"), Column("old", "numpy.eager", "1.0"))
    assert frames.columns[0].title(with_environment=False) == "numpy.eager 2.0"
    assert frames.columns[0].title(with_environment=True) == "numpy.eager 2.0 (new)"
    assert list(frames.environments["environment"]) == ["new", "old"]
    assert list(frames.environments["complete"]) == [False, True]
    assert list(frames.environments["version_numpy.eager"]) == ["2.0", "1.0"]
    assert frames.environments["flags"][0] == "A=1 B=2"
    assert frames.environments["exit_code"].isna().tolist() == [True, False]


def test_notes_say_what_did_not_run_and_whether_that_was_asked_for(write_run: WriteRun, frames_of: FramesOf) -> None:
    frames = frames_of(write_run(left_out={"jax": "not installed"}))
    assert frames.notes == ("jax was left out: not installed",)
    assert not frames.is_incomplete
    frames = frames_of(write_run(missing={"jax": "asked for by name, not installed"}))
    assert frames.notes == ("jax could not run: asked for by name, not installed",)
    assert (frames.is_incomplete, frames.has_faults) == (True, False)
    frames = frames_of(write_run(faults=["x.yaml:3: wrong"], summary=False))
    assert frames.notes == (
        "bad case: x.yaml:3: wrong",
        "this run was interrupted, or is still going on: its results are not complete",
    )
    assert (frames.is_incomplete, frames.has_faults) == (True, True)
    both = frames_of(write_run(label="a", left_out={"jax": "not installed"}), write_run(label="b"))
    assert both.notes == ("a: jax was left out: not installed",)


@pytest.mark.parametrize("verdict", Verdict)
def test_what_fails_is_what_the_exit_code_counts_and_nothing_known(
    verdict: Verdict, make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    frames = frames_of(write_run([make_row(verdict=verdict), make_row(verdict=verdict, stage="scores", xfail=True)]))
    assert list(failing(frames.results)["stage"]) == (["weights"] if verdict.exit_code else [])


def test_stages_are_ordered_as_attention_computes_them_and_others_come_last() -> None:
    names = ["row_maxima", "output", "weights", "", "query", "scores", "raw_scores", "an_own_one"]
    assert sorted(names, key=stage_order) == [
        "query", "raw_scores", "scores", "weights", "output", "", "an_own_one", "row_maxima",
    ]  # fmt: skip


def test_results_without_a_row_make_empty_frames(write_run: WriteRun, frames_of: FramesOf) -> None:
    frames = frames_of(write_run())
    assert [len(frame) for frame in frames.tables().values()] == [0, 0, 0, 1]
    assert (frames.columns, frames.cases, frames.notes) == ((), {}, ())


def test_documents_come_first_and_in_the_order_of_their_file(document_frames: Frames) -> None:
    documents = documents_of(document_frames)
    assert list(documents) == sorted(documents)
    assert len(documents) == 7
    for cases in documents.values():
        assert [case["line"] for case in cases] == sorted(case["line"] for case in cases)
    ordered = sorted(document_frames.cases.values(), key=case_order)
    kinds = [case["source"]["kind"] == "document" for case in ordered]
    assert kinds == sorted(kinds, reverse=True)
    assert not kinds[-1]


def test_numbers_under_an_erratum_are_told_from_the_others(
    make_row: MakeRow, make_case_record: Callable[..., dict[str, object]], write_run: WriteRun, frames_of: FramesOf
) -> None:
    given = {"basis": "printed", "transpose": False, "shape": [1, 1, 1, 3]}
    expected = [
        {"name": "weights", "of": "weights", "erratum": "Of another call.", **given},
        {"name": "output", "of": "output", **given},
    ]
    numbers = [
        make_row(comparison="printed", stage=stage, index=f"0,0,0,{place}", implementation=name)
        for stage in ("weights", "output")
        for place in range(3)
        for name in ("numpy.eager", "torch.eager")
    ]
    frames = frames_of(write_run(numbers, cases=[make_case_record(expected=expected)]))
    flags = under_erratum(frames, frames.numbers)
    assert set(frames.numbers[flags]["stage"]) == {"weights"}
    assert flags.sum() == 6
    assert count_numbers(frames.numbers) == 6
    assert read_runs([]) == []


def test_rows_that_were_judged_are_whole_numbers_beside_cells_that_are_empty(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    rows = [make_row(judged_rows=64, query_rows=4096), make_row(stage="scores"), make_row(comparison="pair", other="b")]
    csv = frames_of(write_run(rows)).results[["judged_rows", "query_rows"]].to_csv(index=False)
    assert csv == "judged_rows,query_rows\n,\n64,4096\n"
    csv = frames_of(write_run([make_row()])).results[["judged_rows", "query_rows"]].to_csv(index=False)
    assert csv == "judged_rows,query_rows\n,\n"


def test_what_one_environment_lacks_and_another_ran_is_filled_and_misses_nothing(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    lacks = write_run([make_row()], label="a", missing={"torch": "not installed"}, left_out={"jax": "not installed"})
    has = write_run([make_row(implementation="torch.eager")], label="b")
    alone, both = frames_of(lacks), frames_of(lacks, has)
    assert alone.is_incomplete
    assert alone.problems == ("torch could not run: not installed",)
    assert not both.is_incomplete
    assert [(column.environment, column.implementation) for column in both.columns] == [
        ("a", "numpy.eager"),
        ("b", "torch.eager"),
    ]
    assert both.notes == (
        "a: jax was left out: not installed",
        "a: torch could not run: not installed; b ran it",
    )


def test_rows_are_sorted_by_dtype_stage_and_index_and_not_by_their_spelling(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    wanted = [
        (dtype, stage, index)
        for dtype in ("float64", "float32", "bfloat16", "float16")
        for stage in ("scores", "weights", "output", "a name of its own")
        for index in ("0,2", "0,10", "1,0")
    ]
    rows = [
        make_row(comparison="known", dtype=dtype, stage=stage, index=index) for dtype, stage, index in reversed(wanted)
    ]
    numbers = frames_of(write_run(rows)).numbers
    assert list(zip(numbers["dtype"], numbers["stage"], numbers["index"], strict=True)) == wanted


def test_versions_are_those_of_the_row_and_of_the_other_side(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    rows = [
        make_row(implementation="a"),
        make_row(implementation="b"),
        make_row(comparison="pair", implementation="a", other="b"),
        make_row(comparison="pair", implementation="b", other="gone"),
    ]
    frames = frames_of(write_run(rows, versions={"a": "1.0", "b": "2.0"}))
    assert list(frames.results["version"]) == ["1.0", "2.0"]
    pairs = frames.pairs[["version", "other_version"]]
    assert pairs.astype(object).where(pairs.notna(), None).values.tolist() == [["1.0", "2.0"], ["2.0", None]]


def test_what_is_made_of_frames_alone_is_made_once(document_run: Path, frames_of: FramesOf) -> None:
    calls: list[Frames] = []
    counted = once_for_frames(lambda frames: calls.append(frames) or len(calls))  # type: ignore[func-returns-value]
    first, second = frames_of(document_run), frames_of(document_run)
    assert [counted(each) for each in (first, first, second, first)] == [1, 1, 2, 1]


def test_records_are_those_of_pandas(document_frames: Frames) -> None:
    odd = pd.DataFrame(
        {
            "texts": pd.Series(["a", None, "b"], dtype="str"),
            "counts": pd.Series([1, None, 3], dtype="Int64"),
            "floats": [1.5, float("nan"), float("inf")],
            "whole": [1, 2, 3],
            "flags": [True, False, True],
            "mixed": ["x", None, 3],
        }
    )
    for frame in (*document_frames.tables().values(), document_frames.results[:0], odd):
        expected, found = frame.to_dict("records"), records(frame)
        assert [list(row) for row in found] == [list(row) for row in expected]
        assert repr(found) == repr(expected)
        kinds = [[type(value) for value in row.values()] for row in expected]
        assert [[type(value) for value in row.values()] for row in found] == kinds
