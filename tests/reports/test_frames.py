"""The frames that every report is made of, the arrays that were kept, and both as CSV and Parquet."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from attncheck.errors import OutputError
from attncheck.merge import merge_runs
from attncheck.reports.build_frames import COLUMNS, RESULTS, make_frames
from attncheck.reports.frames import (
    Column,
    Frames,
    KeptArrays,
    case_order,
    count_numbers,
    documents_of,
    failing,
    once_for_frames,
    records,
    stage_order,
    under_erratum,
)
from attncheck.reports.html.evidence import error_ratio
from attncheck.reports.write import harmless, write_junit, write_report
from attncheck.results.format import EXACT, INPUTS, Row, StoredArray, bound_name
from attncheck.results.reader import read_run, read_runs
from attncheck.results.records import CaseRecords
from attncheck.verdicts import Verdict


def rows_of_each_kind(hand: Any) -> list[Row]:
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
    return [hand.row(dtype=dtype, **fields) for dtype in ("float32", "float64") for fields in kinds]


def test_rows_are_parted_by_kind_in_one_order_with_the_versions_of_both_sides(hand: Any) -> None:
    rows, versions = rows_of_each_kind(hand), {"numpy.eager": "2.0", "torch.eager": "3.0"}
    frames = hand.frames(rows, versions=versions)
    assert (len(frames.results), len(frames.pairs), len(frames.numbers)) == (4, 4, 8)
    assert list(frames.numbers["basis"]) == ["known", "exact", "printed", "printed"] * 2
    assert list(frames.results["version"]) == ["2.0", "3.0"] * 2
    pairs = frames.pairs[["version", "other_version"]]
    assert pairs.astype(object).where(pairs.notna(), None).values.tolist() == [["2.0", "3.0"], ["3.0", None]] * 2
    assert frames.columns == (Column("local", "numpy.eager", "2.0"), Column("local", "torch.eager", "3.0"))
    for order in (rows[::-1], [*rows[5:], *rows[:5]], sorted(rows, key=repr)):
        for name, frame in hand.frames(order, versions=versions).tables().items():
            pd.testing.assert_frame_equal(frame, frames.tables()[name])


def test_rows_are_sorted_by_dtype_stage_and_index_and_not_by_their_spelling(hand: Any) -> None:
    wanted = [
        (dtype, stage, index)
        for dtype in ("float64", "float32", "bfloat16", "float16")
        for stage in ("scores", "weights", "output", "a name of its own")
        for index in ("0,2", "0,10", "1,0")
    ]
    rows = [{"comparison": "known", "dtype": dtype, "stage": stage, "index": index} for dtype, stage, index in wanted]
    numbers = hand.frames(reversed(rows)).numbers
    assert list(zip(numbers["dtype"], numbers["stage"], numbers["index"], strict=True)) == wanted
    names = ["row_maxima", "output", "weights", "", "query", "scores", "raw_scores", "an_own_one"]
    assert sorted(names, key=stage_order) == [
        "query", "raw_scores", "scores", "weights", "output", "", "an_own_one", "row_maxima",
    ]  # fmt: skip


def test_every_column_is_documented(document_frames: Frames) -> None:
    for name in ("results", "pairs", "numbers"):
        columns = {column.removeprefix("other_") for column in document_frames.tables()[name].columns}
        assert not columns - COLUMNS.keys(), name


def test_two_environments_are_told_apart(hand: Any) -> None:
    frames = hand.frames_of(
        hand.run([{}], label="old", versions={"numpy.eager": "1.0"}, exit_code=1),
        hand.run([{}], label="new", versions={"numpy.eager": "2.0"}, summary=False, flags={"B": "2", "A": "1"}),
    )
    assert frames.columns == (Column("new", "numpy.eager", "2.0"), Column("old", "numpy.eager", "1.0"))
    assert frames.columns[0].title(with_environment=False) == "numpy.eager 2.0"
    assert frames.columns[0].title(with_environment=True) == "numpy.eager 2.0 (new)"
    found = frames.environments
    assert list(found["environment"]) == ["new", "old"]
    assert list(found["complete"]) == [False, True]
    assert list(found["version_numpy.eager"]) == ["2.0", "1.0"]
    assert (found["flags"][0], found["exit_code"].isna().tolist()) == ("A=1 B=2", [True, False])


INTERRUPTED = "this run was interrupted, or is still going on: its results are not complete"
NO_JAX = {"jax": "not installed"}


@pytest.mark.parametrize(
    ("runs", "notes", "is_incomplete", "has_faults"),
    [
        ([{"left_out": NO_JAX}], ["jax was left out: not installed"], False, False),
        ([{"missing": NO_JAX}], ["jax could not run: not installed"], True, False),
        ([{"faults": ["x.yaml:3: wrong"], "summary": False}], ["bad case: x.yaml:3: wrong", INTERRUPTED], True, True),
        ([{"label": "a", "left_out": NO_JAX}, {"label": "b"}], ["a: jax was left out: not installed"], False, False),
        (
            [{"label": "a", "missing": NO_JAX}, {"label": "b", "rows": [{"implementation": "jax.eager"}]}],
            ["a: jax could not run: not installed; b ran it"],
            False,
            False,
        ),
    ],
)
def test_notes_say_what_did_not_run_and_what_another_environment_filled(
    runs: list[dict[str, Any]], notes: list[str], is_incomplete: bool, has_faults: bool, hand: Any
) -> None:
    frames = hand.frames_of(*(hand.run(**run) for run in runs))
    assert (list(frames.notes), frames.is_incomplete, frames.has_faults) == (notes, is_incomplete, has_faults)
    assert list(frames.problems) == [note for note in notes if is_incomplete]


def test_what_fails_is_what_the_exit_code_counts_and_nothing_known(hand: Any) -> None:
    rows = [
        {"case": f"file/{verdict}", "verdict": verdict, "stage": stage, "xfail": stage == "scores"}
        for verdict in Verdict
        for stage in ("weights", "scores")
    ]
    found = failing(hand.frames(rows).results)
    assert set(found["stage"]) == {"weights"}
    assert sorted(found["verdict"]) == sorted(verdict for verdict in Verdict if verdict.exit_code)


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
        {"comparison": "printed", "stage": stage, "index": f"0,0,0,{place}", "implementation": name}
        for stage in ("weights", "output")
        for place in range(3)
        for name in ("numpy.eager", "torch.eager")
    ]
    frames = hand.frames(numbers, cases=[hand.case(expected=expected)])
    flags = under_erratum(frames, frames.numbers)
    assert (set(frames.numbers[flags]["stage"]), flags.sum(), count_numbers(frames.numbers)) == ({"weights"}, 6, 6)


def test_rows_that_were_judged_are_whole_numbers_beside_cells_that_are_empty(hand: Any) -> None:
    some = [{"judged_rows": 64, "query_rows": 4096}, {"stage": "scores"}, {"comparison": "pair", "other": "b"}]
    for rows, lines in ((some, ",\n64,4096\n"), ([{}], ",\n")):
        csv = hand.frames(rows).results[["judged_rows", "query_rows"]].to_csv(index=False)
        assert csv == f"judged_rows,query_rows\n{lines}"


def test_what_is_made_of_frames_alone_is_made_once(hand: Any) -> None:
    calls: list[Frames] = []
    counted = once_for_frames(lambda frames: calls.append(frames) or len(calls))  # type: ignore[func-returns-value]
    first, second = hand.frames([{}]), hand.frames([{}])
    assert [counted(frames) for frames in (first, first, second, first)] == [1, 1, 2, 1]


def test_records_are_those_of_pandas(document_frames: Frames) -> None:
    odd = pd.DataFrame(
        {
            "texts": pd.Series(["a", None, "b"], dtype="str"),
            "counts": pd.Series([1, None, 3], dtype="Int64"),
            "floats": [1.5, float("nan"), float("inf")],
            "flags": [True, False, True],
            "mixed": ["x", None, 3],
        }
    )
    for frame in (document_frames.results, document_frames.environments, document_frames.results[:0], odd):
        expected, found = frame.to_dict("records"), records(frame)
        assert repr(found) == repr(expected)
        kinds = [[type(value) for value in row.values()] for row in expected]
        assert [[type(value) for value in row.values()] for row in found] == kinds


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
    for empty in (KeptArrays(), KeptArrays({"local": hand.run()})):
        assert (empty.of("file/one", "float64"), empty.units()) == ({}, ())


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
    first, second = (hand.run(arrays=[stored(np.arange(99.0))]) for _ in range(2))
    damage(first / "arrays" / "part-00000.parquet")
    found = KeptArrays({"a": first, "b": second}).of("file/one", "float64")
    assert list(found) == [("b", "numpy.eager", "output")]


def test_the_error_ratio_is_that_of_the_rows_nan_where_nothing_is_judged_and_infinite_where_nan_stands_alone(
    document_frames: Frames,
) -> None:
    nan, inf = np.nan, np.inf
    computed = np.array([1.5, 1.0, 7.0, 7.0, nan, nan, inf, 2.0])
    exact = np.array([1.0, 1.0, nan, 1.0, nan, 1.0, inf, 1.0])
    allowed = np.array([0.25, 0.0, inf, nan, 0.0, 0.5, 0.0, 0.0])
    np.testing.assert_array_equal(error_ratio(computed, exact, allowed), [2.0, 0.0, nan, nan, 0.0, inf, 0.0, inf])
    rows = document_frames.results
    rows = rows[(rows["dtype"] == "float32") & (rows["ratio"] > 0) & rows["case"].str.contains("base_r")]
    assert len(rows) > 4
    for row in rows.itertuples():
        kept = document_frames.arrays.of(row.case, "float32")
        names = (row.implementation, EXACT, bound_name("native"))
        found = error_ratio(*(kept[row.environment, name, row.stage] for name in names))
        assert np.nanmax(found) == pytest.approx(row.ratio, rel=1e-6)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_every_frame_is_written_as_csv_and_parquet(document_frames: Frames, document_report: Path) -> None:
    written = contents(document_report)
    assert set(written) == {"report.md", "report.html", "junit.xml"} | {
        f"{name}.{suffix}" for name in document_frames.tables() for suffix in ("csv", "parquet")
    }
    for name, frame in document_frames.tables().items():
        rows = read_csv(document_report / f"{name}.csv")
        assert (len(rows), list(rows[0])) == (len(frame), list(frame.columns))
        pd.testing.assert_frame_equal(pd.read_parquet(document_report / f"{name}.parquet"), frame, check_dtype=False)
    # Numbers in CSV are exact, and lines end alike on every platform.
    values = [float(row["value"]) for row in read_csv(document_report / "numbers.csv")]
    assert values == document_frames.numbers["value"].tolist()
    assert not [name for name, content in written.items() if b"\r" in content and "parquet" not in name]


def test_the_same_results_give_the_same_bytes(document_run: Path, document_report: Path, tmp_path: Path) -> None:
    """As if workers had answered, and files been written, in another order."""
    run = read_run(document_run)
    environment = dict(reversed(run.environment.items()))
    environment["versions"] = dict(reversed(run.environment["versions"].items()))
    cases = CaseRecords(reversed(list(run.cases.values())))
    shuffled = replace(run, rows=run.rows.sample(frac=1, random_state=7), cases=cases, environment=environment)
    write_report(make_frames(merge_runs([shuffled])), tmp_path)
    assert contents(tmp_path) == contents(document_report)


FORMULAS = {
    "=cmd()": "'=cmd()",
    "+SUM(A1)": "'+SUM(A1)",
    "-2+3": "'-2+3",
    "@import": "'@import",
    "\tx": "'\tx",
    "\rx": "'\nx",
    "\t-1": "'\t'-1",
    "  =1": "'  =1",
    "\uff1d1": "'\uff1d1",
    "-1_000": "'-1_000",
    "-0.25": "-0.25",
    "+1e-9": "+1e-9",
    "-.5": "-.5",
    "-inf": "-inf",
    "nan": "nan",
    "seen;=cmd()": "seen;'=cmd()",
    "off; +x; @y": "off; '+x; '@y",
    "one\r=two\r\n=three": "one\n'=two\n'=three",
    "one\r\ntwo\rthree": "one\ntwo\nthree",
    "a\x00b\x1b[31m": "a\ufffdb\ufffd[31m",
    "plain = text": "plain = text",
    'a,"b"\nc': 'a,"b"\nc',
}


def test_no_text_is_a_formula_in_a_spreadsheet(tmp_path: Path, hand: Any) -> None:
    rows = []
    for number, text in enumerate(FORMULAS):
        case = f"file/{number:02}"
        rows.append(hand.row(case=case, message=text, implementation=text))
        printed = {"index": "0", "reference_text": text, "called": text, "value": -0.5}
        rows.append(hand.row(case=case, comparison="printed", **printed))
    write_report(hand.frames(rows, label="=1", command="=cmd()"), tmp_path)
    written = sorted(FORMULAS.values())
    results = [row for row in read_csv(tmp_path / "results.csv") if row["message"]]
    assert sorted(row["message"] for row in results) == written
    assert all(row["message"] == row["implementation"] and row["environment"] == "'=1" for row in results)
    numbers = read_csv(tmp_path / "numbers.csv")
    assert sorted(row["printed"] for row in numbers) == sorted(row["called"] for row in numbers) == written
    assert {row["value"] for row in numbers} == {"-0.5"}
    (environment,) = read_csv(tmp_path / "environments.csv")
    assert environment["command"] == "'=cmd()"
    # Programs read Parquet, and there the text is what it was.
    kept = pd.read_parquet(tmp_path / "results.parquet")["message"]
    assert sorted(kept[kept != ""]) == sorted(FORMULAS)
    for text in ("=1", "a;=1", "\r=1", "'=1"):
        assert harmless(harmless(text)) == harmless(text)


def test_no_value_is_no_cell_and_an_empty_text_is_one(tmp_path: Path, hand: Any) -> None:
    write_report(hand.frames([{"value": float("inf"), "difference": None}]), tmp_path)
    line = (tmp_path / "results.csv").read_text(encoding="utf-8").splitlines()[1]
    (row,) = read_csv(tmp_path / "results.csv")
    assert (row["value"], row["difference"], row["message"], row["reason"]) == ("inf", "", "", "")
    assert line.endswith(f',""{"," * (len(RESULTS) - RESULTS.index("message") - 1)}')


def test_results_without_a_row_are_frames_and_a_report_too(tmp_path: Path, hand: Any) -> None:
    assert read_runs([]) == []
    frames = hand.frames()
    assert [len(frame) for frame in frames.tables().values()] == [0, 0, 0, 1]
    assert (frames.columns, frames.cases, frames.notes) == ((), {}, ())
    write_report(frames, tmp_path)
    assert read_csv(tmp_path / "results.csv") == []
    assert len(pd.read_parquet(tmp_path / "pairs.parquet")) == 0


def test_what_cannot_be_written_is_told_in_one_line(tmp_path: Path, hand: Any) -> None:
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OutputError, match=r"file(/below)? cannot be written: [^\n]+$"):
            write_report(hand.frames(), folder)
    assert (tmp_path / "file").read_text() == "mine"
    write_junit(hand.frames(), tmp_path / "new" / "all.xml")
    with pytest.raises(OutputError, match=r"new cannot be written: [^\n]+$"):
        write_junit(hand.frames(), tmp_path / "new")


def test_a_table_of_many_rows_is_written_as_parquet_only(
    hand: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = hand.frames([{}, {"stage": "output"}])
    write_report(frames, tmp_path)
    assert (tmp_path / "results.csv").is_file()
    monkeypatch.setattr("attncheck.reports.write._MOST_ROWS", 1)
    write_report(frames, tmp_path)
    assert not (tmp_path / "results.csv").exists()
    assert len(pd.read_parquet(tmp_path / "results.parquet")) == 2
