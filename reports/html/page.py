"""The page as data: what every section shows, in the order in which it is read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attncheck.errors import ExitCode
from attncheck.reports.alike import AlikeRows, count_evaluations, group_alike
from attncheck.reports.answer import Summary, exit_code_of, findings, make_summary
from attncheck.reports.cells import CellRow, State, cell_table
from attncheck.reports.coverage import coverage
from attncheck.reports.expected_failures import (
    EXPECTED_FAILURES_NOTE,
    EmptyRows,
    ExpectedFailureGroup,
    address_of,
    count_following,
    empty_rows,
    expected_failure_groups,
)
from attncheck.reports.frames import Column, Frames, documents_of, environment_facts, failing
from attncheck.reports.html.agreement import PairTable, pair_table
from attncheck.reports.html.contents import LETTERS_PER_CASE, LETTERS_PER_STAGE, Budget, urgent_first, within
from attncheck.reports.html.details import CaseDetails, case_details
from attncheck.reports.html.matrix import FileRows, verdict_matrix
from attncheck.reports.html.text import SYMBOLS, Anchors, make_anchors
from attncheck.reports.in_common import in_common_lines
from attncheck.reports.simplest import described
from attncheck.spec import DTYPES
from attncheck.verdicts import Verdict

if TYPE_CHECKING:
    import pandas as pd

    from attncheck.reports.html.documents import DrawnDocument
    from attncheck.reports.html.evidence import Evidence
    from attncheck.reports.html.length_maps import DrawnLengths
    from attncheck.reports.properties import BrokenProperty, PropertyTable

_AGREE, _FAILING, _UNSURE = ("agree", "✓"), ("failing", "✗"), ("xfail", "!")
_OF_RECORDS = ("misprint", "!")
"""No implementation is wrong: a document or a record is."""
_UNVERIFIED, _IN_PART = ("unverified", "?"), ("unverified", "◐")
_ALWAYS_SHOWN = (State.AGREE, State.UNVERIFIED, State.UNSUPPORTED, State.FAILING)
_TAG = re.compile(r"[a-z][a-z0-9-]*")  # as the case format has it: each is a part of an address


@dataclass(frozen=True)
class Wrong:
    """One failing cell: where it begins, and what happens there."""

    case: str
    implementation: str
    dtype: str
    verdict: str
    state: str
    stage: str
    message: str
    rows: int
    anchor: str
    others: int
    """Further cases of which the same is to be said."""
    described: str
    """The shape of the case, and what it probes."""


@dataclass(frozen=True)
class ColumnCounts:
    """How many cases on one implementation are how, and the same as shares of a bar."""

    title: str
    total: int
    counts: tuple[tuple[str, str, str, int, str], ...]
    """state, symbol, word, count, share of the bar in percent"""


@dataclass(frozen=True)
class HtmlColumn:
    """A column of the matrix, and what it is filtered by."""

    title: str
    implementation: str
    version: str
    environment: str
    framework: str


@dataclass(frozen=True)
class Page:
    """Everything that the templates show."""

    answer: Summary
    tone: str
    symbol: str
    notes: tuple[str, ...]
    states: tuple[tuple[str, str, str], ...]
    counts: tuple[ColumnCounts, ...]
    wrong: tuple[Wrong, ...]
    wrong_left_out: int
    in_common: tuple[str, ...]
    """What the failing cases have in common and the passing ones have not."""
    lengths: tuple[DrawnLengths, ...]
    """Where in (Lq, Lk) each implementation fails."""
    columns: tuple[HtmlColumn, ...]
    many_environments: bool
    files: tuple[FileRows, ...]
    cases: int
    dtypes: tuple[str, ...]
    tags: tuple[str, ...]
    words: tuple[str, ...]
    probes: Mapping[str, Mapping[str, str]]
    """What each tag probes, and the defect that it answers."""
    details: tuple[CaseDetails, ...]
    details_left_out: int
    evidence_left_out: int
    documents: tuple[DrawnDocument, ...]
    documents_late: bool
    """Whether they are so many that a computation is laid out only when it comes into view."""
    pairs: PairTable | None
    expected_failures: tuple[ExpectedFailureGroup, ...]
    following: int
    empty_rows: EmptyRows | None
    expected_failures_note: str
    environments: tuple[str, ...]
    incomplete: tuple[str, ...]
    stopped: frozenset[str]
    """Those of the incomplete that were asked to stop."""
    facts: list[tuple[str, list[str]]]
    linked: frozenset[str]
    """Cases that have an anchor on the page."""
    case_anchor: Callable[[str], str]
    address_of: Callable[[str], str] = address_of
    properties: PropertyTable | None = None
    """What was asked of properties; None where nothing was."""
    properties_note: str = ""
    broken: tuple[BrokenProperty, ...] = ()
    broken_left_out: int = 0


def make_page(frames: Frames, budget: Budget) -> Page:
    """Work out every section."""
    table = cell_table(frames)
    anchors = make_anchors(sorted(table), frames.columns)
    detailed = _detailed(frames, table, budget)
    evidence, evidence_left_out = _evidence(frames, table, anchors, detailed, budget)
    files = verdict_matrix(frames, table, anchors, detailed, budget)
    linked = frozenset(detailed | {row.case for file in files for row in file.rows})
    wrong = findings(frames)
    alike = group_alike(wrong)[: budget.wrong]
    tone, symbol = _tone(frames, table)
    occurring = {cell.state for row in table.values() for cells in row.values() for cell in cells.values()}
    shown = tuple(state for state in State if state in occurring or state in _ALWAYS_SHOWN)
    many = len(frames.environments) > 1
    tags = tuple(sorted({tag for case in table for tag in frames.cases[case]["tags"]}))
    words = {cell.word for row in table.values() for cells in row.values() for cell in cells.values()}
    return Page(
        answer=make_summary(frames),
        tone=tone,
        symbol=symbol,
        notes=frames.notes,
        states=tuple((state.value, SYMBOLS[state], state.value) for state in shown),
        counts=tuple(_counts(column, table, many, shown) for column in frames.columns),
        wrong=tuple(_wrong(frames, each, anchors, linked) for each in alike),
        wrong_left_out=len(wrong) - count_evaluations(alike),
        in_common=tuple(in_common_lines(frames)),
        lengths=_lengths(frames, wrong),
        columns=tuple(_column(column, many) for column in frames.columns),
        many_environments=many,
        files=files,
        cases=len(table),
        dtypes=tuple(d for d in DTYPES if any(d in cells for row in table.values() for cells in row.values())),
        tags=tags,
        words=tuple(sorted(words)),
        probes=_probes(frames, tags),
        details=tuple(case_details(frames, table, anchors, detailed, evidence)),
        details_left_out=len(table) - len(detailed),
        evidence_left_out=evidence_left_out,
        documents=(documents := _documents(frames, anchors, budget)),
        documents_late=sum(len(document.page.cases) for document in documents) > budget.computations,
        pairs=pair_table(frames, anchors),
        expected_failures=tuple(expected_failure_groups(frames)),
        following=count_following(frames),
        empty_rows=empty_rows(frames),
        expected_failures_note=EXPECTED_FAILURES_NOTE,
        environments=tuple(frames.environments["environment"]),
        incomplete=tuple(frames.environments.loc[~frames.environments["complete"].astype(bool), "environment"]),
        stopped=frozenset(label for label, asked in frames.asked.items() if asked.stopped),
        facts=environment_facts(frames),
        **_properties(frames, budget),
        linked=linked,
        case_anchor=anchors.case,
    )


def _evidence(
    frames: Frames, table: Mapping[str, CellRow], anchors: Anchors, detailed: set[str], budget: Budget
) -> tuple[Mapping[str, list[Evidence]], int]:
    """Return the evidence by case, and how many cells had to go without; what makes it is imported where any is."""
    cells = (cell for row in table.values() for cells in row.values() for cell in cells.values())
    if not any(cell.state in (State.FAILING, State.XFAIL) for cell in cells):
        return {}, 0
    from attncheck.reports.html.evidence import make_evidence

    return make_evidence(frames, table, anchors.cell, detailed, budget)


def _lengths(frames: Frames, wrong: pd.DataFrame) -> tuple[DrawnLengths, ...]:
    if wrong.empty:
        return ()
    from attncheck.reports.html.length_maps import drawn_lengths

    return drawn_lengths(frames)


def _documents(frames: Frames, anchors: Anchors, budget: Budget) -> tuple[DrawnDocument, ...]:
    if not documents_of(frames):
        return ()
    from attncheck.reports.html.documents import drawn_documents

    return drawn_documents(frames, anchors, budget.pictures)


def _properties(frames: Frames, budget: Budget) -> dict[str, Any]:
    """Return the page's fields of properties."""
    if not frames.properties:
        return {}
    from attncheck.reports.properties import OUTCOMES_NOTE, asked_rows, broken_properties, property_table

    broken = broken_properties(frames)
    return {
        "properties": property_table(asked_rows(frames)),
        "properties_note": OUTCOMES_NOTE,
        "broken": broken[: budget.wrong],
        "broken_left_out": max(0, len(broken) - budget.wrong),
    }


