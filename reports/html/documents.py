"""A page per document: what ``document_pages`` says, with its pictures drawn, and only what fails open."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from attncheck.reports.cells import FAILS_A_RUN, cell_table, is_unsupported
from attncheck.reports.documents import DocumentCase, DocumentPage, document_pages
from attncheck.reports.frames import Frames
from attncheck.reports.html.contents import LETTERS_PER_INPUT, LETTERS_PER_NUMBER, Anchors, Budget, unique_slugs, within
from attncheck.reports.html.evidence import Heat, heat_of
from attncheck.reports.printed_numbers import NumberCounts, number_counts_of

_MAX_IN_PART = 10
"""Computations of a document that stand together; a longer one is split."""


@dataclass(frozen=True)
class DrawnCase:
    """One computation of a document, whether anything of it fails, where its stages are, and its pictures."""

    case: DocumentCase
    fails: bool
    anchor: str
    inputs: tuple[Heat, ...]
    stages: tuple[Heat, ...]
    left_out: int
    """Pictures that the page has no room for."""
    has_numbers: bool
    """Whether it has room for the numbers."""


@dataclass(frozen=True)
class DrawnPart:
    """Computations that follow each other, in a long document with a title; ``failing`` of them fail."""

    title: str
    failing: int
    cases: tuple[DrawnCase, ...]


@dataclass(frozen=True)
class DrawnDocument:
    """One document, its anchor, and how many of its printed numbers hold, fail, or were not compared."""

    page: DocumentPage
    anchor: str
    counts: NumberCounts
    parts: tuple[DrawnPart, ...]

    @property
    def shown(self) -> int:
        """How many of its computations are laid out."""
        return sum(len(part.cases) for part in self.parts)

    @property
    def unsupported(self) -> int:
        """How many of its computations no implementation supports."""
        return len(self.page.cases) - self.shown

    @property
    def failing(self) -> int:
        """How many of its computations fail."""
        return sum(part.failing for part in self.parts)


def drawn_documents(frames: Frames, anchors: Anchors, budget: Budget) -> tuple[DrawnDocument, ...]:
    """Return every document with the computations that anybody supports.

    Numbers and pictures of what fails come first, of the rest as many as the budget has room for.
    """
    pages = document_pages(frames)
    failing, table = _failing(frames), cell_table(frames)
    artist = _Artist(budget)
    shown = [
        case
        for page in pages
        for case in page.cases
        if case.id in failing or not is_unsupported(table.get(case.id, {}))
    ]
    sizes = {case.id: _letters(case) for case in sorted(shown, key=lambda case: case.id not in failing)}
    with_numbers = within(sizes, sizes.__getitem__, budget.number_letters)
    names = unique_slugs(page.file.rpartition("/")[2].removesuffix(".yaml") for page in pages)
    found = []
    for page, name in zip(pages, names, strict=True):
        drawn = [
            _drawn(case, anchors, artist, fails=case.id in failing, has_numbers=case.id in with_numbers)
            for case in page.cases
            if case.id in sizes
        ]
        counts = number_counts_of(frames, [case.id for case in page.cases])
        found.append(DrawnDocument(page, f"document-{name}", counts, tuple(_parts(drawn))))
    return tuple(found)


def _failing(frames: Frames) -> frozenset[str]:
    """Return the cases of documents of which a stage or a number fails."""
    of_stages = {
        case
        for case, row in cell_table(frames).items()
        if any(cell.state in FAILS_A_RUN for cells in row.values() for cell in cells.values())
    }
    of_numbers = {
        case.id
        for page in document_pages(frames)
        for case in page.cases
        if any(each.fails for each in case.expectations)
    }
    return frozenset(of_stages | of_numbers)


def _letters(case: DocumentCase) -> int:
    """Return how much markup a computation's numbers take."""
    inputs = sum(len(row) for given in case.given for row in given.rows)
    tables = [table for expected in case.expectations for table in expected.tables]
    numbers = sum(len(table.lines) * (3 + len(table.columns)) for table in tables)
    return LETTERS_PER_INPUT * inputs + LETTERS_PER_NUMBER * numbers


def _parts(cases: list[DrawnCase]) -> Iterator[DrawnPart]:
    starts = range(0, len(cases), _MAX_IN_PART)
    for start in starts:
        chosen = tuple(cases[start : start + _MAX_IN_PART])
        title = f"Computations {start + 1} to {start + len(chosen)} of {len(cases)}" if len(starts) > 1 else ""
        yield DrawnPart(title, sum(case.fails for case in chosen), chosen)


class _Artist:
    """Draws what fails, and of the rest, as much as the page has room for."""

    def __init__(self, budget: Budget) -> None:
        self._left = {True: budget.failing_pictures, False: budget.pictures}
        self._numbers = count()  # keeps the parts of one picture apart from those of another

    def draw(self, case: DocumentCase, *, fails: bool) -> list[tuple[bool, Heat]]:
        panels = [(drawing.is_input, panel) for drawing in case.drawings for panel in drawing.panels]
        chosen = panels[: self._left[fails]]
        self._left[fails] -= len(chosen)
        return [(is_input, heat_of(panel, next(self._numbers))) for is_input, panel in chosen]


def _drawn(case: DocumentCase, anchors: Anchors, artist: _Artist, *, fails: bool, has_numbers: bool) -> DrawnCase:
    heats = artist.draw(case, fails=fails)
    return DrawnCase(
        case,
        fails,
        anchors.case(case.id) if case.id in anchors.cases else "",
        tuple(heat for is_input, heat in heats if is_input),
        tuple(heat for is_input, heat in heats if not is_input),
        sum(len(drawing.panels) for drawing in case.drawings) - len(heats),
        has_numbers,
    )
