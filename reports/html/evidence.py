"""What is said of a cell that fails or is expected to fail: the worst elements, the map of errors, how to see it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
from markupsafe import Markup

from attncheck.elements import told_apart
from attncheck.errors import ResultsError
from attncheck.reading.shapes import show
from attncheck.reports.arrays import error_ratio
from attncheck.reports.cells import CellRow, State
from attncheck.reports.commands import commands_again
from attncheck.reports.expected_failures import address_of
from attncheck.reports.figures.error_matrices import describe_errors
from attncheck.reports.frames import Column, Frames, element_in, expected_failures, failing, layout_in, records
from attncheck.reports.html.contents import Budget, Script, Scripts
from attncheck.reports.html.pictures import ComparedMatrix, compared_matrices, error_pictures
from attncheck.reports.html.text import SYMBOLS, short
from attncheck.reports.printed_numbers import OF_DOCUMENTS
from attncheck.results.format import EXACT, bound_name

_MAX_ROWS = 12
"""Stages and numbers that are spelt out; more follow from the same fault."""


@dataclass(frozen=True)
class Worst:
    """The element of a stage, or the number, at which the two differ most."""

    what: str
    verdict: str
    index: str
    computed: str
    reference: str
    difference: str
    allowed: str
    against: str


@dataclass(frozen=True)
class ErrorMap:
    """The errors of one stage over their bounds, in words and as pictures; of a small one its numbers instead."""

    stage: str
    words: str
    pictures: tuple[tuple[str, Markup], ...]
    compared: tuple[ComparedMatrix, ...]


@dataclass(frozen=True)
class Evidence:
    """Why one implementation fails, or is expected to fail, in one case and dtype."""

    title: str
    dtype: str
    state: str
    symbol: str
    text: str
    cell_anchor: str
    messages: tuple[str, ...]
    reason: str
    thread: str
    address: str
    worst: tuple[Worst, ...]
    left_out: int
    maps: tuple[ErrorMap, ...]
    commands: tuple[str, ...]
    script: Script | None


def make_evidence(
    frames: Frames, table: Mapping[str, CellRow], anchor: Any, detailed: Collection[str], budget: Budget
) -> tuple[dict[str, list[Evidence]], int]:
    """Return the evidence by case, and how many cells had to go without.

    Failures come first, of these one dtype of every case, and of those the cases as ``detailed`` has them.
    """
    order = {case: number for number, case in enumerate(detailed)}
    wanted = [
        ((cell.state is not State.FAILING, number, order.get(case, len(order))), case, column, dtype)
        for case, row in table.items()
        for column, cells in row.items()
        for number, (dtype, cell) in enumerate(cells.items())
        if cell.state in (State.FAILING, State.XFAIL)
    ]
    wanted.sort(key=lambda item: item[0])
    chosen = [item for item in wanted if item[1] in order][: budget.evidence]
    rows = _rows(frames, {item[1] for item in chosen})
    maps, scripts = _Maps(frames, budget.map_letters), Scripts(frames.arrays.directories, budget.script_letters)
    found: dict[str, list[Evidence]] = {}
    for _, case, column, dtype in chosen:
        rows_of_cell = rows.get((case, dtype, column.environment, column.implementation), [])
        cell = table[case][column][dtype]
        item = Evidence(
            title=column.title(with_environment=len(frames.environments) > 1),
            dtype=dtype,
            state=cell.state.value,
            symbol=SYMBOLS[cell.state],
            text=cell.text,
            cell_anchor=anchor(case, column),
            messages=_messages(rows_of_cell),
            **_reason(rows_of_cell),
            worst=tuple(_worst(row, frames.cases[case]) for row in rows_of_cell if isinstance(row["index"], str))[
                :_MAX_ROWS
            ],
            left_out=max(0, len(rows_of_cell) - _MAX_ROWS),
            maps=maps.of(case, dtype, column, [str(row["stage"]) for row in rows_of_cell]),
            commands=commands_again(frames, _evaluation(case, column, dtype), ("explain", "repro")),
            script=scripts.of(case, dtype, column),
        )
        found.setdefault(case, []).append(item)
    return found, len(wanted) - len(chosen)


def _evaluation(case: str, column: Column, dtype: str) -> dict[str, str]:
    return {
        "case": case,
        "environment": column.environment,
        "implementation": column.implementation,
        "dtype": dtype,
    }


def _rows(frames: Frames, cases: set[str]) -> dict[Any, list[dict[str, Any]]]:
    """Return the rows of stages and numbers that fail or are expected to, by case, dtype and implementation."""
    parts = []
    for frame in (frames.results, frames.numbers):
        own = frame[frame["case"].isin(cases)]
        bad, expected = failing(own), expected_failures(own)
        bad = bad[~bad["verdict"].isin(OF_DOCUMENTS)]  # has a card of its own, once for all implementations
        parts.append(pd.concat([bad, expected]).sort_index())
    parts[1] = parts[1].assign(against="number")
    rows = pd.concat([part for part in parts if len(part)]) if any(map(len, parts)) else parts[0]
    found: dict[Any, list[dict[str, Any]]] = {}
    for row in records(rows):  # all at once: there may be a thousand cells
        found.setdefault((row["case"], row["dtype"], row["environment"], row["implementation"]), []).append(row)
    return found


def _messages(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return what the stages say; what numbers say stands in the table, unless they alone fail."""
    of_stages = [row for row in rows if row["against"] != "number"] or rows
    return tuple(dict.fromkeys(str(row["message"]) for row in of_stages if row["message"]))[:_MAX_ROWS]


