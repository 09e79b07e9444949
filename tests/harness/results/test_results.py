"""Results on disk: they come back as they were written, and a folder that is none of ours is left alone or refused."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from part_files import change_part, set_column, take_rows
from tables import tables_beside

from attncheck.common.errors import AttncheckError, OutputError, ResultsError
from attncheck.reports.frames import Frames, make_frames
from attncheck.reports.html.page import render_html
from attncheck.reports.markdown import render_markdown
from attncheck.reports.merge import merge_runs
from attncheck.reports.summary import comparison_exit_code
from attncheck.reports.write import write_report
from attncheck.results import parts
from attncheck.results.format import FORMAT_VERSION, ROW_SCHEMA, Row, StoredArray
from attncheck.results.parts import ArrayParts, decode_array
from attncheck.results.reader import find_runs, read_run, read_runs
from attncheck.results.records import MAX_UNPACKED, CaseRecords, cases_json_lines, read_cases
from attncheck.results.tables import TableFile, to_table, write_file
from attncheck.results.writer import ResultsWriter
from attncheck.spec.dtypes import numpy_dtype

MakeRow = Callable[..., Row]
WriteRun = Callable[..., Path]
Damage = Callable[[Path], None]

TABLES = tables_beside(__file__)
THIS_FORMAT = json.dumps({"format": FORMAT_VERSION}).encode()
OTHER_PART = "rows/part-00001.npz"


def replaced(name: str, content: bytes | None) -> Damage:
    def apply(directory: Path) -> None:
        if content is None:
            (directory / name).unlink()
        else:
            (directory / name).write_bytes(content)

    return apply


def with_fields(name: str, **fields: Any) -> Damage:
    def apply(directory: Path) -> None:
        path = directory / name
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | fields), encoding="utf-8")

    return apply


def with_columns(**columns: Any) -> Damage:
    """Give both rows of the part a value."""

    def change(arrays: dict[str, Any]) -> None:
        for name, value in columns.items():
            set_column(arrays, name, value)

    return arrays_changed(change)


def arrays_changed(change: Callable[[dict[str, Any]], Any]) -> Damage:
    return lambda directory: change_part(directory / OTHER_PART, change)


def rewritten(change: Callable[[Path], Any]) -> Damage:
    return lambda directory: change(directory / OTHER_PART)


@pytest.fixture
def two_parts(make_row: MakeRow, write_run: WriteRun, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a run whose second part holds the case file/two alone, and arrays of both."""
    monkeypatch.setattr(ResultsWriter, "ROWS_PER_PART", 1)
    monkeypatch.setattr(ResultsWriter, "ARRAY_BYTES_PER_PART", 1)
    arrays = [StoredArray(f"file/{name}", "float64", "numpy.eager", "weights", np.ones(3)) for name in ("one", "two")]
    directory = write_run([make_row(), make_row(implementation="torch.eager")], arrays=arrays[:1])
    shutil.copy(directory / "rows/part-00000.npz", directory / OTHER_PART)
    with_columns(case="file/two")(directory)
    cases = json.loads((directory / "cases.json").read_text(encoding="utf-8"))["cases"]
    two_cases = {"format": FORMAT_VERSION, "cases": [*cases, cases[0] | {"id": "file/two", "name": "two"}]}
    (directory / "cases.json").write_text(json.dumps(two_cases), encoding="utf-8")
    return directory


