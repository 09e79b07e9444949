"""A survey as one HTML file that needs nothing else: a line for each implementation, from left to right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from attncheck.backends import EVERYTHING
from attncheck.reports.html.render import TEMPLATES, environment, without_forbidden
from attncheck.reports.survey.tables import ALL, Accuracy, Judged, PropertyCounts, Survey
from attncheck.spec import DTYPES, OPTIONS
from attncheck.spec.properties import PROPERTIES


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
    of_all: Judged
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
            accuracy=_accuracy(survey, newest),
            conventions=_conventions(survey),
            asked=[(name, PROPERTIES[name].says) for name in _asked(survey)],
            properties=_properties(survey),
            outcomes=[(word, *_OUTCOMES[word]) for word in _OUTCOMES],
            properties_note=survey.properties_note,
            findings=survey.findings,
            versions=survey.of_several_versions(),
        )
    )
    return without_forbidden(text)


def _lines(survey: Survey, newest: Mapping[str, str], features: Sequence[str]) -> list[ImplementationLine]:
    """Return a line for each implementation."""
    found = {
        (row.feature, row.implementation): row for row in survey.judged if newest[row.implementation] == row.version
    }
    nothing = (0,) * (len(Judged._fields) - 3)
    lines = []
    for name, version in newest.items():
        of_all = found.get((ALL, name), Judged(name, version, ALL, *nothing))
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


def _cell(row: Judged | None) -> FeatureCell:
    if row is None:
        return _NOTHING
    states = (state for state, count in (("failing", row.wrong), ("xfail", row.known), ("agree", row.right)) if count)
    state = next(states, "unverified" if row.unverified else "unsupported")
    return FeatureCell(state, _SIGNS[state], _title(dict(zip(row._fields[3:], row[3:], strict=True))))


def _title(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items() if count)


def _accuracy(survey: Survey, newest: Mapping[str, str]) -> list[tuple[str, list[tuple[Accuracy, str, str] | None]]]:
    """Return each implementation's numbers by dtype, each with the lengths of its two bars in percent."""
    found = {
        (row.implementation, row.dtype): (row, _percent(row.median), _percent(row.most))
        for row in survey.accuracy
        if newest.get(row.implementation) == row.version
    }
    return [(name, [found.get((name, dtype)) for dtype in DTYPES]) for name in newest]


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


def _properties(survey: Survey) -> list[tuple[str, list[FeatureCell]]]:
    """Return each implementation that was asked, and what each property comes to on it."""
    found = {(row.property_name, row.implementation): row for row in survey.properties}
    names = dict.fromkeys(row.implementation for row in survey.properties)
    return [(name, [_property_cell(found.get((each, name))) for each in _asked(survey)]) for name in names]


def _property_cell(row: PropertyCounts | None) -> FeatureCell:
    if row is None:
        return FeatureCell("unsupported", _SIGNS["unsupported"], "it has not what the calls need")
    state, sign = _OUTCOMES.get(row.worst, _OUTCOMES["open"])
    return FeatureCell(state, sign, _title(row.counts))


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
