"""The page: what it says and in which order, that every link leads somewhere, and that it needs nothing else."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from attncheck.reports.answer import make_summary
from attncheck.reports.cells import cell_table
from attncheck.reports.frames import Frames
from attncheck.reports.html.contents import Budget
from attncheck.reports.html.render import render_html
from attncheck.results.format import Row

MakeRow = Callable[..., Row]
MakeRecord = Callable[..., dict[str, Any]]
WriteRun = Callable[..., Path]
FramesOf = Callable[..., Frames]
PageOf = Callable[..., Any]


@pytest.fixture(scope="module")
def document_page(document_frames: Frames, page_of: PageOf) -> Any:
    return page_of(document_frames)


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


def test_the_same_results_give_the_same_page(document_run: Path, frames_of: FramesOf) -> None:
    assert render_html(frames_of(document_run)) == render_html(frames_of(document_run))


def test_what_is_wrong_leads_to_its_cell(failing_frames: Frames, page_of: PageOf) -> None:
    page = page_of(failing_frames)
    assert page.one("h1").text.startswith("✗ bad is wrong in the only case that it was judged in; ")
    (item,) = page.one("ol", of_class="wrong").all("li")
    assert item.text == "✗ numeric at weights bad.eager float64 file/one B=1 H=1 Lq=1 Lk=3 20 times the bound"
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
        "numeric", "[0, 0, 0, 2]", "0.90000000000000002", "0.69999999999999996", "0.2", "0.01", "the exact answer",
    ]  # fmt: skip
    figure = bad.one("figure")
    assert "largest 20 at [0, 0, 0, 2]; 1 of 3 elements exceed the limit 1." in figure.text
    levels = {path.attributes["class"]: path.attributes["d"] for path in figure.one("svg").all("path")}
    assert levels == {
        "e0": "M0 0h1v1h-1z",
        "e1": "M1 0h1v1h-1z",
        "e3": "M2 0h1v1h-1z",
        "ex": "M2.2 0.2l.6 .6m0-.6l-.6 .6",
    }
    assert [block.text for block in bad.all("pre", of_class="command")] == [
        "attncheck explain file/one bad.eager --dtype float64",
        "attncheck repro file/one bad.eager --dtype float64",
    ]
    assert "Expected failure: It always was ( numpy/numpy#12 )" in old.text
    assert old.one("a").attributes["href"] == "https://github.com/numpy/numpy/issues/12"


def test_pairs_are_counted_both_ways_and_lead_to_the_worst_case(failing_frames: Frames, page_of: PageOf) -> None:
    table = page_of(failing_frames).one("table", of_class="pairs")
    cells = [[cell.text for cell in row.all("td")] for row in table.one("tbody").all("tr")]
    disagree, near = "✗ 1 of 1 10 of the allowed", "✓ 0 of 1 0.5 of the allowed"
    assert sorted(map(sorted, cells)) == sorted(
        [sorted(["—", disagree, near]), sorted([disagree, "—", ""]), sorted([near, "", "—"])]
    )
    assert {link.attributes["href"] for link in table.all("a")} == {"#case-file-one"}


def test_the_script_that_reproduces_a_cell_is_shown(failing_frames: Frames, page_of: PageOf) -> None:
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


@pytest.mark.parametrize("index", ["[]", "{", '{"file/one|bad.eager|float64": "absent.py"}'])
def test_scripts_that_cannot_be_read_are_left_out(failing_frames: Frames, page_of: PageOf, index: str) -> None:
    (directory,) = failing_frames.arrays.directories.values()
    (directory / "scripts").mkdir()
    (directory / "scripts" / "index.json").write_text(index)
    assert not page_of(failing_frames).all("pre", of_class="script")


def test_dtypes_that_differ_are_told_apart(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf, page_of: PageOf
) -> None:
    words = {"float64": "agree", "float32": "agree", "bfloat16": "unsupported", "float16": "numeric"}
    page = page_of(frames_of(write_run([make_row(dtype=dtype, verdict=word) for dtype, word in words.items()])))
    cell = page.one("table", of_class="matrix").one("td", of_class="mixed")
    parts = [(part.attributes["data-d"], part.attributes["data-v"], part.text) for part in cell.all("span")]
    assert parts == [
        ("float64 float32", "agree", "f64 f32 ✓ agree"),
        ("bfloat16", "unsupported", "bf16 \N{EN DASH} unsupported"),
        ("float16", "numeric", "f16 ✗ numeric at weights"),
    ]


def test_partial_runs_and_what_did_not_run_are_said(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf, page_of: PageOf
) -> None:
    run = write_run([make_row()], summary=False, left_out={"jax": "not installed"})
    page = page_of(frames_of(run))
    assert page.one("p", of_class="partial").text.startswith("Partial results. The run local was interrupted")
    assert "jax was left out: not installed." in page.one("section", id="answer").text


def test_a_report_of_nothing_is_a_page_too(write_run: WriteRun, frames_of: FramesOf, page_of: PageOf) -> None:
    page = page_of(frames_of(write_run(missing={"jax": "asked for by name, not installed"})))
    assert page.one("h1").text == "! Nothing was run."
    assert not page.all("table", of_class="matrix")


def test_environments_are_told_apart(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf, page_of: PageOf
) -> None:
    bad = write_run([make_row(verdict="error", stage="", message="no")], label="new")
    page = page_of(frames_of(bad, write_run([make_row()], label="old")))
    headings = [cell.text for cell in page.one("table", of_class="matrix").all("th", scope="col")]
    assert headings == ["case", "numpy.eager 1.0 new", "numpy.eager 1.0 old"]
    assert page.one("ol", of_class="wrong").one("a").attributes["href"] == "#cell-file-one--numpy.eager--new"


def test_above_the_budget_what_fails_stays_and_the_rest_is_counted(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf, page_of: PageOf
) -> None:
    rows = [make_row(case=f"file/{n:03}", verdict="numeric" if n == 57 else "agree", message="bad") for n in range(60)]
    small = Budget(matrix_letters=3_000, detail_letters=4_000, wrong=0)
    page = page_of(frames_of(write_run(rows)), small)
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
    assert "And 1 more, in results.csv and numbers.csv ." in page.one("section", id="wrong").text
    ids = {element.attributes["id"] for element in page.walk() if "id" in element.attributes}
    assert {href.removeprefix("#") for href in links(page)} <= ids
    assert "cell-file-001--numpy.eager" in ids


def test_every_tag_leads_to_what_it_probes_and_answers(
    make_row: MakeRow, make_case_record: MakeRecord, write_run: WriteRun, frames_of: FramesOf, page_of: PageOf
) -> None:
    said = {"probes": "No later key is seen.", "defect": "A mask that is off by one."}
    record = make_case_record(tags=["causal", "untold"], probes={"causal": said})
    page = page_of(frames_of(write_run([make_row()], cases=[record])))
    (linked,) = [link for link in page.all("a") if link.attributes.get("href") == "#tag-causal"]
    assert linked.text == "causal"
    told = page.one("div", id="tag-causal").text
    assert said["probes"] in told
    assert said["defect"] in told
    assert "#tag-untold" not in links(page)