REFUSED: tuple[tuple[Damage, str], ...] = (
    (replaced("environment.json", b"{"), "environment.json cannot be read"),
    (replaced("environment.json", b"\xff\xfe"), "environment.json cannot be read"),
    (replaced("environment.json", b"[" * 100_000), "environment.json cannot be read"),
    (replaced("environment.json", b"[1]"), "is not what `attncheck check` writes"),
    (replaced("environment.json", THIS_FORMAT), "it has no label"),
    (replaced("environment.json", b"{}"), "results format None"),
    (with_fields("environment.json", format=True), "results format True"),
    (with_fields("environment.json", format="\r\n::error::" + "x" * 500), "results format "),
    (with_fields("environment.json", label=7), "environment.json is not what `attncheck check` writes: label: "),
    (with_fields("environment.json", versions=["1.0"]), "versions: "),
    (with_fields("environment.json", processors=10**30), "processors"),
    (with_fields("environment.json", classes={"numpy.eager": "native"}), "classes.numpy.eager: "),
    (
        with_fields("environment.json", format=FORMAT_VERSION - 1),
        f"has results format {FORMAT_VERSION - 1}; this version of attncheck reads {FORMAT_VERSION}: an "
        "older attncheck wrote it; run the check again, or read it with that version",
    ),
    (
        with_fields("environment.json", format=FORMAT_VERSION + 1),
        f"has results format {FORMAT_VERSION + 1}; this version of attncheck reads {FORMAT_VERSION}: a newer "
        "attncheck wrote it; update attncheck",
    ),
    (replaced("environment.json", None), "it has no environment.json"),
    (shutil.rmtree, "is not a folder; expected a results directory"),
)


def test_what_is_no_results_directory_is_refused(two_parts: Path) -> None:
    environment = (two_parts / "environment.json").read_bytes()
    for damage, message in REFUSED:
        (two_parts / "environment.json").write_bytes(environment)
        damage(two_parts)
        with pytest.raises(ResultsError) as refusal:
            read_run(two_parts)
        assert message in str(refusal.value)
        assert str(two_parts) in str(refusal.value)
        assert str(refusal.value).isprintable()
        assert len(str(refusal.value)) < len(str(two_parts)) + 300


DAMAGED_PARTS: tuple[tuple[Damage, str], ...] = (
    (replaced(OTHER_PART, b""), ""),
    (replaced(OTHER_PART, b"PK and no more"), ""),
    (rewritten(lambda path: path.write_bytes(path.read_bytes()[:-20])), ""),
    (arrays_changed(lambda arrays: arrays.pop("verdict")), "it has no column verdict"),
    (arrays_changed(lambda arrays: set_column(arrays, "message", "\ud800")), "surrogates"),
    (arrays_changed(lambda arrays: arrays.update(xfail=np.zeros(3, bool))), "its columns have different lengths"),
    (arrays_changed(lambda arrays: arrays.update(value=np.zeros(3))), "have different lengths"),
    (
        arrays_changed(lambda arrays: arrays.update(case=np.full(2, 7, np.uint8))),
        "its case refers to a text that is missing",
    ),
    (arrays_changed(lambda arrays: arrays.update(value=np.zeros((2, 1)))), "its value is no column"),
    (arrays_changed(lambda arrays: arrays.update(value=np.array([{}, {}]))), "its value is no column"),
    (rewritten(lambda path: path.write_bytes(path.read_bytes().replace(b"numpy", b"other"))), ""),
    (with_columns(index="9" * 5000), "no list of whole numbers"),
    (with_columns(message=None), "message"),
    *((with_columns(**columns), message) for columns, message in TABLES["damaged_columns"]),
)


def test_a_damaged_part_is_named_and_does_not_lose_the_rest(two_parts: Path) -> None:
    whole = (two_parts / OTHER_PART).read_bytes()
    assert sorted(read_run(two_parts).rows["case"]) == ["file/one"] * 2 + ["file/two"] * 2
    for damage, reason in DAMAGED_PARTS:
        (two_parts / OTHER_PART).write_bytes(whole)
        damage(two_parts)
        run = read_run(two_parts)
        assert list(run.rows["case"]) == ["file/one"] * 2
        (note,) = run.notes
        assert note.startswith(f"{two_parts / OTHER_PART} cannot be read, its rows are left out: ")
        assert reason in note
        assert "\n" not in note
        assert not run.is_complete
    frames = frames_of(two_parts)
    assert comparison_exit_code(frames) == 3
    assert f"partial results: {note}" in frames.notes
    assert "; not everything could be run" in render_markdown(frames)
    assert list(frames.environments["complete"]) == [False]


