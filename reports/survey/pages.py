"""A survey as files: tables as CSV, which are read again, a page as Markdown, and the same as one HTML file."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from attncheck.errors import OutputError, ResultsError
from attncheck.reports.html.survey import render_survey
from attncheck.reports.markdown.text import code, escape, number, table
from attncheck.reports.survey.findings import document_of, read_findings
from attncheck.reports.survey.tables import ALL, Accuracy, Judged, Meaning, PropertyCounts, Survey
from attncheck.reports.write import harmless
from attncheck.spec import DTYPES
from attncheck.spec.properties import PROPERTIES

README, PAGE = "README.md", "index.html"
FEATURES, ACCURACY, CONVENTIONS = "features.csv", "accuracy.csv", "conventions.csv"
PROPERTY_COUNTS = "properties.csv"
FINDINGS = "findings.md"
Row = TypeVar("Row", Judged, Accuracy, Meaning, PropertyCounts)


def read_survey(folder: Path) -> Survey:
    """Read the tables of a survey; an empty one where there is none. Raises ``ResultsError`` for damaged ones."""
    return Survey(
        list(_read(folder / FEATURES, Judged)),
        list(_read(folder / ACCURACY, Accuracy)),
        list(_read(folder / CONVENTIONS, Meaning)),
        read_findings(folder / FINDINGS) if (folder / FINDINGS).exists() else [],
        list(_read(folder / PROPERTY_COUNTS, PropertyCounts)),
    )


def write_survey(survey: Survey, folder: Path) -> Path:
    """Write all files of a survey; return the path of its HTML page. Raises ``OutputError``."""
    survey.judged.sort(key=lambda row: (row.implementation, row.version))
    survey.accuracy.sort(key=lambda row: (row.implementation, row.version))
    survey.meanings.sort(key=lambda row: row.implementation)
    survey.properties.sort(key=lambda row: row.implementation)
    texts = {
        FEATURES: _csv(Judged._fields, survey.judged),
        ACCURACY: _csv(Accuracy._fields, survey.accuracy),
        CONVENTIONS: _csv(Meaning._fields, survey.meanings),
        PROPERTY_COUNTS: _csv(PropertyCounts._fields, survey.properties),
        **({FINDINGS: document_of(survey.findings)} if survey.findings else {}),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in {**texts, README: render_markdown(survey), PAGE: render_survey(survey)}.items():
            (folder / name).write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise OutputError.of(folder, error) from None
    return folder / PAGE


def _csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([harmless(str(each)) for each in row] for row in rows)
    return text.getvalue()


def _read(path: Path, kind: type[Row]) -> Iterator[Row]:
    if not path.exists():
        return
    types = get_type_hints(kind)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            header, *rows = list(csv.reader(file))
        if tuple(header) != kind._fields:
            raise ResultsError(f"{path} has the columns {','.join(header)}; expected {','.join(kind._fields)}")
        for row in rows:
            yield kind(*(_value(types[name], text) for name, text in zip(header, row, strict=True)))
    except (OSError, ValueError, csv.Error) as error:
        raise ResultsError(f"{path} cannot be read: {error}") from None


def _value(kind: type, text: str) -> Any:
    return text == "True" if kind is bool else kind(text)


def render_markdown(survey: Survey) -> str:
    """Return the survey as one page of Markdown: a line for each implementation, and what needs more below."""
    newest = survey.newest()
    rows = {row.implementation: row for row in survey.judged if (row.implementation, row.version) in newest.items()}
    judged = [row for row in survey.judged if row.version == newest[row.implementation]]
    of_all = {row.implementation: row for row in judged if row.feature == ALL}
    lines = [
        "# What implementations of attention do",
        "",
        f"{len(rows)} implementations, each in the newest version that was judged, on the bundled cases. "
        "[The same as a page](index.html), with every feature.",
        "",
        "*Right*: every stage that came back is within its error bound in every dtype. *Known*: fails as recorded, "
        "with its reason ([findings](../../../docs/findings.md), "
        "[expected failures](../../../docs/expected_failures.md)). *Unsupported*: it has no word for what the case "
        "asks. *Not run*: left out of modes that compile each case. Some failures are those of some processors "
        "alone, as the lists say; they are counted as they showed on the machine that judged.",
        "",
        *table(
            ("implementation", "version", "right", "known", "wrong", "unsupported", "unverified", "not run"),
            (
                (code(row.implementation), escape(row.version), *map(_count, row[3:]))
                for row in sorted(of_all.values(), key=lambda each: (-each.right, each.implementation))
            ),
            "llrrrrrr",
        ),
        "",
        *_wrong(judged),
        *_accuracy(survey),
        *_meanings(survey),
        *_properties(survey),
        *_findings(survey),
        *_versions(survey),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _count(number_of: int) -> str:
    return f"{number_of:,}" if number_of else "-"


def _wrong(judged: Sequence[Judged]) -> Iterator[str]:
    rows = [row for row in judged if row.wrong and row.feature != ALL]
    if rows:
        yield from ("## Wrong, and not recorded", "")
        cells = ((code(row.implementation), escape(row.feature), f"{row.wrong:,}", _count(row.right)) for row in rows)
        yield from table(("implementation", "feature", "wrong", "right"), cells, "llrr")
        yield ""


def _accuracy(survey: Survey) -> Iterator[str]:
    newest, found = survey.newest(), {}
    for row in survey.accuracy:
        if newest.get(row.implementation) == row.version:
            found[row.implementation, row.dtype] = f"{number(row.median)} ({number(row.most)})"
    yield from ("## Accuracy", "")
    yield (
        "Largest error of a stage, in units of the largest that rounding allows there: of the stage in the middle, "
        "and in parentheses of all but one of a hundred. 1 is the bound of that implementation's own rounding model, "
        "so that numbers of different models are not compared with each other."
    )
    yield ""
    cells = ((code(name), *(found.get((name, dtype), "-") for dtype in DTYPES)) for name in newest)
    yield from table(("implementation", *DTYPES), cells, "lrrrr")
    yield ""


def _meanings(survey: Survey) -> Iterator[str]:
    if not survey.meanings:
        return
    found = {(row.implementation, row.convention): row for row in survey.meanings}
    questions = {row.convention: row for row in survey.meanings}
    names = list(dict.fromkeys(row.implementation for row in survey.meanings))
    yield from ("## Conventions", "")
    yield "Measured, not declared: `attncheck conventions` says how. **Bold** is other than what the cases mean."
    yield ""
    for convention, question in questions.items():
        means: dict[str, list[str]] = {}
        for name in names:
            if (row := found.get((name, convention))) is not None:
                means.setdefault(f"**{escape(row.means)}**" if row.departs else escape(row.means), []).append(
                    code(name)
                )
        yield f"- {escape(convention)}: {escape(question.asks)}"
        yield from (f"  - {meaning}: {', '.join(each)}" for meaning, each in means.items())
    yield ""


def _properties(survey: Survey) -> Iterator[str]:
    if not survey.properties:
        return
    yield from ("## Properties", "")
    yield from (f"{survey.properties_note} `attncheck properties` says how it is asked.", "")
    for name, spec in PROPERTIES.items():
        found: dict[str, list[str]] = {}
        for row in survey.properties:
            if row.property_name == name:
                word = f"**{row.worst}**" if row.broken else row.worst
                found.setdefault(word, []).append(code(row.implementation))
        if found:
            yield f"- {code(name)}: {escape(spec.says)}"
            yield from (f"  - {word}: {', '.join(each)}" for word, each in sorted(found.items()))
    yield ""


def _findings(survey: Survey) -> Iterator[str]:
    if survey.findings:
        yield from (
            "## Findings",
            "",
            "What is wrong in a current release, each with a short script that shows it.",
            "",
        )
        for each in survey.findings:
            title = f"[{escape(each.title)}]({FINDINGS}#{each.anchor})"
            yield f"- {escape(each.library)} {escape(each.release)}: {title}"
        yield ""


def _versions(survey: Survey) -> Iterator[str]:
    rows = survey.of_several_versions()
    if rows:
        yield from ("## Versions", "", "The same cases on several releases, where more than one was judged.", "")
        cells = ((code(row.implementation), escape(row.version), *map(_count, row[3:7])) for row in rows)
        yield from table(("implementation", "version", "right", "known", "wrong", "unsupported"), cells, "llrrrr")
        yield ""
