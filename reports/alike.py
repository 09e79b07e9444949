"""What went wrong alike in many cases, shown once with a count: an error that has nothing to do with the case."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from attncheck.errors import ExitCode
from attncheck.reports.frames import records
from attncheck.spec import DTYPES
from attncheck.verdicts import Verdict


@dataclass(frozen=True)
class AlikeRows:
    """The first of some rows of ``what_is_wrong`` that say the same, and the cases and dtypes of all of them."""

    row: Mapping[str, Any]
    cases: tuple[str, ...]
    dtypes: tuple[str, ...]
    evaluations: int
    rows: int
    """How many comparisons fail in all of them."""
    cause: str = ""
    """What is wrong, where all of them were diagnosed alike."""

    @property
    def others(self) -> int:
        """How many further cases there are."""
        return len(self.cases) - 1


@dataclass
class _Group:
    row: Mapping[str, Any]
    evaluations: list[tuple[str, str]] = field(default_factory=list)
    rows: int = 0
    cause: str = ""

    def add(self, row: Mapping[str, Any]) -> None:
        self.evaluations.append((row["case"], row["dtype"]))
        self.rows += row["rows"]

    def summarised(self) -> AlikeRows:
        cases, dtypes = (dict.fromkeys(of) for of in zip(*self.evaluations, strict=True))
        ordered = tuple(sorted(dtypes, key=_dtype_order))
        return AlikeRows(self.row, tuple(cases), ordered, len(self.evaluations), self.rows, self.cause)


def group_alike(wrong: pd.DataFrame) -> list[AlikeRows]:
    """Put rows together that give one reason why an implementation could not be run; the others stand alone."""
    groups: dict[tuple[object, ...], _Group] = {}
    for number, row in enumerate(records(wrong)):
        alike = tuple(row[name] for name in ("environment", "implementation", "verdict", "message"))
        key = alike if _could_not_run(row) else (number,)
        groups.setdefault(key, _Group(row)).add(row)
    return [group.summarised() for group in groups.values()]


def group_faults(wrong: pd.DataFrame, causes: Iterable[str]) -> list[AlikeRows]:
    """Put rows together that have one cause, or none and one verdict and stage, or reason why nothing could be run.

    What a document or a record says wrongly stands alone.
    """
    groups: dict[tuple[object, ...], _Group] = {}
    for number, (row, cause) in enumerate(zip(records(wrong), causes, strict=True)):
        kind = (cause,) if cause else (row["verdict"], row["stage"] or row["message"])
        is_alone = row["verdict"] == Verdict.XPASS or not row["dtype"]
        key = (number,) if is_alone else (row["environment"], row["implementation"], *kind)
        groups.setdefault(key, _Group(row, cause=cause)).add(row)
    return [group.summarised() for group in groups.values()]


def group_by_case(wrong: pd.DataFrame) -> list[AlikeRows]:
    """Put the dtypes of a case together, too, the first of ``DTYPES`` first, for whoever shows one number of each."""
    groups: dict[tuple[object, ...], _Group] = {}
    for row in sorted(records(wrong), key=lambda row: _dtype_order(row["dtype"])):
        reason = (row["verdict"], row["message"]) if _could_not_run(row) else (row["case"], "")
        groups.setdefault((row["environment"], row["implementation"], *reason), _Group(row)).add(row)
    order = {case: number for number, case in enumerate(wrong["case"].drop_duplicates())}
    return [group.summarised() for group in sorted(groups.values(), key=lambda group: order[group.row["case"]])]


def count_evaluations(groups: Iterable[AlikeRows]) -> int:
    """Return how many evaluations they stand for."""
    return sum(each.evaluations for each in groups)


def _could_not_run(row: Mapping[str, Any]) -> bool:
    return not row["stage"] and Verdict(row["verdict"]).exit_code is ExitCode.NOT_RUN


def _dtype_order(dtype: str) -> int:
    return DTYPES.index(dtype) if dtype in DTYPES else len(DTYPES)
