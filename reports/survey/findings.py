"""The findings of a survey: what is wrong in a release, each with its script, read from their document."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from attncheck.errors import ResultsError

_HEADING = re.compile(r"^## (?P<library>\S+) (?P<release>\S+): (?P<title>.+)$", re.MULTILINE)
_SCRIPT = re.compile(r"^```python\n(?P<script>.*?)^```\n?", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")
_CODE = re.compile(r"`([^`]+)`")


class Finding(NamedTuple):
    """Something wrong in a release of a library: a title, the text about it, and a script that shows it."""

    library: str
    release: str
    title: str
    text: str
    script: str

    @property
    def anchor(self) -> str:
        """The place in the document, as Markdown readers name it."""
        heading = f"{self.library} {self.release}: {self.title}".lower()
        return re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")

    @property
    def paragraphs(self) -> list[list[tuple[str, bool]]]:
        """The text as paragraphs, each of pieces that are code or not."""
        found = []
        for paragraph in self.text.split("\n\n"):
            pieces = _CODE.split(" ".join(paragraph.split()))
            found.append([(piece, bool(place % 2)) for place, piece in enumerate(pieces) if piece])
        return found


def read_findings(path: Path) -> list[Finding]:
    """Read a document with a heading ``## library release: title`` and a script for each finding.

    Raises ``ResultsError`` where it cannot be read, or a finding has no script.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ResultsError(f"{path} cannot be read: {error}") from None
    headings = list(_HEADING.finditer(text))
    if not headings:
        raise ResultsError(f"{path}: expected a heading such as `## torch 2.13: what is wrong` for each finding")
    ends = [*(each.start() for each in headings[1:]), len(text)]
    return [_finding(path, each, text[each.end() : end]) for each, end in zip(headings, ends, strict=True)]


def document_of(findings: Sequence[Finding]) -> str:
    """Write findings as the document that ``read_findings`` reads."""
    lines = ["# Findings", ""]
    for each in findings:
        lines += [f"## {each.library} {each.release}: {each.title}", ""]
        lines += [each.text, ""] if each.text else []
        lines += ["```python", each.script.rstrip("\n"), "```", ""]
    return "\n".join(lines)


def _finding(path: Path, heading: re.Match[str], body: str) -> Finding:
    script = _SCRIPT.search(body)
    if script is None:
        raise ResultsError(f"{path}: {heading['title']!r} has no script; expected a block that begins with ```python")
    around = body[: script.start()].strip() + "\n\n" + body[script.end() :].strip()
    said = _LINK.sub(r"\1", around.strip())
    return Finding(heading["library"], heading["release"], heading["title"], said, script["script"])
