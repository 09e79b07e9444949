"""Hostile results directories: read as far as they go or refused in one line, within bounds, nothing written elsewhere.

The directories are those of ``benchmarks/fuzz.py``; below are those that it found.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.errors import AttncheckError, OutputError, ResultsError
from attncheck.merge import merge_runs
from attncheck.reports.frames import Frames
from attncheck.reports.html.render import render_html
from attncheck.reports.html.text import unique_slugs
from attncheck.reports.making import make_frames
from attncheck.reports.write import write_report
from attncheck.results import parts
from attncheck.results.format import Row
from attncheck.results.reader import Run, read_run, read_runs
from attncheck.results.records import read_json
from attncheck.results.writer import ResultsWriter

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
MakeRow = Callable[..., Row]
WriteRun = Callable[..., Path]
FramesOf = Callable[..., Frames]
posix_only = pytest.mark.skipif(sys.platform == "win32", reason="links and pipes are made as on POSIX systems")


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any, Path]]:
    """Return what makes an input, the target that takes it, and a folder for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        make_input: Any = importlib.import_module("fuzz_pool").make_input
        yield make_input, importlib.import_module("fuzz_targets").TARGETS["results"], tmp_path_factory.mktemp("f") / "i"


def made(fuzz: tuple[Any, Any, Path], seed: int) -> Path:
    make_input, _, folder = fuzz
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    make_input("results", seed, 0, folder)
    return folder


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32))
def test_any_results_are_read_and_merged_or_refused_in_one_line(fuzz: tuple[Any, Any, Path], seed: int) -> None:
    folder, told = made(fuzz, seed), ""
    try:
        merge_runs(read_runs([path for path in (folder / "run", folder / "other") if path.exists()]))
    except AttncheckError as error:
        told = str(error)
    assert "\n" not in told


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32))
def test_any_results_are_reported_into_the_output_folder_alone(fuzz: tuple[Any, Any, Path], seed: int) -> None:
    # The target compares what is beside the output folder, and where links lead, with what was there before.
    assert fuzz[1].take(made(fuzz, seed)) in ("accepted", "refused")


@pytest.fixture
def frames_of() -> FramesOf:
    """Read results directories into frames."""
    return lambda *directories: make_frames(merge_runs(read_runs(directories)))


@pytest.fixture
def run_folder(make_row: MakeRow, write_run: WriteRun) -> Path:
    return write_run([make_row()])


def rewritten(directory: Path, **columns: Any) -> Run:
    """Replace columns of the only part of rows, and read the run."""
    path = directory / "rows" / "part-00000.parquet"
    table = pq.read_table(path)
    for name, values in columns.items():
        table = table.set_column(table.schema.get_field_index(name), name, values)
    pq.write_table(table, path)
    return read_run(directory)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"judged_rows": pa.array([1])}, "judged_rows without query_rows"),
        ({"elements": pa.array([2**63 - 1])}, "elements that are no number of anything"),
        ({"query_rows": pa.array([-1]), "judged_rows": pa.array([1])}, "query_rows that are no number"),
        ({"half_unit": pa.array([float("inf")])}, "a half_unit that is no size"),
        ({"half_unit": pa.array([-1.0])}, "a half_unit that is no size"),
        ({"half_unit": pa.array([1.7e308])}, "a half_unit that is no size"),
        ({"index": pa.array(["9" * 5000])}, "no list of whole numbers"),
    ],
)
def test_rows_that_no_run_writes_are_left_out_and_told(run_folder: Path, columns: dict[str, Any], words: str) -> None:
    run = rewritten(run_folder, **columns)
    assert len(run.rows) == 0
    assert [note for note in run.notes if words in note] == list(run.notes)


def test_a_few_bytes_that_are_gigabytes_of_text_are_not_read(run_folder: Path) -> None:
    path, rows = run_folder / "rows" / "part-00000.parquet", 3000
    table = pq.read_table(path).take(pa.array([0] * rows))
    long = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), ["x" * 2**20])
    table = table.set_column(table.schema.get_field_index("message"), "message", long)
    pq.write_table(table, path, compression="zstd")
    assert path.stat().st_size < 100_000
    before = pa.total_allocated_bytes()
    run = read_run(run_folder)
    assert len(run.rows) == 0
    assert "bytes of memory; expected at most" in run.notes[0]
    assert pa.total_allocated_bytes() - before < 2**27


