"""Surveys: the verdicts and conventions of implementations, a row for every version that was judged.

Each run is reduced to rows, so one table has runs in different environments and at different times. A row replaces an
earlier one of the same implementation in the same version. A survey also has measured conventions, and findings: the
errors in a release, each with a script that shows it.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pandas as pd

from attncheck.common.errors import ResultsError
from attncheck.reports.cells import FAILS_A_RUN, Cell, State, cell_table
from attncheck.reports.comparison import OTHER, WORSE
from attncheck.reports.document_model import Inline, Mark
from attncheck.reports.failure_patterns import set_options_and_inputs
from attncheck.reports.frames import Frames, group_by_key
from attncheck.results.format import Row
from attncheck.spec import DTYPES, OPERATIONS, OPTIONS, PROPERTIES
from attncheck.spec.verdicts import ALL_CASES, PropertyOutcome, Verdict

ALL_CASES_FEATURE = "all cases"
"""The feature that every case has."""
_OPERATION_WITH_OPTIONS = "attention"
"""The operation whose options and inputs are features, too."""


class JudgedFeature(NamedTuple):
    """The counts of cases with a feature by outcome, the worst of all dtypes; ``not_run`` were left out."""

    implementation: str
    version: str
    feature: str
    right: int
    known: int
    wrong: int
    unsupported: int
    unverified: int
    not_run: int


_COUNT_FIELDS = JudgedFeature._fields[3:-1]


class Accuracy(NamedTuple):
    """The errors of right stages as parts of their bounds: the median, and the 99th percentile."""

    implementation: str
    version: str
    dtype: str
    stages: int
    median: float
    most: float


class SurveyedConvention(NamedTuple):
    """A measured convention of an implementation, and the convention of the cases."""

    implementation: str
    convention: str
    asks: str
    means: str
    cases_mean: str
    departs: bool


class PropertyCounts(NamedTuple):
    """The counts of tests of a property by outcome; it does not hold in ``broken`` and ``known`` ones.

    ``dtypes`` are the tested ones, with blanks between them. ``open`` counts the tests in which a call failed or
    nothing could be judged.
    """

    implementation: str
    property_name: str
    dtypes: str
    bitwise: int
    within_bounds: int
    open: int
    known: int
    broken: int

    @property
    def worst(self) -> str:
        """The word of the worst outcome."""
        return next((word.replace("_", " ") for word, count in reversed(self.counts.items()) if count), "-")

    @property
    def counts(self) -> dict[str, int]:
        """The number of tests by outcome, from harmless to severe."""
        return {name: getattr(self, name) for name in self._fields[3:]}


OfVersion = TypeVar("OfVersion", JudgedFeature, Accuracy)


@dataclass
class Survey:
    """All rows, in the order in which they are written."""

    judged: list[JudgedFeature] = field(default_factory=list)
    accuracy: list[Accuracy] = field(default_factory=list)
    meanings: list[SurveyedConvention] = field(default_factory=list)
    findings: list[PublishedFinding] = field(default_factory=list)
    properties: list[PropertyCounts] = field(default_factory=list)

    def update(self, newer: Survey) -> None:
        """Replace rows by those of a newer survey for the same implementation in the same version.

        Conventions and properties are replaced for the same implementation in any version. If the newer survey has
        findings, they replace all.
        """
        replaced = {row[:2] for row in newer.judged}
        self.judged = [row for row in self.judged if row[:2] not in replaced] + newer.judged
        self.accuracy = [row for row in self.accuracy if row[:2] not in replaced] + newer.accuracy
        for name in ("meanings", "properties"):
            asked = {row.implementation for row in getattr(newer, name)}
            kept = [row for row in getattr(self, name) if row.implementation not in asked]
            setattr(self, name, kept + getattr(newer, name))
        self.findings = newer.findings or self.findings

    def newest_versions(self) -> dict[str, str]:
        """Return the newest version of each implementation, by name."""
        versions: dict[str, str] = {}
        for row in self.judged:
            name, version = row.implementation, row.version
            if name not in versions or version_sort_key(version) > version_sort_key(versions[name]):
                versions[name] = version
        return dict(sorted(versions.items()))

    def select_newest(self, rows: Iterable[OfVersion]) -> list[OfVersion]:
        """Return the rows of the newest version of each implementation."""
        newest = self.newest_versions()
        return [row for row in rows if newest.get(row.implementation) == row.version]


def version_sort_key(version: str) -> list[tuple[int, str]]:
    """Sort key: numbers by their size.

    Example:
        >>> sorted(["2.10.0", "2.9.1", "2.9.1+cpu"], key=version_sort_key)
        ['2.9.1', '2.9.1+cpu', '2.10.0']
    """
    return [(int(part), "") if part.isdigit() else (-1, part) for part in version.replace("+", ".").split(".")]


def ordered_features() -> list[str]:
    """Return every feature that a case may have: operations, and options and inputs of attention."""
    attention = OPERATIONS[_OPERATION_WITH_OPTIONS]
    names = [name for name, spec in attention.inputs.items() if not spec.required] + [*OPTIONS]
    return [ALL_CASES_FEATURE, *OPERATIONS, *(f"{_OPERATION_WITH_OPTIONS}: {name}" for name in names)]


def case_features(case: Mapping[str, Any]) -> list[str]:
    """Return the features of a case record."""
    operation = case["operation"]
    names = set_options_and_inputs(case) if operation == _OPERATION_WITH_OPTIONS else []
    return [ALL_CASES_FEATURE, operation, *(f"{operation}: {name}" for name in names)]


def make_survey(frames: Frames) -> Survey:
    """Reduce a run to its rows."""
    states = [
        (column.implementation, feature, _feature_state(cells.values()))
        for case, row in cell_table(frames).items()
        for feature in case_features(frames.cases[case])
        for column, cells in row.items()
    ]
    counts, left_out, judged = Counter(states), _count_left_out(frames), []
    for column, feature in product(frames.columns, ordered_features()):
        of_feature = {name: counts[column.implementation, feature, name] for name in _COUNT_FIELDS}
        if sum(of_feature.values()):
            not_run = left_out.get((column.implementation, feature), 0)
            of_feature["unsupported"] -= not_run
            judged.append(JudgedFeature(column.implementation, column.release, feature, **of_feature, not_run=not_run))
    asked = chain.from_iterable(frames.properties.values())
    return Survey(judged, list(_accuracy_rows(frames)), properties=count_properties(asked))


def count_properties(rows: Iterable[Row]) -> list[PropertyCounts]:
    """Count the tests of properties, by implementation and property."""
    asked = (row for row in rows if row.verdict != PropertyOutcome.UNSUPPORTED)
    rows_by_property = group_by_key(asked, lambda row: (row.implementation, row.property_name))
    order = list(PROPERTIES)
    counts = []
    for implementation, name in sorted(rows_by_property, key=lambda key: (key[0], order.index(key[1]))):
        tests = rows_by_property[implementation, name]
        by_outcome = Counter(map(_property_outcome, tests))
        dtypes = " ".join(dtype for dtype in DTYPES if any(row.dtype == dtype for row in tests))
        numbers = (by_outcome[outcome] for outcome in PropertyCounts._fields[3:])
        counts.append(PropertyCounts(implementation, name, dtypes, *numbers))
    return counts


def _property_outcome(row: Row) -> str:
    if row.fails:
        return "known" if row.xfail else "broken"
    return {PropertyOutcome.BITWISE: "bitwise", PropertyOutcome.WITHIN_BOUNDS: "within_bounds"}.get(
        PropertyOutcome(row.verdict), "open"
    )


def _feature_state(cells: Iterable[Cell]) -> str:
    states = {cell.state for cell in cells}
    if states & FAILS_A_RUN - {State.MISPRINT}:
        return "wrong"
    for state, word in ((State.XFAIL, "known"), (State.UNVERIFIED, "unverified")):
        if state in states:
            return word
    return "unsupported" if states == {State.UNSUPPORTED} else "right"


def _count_left_out(frames: Frames) -> Counter[tuple[str, str]]:
    """Count the cases that a mode did not run because it compiles each, by implementation and feature.

    A case that ran only in dtypes that the mode does not support is counted, too: the mode may support the others.
    """
    results = frames.results
    rows = results[results["lacks"].eq(ALL_CASES)]
    counts: Counter[tuple[str, str]] = Counter()
    for implementation, cases in rows.groupby("implementation")["case"]:
        of_mode = results["implementation"].eq(implementation)
        asked = set(results.loc[of_mode & results["verdict"].ne(Verdict.UNSUPPORTED), "case"])
        for case in set(cases) - asked:
            counts.update((str(implementation), feature) for feature in case_features(frames.cases[case]))
    return counts


def _accuracy_rows(frames: Frames) -> Iterable[Accuracy]:
    rows = frames.results
    rows = rows[rows["verdict"].eq(Verdict.AGREE) & rows["ratio"].notna()]
    ratios = rows.groupby(["implementation", "version", "dtype"])["ratio"]
    columns = {"stages": ratios.size(), "median": ratios.median(), "most": ratios.quantile(0.99)}
    statistics = pd.DataFrame(columns).to_dict("index")
    for column, dtype in product(frames.columns, DTYPES):
        if of_dtype := statistics.get((column.implementation, column.version, dtype)):
            yield Accuracy(
                column.implementation,
                column.release,
                dtype,
                int(of_dtype["stages"]),
                round(of_dtype["median"], 3),
                round(of_dtype["most"], 3),
            )


def read_surveyed_conventions(path: Path) -> list[SurveyedConvention]:
    """Read the output of ``attncheck conventions --json``. Raises ``ResultsError`` for any other file."""
    try:
        return [
            SurveyedConvention(implementation, *(answer[name] for name in SurveyedConvention._fields[1:]))
            for implementation, answers in json.loads(path.read_text(encoding="utf-8"))["implementations"].items()
            for answer in answers
            if answer["kind"] in ("measured", "open")
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ResultsError(f"{path}: expected what `attncheck conventions --json` prints; {error}") from None


def survey_differences(kept: Survey, run: Survey) -> list[dict[str, str]]:
    """Return the differences of a run's counts from the kept counts of the same implementation and version, as rows.

    Right cases and cases that are known to fail count together, because some fail only on some processors. If the
    corpus has grown since, or the run left cases out, only a loss is a difference (``_comparable_counts``). A
    feature that is not kept is not compared.
    """
    before = {row[:3]: _counts_on_any_processor(row) for row in kept.judged}
    left_out = {row[:3]: row.not_run for row in kept.judged if row.not_run}
    # If the number of left out cases differs, the run used another selection of cases.
    chosen_anew = {row[:2] for row in run.judged if left_out.get(row[:3], row.not_run) != row.not_run}
    known = {row[:2] for row in kept.judged}
    new = dict.fromkeys((row.implementation, row.version) for row in run.judged if row[:2] not in known)
    rows = [("added", *names, ALL_CASES_FEATURE, "not in the survey") for names in new]
    for row in run.judged:
        if row[:3] in before:
            is_same = row[:2] not in chosen_anew or row[:3] not in left_out
            was, now = _comparable_counts(before[row[:3]], _counts_on_any_processor(row), is_same_choice=is_same)
            if counts := ", ".join(f"{name} {was[name]} -> {now[name]}" for name in now if was[name] != now[name]):
                is_lost = now["wrong"] > was["wrong"] or now.get(_RIGHT_OR_KNOWN, 0) < was.get(_RIGHT_OR_KNOWN, 0)
                rows.append((WORSE if is_lost else OTHER, *row[:3], counts))
    return [
        {"change": change, "implementation": f"{name} {version}", "feature": feature, "what": what}
        for change, name, version, feature, what in rows
    ]


def _comparable_counts(
    was: Mapping[str, int], now: Mapping[str, int], *, is_same_choice: bool
) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Return two counts of the same cases unchanged, and two counts of different cases reduced to losses.

    If the run left out more cases, chose others or has fewer, only more wrong cases are a loss. If it has more cases,
    fewer right cases are a loss, too, because added cases cannot reduce that count.
    """
    if not is_same_choice or now["not_run"] > was["not_run"] or sum(now.values()) < sum(was.values()):
        worse: dict[str, Callable[[int, int], int]] = {"wrong": max}
    elif sum(now.values()) > sum(was.values()):
        worse = {_RIGHT_OR_KNOWN: min, "wrong": max}
    else:
        return was, now
    return {name: was[name] for name in worse}, {name: choose(was[name], now[name]) for name, choose in worse.items()}