def _reason(rows: list[dict[str, Any]]) -> dict[str, str]:
    expected = next((row for row in rows if row["xfail"] and isinstance(row["reason"], str)), None)
    reason = str(expected["reason"]) if expected else ""
    thread = str(expected["thread"]) if expected and isinstance(expected["thread"], str) else ""
    return {"reason": reason, "thread": thread, "address": address_of(thread)}


_AGAINST = {
    "exact": "the exact answer",
    "step": "the exact step from its own previous stage",
    "number": "a number of the case",
}


def _worst(row: Mapping[str, Any], case: Mapping[str, Any]) -> Worst:
    computed, reference = told_apart(float(row["value"]), _should_be(row))
    return Worst(
        what=str(row["stage"]),
        verdict=str(row["verdict"]),
        index=element_in(case, row),
        computed=computed,
        reference=reference,
        difference=short(row["difference"]),
        allowed=short(row["allowed"]),
        against=f"the printed {row['printed']}" if _is_printed(row) else _AGAINST.get(row["against"], ""),
    )


def _is_printed(row: Mapping[str, Any]) -> bool:
    return row["against"] == "number" and isinstance(row.get("printed"), str)


def _should_be(row: Mapping[str, Any]) -> float:
    """Return the exact answer, of a printed number too; the number itself where there is none."""
    exact = row.get("exact")
    if row["against"] != "number" or exact is None or pd.isna(exact):
        return float(row["reference"])
    return float(exact)


class _Maps:
    """Draws maps of errors until the budget is spent."""

    def __init__(self, frames: Frames, most: int) -> None:
        self._frames = frames
        self._left = most

    def of(self, case: str, dtype: str, column: Column, stages: list[str]) -> tuple[ErrorMap, ...]:
        """Return a map per stage whose array, exact answer and bound were kept."""
        if self._left <= 0:
            return ()
        try:
            kept = self._frames.arrays.of(case, dtype)
        except ResultsError:  # a broken file of arrays takes the pictures away, not the report
            return ()
        name = self._frames.classes.get((column.environment, column.implementation), {}).get(dtype, "")
        maps = []
        for stage in dict.fromkeys(stages):
            computed, exact, bound = (
                kept.get((column.environment, of, stage)) for of in (column.implementation, EXACT, bound_name(name))
            )
            if computed is None or exact is None or bound is None or self._left <= 0:
                continue
            if not computed.shape == exact.shape == bound.shape:
                continue
            errors = error_ratio(computed, exact, bound)
            layout = layout_in(self._frames.cases[case], {"stage": stage, "shape": show(errors.shape)})
            words = describe_errors(errors, "error over bound", layout)
            compared = compared_matrices(computed, exact, errors, is_document=layout is not None)
            pictures = [] if compared else error_pictures(errors, f"Map of {stage}", is_document=layout is not None)
            maps.append(ErrorMap(stage, words, tuple(pictures), tuple(compared)))
            self._left -= sum(len(picture) for _, picture in pictures) + sum(each.letters for each in compared)
        return tuple(maps)
