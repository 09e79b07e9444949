"""The files of a report: all of them, the same bytes every time, and harmless in a spreadsheet."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from attncheck.errors import OutputError
from attncheck.merge import merge_runs
from attncheck.reports.build_frames import RESULTS, make_frames
from attncheck.reports.frames import Frames
from attncheck.reports.junit import render_junit
from attncheck.reports.markdown.report import render_markdown
from attncheck.reports.write import harmless, write_junit, write_report
from attncheck.results.reader import read_run
from attncheck.results.records import CaseRecords


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_every_frame_is_written_as_csv_and_parquet(document_frames: Frames, document_report: Path) -> None:
    assert (document_report / "report.md").read_text(encoding="utf-8") == render_markdown(document_frames)
    assert set(contents(document_report)) == {"report.md", "report.html", "junit.xml"} | {
        f"{name}.{suffix}" for name in document_frames.tables() for suffix in ("csv", "parquet")
    }
    for name, frame in document_frames.tables().items():
        rows = read_csv(document_report / f"{name}.csv")
        assert len(rows) == len(frame)
        assert list(rows[0]) == list(frame.columns)
        pd.testing.assert_frame_equal(pd.read_parquet(document_report / f"{name}.parquet"), frame, check_dtype=False)
    # Numbers in CSV are exact, and lines end alike on every platform.
    values = [float(row["value"]) for row in read_csv(document_report / "numbers.csv")]
    assert values == document_frames.numbers["value"].tolist()
    texts = {name: each for name, each in contents(document_report).items() if "parquet" not in name}
    assert not [name for name, content in texts.items() if b"\r" in content]


def test_the_same_results_give_the_same_bytes(document_run: Path, document_report: Path, tmp_path: Path) -> None:
    """As if workers had answered, and files been written, in another order."""
    run = read_run(document_run)
    environment = dict(reversed(run.environment.items()))
    environment["versions"] = dict(reversed(run.environment["versions"].items()))
    cases = CaseRecords(reversed(list(run.cases.values())))
    shuffled = replace(run, rows=run.rows.sample(frac=1, random_state=7), cases=cases, environment=environment)
    write_report(make_frames(merge_runs([shuffled])), tmp_path / "second")
    assert contents(tmp_path / "second") == contents(document_report)


FORMULAS = [
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
]


def test_no_text_is_a_formula_in_a_spreadsheet(tmp_path: Path, hand: Any) -> None:
    rows = []
    for number, (text, _) in enumerate(FORMULAS):
        case = f"file/{number:02}"
        rows.append(hand.row(case=case, message=text, implementation=text))
        printed = {"index": "0", "reference_text": text, "called": text, "value": -0.5}
        rows.append(hand.row(case=case, comparison="printed", **printed))
    write_report(hand.frames(rows, label="=1", name="run", command="=cmd()"), tmp_path / "report")
    written = sorted(written for _, written in FORMULAS)
    results = [row for row in read_csv(tmp_path / "report" / "results.csv") if row["message"]]
    assert sorted(row["message"] for row in results) == written
    assert all(row["message"] == row["implementation"] and row["environment"] == "'=1" for row in results)
    numbers = read_csv(tmp_path / "report" / "numbers.csv")
    assert sorted(row["printed"] for row in numbers) == sorted(row["called"] for row in numbers) == written
    assert {row["value"] for row in numbers} == {"-0.5"}
    (environment,) = read_csv(tmp_path / "report" / "environments.csv")
    assert environment["command"] == "'=cmd()"
    # Programs read Parquet, and there the text is what it was.
    kept = pd.read_parquet(tmp_path / "report" / "results.parquet")["message"]
    assert sorted(kept[kept != ""]) == sorted(text for text, _ in FORMULAS)


def test_a_cell_that_is_harmless_stays_so() -> None:
    for text in ("=1", "a;=1", "\r=1", "'=1"):
        assert harmless(harmless(text)) == harmless(text)


def test_no_value_is_no_cell_and_an_empty_text_is_one(tmp_path: Path, hand: Any) -> None:
    write_report(hand.frames([hand.row(value=float("inf"), difference=None)]), tmp_path / "report")
    line = (tmp_path / "report" / "results.csv").read_text(encoding="utf-8").splitlines()[1]
    (row,) = read_csv(tmp_path / "report" / "results.csv")
    assert (row["value"], row["difference"], row["message"], row["reason"]) == ("inf", "", "", "")
    assert line.endswith(f',""{"," * (len(RESULTS) - RESULTS.index("message") - 1)}')


def test_junit_goes_where_it_is_asked_for(document_frames: Frames, tmp_path: Path) -> None:
    write_junit(document_frames, tmp_path / "new" / "all.xml")
    assert (tmp_path / "new" / "all.xml").read_text(encoding="utf-8") == "".join(render_junit(document_frames))
    with pytest.raises(OutputError, match=r"new cannot be written: [^\n]+$"):
        write_junit(document_frames, tmp_path / "new")


def test_a_report_of_nothing_can_be_written_and_read(tmp_path: Path, hand: Any) -> None:
    write_report(hand.frames(), tmp_path / "report")
    assert read_csv(tmp_path / "report" / "results.csv") == []
    assert len(pd.read_parquet(tmp_path / "report" / "pairs.parquet")) == 0


def test_a_folder_that_cannot_be_written_is_told_in_one_line(tmp_path: Path, hand: Any) -> None:
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OutputError, match=r"file(/below)? cannot be written: [^\n]+$"):
            write_report(hand.frames(), folder)
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
