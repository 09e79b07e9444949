"""A page per document: every number that it prints, digit by digit, beside the exact one and every implementation's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attncheck.reading.selection import select_cases
from attncheck.reports.documents import DocumentCase, DocumentPage, Expectation, beside, document_pages, element
from attncheck.reports.frames import Frames
from attncheck.reports.heatmaps import heatmaps
from attncheck.reports.html.evidence import heat_of
from attncheck.reports.panels import MISPRINT, KeptCase, cell_text, drawings_of

HOSTILE = "<script>alert(1)</script> $\\frac{ | `x` \x1b[31m"


@pytest.fixture(scope="module")
def pages(document_frames: Frames) -> dict[str, DocumentPage]:
    return {Path(page.file).stem: page for page in document_pages(document_frames)}


def expectation(case: DocumentCase, called: str, basis: str = "printed") -> Expectation:
    (found,) = (each for each in case.expectations if (each.called, each.basis) == (called, basis))
    return found


def test_every_document_has_a_page_with_its_source(pages: dict[str, DocumentPage]) -> None:
    assert len(pages) == len(list((Path(__file__).parents[2] / "cases" / "documents").glob("*.yaml")))
    post = pages["attention_scoring_post"]
    assert post.title == "Attention scoring and the context vector"
    assert post.source == "Learning Attention Mechanism from scratch!"
    assert post.author.startswith("Garima Nishad")
    assert post.notes[0] == "The post prints one number, 927; all the rest is code."
    assert pages["masked_self_attention_notebook"].author == ""
    for name, page in pages.items():
        drawn = {each for case in page.cases for drawing in case.drawings for each in drawing.names}
        assert drawn & {"weights", "raw_scores"}, name


def test_every_printed_number_is_there_as_it_is_printed(pages: dict[str, DocumentPage]) -> None:
    """The corpus is compared with the documents' own texts elsewhere; here, what a page says against the corpus."""
    by_case = {case.id: case for page in pages.values() for case in page.cases}
    for case in select_cases(["documents"]).cases:
        for expected, shown in zip(case.expected, by_case[case.id].expectations, strict=True):
            assert {table.dtype for table in shown.tables} == {"float64", "float32"}
            for table in shown.tables:
                assert [column.implementation for column in table.columns] == ["first.eager", "second.eager"]
                assert all(line.exact and None not in line.values for line in table.lines)
                if expected.numbers is None:
                    assert {line.printed for line in table.lines} == {""}
                    assert len(table.lines) == np.prod(expected.shape)
                    continue
                numbers = expected.numbers.transposed() if expected.transpose else expected.numbers
                assert [line.printed for line in table.lines] == list(numbers.text[numbers.given])
    # A number stands in its place beside the exact one with more digits.
    weights = expectation(by_case["documents/base_r_vignette/four-words-attend-to-each-other"], "weights")
    line = weights.tables[0].lines[2]
    assert (line.index, line.printed, line.exact) == ("[0, 2]", "0.8429010", "0.8429010423")
    assert [(value.text, value.state) for value in line.values if value] == [("0.8429010423", "")] * 2
    assert not line.mark_text
    assert weights.holds.startswith("32 of 32 comparisons with printed numbers hold in float64; ")
    assert not weights.fails


def test_what_is_printed_of_inputs_keeps_its_digits(pages: dict[str, DocumentPage]) -> None:
    given = {each.called: each for each in pages["masked_self_attention_notebook"].cases[0].given}
    assert given["q"].inputs == ("query",)
    assert given["q"].rows[3][:2] == ("-0.4541441", "0.49158284")
    assert given["mask"].rows[1] == ("0.", "0.", "-inf", "-inf")
    (words, *_) = pages["base_r_vignette"].cases[0].given
    assert (words.called, words.inputs) == ("words", ("query", "key", "value"))
    post = {each.called: each.rows for each in pages["multi_head_post"].cases[0].given}
    assert post["w_query.T"] == ()  # 256 numbers that follow from a seed


def test_errata_are_explained_fail_nothing_and_are_framed_beside_the_exact_numbers(
    pages: dict[str, DocumentPage],
) -> None:
    case = pages["masked_self_attention_notebook"].cases[1]
    weights = expectation(case, "attention")
    assert weights.erratum.startswith("Printed under mask=None")
    assert not weights.fails
    first, last = weights.tables[0].lines[0], weights.tables[0].lines[-1]
    assert (first.printed, first.exact[:6]) == ("1.", "0.2103")
    assert [(value.is_erratum, value.state) for value in first.values if value] == [(True, "")] * 2
    assert [(value.is_erratum, value.state) for value in last.values if value] == [(False, "")] * 2
    assert (first.mark_text, last.mark_text) == ("erratum", "")
    panels = {name: drawing.panels for drawing in case.drawings for name in drawing.names}
    assert [panel.printed for panel in panels["scores"]] == [{}]
    (drawn,) = panels["weights"]
    assert set(drawn.printed) == {(row, column) for row in range(3) for column in range(4)}
    assert [cell_text(drawn, *place) for place in ((0, 0), (3, 0))] == [("0.2104", "1."), ("0.282", "")]
    picture = heatmaps([drawn])
    assert "; printed otherwise: 1. at [0, 0], 0. at [0, 1], " in picture.alternative
    assert picture.data.decode().count(MISPRINT) == 12
    assert heat_of(drawn).count("<small>printed") == 12


