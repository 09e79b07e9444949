"""The page: what it says and in which order, that it needs nothing else, and that any text is shown as it is."""

from __future__ import annotations

import re
import sys
from base64 import b64encode
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from jinja2 import Environment, FileSystemLoader

from attncheck.reports.cells import Cell, State, cell_table
from attncheck.reports.figures.panels import Panel
from attncheck.reports.frames import Column, Frames
from attncheck.reports.html import documents
from attncheck.reports.html.contents import (
    NOTHING,
    Budget,
    budget_of,
    failing_words,
    make_anchors,
    shape_text,
    short,
    slug,
    unique_slugs,
    urgent_first,
    within,
)
from attncheck.reports.html.evidence import error_pictures, heat_of
from attncheck.reports.html.render import CompiledTemplates, render_html
from attncheck.reports.summary import make_summary
from attncheck.results.format import EXACT, StoredArray, bound_name

PageOf = Callable[..., Any]


@pytest.fixture(scope="module")
def document_page(document_report: Path, page_of: PageOf) -> Any:
    return page_of((document_report / "report.html").read_text(encoding="utf-8"))


def links(page: Any) -> list[str]:
    return [element.attributes["href"] for element in page.all("a") if "href" in element.attributes]


def test_the_page_opens_with_the_answer(document_page: Any, document_frames: Frames) -> None:
    answer = make_summary(document_frames)
    assert document_page.one("h1").text == f"✓ {answer.first_line}"
    said = [item.text for item in document_page.one("section", id="answer").all("li")]
    assert said == [" ".join(sentence.split()) for sentence in answer.sentences]
    sections = [
        section.attributes["id"] for section in document_page.one("main").all("section") if "id" in section.attributes
    ]
    top = [name for name in sections if not name.startswith(("file-", "document-"))]
    assert top == ["answer", "counts", "verdicts", "documents", "pairs", "environments", "cases"]


def test_every_link_inside_leads_to_one_element_and_nothing_leads_outside(document_page: Any) -> None:
    ids = [element.attributes["id"] for element in document_page.walk() if "id" in element.attributes]
    assert len(ids) == len(set(ids))
    inside = {href.removeprefix("#") for href in links(document_page)}
    assert inside <= set(ids)
    assert len(inside) > 50
    sources = [
        element for element in document_page.walk() if {"src", "srcset", "action", "data"} & element.attributes.keys()
    ]
    assert sources == []


