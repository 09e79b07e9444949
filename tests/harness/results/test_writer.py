"""Results on disk: whole or not there, readable at any time, and refused in one line when they are something else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from attncheck.harness.errors import OutputError, ResultsError
from attncheck.harness.results.reader import find_runs, read_arrays, read_run, read_runs
from attncheck.harness.results.writer import FORMAT, ResultsWriter, Row, StoredArray

THIS_FORMAT = json.dumps({"format": FORMAT}).encode()

MakeRow = Callable[..., Row]
WriteRun = Callable[..., Path]


def files_of(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


def test_a_row_comes_back_as_it_was_written(make_row: MakeRow, write_run: WriteRun) -> None:
    full = make_row(
        known=True, other="second", called="é | `ü`", shape="1x3", index="0,2", value=-0.0, reference=float("inf"),
        reference_text="0.10", difference=5e-324, allowed=1e308, ratio=0.5, half_unit=0.005, propagated=0.0,
        against="step", tier="T1", largest_z=6.5, mean_z=0.25, introduced_tier="T2", introduced_ratio=float("inf"),
        introduced_z=1e300, begins_at="scores", elements=12, judged_rows=64, query_rows=4096, message="a\nb",
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
    with pytest.raises(OutputError, match=r"part-00000\.parquet cannot be written: No space left on device$"):
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


def break_file(name: str, content: bytes | None) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        if content is None:
            (directory / name).unlink()
        else:
            (directory / name).write_bytes(content)

    return apply


def truncate_rows(directory: Path) -> None:
    path = directory / "rows" / "part-00000.parquet"
    path.write_bytes(path.read_bytes()[:-20])


def drop_column(directory: Path) -> None:
    path = directory / "rows" / "part-00000.parquet"
    pq.write_table(pq.read_table(path).drop(["verdict"]), path)


def other_type(directory: Path) -> None:
    path = directory / "rows" / "part-00000.parquet"
    table = pq.read_table(path)
    pq.write_table(table.set_column(table.schema.get_field_index("value"), "value", [["text"]]), path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda directory: shutil.rmtree(directory), "is not a folder; expected a results directory"),
        (break_file("environment.json", None), "it has no environment.json"),
        (break_file("environment.json", b"{"), "environment.json cannot be read"),
        (break_file("environment.json", b"\xff\xfe"), "environment.json cannot be read"),
        (break_file("environment.json", b"[1]"), "is not what `attncheck run` writes"),
        (break_file("environment.json", b'{"format": 1}'), f"results format 1; this version reads {FORMAT}"),
        (break_file("environment.json", THIS_FORMAT), "it has no label"),
        (break_file("environment.json", b"{}"), "results format None"),
        (break_file("cases.json", b"nonsense"), "cases.json cannot be read"),
        (break_file("cases.json", THIS_FORMAT), "it has no cases"),
        (break_file("summary.json", THIS_FORMAT), "it has no exit_code"),
        (break_file("rows/part-00000.parquet", b""), "part-00000.parquet cannot be read"),
        (break_file("rows/part-00000.parquet", b"PAR1 and no more"), "part-00000.parquet cannot be read"),
        (truncate_rows, "part-00000.parquet cannot be read"),
        (drop_column, "part-00000.parquet cannot be read"),
        (other_type, "part-00000.parquet cannot be read"),
    ],
)  # fmt: skip
def test_what_is_no_results_directory_is_refused_in_one_line(
    damage: Callable[[Path], None], message: str, make_row: MakeRow, write_run: WriteRun
) -> None:
    directory = write_run([make_row()])
    damage(directory)
    with pytest.raises(ResultsError) as refusal:
        read_run(directory)
    assert message in str(refusal.value)
    assert str(directory) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_file_is_no_results_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultsError, match="file is not a folder"):
        read_run(tmp_path / "file")


def test_arrays_that_do_not_fit_their_shape_are_refused_in_one_line(write_run: WriteRun) -> None:
    directory = write_run(arrays=[StoredArray("file/one", "float64", "numpy.eager", "weights", np.zeros(3))])
    path = directory / "arrays" / "part-00000.parquet"
    table = pq.read_table(path)
    pq.write_table(table.set_column(table.schema.get_field_index("data"), "data", [[b"too short"]]), path)
    with pytest.raises(ResultsError, match=r"the array file/one float64 numpy\.eager weights cannot be read"):
        read_arrays(directory)


def test_runs_are_sorted_by_label_and_no_two_may_share_one(make_row: MakeRow, write_run: WriteRun) -> None:
    new, old = write_run([make_row()], label="new"), write_run([make_row()], label="Old")
    assert [run.label for run in read_runs([new, old])] == ["Old", "new"]
    again = write_run([make_row()], label="new", name="again")
    with pytest.raises(ResultsError, match=r"are both labelled 'new'; give each run a --label of its own$"):
        read_runs([new, old, again])


def test_a_folder_of_results_stands_for_every_one_in_it(make_row: MakeRow, write_run: WriteRun, tmp_path: Path) -> None:
    first, second = write_run(label="a", name="matrix/a"), write_run(label="b", name="matrix/b")
    (tmp_path / "matrix" / "notes").mkdir()
    assert find_runs([tmp_path / "matrix"]) == [first, second]
    assert find_runs([second, tmp_path / "matrix", first]) == [second, first]
    assert find_runs([first]) == [first]
    assert find_runs([tmp_path / "nowhere"]) == [tmp_path / "nowhere"]
