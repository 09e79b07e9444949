"""The published comparison: the same bytes every time, nothing that varies by processor, red where a verdict drifts."""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from attncheck import cli
from attncheck.backends import BACKENDS
from attncheck.errors import OutputError, ResultsError, UsageError
from attncheck.execution.implementations import Implementation
from attncheck.merge import merge_runs
from attncheck.reading.expected_failures import load_expected_failures
from attncheck.reading.selection import select_cases
from attncheck.reports.frames import Frames
from attncheck.reports.making import make_frames
from attncheck.reports.publish.comparison import drift, publish, read_verdicts
from attncheck.results.case_records import CaseRecords
from attncheck.results.format import Row
from attncheck.results.reader import read_run
from attncheck.verdicts import ALL_CASES

MakeRow = Callable[..., Row]
WriteRun = Callable[..., Path]
FramesOf = Callable[..., Frames]
Command = Callable[..., tuple[int, str, str]]

ROOT = Path(__file__).resolve().parents[3]
IMAGE = re.compile(r"!\[(?:[^\]\\]|\\.)+\]\((pictures/[a-z0-9_-]+\.svg)\)")


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def published(document_frames: Frames, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what is published of the documents and the softmax cases. Tests leave it as it is."""
    return publish(document_frames, tmp_path_factory.mktemp("publish") / "deep" / "published").parent


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Run ``attncheck publish``; return exit code, standard output and standard error."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["attncheck", "publish", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        return int(end.value.code or 0), *capfd.readouterr()

    return run


def test_every_picture_that_is_shown_is_there_and_no_other(published: Path) -> None:
    readme = (published / "README.md").read_text(encoding="utf-8")
    shown = IMAGE.findall(readme)
    assert len(shown) == readme.count("![") == len(set(shown))
    assert set(contents(published)) == {"README.md", "verdicts.csv", "versions.csv", *shown}
    for name in shown:
        assert (published / name).read_bytes().startswith(b"<svg ")
    # Every document has a picture of its weights.
    documents = {path.stem for path in (ROOT / "cases" / "documents").glob("*.yaml")}
    assert documents == {
        re.split(r"-\d+-\d+-", Path(name).stem)[0] for name in shown if re.search(r"-(weights|raw_scores)\.svg", name)
    }


def test_the_page_has_the_answer_the_verdicts_and_the_documents_numbers(
    published: Path, document_frames: Frames
) -> None:
    count = len(document_frames.cases)
    lines = (published / "README.md").read_text(encoding="utf-8").splitlines()
    assert lines[:3] == [
        "# The bundled corpus on the pinned versions",
        "",
        f"**first and second agree. Judged {count} of {count} cases on each.**",
    ]
    assert "| Weights of two scores follow the logistic function | agree | agree |" in lines
    # A weight that the Base R vignette prints.
    assert any(line.startswith("| [0, 0] | `0.083717538` | 0.083717537762 | 0.083717537762 |") for line in lines)


def test_the_verdicts_are_sorted_and_say_nothing_of_sizes_or_machines(published: Path, document_frames: Frames) -> None:
    with (published / "verdicts.csv").open(encoding="utf-8", newline="") as file:
        header, *rows = list(csv.reader(file))
    assert header == ["case", "implementation", "dtype", "verdict", "begins_at", "xfail"]
    assert rows == sorted(rows)
    evaluations = document_frames.results[["case", "implementation", "dtype"]].drop_duplicates()
    assert {tuple(row[:3]) for row in rows} == set(evaluations.itertuples(index=False, name=None))
    words = {tuple(row[3:]) for row in rows}
    assert words == {("agree", "", "false"), ("misprint", "", "true")}


def test_the_same_results_give_the_same_bytes(document_run: Path, published: Path, tmp_path: Path) -> None:
    run = read_run(document_run)
    shuffled = replace(
        run, rows=run.rows.sample(frac=1, random_state=7), cases=CaseRecords(reversed(list(run.cases.values())))
    )
    frames = make_frames(merge_runs([shuffled]))
    publish(frames, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(published)
    # In place of an earlier one, of which nothing is left.
    (tmp_path / "again" / "pictures" / "old.svg").write_text("old")
    publish(frames, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(published)


def test_verdicts_are_the_same_wherever_errors_are_others(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf, tmp_path: Path
) -> None:
    first = write_run([make_row(ratio=0.1, value=0.5)], label="here", platform="Linux", cpu_features=["AVX2"])
    other = write_run(
        [make_row(ratio=0.9, value=0.6, tier="warning")], label="there", platform="macOS", cpu_features=[]
    )
    publish(frames_of(first), tmp_path / "published")
    assert drift(frames_of(other), tmp_path / "published") == []


def test_what_fails_or_is_known_is_published_with_its_place(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf, tmp_path: Path
) -> None:
    known = {"xfail": True, "reason": "so"}
    rows = [
        make_row(case="file/a", stage="weights", verdict="numeric", begins_at="scores"),
        make_row(case="file/b", stage="output", verdict="semantic", **known),
        make_row(case="file/b", stage="weights", verdict="semantic", **known),
        make_row(case="file/c", stage="", verdict="crash"),
    ]
    publish(frames_of(write_run(rows)), tmp_path / "published")
    assert (tmp_path / "published" / "verdicts.csv").read_text() == (
        "case,implementation,dtype,verdict,begins_at,xfail\n"
        "file/a,numpy.eager,float64,numeric,scores,false\n"
        "file/b,numpy.eager,float64,semantic,weights,true\n"
        "file/c,numpy.eager,float64,crash,,false\n"
    )


OF_A_PROCESSOR = """\
- implementation: numpy.eager
  cases: [file/a]
  verdict: nonfinite
  processor: amx_bf16
  reason: reads on into the next row
  decided: numeric
"""


def test_what_some_processors_do_alone_is_published_alike_on_all(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "known.yaml").write_text(OF_A_PROCESSOR, encoding="utf-8")
    known = load_expected_failures([tmp_path / "known.yaml"])
    monkeypatch.setattr("attncheck.reports.publish.comparison.bundled_expected_failures", lambda backends: known)
    agrees = make_row(case="file/a", stage="output")
    fails = make_row(case="file/a", stage="output", verdict="nonfinite", xfail=True, reason="so")
    publish(frames_of(write_run([agrees], label="here")), tmp_path / "published")
    assert (tmp_path / "published" / "verdicts.csv").read_text().splitlines()[1:] == [
        "file/a,numpy.eager,float64,nonfinite with amx_bf16,,true"
    ]
    assert drift(frames_of(write_run([fails], label="there")), tmp_path / "published") == []
    worse = [replace(fails, xfail=False), replace(fails, verdict="numeric")]
    for number, row in enumerate(worse):
        assert len(drift(frames_of(write_run([row], label=f"worse {number}")), tmp_path / "published")) == 1


def test_drift_is_red_and_says_what_and_how_to_regenerate(
    command: Command, document_run: Path, published: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "published"
    assert command(document_run, "--output", folder) == (0, f"Published: {folder}/README.md\n", "")
    assert contents(folder) == contents(published)
    file = folder / "verdicts.csv"
    lines = file.read_text().splitlines(keepends=True)
    said = f"All {len(lines) - 1} verdicts are those published in {file}.\n"
    assert command(document_run, "--check", "--published", folder) == (0, said, "")
    assert command(document_run, "--check", "-o", folder, "--quiet") == (0, "", "")

    (place,) = [number for number, line in enumerate(lines) if "logistic" in line and "first.eager,float32" in line]
    edited = [*lines[:place], lines[place].replace("agree,,false", "numeric,weights,false"), *lines[place + 2 :]]
    file.write_text("".join([*edited, "softmax/removed,first.eager,float64,agree,,false\n"]))
    before = contents(folder)
    code, out, err = command(document_run, "--check", "--published", folder)
    case = "softmax/weights-of-two-scores-follow-the-logistic-function"
    assert (code, err) == (1, "")
    assert out.splitlines() == [
        f"3 verdicts are not those published in {file}:",
        "  softmax/removed first.eager in float64: published agree, the run has nothing",
        f"  {case} first.eager in float32: published numeric at weights, the run has agree",
        f"  {case} first.eager in float64: published nothing, the run has agree",
        "If that is right, `make publish` regenerates the folder; commit it with what changed the verdicts.",
    ]
    assert contents(folder) == before


def test_what_others_stand_for_is_no_drift_and_is_told(
    command: Command, make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf, tmp_path: Path
) -> None:
    folder = tmp_path / "published"
    publish(frames_of(write_run([make_row(case=f"file/{name}") for name in "abc"], label="whole")), folder)
    left_out = make_row(case="file/a", verdict="unsupported", stage="", lacks=ALL_CASES)
    run = write_run([left_out, make_row(case="file/b"), make_row(case="file/c")], label="part")
    said = (
        f"All 2 verdicts are those published in {folder / 'verdicts.csv'}.\n"
        "numpy.eager was not asked for 1 evaluation, which others cover; --all-cases asks for all.\n"
    )
    assert command(run, "--check", "--published", folder) == (0, said, "")
    publish(frames_of(run), tmp_path / "of part")
    assert [evaluation.case for evaluation in read_verdicts(tmp_path / "of part")] == ["file/b", "file/c"]
    worse = write_run([left_out, make_row(case="file/b", verdict="numeric"), make_row(case="file/c")], label="worse")
    code, out, _ = command(worse, "--check", "--published", folder)
    assert (code, out.splitlines()[0]) == (1, f"1 verdict is not the one published in {folder / 'verdicts.csv'}:")


def test_a_long_drift_is_cut(
    command: Command, make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf, tmp_path: Path
) -> None:
    publish(frames_of(write_run([make_row()], label="one")), tmp_path / "published")
    run = write_run([make_row(case=f"file/{n:02}") for n in range(30)], label="two")
    code, out, _ = command(run, "--check", "--published", tmp_path / "published")
    assert code == 1
    assert len(out.splitlines()) == 1 + 20 + 2
    assert "  and 11 more" in out


def test_a_missing_framework_is_filled_from_another_run_but_none_is_there_twice(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf, tmp_path: Path
) -> None:
    one = write_run([make_row()], label="one")
    two = write_run([make_row(implementation="torch.eager")], label="two")
    publish(frames_of(one, two), tmp_path / "published")
    assert len(read_verdicts(tmp_path / "published")) == 2
    again = write_run([make_row()], label="again")
    with pytest.raises(UsageError, match=r"numpy.eager ran in again and in one; .* once"):
        publish(frames_of(one, again), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_only_complete_runs_are_published(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf, tmp_path: Path
) -> None:
    for number, what in enumerate(({"summary": False}, {"missing": {"torch": "no"}}, {"faults": ["bad.yaml: no"]})):
        with pytest.raises(UsageError, match="only complete runs are published: "):
            publish(frames_of(write_run([make_row()], label=str(number), **what)), tmp_path / "published")
    assert not (tmp_path / "published").exists()


HOSTILE = '=cmd|"x"!A1,\r\n;=2</td>`|\x1b'


def test_hostile_names_are_no_formula_and_no_picture_outside_the_folder(
    make_row: MakeRow, make_case_record: Callable[..., dict[str, object]], write_run: WriteRun, tmp_path: Path
) -> None:
    source = {"kind": "document", "title": HOSTILE, "notes": [HOSTILE]}
    case = make_case_record("file/one", file="cases/../../escape me.yaml", name=HOSTILE, source=source)
    rows = [make_row(implementation=HOSTILE, stage=HOSTILE, verdict="numeric", message=HOSTILE, begins_at=HOSTILE)]
    directory = write_run(rows, cases=[case], label="run")
    frames = make_frames(merge_runs([read_run(directory)]))
    publish(frames, tmp_path / "folder" / "published")
    assert {path.name for path in (tmp_path / "folder").iterdir()} == {"published"}
    with (tmp_path / "folder" / "published" / "verdicts.csv").open(encoding="utf-8", newline="") as file:
        ((_, implementation, _, _, begins_at, _),) = list(csv.reader(file))[1:]
    assert implementation == begins_at == "'=cmd|\"x\"!A1,\n;'=2</td>`|\ufffd"
    assert drift(frames, tmp_path / "folder" / "published") == []
    readme = (tmp_path / "folder" / "published" / "README.md").read_text(encoding="utf-8")
    assert "</td>" not in re.sub(r"(?<!\\)`[^`]*`", "", readme).replace("\\</td\\>", "")


def test_what_cannot_be_compared_or_written_is_told_in_one_line(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf, tmp_path: Path
) -> None:
    frames = frames_of(write_run([make_row()]))
    with pytest.raises(ResultsError, match=r"verdicts\.csv does not exist; expected .*attncheck publish"):
        drift(frames, tmp_path / "nowhere")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "letter.txt").write_text("mine")
    with pytest.raises(OutputError, match="is not empty and holds no published comparison"):
        publish(frames, mine)
    assert contents(mine) == {"letter.txt": b"mine"}
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match=r"file cannot be written: [^\n]+$"):
        publish(frames, tmp_path / "file")
    header = "case,implementation,dtype,verdict,begins_at,xfail\n"
    row = "file/one,numpy.eager,float64,agree,,false\n"
    for text, complaint in {
        "": "has the columns ; expected case,",
        "case,verdict\n": "has the columns case,verdict; expected case,",
        f"{header}file/one,agree\n": "row 2 has 2 cells; expected 6",
        f"{header}{row}{row}": "row 3 is the second of file/one numpy.eager float64",
        "\x80": "cannot be read",
    }.items():
        (mine / "verdicts.csv").write_bytes(text.encode("latin-1"))
        with pytest.raises(ResultsError, match=complaint):
            read_verdicts(mine)


def test_the_repository_publishes_every_bundled_case() -> None:
    verdicts = read_verdicts(ROOT / "reports" / "published")
    assert {place.case for place in verdicts} == {case.id for case in select_cases([], base=ROOT).cases}
    assert {place.implementation for place in verdicts} == {Implementation(entry).name for entry in BACKENDS.values()}
