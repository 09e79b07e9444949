"""A page per document, digit by digit; pictures, in words too, the same bytes every time; and a case that is shown."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from attncheck.common.errors import OutputError, UsageError
from attncheck.reading.case import make_case_record
from attncheck.reading.selection import select_cases
from attncheck.reports.document_model import Coloured, Details, Figure, Mark, PageOnly, Table, Text, plain_text
from attncheck.reports.documents import DocumentComputation, computations_by_document, expectation_parts
from attncheck.reports.failure_patterns import candidate_patterns, length_maps, pattern_lines
from attncheck.reports.frames import Frames
from attncheck.reports.html.contents import length_map_details
from attncheck.reports.html.evidence import heatmap_markup
from attncheck.reports.one_failure import record_axis_lengths
from attncheck.reports.panels import (
    MAX_CELLS,
    MISPRINT,
    PURPLE,
    Panel,
    cell_colours,
    cell_text,
    describe_errors,
    describe_panel,
    error_matrices,
    safe_text,
    short_number,
)
from attncheck.showing.heatmaps import Picture, draw_heatmaps
from attncheck.showing.show import evaluate_case, matrix_text, parse_image_format, print_case, save_case


@pytest.fixture(scope="module")
def found(document_frames: Frames) -> dict[str, list[DocumentComputation]]:
    return {Path(file).stem: of for file, of in computations_by_document(document_frames).items()}


def numbers(frames: Frames, computation: DocumentComputation, place: int) -> dict[str, Table]:
    """Return the tables of an expectation by what they are folded behind."""
    blocks = expectation_parts(frames, computation)[place].blocks
    shown = [inner for each in blocks for inner in (each.blocks if isinstance(each, PageOnly) else [each])]
    folded = [each for each in shown if isinstance(each, Details)]
    return {each.summary: table for each in folded for table in each.blocks if isinstance(table, Table)}


def test_every_printed_number_is_there_as_it_is_printed(
    document_frames: Frames, found: dict[str, list[DocumentComputation]]
) -> None:
    """The corpus is compared with the documents' own texts elsewhere; here, what a page says against the corpus."""
    assert len(found) == len(list((Path(__file__).parents[2] / "cases" / "documents").glob("*.yaml")))
    by_case = {each.id: each for cases in found.values() for each in cases}
    for case in select_cases(["documents"]).cases:
        for place, expected in enumerate(case.expected):
            tables = numbers(document_frames, by_case[case.id], place)
            assert [title.partition(":")[0] for title in tables] == ["float64", "float32"]
            for table in tables.values():
                headings = [str(each).split()[0] for each in table.headings[-3:]]
                assert headings == ["exact", "first.eager", "second.eager"]
                assert all(plain_text(cell) for row in table.rows for cell in row[-3:])
                if expected.numbers is None:
                    assert len(table.headings) == 4
                    assert len(table.rows) == np.prod(expected.shape)
                    continue
                given = expected.numbers
                given = given.rearrange(lambda array: array.swapaxes(-1, -2)) if expected.transpose else given
                assert [plain_text(row[1]).split(" ")[0] for row in table.rows] == list(given.text[given.given])
    (inputs, rows) = {called: of for called, *of in found["masked_self_attention_notebook"][0].given}["q"]
    assert (inputs, rows[3][:2]) == (["query"], ("-0.4541441", "0.49158284"))


def test_errata_are_explained_fail_nothing_and_are_framed_beside_the_exact_numbers(
    document_frames: Frames, found: dict[str, list[DocumentComputation]]
) -> None:
    case = found["masked_self_attention_notebook"][1]
    place = next(number for number, each in enumerate(case.case["expected"]) if each.get("called") == "attention")
    _, note, *_ = expectation_parts(document_frames, case)[place].blocks
    assert isinstance(note, Text)
    assert plain_text(note.content).startswith("Erratum. Printed under mask=None")
    assert not case.fails
    first, *_, last = next(iter(numbers(document_frames, case, place).values())).rows
    assert isinstance(first[1], Coloured)
    assert (plain_text(first[1]), first[1].state, str(first[2])[:6]) == ("1. erratum", "erratum", "0.2103")
    assert last[1] == Mark("0.30956813")
    assert all(isinstance(value, str) for value in (*first[3:], *last[3:]))
    panels = {name: drawing.panels for drawing in case.drawings for name in drawing.names}
    assert [panel.printed for panel in panels["scores"]] == [{}]
    (drawn,) = panels["weights"]
    assert set(drawn.printed) == {(row, column) for row in range(3) for column in range(4)}
    assert [cell_text(drawn, *place) for place in ((0, 0), (3, 0))] == [("0.2104", "1."), ("0.282", "")]
    picture = draw_heatmaps([drawn])
    assert "; printed otherwise: 1. at [0, 0], 0. at [0, 1], " in picture.alt_text
    assert picture.data.decode().count(MISPRINT) == 12
    assert heatmap_markup(drawn).count("<small>printed") == 12


