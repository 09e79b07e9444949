"""A survey as files: tables as CSV, which are read again, and one page of sections as Markdown and as HTML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from attncheck.backends import ALL_ENTRIES
from attncheck.common.errors import ResultsError
from attncheck.reports.cells import State
from attncheck.reports.document_model import (
    Block,
    Code,
    Details,
    Figure,
    Inline,
    Items,
    Mark,
    Nested,
    Page,
    PageOnly,
    Section,
    Table,
    Text,
)
from attncheck.reports.frames import group_by_key
from attncheck.reports.html.contents import SYMBOLS, render_macro
from attncheck.reports.html.page import render_page
from attncheck.reports.markdown import render_page_markdown, short_number_or_empty
from attncheck.reports.properties import OUTCOMES_NOTE
from attncheck.reports.survey import (
    ALL_CASES_FEATURE,
    Accuracy,
    JudgedFeature,
    PropertyCounts,
    Survey,
    SurveyedConvention,
    findings_document,
    ordered_features,
    read_findings,
    version_sort_key,
)
from attncheck.reports.write import RESTORE_ADVICE, read_csv_text, rows_to_csv, write_texts
from attncheck.spec import DTYPES, OPTIONS, PROPERTIES

README, PAGE = "README.md", "index.html"
FEATURES, FINDINGS = "features.csv", "findings.md"
_TABLES: Mapping[str, tuple[str, Any]] = {
    FEATURES: ("judged", JudgedFeature),
    "accuracy.csv": ("accuracy", Accuracy),
    "conventions.csv": ("meanings", SurveyedConvention),
    "properties.csv": ("properties", PropertyCounts),
}
"""By file: the attribute of a survey with its rows, and their class."""


def read_survey(folder: Path, *, must_exist: bool = False) -> Survey:
    """Read the tables of a survey. A folder without any table is an empty survey, unless it ``must_exist``.

    Raises ``ResultsError`` if a table is missing or damaged.
    """
    missing = [file for file in _TABLES if not (folder / file).exists()]
    if missing and (must_exist or len(missing) < len(_TABLES)):
        raise ResultsError(
            f"{folder / missing[0]} does not exist; expected the tables {', '.join(_TABLES)}; restore them from "
            "version control, or remove the folder and make the survey again"
        )
    tables: dict[str, Any] = {name: list(_read_rows(folder / file, kind)) for file, (name, kind) in _TABLES.items()}
    return Survey(**tables, findings=read_findings(folder / FINDINGS) if (folder / FINDINGS).exists() else [])


def write_survey(survey: Survey, folder: Path) -> Path:
    """Write all files of a survey; return the path of its HTML page. Raises ``OutputError``."""
    texts = {FINDINGS: findings_document(survey.findings)} if survey.findings else {}
    for file, (name, kind) in _TABLES.items():
        rows = getattr(survey, name)
        rows.sort(key=lambda row: (row.implementation, getattr(row, "version", "")))
        texts[file] = rows_to_csv(kind._fields, rows)
    write_texts({**texts, README: render_page_markdown(make_survey_page(survey)), PAGE: render_survey(survey)}, folder)
    return folder / PAGE


def _read_rows(path: Path, kind: Any) -> Iterator[Any]:
    types = get_type_hints(kind)
    try:
        for row in read_csv_text(path, kind._fields) if path.exists() else ():
            cells = ((types[name], text) for name, text in zip(kind._fields, row, strict=True))
            yield kind(*(text == "True" if type_ is bool else type_(text) for type_, text in cells))
    except ValueError as error:
        raise ResultsError(f"{path} cannot be read: {error}; {RESTORE_ADVICE}") from None


def make_survey_page(survey: Survey) -> Page:
    """Return the survey as sections, which Markdown and HTML render in the same way except for pictures."""
    opening = (
        f"{len(survey.newest_versions())} implementations on attncheck's cases, "
        "each in the newest version that was judged and compared "
        "with the exact answer within an error bound that is derived from its roundings."
    )
    as_page = Text((Mark("The same as a page", "link", PAGE), ", with every feature."))
    makers = (
        _implementations_section,
        _features_section,
        _accuracy_section,
        _conventions_section,
        _properties_section,
        _findings_section,
        _versions_section,
    )
    sections = [section for make in makers if (section := make(survey))]
    return Page("What implementations of attention do", [Text(opening), PageOnly([], [as_page])], sections)


def render_survey(survey: Survey) -> str:
    """Return the HTML page. The same survey gives the same text."""
    return render_page(make_survey_page(survey), "survey.css")


_COUNTED = ("right", "known", "wrong", "unsupported", "unverified", "not run")
_COUNTS_EXPLAINED: Inline = (
    *("How many cases come to what, the worst of all dtypes counting. ", Mark("Known", "strong"), ": it fails as "),
    *("recorded, with its reason. ", Mark("Unsupported", "strong"), ": it does not accept what the case asks for. "),
    *(Mark("Not run", "strong"), ": left out of modes that compile each case. Failures of some processors alone are "),
    "counted as they showed on the machine that judged.",
)


def _implementations_section(survey: Survey) -> Section:
    totals = {
        row.implementation: row for row in survey.select_newest(survey.judged) if row.feature == ALL_CASES_FEATURE
    }
    rows: list[Sequence[Inline]] = []
    for name, version in survey.newest_versions().items():
        counts = totals.get(name, JudgedFeature(name, version, ALL_CASES_FEATURE, *(0,) * len(_COUNTED)))
        total = sum(counts[3:]) or 1
        shares = [(state, 100 * getattr(counts, field) / total) for state, field in _BAR_STATES]
        bar = Figure("", render_macro("bar", "stack", [(state, f"{share:.2f}") for state, share in shares if share]))
        rows.append(
            (_implementation_name(name, version), _implementation_description(name), bar, *map(_count_text, counts[3:]))
        )
    headings = ["implementation", "what it is", "", *_COUNTED]
    table = Table("Cases by what they come to", headings, rows, "lllrrrrrr")
    return Section("Implementations", "implementations", [Text(_COUNTS_EXPLAINED), table])


def _implementation_name(name: str, version: str) -> Inline:
    return (Mark(name), " ", Mark(version, "small"))


def _count_text(number_of: int) -> str:
    return f"{number_of:,}" if number_of else "-"


_BAR_STATES = (("agree", "right"), ("xfail", "known"), ("failing", "wrong"), ("unverified", "unverified"))


def _implementation_description(name: str) -> str:
    """Return the description of an implementation; empty if this version of attncheck does not have it."""
    framework, _, mode = name.partition(".")
    try:
        return ALL_ENTRIES[framework].get_mode(mode).description
    except KeyError:
        return ""


_FEATURE_KEY = (
    *(("agree", "✓", "every case is right"), ("xfail", "≈", "some fail as recorded")),
    *(("failing", "✗", "some are wrong"), ("unsupported", "\N{EN DASH}", "unsupported")),
)


def _features_section(survey: Survey) -> Section:
    """Return a sign for each feature of each implementation; only unrecorded failures are in words."""
    row_by_key = {(row.feature, row.implementation): row for row in survey.select_newest(survey.judged)}
    seen = {row.feature for row in survey.judged} - {ALL_CASES_FEATURE}
    features = [feature for feature in ordered_features() if feature in seen]
    lines = [
        (name, [_feature_cell(row_by_key.get((item, name))) for item in features]) for name in survey.newest_versions()
    ]
    options = [(feature.rpartition(": ")[2], feature) for feature in features]
    explained = [(name, option.description) for name, _ in options if (option := OPTIONS.get(name))]
    caption = "Features by implementation"
    matrix = Figure(caption, render_macro("signs", caption, _FEATURE_KEY, options, lines))
    wrong = [
        (Mark(row.implementation), row.feature, _count_text(row.wrong), _count_text(row.right))
        for row in row_by_key.values()
        if row.wrong and row.feature != ALL_CASES_FEATURE
    ]
    headings = ("implementation", "feature", "wrong", "right")
    table = Table("Wrong, and not recorded", headings, wrong, "llrr")
    nothing = [Text("Nothing is wrong that is not recorded.")]
    listed: list[Block] = [Text("Wrong, and not recorded:"), table] if wrong else [*nothing]
    text = Text(("Counts of every feature are in ", Mark(FEATURES), "."))
    return Section(
        "Features", "features", [text, PageOnly([matrix], listed), *_explanation_details("the options are", explained)]
    )


def _explanation_details(what: str, entries: Sequence[tuple[str, str]]) -> list[Details]:
    """Return a folded list of names with their explanations."""
    items: list[Inline] = [(Mark(name), f": {text}") for name, text in entries]
    return [Details(f"What {what}", [Items(items)])] if items else []


Cell = tuple[str, str, str]
"""A state for its colour, a sign, and all counts in words."""


def _feature_cell(row: JudgedFeature | None) -> Cell:
    if row is None:
        return "", "", "no case"
    states = (state for state, count in (("failing", row.wrong), ("xfail", row.known), ("agree", row.right)) if count)
    state = next(states, "unverified" if row.unverified else "unsupported")
    return state, SYMBOLS[State(state)], _counts_title(dict(zip(row._fields[3:], row[3:], strict=True)))


def _counts_title(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items() if count)


_ACCURACY_EXPLAINED = (
    "Largest error of a stage, in units of the largest that rounding allows there: of the stage in the middle, and in "
    "parentheses of all but one of a hundred. 1 is the bound of that implementation's own rounding model, so that "
    "numbers of different models are not compared with each other."
)


def _accuracy_section(survey: Survey) -> Section:
    ranges = {(row.implementation, row.dtype): _accuracy_cell(row) for row in survey.select_newest(survey.accuracy)}
    rows = [(Mark(name), *(ranges.get((name, dtype), "-") for dtype in DTYPES)) for name in survey.newest_versions()]
    table = Table("Errors by dtype", ("implementation", *DTYPES), rows, "lrrrr")
    return Section("Accuracy", "accuracy", [Text(_ACCURACY_EXPLAINED), table])


def _accuracy_cell(row: Accuracy) -> Inline:
    """Write both errors after two bars: the light bar is the 99th percentile."""
    widths = (100 * min(max(part, 0.0), 1.0) for part in (row.most, row.median))
    bars = Figure("", render_macro("bar", "range", [("", f"{width:.1f}") for width in widths]))
    return (bars, f"{short_number_or_empty(row.median)} ({short_number_or_empty(row.most)})")


def _conventions_section(survey: Survey) -> Section | None:
    if not survey.meanings:
        return None
    text: Inline = (
        *("Measured by calls whose exact answer is another one for each meaning, and not declared. ",),
        *(Mark("Bold", "strong"), " is other than what attncheck's cases mean."),
    )
    asked: dict[str, dict[tuple[str, bool], list[str]]] = {}
    conventions = {row.convention: row for row in survey.meanings}
    for row in survey.meanings:
        asked.setdefault(row.convention, {}).setdefault((row.means, row.departs), []).append(row.implementation)
    items = []
    for name, means in asked.items():
        meant = conventions[name].cases_mean
        title = (f"{name}: {conventions[name].asks}", Mark(f" (the cases mean: {meant})", "small") if meant else "")
        lines = [_meaning_line(meaning, names, is_marked=departs) for (meaning, departs), names in means.items()]
        items.append(Nested(title, lines))
    return Section("Conventions", "conventions", [Text(text), Items(items, "meanings")])


def _meaning_line(what: str, names: Sequence[str], *, is_marked: bool) -> Inline:
    """Return a common meaning or outcome of several implementations, bold if marked, and their names."""
    listed: list[Inline] = [part for name in names for part in (", ", Mark(name))]
    return (Mark(what, "strong") if is_marked else what, ": ", *listed[1:])


_OUTCOME_SIGNS = {
    "bitwise": ("agree", "="),
    "within bounds": ("agree", "✓"),
    "open": ("unverified", "?"),
    "known": ("xfail", "≈"),
    "broken": ("failing", "✗"),
}
"""A property's outcome as a colour and a sign."""