def _probes(frames: Frames, tags: Iterable[str]) -> dict[str, Mapping[str, str]]:
    """Return what tags mean, each of which stands with one case at least; results of other versions may not say it."""
    found = {tag: entry for record in frames.cases.values() for tag, entry in record.get("probes", {}).items()}
    return {tag: found[tag] for tag in tags if tag in found and _TAG.fullmatch(tag)}


def _detailed(frames: Frames, table: Mapping[str, CellRow], budget: Budget) -> set[str]:
    """Return the cases whose stages are shown: all of them, or as many as the budget allows, the urgent ones first."""
    letters = LETTERS_PER_CASE + LETTERS_PER_STAGE * frames.results.groupby("case").size()
    return within(urgent_first(table), lambda case: int(letters.get(case, 0)), budget.detail_letters)


def _tone(frames: Frames, table: Mapping[str, CellRow]) -> tuple[str, str]:
    """Return the page's tone and its sign: green, and a tick, only where everything was judged and holds."""
    code = exit_code_of(frames)
    if not len(frames.results) or code not in (ExitCode.AGREE, ExitCode.DISAGREE):
        return _UNSURE
    if code is ExitCode.DISAGREE:
        blamed = any(
            cell.state is State.FAILING for row in table.values() for of in row.values() for cell in of.values()
        )
        return _FAILING if blamed or len(failing(frames.pairs)) else _OF_RECORDS
    if frames.numbers["verdict"].eq(Verdict.UNVERIFIED).any():
        return _UNVERIFIED
    return _AGREE if all(each.is_whole for each in coverage(frames)) else _IN_PART


