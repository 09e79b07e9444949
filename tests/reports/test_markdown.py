"""The report for people: everything is in it, and no text can break out of its place."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from attncheck.reading.selection import select_cases
from attncheck.reports.frames import Frames
from attncheck.reports.markdown import report
from attncheck.reports.markdown.report import render_markdown, verdict_section
from attncheck.reports.markdown.text import code, details, escape, number, table


def cells_of(line: str) -> list[str]:
    """Split a table's line where a forge does: at every pipe that is not the second of an escaped pair."""
    inner = line.strip().removeprefix("|").removesuffix("|")
    return re.findall(r"(?:\\.|[^|\\])+", inner)


def tables_of(text: str) -> list[list[list[str]]]:
    """Return the tables of a report, as rows of cells."""
    tables: list[list[list[str]]] = []
    previous = ""
    for line in text.splitlines():
        if line.startswith("|"):
            if not previous.startswith("|"):
                tables.append([])
            tables[-1].append([cell.strip() for cell in cells_of(line)])
        previous = line
    return tables


def section(text: str, heading: str) -> str:
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


@pytest.fixture(scope="module")
def text(document_report: Path) -> str:
    return (document_report / "report.md").read_text(encoding="utf-8")


def test_the_report_opens_with_the_answer(text: str, document_frames: Frames) -> None:
    lines, count = text.splitlines(), len(document_frames.cases)
    assert lines[:4] == [
        "# Attention conformance report",
        "",
        f"**first and second agree. Judged {count} of {count} cases on each.**",
        "",
    ]
    assert lines[4].startswith("- ")
    assert f"**first and second agree. Judged {count} of {count} cases on each.**" in lines


def test_every_table_has_the_same_number_of_cells_in_each_line(text: str) -> None:
    tables = tables_of(text)
    assert len(tables) > 20
    for rows in tables:
        assert len({len(row) for row in rows}) == 1, rows[0]
        assert all(re.fullmatch(r"---:?", cell) for cell in rows[1])


def test_every_document_is_there_with_its_cases_and_every_printed_number_beside_each_implementation(
    text: str, document_frames: Frames
) -> None:
    shown = section(text, "Documents")
    documents = select_cases(["documents"]).cases
    assert len({case.file for case in documents}) == 7
    for case in documents:
        assert f"\n#### {escape(case.name)}\n" in shown
    rows = [row for table_rows in tables_of(shown) for row in table_rows]
    headings = {tuple(row[3:]) for row in rows if row[:3] == ["element", "printed", "exact"]}
    (both,) = headings
    assert [title.partition(" ")[0] for title in both] == ["first.eager", "second.eager"]
    numbers = document_frames.numbers
    of_documents = numbers["case"].isin([case.id for case in documents]) & numbers["printed"].notna()
    printed = numbers[of_documents & numbers["implementation"].eq("first.eager")]
    in_tables = [row for row in rows if len(row) == 5 and row[1].startswith("`")]
    # A line per number and dtype, with the exact one and what each of two implementations computed.
    assert sorted(row[1].partition(" **")[0] for row in in_tables) == sorted(f"`{text}`" for text in printed["printed"])
    assert len(in_tables) > 400
    assert all(re.match(r"-?[0-9]|-?inf", cell) for row in in_tables for cell in row[2:])


def test_the_scoring_posts_number_is_shown_as_it_is_printed(text: str) -> None:
    post = section(text, "Documents").partition("#### A single annotation is scored")[2].partition("####")[0]
    assert "2 of 2 comparisons with printed numbers hold in float64; 2 of 2 comparisons with printed numbers" in post
    assert tables_of(post)[0][2] == ["[0]", "`927`", "927", "927", "927"]


def test_every_case_has_its_verdict(text: str, document_frames: Frames) -> None:
    verdicts = section(text, "Verdicts")
    rows = [row for rows in tables_of(verdicts) for row in rows[2:]]
    assert sorted(row[0] for row in rows) == sorted(escape(case["name"]) for case in document_frames.cases.values())
    assert {cell for row in rows for cell in row[1:]} == {"agree", "agree (erratum)"}