def _properties_section(survey: Survey) -> Section | None:
    """Return the outcome of each property on each implementation: as a matrix, and in words by property."""
    if not survey.properties:
        return None
    row_by_key = {(row.property_name, row.implementation): row for row in survey.properties}
    asked = [(name, spec.description) for name, spec in PROPERTIES.items() if any(name == key[0] for key in row_by_key)]
    names = dict.fromkeys(row.implementation for row in survey.properties)
    lines = [(name, [_property_cell(row_by_key.get((item, name))) for item, _ in asked]) for name in names]
    key = [(*_OUTCOME_SIGNS[word], word) for word in _OUTCOME_SIGNS]
    caption = "Properties by implementation"
    matrix = Figure(caption, render_macro("signs", caption, key, asked, lines))
    items = [Nested((Mark(name), f": {says}"), _outcome_lines(survey.properties, name)) for name, says in asked]
    shown = PageOnly([matrix, *_explanation_details("the properties say", asked)], [Items(items)])
    dtypes = [dtype for dtype in DTYPES if any(dtype in row.dtypes.split() for row in survey.properties)]
    note = (
        f"What holds between two calls, in {', '.join(dtypes)}: the worst of all ways in which it was asked. "
        f"{OUTCOMES_NOTE} Known: broken as recorded. Open: a call failed, or there is no exact answer."
    )
    return Section("Properties", "properties", [Text(note), shown])


