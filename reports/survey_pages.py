"""A survey as files: tables as CSV, which are read again, a page as Markdown, and one HTML file."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from markupsafe import Markup

from attncheck.backends import EVERYTHING
from attncheck.errors import OutputError, ResultsError
from attncheck.reports.html.page import TEMPLATES, environment, without_forbidden
from attncheck.reports.markdown import code, escape, number, table
from attncheck.reports.survey import (
    ALL,
    Accuracy,
    JudgedFeature,
    MeasuredConvention,
    PropertyCounts,
    Survey,
    document_of,
    read_findings,
)
from attncheck.reports.write import csv_text
from attncheck.spec import DTYPES, OPTIONS
from attncheck.spec.properties import PROPERTIES

README, PAGE = "README.md", "index.html"
FEATURES, ACCURACY, CONVENTIONS = "features.csv", "accuracy.csv", "conventions.csv"
PROPERTY_COUNTS = "properties.csv"
FINDINGS = "findings.md"
Row = TypeVar("Row", JudgedFeature, Accuracy, MeasuredConvention, PropertyCounts)


def read_survey(folder: Path) -> Survey:
    """Read the tables of a survey; an empty one where there is none. Raises ``ResultsError`` for damaged ones."""
    return Survey(
        list(_read(folder / FEATURES, JudgedFeature)),
        list(_read(folder / ACCURACY, Accuracy)),
        list(_read(folder / CONVENTIONS, MeasuredConvention)),
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
        FEATURES: csv_text(JudgedFeature._fields, survey.judged),
        ACCURACY: csv_text(Accuracy._fields, survey.accuracy),
        CONVENTIONS: csv_text(MeasuredConvention._fields, survey.meanings),
        PROPERTY_COUNTS: csv_text(PropertyCounts._fields, survey.properties),
        **({FINDINGS: document_of(survey.findings)} if survey.findings else {}),
    }
    with OutputError.where(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in {**texts, README: render_markdown(survey), PAGE: render_survey(survey)}.items():
            (folder / name).write_text(text, encoding="utf-8", newline="\n")
    return folder / PAGE


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
    judged = list(survey.newest_counts().values())
    of_all = [row for row in judged if row.feature == ALL]
    lines = [
        "# What implementations of attention do",
        "",
        f"{len(survey.newest())} implementations, each in the newest version that was judged, on the bundled cases. "
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
                for row in sorted(of_all, key=lambda each: (-each.right, each.implementation))
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


def _wrong(judged: Sequence[JudgedFeature]) -> Iterator[str]:
    rows = [row for row in judged if row.wrong and row.feature != ALL]
    if rows:
        yield from ("## Wrong, and not recorded", "")
        cells = ((code(row.implementation), escape(row.feature), f"{row.wrong:,}", _count(row.right)) for row in rows)
        yield from table(("implementation", "feature", "wrong", "right"), cells, "llrr")
        yield ""


def _accuracy(survey: Survey) -> Iterator[str]:
    found = {key: f"{number(row.median)} ({number(row.most)})" for key, row in survey.newest_accuracy().items()}
    yield from ("## Accuracy", "")
    yield (
        "Largest error of a stage, in units of the largest that rounding allows there: of the stage in the middle, "
        "and in parentheses of all but one of a hundred. 1 is the bound of that implementation's own rounding model, "
        "so that numbers of different models are not compared with each other."
    )
    yield ""
    cells = ((code(name), *(found.get((name, dtype), "-") for dtype in DTYPES)) for name in survey.newest())
    yield from table(("implementation", *DTYPES), cells, "lrrrr")
    yield ""


def _meanings(survey: Survey) -> Iterator[str]:
    if not survey.meanings:
        return
    yield from ("## Conventions", "")
    yield "Measured, not declared: `attncheck conventions` says how. **Bold** is other than what the cases mean."
    yield ""
    for asks, _, means in survey.conventions():
        yield f"- {escape(asks)}"
        for meaning, departs, names in means:
            shown = f"**{escape(meaning)}**" if departs else escape(meaning)
            yield f"  - {shown}: {', '.join(map(code, names))}"
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


@dataclass(frozen=True)
class FeatureCell:
    """What came of a feature on an implementation: a state for its colour, a short text, and all of it in words."""

    state: str
    text: str
    title: str


_NOTHING = FeatureCell("", "", "no case")
_SIGNS = {"failing": "✗", "xfail": "≈", "agree": "✓", "unverified": "?", "unsupported": "\N{EN DASH}"}
_BARS = (("agree", "right"), ("xfail", "known"), ("failing", "wrong"), ("unverified", "unverified"))


@dataclass(frozen=True)
class ImplementationLine:
    """One implementation: what it is, all cases as counts and as parts of a bar in percent, and its features."""

    name: str
    version: str
    description: str
    of_all: JudgedFeature
    bar: tuple[tuple[str, str], ...]
    features: tuple[FeatureCell, ...]


def render_survey(survey: Survey) -> str:
    """Return the page. The same survey gives the same text."""
    newest = survey.newest()
    features = [feature for feature in survey.features() if feature != ALL]
    style = (TEMPLATES / "survey.css").read_text(encoding="utf-8")
    shared = (TEMPLATES / "report.css").read_text(encoding="utf-8")
    text = (
        environment()
        .get_template("survey.html")
        .render(
            style=Markup(shared + style),
            lines=_lines(survey, newest, features),
            features=[(feature.rpartition(": ")[2], feature) for feature in features],
            explained=[(name, text) for name in features if (text := _explained(name))],
            dtypes=DTYPES,
            accuracy=_survey_accuracy(survey),
            conventions=survey.conventions(),
            asked=[(name, PROPERTIES[name].says) for name in _asked(survey)],
            properties=_survey_properties(survey),
            outcomes=[(word, *_OUTCOMES[word]) for word in _OUTCOMES],
            properties_note=survey.properties_note,
            findings=survey.findings,
            versions=survey.of_several_versions(),
        )
    )
    return without_forbidden(text)


def _lines(survey: Survey, newest: Mapping[str, str], features: Sequence[str]) -> list[ImplementationLine]:
    """Return a line for each implementation."""
    found = survey.newest_counts()
    nothing = (0,) * (len(JudgedFeature._fields) - 3)
    lines = []
    for name, version in newest.items():
        of_all = found.get((ALL, name), JudgedFeature(name, version, ALL, *nothing))
        total = sum(of_all[3:]) or 1
        parts = ((state, getattr(of_all, field)) for state, field in _BARS)
        bar = tuple((state, f"{100 * count / total:.2f}") for state, count in parts if count)
        cells = tuple(_cell(found.get((feature, name))) for feature in features)
        lines.append(ImplementationLine(name, version, _description(name), of_all, bar, cells))
    return lines


def _description(name: str) -> str:
    """Say what an implementation is; nothing of one that this version of attncheck does not have."""
    framework, _, mode = name.partition(".")
    try:
        return EVERYTHING[framework].mode_named(mode).description
    except KeyError:
        return ""


def _explained(feature: str) -> str:
    """Say what an option of attention is; the other features are operations and inputs."""
    option = OPTIONS.get(feature.rpartition(": ")[2])
    return option.description if option else ""


def _cell(row: JudgedFeature | None) -> FeatureCell:
    if row is None:
        return _NOTHING
    states = (state for state, count in (("failing", row.wrong), ("xfail", row.known), ("agree", row.right)) if count)
    state = next(states, "unverified" if row.unverified else "unsupported")
    return FeatureCell(state, _SIGNS[state], _title(dict(zip(row._fields[3:], row[3:], strict=True))))


def _title(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items() if count)


def _survey_accuracy(survey: Survey) -> list[tuple[str, list[tuple[Accuracy, str, str] | None]]]:
    """Return each implementation's numbers by dtype, each with the lengths of its two bars in percent."""
    found = {key: (row, _percent(row.median), _percent(row.most)) for key, row in survey.newest_accuracy().items()}
    return [(name, [found.get((name, dtype)) for dtype in DTYPES]) for name in survey.newest()]