def test_verdicts_do_not_need_other_files(two_parts: Path) -> None:
    for name, content, message in (
        ("cases.json", b"nonsense", "cannot be read"),
        ("cases.json", THIS_FORMAT, "it has no cases"),
        ("cases.json", b'{"cases": [{"id": "file/one"}, 7]}', "2 of 2 cases are not what `attncheck check` writes: "),
        ("cases.json", b'{"cases": ["\\ud800"]}', "surrogates not allowed"),
        ("cases.json", None, "is absent or incomplete: some cases have no title and no options"),
        ("summary.json", b"[", "cannot be read"),
        ("summary.json", THIS_FORMAT, "it has no exit_code"),
        ("summary.json", json.dumps({"format": FORMAT_VERSION, "exit_code": 2**63}).encode(), "exit_code"),
        ("arrays/part-00000.npz", b"PK", "cannot be read, its arrays are left out: "),
    ):
        before = (two_parts / name).read_bytes()
        replaced(name, content)(two_parts)
        run = read_run(two_parts)
        assert len(run.rows) == 4
        (note,) = run.notes
        assert note.startswith(str(two_parts / name))
        assert message in note
        text = render_markdown(frames_of(two_parts))
        assert "2 cases on 2 implementations" in text
        assert "partial results" in text
        (two_parts / name).write_bytes(before)


def test_runs_are_sorted_by_label_and_those_of_one_label_are_told_apart_by_their_folders(write_run: WriteRun) -> None:
    def labels(*directories: Path) -> dict[str, Path]:
        return {run.label: run.directory for run in read_runs(directories)}

    new, old = write_run(label="new"), write_run(label="Old")
    assert list(labels(new, old)) == ["Old", "new"]
    monday, friday = write_run(name="monday"), write_run(name="friday")
    assert labels(monday, new, friday) == {"local (friday)": friday, "local (monday)": monday, "new": new}
    assert labels(friday, monday) == {"local (friday)": friday, "local (monday)": monday}
    one, other, third = (write_run(name=name) for name in ("a/latest", "b/latest", "b/first"))
    assert labels(one, other, third) == {"local (a/latest)": one, "local (b/latest)": other, "local (first)": third}
    taken = write_run(label="local (monday)", name="z")
    named = {"local (monday)": taken, "local (monday) #2": monday, "local (friday)": friday}
    assert labels(monday, friday, taken) == named


def test_every_result_of_a_folder_is_found(make_row: MakeRow, write_run: WriteRun, tmp_path: Path) -> None:
    first, second = write_run(label="a", name="matrix/a"), write_run(label="b", name="matrix/b")
    (tmp_path / "matrix" / "notes").mkdir()
    assert find_runs([tmp_path / "matrix"]) == [first, second]
    assert find_runs([second, tmp_path / "matrix", first]) == [second, first]
    assert find_runs([first]) == [first]
    assert find_runs([first, tmp_path / "matrix" / ".." / "matrix" / "a"]) == [first]
    assert find_runs([tmp_path / "nowhere"]) == [tmp_path / "nowhere"]


_OF_KIND: dict[str, st.SearchStrategy[Any]] = {
    "text": st.text(st.characters(exclude_categories=["Cs"]), max_size=9),
    "bool": st.booleans(),
    "int": st.integers(-(2**63), 2**63 - 1),
    "float": st.floats(),
}
ROWS = st.builds(
    Row,
    **{name: _OF_KIND[kind.type] | (st.none() if kind.nullable else st.nothing()) for name, kind in ROW_SCHEMA.items()},
)

posix_only = pytest.mark.skipif(sys.platform == "win32", reason="links and pipes are made as on POSIX systems")


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32))
def test_any_results_are_read_and_merged_or_refused_in_one_line(fuzzing: Any, seed: int) -> None:
    folder = fuzzing[0]("results", seed)
    try:
        merge_runs(read_runs([path for path in (folder / "run", folder / "other") if path.exists()]))
    except AttncheckError as error:
        assert "\n" not in str(error)  # noqa: PT017 - not every result is refused


@settings(max_examples=4)
@given(seed=st.integers(0, 2**32))
def test_any_results_are_reported_into_the_output_folder_alone(fuzzing: Any, seed: int) -> None:
    # The target compares what is beside the output folder, and where links lead, with what was there before.
    make, targets = fuzzing
    assert targets["results"].take(make("results", seed)) in ("accepted", "refused")


def frames_of(directory: Path) -> Frames:
    return make_frames(merge_runs([read_run(directory)]))


