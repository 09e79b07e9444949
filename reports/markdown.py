"""The report in Markdown that reads well on a forge, and the elements of Markdown that show any text as it is.

In order: the answer; a row for each implementation; what is wrong or expected to be; each document's printed numbers
beside each implementation's; the verdict of every case on every implementation, or, of very many, of those that do not
agree; properties; the largest differences; versions. Sections are rendered from their blocks (``sections.py``).
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attncheck.reports.documents import (
    DocumentCase,
    DocumentPage,
    Expectation,
    NumberLine,
    NumberTable,
    Value,
    as_matrix,
    count,
    document_pages,
)
from attncheck.reports.frames import (
    FAILS_A_RUN,
    Column,
    Frames,
    element_in,
    records,
    rows_judged,
)
from attncheck.reports.html.contents import unique_slugs
from attncheck.reports.sections import (
    Block,
    Code,
    Details,
    Entries,
    Figure,
    Inline,
    Items,
    Nested,
    OnPage,
    Page,
    Section,
    Table,
    Text,
    by_implementation,
    documents_at_a_glance,
    environments,
    expected_to_fail,
    properties,
    queries_without_key,
    wrong,
)
from attncheck.reports.summary import make_summary, verdict_table
from attncheck.spec import DTYPES

_MAX_LISTED = 50
_LARGEST = 15


def render_markdown(frames: Frames) -> str:
    """Return the whole report. The same frames give the same text."""
    sections = [
        _opening(frames),
        section_lines(by_implementation(frames)),
        section_lines(wrong(frames, _MAX_LISTED)),
        section_lines(expected_to_fail(frames)),
        section_lines(queries_without_key(frames)),
        section_lines(documents_at_a_glance(frames)),
        verdict_section(frames),
        section_lines(properties(frames)),
        *document_sections(frames),
        _largest(frames),
        section_lines(environments(frames)),
    ]
    return "\n".join(line for section in sections if section for line in [*section, ""])


def _opening(frames: Frames) -> list[str]:
    answer = make_summary(frames)
    lines = ["# Attention conformance report", "", f"**{escape(answer.first_line)}**", ""]
    lines += [f"- {escape(sentence)}" for sentence in answer.sentences]
    lines += [f"- {escape(note)}." for note in frames.notes]
    return lines


def _largest(frames: Frames) -> list[str]:
    """The pairs that differ most, whether or not they still agree."""
    pairs = frames.pairs[frames.pairs["ratio"].notna()]
    if pairs.empty:
        return []
    pairs = pairs.sort_values(["ratio", "difference"], ascending=False, kind="stable").head(_LARGEST)
    rows = [_pair_cells(frames, row) for row in records(pairs)]
    headings = [
        "case",
        "stage",
        "dtype",
        "one",
        "other",
        "at",
        "value",
        "other value",
        "difference",
        "of the allowed",
        "verdict",
    ]
    return [
        "## Largest differences between two implementations",
        "",
        "Two implementations disagree where they differ by more than the sum of their error bounds; the column before "
        "the last says what part of that sum the difference is.",
        "",
        *table(headings, rows, "llllllrrrrl"),
    ]


def _pair_cells(frames: Frames, row: Mapping[str, Any]) -> list[str]:
    return [
        code(row["case"]),
        code(row["stage"]),
        row["dtype"],
        escape(frames.named(row["implementation"], row["environment"])),
        escape(frames.named(row["other"], row["other_environment"])),
        element_in(frames.cases[row["case"]], row),
        number(row["value"], 9 if row["dtype"] == "float32" else 17),
        number(row["reference"], 9 if row["dtype"] == "float32" else 17),
        number(row["difference"]),
        number(row["ratio"]),
        row["verdict"],
    ]


_MAX_VISIBLE = 40
"""Longer tables are folded away."""


def document_sections(frames: Frames) -> list[list[str]]:
    """Return a section per document: its cases, and in each what it prints and what it computes without printing.

    Each section leads to the pictures of the HTML report.
    """
    pages = document_pages(frames)
    if not pages:
        return []
    opening = [
        "## Documents",
        "",
        "Each number that a document prints, beside the exact answer and what each implementation computes; elements "
        "count from 0.",
    ]
    names = unique_slugs(page.file.rpartition("/")[2].removesuffix(".yaml") for page in pages)
    return [opening, *(_document(page, name) for page, name in zip(pages, names, strict=True))]


def _document(page: DocumentPage, name: str) -> list[str]:
    by = f", by {escape(page.author)}" if page.author else ""
    section = f"; {escape(page.section)}" if page.section else ""
    lines = [f"### {escape(page.title)}", "", f"*{escape(page.source)}*{by}{section}.", ""]
    lines += [f"- {escape(note)}" for note in page.notes]
    lines += ["", f"Drawn in [report.html](report.html#document-{name})."]
    return [*lines, *(line for case in page.cases for line in _case(case))]


def _case(case: DocumentCase) -> list[str]:
    lines = ["", f"#### {escape(case.name)}", "", *map(escape, case.notes)]
    for expectation in case.expectations:
        lines += ["", *_expectation(expectation)]
    return lines


def _expectation(expected: Expectation) -> list[str]:
    title = f"**{code(expected.name)}**"
    if expected.called:
        title = f"**{escape(expected.called)}** (stage {code(expected.name)})"
    if not expected.tables:
        return [f"{title}: {escape(expected.holds[0].lower() + expected.holds[1:])}"]
    notes = [escape(note) for note in expected.notes]
    if expected.erratum:
        notes.append(f"**Erratum.** {escape(expected.erratum)}")
    holds = f"**{escape(expected.holds)}**" if expected.fails else escape(expected.holds)
    if expected.basis == "unprinted":
        lines = [f"{title}: computed, not printed. {holds}", *(f"\n{note}" for note in notes)]
        return [*lines, "", escape(expected.spread), "", *_matrix(expected.tables[0])]
    lines = [f"{title}: {holds}", *(f"\n{note}" for note in notes), ""]
    for numbers in expected.tables:
        body = _number_table(numbers, expected.basis)
        if numbers.dtype == DTYPES[0] and len(numbers.lines) <= _MAX_VISIBLE:
            lines += [*body, ""]
        else:
            lines += [*details(f"{numbers.dtype}: {count(len(numbers.lines))}", body), ""]
    return lines[:-1]


def _number_table(numbers: NumberTable, basis: str) -> list[str]:
    """One line per number: the document's, the exact one, then each implementation's."""
    with_environment = len({column.environment for column in numbers.columns}) > 1
    titles = [escape(column.title(with_environment=with_environment)) for column in numbers.columns]
    rows = [[line.index, _printed(line), line.exact, *map(_value, line.values)] for line in numbers.lines]
    return table(["element", basis, "exact", *titles], rows, "lrr" + "r" * len(titles))


def _value(value: Value | None) -> str:
    if value is None:
        return ""
    return f"{value.text} **{value.verdict}**" if value.state else value.text


def _printed(line: NumberLine) -> str:
    return f"{code(line.printed)} **{line.mark_text}**" if line.mark_text else code(line.printed)


def _matrix(numbers: NumberTable) -> list[str]:
    """Show the exact numbers as a matrix."""
    lines: Sequence[NumberLine] = numbers.lines
    matrix = as_matrix(lines)
    caption = f"exact answer for {numbers.dtype}"
    headings = [caption, *map(str, range(max(map(len, matrix.values()))))]
    body = table(headings, [[row, *cells] for row, cells in matrix.items()], "l" + "r" * len(headings))
    return body if len(lines) <= _MAX_VISIBLE else details(f"{caption}: {count(len(lines))}", body)


_MAX_LISTED_CASES, _MAX_CELLS = 2_000, 40_000
"""A forge shows no file of many megabytes, and nobody reads one."""

Verdicts = Mapping[str, Mapping[Column, str]]


def verdict_section(frames: Frames) -> list[str]:
    """Return the verdict of every case on every implementation, a table per topic."""
    verdicts: Verdicts = verdict_table(frames)
    most = min(_MAX_LISTED_CASES, max(1, _MAX_CELLS // max(1, len(frames.columns))))
    lines = ["## Verdicts", ""]
    if len(verdicts) > most:
        shown = _not_agreeing(verdicts, most)
        lines += _instead_of_all(frames, verdicts, len(shown))
        verdicts = shown
    return [
        *lines,
        *_tables(frames, verdicts),
        "An implementation agrees where every stage is within its derived error bound of the exact answer, "
        "statistically too on inputs for which that can be said, and where every printed number holds. Without another "
        "word, all dtypes agree.",
    ]


def _not_agreeing(verdicts: Verdicts, most: int) -> Verdicts:
    """Return the first cases in which some implementation does not agree: what fails before the rest."""
    failing = [case for case, cells in verdicts.items() if any("**" in cell for cell in cells.values())]
    others = [case for case, cells in verdicts.items() if set(cells.values()) != {"agree"}]
    chosen = set(list(dict.fromkeys([*failing, *others]))[:most])
    return {case: cells for case, cells in verdicts.items() if case in chosen}


def _instead_of_all(frames: Frames, verdicts: Verdicts, shown: int) -> list[str]:
    """Say that not all is shown, and count what is not."""
    others = sum(set(cells.values()) != {"agree"} for cells in verdicts.values())
    which = f"the {shown:,}" if shown == others else f"{shown:,} of the {others:,}"
    return [
        f"{len(verdicts):,} cases on {len(frames.columns):,} implementations are too many to be read one by one. The "
        f"tables below show {which} in which some implementation does not agree or did not run, those that fail first; "
        "every verdict is in `results.csv`.",
        "",
    ]


def _tables(frames: Frames, verdicts: Verdicts) -> list[str]:
    headings = ["case", *(escape(frames.title(column)) for column in frames.columns)]
    sampled = _sampled(frames)
    by_file: dict[str, list[str]] = {}
    for case in verdicts:
        by_file.setdefault(frames.cases[case]["file"], []).append(case)
    lines = []
    for file, cases in by_file.items():
        title = frames.cases[cases[0]]["title"]
        rows = [
            [
                escape(frames.cases[case]["name"] + sampled.get(case, "")),
                *(_verdict_cell(verdicts[case][column]) for column in frames.columns),
            ]
            for case in cases
        ]
        lines += [f"### {escape(title)} ({code(file)})", "", *table(headings, rows), ""]
    return lines


def _verdict_cell(words: str) -> str:
    """Show a cell; a stage in it may have any name, only the stars around a verdict are markup."""
    return escape(words).replace(r"\*\*", "**")


def _sampled(frames: Frames) -> dict[str, str]:
    """Say of each case in which some query rows stand for all how many."""
    rows = frames.results[frames.results["query_rows"].notna()].drop_duplicates("case")
    return {row["case"]: f" ({rows_judged(row['judged_rows'], row['query_rows'])})" for row in records(rows)}


def page_text(page: Page) -> str:
    """Return a whole page."""
    sections = [[f"# {page.title}", "", *blocks_lines(page.opening)], *map(section_lines, page.sections)]
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def section_lines(section: Section | None) -> list[str]:
    """Render a section; nothing for none."""
    return [] if section is None else [f"## {section.title}", "", *blocks_lines(section.blocks)]


def blocks_lines(blocks: Iterable[Block]) -> list[str]:
    """Render blocks, an empty line between them."""
    lines = [line for block in blocks for line in [*_block(block), ""]]
    return lines[:-1]


def _block(block: Block) -> list[str]:
    match block:
        case Items():
            lines = [line for item in block.items for line in _item(item)]
        case Table():
            lines = _table(block)
        case Code():
            lines = ["```", *block.lines, "```"]
        case Details():
            lines = details(block.summary, blocks_lines(block.blocks))
        case OnPage():
            lines = blocks_lines(block.in_words)
        case Entries():
            entries = ((f"{number}. ", blocks) for number, (_, blocks) in enumerate(block.entries, 1))
            lines = [line for entry in entries for line in _entry(*entry)]
        case Figure():
            lines = [escape(block.words)]
        case Text():
            lines = [inline(block.content)]
    return lines


def _item(item: Inline | Nested) -> list[str]:
    if isinstance(item, Nested):
        return [f"- {inline(item.content)}", *(f"  - {inline(each)}" for each in item.items)]
    return [f"- {inline(item)}"]


def _table(block: Table) -> list[str]:
    """Render a table without columns of pictures, which have no heading."""
    kept = [number for number, heading in enumerate(block.headings) if heading or not number]
    letters = block.align.ljust(len(block.headings), "l")
    rows = [[inline(row[number]) for number in kept] for row in block.rows]
    return table([escape(block.headings[number]) for number in kept], rows, "".join(letters[number] for number in kept))


def _entry(number: str, blocks: Sequence[Block]) -> list[str]:
    """Render an entry of a numbered list: its texts line by line, then what else it has, as far in as the number."""
    texts = [block for block in blocks if isinstance(block, Text)]
    first = "<br>".join(inline(text.content) for text in texts)
    rest = blocks_lines(block for block in blocks if not isinstance(block, Text))
    return [f"{number}{first}", *(f"{' ' * len(number)}{line}".rstrip() for line in (["", *rest, ""] if rest else []))]


def inline(part: Inline) -> str:
    """Render a text with its marks."""
    if isinstance(part, tuple):
        return "".join(map(inline, part))
    if isinstance(part, str):
        edges = (" " if part != part.lstrip() else "", " " if part.strip() != part.lstrip() else "")
        return escape(part).join(edges) if part.strip() else part
    if isinstance(part, Figure):
        return escape(part.words)
    if part.kind == "break":
        return "<br>"
    if part.address:
        is_bare = part.text == part.address and "://" in part.address
        return f"<{part.text}>" if is_bare else f"[{escape(part.text)}]({part.address})"
    text = code(part.text) if part.kind in ("code", "case") else escape(part.text)
    return f"**{text}**" if part.kind in ("strong", *FAILS_A_RUN) else text


# An ampersand is special only where it begins a character reference, such as &lt;
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|~#]|&(?=#?\w+;))")


def escape(text: object) -> str:
    """Show a text literally: no markup, no line break."""
    return _SPECIAL.sub(r"\\\1", " ".join(str(text).split()))


def code(text: object) -> str:
    """Show a name in monospace; it cannot end the span or the cell."""
    inner = " ".join(str(text).split()).replace("`", "'")
    if "\\|" in inner:  # in a code span neither of the two can be escaped
        return f"<code>{escape(inner)}</code>"
    inner = inner.replace("|", "\\|")
    return f"`{inner}`" if inner else ""


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], align: str = "") -> list[str]:
    """Return a table's lines. Cells are Markdown already; ``align`` has l or r per column, l if it is short."""
    letters = align.ljust(len(headings), "l")
    rule = [("---:" if letter == "r" else "---") for letter in letters[: len(headings)]]
    return [_line(headings), _line(rule), *(_line(row) for row in rows)]


def details(summary: str, lines: Iterable[str]) -> list[str]:
    """Fold lines away behind a summary; without HTML they are simply there."""
    return ["<details>", f"<summary>{html.escape(summary)}</summary>", "", *lines, "", "</details>"]


def number(value: float | None, digits: int = 3) -> str:
    """Write a number shortly; nothing for no number."""
    return "" if value is None or math.isnan(value) else f"{value:.{digits}g}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
