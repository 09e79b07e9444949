"""The documents of what changed: between two results, and from release to release."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from attncheck.errors import ExitCode
from attncheck.reports.bisection import Bisection
from attncheck.reports.diff.difference import WORSE, Difference
from attncheck.reports.diff.text import sentences
from attncheck.reports.frames import Frames, records
from attncheck.reports.machine.documents import Row
from attncheck.reports.machine.failures import failures_of, first_of_each
from attncheck.reports.machine.other_documents import (
    BisectionDocument,
    DifferenceDocument,
    DifferenceRecord,
    ReleaseRecord,
)
from attncheck.reports.machine.text import header
from attncheck.reports.summary import what_is_wrong

_KEYS = ["environment", "implementation", "case", "dtype"]


def difference_document(difference: Difference, after: Frames) -> DifferenceDocument:
    """Return what changed between two results; what got worse with its numbers, of the frames ``after``."""
    worse = difference.verdicts[difference.verdicts["change"].eq(WORSE)]
    wrong = what_is_wrong(after)
    keys = [pd.MultiIndex.from_frame(frame[_KEYS].astype(object)) for frame in (wrong, worse)]
    failures = failures_of(after, wrong[keys[0].isin(keys[1])])
    return DifferenceDocument(
        attncheck=header("diff"),
        exit_code=int(difference.exit_code),
        answer=sentences(difference)[0],
        failures=failures,
        next=first_of_each(failures),
        notes=list(difference.notes),
        **_fields(difference),
    )


def _fields(difference: Difference) -> dict[str, Any]:
    return {
        "before": difference.before,
        "after": difference.after,
        "compared": difference.compared,
        "only": list(difference.only),
        "sentences": sentences(difference),
        **{name: rows_of(frame) for name, frame in difference.tables().items()},
    }


def rows_of(frame: pd.DataFrame) -> list[Row]:
    """Return a frame's rows; a cell without a value is None."""
    return [{str(key): _scalar(value) for key, value in row.items()} for row in records(frame)]


def _scalar(value: Any) -> Any:
    if isinstance(value, str):
        return value
    return None if pd.isna(value) else value


def bisection_document(found: Bisection, code: ExitCode) -> BisectionDocument:
    """Return what several releases gave."""
    return BisectionDocument(
        attncheck=header("bisect"),
        exit_code=int(code),
        answer=_answer(found),
        failures=[],
        next=[],
        notes=list(found.missed.values()),
        distribution=found.distribution,
        releases=[_release(row) for row in found.rows()],
        steps=[DifferenceRecord(**_fields(step)) for step in found.steps],
        missed=dict(found.missed),
    )


def _release(row: Mapping[str, Any]) -> ReleaseRecord:
    return ReleaseRecord(**row)


def _answer(found: Bisection) -> str:
    changed = [step.after for step in found.steps if len(step.verdicts)]
    if not changed:
        return "No release changed a verdict."
    return f"{found.distribution} changed verdicts in {', '.join(changed)}."