HOSTILE = "$\\frac{ </svg><script>alert('\"1\"')</script> & \x00\x1b[31m\ud800\n\u202e 日本 \\n }_^$"
SVG = "{http://www.w3.org/2000/svg}"
MATRIX = np.array([[1.0, 0.25], [-3.5, 1e-30]])


def texts(picture: Picture) -> list[str]:
    """Return every text of an SVG."""
    return [element.text or "" for element in ElementTree.fromstring(picture.data).iter(f"{SVG}text")]


def test_the_same_matrix_gives_the_same_bytes_whatever_the_settings_of_matplotlib() -> None:
    kinds: dict[Any, bytes] = {"svg": b"<svg", "png": b"\x89PNG", "pdf": b"%PDF"}
    for kind, start in kinds.items():
        first = draw_heatmaps([Panel("weights", MATRIX)], format=kind)
        with mpl.rc_context({"font.size": 20, "image.cmap": "jet", "svg.hashsalt": "other", "axes.grid": True}):
            assert draw_heatmaps([Panel("weights", MATRIX)], format=kind) == first
        assert first.data.startswith(start)
        assert not re.search(rb"20\d\d-\d\d-\d\d|Matplotlib v|CreationDate", first.data)


def test_every_cell_of_a_small_matrix_has_its_number_and_a_svg_refers_to_nothing_outside() -> None:
    picture = draw_heatmaps([Panel("weights", MATRIX, PURPLE, "query", "key")])
    assert {"1", "0.25", "-3.5", "1e-30", "query", "key", "weights"} <= set(texts(picture))
    assert picture.alt_text == "weights: 2 x 2 matrix; row 0: 1, 0.25; row 1: -3.5, 1e-30."
    root = ElementTree.fromstring(picture.data)
    assert (root.get("role"), root.get("aria-label")) == ("img", picture.alt_text)
    svg = draw_heatmaps([Panel("y", np.linspace(0, 3, 12).reshape(3, 4)), Panel("x", MATRIX)]).data.decode()
    assert all(target.startswith(("data:image/png;base64,", "#")) for target in re.findall(r'href="([^"]*)"', svg))
    assert "<script" not in svg


def test_hostile_texts_stay_texts() -> None:
    panel = Panel(HOSTILE, MATRIX, row_axis=HOSTILE, column_axis=HOSTILE)
    for picture in (draw_heatmaps([panel], heading=HOSTILE), draw_heatmaps([])):
        root = ElementTree.fromstring(picture.data)  # well-formed
        assert {element.tag.removeprefix(SVG) for element in root.iter()} <= {
            "svg", "g", "path", "text", "image", "defs", "clipPath", "rect", "use", "tspan", "style", "metadata"
        }  # fmt: skip
    for kind in ("png", "pdf"):
        assert draw_heatmaps([panel], heading=HOSTILE, format=kind).data  # type: ignore[arg-type]


@settings(max_examples=60)
@given(st.text(max_size=200))
def test_any_text_becomes_one_line_that_xml_can_hold(text: str) -> None:
    line = safe_text(text)
    assert len(line) <= 120
    element = ElementTree.Element("a")
    element.text = line
    assert ElementTree.fromstring(ElementTree.tostring(element, encoding="unicode")).text in (line, None)
    assert safe_text(line) == line


MATRICES = [
    np.array([[np.nan, np.inf], [-np.inf, 1.0]]),
    np.array([[1.7e308, -1.7e308]]),
    np.array([[5e-324]]),
    np.zeros((3, 3)),
    np.array([[True, False]]),
    np.array([[3]], dtype=np.int64),
    np.full((30, 30), 1.7e308) * np.where(np.eye(30), 1, -1),
    np.zeros((1, 5000)),
]


