"""Surveys: what implementations do and mean, a row for every implementation in every version that was judged.

Runs are reduced to rows one by one, so that what is judged in different environments, and at different times, stands in
one table: a row takes the place of an earlier one of the same implementation in the same version. Beside them stand
conventions as they were measured, and findings: what is wrong in a release, each with its script.
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
from attncheck.reports.failure_patterns import given_of
from attncheck.reports.frames import Frames, by_key
from attncheck.results.format import Row
from attncheck.spec import DTYPES, OPERATIONS, OPTIONS, PROPERTIES
from attncheck.spec.verdicts import ALL_CASES, PropertyOutcome, Verdict

ALL = "all cases"
"""The feature that every case has."""
_OF_OPTIONS = "attention"
"""The operation whose options and inputs are features, too."""


class JudgedFeature(NamedTuple):
    """How many cases with a feature came to what, the worst of all dtypes counting; ``not_run`` were left out."""

    implementation: str
    version: str
    feature: str
    right: int
    known: int
    wrong: int
    unsupported: int
    unverified: int
    not_run: int


_COUNTED = JudgedFeature._fields[3:-1]


class Accuracy(NamedTuple):
    """How much of their error bounds the stages use that are right: the middle one, and the largest but one of 100."""

    implementation: str
    version: str
    dtype: str
    stages: int
    median: float
    most: float


class SurveyedConvention(NamedTuple):
    """What was measured of a convention, and what the cases mean."""

    implementation: str
    convention: str
    asks: str
    means: str
    cases_mean: str
    departs: bool


class PropertyCounts(NamedTuple):
    """In how many ways a property was asked, by what came of it; ``broken`` and ``known`` do not hold.

    ``dtypes`` are those in which it was asked, with blanks between them. ``open`` are the ways in which a call failed
    or nothing could be judged.
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
        """The word for all of them: that of the worst."""
        return next((word.replace("_", " ") for word, count in reversed(self.counts.items()) if count), "-")

    @property
    def counts(self) -> dict[str, int]:
        """The number of ways, from harmless to severe."""
        return {name: getattr(self, name) for name in self._fields[3:]}


OfVersion = TypeVar("OfVersion", JudgedFeature, Accuracy)


@dataclass
class Survey:
    """All rows, in the order in which they are written."""

    judged: list[JudgedFeature] = field(default_factory=list)
    accuracy: list[Accuracy] = field(default_factory=list)
    meanings: list[SurveyedConvention] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    properties: list[PropertyCounts] = field(default_factory=list)

    def update(self, other: Survey) -> None:
        """Take the rows of another survey in the place of those of the same implementation, in the same version.

        What was measured of conventions and properties takes the place of the same implementation's in any version. Its
        findings, where it has any, take the place of all.
        """
        replaced = {row[:2] for row in other.judged}
        self.judged = [row for row in self.judged if row[:2] not in replaced] + other.judged
        self.accuracy = [row for row in self.accuracy if row[:2] not in replaced] + other.accuracy
        for name in ("meanings", "properties"):
            asked = {row.implementation for row in getattr(other, name)}
            kept = [row for row in getattr(self, name) if row.implementation not in asked]
            setattr(self, name, kept + getattr(other, name))
        self.findings = other.findings or self.findings

    def newest(self) -> dict[str, str]:
        """Return the newest version of each implementation, by name."""
        found: dict[str, str] = {}
        for row in self.judged:
            if row.implementation not in found or version_order(row.version) > version_order(found[row.implementation]):
                found[row.implementation] = row.version
        return dict(sorted(found.items()))

    def of_newest(self, rows: Iterable[OfVersion]) -> list[OfVersion]:
        """Return those rows that are of the newest version of their implementation."""
        newest = self.newest()
        return [row for row in rows if newest.get(row.implementation) == row.version]


