"""A survey as one HTML file that needs nothing else: features by implementation, accuracy and conventions."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from markupsafe import Markup

from attncheck.reports.html.render import TEMPLATES, environment, without_forbidden
from attncheck.reports.survey.tables import Judged, PropertyCounts, Survey
from attncheck.spec import DTYPES
from attncheck.spec.properties import PROPERTIES


@dataclass(frozen=True)
class FeatureCell:
    """What came of a feature on an implementation: a state for its colour, a short text, and all of it in words."""

    state: str
    text: str
    title: str


_NOTHING = FeatureCell("", "", "no case")


def render_survey(survey: Survey) -> str:
    """Return the page. The same survey gives the same text."""
    newest = survey.newest()
    style = (TEMPLATES / "survey.css").read_text(encoding="utf-8")
    shared = (TEMPLATES / "report.css").read_text(encoding="utf-8")
    text = (
        environment()
        .get_template("survey.html")
        .render(
            style=Markup(shared + style),
            style_hash=b64encode(sha256((shared + style).encode()).digest()).decode("ascii"),
            implementations=newest,
            features=_matrix(survey, newest),
            dtypes=DTYPES,
            accuracy=_accuracy(survey, newest),
            conventions=_conventions(survey),
            asked=list(dict.fromkeys(row.implementation for row in survey.properties)),
            properties=_properties(survey),
            properties_note=survey.properties_note,
            findings=survey.findings,
            versions=survey.of_several_versions(),
        )
    )
    return without_forbidden(text)


def _matrix(survey: Survey, newest: Mapping[str, str]) -> list[tuple[str, list[FeatureCell]]]:
    cells = {
        (row.feature, row.implementation): _cell(row)
        for row in survey.judged
        if newest[row.implementation] == row.version
    }
    return [(feature, [cells.get((feature, name), _NOTHING) for name in newest]) for feature in survey.features()]


def _cell(row: Judged) -> FeatureCell:
    title = _title(dict(zip(row._fields[3:], row[3:], strict=True)))
    if row.wrong:
        return FeatureCell("failing", f"{row.right:,}, {row.wrong:,} wrong", title)
    if row.known:
        return FeatureCell("xfail", f"{row.right:,}, {row.known:,} known", title)
    if row.right:
        return FeatureCell("agree", f"{row.right:,}", title)
    return FeatureCell("unverified" if row.unverified else "unsupported", "-", title)


def _title(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items() if count)


def _accuracy(survey: Survey, newest: Mapping[str, str]) -> list[tuple[str, list[Any]]]:
    found = {
        (row.implementation, row.dtype): row for row in survey.accuracy if newest.get(row.implementation) == row.version
    }
    return [(name, [found.get((name, dtype)) for dtype in DTYPES]) for name in newest]


_STATES = {"bitwise": "agree", "within bounds": "agree", "open": "unverified", "known": "xfail", "broken": "failing"}


def _properties(survey: Survey) -> list[tuple[str, str, list[FeatureCell]]]:
    """Return each property, what it says, and what it comes to on each implementation that was asked."""
    found = {(row.property_name, row.implementation): row for row in survey.properties}
    names = list(dict.fromkeys(row.implementation for row in survey.properties))
    return [
        (name, spec.says, [_property_cell(found.get((name, each))) for each in names])
        for name, spec in PROPERTIES.items()
        if any(row.property_name == name for row in survey.properties)
    ]


def _property_cell(row: PropertyCounts | None) -> FeatureCell:
    if row is None:
        return FeatureCell("unsupported", "-", "it has not what the calls need")
    return FeatureCell(_STATES.get(row.worst, "unverified"), row.worst, _title(row.counts))


def _conventions(survey: Survey) -> list[tuple[str, str, list[tuple[str, bool, list[str]]]]]:
    """Return what is asked, what the cases mean, and each meaning with those that have it."""
    found: dict[str, tuple[str, str, dict[tuple[str, bool], list[str]]]] = {}
    for row in survey.meanings:
        _, _, means = found.setdefault(row.convention, (f"{row.convention}: {row.asks}", row.cases_mean, {}))
        means.setdefault((row.means, row.departs), []).append(row.implementation)
    return [
        (asks, expected, [(meaning, departs, names) for (meaning, departs), names in means.items()])
        for asks, expected, means in found.values()
    ]