@pytest.fixture
def run_folder(make_row: MakeRow, write_run: WriteRun) -> Path:
    return write_run([make_row()])


def test_a_few_bytes_that_are_gigabytes_of_text_are_not_read(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(parts._MAX_BYTES, "rows", 2**26)  # for gigabytes, of which a test would take seconds
    path, rows = run_folder / "rows" / "part-00000.npz", 3000
    take_rows(path, [0] * rows)
    change_part(path, lambda arrays: set_column(arrays, "message", "x" * 2**16))
    before = peak_of(lambda: None)
    run = read_run(run_folder)
    assert len(run.rows) == 0
    assert "bytes of memory; expected at most" in run.notes[0]
    assert peak_of(lambda: read_run(run_folder)) - before < 2**23
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("case.npy", bytes(2**27))
    assert path.stat().st_size < 2**18
    assert peak_of(lambda: read_run(run_folder)) - before < 2**23
    assert "bytes of memory; expected at most" in read_run(run_folder).notes[0]


def test_keys_of_arrays_that_are_far_larger_than_those_of_a_run_are_not_read(
    make_row: MakeRow, write_run: WriteRun
) -> None:
    """Each array of a report reads them again, so that few bytes would take minutes."""
    array = StoredArray("attention/case", "float32", "numpy.eager", "output", np.zeros(2))
    folder = write_run([make_row()], arrays=[array])
    path = folder / "arrays" / "part-00000.npz"
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in (members | {"case.words.npy": bytes(parts._MAX_KEY_BYTES + 1)}).items():
            archive.writestr(name, data)
    notes = ArrayParts(folder).notes
    assert "bytes of memory; expected at most" in notes[0]


def peak_of(act: Callable[[], Any]) -> int:
    """Return the most bytes that Python had allocated meanwhile."""
    tracemalloc.start()
    act()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def test_more_than_a_run_writes_is_not_read(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run_folder / "rows" / "part-00000.npz"
    whole = path.read_bytes()
    take_rows(path, [0] * 5)
    monkeypatch.setattr(parts, "_MAX_ROWS", 5)
    assert len(read_run(run_folder).rows) == 5
    monkeypatch.setattr(parts, "_MAX_ROWS", 4)
    assert "it has 5 rows; expected at most 4" in read_run(run_folder).notes[0]
    path.write_bytes(whole)
    shutil.copy(path, run_folder / "rows" / "part-00001.npz")
    assert len(read_run(run_folder).rows) == 2
    size = parts.read_rows(run_folder)[0].size
    monkeypatch.setattr(parts, "_MAX_TOTAL_BYTES", size * 3 // 4)
    run = read_run(run_folder)
    assert len(run.rows) == 1
    assert "more rows than a report can hold" in run.notes[0]


@posix_only
def test_a_pipe_or_a_device_is_not_read(run_folder: Path) -> None:
    for name in ("environment.json", "cases.json", "summary.json", "rows/part-00000.npz"):
        path, before = run_folder / name, (run_folder / name).read_bytes()
        for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
            path.unlink()
            make(path)
            try:
                told = " ".join(read_run(run_folder).notes)
            except ResultsError as error:
                told = str(error)
            assert "it is not a regular file" in told
        path.unlink()
        path.write_bytes(before)


def test_a_case_record_without_what_reports_take_from_it_is_told(
    make_row: MakeRow, make_case_record: Callable[..., dict[str, Any]], write_run: WriteRun
) -> None:
    for fields in TABLES["incomplete_records"]:
        run = read_run(write_run([make_row()], cases=[make_case_record(**fields)]))
        assert "1 of 1 cases are not what `attncheck check` writes" in run.notes[0], fields


@posix_only
def test_a_report_is_never_written_through_a_link(run_folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "mine.txt").write_text("mine")
    (run_folder / "report").symlink_to(outside)
    frames = frames_of(run_folder)
    with pytest.raises(OutputError, match="is a link that came with the results"):
        write_report(frames, run_folder / "report")
    (run_folder / "report").unlink()
    names = [path.name for path in write_report(frames, tmp_path / "names").parent.iterdir()]
    (run_folder / "report").mkdir()
    for name in names:
        (run_folder / "report" / name).symlink_to(outside / "mine.txt")
    write_report(frames, run_folder / "report")
    assert [path.name for path in outside.iterdir()] == ["mine.txt"]
    assert (outside / "mine.txt").read_text() == "mine"
    assert not any(path.is_symlink() for path in (run_folder / "report").iterdir())
    assert len(names) >= 8
    (tmp_path / "linked").symlink_to(tmp_path / "names")  # one's own link to a folder of one's own is all right
    assert write_report(frames, tmp_path / "linked").is_file()


@posix_only
def test_links_are_not_followed(make_row: MakeRow, write_run: WriteRun, tmp_path: Path) -> None:
    run_folder = write_run([make_row(verdict="numeric", message="wrong")])
    (tmp_path / "secret.txt").write_text("a secret")
    (run_folder / "scripts").mkdir()
    script, index = run_folder / "scripts" / "000.py", {"file/one|numpy.eager|float64": "000.py"}
    (run_folder / "scripts" / "index.json").write_text(json.dumps(index))
    script.symlink_to(tmp_path / "secret.txt")
    assert "a secret" not in render_html(frames_of(run_folder))
    script.unlink()
    script.write_text("print('shown')")
    assert "print('shown')" in render_html(frames_of(run_folder))
    outside = tmp_path / "outside"
    shutil.copytree(run_folder / "rows", outside)
    shutil.rmtree(run_folder / "rows")
    (run_folder / "rows").symlink_to(outside)
    for resume in (False, True):
        with pytest.raises(OutputError, match="is a link"):
            ResultsWriter(run_folder, resume=resume)
    assert [path.name for path in outside.iterdir()] == ["part-00000.npz"]


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
    run = read_run(write_run(rows, name="case=other"))  # a folder named like a partition adds no column
    first, second = run.rows.astype(object).where(run.rows.notna(), None).to_dict("records")
    assert first == asdict(replace(full, message=r"a\nb"))  # as one line, which is what reports show
    assert str(first["value"]) == "-0.0"
    assert second == asdict(replace(rows[1], value=None))


def test_a_table_comes_back_as_it_was_written_whatever_its_rows(tmp_path: Path) -> None:
    @given(st.lists(ROWS, max_size=4))
    @settings(max_examples=60)
    def comes_back(rows: list[Row]) -> None:
        path = tmp_path / "part"
        write_file(path, to_table(rows, ROW_SCHEMA), ROW_SCHEMA)
        with TableFile(path, 2**20, 10) as file:
            read = [Row(**record) for record in file.read_columns(ROW_SCHEMA).records()]
        assert repr(read) == repr(rows)  # NaN is what it was, and no number is none

    comes_back()


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
    assert files_of(tmp_path) == {"rows/part-00000.npz", "arrays/part-00000.npz"}
    writer.add_rows([rows[name] for name in "bcd"])
    writer.add_rows([rows["e"]])
    for _ in range(2):
        writer.flush()
    rows_of = {f"rows/part-0000{number}.npz" for number in range(3)}
    assert files_of(tmp_path) == {"arrays/part-00000.npz"} | rows_of
    read = [parts.read_rows_part(path) for path in sorted((tmp_path / "rows").iterdir())]
    assert [part["case"].tolist() for part in read] == [["a"], ["b", "c", "d"], ["e"]]


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
    text = "".join(cases_json_lines(records))
    laid_out = (json.dumps(json.loads(text)), json.dumps(json.loads(text), indent=1), f"{text}\n")
    for layout in (text, *laid_out, text.replace("\n", "\n\n"), text.replace("\n", "\r\n")):
        path.write_text(layout, encoding="utf-8", newline="")
        cases, notes = read_cases(path)
        assert (notes, list(cases.values())) == ((), [{**record, "title": r"Größe ]}\n{"} for record in records])
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
    packed = CaseRecords(json.loads(record) | {"id": f"first/{number}"} for number in range(MAX_UNPACKED))
    tracemalloc.start()
    for number in range(2000):
        packed.add(json.loads(record) | {"id": f"file/{number}"})
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 2000 * len(record)
    assert packed["file/1999"] == json.loads(record) | {"id": "file/1999"}
