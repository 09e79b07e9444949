"""Results read back: what is damaged is named and left out, and what is no results directory is refused in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.errors import AttncheckError, ResultsError
from attncheck.merge import merge_runs
from attncheck.reports.answer import exit_code_of
from attncheck.reports.making import make_frames
from attncheck.reports.markdown.report import render_markdown
from attncheck.results.format import FORMAT, Row, StoredArray
from attncheck.results.reader import find_runs, matched_runs, read_arrays, read_run, read_runs
from attncheck.results.writer import ResultsWriter

MakeRow = Callable[..., Row]
WriteRun = Callable[..., Path]
Damage = Callable[[Path], None]

THIS_FORMAT = json.dumps({"format": FORMAT}).encode()
OTHER_PART = "rows/part-00001.parquet"


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


def with_column(name: str, values: Any) -> Damage:
    def apply(directory: Path) -> None:
        path = directory / OTHER_PART
        table = pq.read_table(path)
        pq.write_table(table.set_column(table.schema.get_field_index(name), name, values), path)

    return apply


def truncated(directory: Path) -> None:
    path = directory / OTHER_PART
    path.write_bytes(path.read_bytes()[:-20])


def without_column(directory: Path) -> None:
    path = directory / OTHER_PART
    pq.write_table(pq.read_table(path).drop(["verdict"]), path)


@pytest.fixture
def two_parts(make_row: MakeRow, write_run: WriteRun, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a run whose second part holds the case file/two alone, and arrays of both."""
    monkeypatch.setattr(ResultsWriter, "ROWS_PER_PART", 1)
    monkeypatch.setattr(ResultsWriter, "ARRAY_BYTES_PER_PART", 1)
    arrays = [StoredArray(f"file/{name}", "float64", "numpy.eager", "weights", np.ones(3)) for name in ("one", "two")]
    directory = write_run([make_row(), make_row(implementation="torch.eager")], arrays=arrays[:1])
    table = pq.read_table(directory / "rows/part-00000.parquet")
    two = pa.array(["file/two"] * 2)
    pq.write_table(table.set_column(table.schema.get_field_index("case"), "case", two), directory / OTHER_PART)
    cases = json.loads((directory / "cases.json").read_text(encoding="utf-8"))["cases"]
    two_cases = {"format": FORMAT, "cases": [*cases, cases[0] | {"id": "file/two", "name": "two"}]}
    (directory / "cases.json").write_text(json.dumps(two_cases), encoding="utf-8")
    return directory


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda directory: shutil.rmtree(directory), "is not a folder; expected a results directory"),
        (replaced("environment.json", None), "it has no environment.json"),
        (replaced("environment.json", b"{"), "environment.json cannot be read"),
        (replaced("environment.json", b"\xff\xfe"), "environment.json cannot be read"),
        (replaced("environment.json", b"[" * 100_000), "environment.json cannot be read"),
        (replaced("environment.json", b"[1]"), "is not what `attncheck run` writes"),
        (replaced("environment.json", THIS_FORMAT), "it has no label"),
        (replaced("environment.json", b"{}"), "results format None"),
        (with_fields("environment.json", format=True), "results format True"),
        (with_fields("environment.json", label=7), "environment.json is not what `attncheck run` writes: label: "),
        (with_fields("environment.json", versions=["1.0"]), "versions: "),
        (with_fields("environment.json", classes={"numpy.eager": "native"}), "classes.numpy.eager: "),
        (
            with_fields("environment.json", format=FORMAT - 1),
            f"has results format {FORMAT - 1}; this version of attncheck reads {FORMAT}: an older attncheck wrote it; "
            "run it again, or read it with that version",
        ),
        (
            with_fields("environment.json", format=FORMAT + 1),
            f"has results format {FORMAT + 1}; this version of attncheck reads {FORMAT}: a newer attncheck wrote it; "
            "update this one",
        ),
    ],
)
def test_what_is_no_results_directory_of_this_format_is_refused_in_one_line(
    damage: Damage, message: str, two_parts: Path
) -> None:
    damage(two_parts)
    with pytest.raises(ResultsError) as refusal:
        read_run(two_parts)
    assert message in str(refusal.value)
    assert str(two_parts) in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (replaced(OTHER_PART, b""), ""),
        (replaced(OTHER_PART, b"PAR1 and no more"), ""),
        (truncated, ""),
        (without_column, "verdict"),
        (with_column("value", [["text"] * 2]), "text"),
        (with_column("verdict", [["splendid"] * 2]), "it has the verdict 'splendid', which this version does not know"),
        (with_column("dtype", [["int4"] * 2]), "it has the dtype 'int4', which this version does not know"),
        (with_column("comparison", [["guess"] * 2]), "it has the comparison 'guess'"),
        (with_column("index", [["0,x"] * 2]), "it has an index that is no list of whole numbers"),
        (with_column("message", pa.array([None, None], pa.string())), "message"),
    ],
)
def test_a_damaged_part_is_named_and_does_not_lose_the_rest(damage: Damage, reason: str, two_parts: Path) -> None:
    assert sorted(read_run(two_parts).rows["case"]) == ["file/one"] * 2 + ["file/two"] * 2
    damage(two_parts)
    run = read_run(two_parts)
    assert list(run.rows["case"]) == ["file/one"] * 2
    (note,) = run.notes
    assert note.startswith(f"{two_parts / OTHER_PART} cannot be read, its rows are left out: ")
    assert reason in note
    assert "\n" not in note
    assert not run.is_complete
    frames = make_frames(merge_runs([run]))
    assert exit_code_of(frames) == 3
    assert f"partial results: {note}" in frames.notes
    assert "; not everything could be run" in render_markdown(frames)
    assert list(frames.environments["complete"]) == [False]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("cases.json", b"nonsense", "cannot be read"),
        ("cases.json", THIS_FORMAT, "it has no cases"),
        ("cases.json", b'{"cases": [{"id": "file/one"}, 7]}', "2 of 2 cases are not what `attncheck run` writes: "),
        ("cases.json", None, "is absent or incomplete: some cases have no title and no options"),
        ("summary.json", b"[", "cannot be read"),
        ("summary.json", THIS_FORMAT, "it has no exit_code"),
        ("arrays/part-00000.parquet", b"PAR1", "cannot be read, its arrays are left out: "),
    ],
)
def test_without_a_file_beside_the_rows_the_verdicts_are_there(
    name: str, content: bytes | None, message: str, two_parts: Path
) -> None:
    replaced(name, content)(two_parts)
    run = read_run(two_parts)
    assert len(run.rows) == 4
    (note,) = run.notes
    assert note.startswith(str(two_parts / name))
    assert message in note
    text = render_markdown(make_frames(merge_runs([run])))
    assert "2 cases on 2 implementations" in text
    assert "partial results" in text


