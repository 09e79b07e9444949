"""The README of a published comparison, with the pictures that it shows."""

from __future__ import annotations

from attncheck.reports.answer import make_summary
from attncheck.reports.frames import Frames
from attncheck.reports.markdown.documents import document_sections
from attncheck.reports.markdown.expected_failures import empty_rows_section, expected_failures_section
from attncheck.reports.markdown.overview import document_overview
from attncheck.reports.markdown.report import wrong_section
from attncheck.reports.markdown.text import escape, table
from attncheck.reports.markdown.verdicts import verdict_section
from attncheck.reports.publish.pictures import draw_documents


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
