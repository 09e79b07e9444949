"""Results on disk: rows, arrays and records of cases are whole or not there, and come back as they were."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import tables_beside

from attncheck.dtypes import numpy_dtype
from attncheck.errors import OutputError, ResultsError
from attncheck.results.format import Row, StoredArray
from attncheck.results.parts import decode_array
from attncheck.results.reader import read_run
from attncheck.results.records import CaseRecords, cases_text, read_cases
from attncheck.results.writer import ResultsWriter

MakeRow = Callable[..., Row]
WriteRun = Callable[..., Path]
MakeRecord = Callable[..., dict[str, Any]]


def files_of(directory: Path) -> set[str]:
    """Return the files of a directory, except for the one that says who writes there."""
    files = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
    return files - {".writer.partial"}


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


ARRAYS = {
    "non-finite": np.array([[1.5, np.nan], [-np.inf, -0.0]], dtype=np.float32),
    "transposed": np.arange(12.0).reshape(3, 4).T,
    "without axes": np.array(2.5),
    "empty": np.zeros((0, 3)),
    "other byte order": np.array([1.5], dtype=">f8"),
    "broadcast": np.broadcast_to(np.float64(2), (2, 2)),
    **{
        name: np.arange(6).reshape(2, 3).astype(numpy_dtype(name))
        for name in ("float64", "float16", "bfloat16", "complex64", "int8", "uint32", "bool")
    },
}


def test_an_array_comes_back_bit_for_bit(write_run: WriteRun) -> None:
    stored = [StoredArray("file/one", "float64", name, "weights", array) for name, array in ARRAYS.items()]
    read = {key[2]: array for key, array in read_run(write_run(arrays=stored)).arrays().items()}
    for name, array in ARRAYS.items():
        own, back = (each.astype(each.dtype.newbyteorder("=")) for each in (array, read[name]))
        assert (back.shape, back.dtype, back.tobytes()) == (own.shape, own.dtype, own.tobytes()), name


def test_full_parts_are_written_whole(tmp_path: Path, make_row: MakeRow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ResultsWriter, "ROWS_PER_PART", 2)
    monkeypatch.setattr(ResultsWriter, "ARRAY_BYTES_PER_PART", 16)
    writer, rows = ResultsWriter(tmp_path), {name: make_row(case=name) for name in "abcde"}
    writer.add_rows([rows["a"]])
    assert files_of(tmp_path) == set()
    writer.add_arrays([StoredArray("a", "float64", "numpy.eager", "weights", np.zeros(2))])
    assert files_of(tmp_path) == {"rows/part-00000.parquet", "arrays/part-00000.parquet"}
    writer.add_rows([rows[name] for name in "bcd"])
    writer.add_rows([rows["e"]])
    for _ in range(2):
        writer.flush()
    assert files_of(tmp_path) == {
        "arrays/part-00000.parquet",
        *(f"rows/part-0000{number}.parquet" for number in range(3)),
    }
    parts = [pq.read_table(path) for path in sorted((tmp_path / "rows").iterdir())]
    assert [part["case"].to_pylist() for part in parts] == [["a"], ["b", "c", "d"], ["e"]]


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


def test_a_folder_with_foreign_content_is_left_alone(tmp_path: Path) -> None:
    for number, content in enumerate(tables_beside(__file__)["foreign"]):
        folder = tmp_path / str(number)
        for name, text in content.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        with pytest.raises(OutputError, match="is not empty and holds no earlier results; name another folder"):
            ResultsWriter(folder)
        assert {name: (folder / name).read_text() for name in files_of(folder)} == content


def test_a_folder_that_a_living_process_writes_to_and_one_whose_name_is_no_text_are_refused(tmp_path: Path) -> None:
    of_this_process = ResultsWriter(tmp_path)
    claim = tmp_path / ".writer.partial"
    node, _, _ = claim.read_text().rsplit(" ", 2)
    other = psutil.Process(os.getppid())
    claim.write_text(f"{node} {other.pid} {other.create_time()}")
    with pytest.raises(OutputError, match=rf"another run writes there \(process {other.pid}\); wait for it, or name"):
        ResultsWriter(tmp_path)
    claim.write_text(f"{node} {other.pid} {other.create_time() - 1000}")  # another process had this number
    ResultsWriter(tmp_path)
    of_this_process.write_json("summary.json", {})
    assert not claim.exists()
    with pytest.raises(OutputError, match=r"bad\?: the folder's name is not UTF-8"):
        ResultsWriter(Path("bad\udcff"))


TEXTS = st.text(max_size=30)
CONTENT = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
)


@given(st.dictionaries(TEXTS, CONTENT, max_size=8), st.sampled_from([0, 1, 300]))
def test_what_is_packed_comes_back(contents: dict[str, Any], longer: int) -> None:
    records = {identity: {"id": identity, "content": [content] * longer} for identity, content in contents.items()}
    packed = CaseRecords(records.values())
    assert (dict(packed), list(packed), len(packed)) == (records, list(records), len(records))


LAYOUTS: list[Callable[[str], str]] = [
    lambda text: text,
    lambda text: json.dumps(json.loads(text)),
    lambda text: json.dumps(json.loads(text), indent=1),
    lambda text: text + "\n",
    lambda text: text.replace("\n", "\n\n"),
    lambda text: text.replace("\n", "\r\n"),
]


DAMAGED: list[tuple[Callable[[str], str], str]] = [
    (lambda text: text[: len(text) // 2], "cannot be read: "),
    (lambda text: text.replace("]}\n", ""), "cannot be read: "),
    (lambda text: text + "more", "cannot be read: Extra data"),
    (lambda text: text.replace('"id": "file/1"', '"id": 1'), "1 of 3 cases are not"),
    (lambda text: text.replace('"notes": []', f'"notes": {"[" * 99}{"]" * 99}', 1), "nested"),
    (lambda text: text.replace('"cases"', '"none"'), "it has no cases"),
    (lambda _: "", "cannot be read: Expecting value"),
]


def test_every_layout_says_the_same_and_damage_is_noted(make_case_record: MakeRecord, tmp_path: Path) -> None:
    path = tmp_path / "cases.json"
    assert read_cases(path) == (CaseRecords(), ())
    records = [make_case_record(id=f"file/{number}", title="Größe ]}\n{") for number in range(3)]
    text = "".join(cases_text(records))
    for layout in LAYOUTS:
        path.write_text(layout(text), encoding="utf-8", newline="")
        cases, notes = read_cases(path)
        assert (notes, list(cases.values())) == ((), records)
    for damage, note in DAMAGED:
        path.write_text(damage(text), encoding="utf-8", newline="")
        cases, (told,) = read_cases(path)
        assert note in told
        assert len(cases) == (2 if "1 of 3" in note else 0)


def test_what_is_not_of_numbers_is_refused_in_one_line() -> None:
    key = ("file/one", "float64", "numpy.eager", "weights")
    for name in ("V8", "M8[s]", "m8[s]", "S8", "U2", "O", "no such"):
        with pytest.raises(ResultsError, match=rf"^part: the array {' '.join(key)} cannot be read: "):
            decode_array({"data": bytes(16), "array_dtype": name, "shape": [2]}, key, Path("part"))


def test_many_records_take_little_memory(make_case_record: MakeRecord) -> None:
    record = json.dumps(make_case_record())
    tracemalloc.start()
    packed = CaseRecords(json.loads(record) | {"id": f"file/{number}"} for number in range(2000))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 2000 * len(record)
    assert packed["file/1999"] == json.loads(record) | {"id": "file/1999"}
