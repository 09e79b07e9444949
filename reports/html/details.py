"""One case's details: what it is, and every stage of every implementation in every dtype."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from attncheck.reports.cells import Cell, CellRow
from attncheck.reports.frames import Column, Frames, expected_failures, failing, records, stage_order
from attncheck.reports.html.text import SYMBOLS, Anchors, options_text, shape_text, short
from attncheck.reports.printed_numbers import Misprint, misprints
from attncheck.verdicts import Verdict

if TYPE_CHECKING:
    from attncheck.reports.html.evidence import Evidence

_SHOWN = [
    "environment",
    "implementation",
    "dtype",
    "stage",
    "verdict",
    "ratio",
    "tier",
    "introduced_ratio",
    "introduced_tier",
    "unjudged",
    "padded",
    "message",
]


@dataclass(frozen=True)
class StageCell:
    """One stage: its largest error over the bound, accumulated and introduced, and a mark where that is notable."""

    accumulated: str
    introduced: str
    state: str
    mark: str


@dataclass(frozen=True)
class DtypeRow:
    """One implementation in one dtype: its verdict, and a cell per stage, or a message where it has no stage.

    ``padded`` says what its call was padded with, empty where it was made as the case has it.
    """

    dtype: str
    state: str
    symbol: str
    text: str
    padded: str
    message: str
    stages: tuple[StageCell | None, ...]


@dataclass(frozen=True)
class ImplementationRows:
    """One implementation's rows."""

    anchor: str
    title: str
    rows: tuple[DtypeRow, ...]


@dataclass(frozen=True)
class CaseDetails:
    """Everything about one case."""

    case: str
    name: str
    anchor: str
    location: str
    source: str
    operation: str
    tags: tuple[str, ...]
    options: tuple[str, ...]
    inputs: tuple[str, ...]
    notes: tuple[str, ...]
    in_short: str
    """What is wrong or expected to be, in a few words; empty where all agree."""
    state: str
    stages: tuple[str, ...]
    implementations: tuple[ImplementationRows, ...]
    misprints: tuple[Misprint, ...]
    evidence: tuple[Evidence, ...]


def case_details(
    frames: Frames,
    table: Mapping[str, CellRow],
    anchors: Anchors,
    detailed: Collection[str],
    evidence: Mapping[str, Sequence[Evidence]],
) -> Iterator[CaseDetails]:
    """Return the details of some cases, in the order of the matrix."""
    results = frames.results[frames.results["case"].isin(detailed)]
    marks = pd.Series("", index=results.index)
    marks[failing(results).index] = "failing"
    marks[expected_failures(results).index] = "xfail"
    printed: dict[str, list[Misprint]] = {}
    for misprint in misprints(frames):
        printed.setdefault(misprint.case, []).append(misprint)
    by_case: dict[str, list[Mapping[str, Any]]] = {}
    for item in records(results[["case", *_SHOWN]].assign(state=marks)):
        by_case.setdefault(item["case"], []).append(item)
    many = len(frames.environments) > 1
    for case in table:
        if case in detailed:
            parts = _implementations(frames, case, table[case], by_case[case], anchors, many)
            evidence_of = (printed.get(case, ()), evidence.get(case, ()))
            yield _details(frames.cases[case], table[case], anchors, parts, evidence_of)


