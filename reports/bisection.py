"""What several releases gave, one after the other, and what changed from each to the next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from attncheck.merge import merge_runs
from attncheck.reports.build_frames import make_frames
from attncheck.reports.diff.difference import BETTER, OTHER, WORSE, Difference, make_difference, outcomes
from attncheck.reports.diff.text import print_changes
from attncheck.reports.frames import Frames
from attncheck.reports.terminal import plain_console
from attncheck.results.reader import find_runs, read_runs


def read_frames(folder: Path) -> Frames:
    """Read the results of one release."""
    return make_frames(merge_runs(read_runs(find_runs([folder])), across=False))


@dataclass
class Bisection:
    """Releases of a distribution, oldest first, and the differences from each to the next that ran."""

    distribution: str
    releases: dict[str, Frames] = field(default_factory=dict)
    steps: list[Difference] = field(default_factory=list)
    missed: dict[str, str] = field(default_factory=dict)
    """Releases that could not be run, and why."""

    def add(self, version: str, frames: Frames) -> None:
        """Add what the next release gave. Raises ``UsageError`` where it has nothing in common with the one before."""
        if self.releases:
            before, earlier = list(self.releases.items())[-1]
            self.steps.append(make_difference(earlier, frames, (before, version)))
        self.releases[version] = frames

    def miss(self, version: str, why: str) -> None:
        """Note that a release could not be run; the one after it is compared with the one before."""
        self.missed[version] = why

    @property
    def made_worse(self) -> bool:
        """Whether any release failed where the one before did not."""
        return any((step.verdicts["change"] == WORSE).any() for step in self.steps)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each release: what came of its evaluations, and how that differs from the one before."""
        changes = {step.after: step.verdicts["change"].value_counts() for step in self.steps}
        for version, frames in self.releases.items():
            found = [outcome for outcome in outcomes(frames).values() if outcome.word]
            counts = changes.get(version)
            yield {
                "release": version,
                "right": sum(not outcome.level and outcome.word == "agree" for outcome in found),
                "failing": sum(bool(outcome.level) for outcome in found),
                "unsupported": sum(outcome.word == "unsupported" for outcome in found),
                **{each: None if counts is None else int(counts.get(each, 0)) for each in (WORSE, BETTER, OTHER)},
            }


def print_bisection(found: Bisection, console: Console | None = None) -> None:
    """Print a line for each release, and below it every verdict that one of them changed."""
    console = console or plain_console()
    table = Table(box=None, pad_edge=False, show_edge=False)
    for column in ("release", "right", "failing", "unsupported", WORSE, BETTER, OTHER):
        table.add_column(column, justify="left" if column == "release" else "right")
    for row in found.rows():
        values = ["-" if value is None else str(value) for value in row.values()]
        table.add_row(f"{found.distribution} {values[0]}", *values[1:])
    console.print(table)
    for step in found.steps:
        if len(step.verdicts):
            console.print(f"\n{found.distribution} {step.after} changed, against {step.before}:", soft_wrap=True)
            print_changes(console, step)
    if found.steps and not any(len(step.verdicts) for step in found.steps):
        console.print("No release changed a verdict.", soft_wrap=True)
    for why in found.missed.values():
        console.print(why, soft_wrap=True)
