"""A case in a terminal, in a pipe and as an image."""

from __future__ import annotations

import io
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from attncheck.cli import app
from attncheck.errors import OutputError, UsageError
from attncheck.reading import selection
from attncheck.reading.model import TAG_FILE
from attncheck.reading.selection import select_cases
from attncheck.reports.panels import Panel
from attncheck.reports.show import image_format, matrix_text, print_case, save_case, work_out

VIGNETTE = "documents/base_r_vignette/four-words-attend-to-each-other"
NOTEBOOK = "documents/masked_self_attention_notebook"


def printed(identity: str, dtype: str = "float64", *stages: str, **console: object) -> str:
    """Return what is printed of a bundled case."""
    selection = select_cases([identity])
    text = io.StringIO()
    options = {"width": 200, "highlight": False, "markup": False, **console}
    print_case(work_out(selection.cases[0], dtype, stages), selection.tags, Console(file=text, **options))  # type: ignore[arg-type]
    return text.getvalue()


def test_a_case_is_shown_with_its_source_tags_inputs_errata_and_exact_stages() -> None:
    text = printed(VIGNETTE)
    assert text.startswith("Four words attend to each other\n")
    assert "multi_head_attention, query 1x4x3, key 1x4x3" in text
    assert "probes document: The numbers that a published document prints. Catches: An implementation" in text
    assert "R fills matrices by columns" in text
    assert "words (query, key, value), 4 x 3\n   0  1  2 \n0  1  0  0 \n" in text
    assert "scores (raw_scores), 4 x 4\n    0   1   2   3 \n0   6   4  10   5 \n" in text
    assert re.search(r"\[0, 2\] +0\.8429010 +0\.8429010423 +4\.2e-08 +holds", text)
    assert "weights, printed: 16 of 16 hold" in text
    assert "\x1b" not in text
    text = printed(f"{NOTEBOOK}/the-call-as-the-notebook-writes-it-with-mask-none", "float64", "weights")
    assert "attention (weights), printed: 4 of 16 hold\nErratum: Printed under mask=None" in text
    assert re.search(r"\[0, 0\] +1\. +0\.21036710325 +0\.79 +erratum", text)
    assert "values" not in text.partition("Exact stages")[2]  # only the stage that was asked for