def _counts(column: Column, table: Mapping[str, CellRow], many: bool, shown: Iterable[State]) -> ColumnCounts:
    """Count evaluations, that is cases in dtypes, by state."""
    states = Counter(cell.state for row in table.values() for cell in row.get(column, {}).values())
    total = states.total()
    return ColumnCounts(
        column.title(with_environment=many),
        total,
        tuple(
            (state.value, SYMBOLS[state], state.value, states[state], f"{100 * states[state] / max(total, 1):.2f}")
            for state in shown
        ),
    )


def _wrong(frames: Frames, alike: AlikeRows, anchors: Anchors, linked: frozenset[str]) -> Wrong:
    row = alike.row
    many = len(frames.environments) > 1
    implementation, case = str(row["implementation"]), str(row["case"])
    column = next(
        (c for c in frames.columns if (c.environment, c.implementation) == (row["environment"], implementation)), None
    )
    return Wrong(
        case=case,
        implementation=f"{implementation} ({row['environment']})" if many and implementation else implementation,
        dtype=", ".join(filter(None, alike.dtypes)),
        verdict=str(row["verdict"]),
        state=_STATE_OF.get(str(row["verdict"]), State.FAILING).value,
        stage=str(row["stage"]),
        message=str(row["message"]),
        rows=alike.rows,
        anchor="" if case not in linked else anchors.case(case) if column is None else anchors.cell(case, column),
        others=alike.others,
        described=described(frames.cases[case]) if implementation else "",
    )


_STATE_OF = {State.MISPRINT.value: State.MISPRINT, State.XPASS.value: State.XPASS}


def _column(column: Column, many: bool) -> HtmlColumn:
    return HtmlColumn(
        title=column.title(with_environment=many),
        implementation=column.implementation,
        version=column.version,
        environment=column.environment if many else "",
        framework=column.implementation.partition(".")[0],
    )