def _property_cell(row: PropertyCounts | None) -> Cell:
    if row is None:
        return "unsupported", SYMBOLS[State.UNSUPPORTED], "it has not what the calls need"
    return (*_OUTCOME_SIGNS.get(row.worst, _OUTCOME_SIGNS["open"]), _counts_title(row.counts))


def _outcome_lines(rows: Sequence[PropertyCounts], name: str) -> list[Inline]:
    """Return a line for each outcome of a property, with the implementations that have it."""
    rows_by_outcome = group_by_key((row for row in rows if row.property_name == name), lambda row: row.worst)
    names = {word: [row.implementation for row in rows_of_outcome] for word, rows_of_outcome in rows_by_outcome.items()}
    return [_meaning_line(word, names[word], is_marked=word == "broken") for word in sorted(names)]


def _findings_section(survey: Survey) -> Section | None:
    if not survey.findings:
        return None
    text = "What is wrong in a release, each with a script that needs the library and NumPy alone."
    titles = [f"{finding.library} {finding.release}" for finding in survey.findings]
    scripts = [
        Details(
            f"{title}: {finding.title}",
            [*map(Text, finding.paragraphs), Code([finding.script])],
        )
        for title, finding in zip(titles, survey.findings, strict=True)
    ]
    links: list[Inline] = [
        (f"{title}: ", Mark(finding.title, "link", f"{FINDINGS}#{finding.anchor}"))
        for title, finding in zip(titles, survey.findings, strict=True)
    ]
    return Section("Findings", "findings", [Text(text), PageOnly(scripts, [Items(links)])])


def _versions_section(survey: Survey) -> Section | None:
    judged = [row for row in survey.judged if row.feature == ALL_CASES_FEATURE]
    counts = Counter(row.implementation for row in judged)
    several = [row for row in judged if counts[row.implementation] > 1]
    several.sort(key=lambda row: (row.implementation, version_sort_key(row.version)))
    rows = [(_implementation_name(row.implementation, row.version), *map(_count_text, row[3:])) for row in several]
    table = Table("Cases by release", ("implementation", *_COUNTED), rows, "lrrrrrr")
    text = Text("The same cases on several releases, where more than one was judged.")
    return Section("Versions", "versions", [text, table]) if rows else None
