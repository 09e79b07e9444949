"""The frames that every report is made of, the arrays that were kept, and both as CSV and Parquet."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pandas as pd
import pytest
from tables import tables_beside

from attncheck.common.errors import OutputError
from attncheck.common.wording import escape_to_one_line
from attncheck.reports.frames import COLUMN_MEANINGS, Column, Frames, KeptArrays, make_frames
from attncheck.reports.merge import merge_runs
from attncheck.reports.write import escape_formula, write_junit, write_report
from attncheck.results.format import EXACT, INPUTS, StoredArray
from attncheck.results.reader import read_run
from attncheck.results.records import CaseRecords

TABLES = tables_beside(__file__)


def test_rows_are_parted_by_kind_in_one_order_with_the_versions_of_both_sides(hand: Any) -> None:
    kinds: list[dict[str, Any]] = [
        {"comparison": "known", "index": "0,0,0,1", "value": 0.5, "reference_text": "0.5"},
        {"comparison": "printed", "stage": "output", "index": "0,0,0,10", "reference_text": "1.0"},
        {"comparison": "printed", "stage": "output", "index": "0,0,0,9", "reference_text": "1.0"},
        {"comparison": "exact", "stage": "output", "index": "0,0,0,11", "reference": 1.0},
        {"comparison": "pair", "other": "torch.eager", "ratio": 1.0, "difference": 1e-9},
        {},
        {"implementation": "torch.eager", "stage": "scores"},
        {"implementation": "torch.eager", "comparison": "pair", "other": "gone"},
    ]
    rows = [hand.row(dtype=dtype, **fields) for dtype in ("float32", "float64") for fields in kinds]
    versions = {"numpy.eager": "2.0", "torch.eager": "3.0"}
    frames = hand.frames(rows, versions=versions)
    assert (len(frames.results), len(frames.pairs), len(frames.numbers)) == (4, 4, 8)
    assert list(frames.numbers["basis"]) == ["known", "exact", "printed", "printed"] * 2
    assert list(frames.numbers["index"])[2:4] == ["0,0,0,9", "0,0,0,10"]
    pairs = frames.pairs[["version", "other_version"]]
    assert pairs.astype(object).where(pairs.notna(), None).values.tolist() == [["2.0", "3.0"], ["3.0", None]] * 2
    assert frames.columns == (Column("local", "numpy.eager", "2.0"), Column("local", "torch.eager", "3.0"))
    for order in (rows[::-1], [*rows[5:], *rows[:5]], sorted(rows, key=repr)):
        for name, frame in hand.frames(order, versions=versions).tables().items():
            pd.testing.assert_frame_equal(frame, frames.tables()[name])
    dtypes, stages = ("float64", "float32", "bfloat16", "float16"), ("scores", "weights", "output", "of its own")
    wanted = [(dtype, stage) for dtype in dtypes for stage in stages]
    found = hand.frames({"dtype": dtype, "stage": stage} for dtype, stage in reversed(wanted)).results
    assert list(zip(found["dtype"], found["stage"], strict=True)) == wanted


def test_notes_say_what_did_not_run_and_what_another_environment_filled(hand: Any) -> None:
    for runs, notes, is_incomplete, has_faults in TABLES["notes"]:
        frames = hand.frames_of(*(hand.run(**run) for run in runs))
        assert (list(frames.notes), bool(frames.problems), frames.has_faults) == (notes, is_incomplete, has_faults)
        assert list(frames.problems) == [note for note in notes if is_incomplete]


def stored(
    array: Any, case: str = "file/one", dtype: str = "float64", name: str = "numpy.eager", stage: str = "output"
) -> StoredArray:
    return StoredArray(case, dtype, name, stage, np.asarray(array))


def test_arrays_come_back_by_environment_implementation_and_stage(hand: Any) -> None:
    half = np.array([[1.5, np.nan]], dtype=ml_dtypes.bfloat16)
    first = hand.run([{}], label="old", arrays=[stored([[1.0, 2.0]]), stored(half, dtype="bfloat16")])
    second = hand.run(
        [{}],
        label="new",
        arrays=[stored([True], name=INPUTS, stage="mask"), stored(0.25, name=EXACT), stored([9.0], case="file/two")],
    )
    arrays = hand.frames_of(first, second).arrays
    found = arrays.arrays_of("file/one", "float64")
    assert {key: array.tolist() for key, array in found.items()} == {
        ("old", "numpy.eager", "output"): [[1.0, 2.0]],
        ("new", INPUTS, "mask"): [True],
        ("new", EXACT, "output"): 0.25,
    }
    (narrow,) = arrays.arrays_of("file/one", "bfloat16").values()
    assert narrow.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(narrow.astype(np.float32), half.astype(np.float32))
    # What cannot be read is as if it were not kept.
    part = first / "arrays" / "part-00000.npz"
    content = part.read_bytes()
    for damage in (content[:200], content[:4] + bytes(len(content) // 2) + content[4 + len(content) // 2 :]):
        part.write_bytes(damage)
        damaged = KeptArrays({"old": first, "new": second}).arrays_of("file/one", "float64")
        assert {environment for environment, _, _ in damaged} == {"new"}


def test_every_frame_is_written_as_csv_and_parquet_the_same_each_time_and_every_column_is_documented(
    document_frames: Frames, document_run: Path, document_report: Path, tmp_path: Path
) -> None:
    """As if workers had answered, and files been written, in another order."""
    tables = document_frames.tables()
    written = contents(document_report)
    assert set(written) == {"report.md", "report.html", "junit.xml"} | {
        f"{name}.{suffix}" for name in tables for suffix in ("csv", "parquet")
    }
    for name, frame in tables.items():
        rows = read_csv(document_report / f"{name}.csv")
        assert (len(rows), list(rows[0])) == (len(frame), list(frame.columns))
        pd.testing.assert_frame_equal(pd.read_parquet(document_report / f"{name}.parquet"), frame, check_dtype=False)
        columns = {column.removeprefix("other_") for column in frame.columns}
        assert name == "environments" or not columns - COLUMN_MEANINGS.keys(), name
    # Numbers in CSV are exact, and lines end alike on every platform.
    values = [float(row["value"]) for row in read_csv(document_report / "numbers.csv")]
    assert values == document_frames.numbers["value"].tolist()
    assert not [name for name, content in written.items() if b"\r" in content and "parquet" not in name]
    run = read_run(document_run)
    environment = dict(reversed(run.environment.items()))
    environment["versions"] = dict(reversed(run.environment["versions"].items()))
    cases = CaseRecords(reversed(list(run.cases.values())))
    shuffled = replace(run, rows=run.rows.sample(frac=1, random_state=7), cases=cases, environment=environment)
    write_report(make_frames(merge_runs([shuffled])), tmp_path)
    assert contents(tmp_path) == written


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


FORMULAS = TABLES["formulas"]


def test_no_text_is_a_formula_in_a_spreadsheet_and_no_value_is_no_cell(tmp_path: Path, hand: Any) -> None:
    rows = [
        hand.row(case=f"file/{number:02}", message=text, implementation=text, value=-0.5)
        for number, text in enumerate(FORMULAS)
    ]
    write_report(hand.frames(rows, label="=1", command="=cmd()"), tmp_path)
    results = read_csv(tmp_path / "results.csv")
    assert {text: escape_formula(text) for text in FORMULAS} == FORMULAS
    assert sorted(row["message"] for row in results) == sorted(
        escape_formula(escape_to_one_line(text)) for text in FORMULAS
    )
    assert all(row["message"] == row["implementation"] and row["environment"] == "'=1" for row in results)
    assert {(row["value"], row["difference"]) for row in results} == {("-0.5", "")}
    (environment,) = read_csv(tmp_path / "environments.csv")
    assert environment["command"] == "'=cmd()"
    # Programs read Parquet, and there a formula is what it was.
    assert sorted(pd.read_parquet(tmp_path / "results.parquet")["message"]) == sorted(map(escape_to_one_line, FORMULAS))
    for text in ("=1", "a;=1", "\r=1", "'=1"):
        assert escape_formula(escape_formula(text)) == escape_formula(text)


def test_what_cannot_be_written_is_told_in_one_line_and_nothing_is_a_report_too(
    hand: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OutputError, match=r"file(/below)? cannot be written: [^\n]+$"):
            write_report(hand.frames(), folder)
    assert (tmp_path / "file").read_text() == "mine"
    write_junit(hand.frames(), tmp_path / "new" / "all.xml")
    with pytest.raises(OutputError, match=r"new cannot be written: [^\n]+$"):
        write_junit(hand.frames(), tmp_path / "new")
    write_report(hand.frames(), tmp_path / "report")
    assert read_csv(tmp_path / "report" / "results.csv") == []
    # A table of many rows is written as Parquet only, and its CSV goes.
    monkeypatch.setattr("attncheck.reports.write._MAX_FRAME_ROWS", 1)
    write_report(hand.frames([{}, {"stage": "output"}]), tmp_path / "report")
    assert not (tmp_path / "report" / "results.csv").exists()
    assert len(pd.read_parquet(tmp_path / "report" / "results.parquet")) == 2