def test_colours_are_for_terminals_and_not_for_those_who_want_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[38;2;" in printed(VIGNETTE, "float64", force_terminal=True, color_system="truecolor")
    monkeypatch.setenv("NO_COLOR", "1")
    plain = printed(VIGNETTE, "float64", force_terminal=True, color_system="truecolor")
    assert "38;2;" not in plain
    assert "48;2;" not in plain


def test_every_dtype_shows_the_exact_answer_for_what_is_stored_in_it() -> None:
    identity = f"{NOTEBOOK}/four-words-attend-to-themselves-and-to-earlier-words"
    assert "Inputs in float32:" in printed(identity, "float32")
    exact = {dtype: printed(identity, dtype, "weights").splitlines()[-4:] for dtype in ("float64", "float32")}
    assert exact["float64"] != exact["float32"]  # the inputs were rounded to float32, and so has another exact answer
    assert all(line.endswith("holds  ") or line.endswith("holds") for lines in exact.values() for line in lines)


def test_a_matrix_of_any_shape_and_name_is_elided_to_what_goes_into_the_width() -> None:
    lines = matrix_text(Panel("x", np.arange(10_000.0).reshape(100, 100)), 60).plain.splitlines()
    assert lines[0] == "x, 100 x 100"
    assert len(lines) == 2 + 12
    assert max(map(len, lines)) <= 60
    assert lines[1].split()[-3:] == ["...", "98", "99"]
    assert lines[-1].split()[-1] == "9999"
    assert [line.split()[0] for line in lines[2:]].count("...") == 1
    for shape in ((1, 1), (0, 3), (3, 0), (1, 5000), (5000, 1)):
        text = matrix_text(Panel("x", np.full(shape, np.nan)), 80).plain
        assert text.startswith(f"x, {shape[0]} x {shape[1]}")
        assert max(map(len, text.splitlines())) <= 80
    # Names cannot write to the terminal.
    text = matrix_text(Panel("\x1b]0;owned\x07 [red]x", np.zeros((1, 1))), 80).plain
    assert not {"\x1b", "\x07"} & set(text)
    assert "[red]x" in text


def shown_text(tmp_path: Path, text: str) -> str:
    """Return what is shown of the one case of a file."""
    header = "title: Own cases\nsource: {kind: derivation, title: Made for the tests}\noperation: softmax\ncases:\n"
    (tmp_path / "own.yaml").write_text(f"{header}  - name: One\n    {text}\n", encoding="utf-8")
    selection = select_cases(["own.yaml"], base=tmp_path)
    assert not selection.faults
    shown = io.StringIO()
    console = Console(file=shown, width=200, highlight=False, markup=False)
    print_case(work_out(selection.cases[0], "float64"), {}, console)
    return shown.getvalue()


def test_elements_without_an_exact_answer_say_why_and_sampled_rows_are_told(tmp_path: Path) -> None:
    text = shown_text(
        tmp_path,
        "inputs: {scores: {values: [[0, .inf], [0, 0]]}}\n    allow_nonfinite: true\n"
        '    expect: [{stage: weights, printed: "nan 55\\n0.5 0.5", exact: true}]',
    )
    assert "There is no exact answer where nan stands: scores holds NaN or an infinity that no mask explains.\n" in text
    assert "weights, printed: 2 of 4 hold" in text
    words = [line.strip().rpartition("  ")[2] for line in text.splitlines() if line.startswith("[")]
    assert words == ["not compared", "not compared", "holds", "holds"]
    text = shown_text(tmp_path, "inputs: {scores: {ascending: [0, 0.001], shape: [2100, 128]}}")
    assert "64 of 2,100 query rows judged; they stand for all." in text
    # Rows 2 to 14 lie beside no edge of a tile, and are not among those drawn at random.
    weights = text.partition("Exact stages:")[2]
    assert "\n2" in weights
    assert "nan" in weights


def test_a_case_is_saved_as_an_image_of_the_format_that_the_name_asks_for(tmp_path: Path) -> None:
    """With the same bytes every time, which test_figures.py sees of every format."""
    shown = work_out(select_cases([VIGNETTE]).cases[0], "float64", ["output"])
    for suffix, start in (("png", b"\x89PNG"), ("SVG", b"<svg"), ("pdf", b"%PDF")):
        (path,) = save_case(shown, tmp_path / f"first.{suffix}")
        assert path.read_bytes().startswith(start)
    first = path.read_bytes()
    save_case(shown, path)
    assert path.read_bytes() == first
    with pytest.raises(OutputError, match=r"none.x\.svg cannot be written: No such file or directory"):
        save_case(shown, tmp_path / "none" / "x.svg")
    for name in ("x.gif", "x"):
        with pytest.raises(UsageError, match=r"expected \.png, \.svg or \.pdf"):
            image_format(Path(name))


UNSHOWN = [
    ([VIGNETTE, "--stage", "nonsense"], "no stage 'nonsense' here; expected query, key, value"),
    (["documents/no_such_case"], "there is no case 'documents/no_such_case': expected its id, a glob"),
    (["documents/*"], "'documents/*' matches 15 cases; name one of them:\n"),
    ([VIGNETTE, "--dtype", "float8"], "has no dtype 'float8'; expected one of float64, float32"),
    ([VIGNETTE, "--dtype", "bfloat16"], "has no dtype 'bfloat16'; expected one of float64, float32"),
    ([VIGNETTE, "--dtype", "float64,float32"], "has no dtype 'float64,float32'; expected one of float64, float32"),
    ([VIGNETTE, "--save", "x.doc"], "cannot save as .doc"),
]


def test_what_cannot_be_shown_is_one_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the documents alone: what is looked for in all cases has them read."""
    bundled = selection.bundled_root()
    shutil.copytree(bundled / "documents", tmp_path / "documents")
    shutil.copy(bundled / TAG_FILE, tmp_path)
    monkeypatch.setattr(selection, "bundled_root", lambda: tmp_path)
    for arguments, message in UNSHOWN:
        result = CliRunner().invoke(app, ["show", *arguments])
        assert isinstance(result.exception, UsageError), arguments
        assert message in str(result.exception), arguments


def test_the_command_prints_and_saves(tmp_path: Path) -> None:
    runner = CliRunner()
    result = runner.invoke(app, ["show", VIGNETTE, "--stage", "weights,output"])
    assert result.exit_code == 0
    assert "weights, 4 x 4" in result.stdout
    assert "words" not in result.stdout.partition("Exact stages")[2]
    path = tmp_path / "case.svg"
    result = runner.invoke(app, ["show", VIGNETTE, "--stage", "output", "--save", str(path)])
    assert result.exit_code == 0
    assert result.stdout == f"{path}: Four words attend to each other\n"
    assert path.read_bytes().startswith(b"<svg")


BIG = "kernel_shapes/heads/a-bias-for-each-of-many-heads-17-by-4"


def test_what_does_not_fit_goes_on_further_pages_which_are_one_file_as_a_pdf(tmp_path: Path) -> None:
    (case,) = select_cases([BIG]).cases
    shown = work_out(case, "float32", ["weights"])
    paths = save_case(shown, tmp_path / "big.svg")
    assert [path.name for path in paths] == [f"big-{number}.svg" for number in range(1, len(paths) + 1)]
    assert len(paths) > 1
    texts = [path.read_text(encoding="utf-8") for path in paths]
    for number, text in enumerate(texts, 1):
        assert f"page {number} of {len(paths)}" in text
    for panel in (panel for drawing in shown.drawings for panel in drawing.panels):
        assert f">{panel.title}<" in "".join(texts)
    (path,) = save_case(shown, tmp_path / "big.pdf")
    assert len(re.findall(rb"/Type /Page\b", path.read_bytes())) == len(paths)
