"""The files of a report: all of them, the same bytes every time, and harmless in a spreadsheet."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from attncheck.errors import OutputError
from attncheck.merge import merge_runs
from attncheck.reports.columns import RESULTS
from attncheck.reports.frames import Frames
from attncheck.reports.junit import render_junit
from attncheck.reports.making import make_frames
from attncheck.reports.markdown.report import render_markdown
from attncheck.reports.write import harmless, write_junit, write_report
from attncheck.results.case_records import CaseRecords
from attncheck.results.format import Row
from attncheck.results.reader import read_run

MakeRow = Callable[..., Row]
WriteRun = Callable[..., Path]
FramesOf = Callable[..., Frames]


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_every_frame_is_written_as_csv_and_parquet(document_frames: Frames, tmp_path: Path) -> None:
    path = write_report(document_frames, tmp_path / "deep" / "report")
    assert path == tmp_path / "deep" / "report" / "report.md"
    assert path.read_text(encoding="utf-8") == render_markdown(document_frames)
    assert set(contents(path.parent)) == {"report.md", "report.html", "junit.xml"} | {
        f"{name}.{suffix}" for name in document_frames.tables() for suffix in ("csv", "parquet")
    }
    for name, frame in document_frames.tables().items():
        rows = read_csv(path.parent / f"{name}.csv")
        assert len(rows) == len(frame)
        assert list(rows[0]) == list(frame.columns)
        pd.testing.assert_frame_equal(pd.read_parquet(path.parent / f"{name}.parquet"), frame, check_dtype=False)


def test_numbers_in_csv_are_exact(document_frames: Frames, tmp_path: Path) -> None:
    write_report(document_frames, tmp_path)
    values = [float(row["value"]) for row in read_csv(tmp_path / "numbers.csv")]
    assert values == document_frames.numbers["value"].tolist()


def test_the_same_results_give_the_same_bytes(document_run: Path, frames_of: FramesOf, tmp_path: Path) -> None:
    write_report(frames_of(document_run), tmp_path / "first")
    wanted = contents(tmp_path / "first")
    write_report(frames_of(document_run), tmp_path / "first")
    assert contents(tmp_path / "first") == wanted
    # As if workers had answered, and files been written, in another order.
    run = read_run(document_run)
    environment = dict(reversed(run.environment.items()))
    environment["versions"] = dict(reversed(run.environment["versions"].items()))
    cases = CaseRecords(reversed(list(run.cases.values())))
    shuffled = replace(run, rows=run.rows.sample(frac=1, random_state=7), cases=cases, environment=environment)
    write_report(make_frames(merge_runs([shuffled])), tmp_path / "second")
    assert contents(tmp_path / "second") == wanted


def test_lines_end_alike_on_every_platform(document_frames: Frames, tmp_path: Path) -> None:
    write_report(document_frames, tmp_path)
    assert not [name for name, content in contents(tmp_path).items() if b"\r" in content and "parquet" not in name]


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("=cmd()", "'=cmd()"),
        ("+SUM(A1)", "'+SUM(A1)"),
        ("-2+3", "'-2+3"),
        ("@import", "'@import"),
        ("\tx", "'\tx"),
        ("\rx", "'\nx"),
        ("\t-1", "'\t'-1"),
        ("  =1", "'  =1"),
        ("\uff1d1", "'\uff1d1"),
        ("-1_000", "'-1_000"),
        ("-0.25", "-0.25"),
        ("+1e-9", "+1e-9"),
        ("-.5", "-.5"),
        ("-inf", "-inf"),
        ("nan", "nan"),
        ("seen;=cmd()", "seen;'=cmd()"),
        ("off; +x; @y", "off; '+x; '@y"),
        ("one\r=two\r\n=three", "one\n'=two\n'=three"),
        ("one\r\ntwo\rthree", "one\ntwo\nthree"),
        ("a\x00b\x1b[31m", "a\ufffdb\ufffd[31m"),
        ("plain = text", "plain = text"),
        ('a,"b"\nc', 'a,"b"\nc'),
    ],
)
def test_no_text_is_a_formula_in_a_spreadsheet(
    text: str, written: str, make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf, tmp_path: Path
) -> None:
    rows = [
        make_row(message=text, implementation=text),
        make_row(comparison="printed", index="0", reference_text=text, called=text, value=-0.5),
    ]
    directory = write_run(rows, label=text, name="run", command=text)
    write_report(frames_of(directory), tmp_path / "report")
    (result,) = read_csv(tmp_path / "report" / "results.csv")
    assert (result["message"], result["implementation"], result["environment"]) == (written, written, written)
    (number,) = read_csv(tmp_path / "report" / "numbers.csv")
    assert (number["printed"], number["called"], number["value"]) == (written, written, "-0.5")
    (environment,) = read_csv(tmp_path / "report" / "environments.csv")
    assert environment["command"] == written
    # Programs read Parquet, and there the text is what it was.
    assert pd.read_parquet(tmp_path / "report" / "results.parquet")["message"].tolist() == [text]


def test_a_cell_that_is_harmless_stays_so() -> None:
    for text in ("=1", "a;=1", "\r=1", "'=1"):
        assert harmless(harmless(text)) == harmless(text)


def test_no_value_is_no_cell_and_an_empty_text_is_one(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf, tmp_path: Path
) -> None:
    write_report(frames_of(write_run([make_row(value=float("inf"), difference=None)])), tmp_path / "report")
    line = (tmp_path / "report" / "results.csv").read_text(encoding="utf-8").splitlines()[1]
    (row,) = read_csv(tmp_path / "report" / "results.csv")
    assert (row["value"], row["difference"], row["message"], row["reason"]) == ("inf", "", "", "")
    assert line.endswith(f',""{"," * (len(RESULTS) - RESULTS.index("message") - 1)}')


def test_junit_goes_where_it_is_asked_for(document_frames: Frames, tmp_path: Path) -> None:
    write_junit(document_frames, tmp_path / "new" / "all.xml")
    assert (tmp_path / "new" / "all.xml").read_text(encoding="utf-8") == "".join(render_junit(document_frames))
    with pytest.raises(OutputError, match=r"new cannot be written: [^\n]+$"):
        write_junit(document_frames, tmp_path / "new")


def test_a_report_of_nothing_can_be_written_and_read(write_run: WriteRun, frames_of: FramesOf, tmp_path: Path) -> None:
    write_report(frames_of(write_run()), tmp_path / "report")
    assert read_csv(tmp_path / "report" / "results.csv") == []
    assert len(pd.read_parquet(tmp_path / "report" / "pairs.parquet")) == 0


def test_a_folder_that_cannot_be_written_is_told_in_one_line(
    write_run: WriteRun, frames_of: FramesOf, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OutputError, match=r"file(/below)? cannot be written: [^\n]+$"):
            write_report(frames_of(write_run()), folder)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_table_of_many_rows_is_written_as_parquet_only(
    document_frames: Frames, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_report(document_frames, tmp_path)
    assert (tmp_path / "results.csv").is_file()
    monkeypatch.setattr("attncheck.reports.write._MOST_ROWS", len(document_frames.results) - 1)
    write_report(document_frames, tmp_path)
    assert not (tmp_path / "results.csv").exists()
    assert len(pd.read_parquet(tmp_path / "results.parquet")) == len(document_frames.results)
