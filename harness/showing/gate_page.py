"""The report of the gate: a page of its own, the same as Markdown, the findings as a table, and the document."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from attncheck.common.errors import OutputError
from attncheck.gating.behaviours import BEHAVIOURS
from attncheck.gating.kernel_under_test import Finding
from attncheck.reports.document_model import Block, Code, Items, Mark, Page, Section, Table, Text
from attncheck.reports.json_documents import document_to_json

if TYPE_CHECKING:
    from attncheck.gating.run import GateResult
    from attncheck.showing.json_schema import GateDocument

GATE_PAGE, GATE_MARKDOWN, GATE_TABLE, GATE_DOCUMENT = "gate.html", "gate.md", "gate.csv", "gate.json"


def write_gate_report(result: GateResult, document: GateDocument, words: list[str], folder: Path) -> Path:
    """Write the report to a folder, and return its page. Raises ``OutputError``.

    ``words`` are those of the command, with its seed.
    """
    from attncheck.reports.html.page import render_page
    from attncheck.reports.markdown import render_page_markdown
    from attncheck.reports.write import write_csv

    page = _make_page(result, words)
    texts = {
        GATE_PAGE: render_page(page, "survey.css"),
        GATE_MARKDOWN: render_page_markdown(page),
        GATE_DOCUMENT: document_to_json(document),
    }
    for name, text in texts.items():
        with OutputError.convert_os_errors(folder / name):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
    import pandas as pd

    columns = [field.name for field in fields(Finding)]
    write_csv(pd.DataFrame([vars(finding) for finding in result.findings], columns=columns), folder / GATE_TABLE)
    return folder / GATE_PAGE


def _make_page(result: GateResult, words: list[str]) -> Page:
    from attncheck.settings.commands import shell_command

    steps = [(step.name, step.outcome, f"{step.seconds:.1f}") for step in result.steps]
    opening: list[Block] = [
        Text((Mark(result.answer, "strong"),)),
        Text(f"Seed {result.seed}, a budget of {result.budget:g} seconds, {time.strftime('%Y-%m-%d')}."),
        Code([shell_command(words)]),
    ]
    sections = [
        Section("Steps", "steps", [Table("What was done", ("step", "outcome", "seconds"), steps, "llr")]),
        *finding_sections(result),
    ]
    if result.accuracy:
        measured = [measured.answer for measured in result.accuracy]
        sections.append(Section("Accuracy", "accuracy", [Items(measured)]))
    cases: Block = Text(("The standard cases have a ", Mark("report", "link", "report/report.html"), " of their own."))
    sections.append(Section("Standard cases", "cases", [cases]))
    return Page(f"May {result.implementation} be merged?", opening, sections)


def finding_sections(result: GateResult) -> Iterator[Section]:
    """Yield a section for each behaviour that was seen."""
    for name, behaviour in BEHAVIOURS.items():
        findings = [finding for finding in result.findings if finding.behaviour == name]
        if not findings:
            continue
        blocks: list[Block] = [Text(f"{behaviour.sentence} {behaviour.advice}")]
        for finding in findings:
            first, *rest = [line.strip() for line in finding.lines()]
            blocks += [Text(first), *([Items(rest)] if rest else [])]
        yield Section(name, name, blocks)
