"""Results on disk: whole or not there, and readable at any time."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from attncheck.errors import OutputError
from attncheck.results.format import FORMAT, Row, StoredArray
from attncheck.results.reader import read_run
from attncheck.results.writer import ResultsWriter

MakeRow = Callable[..., Row]
WriteRun = Callable[..., Path]


def files_of(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


def test_a_row_comes_back_as_it_was_written(make_row: MakeRow, write_run: WriteRun) -> None:
    full = make_row(
        xfail=True, other="second", called="é | `ü`", shape="1x3", index="0,2", value=-0.0, reference=float("inf"),
        reference_text="0.10", difference=5e-324, allowed=1e308, ratio=0.5, half_unit=0.005, propagated=0.0,
        against="step", tier="proven", largest_z=6.5, mean_z=0.25, introduced_tier="statistical",
        introduced_ratio=float("inf"), introduced_z=1e300, begins_at="scores", elements=12, judged_rows=64,
        query_rows=4096, message="a\nb",
    )  # fmt: skip
    rows = [full, make_row(value=float("nan"))]
    run = read_run(write_run(rows))
    first, second = run.rows.astype(object).where(run.rows.notna(), None).to_dict("records")
    assert first == asdict(full)
    assert str(first["value"]) == "-0.0"
    assert second == asdict(replace(rows[1], value=None))


@pytest.mark.parametrize(
    "array",
    [
        np.array([[1.5, np.nan], [-np.inf, -0.0]], dtype=np.float32),
        np.arange(12.0).reshape(3, 4).T,
        np.array(2.5),
        np.zeros((0, 3)),
        np.array([True, False]),
        np.array([1.5], dtype=np.float16),
        np.array([1.5], dtype=">f8"),
        np.broadcast_to(np.float64(2), (2, 2)),
    ],
    ids=["non-finite", "transposed", "without axes", "empty", "boolean", "half", "other byte order", "broadcast"],
)
def test_an_array_comes_back_bit_for_bit(array: np.ndarray[Any, Any], write_run: WriteRun) -> None:
    stored = StoredArray("file/one", "float64", "numpy.eager", "weights", array)
    (read,) = read_run(write_run(arrays=[stored])).arrays().values()
    assert read.shape == array.shape
    assert read.astype(array.dtype.newbyteorder("=")).tobytes() == array.astype(array.dtype.newbyteorder("=")).tobytes()


def test_parts_are_written_when_they_are_full_and_nothing_partial_is_left(
    tmp_path: Path, make_row: MakeRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ResultsWriter, "ROWS_PER_PART", 2)
    monkeypatch.setattr(ResultsWriter, "ARRAY_BYTES_PER_PART", 16)
    writer = ResultsWriter(tmp_path / "out")
    writer.add_rows([make_row(case="file/a")])
    assert files_of(tmp_path / "out") == set()
    writer.add_arrays([StoredArray("file/a", "float64", "numpy.eager", "weights", np.zeros(2))])
    assert files_of(tmp_path / "out") == {"rows/part-00000.parquet", "arrays/part-00000.parquet"}
    writer.add_rows([make_row(case="file/b"), make_row(case="file/c"), make_row(case="file/d")])
    writer.add_rows([make_row(case="file/e")])
    writer.flush()
    writer.flush()
    assert files_of(tmp_path / "out") == {
        "rows/part-00000.parquet",
        "rows/part-00001.parquet",
        "rows/part-00002.parquet",
        "arrays/part-00000.parquet",
    }
    parts = [pq.read_table(path) for path in sorted((tmp_path / "out" / "rows").iterdir())]
    assert [part["case"].to_pylist() for part in parts] == [["file/a"], ["file/b", "file/c", "file/d"], ["file/e"]]


def test_a_part_that_could_not_be_written_is_written_with_the_next_flush(
    tmp_path: Path, make_row: MakeRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = ResultsWriter(tmp_path / "out")
    writer.add_rows([make_row()])
    real = pq.write_table

    def interrupted(table: Any, path: Path, **options: Any) -> None:
        path.write_bytes(b"PAR1 half a file")
        raise KeyboardInterrupt

    monkeypatch.setattr(pq, "write_table", interrupted)
    with pytest.raises(KeyboardInterrupt):
        writer.flush()
    assert files_of(tmp_path / "out") == set()
    monkeypatch.setattr(pq, "write_table", real)
    writer.flush()
    assert pq.read_table(tmp_path / "out" / "rows" / "part-00000.parquet").num_rows == 1
    assert files_of(tmp_path / "out") == {"rows/part-00000.parquet"}


def test_a_full_disk_is_told_in_one_line(tmp_path: Path, make_row: MakeRow, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = ResultsWriter(tmp_path / "out")
    writer.add_rows([make_row()])

    def full(table: Any, path: Path, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    told = r"part-00000\.parquet cannot be written: No space left on device; free some space and .*--resume$"
    with pytest.raises(OutputError, match=told):
        writer.flush()


def test_a_writer_replaces_an_earlier_run_and_its_report(write_run: WriteRun, make_row: MakeRow) -> None:
    directory = write_run([make_row(case="file/old")])
    (directory / "report").mkdir()
    (directory / "report" / "report.md").write_text("They agree.")
    (directory / "logs" / "old.txt").write_text("old")
    (directory / "notes.txt").write_text("mine")
    assert write_run([make_row(case="file/new")], summary=False) == directory
    run = read_run(directory)
    assert list(run.rows["case"]) == ["file/new"]
    assert list(run.cases) == ["file/new"]
    assert run.summary is None
    assert not (directory / "report").exists()
    assert not (directory / "logs" / "old.txt").exists()
    assert (directory / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "content",
    [
        {"notes.txt": "mine"},
        {"logs/server.log": "mine"},
        {"environment.json": '{"name": "of another tool"}', "logs/server.log": "mine"},
        {"environment.json": "not JSON", "rows/data.csv": "mine"},
        {"environment.json": "[]", "report/report.md": "mine"},
        {"environment.json/in-a-folder": "mine"},
        {".git/config": "mine"},
    ],
)
def test_a_folder_with_foreign_content_is_left_alone(content: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "out"
    for name, text in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    with pytest.raises(OutputError, match="is not empty and holds no earlier results; name another folder"):
        ResultsWriter(folder)
    assert {name: (folder / name).read_text() for name in files_of(folder)} == content


def test_a_file_in_the_way_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match="file is a file; expected a folder"):
        ResultsWriter(tmp_path / "file")
    with pytest.raises(OutputError, match="cannot be written: Not a directory"):
        ResultsWriter(tmp_path / "file" / "below")
    assert (tmp_path / "file").read_text() == "mine"


def test_an_empty_folder_that_is_there_is_used(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    ResultsWriter(tmp_path / "out").write_json("environment.json", {"label": "é"})
    assert json.loads((tmp_path / "out" / "environment.json").read_bytes()) == {"format": FORMAT, "label": "é"}


def test_a_command_line_that_is_no_text_is_written_readably(tmp_path: Path) -> None:
    ResultsWriter(tmp_path / "out").write_json("environment.json", {"command": "attncheck caf\udce9.yaml"})
    assert json.loads((tmp_path / "out" / "environment.json").read_bytes())["command"] == "attncheck caf?.yaml"


def test_a_run_that_was_interrupted_is_readable_and_has_no_summary(make_row: MakeRow, write_run: WriteRun) -> None:
    directory = write_run([make_row()], summary=False)
    (directory / "rows" / ".part-00001.parquet.partial").write_bytes(b"half")
    run = read_run(directory)
    assert run.summary is None
    assert len(run.rows) == 1


def test_a_run_that_has_judged_nothing_yet_is_readable(write_run: WriteRun) -> None:
    directory = write_run(summary=False)
    (directory / "cases.json").unlink()
    run = read_run(directory)
    assert (len(run.rows), run.cases, run.arrays()) == (0, {}, {})


def test_a_folder_in_which_a_run_was_killed_at_once_is_used(tmp_path: Path) -> None:
    for name in ("rows", "arrays", "logs"):
        (tmp_path / "out" / name).mkdir(parents=True)
    (tmp_path / "out" / ".environment.json.partial").write_text("{")
    ResultsWriter(tmp_path / "out").write_json("environment.json", {"label": "new"})
    assert files_of(tmp_path / "out") == {"environment.json"}


def test_a_run_that_goes_on_says_throughout_what_it_is(write_run: WriteRun, make_row: MakeRow) -> None:
    directory = write_run([make_row()])
    (directory / ".summary.json.partial").write_text("{")
    ResultsWriter(directory, resume=True)
    assert files_of(directory) == {"environment.json", "cases.json", "rows/part-00000.parquet"}
