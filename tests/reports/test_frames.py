"""The frames that every report is made of, in one order whatever order they came in, and the arrays that were kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from attncheck.reports.arrays import KeptArrays, error_ratio
from attncheck.reports.build_frames import COLUMNS
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
from attncheck.results.format import EXACT, INPUTS, Row, StoredArray, bound_name
from attncheck.results.reader import read_runs
from attncheck.verdicts import Verdict


@pytest.fixture
def rows(hand: Any) -> Sequence[Row]:
    """One row of each kind, in two dtypes."""
    return [
        row
        for dtype in ("float32", "float64")
        for row in (
            hand.row(dtype=dtype, comparison="known", index="0,0,0,1", value=0.5, reference_text="0.5"),
            hand.row(dtype=dtype, comparison="printed", stage="output", index="0,0,0,10", reference_text="1.0"),
            hand.row(dtype=dtype, comparison="printed", stage="output", index="0,0,0,9", reference_text="1.0"),
            hand.row(dtype=dtype, comparison="exact", stage="output", index="0,0,0,11", reference=1.0),
            hand.row(dtype=dtype, comparison="pair", other="torch.eager", ratio=1.0, difference=1e-9),
            hand.row(dtype=dtype),
            hand.row(dtype=dtype, implementation="torch.eager", stage="scores"),
            hand.row(dtype=dtype, implementation="torch.eager", stage="weights"),
        )
    ]


def test_rows_are_parted_by_kind(rows: Sequence[Row], hand: Any) -> None:
    frames = hand.frames(rows, versions={"numpy.eager": "2.0", "torch.eager": "3.0"})
    assert (len(frames.results), len(frames.pairs), len(frames.numbers)) == (6, 2, 8)
    assert list(frames.numbers["basis"]) == ["known", "exact", "printed", "printed"] * 2
    assert set(frames.results["version"]) == {"2.0", "3.0"}
    assert set(frames.pairs["other_version"]) == {"3.0"}
    assert frames.columns == (Column("local", "numpy.eager", "2.0"), Column("local", "torch.eager", "3.0"))


def test_the_order_in_which_results_were_written_does_not_matter(rows: Sequence[Row], hand: Any) -> None:
    wanted = hand.frames(rows)
    for order in (rows[::-1], [*rows[5:], *rows[:5]], sorted(rows, key=repr)):
        found = hand.frames(order, versions={"numpy.eager": "1.0", "torch.eager": "1.0"}, name="again")
        for name, frame in found.tables().items():
            pd.testing.assert_frame_equal(frame, wanted.tables()[name])


def test_every_column_is_documented(document_frames: Frames) -> None:
    for name in ("results", "pairs", "numbers"):
        columns = set(document_frames.tables()[name].columns)
        undocumented = {column.removeprefix("other_") for column in columns} - COLUMNS.keys()
        assert not undocumented, name


def test_two_environments_are_told_apart(hand: Any) -> None:
    frames = hand.frames_of(
        hand.run([hand.row()], label="old", versions={"numpy.eager": "1.0"}, exit_code=1),
        hand.run([hand.row()], label="new", versions={"numpy.eager": "2.0"}, summary=False, flags={"B": "2", "A": "1"}),
    )
    assert frames.columns == (Column("new", "numpy.eager", "2.0"), Column("old", "numpy.eager", "1.0"))
    assert frames.columns[0].title(with_environment=False) == "numpy.eager 2.0"
    assert frames.columns[0].title(with_environment=True) == "numpy.eager 2.0 (new)"
    assert list(frames.environments["environment"]) == ["new", "old"]
    assert list(frames.environments["complete"]) == [False, True]
    assert list(frames.environments["version_numpy.eager"]) == ["2.0", "1.0"]
    assert frames.environments["flags"][0] == "A=1 B=2"
    assert frames.environments["exit_code"].isna().tolist() == [True, False]


def test_notes_say_what_did_not_run_and_whether_that_was_asked_for(hand: Any) -> None:
    frames = hand.frames(left_out={"jax": "not installed"})
    assert frames.notes == ("jax was left out: not installed",)
    assert not frames.is_incomplete
    frames = hand.frames(missing={"jax": "asked for by name, not installed"})
    assert frames.notes == ("jax could not run: asked for by name, not installed",)
    assert (frames.is_incomplete, frames.has_faults) == (True, False)
    frames = hand.frames(faults=["x.yaml:3: wrong"], summary=False)
    assert frames.notes == (
        "bad case: x.yaml:3: wrong",
        "this run was interrupted, or is still going on: its results are not complete",
    )
    assert (frames.is_incomplete, frames.has_faults) == (True, True)
    both = hand.frames_of(hand.run(label="a", left_out={"jax": "not installed"}), hand.run(label="b"))
    assert both.notes == ("a: jax was left out: not installed",)


def test_what_fails_is_what_the_exit_code_counts_and_nothing_known(hand: Any) -> None:
    rows = [
        hand.row(case=f"file/{verdict}", verdict=verdict, stage=stage, xfail=stage == "scores")
        for verdict in Verdict
        for stage in ("weights", "scores")
    ]
    found = failing(hand.frames(rows).results)
    assert set(found["stage"]) == {"weights"}
    assert sorted(found["verdict"]) == sorted(verdict for verdict in Verdict if verdict.exit_code)


def test_stages_are_ordered_as_attention_computes_them_and_others_come_last() -> None:
    names = ["row_maxima", "output", "weights", "", "query", "scores", "raw_scores", "an_own_one"]
    assert sorted(names, key=stage_order) == [
        "query", "raw_scores", "scores", "weights", "output", "", "an_own_one", "row_maxima",
    ]  # fmt: skip


def test_results_without_a_row_make_empty_frames(hand: Any) -> None:
    frames = hand.frames()
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


def test_numbers_under_an_erratum_are_told_from_the_others(hand: Any) -> None:
    given = {"basis": "printed", "transpose": False, "shape": [1, 1, 1, 3]}
    expected = [
        {"name": "weights", "of": "weights", "erratum": "Of another call.", **given},
        {"name": "output", "of": "output", **given},
    ]
    numbers = [
        hand.row(comparison="printed", stage=stage, index=f"0,0,0,{place}", implementation=name)
        for stage in ("weights", "output")
        for place in range(3)
        for name in ("numpy.eager", "torch.eager")
    ]
    frames = hand.frames(numbers, cases=[hand.case(expected=expected)])
    flags = under_erratum(frames, frames.numbers)
    assert set(frames.numbers[flags]["stage"]) == {"weights"}
    assert flags.sum() == 6
    assert count_numbers(frames.numbers) == 6
    assert read_runs([]) == []


def test_rows_that_were_judged_are_whole_numbers_beside_cells_that_are_empty(hand: Any) -> None:
    rows = [hand.row(judged_rows=64, query_rows=4096), hand.row(stage="scores"), hand.row(comparison="pair", other="b")]
    csv = hand.frames(rows).results[["judged_rows", "query_rows"]].to_csv(index=False)
    assert csv == "judged_rows,query_rows\n,\n64,4096\n"
    csv = hand.frames([hand.row()]).results[["judged_rows", "query_rows"]].to_csv(index=False)
    assert csv == "judged_rows,query_rows\n,\n"


def test_what_one_environment_lacks_and_another_ran_is_filled_and_misses_nothing(hand: Any) -> None:
    lacks = hand.run([hand.row()], label="a", missing={"torch": "not installed"}, left_out={"jax": "not installed"})
    has = hand.run([hand.row(implementation="torch.eager")], label="b")
    alone, both = hand.frames_of(lacks), hand.frames_of(lacks, has)
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


def test_rows_are_sorted_by_dtype_stage_and_index_and_not_by_their_spelling(hand: Any) -> None:
    wanted = [
        (dtype, stage, index)
        for dtype in ("float64", "float32", "bfloat16", "float16")
        for stage in ("scores", "weights", "output", "a name of its own")
        for index in ("0,2", "0,10", "1,0")
    ]
    rows = [
        hand.row(comparison="known", dtype=dtype, stage=stage, index=index) for dtype, stage, index in reversed(wanted)
    ]
    numbers = hand.frames(rows).numbers
    assert list(zip(numbers["dtype"], numbers["stage"], numbers["index"], strict=True)) == wanted


def test_versions_are_those_of_the_row_and_of_the_other_side(hand: Any) -> None:
    rows = [
        hand.row(implementation="a"),
        hand.row(implementation="b"),
        hand.row(comparison="pair", implementation="a", other="b"),
        hand.row(comparison="pair", implementation="b", other="gone"),
    ]
    frames = hand.frames(rows, versions={"a": "1.0", "b": "2.0"})
    assert list(frames.results["version"]) == ["1.0", "2.0"]
    pairs = frames.pairs[["version", "other_version"]]
    assert pairs.astype(object).where(pairs.notna(), None).values.tolist() == [["1.0", "2.0"], ["2.0", None]]


def test_what_is_made_of_frames_alone_is_made_once(document_run: Path, hand: Any) -> None:
    calls: list[Frames] = []
    counted = once_for_frames(lambda frames: calls.append(frames) or len(calls))  # type: ignore[func-returns-value]
    first, second = hand.frames_of(document_run), hand.frames_of(document_run)
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


def stored(
    array: Any, case: str = "file/one", dtype: str = "float64", name: str = "numpy.eager", stage: str = "output"
) -> StoredArray:
    return StoredArray(case, dtype, name, stage, np.asarray(array))


def test_arrays_come_back_by_environment_implementation_and_stage(hand: Any) -> None:
    half = np.array([[1.5, np.nan]], dtype=ml_dtypes.bfloat16)
    first = hand.run([hand.row()], label="old", arrays=[stored([[1.0, 2.0]]), stored(half, dtype="bfloat16")])
    second = hand.run(
        [hand.row()],
        label="new",
        arrays=[stored([True], name=INPUTS, stage="mask"), stored(0.25, name=EXACT), stored([9.0], case="file/two")],
    )
    arrays = hand.frames_of(first, second).arrays
    found = arrays.of("file/one", "float64")
    assert {key: array.tolist() for key, array in found.items()} == {
        ("old", "numpy.eager", "output"): [[1.0, 2.0]],
        ("new", INPUTS, "mask"): [True],
        ("new", EXACT, "output"): 0.25,
    }
    (narrow,) = arrays.of("file/one", "bfloat16").values()
    assert narrow.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(narrow.astype(np.float32), half.astype(np.float32))
    assert arrays.units() == (("file/one", "bfloat16"), ("file/one", "float64"), ("file/two", "float64"))


def test_what_was_not_kept_is_empty(hand: Any) -> None:
    assert KeptArrays().of("a", "float64") == {}
    assert KeptArrays().units() == ()
    arrays = KeptArrays({"local": hand.run()})
    assert arrays.of("file/one", "float64") == {}


def test_only_the_row_groups_that_are_asked_for_are_read_and_few_stay_in_memory(
    monkeypatch: pytest.MonkeyPatch, hand: Any
) -> None:
    directory = hand.run(arrays=[stored(np.full(3, n), case=f"file/{n}") for n in range(8)])
    (part,) = (directory / "arrays").glob("*.parquet")
    pq.write_table(pq.read_table(part), part, row_group_size=2)
    read: list[int] = []
    whole = pq.ParquetFile.read_row_groups

    def counted(self: Any, groups: list[int], columns: list[str]) -> Any:
        if "data" in columns:
            read.extend(groups)
        return whole(self, groups, columns=columns)

    monkeypatch.setattr(pq.ParquetFile, "read_row_groups", counted)
    arrays = KeptArrays({"local": directory})
    assert arrays.units()[-1] == ("file/7", "float64")
    assert read == []
    for case in (5, 4, 5, 0, 7):
        assert arrays.of(f"file/{case}", "float64")["local", "numpy.eager", "output"].tolist() == [case] * 3
    assert read == [2, 0, 3]
    arrays.of("file/4", "float64")  # no longer in memory
    assert read == [2, 0, 3, 2]


def damage_footer(part: Path) -> None:
    part.write_bytes(part.read_bytes()[:200])


def damage_data(part: Path) -> None:
    content = part.read_bytes()
    part.write_bytes(content[:4] + bytes(len(content) // 2) + content[4 + len(content) // 2 :])


@pytest.mark.parametrize("damage", [damage_footer, damage_data])
def test_what_cannot_be_read_is_as_if_it_were_not_kept(damage: Callable[[Path], None], hand: Any) -> None:
    first, second = (hand.run(arrays=[stored(np.arange(99.0))], name=name) for name in ("first", "second"))
    damage(first / "arrays" / "part-00000.parquet")
    found = KeptArrays({"a": first, "b": second}).of("file/one", "float64")
    assert list(found) == [("b", "numpy.eager", "output")]


def test_the_error_ratio_is_nan_where_nothing_is_judged_and_infinite_where_nan_stands_alone() -> None:
    nan, inf = np.nan, np.inf
    computed = np.array([1.5, 1.0, 7.0, 7.0, nan, nan, inf, 2.0])
    exact = np.array([1.0, 1.0, nan, 1.0, nan, 1.0, inf, 1.0])
    allowed = np.array([0.25, 0.0, inf, nan, 0.0, 0.5, 0.0, 0.0])
    np.testing.assert_array_equal(error_ratio(computed, exact, allowed), [2.0, 0.0, nan, nan, 0.0, inf, 0.0, inf])


def test_the_error_ratio_of_a_real_run_is_what_its_rows_say(document_frames: Frames) -> None:
    rows = document_frames.results
    rows = rows[(rows["dtype"] == "float32") & (rows["ratio"] > 0) & rows["case"].str.contains("base_r")]
    assert len(rows) > 4
    for row in rows.itertuples():
        kept = document_frames.arrays.of(row.case, "float32")
        computed, exact, bound = (
            kept[row.environment, name, row.stage] for name in (row.implementation, EXACT, bound_name("native"))
        )
        assert np.nanmax(error_ratio(computed, exact, bound)) == pytest.approx(row.ratio, rel=1e-6)
