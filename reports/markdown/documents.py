"""Each document's numbers beside each framework's, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attncheck.reports.documents.numbers import NumberLine, NumberTable, Value, as_matrix, count
from attncheck.reports.documents.pages import DocumentCase, DocumentPage, Expectation, document_pages
from attncheck.reports.frames import Frames
from attncheck.reports.html.text import unique_slugs
from attncheck.reports.markdown.text import code, details, escape, table
from attncheck.spec import DTYPES

_MAX_VISIBLE = 40
"""Longer tables are folded away."""


Images = Mapping[str, Sequence[str]]
"""Lines of Markdown that show what is drawn of a case, by its id."""


def document_sections(frames: Frames, images: Images | None = None) -> list[list[str]]:
    """Return a section per document: its cases, and in each what it prints and what it computes without printing.

    Without images each section leads to the pictures of the HTML report, which has those of everything that fails.
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
    drawn = [f"Drawn in [report.html](report.html#document-{name})." if images is None else "" for name in names]
    return [opening, *(_document(page, images or {}, where) for page, where in zip(pages, drawn, strict=True))]


def _document(page: DocumentPage, images: Images, drawn: str) -> list[str]:
    by = f", by {escape(page.author)}" if page.author else ""
    section = f"; {escape(page.section)}" if page.section else ""
    lines = [f"### {escape(page.title)}", "", f"*{escape(page.source)}*{by}{section}.", ""]
    lines += [f"- {escape(note)}" for note in page.notes]
    lines += ["", drawn] if drawn else []
    return [*lines, *(line for case in page.cases for line in _case(case, images))]


def _case(case: DocumentCase, images: Images) -> list[str]:
    lines = ["", f"#### {escape(case.name)}", "", *map(escape, case.notes), *images.get(case.id, ())]
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