_RIGHT_OR_KNOWN = "right or known"


def _counts_on_any_processor(row: JudgedFeature) -> dict[str, int]:
    counts = {name: int(getattr(row, name)) for name in JudgedFeature._fields[3:]}
    return {_RIGHT_OR_KNOWN: counts.pop("right") + counts.pop("known"), **counts}


_HEADING_PATTERN = re.compile(r"^## (?P<library>\S+) (?P<release>\S+): (?P<title>.+)$", re.MULTILINE)
_SCRIPT_PATTERN = re.compile(r"^```python\n(?P<script>.*?)^```\n?", re.MULTILINE | re.DOTALL)
_LINK_PATTERN = re.compile(r"\[([^\]]+)\]\([^)]+\)")
_CODE_PATTERN = re.compile(r"`([^`]+)`")


class PublishedFinding(NamedTuple):
    """An error in a release of a library: a title, a text, and a script that shows it."""

    library: str
    release: str
    title: str
    text: str
    script: str

    @property
    def anchor(self) -> str:
        """The anchor of the heading in the document, as Markdown readers derive it."""
        heading = f"{self.library} {self.release}: {self.title}".lower()
        return re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")

    @property
    def paragraphs(self) -> list[Inline]:
        """The text as paragraphs, with its code marked."""
        paragraphs = (_CODE_PATTERN.split(" ".join(paragraph.split())) for paragraph in self.text.split("\n\n"))
        return [tuple(Mark(part) if i % 2 else part for i, part in enumerate(parts) if part) for parts in paragraphs]


