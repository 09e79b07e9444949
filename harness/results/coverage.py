"""The share of the requested cases that was judged, and the minimum that it has to reach.

A case counts as judged on an implementation where, in any dtype, a stage of it was compared with the exact answer, or a
number is wrong. One that is unsupported, raised, or has no exact answer does not: nothing is green that was not judged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from attncheck.common.errors import UsageError
from attncheck.results.format import Row
from attncheck.spec import DTYPES
from attncheck.spec.verdicts import Verdict

MINIMUM = re.compile(r"([0-9]{1,9})|([0-9]{1,3}(?:\.[0-9]{1,3})?) ?%")
"""A number of cases, or a share of those asked for."""


@dataclass(frozen=True)
class Minimum:
    """The fewest cases in which every implementation has to be judged: a number, or percent of those asked for."""

    number: float
    is_share: bool

    @classmethod
    def of(cls, given: str | int, where: str) -> Minimum:
        """Read 20 or 80%. Raises ``UsageError``, which names ``where`` it stands."""
        found = MINIMUM.fullmatch(str(given).strip()) if not isinstance(given, bool) else None
        if found is None or float(found[2] or 0) > 100:
            raise UsageError(f"{where}: expected a number of cases, such as 20, or a share, such as 80%; got {given!r}")
        return cls(float(found[1] or found[2]), found[2] is not None)

    def is_reached(self, judged: int, asked: int) -> bool:
        """Return true if so many of the cases that were asked for are enough."""
        return 100 * judged >= self.number * asked if self.is_share else judged >= self.number

    def __str__(self) -> str:
        return f"{self.number:g}%" if self.is_share else f"{self.number:.0f}"


PICKED = ("cases", "tags", "dtypes", "match", "failed", "searched")
"""The ways to narrow the cases of a run: paths and globs, tags, dtypes, an expression, the failures of last time, and
what a search drew."""


@dataclass(frozen=True)
class Stop:
    """The end of a run that was to stop after some failing cases.

    ``not_run`` counts the cases of which nothing was judged any more, ``in_part`` those that ran in some of their
    dtypes alone.
    """

    failing: int
    not_run: int
    in_part: int = 0

    def of(self, cases: int) -> str:
        """Describe the stop, of a run of so many cases."""
        in_part = f", and {self.in_part:,} not in all of its dtypes" if self.in_part else ""
        verb = "was" if self.not_run == 1 else "were"
        return (
            f"the run was stopped after {self.failing:,} failing case{'' if self.failing == 1 else 's'}: "
            f"{self.not_run:,} of {cases:,} cases {verb} not run{in_part}"
        )


@dataclass(frozen=True)
class RequestedRun:
    """The request of a run: how many cases, which implementations by name, and how many it has to judge at least.

    ``picked`` says what the cases were narrowed by, of ``PICKED``. ``stopped`` is there where not all of them were run.
    ``own`` are users' implementations, ``conventions`` what they declare, by name, and ``widens`` says how some of them
    would be judged in more, ``alike`` which functions of their frameworks are known to fail as they do. ``confirmed``
    are the features of failing cases that further problems bore out.
    """

    cases: int
    by_name: tuple[str, ...] = ()
    minimum: Minimum | None = None
    picked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stopped: Stop | None = None
    own: tuple[str, ...] = ()
    widens: Mapping[str, str] = field(default_factory=dict)
    conventions: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    alike: Mapping[str, str] = field(default_factory=dict)
    confirmed: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, environment: Mapping[str, Any], cases: int, stopped: Stop | None = None) -> RequestedRun:
        """Read what environment.json says of a run."""
        asked = environment.get("asked", {})
        minimum = asked.get("min_judged")
        return cls(
            cases,
            tuple(asked.get("by_name", ())),
            None if minimum is None else Minimum.of(minimum, "min_judged"),
            {name: tuple(asked[name]) for name in PICKED if asked.get(name)},
            stopped,
            tuple(asked.get("own", ())),
            dict(asked.get("widens", {})),
            dict(asked.get("conventions", {})),
            dict(asked.get("alike", {})),
            dict(asked.get("confirmed", {})),
        )

    def is_hardly_judged(self, name: str, judged: int, not_offered: int) -> bool:
        """Return true of a user's implementation that was judged in so few cases of what it offers that it is unknown.

        Nobody asked for a minimum; a tenth is one that everybody expects.
        """
        offered = self.cases - not_offered
        return name in self.own and self.minimum is None and self.stopped is None and 0 < judged < offered / 10


def is_judged(row: Row) -> bool:
    """Return true if a row says that its case was judged. A number that holds says less: it may be equal by chance."""
    if row.comparison == "stage":
        return bool(row.stage) and row.verdict != Verdict.UNVERIFIED
    return row.comparison != "pair" and row.verdict not in (Verdict.AGREE, Verdict.UNVERIFIED)


def lacks_function(lacks: str) -> bool:
    """Return whether a case lacks the function of its operation, as ``UnsupportedError.of_function`` says it."""
    return lacks.endswith("()")


def is_not_offered(lacks: str) -> bool:
    """Return whether a case lacks the function of its operation, or the dtype, which says nothing of other dtypes."""
    return lacks_function(lacks) or lacks in DTYPES


def shortfalls(judged: Mapping[str, int], asked: RequestedRun, not_offered: Mapping[str, int]) -> list[str]:
    """Describe where less was judged than was asked for; ``judged`` counts the cases of each implementation.

    An implementation that was asked for by name has to be judged in a case, and so has the run as a whole. The minimum,
    where there is one, is that of every implementation, of the cases of what it offers: ``not_offered`` counts those of
    other operations, and those in other dtypes alone. Of a run that was stopped, that is all there is to say.
    """
    if asked.stopped is not None:
        return [asked.stopped.of(asked.cases)]
    if not judged or not asked.cases:
        return []
    if not any(judged.values()):
        return [f"no implementation was judged in {_any(asked)}"]
    absent = {name: not_offered.get(name, 0) for name in judged}
    return [line for name, count in judged.items() if (line := _shortfall(name, count, asked, absent[name]))]


def _shortfall(name: str, judged: int, asked: RequestedRun, not_offered: int) -> str:
    minimum = asked.minimum
    offered = (asked.cases - not_offered) or asked.cases
    if minimum is not None and not minimum.is_reached(judged, offered):
        of = f"{offered:,} cases" if offered == asked.cases else f"the {offered:,} cases of what it offers"
        return f"{name} was judged in {judged:,} of {of}; at least {minimum} have to be (min_judged)"
    if asked.is_hardly_judged(name, judged, not_offered):
        few = f"{name} was judged in {judged:,} of {offered:,} cases of what it offers, less than a tenth"
        return f"{few} (--min-judged {judged} accepts that){f'; {asked.widens[name]}' if name in asked.widens else ''}"
    if not judged and name in asked.by_name:
        return f"{name} was asked for by name and not judged in {_any(asked)}"
    return ""


def _any(asked: RequestedRun) -> str:
    return "the only case" if asked.cases == 1 else f"any of the {asked.cases:,} cases"