def test_the_environment_is_described(text: str, document_frames: Frames) -> None:
    (rows,) = tables_of(section(text, "Environments"))
    assert rows[0] == ["", "here"]
    facts = {row[0]: row[1] for row in rows[2:]}
    assert facts["numpy"] == escape(document_frames.columns[0].version)
    assert facts["exit code"] == "0"
    assert facts["threads per worker"] == "1"


def test_what_is_wrong_is_listed_with_its_first_failing_stage(hand: Any) -> None:
    rows = [
        hand.row(verdict="numeric", stage="output", message="late"),
        hand.row(verdict="numeric", stage="scores", message="differs from numpy.eager"),
        hand.row(implementation="torch.eager"),
    ]
    text = render_markdown(hand.frames(rows))
    first = "numpy is wrong in the only case that it was judged in; torch agrees with the exact answer."
    assert f"**{first} Judged 1 of 1 case on each.**" in text
    (listed,) = tables_of(section(text, "What is wrong"))
    assert listed[2] == [
        "differs from numpy.eager", "numpy.eager", "1", "float64", "**numeric**", "`scores`",
        "`file/one`<br>B=1 H=1 Lq=1 Lk=3", "2",
    ]  # fmt: skip
    (verdicts,) = tables_of(section(text, "Verdicts"))
    assert verdicts[2] == ["one", "**numeric** at scores", "agree"]


def test_with_two_environments_every_name_says_which(hand: Any) -> None:
    bad = hand.run([hand.row(verdict="error", stage="", message="no")], label="new")
    text = render_markdown(hand.frames_of(bad, hand.run([hand.row()], label="old")))
    assert tables_of(section(text, "What is wrong"))[0][2][1] == "numpy.eager (new)"
    assert tables_of(section(text, "Verdicts"))[0][0] == ["case", "numpy.eager 1.0 (new)", "numpy.eager 1.0 (old)"]


def test_a_long_list_of_what_is_wrong_is_cut_and_says_so(hand: Any) -> None:
    rows = [hand.row(case=f"file/{n:03}", stage="", verdict="error", message="x" * (n + 1)) for n in range(60)]
    text = render_markdown(hand.frames(rows))
    assert len(tables_of(section(text, "What is wrong"))[0]) == 2 + 50
    assert "And 10 more defects, in `results.csv` and `numbers.csv`." in text


def test_the_cases_of_one_defect_are_folded_away_below_its_line(hand: Any) -> None:
    text = render_markdown(hand.frames([hand.row(case=f"file/{n:03}", verdict="numeric") for n in range(203)]))
    part = section(text, "What is wrong")
    assert len(tables_of(part)[0]) == 2 + 1
    assert "<summary>The 203 cases: numeric, numpy.eager</summary>" in part
    assert "- `file/199`\n- and 3 more\n" in part


def test_largest_differences_come_largest_first(hand: Any) -> None:
    pairs = [
        hand.row(
            comparison="pair", other="torch.eager", stage=stage, ratio=ratio, difference=1e-9, index="0,1", value=1.0
        )
        for stage, ratio in [("scores", 0.2), ("weights", 70.0), ("output", 0.05)]
    ]
    unmeasured = hand.row(comparison="pair", other="torch.eager", stage="masked", verdict="shape")
    (rows,) = tables_of(
        section(
            render_markdown(hand.frames([hand.row(), *pairs, unmeasured])),
            "Largest differences between two implementations",
        )
    )
    assert [(row[1], row[9]) for row in rows[2:]] == [("`weights`", "70"), ("`scores`", "0.2"), ("`output`", "0.05")]


def test_a_report_of_nothing_says_so(hand: Any) -> None:
    text = render_markdown(hand.frames(missing={"jax": "asked for by name, not installed"}))
    assert "**Nothing was run.**" in text
    assert "- jax could not run: asked for by name, not installed." in text
    assert "0 cases on 0 implementations" in text


def test_an_interrupted_run_says_so(hand: Any) -> None:
    text = render_markdown(hand.frames([hand.row()], summary=False))
    assert "- this run was interrupted, or is still going on: its results are not complete." in text


def test_a_document_whose_case_did_not_run_is_still_there(hand: Any) -> None:
    expected = {"name": "weights", "of": "weights", "basis": "printed", "transpose": False, "shape": [1, 1, 1, 2]}
    case = hand.case(source={"kind": "document", "title": "A document"}, expected=[expected])
    text = render_markdown(hand.frames(cases=[case]))
    assert "#### one" in text
    assert "**`weights`**: not run." in text
    returned = hand.row(comparison="printed", stage="output", index="0", reference_text="1.")
    text = render_markdown(hand.frames([hand.row(), returned], cases=[case]))
    assert "**`weights`**: no implementation returned it." in text


