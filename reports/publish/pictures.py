"""The pictures of a published comparison: what the documents are given and compute, drawn from the exact answers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from attncheck.reports.documents.drawings import Drawing
from attncheck.reports.documents.pages import document_pages
from attncheck.reports.figures.heatmaps import heatmaps
from attncheck.reports.frames import Frames
from attncheck.reports.markdown.text import escape

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
