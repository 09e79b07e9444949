"""What is kept in the repository: the published comparison, and the survey of every implementation and version."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
from here import command_here
from tables import tables_beside

from attncheck.backends import BACKENDS
from attncheck.common.errors import OutputError, ResultsError, UsageError
from attncheck.execution.implementations import Implementation
from attncheck.reading.expected_failures import load_expected_failures
from attncheck.reports.comparison import change_lines, find_drift, publish_comparison, read_published_verdicts
from attncheck.reports.markdown import render_page_markdown
from attncheck.reports.survey import (
    ALL_CASES_FEATURE,
    Accuracy,
    JudgedFeature,
    PropertyCounts,
    PublishedFinding,
    Survey,
    SurveyedConvention,
    case_features,
    make_survey,
    ordered_features,
    read_findings,
    read_surveyed_conventions,
    survey_differences,
)
from attncheck.reports.survey_pages import make_survey_page, read_survey, render_survey, write_survey
from attncheck.results.format import Row
from attncheck.results.writer import write_property_rows
from attncheck.spec.verdicts import ALL_CASES

ROOT = Path(__file__).resolve().parents[2]


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def command(*words: str | Path) -> tuple[int, str, str]:
    """Run a command; return exit code, standard output and standard error."""
    return command_here(words)


def test_what_is_known_is_published_with_its_first_place_and_an_erratum_with_none(tmp_path: Path, hand: Any) -> None:
    known = {"case": "file/a", "verdict": "semantic", "xfail": True, "reason": "so"}
    erratum = {"case": "file/b", "comparison": "printed", "verdict": "misprint", "xfail": True}
    publish_comparison(
        hand.frames([known | {"stage": "output"}, known, {"case": "file/b"}, erratum]), tmp_path / "published"
    )
    assert (tmp_path / "published" / "verdicts.csv").read_text().splitlines()[1:] == [
        "file/a,numpy.eager,float64,semantic,weights,true",
        "file/b,numpy.eager,float64,misprint,,true",
    ]


def test_what_some_processors_do_alone_is_published_alike_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hand: Any
) -> None:
    (tmp_path / "known.yaml").write_text(tables_beside(__file__)["of a processor"], encoding="utf-8")
    known = load_expected_failures([tmp_path / "known.yaml"])
    monkeypatch.setattr("attncheck.reports.comparison.load_bundled_expected_failures", lambda backends: known)
    agrees = {"case": "file/a", "stage": "output"}
    fails = agrees | {"verdict": "nonfinite", "xfail": True, "reason": "so"}
    folder = tmp_path / "published"
    publish_comparison(hand.frames([agrees]), folder)
    assert (folder / "verdicts.csv").read_text().splitlines()[1:] == [
        "file/a,numpy.eager,float64,nonfinite with amx_bf16,,true"
    ]
    assert find_drift(hand.frames([fails]), folder).changes == []
    for worse in (fails | {"xfail": False}, fails | {"verdict": "numeric"}):
        assert len(find_drift(hand.frames([worse]), folder).changes) == 1


def test_what_is_not_published_or_was_not_asked_for_is_no_drift_and_is_told(tmp_path: Path, hand: Any) -> None:
    folder = tmp_path / "published"
    publish_comparison(hand.frames([{"case": f"file/{name}"} for name in "abc"]), folder)
    rest: list[dict[str, Any]] = [{"case": "file/b"}, {"case": "file/c"}]
    left_out = {"case": "file/a", "verdict": "unsupported", "stage": "", "lacks": ALL_CASES}
    new = [{"case": "file/new", "verdict": "numeric"}, {"case": "file/b", "dtype": "float32", "verdict": "numeric"}]
    run = hand.run([left_out, *rest, *new])
    code, out, err = command("publish", run, "--check", "--published", folder)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"All 2 verdicts are those published in {folder / 'verdicts.csv'}.",
        "numpy.eager was not asked for 1 evaluation, which others cover; --all-cases asks for all.",
        "1 case of the run is not published.",
    ]
    publish_comparison(hand.frames([left_out, *rest]), tmp_path / "of part")
    assert [evaluation.case for evaluation in read_published_verdicts(tmp_path / "of part")] == ["file/b", "file/c"]
    worse = hand.run([left_out, {"case": "file/b", "verdict": "numeric"}, {"case": "file/c"}])
    before = contents(folder)
    code, out, _ = command("publish", worse, "--check", "--published", folder)
    assert (code, out.splitlines()[0].partition(",")[0], contents(folder)) == (1, "1 verdict got worse", before)
    assert command("publish", run, "--check", "--published", folder, "--quiet") == (0, "", "")
    assert command("publish", hand.run([{"case": "file/new"}]), "--check", "--published", folder)[0] == 1


def test_complete_runs_are_published_each_implementation_once(tmp_path: Path, hand: Any) -> None:
    one, two = hand.run([{}], label="one"), hand.run([{"implementation": "torch.eager"}], label="two")
    publish_comparison(hand.frames_of(one, two), tmp_path / "published")
    assert len(read_published_verdicts(tmp_path / "published")) == 2
    with pytest.raises(UsageError, match=r"numpy.eager ran in again and in one; .* once"):
        publish_comparison(hand.frames_of(one, hand.run([{}], label="again")), tmp_path / "other")
    for what in ({"summary": False}, {"missing": {"torch": "no"}}, {"faults": ["bad.yaml: no"]}):
        with pytest.raises(UsageError, match="only complete runs are published: "):
            publish_comparison(hand.frames([{}], **what), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_hostile_names_are_no_formula_and_no_picture_outside_the_folder(tmp_path: Path, hand: Any) -> None:
    hostile = '=cmd|"x"!A1,\r\n;=2</td>`|\x1b'
    source = {"kind": "document", "title": hostile, "notes": [hostile]}
    case = hand.case("file/one", file="cases/../../escape me.yaml", name=hostile, source=source)
    row = {"verdict": "numeric"} | dict.fromkeys(("implementation", "stage", "message", "begins_at"), hostile)
    frames, folder = hand.frames([row], cases=[case]), tmp_path / "folder" / "published"
    publish_comparison(frames, folder)
    assert {path.name for path in folder.parent.iterdir()} == {"published"}
    with (folder / "verdicts.csv").open(encoding="utf-8", newline="") as file:
        ((_, implementation, _, _, begins_at, _),) = list(csv.reader(file))[1:]
    assert implementation == begins_at == "'=cmd|\"x\"!A1,\\r\\n;'=2</td>`|\\x1b"
    assert find_drift(frames, folder).changes == []
    readme = (folder / "README.md").read_text(encoding="utf-8")
    assert "</td>" not in re.sub(r"(?<!\\)`[^`]*`", "", readme).replace("\\</td\\>", "")


def test_what_cannot_be_compared_or_written_is_told_in_one_line(tmp_path: Path, hand: Any) -> None:
    frames = hand.frames([hand.row()])
    with pytest.raises(ResultsError, match=r"verdicts\.csv does not exist; restore it .*attncheck publish"):
        find_drift(frames, tmp_path / "nowhere")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "letter.txt").write_text("mine")
    with pytest.raises(OutputError, match="is not empty and contains no published comparison"):
        publish_comparison(frames, mine)
    assert contents(mine) == {"letter.txt": b"mine"}
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match=r"file cannot be written: [^\n]+$"):
        publish_comparison(frames, tmp_path / "file")
    header = "case,implementation,dtype,verdict,begins_at,xfail\n"
    row = "file/one,numpy.eager,float64,agree,,false\n"
    for text, complaint in {
        "": "has the columns ; expected case,",
        "case,verdict\n": "has the columns case,verdict; expected case,",
        f"{header}file/one,agree\n": "row 2 has 2 cells; expected 6",
        f"{header}{row}{row}": "row 3 repeats file/one numpy.eager float64",
        "\x80": "cannot be read",
    }.items():
        (mine / "verdicts.csv").write_bytes(text.encode("latin-1"))
        with pytest.raises(ResultsError, match=complaint):
            read_published_verdicts(mine)


def test_the_repository_publishes_the_implementations_of_all_frameworks() -> None:
    verdicts = read_published_verdicts(ROOT / "reports" / "published")
    assert {place.implementation for place in verdicts} == {Implementation(entry).name for entry in BACKENDS.values()}


NO_CASES = dict.fromkeys(("known", "wrong", "unsupported", "unverified", "not_run"), 0)


def judged(
    name: str = "torch.sdpa", version: str = "2.0", feature: str = ALL_CASES_FEATURE, right: int = 3, **counts: int
) -> JudgedFeature:
    return JudgedFeature(name, version, feature, right, **{**NO_CASES, **counts})


def counts(name: str, property_name: str, *numbers: int) -> PropertyCounts:
    """``numbers`` are bitwise, within bounds, open, known and broken."""
    return PropertyCounts(name, property_name, "float32", *numbers)


def meaning(name: str, means: str, *, departs: bool = False) -> SurveyedConvention:
    return SurveyedConvention(name, "corner", "where causality starts", means, "top left", departs=departs)


def a_survey() -> Survey:
    return Survey(
        [judged(), judged(feature="attention", wrong=1), judged("numpy.eager", "1.0", known=2)],
        [Accuracy("torch.sdpa", "2.0", "float32", 7, 0.1, 0.9)],
        [meaning("torch.sdpa", "top left"), meaning("<b>x</b>", "<i>right</i> | `x`", departs=True)],
        [
            PublishedFinding(
                "mlx", "0.32", "float64 is float32", "A `cast` is lost.\n\nIt was <reported>.", "print(1 < 2)\n"
            )
        ],
        [
            counts("mlx.sdpa", "decoding", 1, 2, 0, 0, 1),
            counts("torch.sdpa", "repeated", 3, 0, 0, 0, 0),
            counts("torch.sdpa", "decoding", 1, 2, 0, 0, 0),
        ],
    )


def test_rows_of_the_same_version_are_replaced_others_stay_and_what_is_written_is_read_again(tmp_path: Path) -> None:
    kept = a_survey()
    another = PublishedFinding("onnx", "1", "another", "", "pass\n")
    new = [judged(right=9), judged("torch.sdpa", "2.10", right=5)]
    kept.update(Survey(new, properties=[counts("mlx.sdpa", "repeated", 0, 0, 0, 1, 0)], findings=[another]))
    assert [row.right for row in kept.judged if row.implementation == "torch.sdpa"] == [9, 5]
    assert kept.newest_versions()["torch.sdpa"] == "2.10"
    assert [row.implementation for row in kept.judged].count("numpy.eager") == 1
    assert not kept.accuracy, "what was measured of the version that was replaced goes with it"
    assert {(row.implementation, row.property_name) for row in kept.properties} == {
        ("mlx.sdpa", "repeated"),
        ("torch.sdpa", "repeated"),
        ("torch.sdpa", "decoding"),
    }
    assert (len(kept.meanings), [each.library for each in kept.findings]) == (2, ["onnx"])
    survey = a_survey()
    write_survey(survey, tmp_path / "one")
    again = read_survey(tmp_path / "one")
    for name in ("judged", "accuracy", "meanings", "properties"):
        assert sorted(getattr(again, name)) == sorted(getattr(survey, name)), name
    write_survey(again, tmp_path / "two")
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


def test_ways_in_which_properties_were_asked_are_counted_by_what_came_of_them(tmp_path: Path) -> None:
    place: dict[str, Any] = {"case": "properties/one", "operation": "attention", "dtype": "float32", "stage": ""}
    place |= {"implementation": "torch.sdpa", "comparison": "property", "variant": "alone"}
    write_property_rows(tmp_path / "asked", [Row(**{**place, **fields}) for fields in tables_beside(__file__)["asked"]])
    assert command("survey", "--properties", tmp_path / "asked", "--output", tmp_path / "survey")[0] == 0
    found = read_survey(tmp_path / "survey").properties
    assert found == [
        counts("torch.sdpa", "repeated", 1, 0, 0, 0, 0),
        counts("torch.sdpa", "decoding", 0, 0, 1, 1, 1),
    ]
    assert [row.worst for row in found] == ["bitwise", "broken"]


def test_a_missing_table_of_a_survey_is_an_error(tmp_path: Path) -> None:
    assert read_survey(tmp_path) == Survey()
    with pytest.raises(ResultsError, match=r"does not exist; .*restore them from version control"):
        read_survey(tmp_path, must_exist=True)
    write_survey(Survey(), tmp_path)
    assert read_survey(tmp_path, must_exist=True) == Survey()
    (tmp_path / "accuracy.csv").unlink()
    with pytest.raises(ResultsError, match=r"accuracy\.csv does not exist"):
        read_survey(tmp_path)


def test_a_damaged_table_or_document_is_said(tmp_path: Path) -> None:
    columns = ",".join(JudgedFeature._fields)
    write_survey(Survey(), tmp_path)
    for read, name, text, said in (
        (read_survey, "features.csv", "a,b\n1,2\n", r"features\.csv has the columns a,b; expected implementation,"),
        (read_survey, "features.csv", f"{columns}\nx,1,all,many,0,0,0,0,0\n", r"features\.csv cannot be read: invalid"),
        (read_surveyed_conventions, "found.json", "[]", "expected what `attncheck conventions --json` prints"),
        (
            read_findings,
            "f.md",
            "## mlx 0.32: other\n\nNone.\n",
            "'other' has no script; expected a block that",
        ),
        (read_findings, "f.md", "nothing", "expected a heading such as"),
    ):
        (tmp_path / name).write_text(text, encoding="utf-8")
        with pytest.raises(ResultsError, match=said):
            read(tmp_path if read is read_survey else tmp_path / name)  # type: ignore[operator]
    with pytest.raises(ResultsError, match="cannot be read"):
        read_findings(tmp_path / "absent.md")
    for text, said in (("import", "cannot be read: invalid syntax"), ('"""Other."""\n', "expected a docstring that")):
        (tmp_path / "script.py").write_text(text, encoding="utf-8")
        with pytest.raises(ResultsError, match=said):
            read_findings(tmp_path)


def test_a_run_is_compared_with_what_is_kept() -> None:
    for fields, lines in tables_beside(__file__)["surveyed"]:
        row = judged(**fields)
        assert change_lines("counts", survey_differences(a_survey(), Survey([row]))) == lines, fields


def test_of_runs_that_chose_other_cases_to_stand_for_all_only_what_is_wrong_is_compared() -> None:
    kept = Survey([judged(not_run=4), judged(feature="softmax", not_run=2), judged(feature="attention")])
    changed, chosen = judged(right=2, unsupported=1, not_run=4), judged(feature="softmax", unsupported=1, not_run=1)
    lost, wrong = judged(feature="attention", right=2, unsupported=1), judged(right=2, wrong=1, not_run=4)
    assert not survey_differences(kept, Survey([changed, chosen]))
    for rows in ([changed], [lost, chosen], [wrong, chosen]):
        [line] = survey_differences(kept, Survey(rows))
        assert line["change"] == "worse"


def test_the_same_results_give_the_same_bytes_wherever_errors_are_others(tmp_path: Path, hand: Any) -> None:
    rows = [
        {"case": f"file/{case}", "dtype": dtype, "ratio": 0.1} for case in "cab" for dtype in ("float32", "float64")
    ]
    publish_comparison(
        hand.frames(rows, label="here", platform="Linux", cpu_features=["AVX2"]), tmp_path / "deep" / "published"
    )
    found = contents(tmp_path / "deep" / "published")
    assert found.keys() == {"README.md", "verdicts.csv", "versions.csv"}
    others = [row | {"ratio": 0.9, "value": 0.6} for row in reversed(rows)]
    for _ in ("new", "in place of an earlier one"):
        publish_comparison(hand.frames(others, label="there", platform="macOS", cpu_features=[]), tmp_path / "again")
        assert contents(tmp_path / "again")["verdicts.csv"] == found["verdicts.csv"]
        (tmp_path / "again" / "verdicts.csv").write_text(found["verdicts.csv"].decode() + "old")


def test_features_are_operations_and_a_case_counts_by_the_worst_of_its_dtypes(hand: Any) -> None:
    inputs = {"query": (1, 1, 2, 3), "key": (1, 1, 2, 3), "value": (1, 1, 2, 3), "bias": (1, 1, 2, 2)}
    case = {"operation": "attention", "options": {"is_causal": True}, "inputs": inputs}
    assert set(case_features(case)) == {ALL_CASES_FEATURE, "attention", "attention: is_causal", "attention: bias"}
    assert {*case_features(case)} <= {*ordered_features()}
    rows = [
        {"case": "a/right"},
        {"case": "a/right", "dtype": "float32"},
        {"case": "a/wrong"},
        {"case": "a/wrong", "dtype": "float32", "verdict": "numeric"},
        {"case": "a/lacking", "verdict": "unsupported", "stage": "", "lacks": "mask"},
        {"case": "a/left-out", "verdict": "unsupported", "stage": "", "lacks": ALL_CASES},
    ]
    (of_all,) = [row for row in make_survey(hand.frames(rows)).judged if row.feature == ALL_CASES_FEATURE]
    assert of_all[3:] == (1, 0, 1, 1, 0, 1)


def test_findings_and_meanings_are_read_from_their_documents(tmp_path: Path) -> None:
    path = tmp_path / "findings.md"
    path.write_text(
        "# Findings\n\nAbout them.\n\n## onnx 1.23: the `wrong` stage, at all\n\nA text with a [thread](https://x/1).\n\n"
        "```python\nimport onnx\nprint(1)\n```\n\nMore of it.\n\n## mlx 0.32: another\n\n```python\nprint(2)\n```\n",
        encoding="utf-8",
    )
    first, second = read_findings(path)
    assert first == PublishedFinding(
        "onnx", "1.23", "the `wrong` stage, at all", "A text with a thread.\n\nMore of it.", "import onnx\nprint(1)\n"
    )
    script = '"""{0.library} {0.release}: {0.title}\n\n{0.text}\n"""\n\n{0.script}'
    (tmp_path / "findings").mkdir()
    (tmp_path / "findings" / "stage.py").write_text(script.format(first), encoding="utf-8")
    assert read_findings(tmp_path / "findings") == [first]
    assert (first.anchor, second.script) == ("onnx-123-the-wrong-stage-at-all", "print(2)\n")
    answer = {"convention": "corner", "asks": "where", "means": "top left", "cases_mean": "top left", "departs": False}
    answers = [{**answer, "kind": "measured"}, {**answer, "kind": "unsupported"}]
    (tmp_path / "found.json").write_text(json.dumps({"implementations": {"torch.sdpa": answers}}), encoding="utf-8")
    (only,) = read_surveyed_conventions(tmp_path / "found.json")
    assert only == SurveyedConvention("torch.sdpa", "corner", "where", "top left", "top left", departs=False)


def test_the_survey_shows_any_text_as_it_is_and_its_page_asks_for_nothing() -> None:
    markdown, page = render_page_markdown(make_survey_page(a_survey())), render_survey(a_survey())
    assert r"**\<i\>right\</i\> \| \`x\`**: `<b>x</b>`" in markdown
    assert "  - **broken**: `mlx.sdpa`\n  - within bounds: `torch.sdpa`\n" in markdown
    assert "- mlx 0.32: [float64 is float32](findings.md#mlx-032-float64-is-float32)" in markdown
    shown = (
        "It was &lt;reported&gt;.",
        "print(1 &lt; 2)",
        "&lt;i&gt;right&lt;/i&gt;",
        'title="3 right, 1 wrong">✗</td>',
    )
    assert [text for text in shown if text not in page] == []
    assert not re.search(r"<i>|<script|(?:src|href)=\"(?!#|data:)", page)
    assert "Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline';" in page
