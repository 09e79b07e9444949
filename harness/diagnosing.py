"""What a run's failing cases say together of each implementation: the verdicts and messages that its rows have then.

A row is written when its case is judged, and names what that case alone can name. Only the whole run knows whether
another case refutes it. So rows are retold when they are read, and when a run is summed up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from attncheck.judging.diagnosis import Decision, Plain, bring_together, reworded, unpack
from attncheck.results.format import ROW_SCHEMA, Row

if TYPE_CHECKING:
    import pandas as pd

Unit = tuple[str, str]
"""case, dtype"""


def reworded_rows(rows: Sequence[Row]) -> list[Row]:
    """Retell the failing rows of one run."""
    carried = [None if row.xfail or row.evidence is None else unpack(row.evidence) for row in rows]
    decisions = bring_together(
        (row.implementation, (row.case, row.dtype), found[0])
        for row, found in zip(rows, carried, strict=True)
        if found is not None and row.comparison == "stage"
    )
    changed = []
    for row, found in zip(rows, carried, strict=True):
        decision = decisions.get((row.implementation, (row.case, row.dtype)))
        changed.append(row if found is None or decision is None else _reworded(row, decision, found[1]))
    return changed


def _reworded(row: Row, decision: Decision, plain: Plain) -> Row:
    is_stage = row.comparison == "stage"
    changed = reworded(decision, plain, row.message, follows=not is_stage)
    if changed is None:
        return row
    begins_at = (changed.begins_at or None) if is_stage else row.begins_at
    return replace(
        row, verdict=changed.verdict, message=changed.message, begins_at=begins_at, diagnosis=changed.diagnosis
    )


def reworded_frame(rows: pd.DataFrame) -> pd.DataFrame:
    """Retell the rows of several runs, each implementation of each environment by its own cases."""
    carrying = rows[rows["evidence"].notna() & ~rows["xfail"].astype(bool)]
    if carrying.empty:
        return rows
    before: list[Row] = []
    after: list[Row] = []
    for _, part in carrying.groupby("environment", sort=False):
        own = _records(part)
        before, after = [*before, *own], [*after, *reworded_rows(own)]
    order = carrying.groupby("environment", sort=False).indices
    index = carrying.index[[index_of_row for indices in order.values() for index_of_row in indices]]
    changed = [(where, new) for where, old, new in zip(index, before, after, strict=True) if new is not old]
    for column in ("verdict", "message", "begins_at", "diagnosis") if changed else ():
        whole = rows[column].astype(object)
        values = [getattr(new, column) for _, new in changed]
        whole.loc[[where for where, _ in changed]] = [None if value is None else str(value) for value in values]
        rows[column] = whole.astype(rows[column].dtype)
    return rows


def _records(rows: pd.DataFrame) -> list[Row]:
    kept = rows[list(ROW_SCHEMA.names)].to_dict("records")
    return [Row(**{str(name): value for name, value in record.items()}) for record in kept]


def counted_again(counts: Mapping[str, int], before: Iterable[Row], after: Iterable[Row]) -> Counter[str]:
    """Count verdicts again of which some are told otherwise."""
    found = Counter(counts)
    for old, new in zip(before, after, strict=True):
        found[old.verdict] -= 1
        found[new.verdict] += 1
    return found