def test_a_case_without_a_record_is_called_by_its_id(two_parts: Path) -> None:
    replaced("cases.json", None)(two_parts)
    record = read_run(two_parts).cases["file/two"]
    assert (record["id"], record["file"], record["name"], record["source"]["kind"]) == (
        "file/two",
        "file",
        "two",
        "unknown",
    )


def test_a_file_is_no_results_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultsError, match="file is not a folder"):
        read_run(tmp_path / "file")


def test_a_folder_named_like_a_partition_adds_no_column(make_row: MakeRow, write_run: WriteRun) -> None:
    assert list(read_run(write_run([make_row()], name="case=other")).rows["case"]) == ["file/one"]


def test_arrays_that_do_not_fit_their_shape_are_refused_in_one_line(write_run: WriteRun) -> None:
    directory = write_run(arrays=[StoredArray("file/one", "float64", "numpy.eager", "weights", np.zeros(3))])
    path = directory / "arrays" / "part-00000.parquet"
    table = pq.read_table(path)
    pq.write_table(table.set_column(table.schema.get_field_index("data"), "data", [[b"too short"]]), path)
    with pytest.raises(ResultsError, match=r"the array file/one float64 numpy\.eager weights cannot be read"):
        read_arrays(directory)


def labels(*directories: Path) -> dict[str, Path]:
    return {run.label: run.directory for run in read_runs(directories)}


def test_runs_are_sorted_by_label(make_row: MakeRow, write_run: WriteRun) -> None:
    new, old = write_run([make_row()], label="new"), write_run([make_row()], label="Old")
    assert list(labels(new, old)) == ["Old", "new"]


