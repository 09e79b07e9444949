"""The report for people: everything is in it, and no text can break out of its place."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attncheck.reading.selection import select_cases
from attncheck.reports.frames import Frames
from attncheck.reports.markdown.report import render_markdown
from attncheck.reports.markdown.text import code, details, escape, number, table
from attncheck.results.format import Row

MakeRow = Callable[..., Row]
MakeRecord = Callable[..., dict[str, Any]]
WriteRun = Callable[..., Path]
FramesOf = Callable[..., Frames]

HOSTILE = "a|b\\|z `c` <script>alert(1)</script> **d** [e](f) &lt; # g\n# h\n\n| i |\n\\"


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


@pytest.fixture(scope="session")
def document_report(document_frames: Frames) -> str:
    return render_markdown(document_frames)


def test_the_report_opens_with_the_answer(document_report: str, document_frames: Frames) -> None:
    lines, count = document_report.splitlines(), len(document_frames.cases)
    assert lines[:4] == [
        "# Attention conformance report",
        "",
        f"**first and second agree. Judged {count} of {count} cases on each.**",
        "",
    ]
    assert lines[4].startswith("- ")
    assert f"**first and second agree. Judged {count} of {count} cases on each.**" in lines


def test_every_table_has_the_same_number_of_cells_in_each_line(document_report: str) -> None:
    tables = tables_of(document_report)
    assert len(tables) > 20
    for rows in tables:
        assert len({len(row) for row in rows}) == 1, rows[0]
        assert all(re.fullmatch(r"---:?", cell) for cell in rows[1])


def test_every_document_is_there_with_its_cases_and_every_printed_number_beside_each_implementation(
    document_report: str, document_frames: Frames
) -> None:
    shown = section(document_report, "Documents")
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


def test_the_scoring_posts_number_is_shown_as_it_is_printed(document_report: str) -> None:
    post = section(document_report, "Documents").partition("#### A single annotation is scored")[2].partition("####")[0]
    assert "2 of 2 comparisons with printed numbers hold in float64; 2 of 2 comparisons with printed numbers" in post
    assert tables_of(post)[0][2] == ["[0]", "`927`", "927", "927", "927"]


def test_every_case_has_its_verdict(document_report: str, document_frames: Frames) -> None:
    verdicts = section(document_report, "Verdicts")
    rows = [row for rows in tables_of(verdicts) for row in rows[2:]]
    assert sorted(row[0] for row in rows) == sorted(escape(case["name"]) for case in document_frames.cases.values())
    assert {cell for row in rows for cell in row[1:]} == {"agree", "agree (erratum)"}


def test_the_environment_is_described(document_report: str, document_frames: Frames) -> None:
    (rows,) = tables_of(section(document_report, "Environments"))
    assert rows[0] == ["", "here"]
    facts = {row[0]: row[1] for row in rows[2:]}
    assert facts["numpy"] == escape(document_frames.columns[0].version)
    assert facts["exit code"] == "0"
    assert facts["threads per worker"] == "1"


def test_what_is_wrong_is_listed_with_its_first_failing_stage(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    rows = [
        make_row(verdict="numeric", stage="output", message="late"),
        make_row(verdict="numeric", stage="scores", message="differs from numpy.eager"),
        make_row(implementation="torch.eager"),
    ]
    text = render_markdown(frames_of(write_run(rows)))
    first = "numpy is wrong in the only case that it was judged in; torch agrees with the exact answer."
    assert f"**{first} Judged 1 of 1 case on each.**" in text
    (listed,) = tables_of(section(text, "What is wrong"))
    assert listed[2] == [
        "`file/one`<br>B=1 H=1 Lq=1 Lk=3", "numpy.eager", "float64", "**numeric**", "`scores`",
        "differs from numpy.eager", "2",
    ]  # fmt: skip
    (verdicts,) = tables_of(section(text, "Verdicts"))
    assert verdicts[2] == ["one", "**numeric** at scores", "agree"]


def test_with_two_environments_every_name_says_which(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    bad = write_run([make_row(verdict="error", stage="", message="no")], label="new")
    text = render_markdown(frames_of(bad, write_run([make_row()], label="old")))
    assert tables_of(section(text, "What is wrong"))[0][2][1] == "numpy.eager (new)"
    assert tables_of(section(text, "Verdicts"))[0][0] == ["case", "numpy.eager 1.0 (new)", "numpy.eager 1.0 (old)"]


def test_a_long_list_of_what_is_wrong_is_cut_and_says_so(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    text = render_markdown(frames_of(write_run([make_row(case=f"file/{n:03}", verdict="numeric") for n in range(60)])))
    assert len(tables_of(section(text, "What is wrong"))[0]) == 2 + 50
    assert "And 10 more, in `results.csv` and `numbers.csv`." in text


def test_largest_differences_come_largest_first(make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf) -> None:
    pairs = [
        make_row(
            comparison="pair", other="torch.eager", stage=stage, ratio=ratio, difference=1e-9, index="0,1", value=1.0
        )
        for stage, ratio in [("scores", 0.2), ("weights", 70.0), ("output", 0.05)]
    ]
    unmeasured = make_row(comparison="pair", other="torch.eager", stage="masked", verdict="shape")
    (rows,) = tables_of(
        section(
            render_markdown(frames_of(write_run([make_row(), *pairs, unmeasured]))),
            "Largest differences between two implementations",
        )
    )
    assert [(row[1], row[9]) for row in rows[2:]] == [("`weights`", "70"), ("`scores`", "0.2"), ("`output`", "0.05")]


def test_a_report_of_nothing_says_so(write_run: WriteRun, frames_of: FramesOf) -> None:
    text = render_markdown(frames_of(write_run(missing={"jax": "asked for by name, not installed"})))
    assert "**Nothing was run.**" in text
    assert "- jax could not run: asked for by name, not installed." in text
    assert "0 cases on 0 implementations" in text


def test_an_interrupted_run_says_so(make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf) -> None:
    text = render_markdown(frames_of(write_run([make_row()], summary=False)))
    assert "- this run was interrupted, or is still going on: its results are not complete." in text


def test_a_document_whose_case_did_not_run_is_still_there(
    make_row: MakeRow, make_case_record: MakeRecord, write_run: WriteRun, frames_of: FramesOf
) -> None:
    expected = {"name": "weights", "of": "weights", "basis": "printed", "transpose": False, "shape": [1, 1, 1, 2]}
    case = make_case_record(source={"kind": "document", "title": "A document"}, expected=[expected])
    text = render_markdown(frames_of(write_run(cases=[case])))
    assert "#### one" in text
    assert "**`weights`**: not run." in text
    returned = make_row(comparison="printed", stage="output", index="0", reference_text="1.")
    text = render_markdown(frames_of(write_run([make_row(), returned], cases=[case])))
    assert "**`weights`**: no implementation returned it." in text


@pytest.fixture
def hostile_report(make_row: MakeRow, make_case_record: MakeRecord, write_run: WriteRun, frames_of: FramesOf) -> str:
    """A report in which every text that comes from outside is hostile."""
    shared: dict[str, Any] = {"of": "weights", "transpose": False, "shape": [1, 1, 1, 2], "called": HOSTILE}
    expected = [
        {"name": "weights", "basis": "printed", "erratum": HOSTILE, **shared},
        {"name": "weights", "basis": "known", "because": HOSTILE, "note": HOSTILE, **shared},
        {"name": "output", "basis": "unprinted", "note": HOSTILE, **shared, "of": "output"},
    ]
    source = {"kind": "document", "title": HOSTILE, "author": HOSTILE, "section": HOSTILE, "notes": [HOSTILE]}
    identity = f"{HOSTILE}/case"
    case = make_case_record(
        identity, name=HOSTILE, file=HOSTILE, title=HOSTILE, source=source, notes=[HOSTILE], expected=expected
    )
    names = {HOSTILE: HOSTILE, f"{HOSTILE} 2": HOSTILE}
    rows = []
    printed: dict[str, Any] = {"index": "0,0,0,1", "value": 0.5, "reference_text": HOSTILE}
    for name in names:
        shared = {"case": identity, "implementation": name}
        rows += [
            make_row(**shared, verdict="numeric", message=HOSTILE),
            make_row(**shared, verdict="error", stage="", message=HOSTILE, dtype="float32"),
            make_row(
                **shared, comparison="printed", index="0,0,0,1", value=0.5, reference_text=HOSTILE, half_unit=0.05
            ),
            make_row(**shared, comparison="known", **printed, half_unit=0.0),
            make_row(**shared, comparison="exact", stage="output", index="0,0,0,1", value=0.5, verdict="numeric"),
            make_row(
                **shared,
                comparison="pair",
                stage="output",
                other=HOSTILE,
                index="0",
                ratio=1.0,
                difference=1.0,
                value=1.0,
            ),
        ]
    outside: dict[str, Any] = {
        "cases": [case],
        "versions": names,
        "left_out": {HOSTILE: HOSTILE},
        "missing": {HOSTILE: HOSTILE},
        "faults": [HOSTILE],
        "command": HOSTILE,
        "platform": HOSTILE,
        "flags": {"A": HOSTILE},
    }
    one = write_run(rows, label=HOSTILE, name="one", **outside)
    two = write_run(rows, label=f"{HOSTILE} 2", name="two", **outside)
    return render_markdown(frames_of(one, two))


def test_hostile_texts_cannot_break_a_table(hostile_report: str) -> None:
    tables = tables_of(hostile_report)
    assert len(tables) >= 7
    for rows in tables:
        assert len({len(row) for row in rows}) == 1, rows[0]


def test_hostile_texts_cannot_make_html_headings_links_or_references(hostile_report: str) -> None:
    # What is left when code and escaped characters are taken out is what Markdown acts on.
    outside_blocks, blocks = re.subn(r"^```\n([^`\n]*\n)+```$", "", hostile_report, flags=re.MULTILINE)
    assert blocks == 1
    outside_code = re.sub(r"(?<!\\)`[^`\n]*`", "", outside_blocks)
    assert "<script" not in re.sub(r"\\<", "", outside_code)
    own_link = r"^Drawn in \[report\.html\]\(report\.html#document-[a-z0-9.-]+\)\.$"
    without_own, own = re.subn(own_link, "", outside_code, flags=re.MULTILINE)
    assert own == 1
    assert "](" not in re.sub(r"\\\]", "", without_own)
    assert "&lt;" not in outside_code.replace("\\&lt;", "").replace("<summary>", "")
    headings = [line for line in hostile_report.splitlines() if re.match(r"#+ ", line)]
    assert [line for line in headings if line.startswith(("# ", "## "))] == [
        "# Attention conformance report",
        "## What is wrong",
        "## Documents at a glance",
        "## Verdicts",
        "## Documents",
        "## Largest differences between two implementations",
        "## Environments",
    ]
    assert len(headings) == 7 + 3


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


def test_where_some_query_rows_stand_for_all_the_case_says_how_many(
    make_row: MakeRow, write_run: WriteRun, frames_of: FramesOf
) -> None:
    rows = [
        make_row(case="file/large", judged_rows=64, query_rows=4096),
        make_row(case="file/large", stage="scores", verdict="unverified"),
        make_row(case="file/small"),
    ]
    report = render_markdown(frames_of(write_run(rows)))
    assert "In 1 large case some query rows stand for all." in report
    verdicts = section(report, "Verdicts")
    assert [line for line in verdicts.splitlines() if "large" in line] == [
        "| large (64 of 4,096 query rows judged) | agree |"
    ]
    assert "| small | agree |" in verdicts
