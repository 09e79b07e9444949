"""How far every two implementations are from each other: a count of disagreements and the largest difference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from attncheck.reports.frames import Frames, expected_failures, failing, records
from attncheck.reports.html.text import Anchors
from attncheck.verdicts import Verdict

_NEAR = 0.1
"""Of what is allowed: pairs that differ by more are told apart, though they agree."""
_PAIR = ["environment", "implementation", "other_environment", "other"]


@dataclass(frozen=True)
class PairCell:
    """Two implementations: how many stages were compared, how many disagree, and the case where most."""

    compared: int
    disagree: int
    expected: int
    ratio: str
    state: str
    symbol: str
    case: str
    anchor: str
    label: str


@dataclass(frozen=True)
class PairTable:
    """Implementations against implementations; None on the diagonal and where nothing was compared."""

    titles: tuple[str, ...]
    rows: tuple[tuple[str, tuple[PairCell | None, ...]], ...]


def pair_table(frames: Frames, anchors: Anchors) -> PairTable | None:
    """Return the table of pairs, of those that were compared with any; None where no two were."""
    pairs = frames.pairs[frames.pairs["verdict"].ne(Verdict.UNVERIFIED)]
    if pairs.empty:
        return None
    many = len(frames.environments) > 1
    cells = _cells(pairs, anchors)
    compared = {key[:2] for key in cells} | {key[2:] for key in cells}
    columns = [column for column in frames.columns if (column.environment, column.implementation) in compared]
    keys = [(column.environment, column.implementation) for column in columns]
    titles = [column.title(with_environment=many) for column in columns]
    rows = [
        (title, tuple(cells.get((*one, *other)) or cells.get((*other, *one)) for other in keys))
        for title, one in zip(titles, keys, strict=True)
    ]
    return PairTable(tuple(titles), tuple(rows))


def _cells(pairs: pd.DataFrame, anchors: Anchors) -> dict[Any, PairCell]:
    bad, expected = failing(pairs), expected_failures(pairs)
    compared = pairs.groupby(_PAIR).size()
    disagree, xfailed = bad.groupby(_PAIR).size(), expected.groupby(_PAIR).size()
    worst = _worst(pairs.drop(expected.index))
    worst_expected = _worst(expected)
    return {
        key: _cell(int(number), int(disagree.get(key, 0)), int(xfailed.get(key, 0)), row, anchors)
        for key, number in compared.items()
        if (row := worst.get(key) or worst_expected.get(key) or {"case": "", "stage": "", "ratio": float("nan")})
    }


def _worst(pairs: pd.DataFrame) -> dict[Any, Mapping[str, Any]]:
    """Return the row with the largest ratio for every two; of disagreements without a number the first."""
    ordered = pairs.assign(_bad=pairs.index.isin(failing(pairs).index))
    ordered = ordered.sort_values(["_bad", "ratio"], ascending=False, kind="stable", na_position="last")
    first = ordered.drop_duplicates(_PAIR)
    return {tuple(row[name] for name in _PAIR): row for row in records(first)}


def _cell(compared: int, disagree: int, expected: int, worst: Mapping[str, Any], anchors: Anchors) -> PairCell:
    ratio, case = worst["ratio"], str(worst["case"])
    if disagree:
        state, symbol = "failing", "✗"
    elif expected:
        state, symbol = "xfail", "≈"
    else:
        state, symbol = ("near", "✓") if ratio > _NEAR else ("agree", "✓")
    return PairCell(
        compared=compared,
        disagree=disagree,
        expected=expected,
        ratio=f"{ratio:.2g} of the allowed" if not math.isnan(ratio) else "told by no number",
        state=state,
        symbol=symbol,
        case=case,
        anchor=anchors.case(case) if case in anchors.cases else "",
        label=f"{case} at {worst['stage']}" if case else "",
    )
