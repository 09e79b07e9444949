"""Properties in every format of a report: implementation by property, and what fails with element and command."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas as pd
import pytest

from attncheck.errors import ExitCode
from attncheck.properties.rows import PropertyRow, write_property_rows
from attncheck.reports.frames import Frames
from attncheck.reports.html.render import render_html
from attncheck.reports.junit import render_junit
from attncheck.reports.machine.outcome import outcome_document
from attncheck.reports.markdown.report import properties_section, render_markdown
from attncheck.reports.properties import asked_rows, broken_properties, property_table
from attncheck.reports.summary import exit_code_of, make_summary
from attncheck.reports.terminal import explanation_of
from attncheck.reports.write import write_report

GOOD = PropertyRow("numpy.eager", "repeated", "mine/a", "float32", "20 calls", "bitwise", elements=4, message="all 4")
BROKEN = PropertyRow(
    *("numpy.eager", "batch_invariant", "mine/<b>|c", "float32", "each batch entry alone", "broken"),
    stage="output",
    index="0,1,2",
    first=0.25,
    second=float("nan"),
    exact=0.2500001,
    first_bound=1e-6,
    second_bound=2e-6,
    differing=1,
    elements=4,
    message="output[0, 1, 2] is 0.25, and nan with each batch entry alone",
)
ROWS = (
    GOOD,
    replace(GOOD, dtype="float64", outcome="within bounds"),
    BROKEN,
    replace(GOOD, property_name="threads", outcome="unsupported", message="has none"),
)


@pytest.fixture
def asked(hand: Any) -> Frames:
    return replace(hand.frames([hand.row()]), properties={"local": ROWS})


def test_the_worst_of_a_property_stands_in_its_cell(asked: Frames) -> None:
    table = property_table(asked_rows(asked))
    cells = {line.name: line.cells[0] for line in table.lines}
    assert {name: (cell.word, cell.state) for name, cell in cells.items()} == {
        "repeated": ("within bounds", "agree"),
        "threads": ("unsupported", "unsupported"),
        "batch_invariant": ("broken", "failing"),
    }
    assert cells["repeated"].detail == "1 bitwise, 1 within bounds"


def test_what_fails_comes_with_its_element_its_numbers_and_a_command(asked: Frames) -> None:
    (found,) = broken_properties(asked)
    assert dict(found.numbers)["the element"] == "output[0, 1, 2]"
    assert dict(found.numbers)["the further calls"] == "nan"
    assert found.command.startswith("attncheck properties numpy.eager --cases ")
    assert found.command.endswith("--property batch_invariant --dtype float32 --explain")


def test_a_broken_property_fails_the_report(asked: Frames) -> None:
    assert exit_code_of(asked) is ExitCode.DISAGREE
    assert exit_code_of(replace(asked, properties={})) is not ExitCode.NOT_RUN
    assert any("numpy.eager: batch_invariant" in each for each in make_summary(asked).sentences)


def test_markdown_has_a_section_with_both_tables(asked: Frames) -> None:
    text = "\n".join(properties_section(asked))
    assert "| `repeated` | The same call gives the same, with other work in between. | within bounds |" in text
    assert "**broken**" in text
    assert "output[0, 1, 2]" in text
    assert "## Properties" in render_markdown(asked)
    assert properties_section(replace(asked, properties={})) == []


def test_html_has_the_section_and_escapes_what_a_case_is_called(asked: Frames) -> None:
    page = render_html(asked)
    assert '<section id="properties"' in page
    assert "mine/&lt;b&gt;|c" in page
    assert "mine/<b>" not in page
    assert 'id="properties"' not in render_html(replace(asked, properties={}))


def test_junit_has_a_suite_of_them(asked: Frames) -> None:
    root = ElementTree.fromstring("".join(render_junit(asked)))
    (suite,) = [each for each in root if each.get("name", "").endswith("numpy.eager: properties")]
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("4", "1", "1")
    (failure,) = suite.iter("failure")
    assert failure.get("type") == "broken"
    assert "--explain" in (failure.text or "")


def test_json_says_what_each_comes_to(asked: Frames) -> None:
    found = outcome_document(asked, ExitCode.DISAGREE)
    assert found.properties["batch_invariant"] == {"numpy.eager": "broken"}
    [broken] = found.broken_properties
    assert (broken.index, broken.fails) == ("0,1,2", True)
    assert "--explain" in broken.next[0]
    assert outcome_document(replace(asked, properties={}), ExitCode.AGREE).properties == {}


def test_rows_beside_those_of_a_run_are_read_into_the_report(tmp_path: Path, hand: Any) -> None:
    directory = hand.run([hand.row()])
    write_property_rows(directory, ROWS)
    frames = hand.frames_of(directory)
    assert [repr(rows) for rows in frames.properties.values()] == [repr(list(ROWS))]
    write_report(frames, tmp_path / "report")
    table = pd.read_csv(tmp_path / "report" / "properties.csv")
    assert list(table["outcome"]) == [row.outcome for row in ROWS]


def test_an_explanation_tells_the_calls_the_numbers_and_the_bounds() -> None:
    text = "\n".join(explanation_of(BROKEN, "attention(query 1x2x3x4) in float32"))
    for part in ("attention(query 1x2x3x4)", "each batch entry alone", "output[0, 1, 2]", "0.25", "nan", "0.2500001"):
        assert part in text
    assert "1e-06 of the first, 2e-06 of the further" in text