def test_any_number_can_be_drawn_and_none_is_said_to_be_none() -> None:
    for matrix in MATRICES:
        shown = texts(draw_heatmaps([Panel("any", matrix)]))
        if matrix.size < 5 and matrix.dtype == float:
            assert {short_number(value) for value in matrix.ravel()} <= set(shown)
    assert draw_heatmaps([Panel("none", np.zeros((0, 4)))]).alt_text == "none: empty, shape 0 x 4"
    assert describe_errors(np.zeros((0, 4)), "none").endswith("there is no element.")
    numbers = {927.0: "927", 0.25: "0.25", 1e5: "1e+05", -0.0: "0", True: "1", np.inf: "inf", 1 / 3: "0.333"}
    assert {value: short_number(value) for value in numbers} == numbers
    large = np.zeros((10, 10))
    large[0, 0], large[1, 1], large[2, 2] = np.nan, -2.0, 3.0
    assert describe_panel(Panel("x", large)) == "x: 10 x 10 matrix, from -2 to 3, 1 not finite"
    pixels = cell_colours(Panel("x", np.array([[0.0, 0.5, 1.0, np.nan, -np.inf, np.inf]]), "#000080"))[0].tolist()
    assert len(set(map(tuple, pixels))) == 6


def test_the_worst_error_is_found_written_and_ringed_whatever_is_thinned_out_or_folded() -> None:
    ratio = np.full((2, 40, 300, 100), 0.01)
    ratio[1, 7, 123, 45] = 57.0
    ratio[0, 0, :, 99] = np.nan
    assert describe_errors(ratio, "scores") == (
        "scores, shape 2 x 40 x 300 x 100: largest 57 at [1, 7, 123, 45]; 1 of 2,399,700 elements exceed the limit 1; "
        "300 not judged."
    )
    (folded,) = error_matrices(ratio)
    assert max(folded.errors.shape) <= MAX_CELLS
    assert folded.worst == (123 // 5, 45 // 2)  # of 300 and 100 by at most 64
    assert folded.errors[folded.worst] == np.nanmax(folded.errors) == 57
    assert describe_errors(np.full((2, 2), np.nan), "x") == "x, shape 2 x 2: no element was judged."
    assert "largest 0.3; none exceeds the limit 1" in describe_errors(np.array(0.3), "x")
    # A few matrices have a panel each, and only one has the worst.
    ratio = np.zeros((1, 3, 2, 2))
    ratio[0, 1, 1, 0] = np.inf
    maps = error_matrices(ratio)
    assert [(each.title, each.worst) for each in maps] == [("[0, 0]", None), ("[0, 1]", (1, 0)), ("[0, 2]", None)]
    assert [each.title for each in error_matrices(ratio, is_document=True)] == ["[0]", "[1]", "[2]"]


def test_a_forgotten_tail_is_said_in_words_and_drawn_by_causality_and_width(hand: Any) -> None:
    chosen = select_cases(["attention/*", "kernel_shapes/*"], tiles=[16, 64])
    records = [make_case_record(case, chosen.tags) for case in chosen.cases if case.operation == "attention"]
    keys = {case["id"]: record_axis_lengths(case)["Lk"] for case in records}
    failing = {case for case, length in keys.items() if length > 16 and length % 16}
    verdicts = {case["id"]: "numeric" if case["id"] in failing else "agree" for case in records}
    rows = [{"case": case, "verdict": verdict, "stage": "output"} for case, verdict in verdicts.items()]
    frames = hand.frames(rows, cases=[dict(case) for case in records])
    [pattern] = candidate_patterns(frames)
    asked = replace(frames.requests[pattern.column.environment], confirmed_features={"numpy.eager": [pattern.where]})
    frames = replace(frames, requests={pattern.column.environment: asked})
    [line] = pattern_lines(frames)
    assert line.startswith("numpy.eager fails where keys lie past the last full tile of 16: ")
    (found,) = length_maps(frames)
    assert (found.tile, found.explained) == (16, line)
    assert (int(found.cases["fails"].sum()), len(found.cases)) == (len(failing), len(records))
    assert found.words().count("Lq=") == 12  # a long list of places is cut
    ((words, figure, _),) = (each.blocks for each in length_map_details(frames))
    assert isinstance(words, Text)
    assert isinstance(figure, Figure)
    assert str(words.content).endswith("Lines are drawn where a tile of 16 ends.")
    # Lines stand behind whole tiles.
    path = figure.markup.partition('class="lt" d="')[2].partition('"')[0]
    places = {int(part.split()[0]) for part in path.split("M")[1:] if "V" in part}
    assert {52 + 14 * found.keys.index(length) for length in (17, 65, 129)} <= places
    causal = sum(bool(case["options"].get("is_causal")) for case in records)
    counts = {view[:2]: len(view[2]) for view in found.views()}
    assert [counts[causality, 0] for causality in range(3)] == [len(records), causal, len(records) - causal]
    assert sum(count for (causality, width), count in counts.items() if width and not causality) == len(records)


VIGNETTE = "documents/base_r_vignette/four-words-attend-to-each-other"
NOTEBOOK = "documents/masked_self_attention_notebook"
BIG = "kernel_shapes/heads/a-bias-for-each-of-many-heads-17-by-4"


def printed(identity: str, *stages: str) -> str:
    """Return what is printed of a bundled case."""
    selection = select_cases([identity])
    text = io.StringIO()
    console = Console(file=text, width=200, highlight=False, markup=False)
    print_case(evaluate_case(selection.cases[0], "float64", stages), selection.tags, console)
    return text.getvalue()


def test_a_case_is_shown_with_its_numbers_and_errata() -> None:
    """The snapshot of ``show`` has the text of one case, without its numbers."""
    text = printed(VIGNETTE)
    assert re.search(r"\[0, 2\] +0\.8429010 +0\.8429010423 +4\.2e-08 +holds", text)
    assert "\x1b" not in text
    text = printed(f"{NOTEBOOK}/the-call-as-the-notebook-writes-it-with-mask-none", "weights")
    assert "attention (weights), printed: 4 of 16 hold\nErratum: Printed under mask=None" in text
    assert re.search(r"\[0, 0\] +1\. +0\.21036710325 +0\.79 +erratum", text)
    assert "values" not in text.partition("Exact stages")[2]  # only the stage that was asked for


def test_a_matrix_of_any_shape_and_name_is_elided_to_what_goes_into_the_width() -> None:
    lines = matrix_text(Panel("x", np.arange(10_000.0).reshape(100, 100)), 60).plain.splitlines()
    assert (lines[0], len(lines)) == ("x, 100 x 100", 2 + 12)
    assert max(map(len, lines)) <= 60
    assert lines[1].split()[-3:] == ["...", "98", "99"]
    assert lines[-1].split()[-1] == "9999"
    for shape in ((1, 1), (0, 3), (3, 0), (1, 5000)):
        text = matrix_text(Panel("x", np.full(shape, np.nan)), 80).plain
        assert max(map(len, text.splitlines())) <= 80
    # Names cannot write to the terminal.
    assert not {"\x1b", "\x07"} & set(matrix_text(Panel("\x1b]0;owned\x07 [red]x", np.zeros((1, 1))), 80).plain)


def test_a_case_is_saved_as_an_image_of_the_format_that_the_name_asks_for(tmp_path: Path) -> None:
    shown = evaluate_case(select_cases([VIGNETTE]).cases[0], "float64", ["output"])
    for suffix, start in (("png", b"\x89PNG"), ("SVG", b"<svg"), ("pdf", b"%PDF")):
        (path,) = save_case(shown, tmp_path / f"first.{suffix}")
        assert path.read_bytes().startswith(start)
    with pytest.raises(OutputError, match=r"none.x\.svg cannot be written: No such file or directory"):
        save_case(shown, tmp_path / "none" / "x.svg")
    for name in ("x.gif", "x"):
        with pytest.raises(UsageError, match=r"expected \.png, \.svg or \.pdf"):
            parse_image_format(Path(name))
    # Where it does not fit, it goes on further pages, which are one file as a PDF.
    shown = evaluate_case(select_cases([BIG]).cases[0], "float32", ["weights"])
    paths = save_case(shown, tmp_path / "big.svg")
    assert len(paths) > 1
    assert [path.name for path in paths] == [f"big-{number}.svg" for number in range(1, len(paths) + 1)]
    pages = [path.read_text(encoding="utf-8") for path in paths]
    assert f"page 2 of {len(paths)}" in pages[1]
    for panel in (panel for drawing in shown.drawings for panel in drawing.panels):
        assert f">{panel.title}<" in "".join(pages)
    (path,) = save_case(shown, tmp_path / "big.pdf")
    assert len(re.findall(rb"/Type /Page\b", path.read_bytes())) == len(paths)