def read_findings(path: Path) -> list[PublishedFinding]:
    """Read a folder of scripts, each a finding, or a document with a heading and a script for each.

    The heading is ``## library release: title``. The first line of a script's docstring is the heading without the
    number signs; the text follows. Raises ``ResultsError`` if a file cannot be read, or a finding has no script.
    """
    if path.is_dir():
        return [_read_finding_script(file) for file in sorted(path.glob("*.py"))]
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ResultsError(f"{path} cannot be read: {error}") from None
    headings = list(_HEADING_PATTERN.finditer(text))
    if not headings:
        raise ResultsError(f"{path}: expected a heading such as `## torch 2.13: what is wrong` for each finding")
    ends = [*(heading.start() for heading in headings[1:]), len(text)]
    return [
        _parse_finding(path, heading, text[heading.end() : end]) for heading, end in zip(headings, ends, strict=True)
    ]


def findings_document(findings: Sequence[PublishedFinding]) -> str:
    """Write findings as the document that ``read_findings`` reads."""
    lines = ["# Findings", ""]
    for finding in findings:
        lines += [f"## {finding.library} {finding.release}: {finding.title}", ""]
        lines += [finding.text, ""] if finding.text else []
        lines += ["```python", finding.script.rstrip("\n"), "```", ""]
    return "\n".join(lines)


def _read_finding_script(path: Path) -> PublishedFinding:
    """Read a script whose docstring is the finding."""
    try:
        source = path.read_text(encoding="utf-8")
        module = ast.parse(source)
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        raise ResultsError(f"{path} cannot be read: {error}") from None
    heading, _, text = (ast.get_docstring(module) or "").partition("\n")
    match = _HEADING_PATTERN.match(f"## {heading}")
    if match is None:
        raise ResultsError(f"{path}: expected a docstring that begins as `torch 2.13: what is wrong`")
    script = "".join(source.splitlines(keepends=True)[module.body[0].end_lineno :]).lstrip("\n")
    return PublishedFinding(match["library"], match["release"], match["title"], text.strip(), script)


def _parse_finding(path: Path, heading: re.Match[str], body: str) -> PublishedFinding:
    script = _SCRIPT_PATTERN.search(body)
    if script is None:
        raise ResultsError(f"{path}: {heading['title']!r} has no script; expected a block that begins with ```python")
    around = body[: script.start()].strip() + "\n\n" + body[script.end() :].strip()
    text = _LINK_PATTERN.sub(r"\1", around.strip())
    return PublishedFinding(heading["library"], heading["release"], heading["title"], text, script["script"])