def version_order(version: str) -> list[tuple[int, str]]:
    """Sort key: numbers by their size."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in version.replace("+", ".").split(".")]


def feature_order() -> list[str]:
    """Return every feature that a case may have: operations, and options and inputs of attention."""
    own = OPERATIONS[_OF_OPTIONS]
    given = [name for name, spec in own.inputs.items() if not spec.required] + [*OPTIONS]
    return [ALL, *OPERATIONS, *(f"{_OF_OPTIONS}: {name}" for name in given)]


def features_of(case: Mapping[str, Any]) -> list[str]:
    """Return the features of a case record."""
    operation = case["operation"]
    given = given_of(case) if operation == _OF_OPTIONS else []
    return [ALL, operation, *(f"{operation}: {name}" for name in given)]


def survey_of(frames: Frames) -> Survey:
    """Reduce a run to its rows."""
    states = [
        (column.implementation, feature, _state(cells.values()))
        for case, row in cell_table(frames).items()
        for feature in features_of(frames.cases[case])
        for column, cells in row.items()
    ]
    found, left_out, judged = Counter(states), _left_out(frames), []
    for column, feature in product(frames.columns, feature_order()):
        of = {name: found[column.implementation, feature, name] for name in _COUNTED}
        if sum(of.values()):
            not_run = left_out.get((column.implementation, feature), 0)
            of["unsupported"] -= not_run
            judged.append(JudgedFeature(column.implementation, column.release, feature, **of, not_run=not_run))
    asked = chain.from_iterable(frames.properties.values())
    return Survey(judged, list(_accuracy(frames)), properties=property_counts(asked))


def property_counts(rows: Iterable[Row]) -> list[PropertyCounts]:
    """Count the ways in which properties were asked, by implementation and property."""
    asked = (row for row in rows if row.verdict != PropertyOutcome.UNSUPPORTED)
    found = by_key(asked, lambda row: (row.implementation, row.property_name))
    order = list(PROPERTIES)
    counts = []
    for (implementation, name), of in sorted(found.items(), key=lambda each: (each[0][0], order.index(each[0][1]))):
        by_outcome = Counter(map(_outcome, of))
        dtypes = " ".join(dtype for dtype in DTYPES if any(row.dtype == dtype for row in of))
        numbers = (by_outcome[each] for each in PropertyCounts._fields[3:])
        counts.append(PropertyCounts(implementation, name, dtypes, *numbers))
    return counts


def _outcome(row: Row) -> str:
    if row.fails:
        return "known" if row.xfail else "broken"
    return {PropertyOutcome.BITWISE: "bitwise", PropertyOutcome.WITHIN_BOUNDS: "within_bounds"}.get(
        PropertyOutcome(row.verdict), "open"
    )


def _state(cells: Iterable[Cell]) -> str:
    states = {cell.state for cell in cells}
    if states & FAILS_A_RUN - {State.MISPRINT}:
        return "wrong"
    for state, word in ((State.XFAIL, "known"), (State.UNVERIFIED, "unverified")):
        if state in states:
            return word
    return "unsupported" if states == {State.UNSUPPORTED} else "right"


def _left_out(frames: Frames) -> Counter[tuple[str, str]]:
    """Count the cases that a mode was not asked for because it compiles each, by implementation and feature.

    One that was asked for only in dtypes that the mode does not have is one of them: it may have the others.
    """
    results = frames.results
    rows = results[results["lacks"].eq(ALL_CASES)]
    found: Counter[tuple[str, str]] = Counter()
    for implementation, cases in rows.groupby("implementation")["case"]:
        own = results["implementation"].eq(implementation)
        asked = set(results.loc[own & results["verdict"].ne(Verdict.UNSUPPORTED), "case"])
        for case in set(cases) - asked:
            found.update((str(implementation), feature) for feature in features_of(frames.cases[case]))
    return found


def _accuracy(frames: Frames) -> Iterable[Accuracy]:
    rows = frames.results
    rows = rows[rows["verdict"].eq(Verdict.AGREE) & rows["ratio"].notna()]
    ratios = rows.groupby(["implementation", "version", "dtype"])["ratio"]
    columns = {"stages": ratios.size(), "median": ratios.median(), "most": ratios.quantile(0.99)}
    found = pd.DataFrame(columns).to_dict("index")
    for column, dtype in product(frames.columns, DTYPES):
        if of := found.get((column.implementation, column.version, dtype)):
            yield Accuracy(
                column.implementation,
                column.release,
                dtype,
                int(of["stages"]),
                round(of["median"], 3),
                round(of["most"], 3),
            )


def read_meanings(path: Path) -> list[SurveyedConvention]:
    """Read what ``attncheck conventions --json`` printed. Raises ``ResultsError`` where it is something else."""
    try:
        return [
            SurveyedConvention(implementation, *(answer[name] for name in SurveyedConvention._fields[1:]))
            for implementation, answers in json.loads(path.read_text(encoding="utf-8"))["implementations"].items()
            for answer in answers
            if answer["kind"] in ("measured", "open")
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ResultsError(f"{path}: expected what `attncheck conventions --json` prints; {error}") from None


def differences(kept: Survey, found: Survey) -> list[dict[str, str]]:
    """Return where a run counts otherwise than what is kept of the same implementation in the same version, as rows.

    What is right and what is known to fail count together: some failures are those of some processors only. Where the
    corpus has grown since, or the run left cases out, only what was lost is a difference (``_comparable``); a feature
    that is not kept is none.
    """
    before = {row[:3]: _on_any_processor(row) for row in kept.judged}
    left_out = {row[:3]: row.not_run for row in kept.judged if row.not_run}
    # Other numbers of cases were left out: others stand for all of them now.
    chosen_anew = {row[:2] for row in found.judged if left_out.get(row[:3], row.not_run) != row.not_run}
    known = {row[:2] for row in kept.judged}
    new = dict.fromkeys((row.implementation, row.version) for row in found.judged if row[:2] not in known)
    rows = [("added", *names, ALL, "not in the survey") for names in new]
    for row in found.judged:
        if row[:3] in before:
            is_same = row[:2] not in chosen_anew or row[:3] not in left_out
            was, now = _comparable(before[row[:3]], _on_any_processor(row), is_same_choice=is_same)
            if counts := ", ".join(f"{name} {was[name]} -> {now[name]}" for name in now if was[name] != now[name]):
                is_lost = now["wrong"] > was["wrong"] or now.get(_GOOD, 0) < was.get(_GOOD, 0)
                rows.append((WORSE if is_lost else OTHER, *row[:3], counts))
    return [
        {"change": change, "implementation": f"{name} {version}", "feature": feature, "what": what}
        for change, name, version, feature, what in rows
    ]


def _comparable(
    was: Mapping[str, int], now: Mapping[str, int], *, is_same_choice: bool
) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Return two counts of the same cases as they are, and of others only what was lost.

    Of a run that left out more cases or chose others, or knows fewer, that is what is wrong more often; of one with
    more cases, what is right less often too, for what was added can only be right more often.
    """
    if not is_same_choice or now["not_run"] > was["not_run"] or sum(now.values()) < sum(was.values()):
        worse: dict[str, Callable[[int, int], int]] = {"wrong": max}
    elif sum(now.values()) > sum(was.values()):
        worse = {_GOOD: min, "wrong": max}
    else:
        return was, now
    return {name: was[name] for name in worse}, {name: choose(was[name], now[name]) for name, choose in worse.items()}