def _details(
    record: Mapping[str, Any],
    row: CellRow,
    anchors: Anchors,
    found: tuple[tuple[str, ...], tuple[ImplementationRows, ...]],
    evidence_of: tuple[Sequence[Misprint], Sequence[Evidence]],
) -> CaseDetails:
    source = record["source"]
    notes = [f"{each.verdict} in {each.called}" for each in evidence_of[0]]
    notes += [f"{column.implementation}: {cell.text}" for column, cells in row.items() for cell in _urgent(cells)]
    shown = list(dict.fromkeys(notes))
    return CaseDetails(
        case=record["id"],
        name=record["name"],
        anchor=anchors.case(record["id"]),
        location=f"{record['file']}:{record['line']}",
        source=", ".join([source["title"], *(source[name] for name in ("author", "section") if name in source)]),
        operation=record["operation"],
        tags=tuple(record["tags"]),
        options=(*options_text(record["options"]), *_storage(record)),
        inputs=tuple(f"{name} {shape_text(shape)}" for name, shape in record["inputs"].items()),
        notes=tuple(record["notes"]),
        in_short="; ".join(shown[:2]) + (f"; and {len(shown) - 2} more" if len(shown) > 2 else ""),
        state=_state(row),
        stages=found[0],
        implementations=found[1],
        misprints=tuple(evidence_of[0]),
        evidence=tuple(evidence_of[1]),
    )


def _storage(record: Mapping[str, Any]) -> list[str]:
    """Say how the inputs lie in memory, where a case says so."""
    notes = [f"inputs stored in {record['storage']}"] if record.get("storage") else []
    notes += [f"{name} in memory: {form}" for name, form in record.get("memory_layout", {}).items()]
    return [*notes, *(f"{name} has its heads merged" for name in record.get("merged", []))]


def _urgent(cells: Mapping[str, Cell]) -> list[Cell]:
    return [cell for cell in cells.values() if cell.state.value in ("failing", "xfail")]


def _state(row: CellRow) -> str:
    states = {cell.state.value for cells in row.values() for cell in cells.values()}
    return next((state for state in ("failing", "misprint", "xpass", "xfail") if state in states), "agree")


def _implementations(
    frames: Frames,
    case: str,
    row: CellRow,
    rows: Sequence[Mapping[str, Any]],
    anchors: Anchors,
    many: bool,
) -> tuple[tuple[str, ...], tuple[ImplementationRows, ...]]:
    """Return the stages that anybody has, in order, and every implementation's rows."""
    stages = tuple(sorted({item["stage"] for item in rows if item["stage"]}, key=stage_order))
    found: dict[tuple[str, str, str], dict[str, Mapping[str, Any]]] = {}
    for item in rows:
        found.setdefault((item["environment"], item["implementation"], item["dtype"]), {})[item["stage"]] = item
    return stages, tuple(
        ImplementationRows(
            anchors.cell(case, column),
            column.title(with_environment=many),
            tuple(_dtype_row(dtype, cell, found.get(_key(column, dtype), {}), stages) for dtype, cell in cells.items()),
        )
        for column in frames.columns
        if (cells := row.get(column))
    )


def _key(column: Column, dtype: str) -> tuple[str, str, str]:
    return column.environment, column.implementation, dtype


def _dtype_row(dtype: str, cell: Cell, own: Mapping[str, Mapping[str, Any]], stages: Sequence[str]) -> DtypeRow:
    cells = tuple(_stage_cell(own[stage]) if stage in own else None for stage in stages)
    message = str(own[""]["message"]) if "" in own else ""
    padded = next((row["padded"] for row in own.values() if isinstance(row["padded"], str)), "")
    state = cell.state
    return DtypeRow(dtype, state.value, SYMBOLS[state], cell.text, padded, message, cells if any(cells) else ())


def _stage_cell(row: Mapping[str, Any]) -> StageCell:
    tiers = [tier for tier in (row["tier"], row["introduced_tier"]) if isinstance(tier, str) and tier != "within"]
    open_ = "?" if not pd.isna(row["unjudged"]) and row["unjudged"] else ""  # elements without an exact answer
    mark = (
        row["verdict"] if row["state"] else min(tiers, default=open_)
    )  # in the order of the alphabet, the worst first
    if row["verdict"] == Verdict.UNVERIFIED:
        return StageCell("?", "", "", "")
    return StageCell(short(row["ratio"], 2), short(row["introduced_ratio"], 2), row["state"], mark)
