"""What the commands offer somebody who changes a kernel and looks again: narrow a run, order it, end it early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from attncheck.errors import UsageError

if TYPE_CHECKING:
    from attncheck.reading.selection import Selection
    from attncheck.results.narrowing import Narrowed


@dataclass(frozen=True)
class Iteration:
    """How a run is narrowed, ordered and ended for somebody who changes a kernel and looks again."""

    match: str | None = None
    failed: bool = False
    failed_first: bool = False
    exitfirst: bool = False
    maxfail: int | None = None
    all_cases: bool = False
    standard: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.all_cases and self.standard:
            raise UsageError("--all-cases leaves no case out, --standard runs some alone: give one")
        if self.failed and self.failed_first:
            raise UsageError("--failed runs what failed last time alone, --failed-first before the rest: give one")

    @property
    def max_failures(self) -> int | None:
        """After how many failing cases a run is stopped."""
        return 1 if self.exitfirst else self.maxfail


def narrow(
    selection: Selection, iteration: Iteration, dtypes: list[str], names: list[str], output: Path, *, resume: bool
) -> Narrowed:
    """Return the cases that run: all that are selected, or what failed last time alone or before the rest."""
    from attncheck.results.narrowing import Narrowed, failed_alone, failed_first

    if iteration.failed:
        return failed_alone(selection.cases, dtypes, names, output, resume=resume)
    if iteration.failed_first:
        return failed_first(selection.cases, dtypes, names, output)
    return Narrowed(selection.cases, None, "")