def _percent(part: float) -> str:
    return f"{100 * min(max(part, 0.0), 1.0):.1f}"


_OUTCOMES = {
    "bitwise": ("agree", "="),
    "within bounds": ("agree", "✓"),
    "open": ("unverified", "?"),
    "known": ("xfail", "≈"),
    "broken": ("failing", "✗"),
}
"""A property's outcome as a colour and a sign."""


def _asked(survey: Survey) -> list[str]:
    """Return the properties that were asked of any implementation, in order."""
    asked = {row.property_name for row in survey.properties}
    return [name for name in PROPERTIES if name in asked]


def _survey_properties(survey: Survey) -> list[tuple[str, list[FeatureCell]]]:
    """Return each implementation that was asked, and what each property comes to on it."""
    found = {(row.property_name, row.implementation): row for row in survey.properties}
    names = dict.fromkeys(row.implementation for row in survey.properties)
    return [(name, [_property_cell(found.get((each, name))) for each in _asked(survey)]) for name in names]


def _property_cell(row: PropertyCounts | None) -> FeatureCell:
    if row is None:
        return FeatureCell("unsupported", _SIGNS["unsupported"], "it has not what the calls need")
    state, sign = _OUTCOMES.get(row.worst, _OUTCOMES["open"])
    return FeatureCell(state, sign, _title(row.counts))