def test_a_text_is_shown_literally_on_one_line() -> None:
    assert escape("a|b\n`c` <d> *e* _f_ [g] {h} ~i~ #j \\") == (
        r"a\|b \`c\` \<d\> \*e\* \_f\_ \[g\] \{h\} \~i\~ \#j \\"
    )
    assert escape("Q & A &lt; &#39; & more;") == r"Q & A \&lt; \&\#39; & more;"
    assert escape(3) == "3"


def test_code_cannot_end_its_span_or_cell() -> None:
    assert code("a`b|c\nd") == "`a'b\\|c d`"
    assert code("a\\|b") == r"<code>a\\\|b</code>"
    assert code("") == ""


def test_a_table_aligns_what_it_is_told_to() -> None:
    assert table(["a", "b", "c"], [["1", "2", "3"]], "lr") == ["| a | b | c |", "| --- | ---: | --- |", "| 1 | 2 | 3 |"]


def test_a_summary_is_html_and_escaped_as_such() -> None:
    assert details("<b> & c", ["x"]) == ["<details>", "<summary>&lt;b&gt; &amp; c</summary>", "", "x", "", "</details>"]


@pytest.mark.parametrize(
    ("value", "text"), [(None, ""), (float("nan"), ""), (0.0, "0"), (1 / 3, "0.333"), (float("inf"), "inf")]
)
def test_a_number_is_short_and_a_missing_one_is_nothing(value: float | None, text: str) -> None:
    assert number(value) == text


def test_where_some_query_rows_stand_for_all_the_case_says_how_many(hand: Any) -> None:
    rows = [
        hand.row(case="file/large", judged_rows=64, query_rows=4096),
        hand.row(case="file/large", stage="scores", verdict="unverified"),
        hand.row(case="file/small"),
    ]
    report = render_markdown(hand.frames(rows))
    assert "In 1 large case, only a sample of the query rows was checked." in report
    verdicts = section(report, "Verdicts")
    assert [line for line in verdicts.splitlines() if "large" in line] == [
        "| large (64 of 4,096 query rows judged) | agree |"
    ]
    assert "| small | agree |" in verdicts


Report = Callable[..., list[str]]


@pytest.fixture
def section_of(hand: Any) -> Report:
    """Return the section over cases that agree except for some that fail and some that are unsupported."""

    def make(cases: int, failing: Iterable[int] = (), unsupported: Iterable[int] = ()) -> list[str]:
        special = dict.fromkeys(failing, "numeric") | dict.fromkeys(unsupported, "unsupported")
        rows = [
            hand.row(case=f"file/case-{number:03d}", verdict=special.get(number, "agree")) for number in range(cases)
        ]
        return verdict_section(hand.frames(rows))

    return make


def listed(lines: list[str]) -> list[int]:
    return [int(line.split()[1].removeprefix("case-")) for line in lines if line.startswith("| case-")]


def test_as_many_cases_as_can_be_read_are_all_there(section_of: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_MAX_LISTED_CASES", 8)
    lines = section_of(8, failing=[3])
    assert listed(lines) == list(range(8))
    assert not any("too many" in line for line in lines)


def test_of_more_only_those_that_do_not_agree_are_there_and_all_are_counted(
    section_of: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "_MAX_LISTED_CASES", 8)
    lines = section_of(9, failing=[3, 7], unsupported=[1])
    assert listed(lines) == [1, 3, 7]
    assert lines[2].startswith("9 cases on 1 implementations are too many")
    assert "show the 3 in which some implementation does not agree" in lines[2]
    assert "| implementation | agree | numeric | unsupported |" in lines
    assert "| numpy.eager 1.0 | 6 | 2 | 1 |" in lines


def test_what_fails_comes_first_where_even_that_is_too_much(
    section_of: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "_MAX_CELLS", 4)
    lines = section_of(9, failing=[6, 7, 8], unsupported=[0, 1, 2])
    assert listed(lines) == [0, 6, 7, 8]
    assert "show 4 of the 6 in which" in lines[2]