def test_its_policy_allows_its_own_script_and_no_request(document_page: Any) -> None:
    script = document_page.one("script")
    (rounding,) = [e.attributes["content"] for e in document_page.all("meta") if "http-equiv" in e.attributes]
    assert rounding.startswith("default-src 'none';")
    digest = b64encode(sha256(script.raw.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in rounding
    assert "http" not in document_page.one("style").raw
    assert "http" not in script.raw


def test_every_cell_says_its_verdict_in_words_with_a_sign(document_page: Any, document_frames: Frames) -> None:
    table = cell_table(document_frames)
    rows = [row for table in document_page.all("table", of_class="matrix") for row in table.one("tbody").all("tr")]
    assert len(rows) == len(table)
    for row, (case, cells) in zip(rows, table.items(), strict=True):
        assert row.one("th", scope="row").text == document_frames.cases[case]["name"]
        for shown, column in zip(row.all("td"), document_frames.columns, strict=True):
            words = {cell.text for cell in cells[column].values()}
            assert all(word in shown.text for word in words)
            assert {sign.text for sign in shown.all("i")} <= set("✓\N{EN DASH}?≈✗")
            assert shown.all("i")
            assert shown.one("a").attributes["href"].startswith("#cell-")


def test_every_table_has_headings_for_rows_and_columns(document_page: Any) -> None:
    for table in document_page.all("table"):
        if "numbers" in table.classes and not table.all("thead"):
            continue  # an input's numbers, which have no names
        assert table.all("th", scope="col"), table.attributes
        assert table.all("th", scope="row") or table.all("th", scope="rowgroup"), table.attributes


def test_a_documents_numbers_stand_beside_the_exact_ones(document_page: Any) -> None:
    post = document_page.one("article", id="document-attention_scoring_post")
    assert post.one("h3").text == "Attention scoring and the context vector"
    tables = [table for table in post.all("table", of_class="numbers") if table.all("thead")]
    assert [cell.text for cell in tables[0].all("th", scope="col")][:3] == ["element", "printed", "exact"]
    assert [cell.text for cell in tables[0].one("tbody").all("td")] == ["927", "927", "927", "927"]
    drawn = {table.one("caption").text: table for table in post.all("table", of_class="heat")}
    weights = drawn["attention_weights (weights)"]
    assert [cell.text for cell in weights.all("td")[1:]] == ["0.119", "7.95e-232", "0", "0.881"]
    assert all(re.fullmatch("background:#[0-9a-f]{6}", cell.attributes["style"]) for cell in weights.all("td")[1:])


def test_what_is_wrong_leads_to_its_cell(failing_frames: Frames, page_of: PageOf) -> None:
    page = page_of(failing_frames)
    assert page.one("h1").text.startswith("✗ bad is wrong in the only case that it was judged in; ")
    (item,) = page.one("ol", of_class="wrong").all("li")
    assert item.text == (
        "✗ numeric at weights bad.eager: 1 case, in float64 file/one B=1 H=1 Lq=1 Lk=3 20 times the bound "
        "attncheck explain file/one bad.eager --dtype float64"
    )
    assert item.one("a").attributes["href"] == "#cell-file-one--bad.eager"
    assert page.one("tbody", id="cell-file-one--bad.eager").all("td", of_class="failing")


def test_a_failing_cell_shows_why_and_how_to_see_it_again(failing_frames: Frames, page_of: PageOf) -> None:
    page = page_of(failing_frames)
    case = page.one("details", id="case-file-one")
    stages = case.one("table", of_class="stages")
    assert [cell.text for cell in stages.all("td", of_class="n")] == ["0.25 0.12", "20 19 numeric", "20 19 numeric"]
    bad, old = case.all("section", of_class="evidence")
    assert bad.all("p", of_class="message")[0].text == "20 times the bound"
    (row,) = bad.one("table", of_class="worst").one("tbody").all("tr")
    assert [cell.text for cell in row.all("td")] == [
        "numeric", "[0, 0, 0, 2]", "0.9", "0.7", "0.2", "0.01", "the exact answer",
    ]  # fmt: skip
    figure = bad.one("figure")
    assert "largest 20 at [0, 0, 0, 2]; 1 of 3 elements exceed the limit 1." in figure.text
    tables = {table.one("caption").text: table.all("td")[1:] for table in figure.all("table", of_class="small")}
    assert {name: [cell.text for cell in cells] for name, cells in tables.items()} == {
        "computed": ["0.1", "0.205", "0.9"],
        "exact": ["0.1", "0.2", "0.7"],
        "difference": ["0", "0.005", "0.2"],
    }
    assert all([cell.classes for cell in cells] == [[], [], ["w"]] for cells in tables.values())
    assert [block.text for block in bad.all("pre", of_class="command")] == [
        "attncheck explain file/one bad.eager --dtype float64",
        "attncheck repro file/one bad.eager --dtype float64",
    ]
    assert "Expected failure: It always was ( numpy/numpy#12 )" in old.text
    assert old.one("a").attributes["href"] == "https://github.com/numpy/numpy/issues/12"


def test_a_failing_array_that_is_too_large_to_read_is_a_map(hand: Any, page_of: PageOf) -> None:
    exact = np.zeros((1, 1, 9, 9))
    wrong = exact.copy()
    wrong[0, 0, 4, 5] = 3.0
    arrays = [
        StoredArray("file/one", "float64", name, "weights", array)
        for name, array in [("numpy.eager", wrong), (EXACT, exact), (bound_name("native"), exact + 1)]
    ]
    page = page_of(hand.frames([hand.row(verdict="numeric", index="0,0,4,5")], arrays=arrays))
    figure = page.one("figure")
    assert figure.all("table") == []
    levels = {path.attributes["class"]: path.attributes["d"] for path in figure.one("svg").all("path")}
    assert levels["e2"] == "M5 4h1v1h-1z"
    assert levels["ex"] == "M5.2 4.2l.6 .6m0-.6l-.6 .6"


def test_pairs_are_counted_both_ways_and_lead_to_the_worst_case(failing_frames: Frames, page_of: PageOf) -> None:
    table = page_of(failing_frames).one("table", of_class="pairs")
    cells = [[cell.text for cell in row.all("td")] for row in table.one("tbody").all("tr")]
    disagree, near = "✗ 1 of 1 10 of the allowed", "✓ 0 of 1 0.5 of the allowed"
    assert sorted(map(sorted, cells)) == sorted(
        [sorted(["—", disagree, near]), sorted([disagree, "—", ""]), sorted([near, "", "—"])]
    )
    assert {link.attributes["href"] for link in table.all("a")} == {"#case-file-one"}


def test_the_script_that_reproduces_a_cell_is_shown_and_what_cannot_be_read_is_left_out(
    failing_frames: Frames, page_of: PageOf
) -> None:
    (directory,) = failing_frames.arrays.directories.values()
    (directory / "scripts").mkdir()
    text = "print('</code></pre><script>alert(1)</script> ]]> &amp; \"')\n"
    (directory / "scripts" / "000.py").write_text(text)
    (directory / "secret.py").write_text("secret")
    (directory / "scripts" / "index.json").write_text(
        '{"file/one|bad.eager|float64": "000.py", "file/one|old.eager|float64": "../secret.py", "x": 3}'
    )
    page = page_of(failing_frames)
    (shown,) = page.all("pre", of_class="script")
    assert shown.raw == text
    assert shown.attributes["data-name"] == "file-one-bad.eager-float64.py"
    assert "secret" not in page.one("main").text

    for index in ("[]", "{", '{"file/one|bad.eager|float64": "absent.py"}'):
        (directory / "scripts" / "index.json").write_text(index)
        assert 'class="script"' not in render_html(failing_frames)


def test_dtypes_that_differ_are_told_apart(page_of: PageOf, hand: Any) -> None:
    words = {"float64": "agree", "float32": "agree", "bfloat16": "unsupported", "float16": "numeric"}
    page = page_of(hand.frames([hand.row(dtype=dtype, verdict=word) for dtype, word in words.items()]))
    cell = page.one("table", of_class="matrix").one("td", of_class="mixed")
    parts = [(part.attributes["data-d"], part.attributes["data-v"], part.text) for part in cell.all("span")]
    assert parts == [
        ("float64 float32", "agree", "f64 f32 ✓ agree"),
        ("bfloat16", "unsupported", "bf16 \N{EN DASH} unsupported"),
        ("float16", "numeric", "f16 ✗ numeric at weights"),
    ]


def test_partial_runs_and_what_did_not_run_are_said(page_of: PageOf, hand: Any) -> None:
    run = hand.run([hand.row()], summary=False, left_out={"jax": "not installed"})
    page = page_of(hand.frames_of(run))
    assert page.one("p", of_class="partial").text.startswith("Partial results. The run local was interrupted")
    assert "jax was left out: not installed." in page.one("section", id="answer").text


def test_a_report_of_nothing_is_a_page_too(page_of: PageOf, hand: Any) -> None:
    page = page_of(hand.frames(missing={"jax": "asked for by name, not installed"}))
    assert page.one("h1").text == "! Nothing was run."
    assert not page.all("table", of_class="matrix")


def test_environments_are_told_apart(page_of: PageOf, hand: Any) -> None:
    bad = hand.run([hand.row(verdict="error", stage="", message="no")], label="new")
    page = page_of(hand.frames_of(bad, hand.run([hand.row()], label="old")))
    headings = [cell.text for cell in page.one("table", of_class="matrix").all("th", scope="col")]
    assert headings == ["case", "numpy.eager 1.0 new", "numpy.eager 1.0 old"]
    assert page.one("ol", of_class="wrong").one("a").attributes["href"] == "#cell-file-one--numpy.eager--new"


def test_the_implementation_that_fails_most_has_the_first_column(page_of: PageOf, hand: Any) -> None:
    rows = [
        hand.row(case=f"file/{case}", implementation=f"{name}.eager", verdict="numeric" if case < failing else "agree")
        for name, failing in (("a", 0), ("b", 1), ("c", 2))
        for case in range(3)
    ]
    page = page_of(hand.frames(rows))
    headings = [cell.text for cell in page.one("table", of_class="matrix").all("th", scope="col")]
    assert headings == ["case", "c.eager 1.0", "b.eager 1.0", "a.eager 1.0"]
    first = page.one("table", of_class="matrix").one("tbody").all("tr")[1]
    assert [cell.attributes["class"] for cell in first.all("td")] == ["failing", "agree", "agree"]
    assert [option.text for option in page.one("select", id="f-column").all("option")][1:] == headings[1:]


def test_above_the_budget_what_fails_stays_and_the_rest_is_counted(page_of: PageOf, hand: Any) -> None:
    rows = [hand.row(case=f"file/{n:03}", verdict="numeric" if n == 57 else "agree", message="bad") for n in range(60)]
    small = Budget(matrix_letters=3_000, detail_letters=4_000, wrong=0)
    page = page_of(hand.frames(rows), small)
    listed = [row.one("th", scope="row").text for row in page.one("table", of_class="matrix").one("tbody").all("tr")]
    assert listed == ["000", "001", "002", "003", "057"]
    assert [case.one("summary").one("code").text for case in page.all("details", of_class="case")] == [
        "file/000",
        "file/057",
    ]
    assert [note.text for note in page.all("p", of_class="left-out")] == [
        "55 of 60 cases are not listed, to keep this page small; those that fail or are expected to fail come first. "
        "All are in results.csv .",
        "58 cases are not detailed here, to keep this page small: those that fail or are expected to fail come first. "
        "Every stage of every case is in results.csv .",
    ]
    assert "And 1 more defect, in results.csv and numbers.csv ." in page.one("section", id="wrong").text
    ids = {element.attributes["id"] for element in page.walk() if "id" in element.attributes}
    assert {href.removeprefix("#") for href in links(page)} <= ids
    assert "cell-file-001--numpy.eager" in ids


def test_unsupported_cases_are_a_number(page_of: PageOf, hand: Any) -> None:
    lacking = {"stage": "", "verdict": "unsupported", "message": "NotImplementedError: no window"}
    rows = [hand.row(case=f"file/{number}", **lacking, lacks="window") for number in range(40)]
    page = page_of(hand.frames([*rows, hand.row(), hand.row(dtype="float32", **lacking)]))
    listed = page.one("table", of_class="matrix").one("tbody").all("tr")
    assert [row.one("th", scope="row").text for row in listed] == ["one"]
    assert [case.one("summary").one("code").text for case in page.all("details", of_class="case")] == ["file/one"]
    counts = page.one("section", id="counts")
    assert [cell.text for cell in counts.one("tbody").all("td")[:-1]] == [NOTHING, "1", NOTHING, "41", "42"]
    assert counts.one("summary").text == "numpy.eager: 40 unsupported: window 40"


def test_the_page_of_one_kernel_that_fails_everywhere_is_small(hand: Any) -> None:
    rows = [
        hand.row(
            case=f"probes/of/{number:04}-{'a-name-of-a-common-length-' * 3}",
            dtype=dtype,
            stage=stage,
            verdict="numeric",
            message=f"{number} times the largest error that is possible in this step; at [0, 0] computed 1, exact 2",
            **dict.fromkeys(("value", "reference", "difference", "allowed", "ratio"), 1.2345678901234567 + number),
            index="0,0,1,2",
        )
        for number in range(2_000)
        for dtype in ("float64", "float32", "float16")
        for stage in ("scores", "weights", "output")
    ]
    assert len(render_html(hand.frames(rows)).encode()) < 1_500_000


def test_every_tag_leads_to_what_it_probes_and_answers(page_of: PageOf, hand: Any) -> None:
    said = {"probes": "No later key is seen.", "defect": "A mask that is off by one."}
    record = hand.case(tags=["causal", "untold"], probes={"causal": said})
    page = page_of(hand.frames([hand.row()], cases=[record]))
    (linked,) = [link for link in page.all("a") if link.attributes.get("href") == "#tag-causal"]
    assert linked.text == "causal"
    told = page.one("div", id="tag-causal").text
    assert said["probes"] in told
    assert said["defect"] in told
    assert "#tag-untold" not in links(page)


FAILING = "documents/attention_scoring_post/all-four-annotations-are-scored-and-make-one-context-vector"


@pytest.fixture
def failing_documents(document_frames: Frames) -> Frames:
    """The run of the documents, in which a number of one computation fails."""
    numbers = document_frames.numbers.copy()
    numbers["verdict"] = numbers["verdict"].where(~numbers["case"].eq(FAILING), "numeric")
    assert isinstance(numbers, pd.DataFrame)
    assert numbers["verdict"].eq("numeric").any()
    return replace(document_frames, numbers=numbers)


def summaries(page: Any, kind: str) -> dict[str, bool]:
    found = {}
    for each in page.all("details", of_class=kind):
        summary = each.all("summary")[0]
        found[summary.text] = "open" in each.attributes
    return found


def test_of_documents_only_what_fails_is_open_and_drawn_however_little_room_there_is(
    failing_documents: Frames, document_page: Any, page_of: PageOf
) -> None:
    assert not any(summaries(document_page, "pages").values())
    text = render_html(failing_documents, Budget(pictures=0))
    page = page_of(text)
    opened = [summary for summary, is_open in summaries(page, "computation").items() if is_open]
    assert opened == ["All four annotations are scored and make one context vector ✗ fails"]
    opened = [summary for summary, is_open in summaries(page, "pages").items() if is_open]
    assert opened == ["Attention scoring and the context vector ✗ 1 of 2 computations fail"]
    assert text.count('class="heat"') > 3
    assert "left out, since nothing fails here: <code>attncheck show" in text
    # Many computations are put on the page when they are seen.
    late = render_html(failing_documents, Budget(pictures=0, computations=1))
    assert "<noscript>" not in text
    assert late.count("<noscript>") == late.count("</noscript>") == late.count('class="computation"')
    assert late.replace("<noscript>\n", "").replace("</noscript>\n", "") == text


def test_long_documents_are_split(failing_documents: Frames, page_of: PageOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_MAX_IN_PART", 1)
    parts = summaries(page_of(failing_documents, Budget(pictures=0)), "part")
    assert parts["Computations 2 to 2 of 2: ✗ 1 of 1 computation fail"]
    assert not parts["Computations 1 to 1 of 2: 1 computation, none fails"]
    assert [failing_words(*counts) for counts in ((0, 1), (2, 12))] == [
        "1 computation, none fails",
        "2 of 12 computations fail",
    ]


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
    assert small.table.rows == (("first", (("#f3f1f4", False, "0", ""), ("#000000", True, "1", ""))),)
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
    assert list(within(["d", "b", "a"], {"d": 5, "b": 4, "a": 1}.__getitem__, 9)) == ["d", "b"]


def test_the_page_of_several_implementations_holds_more_up_to_a_limit() -> None:
    sizes = [budget_of(columns).detail_letters for columns in (0, 1, 2, 3, 4, 50)]
    assert sizes[0] == sizes[1] < sizes[2] < sizes[3] < sizes[4] == sizes[5]
    assert budget_of(4) == Budget()


TEMPLATE = "{% for each in range(3) %}<{{ each }}>{% endfor %}"


@pytest.fixture
def templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A templates with a template, in which what it is compiled to is kept."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    (tmp_path / "page.html").write_text(TEMPLATE, encoding="utf-8")
    return tmp_path


def rendered(templates: Path, *, compiles: bool, autoescape: bool = True) -> str:
    """Render the template, and see whether it was compiled for that."""
    environment = Environment(
        loader=FileSystemLoader(templates), autoescape=autoescape, bytecode_cache=CompiledTemplates(templates)
    )
    compiled: list[object] = []
    plain = environment.compile
    environment.compile = lambda *given: compiled.append(given) or plain(*given)  # type: ignore[method-assign, assignment, func-returns-value]
    text = environment.get_template("page.html").render()
    assert bool(compiled) is compiles
    return text


def kept(templates: Path) -> list[Path]:
    return sorted((templates / "__pycache__").iterdir())


def test_a_template_is_compiled_once(templates: Path) -> None:
    assert [rendered(templates, compiles=compiles) for compiles in (True, False, False)] == ["<0><1><2>"] * 3
    assert len(kept(templates)) == 1


def test_another_source_and_other_options_are_compiled(templates: Path) -> None:
    rendered(templates, compiles=True)
    rendered(templates, autoescape=False, compiles=True)
    (templates / "page.html").write_text(f"{TEMPLATE}!", encoding="utf-8")
    assert rendered(templates, autoescape=False, compiles=True) == "<0><1><2>!"
    assert rendered(templates, autoescape=False, compiles=False) == "<0><1><2>!"


@pytest.mark.parametrize(
    "damage",
    [lambda data: b"", lambda data: data[:40], lambda data: data[:-1] + bytes([data[-1] ^ 1]), lambda data: data[16:]],
)
def test_a_damaged_one_is_compiled_again_and_replaced(damage: Callable[[bytes], bytes], templates: Path) -> None:
    rendered(templates, compiles=True)
    (path,) = kept(templates)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert rendered(templates, compiles=True) == "<0><1><2>"
    assert path.read_bytes() == whole
    rendered(templates, compiles=False)


def test_nothing_is_kept_where_python_keeps_nothing(templates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for _ in range(2):
        rendered(templates, compiles=True)
    assert not (templates / "__pycache__").exists()


def test_a_folder_that_cannot_be_written_keeps_nothing(templates: Path) -> None:
    (templates / "__pycache__").write_text("no templates")
    for _ in range(2):
        assert rendered(templates, compiles=True) == "<0><1><2>"