def test_more_rows_than_a_run_writes_are_not_read(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run_folder / "rows" / "part-00000.parquet"
    pq.write_table(pq.read_table(path).take(pa.array([0] * 5)), path)
    monkeypatch.setattr(parts, "_MAX_ROWS", 5)
    assert len(read_run(run_folder).rows) == 5
    monkeypatch.setattr(parts, "_MAX_ROWS", 4)
    assert "it has 5 rows; expected at most 4" in read_run(run_folder).notes[0]


def test_a_part_of_very_many_pieces_is_not_read(run_folder: Path) -> None:
    path = run_folder / "rows" / "part-00000.parquet"
    pq.write_table(pq.read_table(path).take(pa.array([0] * 101)), path, row_group_size=1)
    assert "it has 101 row groups; expected at most 100" in read_run(run_folder).notes[0]


def test_a_number_that_no_format_can_hold_is_refused(write_run: WriteRun) -> None:
    with pytest.raises(ResultsError, match="processors"):
        read_run(write_run(processors=10**30))
    assert "exit_code" in read_run(write_run(exit_code=2**63)).notes[0]


def test_parts_beyond_what_a_report_can_hold_are_left_out(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(run_folder / "rows" / "part-00000.parquet", run_folder / "rows" / "part-00001.parquet")
    assert len(read_run(run_folder).rows) == 2
    size = pa.Table.from_pandas(read_run(run_folder).rows).nbytes
    monkeypatch.setattr(parts, "_MAX_BYTES_TOGETHER", size * 3 // 4)
    run = read_run(run_folder)
    assert len(run.rows) == 1
    assert "more rows than a report can hold" in run.notes[0]


@posix_only
@pytest.mark.parametrize("name", ["environment.json", "cases.json", "summary.json", "rows/part-00000.parquet"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_or_a_device_is_not_read(run_folder: Path, name: str, kind: str) -> None:
    (run_folder / name).unlink()
    if kind == "pipe":
        os.mkfifo(run_folder / name)
    else:
        (run_folder / name).symlink_to("/dev/zero")
    try:
        told = " ".join(read_run(run_folder).notes)
    except ResultsError as error:
        told = str(error)
    assert "it is no regular file" in told


def test_json_that_is_nested_deep_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for levels, refused in ((40, False), (60, True), (100_000, True)):
        path.write_text('{"a": ' + "[" * levels + "]" * levels + "}")
        if refused:
            with pytest.raises(ResultsError):
                read_json(path)
        else:
            assert read_json(path)


@pytest.mark.parametrize(
    "fields",
    [
        {"expected": [{"name": "weights"}]},
        {"expected": [{"name": "w", "of": "w", "basis": "known", "transpose": False, "shape": [-1]}]},
        {"given": {"scores": {"called": None}}},
        {"given": {"scores": {"printed": [["1", "2"], ["3"]]}}},
        {"source": {"kind": "document", "title": "t", "notes": [1]}},
    ],
)
def test_a_case_record_without_what_reports_take_from_it_is_told(
    make_row: MakeRow, make_case_record: Callable[..., dict[str, Any]], write_run: WriteRun, fields: dict[str, Any]
) -> None:
    run = read_run(write_run([make_row()], cases=[make_case_record(**fields)]))
    assert "1 of 1 cases are not what `attncheck run` writes" in run.notes[0]


def test_a_page_of_comparisons_without_verdicts_is_made(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    rows = [make_row(implementation=name) for name in ("numpy.eager", "other.eager")]
    rows.append(make_row(case="file/two", comparison="pair", other="other.eager", ratio=0.5))
    page = render_html(frames_of(write_run(rows)))
    assert "0.5 of the allowed" in page
    assert 'href="#case-file-two"' not in page


def test_thousands_of_names_that_look_alike_as_addresses_are_told_apart_at_once() -> None:
    names = unique_slugs(["\u65e5" * (1 + number % 7) for number in range(50_000)])
    assert len(set(names)) == 50_000
    assert names[:3] == ["x", "x-2", "x-3"]


@posix_only
def test_a_report_is_never_written_through_a_link(run_folder: Path, frames_of: FramesOf, tmp_path: Path) -> None:
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
def test_a_run_is_not_written_through_a_link(run_folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    shutil.copytree(run_folder / "rows", outside)
    shutil.rmtree(run_folder / "rows")
    (run_folder / "rows").symlink_to(outside)
    for resume in (False, True):
        with pytest.raises(OutputError, match="is a link"):
            ResultsWriter(run_folder, resume=resume)
    assert [path.name for path in outside.iterdir()] == ["part-00000.parquet"]


@posix_only
def test_a_script_that_is_a_link_is_not_shown(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf, tmp_path: Path
) -> None:
    directory = write_run([make_row(verdict="numeric", message="wrong")])
    (tmp_path / "secret.txt").write_text("a secret")
    (directory / "scripts").mkdir()
    script, index = directory / "scripts" / "000.py", {"file/one|numpy.eager|float64": "000.py"}
    (directory / "scripts" / "index.json").write_text(json.dumps(index))
    script.symlink_to(tmp_path / "secret.txt")
    assert "a secret" not in render_html(frames_of(directory))
    script.unlink()
    script.write_text("print('shown')")
    assert "print('shown')" in render_html(frames_of(directory))


def test_rows_as_read_are_as_written(make_row: MakeRow, write_run: WriteRun) -> None:
    rows = [make_row(message="a" * number, index="0,1", judged_rows=1, query_rows=2) for number in range(100)]
    frame = read_run(write_run(rows)).rows
    assert isinstance(frame, pd.DataFrame)
    assert frame["message"].tolist() == [row.message for row in rows]
    assert frame["judged_rows"].tolist() == [1] * 100