_GOOD = "right or known"


def _on_any_processor(row: JudgedFeature) -> dict[str, int]:
    counts = {name: int(getattr(row, name)) for name in JudgedFeature._fields[3:]}
    return {_GOOD: counts.pop("right") + counts.pop("known"), **counts}


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
    def paragraphs(self) -> list[Inline]:
        """The text as paragraphs, with its code set apart."""
        pieces = (_CODE.split(" ".join(paragraph.split())) for paragraph in self.text.split("\n\n"))
        return [tuple(Mark(piece) if place % 2 else piece for place, piece in enumerate(of) if piece) for of in pieces]


def read_findings(path: Path) -> list[Finding]:
    """Read a folder of scripts, each a finding, or a document with a heading and a script for each.

    The heading is ``## library release: title``. A script's docstring has that without the number signs as its first
    line, and then the text. Raises ``ResultsError`` where something cannot be read, or a finding has no script.
    """
    if path.is_dir():
        return [_finding_of_script(file) for file in sorted(path.glob("*.py"))]
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


def _finding_of_script(path: Path) -> Finding:
    """Read a script whose docstring is the finding."""
    try:
        source = path.read_text(encoding="utf-8")
        module = ast.parse(source)
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        raise ResultsError(f"{path} cannot be read: {error}") from None
    heading, _, text = (ast.get_docstring(module) or "").partition("\n")
    found = _HEADING.match(f"## {heading}")
    if found is None:
        raise ResultsError(f"{path}: expected a docstring that begins as `torch 2.13: what is wrong`")
    script = "".join(source.splitlines(keepends=True)[module.body[0].end_lineno :]).lstrip("\n")
    return Finding(found["library"], found["release"], found["title"], text.strip(), script)


def _finding(path: Path, heading: re.Match[str], body: str) -> Finding:
    script = _SCRIPT.search(body)
    if script is None:
        raise ResultsError(f"{path}: {heading['title']!r} has no script; expected a block that begins with ```python")
    around = body[: script.start()].strip() + "\n\n" + body[script.end() :].strip()
    said = _LINK.sub(r"\1", around.strip())
    return Finding(heading["library"], heading["release"], heading["title"], said, script["script"])
