"""A page per document: what ``document_pages`` says, with its pictures drawn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attncheck.reports.documents.pages import DocumentCase, DocumentPage, document_pages
from attncheck.reports.frames import Frames
from attncheck.reports.html.pictures import Heat, heat_of
from attncheck.reports.html.text import Anchors, unique_slugs
from attncheck.reports.printed_numbers import NumberCounts, number_counts_of


@dataclass(frozen=True)
class DrawnCase:
    """One computation of a document, where its stages are on the page, and its pictures."""

    case: DocumentCase
    anchor: str
    inputs: tuple[Heat, ...]
    stages: tuple[Heat, ...]


@dataclass(frozen=True)
class DrawnDocument:
    """One document, its anchor, and how many of its printed numbers hold, fail, or were not compared."""

    page: DocumentPage
    anchor: str
    counts: NumberCounts
    cases: tuple[DrawnCase, ...]


def drawn_documents(frames: Frames, anchors: Anchors, most_pictures: int) -> tuple[DrawnDocument, ...]:
    """Return every document; pictures end where the budget does."""
    pages = document_pages(frames)
    numbers = iter(range(most_pictures))
    names = unique_slugs(page.file.rpartition("/")[2].removesuffix(".yaml") for page in pages)
    return tuple(
        DrawnDocument(
            page,
            f"document-{name}",
            number_counts_of(frames, [case.id for case in page.cases]),
            tuple(_drawn(case, anchors, numbers) for case in page.cases),
        )
        for page, name in zip(pages, names, strict=True)
    )


def _drawn(case: DocumentCase, anchors: Anchors, numbers: Iterator[int]) -> DrawnCase:
    panels = [(drawing.is_input, panel) for drawing in case.drawings for panel in drawing.panels]
    heats = [(is_input, heat_of(panel, number)) for (is_input, panel), number in zip(panels, numbers, strict=False)]
    return DrawnCase(
        case,
        anchors.case(case.id) if case.id in anchors.cases else "",
        tuple(heat for is_input, heat in heats if is_input),
        tuple(heat for is_input, heat in heats if not is_input),
    )
