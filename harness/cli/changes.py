"""What changed between two runs of somebody who edits a kernel: what fails now, what passes, what fails otherwise."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from attncheck.results.failed import Evaluation, failed_evaluations
from attncheck.results.format import Row
from attncheck.spec import DTYPES

MAX_LISTED = 20
"""Lines of one kind; the others are counted."""
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


@dataclass(frozen=True)
class Failing:
    """How an evaluation fails: its verdict, the stage where it goes wrong, and how many times its bound the error is.

    ``reason`` is what a whole evaluation that could not be made says of that.
    """

    verdict: str
    stage: str
    size: float | None = None
    reason: str = ""

    def __str__(self) -> str:
        at = f" at {self.stage}" if self.stage else ""
        size = "" if self.size is None else f", {self.size:.2g} times its bound"
        return f"{self.verdict}{at}{size}{f': {self.reason}' if self.reason else ''}"


States = Mapping[Evaluation, Failing]


def failing_evaluations(rows: Iterable[Row]) -> dict[Evaluation, Failing]:
    """Return how each failing evaluation fails, of the failing rows of a run."""
    rows = list(rows)
    rows_of = {(row.case, row.dtype, row.implementation, row.stage): row for row in reversed(rows)}
    found = {}
    for each in failed_evaluations(rows):
        row = rows_of.get((*each.key, each.stage))
        stage = (row.begins_at if row else None) or each.stage
        found[each.key] = Failing(each.verdict, stage, _size(row), _reason(row) if not stage else "")
    return found


def _size(row: Row | None) -> float | None:
    sizes = [size for size in (row.ratio, row.introduced_ratio) if size is not None] if row else []
    return next((size for size in sizes if math.isfinite(size)), None)


def _reason(row: Row | None) -> str:
    return _ADDRESS.sub("0x...", " ".join(row.message.split())) if row else ""


@dataclass(frozen=True)
class Changes:
    """What is otherwise than in the run before; ``unchanged`` evaluations fail as they did, or were not run again."""

    failing: States
    passing: States
    changed: Mapping[Evaluation, tuple[Failing, Failing]]
    unchanged: int

    @classmethod
    def between(cls, before: States, now: States, unfinished: Collection[Evaluation]) -> Changes:
        """Compare two runs.

        Args:
            before: What failed before.
            now: What failed in the run since.
            unfinished: What is known to fail after it, among it what it did not come to.
        """
        both = [key for key in before if key in now]
        changed = {key: (before[key], now[key]) for key in both if str(before[key]) != str(now[key])}
        passing = {key: found for key, found in before.items() if key not in now and key not in unfinished}
        return cls(
            failing={key: found for key, found in now.items() if key not in before},
            passing=passing,
            changed=changed,
            unchanged=len(before) - len(passing) - len(changed),
        )

    @property
    def is_empty(self) -> bool:
        """Whether everything is as before."""
        return not (self.failing or self.passing or self.changed)

    @property
    def headline(self) -> str:
        """Return how many evaluations there are of each kind."""
        counts = {
            "newly failing": len(self.failing),
            "newly passing": len(self.passing),
            "failing otherwise": len(self.changed),
            "failing as before": self.unchanged,
        }
        said = [f"{count:,} {kind}" for kind, count in counts.items() if count]
        is_well = not (self.failing or self.changed or self.unchanged)
        return ", ".join(
            [*(["nothing changed"] if self.is_empty else []), *said, *(["nothing fails"] if is_well else [])]
        )

    def lines(self) -> Iterator[str]:
        """Give a line for each case on an implementation that is otherwise than before, dtypes together."""
        yield from _listed("newly failing", {key: str(found) for key, found in self.failing.items()})
        yield from _listed("newly passing", {key: f"was {found}" for key, found in self.passing.items()})
        both = self.changed.items()
        yield from _listed("failing otherwise", {key: f"{now}; was {before}" for key, (before, now) in both})


def _listed(kind: str, found: Mapping[Evaluation, str]) -> Iterator[str]:
    together: dict[tuple[str, str, str], list[str]] = {}
    for (case, dtype, implementation), text in found.items():
        together.setdefault((implementation, case, text), []).append(dtype)
    for (implementation, case, text), dtypes in list(together.items())[:MAX_LISTED]:
        yield f"{kind}: {implementation}: {case} [{', '.join(_in_order(dtypes))}]: {text}"
    if (more := len(together) - MAX_LISTED) > 0:
        yield f"{kind}: and {more:,} more"


def _in_order(dtypes: Sequence[str]) -> list[str]:
    return [dtype for dtype in DTYPES if dtype in dtypes]


def remembered(before: States, now: States, unfinished: Collection[Evaluation]) -> dict[Evaluation, Failing]:
    """Return what the next run is compared with: what fails now, and what failed before and was not run again."""
    return {**{key: found for key, found in before.items() if key in unfinished}, **now}
