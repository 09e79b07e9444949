"""The README of a published comparison, and its pictures: what the documents are given and compute."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from attncheck.reports.answer import make_summary
from attncheck.reports.documents.drawings import Drawing
from attncheck.reports.documents.pages import document_pages
from attncheck.reports.figures.heatmaps import heatmaps
from attncheck.reports.frames import Frames
from attncheck.reports.markdown.documents import document_sections
from attncheck.reports.markdown.report import (
    document_overview,
    empty_rows_section,
    expected_failures_section,
    wrong_section,
)
from attncheck.reports.markdown.text import escape, table
from attncheck.reports.markdown.verdicts import verdict_section

FOLDER = "pictures"
_ODD = re.compile(r"[^a-z0-9_]+")


def draw_documents(frames: Frames) -> tuple[dict[str, list[str]], dict[str, bytes]]:
    """Return by case the Markdown that shows its pictures, and the pictures by their paths beside that Markdown."""
    shown: dict[str, list[str]] = {}
    pictures: dict[str, bytes] = {}
    for page in document_pages(frames):
        for number, case in enumerate(page.cases, 1):
            start = f"{FOLDER}/{_plain(PurePosixPath(page.file).stem)}-{number}"
            images = list(_images(case.drawings, start, pictures))
            if images:
                shown[case.id] = ["", "\n".join(images)]
    return shown, pictures


def _images(drawings: tuple[Drawing, ...], start: str, pictures: dict[str, bytes]) -> Iterator[str]:
    """Draw, add to the pictures, and yield the Markdown of each image."""
    for number, drawing in enumerate(drawings, 1):
        picture = heatmaps(drawing.panels)
        path = f"{start}-{number:02}-{_plain(drawing.names[0])}.svg"
        while path in pictures:  # two documents whose files have one name, in different folders
            path = path.replace(".svg", "-.svg")
        pictures[path] = picture.data
        yield f"![{escape(picture.alternative)}]({path})"


def _plain(name: str) -> str:
    """Return a name of a file that needs no quotes anywhere."""
    return _ODD.sub("_", name.lower())[:60]


def render_readme(frames: Frames) -> tuple[str, dict[str, bytes]]:
    """Return the Markdown, and the pictures by their paths beside it. The same frames give the same bytes."""
    shown, pictures = draw_documents(frames)
    sections = [
        _opening(frames),
        _versions(frames),
        wrong_section(frames),
        expected_failures_section(frames),
        empty_rows_section(frames),
        document_overview(frames),
        verdict_section(frames),
        *document_sections(frames, shown),
    ]
    return "\n".join(line for section in sections if section for line in [*section, ""]), pictures


def _opening(frames: Frames) -> list[str]:
    answer = make_summary(frames)
    return [
        "# The bundled corpus on the pinned versions",
        "",
        f"**{escape(answer.first_line)}**",
        "",
        *(f"- {escape(sentence)}" for sentence in answer.sentences),
        "",
        "`make publish` writes this folder, this page included; nothing in it is written by hand. CI holds the runs of "
        "the corpus against [verdicts.csv](verdicts.csv), in which nothing depends on the processor, and fails where a "
        "verdict differs. The last digits of the numbers on this page are those of one machine.",
    ]


def _versions(frames: Frames) -> list[str]:
    rows = [[escape(column.implementation), escape(column.version)] for column in frames.columns]
    return ["## Versions", "", *table(["implementation", "version"], rows), "", "Also in [versions.csv](versions.csv)."]
