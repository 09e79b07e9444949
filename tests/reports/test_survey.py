"""The survey: rows of every implementation and version, counted from runs, kept as CSV and shown as two pages."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attncheck import cli
from attncheck.errors import ResultsError
from attncheck.properties.files import write_property_rows
from attncheck.properties.rows import PropertyRow
from attncheck.reports.frames import Frames
from attncheck.reports.html.survey import render_survey
from attncheck.reports.survey.findings import Finding, read_findings
from attncheck.reports.survey.pages import read_survey, render_markdown, write_survey
from attncheck.reports.survey.tables import (
    ALL,
    Accuracy,
    Judged,
    Meaning,
    PropertyCounts,
    Survey,
    differences,
    feature_order,
    features_of,
    property_counts,
    read_meanings,
    survey_of,
)
from attncheck.results.format import Row
from attncheck.verdicts import ALL_CASES

MakeRow = Callable[..., Row]
WriteRun = Callable[..., Path]
FramesOf = Callable[..., Frames]
NO_CASES = dict.fromkeys(("known", "wrong", "unsupported", "unverified", "not_run"), 0)


def judged(name: str = "torch.sdpa", version: str = "2.0", feature: str = ALL, right: int = 3, **counts: int) -> Judged:
    return Judged(name, version, feature, right, **{**NO_CASES, **counts})


def a_survey() -> Survey:
    return Survey(
        [judged(), judged(feature="attention", wrong=1), judged("numpy.eager", "1.0", known=2)],
        [Accuracy("torch.sdpa", "2.0", "float32", 7, 0.1, 0.9)],
        [
            Meaning("torch.sdpa", "corner", "where causality starts", "top left", "top left", departs=False),
            Meaning("mlx.sdpa", "corner", "where causality starts", "bottom | right", "top left", departs=True),
        ],
        [Finding("mlx", "0.32", "float64 is float32", "A `cast` is lost.\n\nIt was <reported>.", "print(1 < 2)\n")],
        [
            PropertyCounts("mlx.sdpa", "decoding", "float32", bitwise=1, within_bounds=2, open=0, known=0, broken=1),
            PropertyCounts("torch.sdpa", "repeated", "float32", bitwise=3, within_bounds=0, open=0, known=0, broken=0),
            PropertyCounts("torch.sdpa", "decoding", "float32", bitwise=1, within_bounds=2, open=0, known=0, broken=0),
        ],
    )


def test_features_are_operations_and_what_attention_is_given() -> None:
    inputs = {"query": (1, 1, 2, 3), "key": (1, 1, 2, 3), "value": (1, 1, 2, 3), "bias": (1, 1, 2, 2)}
    case = {"operation": "attention", "options": {"is_causal": True}, "inputs": inputs}
    assert set(features_of(case)) == {ALL, "attention", "attention: is_causal", "attention: bias"}
    assert features_of({**case, "operation": "softmax", "inputs": {}}) == [ALL, "softmax"]
    assert {*features_of(case)} <= {*feature_order()}
    assert len(feature_order()) == len(set(feature_order()))


def test_a_case_counts_by_the_worst_of_its_dtypes(write_run: WriteRun, make_row: MakeRow, frames_of: FramesOf) -> None:
    rows = [
        make_row(case="a/right", dtype="float64"),
        make_row(case="a/right", dtype="float32"),
        make_row(case="a/wrong", dtype="float64"),
        make_row(case="a/wrong", dtype="float32", verdict="numeric"),
        make_row(case="a/lacking", verdict="unsupported", stage="", lacks="mask"),
        make_row(case="a/left-out", verdict="unsupported", stage="", lacks=ALL_CASES),
    ]
    found = survey_of(frames_of(write_run(rows)))
    (of_all,) = [row for row in found.judged if row.feature == ALL]
    assert of_all[3:] == (1, 0, 1, 1, 0, 1)
    assert {row.dtype for row in found.accuracy} <= {"float64", "float32"}


def test_documents_are_counted_and_their_accuracy_is_that_of_their_stages(document_frames: Frames) -> None:
    found = survey_of(document_frames)
    assert set(found.newest()) == {"first.eager", "second.eager"}
    for row in found.judged:
        if row.feature == ALL:
            assert row.right + row.unverified == len(document_frames.cases)
    assert all(0 <= row.median <= row.most <= 1 for row in found.accuracy)


def test_rows_of_the_same_version_are_replaced_and_others_stay() -> None:
    kept = a_survey()
    kept.update(Survey([judged(right=9), judged("torch.sdpa", "2.10", right=5)]))
    assert [row.right for row in kept.judged if row.implementation == "torch.sdpa"] == [9, 5]
    assert kept.newest()["torch.sdpa"] == "2.10"
    assert [row.implementation for row in kept.judged].count("numpy.eager") == 1
    assert not kept.accuracy, "what was measured of the version that was replaced goes with it"
    assert len(kept.meanings) == 2


def test_what_is_written_is_read_again_and_the_same_gives_the_same_bytes(tmp_path: Path) -> None:
    survey = a_survey()
    write_survey(survey, tmp_path / "one")
    again = read_survey(tmp_path / "one")
    assert (sorted(again.judged), again.accuracy, sorted(again.meanings)) == (
        sorted(survey.judged),
        survey.accuracy,
        sorted(survey.meanings),
    )
    write_survey(again, tmp_path / "two")
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def property_row(name: str, outcome: str, implementation: str = "torch.sdpa", **other: Any) -> PropertyRow:
    return PropertyRow(implementation, name, "properties/one", "float32", "alone", outcome, **other)


def test_ways_in_which_properties_were_asked_are_counted_by_what_came_of_them() -> None:
    rows = [
        property_row("repeated", "bitwise"),
        property_row("decoding", "within bounds", claim="bitwise"),
        property_row("decoding", "broken", xfail=True),
        property_row("decoding", "not judged"),
        property_row("decoding", "unsupported"),
        property_row("padding", "unsupported"),
        property_row("repeated", "within bounds", implementation="numpy.eager"),
    ]
    assert property_counts(rows) == [
        PropertyCounts("numpy.eager", "repeated", "float32", bitwise=0, within_bounds=1, open=0, known=0, broken=0),
        PropertyCounts("torch.sdpa", "repeated", "float32", bitwise=1, within_bounds=0, open=0, known=0, broken=0),
        PropertyCounts("torch.sdpa", "decoding", "float32", bitwise=0, within_bounds=0, open=1, known=1, broken=1),
    ]
    assert [row.worst for row in property_counts(rows)] == ["within bounds", "bitwise", "broken"]


def test_properties_are_shown_by_their_worst_and_those_of_others_stay(tmp_path: Path) -> None:
    kept = a_survey()
    kept.update(
        Survey(
            properties=[
                PropertyCounts("mlx.sdpa", "repeated", "float32", bitwise=0, within_bounds=0, open=0, known=1, broken=0)
            ]
        )
    )
    assert {(row.implementation, row.property_name) for row in kept.properties} == {
        ("mlx.sdpa", "repeated"),
        ("torch.sdpa", "repeated"),
        ("torch.sdpa", "decoding"),
    }
    markdown, page = render_markdown(a_survey()), render_survey(a_survey())
    assert "- `decoding`: Tokens decoded one by one give what prefilling them gives." in markdown
    assert "  - **broken**: `mlx.sdpa`\n  - within bounds: `torch.sdpa`\n" in markdown
    assert '<td class="failing" title="1 bitwise, 2 within bounds, 1 broken">broken</td>' in page
    assert '<td class="unsupported" title="it has not what the calls need">-</td>' in page
    assert "properties" not in render_survey(Survey([judged()])), "none were asked"
    write_survey(kept, tmp_path)
    assert sorted(read_survey(tmp_path).properties) == sorted(kept.properties)


def test_properties_are_taken_from_the_folder_that_they_were_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ends_with(*arguments: str | Path) -> object:
        monkeypatch.setattr(sys, "argv", ["attncheck", "survey", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code

    write_property_rows(tmp_path / "asked", [property_row("repeated", "bitwise")])
    (tmp_path / "empty").mkdir()
    assert not ends_with("--properties", tmp_path / "asked", "--output", tmp_path / "survey")
    assert [row.worst for row in read_survey(tmp_path / "survey").properties] == ["bitwise"]
    assert ends_with("--properties", tmp_path / "empty") == 2
    assert "holds no properties; `attncheck properties" in capsys.readouterr().err
    assert ends_with("--output", tmp_path / "survey") == 2
    assert "expected a run, --conventions, --properties or --findings" in capsys.readouterr().err
    assert ends_with("--check", "--properties", tmp_path / "asked", "--output", tmp_path / "survey") == 2
    assert "nothing to check; expected a run" in capsys.readouterr().err


def test_findings_are_read_from_their_document(tmp_path: Path) -> None:
    path = tmp_path / "findings.md"
    path.write_text(
        "# Findings\n\nAbout them.\n\n## onnx 1.23: the `wrong` stage, at all\n\nA text with a [thread](https://x/1).\n\n"
        "```python\nimport onnx\nprint(1)\n```\n\nMore of it.\n\n## mlx 0.32: another\n\n```python\nprint(2)\n```\n",
        encoding="utf-8",
    )
    first, second = read_findings(path)
    assert first == Finding(
        "onnx", "1.23", "the `wrong` stage, at all", "A text with a thread.\n\nMore of it.", "import onnx\nprint(1)\n"
    )
    assert first.anchor == "onnx-123-the-wrong-stage-at-all"
    assert (second.text, second.script) == ("", "print(2)\n")
    path.write_text("## mlx 0.32: another\n\nNo script.\n", encoding="utf-8")
    with pytest.raises(ResultsError, match=r"'another' has no script; expected a block that begins with ```python"):
        read_findings(path)
    path.write_text("nothing", encoding="utf-8")
    with pytest.raises(ResultsError, match="expected a heading such as"):
        read_findings(path)
    with pytest.raises(ResultsError, match="cannot be read"):
        read_findings(tmp_path / "absent.md")


def test_findings_are_shown_with_their_scripts_and_those_of_a_new_survey_replace_them() -> None:
    survey = a_survey()
    page, markdown = render_survey(survey), render_markdown(survey)
    assert "<summary>mlx 0.32: float64 is float32</summary>" in page
    assert "<p>A <code>cast</code> is lost.</p>" in page
    assert "It was &lt;reported&gt;." in page
    assert "print(1 &lt; 2)" in page
    assert "- mlx 0.32: [float64 is float32](findings.md#mlx-032-float64-is-float32)" in markdown
    survey.update(Survey())
    assert len(survey.findings) == 1
    survey.update(Survey(findings=[Finding("onnx", "1", "another", "", "pass\n")]))
    assert [each.library for each in survey.findings] == ["onnx"]


def test_the_published_findings_are_those_of_the_document() -> None:
    root = Path(__file__).parents[2]
    assert read_survey(root / "reports" / "published" / "survey").findings == read_findings(
        root / "docs" / "findings.md"
    )


def test_a_damaged_table_is_said(tmp_path: Path) -> None:
    (tmp_path / "features.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(ResultsError, match=r"features\.csv has the columns a,b; expected implementation,version"):
        read_survey(tmp_path)
    (tmp_path / "features.csv").write_text(f"{','.join(Judged._fields)}\nx,1,all,many,0,0,0,0,0\n", encoding="utf-8")
    with pytest.raises(ResultsError, match=r"features\.csv cannot be read: invalid literal"):
        read_survey(tmp_path)


def test_the_markdown_says_who_is_wrong_and_what_means_something_else() -> None:
    text = render_markdown(a_survey())
    assert "| `torch.sdpa` | 2.0 | 3 | - | - | - | - | - |" in text
    assert "| `torch.sdpa` | attention | 1 | 3 |" in text
    assert r"**bottom \| right**: `mlx.sdpa`" in text
    assert "  - top left: `torch.sdpa`" in text
    assert "## Versions" not in text, "no implementation has several"


def test_the_page_needs_nothing_else_and_shows_any_text_as_it_is() -> None:
    survey = a_survey()
    survey.meanings.append(Meaning("<b>x</b>", "corner", "where", "<script>alert(1)</script>", "", departs=True))
    page = render_survey(survey)
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert not re.search(r"(?:src|href)=\"(?!#|data:)", page)
    assert '<td class="failing" title="3 right, 1 wrong">3, 1 wrong</td>' in page
    assert page == render_survey(survey)


def test_meanings_are_what_the_command_printed(tmp_path: Path) -> None:
    answer = {"convention": "corner", "asks": "where", "means": "top left", "cases_mean": "top left", "departs": False}
    answers = [{**answer, "kind": "measured"}, {**answer, "kind": "unsupported"}]
    (tmp_path / "found.json").write_text(json.dumps({"implementations": {"torch.sdpa": answers}}), encoding="utf-8")
    (only,) = read_meanings(tmp_path / "found.json")
    assert only == Meaning("torch.sdpa", "corner", "where", "top left", "top left", departs=False)
    (tmp_path / "found.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ResultsError, match="expected what `attncheck conventions --json` prints"):
        read_meanings(tmp_path / "found.json")


def test_a_run_is_held_against_what_is_kept() -> None:
    kept = a_survey()
    assert differences(kept, Survey([judged()])) == []
    assert differences(kept, Survey([judged(right=2, known=1)])) == [], "which another processor may do"
    assert differences(kept, Survey([judged(right=2, wrong=1)])) == [
        "torch.sdpa 2.0, all cases: right or known 3 -> 2, wrong 0 -> 1"
    ]
    assert differences(kept, Survey([judged(right=1, not_run=2)])) == [], "which stands for all"
    assert differences(kept, Survey([judged(right=0, wrong=1, not_run=2)])) == [
        "torch.sdpa 2.0, all cases: wrong 0 -> 1"
    ]
    assert differences(kept, Survey([judged(version="3.0")])) == ["torch.sdpa 3.0 is not in the survey"]
    assert differences(kept, Survey([judged(feature="softmax")])) == ["torch.sdpa 2.0, softmax: not in the survey"]


def test_the_command_writes_and_checks(
    document_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(
            sys, "argv", ["attncheck", "survey", str(document_run), "--output", str(tmp_path / "survey"), *arguments]
        )
        with pytest.raises(SystemExit) as end:
            cli.main()
        return int(end.value.code or 0), capsys.readouterr().out

    assert run() == (0, f"Survey: {tmp_path / 'survey' / 'index.html'}\n")
    assert run("--check") == (0, f"2 implementations are as {tmp_path / 'survey'} says.\n")
    file = tmp_path / "survey" / "features.csv"
    with file.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.reader(lines))
    rows[1][3] = "999"
    file.write_text("\n".join(map(",".join, rows)) + "\n", encoding="utf-8")
    code, printed = run("--check")
    assert code == 1
    assert "right or known 999 ->" in printed