def test_documents_are_drawn_as_they_draw_themselves(pages: dict[str, DocumentPage]) -> None:
    single, context = pages["attention_scoring_post"].cases
    drawn = {drawing.names: drawing.panels[0] for drawing in (*single.drawings, *context.drawings)}
    assert drawn["query",].matrix.tolist() == [[5], [1], [20]]
    assert drawn["key", "value"].matrix.tolist() == [[3, 59, 1, 4], [12, 2, 43, 3], [45, 5, 5, 45.3]]
    assert drawn["key", "value"].title == "annotations (key, value)"
    # Weights 0.1192 and 0.8808, that is 1 / (1 + e^2) and 1 / (1 + e^-2), times the first and the fourth annotation.
    low, high = 1 / (1 + np.exp(2)), 1 / (1 + np.exp(-2))
    applied = np.outer([3, 12, 45], [low, 0, 0, 0]) + np.outer([4, 3, 45.3], [0, 0, 0, high])
    np.testing.assert_allclose(drawn["applied_values",].matrix, applied, rtol=1e-12, atol=1e-200)
    np.testing.assert_allclose(drawn["output",].matrix, applied.sum(axis=1, keepdims=True), rtol=1e-12)
    assert [drawing.is_input for drawing in context.drawings] == [True, True, False, False, False, False]
    # What is not printed is within its bound.
    unprinted = expectation(context, "applied_attention", "unprinted")
    assert unprinted.holds.startswith("On every implementation it is within its error bound")
    assert (
        unprinted.spread == "Among the implementations: in float64 they are identical; in float32 they are identical."
    )
    # Scores, mask, weights and output have a panel for each head.
    names = [drawing.names[0] for drawing in pages["masked_self_attention_notebook"].cases[0].drawings]
    assert names == ["query", "key", "value", "bias", "raw_scores", "scores", "biased", "weights", "output"]
    four = {drawing.names[0]: drawing for drawing in pages["multi_head_post"].cases[1].drawings}
    titles = [f"attention_weights (weights)[{head}]" for head in range(4)]
    assert [panel.title for panel in four["weights"].panels] == titles
    assert four["output"].panels[0].matrix.shape == (5, 16)


def test_a_misprint_is_framed_where_the_document_draws_it() -> None:
    query = np.arange(12.0).reshape(1, 2, 2, 3)
    record = {"given": {}, "expected": [], "options": {}}
    printed = {"query": {"0,1,0,2": "7", "9,9,9,9": "8", "0": "9"}, "absent": {"0": "1"}}
    for in_columns, place in ((False, (0, 2)), (True, (2, 0))):
        kept = KeptCase({}, {"query": query})
        (drawing,) = drawings_of(record, kept, in_columns=in_columns, printed=printed)
        assert [panel.printed for panel in drawing.panels] == [{}, {place: "7"}]
        assert cell_text(drawing.panels[1], *place) == ("8", "7")


@pytest.fixture
def page_of(hand: Any) -> Callable[..., DocumentPage]:
    """Make the page of a document with one case by hand."""

    def make(rows: list[dict[str, Any]], expected: list[dict[str, Any]], **more: Any) -> DocumentPage:
        standard = {"of": "weights", "basis": "printed", "transpose": False, "shape": [1, 1, 1, 2]}
        case = hand.case(
            source={"kind": "document", "title": HOSTILE},
            expected=[standard | each for each in expected],
            **more.pop("case", {}),
        )
        rows = [hand.row(**{"comparison": "printed", "index": "0,0,0,1", **row}) for row in rows]
        (page,) = document_pages(hand.frames(rows, cases=[case], **more))
        return page

    return make


def test_what_did_not_run_was_not_returned_or_not_kept_is_said_or_left_out(
    page_of: Callable[..., DocumentPage],
) -> None:
    page = page_of([], [{"name": "weights"}])
    (shown,) = page.cases[0].expectations
    assert (shown.holds, shown.tables, shown.fails) == ("Not run.", (), False)
    assert page.cases[0].drawings == page.cases[0].given == ()
    page = page_of([{"stage": "output", "reference_text": "1."}], [{"name": "weights"}])
    assert page.cases[0].expectations[0].holds == "No implementation returned it."
    page = page_of([{"value": 0.25, "reference_text": "0.3", "half_unit": 0.05}], [{"name": "weights"}])
    (line,) = page.cases[0].expectations[0].tables[0].lines
    assert (line.index, line.printed, line.exact) == ("[1]", "0.3", "")
    assert [value.text for value in line.values if value] == ["0.2500"]
    # Two expectations of one stage keep their own numbers.
    rows = [{"called": name, "reference_text": name, "value": 0.5} for name in ("first", "second")]
    page = page_of(rows, [{"name": "weights", "called": name} for name in ("first", "second")])
    printed = [line.printed for shown in page.cases[0].expectations for line in shown.tables[0].lines]
    assert printed == ["first", "second"]


def test_a_value_is_written_with_a_few_digits_more_and_an_element_where_the_document_counts_it() -> None:
    for value, dtype, half_unit, text in (
        (1 / 3, "float64", 5e-5, "0.3333333"),
        (1 / 3, "float32", 0.0, "0.333333333"),
        (1 / 3, "float64", 0.0, "0.33333333333333331"),
        (927.0, "float64", 0.5, "927"),
        (np.inf, "float32", 0.5, "inf"),
        (0.0, "float64", 5e-343, "0"),
    ):
        assert beside(value, dtype, half_unit) == text
    for index, shape, transpose, text in (
        ("0,0,2,3", [1, 1, 4, 5], False, "[2, 3]"),
        ("0,0,2,3", [1, 1, 4, 5], True, "[3, 2]"),
        ("0,2,1,0", [1, 4, 2, 2], False, "[2, 1, 0]"),
        ("0,0,0,0", [1, 1, 1, 1], False, "[0]"),
    ):
        assert element(index, {"shape": shape, "transpose": transpose}) == text