def test_runs_of_one_label_are_told_apart_by_their_folders_in_any_order(write_run: WriteRun) -> None:
    monday, friday = write_run(name="monday"), write_run(name="friday")
    other = write_run(label="other")
    assert labels(monday, other, friday) == {"local (friday)": friday, "local (monday)": monday, "other": other}
    assert labels(friday, monday) == {"local (friday)": friday, "local (monday)": monday}


def test_as_much_of_a_path_is_told_as_tells_folders_apart(write_run: WriteRun) -> None:
    one, other, third = (write_run(name=name) for name in ("a/latest", "b/latest", "b/first"))
    assert labels(one, other, third) == {"local (a/latest)": one, "local (b/latest)": other, "local (first)": third}


def test_a_name_that_is_taken_is_counted(write_run: WriteRun) -> None:
    one, other = write_run(name="x"), write_run(name="y")
    taken = write_run(label="local (x)", name="z")
    assert labels(one, other, taken) == {"local (x)": taken, "local (x) #2": one, "local (y)": other}


def test_a_folder_of_results_user_function_every_one_in_it(
    make_row: MakeRow, write_run: WriteRun, tmp_path: Path
) -> None:
    first, second = write_run(label="a", name="matrix/a"), write_run(label="b", name="matrix/b")
    (tmp_path / "matrix" / "notes").mkdir()
    assert find_runs([tmp_path / "matrix"]) == [first, second]
    assert find_runs([second, tmp_path / "matrix", first]) == [second, first]
    assert find_runs([first]) == [first]
    assert find_runs([first, tmp_path / "matrix" / ".." / "matrix" / "a"]) == [first]
    assert find_runs([tmp_path / "nowhere"]) == [tmp_path / "nowhere"]


def test_single_runs_of_different_labels_are_matched_and_several_are_not(write_run: WriteRun) -> None:
    one, other = read_run(write_run(label="a")), read_run(write_run(label="b"))
    before, after = matched_runs([one], [other])
    assert [run.label for run in (*before, *after)] == ["a -> b"] * 2
    assert matched_runs([one], [one]) == ([one], [one])
    assert matched_runs([one, other], [other]) == ([one, other], [other])


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where a run is written once, to be damaged in copies."""
    return tmp_path_factory.mktemp("fuzz")


@settings(max_examples=60)
@given(data=st.data())
def test_any_damage_gives_a_report_or_one_line(data: st.DataObject, pristine: Path, small_results: Path) -> None:
    copy = pristine / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(small_results, copy)
    files = sorted(path for path in copy.rglob("*") if path.suffix in (".json", ".parquet"))
    for path in data.draw(st.lists(st.sampled_from(files), min_size=1, max_size=2, unique=True)):
        content = bytearray(path.read_bytes())
        for place in data.draw(st.lists(st.integers(0, max(0, len(content) - 1)), max_size=3)):
            content[place] = data.draw(st.integers(0, 255))
        path.write_bytes(content[: data.draw(st.sampled_from([len(content), len(content) // 2, 0]))])
    said = told_of(copy, small_results)
    assert said.startswith("# Attention conformance report") or "\n" not in said


def told_of(*directories: Path) -> str:
    try:
        return render_markdown(make_frames(merge_runs(read_runs(directories))))
    except AttncheckError as error:
        return str(error)


@pytest.fixture(scope="module")
def small_results(
    tmp_path_factory: pytest.TempPathFactory, write_small: Callable[[Path], Path], run_below: Any, honest: Any
) -> Path:
    """Return the results of a small run, really run, with all its arrays."""
    parent = tmp_path_factory.mktemp("small")
    write_small(parent)
    run_below(parent, honest, keep_all_arrays=True)
    return parent / "out"


def test_a_format_that_is_no_number_is_told_on_one_short_line(two_parts: Path) -> None:
    environment = json.loads((two_parts / "environment.json").read_text(encoding="utf-8"))
    environment["format"] = "\r\n::error::" + "x" * 500
    (two_parts / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
    with pytest.raises(ResultsError) as told:
        read_run(two_parts)
    assert str(told.value).isprintable()
    assert len(str(told.value)) < len(str(two_parts)) + 200
