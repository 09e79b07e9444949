"""Anchors, commands, maps of errors and budgets."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from attncheck.reports.cells import Cell, State
from attncheck.reports.figures.panels import Panel
from attncheck.reports.frames import Column
from attncheck.reports.html.contents import urgent_first, within
from attncheck.reports.html.pictures import error_pictures, heat_of
from attncheck.reports.html.text import make_anchors, shape_text, short, slug, unique_slugs

ONE = Column("here", "torch.sdpa", "2.0")


def test_anchors_are_readable_and_each_is_another() -> None:
    anchors = make_anchors(["softmax/a-scores", "softmax a scores", "é"], [ONE])
    assert anchors.case("softmax/a-scores") == "case-softmax-a-scores"
    assert anchors.case("softmax a scores") == "case-softmax-a-scores-2"
    assert anchors.case("é") == "case-x"
    assert anchors.cell("softmax/a-scores", ONE) == "cell-softmax-a-scores--torch.sdpa"
    there = Column("there", "torch.sdpa", "2.1")
    assert make_anchors(["a"], [ONE, there]).cell("a", there) == "cell-a--torch.sdpa--there"


def test_slugs_have_harmless_letters_only() -> None:
    assert slug("<a href='x'>") == "a-href-x"
    assert slug("'\"") == "x"
    assert len(slug("a" * 500)) == 120
    assert unique_slugs(["a", "a-2", "a", "a"]) == ["a", "a-2", "a-3", "a-4"]


def test_a_map_has_every_cell_once_and_marks_what_is_beyond_the_bound() -> None:
    errors = np.array([[0.0, 0.1, 0.5, 1.0], [1.5, 10.0, 11.0, np.inf], [np.nan, 0.05, 0.05, 0.05]])
    ((title, picture),) = error_pictures(errors, "a <b>")
    svg = ElementTree.fromstring(str(picture))
    assert (title, svg.attrib["aria-label"]) == ("", "a <b>")
    paths = {path.attrib["class"]: path.attrib["d"] for path in svg.findall("path")}
    assert paths["e0"] == "M0 0h2v1h-2zM1 2h3v1h-3z"
    assert paths["e1"] == "M2 0h2v1h-2z"
    assert paths["e2"] == "M0 1h2v1h-2z"
    assert paths["e3"] == "M2 1h2v1h-2z"
    assert paths["en"] == "M0 2h1v1h-1z"
    assert paths["ex"].count("M") == 4
    assert svg.find("circle") is not None


def test_a_large_map_stays_small_and_loses_no_error() -> None:
    errors = np.zeros((1, 1, 300, 500))
    errors[0, 0, 211, 407] = 5.0
    ((_, picture),) = error_pictures(errors, "large")
    assert len(picture) < 5_000
    assert 'class="e2"' in picture
    assert re.search(r'viewBox="-\.5 -\.5 3[0-3] 3[0-3]"', picture)


@pytest.mark.parametrize("errors", [np.zeros((0, 3)), np.full((2, 2), np.nan)])
def test_where_nothing_was_judged_there_is_no_map(errors: np.ndarray) -> None:
    assert error_pictures(errors, "none") == []


def test_a_matrix_is_a_table_with_its_numbers_and_a_large_one_a_picture() -> None:
    small = heat_of(Panel("m", np.array([[0.0, 1.0]]), "#000000", "query", "key", ("first",), ()), 1)
    assert small.table is not None
    assert (small.table.axes, small.table.columns) == ("query ↓ key →", ("0", "1"))
    assert small.table.rows == (("first", (("#f3f1f4", False, "0"), ("#000000", True, "1"))),)
    large = heat_of(Panel("m", np.zeros((30, 2))), 7)
    assert large.table is None
    assert "<svg" in large.picture


def test_numbers_and_shapes_are_short() -> None:
    assert [short(1 / 3), short(None), short(float("nan"))] == ["0.333", "\N{EN DASH}", "\N{EN DASH}"]
    assert (shape_text((2, 3)), shape_text(())) == ("2 \N{MULTIPLICATION SIGN} 3", "scalar")


def test_what_fails_comes_first_then_what_is_known_and_a_budget_ends_the_list() -> None:
    states = {"a": State.AGREE, "b": State.XFAIL, "c": State.UNSUPPORTED, "d": State.FAILING}
    table = {case: {ONE: {"float64": Cell(state, "agree", "")}} for case, state in states.items()}
    assert urgent_first(table) == ["d", "b", "a", "c"]
    assert within(["d", "b", "a"], {"d": 5, "b": 4, "a": 1}.__getitem__, 9) == {"d", "b"}
