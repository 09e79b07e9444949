"""The share of the requested cases that was judged, and the minimum that it has to reach.

A case counts as judged on an implementation if, in any dtype, a stage was compared with the exact answer, or a number
is wrong. A case that is unsupported, raised an error, or has no exact answer does not count: it must not look green.
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

MINIMUM_PATTERN = re.compile(r"([0-9]{1,9})|([0-9]{1,3}(?:\.[0-9]{1,3})?) ?%")
"""A number of cases, or a share of those asked for."""


@dataclass(frozen=True)
class MinimumJudged:
    """The fewest cases in which every implementation has to be judged: a number, or percent of those asked for."""

    number: float
    is_share: bool

    @classmethod
    def parse(cls, text: str | int, where: str) -> MinimumJudged:
        """Read 20 or 80%. Raises ``UsageError``, whose message begins with ``where``, the option or field.

        Example:
            >>> MinimumJudged.parse("80%", "min_judged").is_reached(judged=79, asked=100)
            False
            >>> MinimumJudged.parse(20, "min_judged").is_reached(judged=20, asked=100)
            True
        """
        match = MINIMUM_PATTERN.fullmatch(str(text).strip()) if not isinstance(text, bool) else None
        if match is None or float(match[2] or 0) > 100:
            raise UsageError(f"{where}: expected a number of cases, such as 20, or a share, such as 80%; got {text!r}")
        return cls(float(match[1] or match[2]), match[2] is not None)

    def is_reached(self, judged: int, asked: int) -> bool:
        """Return whether so many of the requested cases are enough."""
        return 100 * judged >= self.number * asked if self.is_share else judged >= self.number

    def __str__(self) -> str:
        return f"{self.number:g}%" if self.is_share else f"{self.number:.0f}"


SELECTING_OPTIONS = ("cases", "tags", "dtypes", "match", "failed", "searched")
"""The ways to narrow the cases of a run: paths and globs, tags, dtypes, an expression, the failures of the last run,
and the problems of a search."""


@dataclass(frozen=True)
class EarlyStop:
    """The early end of a run after some failing cases.

    ``not_run`` counts the cases that were not judged in any dtype, ``in_part`` those that ran only in some
    dtypes.
    """

    failing: int
    not_run: int
    in_part: int = 0

    def describe(self, cases: int) -> str:
        """Describe the stop, of a run of so many cases.

        Example:
            >>> EarlyStop(failing=1, not_run=7).describe(40)
            'the run was stopped after 1 failing case: 7 of 40 cases were not run'
        """
        in_part = f", and {self.in_part:,} not in all of its dtypes" if self.in_part else ""
        verb = "was" if self.not_run == 1 else "were"
        return (
            f"the run was stopped after {self.failing:,} failing case{'' if self.failing == 1 else 's'}: "
            f"{self.not_run:,} of {cases:,} cases {verb} not run{in_part}"
        )


@dataclass(frozen=True)
class RequestedRun:
    """The request of a run: how many cases, which implementations by name, and how many it has to judge at least.

    ``case_selection`` are the values of ``PICKED`` that narrowed the cases. ``stopped`` is set if the run ended early.
    ``user_implementations`` are users' implementations, ``conventions`` their declarations by name,
    ``suggested_declarations`` declarations that would let them be judged in more cases, and ``similar_known_failures``
    functions of their frameworks that are known to fail as they do. ``confirmed_features`` are the features of failing
    cases that further problems confirmed.
    """

    cases: int
    requested_by_name: tuple[str, ...] = ()
    minimum_judged: MinimumJudged | None = None
    case_selection: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stopped: EarlyStop | None = None
    user_implementations: tuple[str, ...] = ()
    suggested_declarations: Mapping[str, str] = field(default_factory=dict)
    conventions: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    similar_known_failures: Mapping[str, str] = field(default_factory=dict)
    confirmed_features: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, Any], cases: int, stopped: EarlyStop | None = None
    ) -> RequestedRun:
        """Read the request of a run from environment.json."""
        asked = environment.get("asked", {})
        minimum = asked.get("min_judged")
        return cls(
            cases,
            tuple(asked.get("by_name", ())),
            None if minimum is None else MinimumJudged.parse(minimum, "min_judged"),
            {name: tuple(asked[name]) for name in SELECTING_OPTIONS if asked.get(name)},
            stopped,
            tuple(asked.get("own", ())),
            dict(asked.get("widens", {})),
            dict(asked.get("conventions", {})),
            dict(asked.get("alike", {})),
            dict(asked.get("confirmed", {})),
        )

    def is_hardly_judged(self, name: str, judged: int, not_offered: int) -> bool:
        """Return whether a user's implementation was judged in less than a tenth of the cases that it offers.

        False if the user gave a minimum, which then decides.
        """
        offered = self.cases - not_offered
        return (
            name in self.user_implementations
            and self.minimum_judged is None
            and self.stopped is None
            and 0 < judged < offered / 10
        )


def is_judged(row: Row) -> bool:
    """Return whether a row counts its case as judged. A right number does not: it may be equal by chance."""
    if row.comparison == "stage":
        return bool(row.stage) and row.verdict != Verdict.UNVERIFIED
    return row.comparison != "pair" and row.verdict not in (Verdict.AGREE, Verdict.UNVERIFIED)


def is_function_missing(lacks: str) -> bool:
    """Return whether a case lacks the function of its operation, as ``UnsupportedError.of_function`` writes it."""
    return lacks.endswith("()")


def is_function_or_dtype_missing(lacks: str) -> bool:
    """Return whether a case lacks the function of its operation, or only this dtype."""
    return is_function_missing(lacks) or lacks in DTYPES


def shortfall_sentences(judged: Mapping[str, int], request: RequestedRun, not_offered: Mapping[str, int]) -> list[str]:
    """Describe every shortfall of a run; ``judged`` counts the cases of each implementation.

    The run as a whole, and an implementation that was requested by name, have to be judged in at least one case. The
    minimum, if there is one, applies to every implementation, as a share of the cases that it offers:
    ``not_offered`` counts the cases of other operations, and those only in other dtypes. A run that was
    stopped has only that line.
    """
    if request.stopped is not None:
        return [request.stopped.describe(request.cases)]
    if not judged or not request.cases:
        return []
    if not any(judged.values()):
        return [f"no implementation was judged in {_requested_cases_text(request)}"]
    absent = {name: not_offered.get(name, 0) for name in judged}
    return [line for name, count in judged.items() if (line := _shortfall_sentence(name, count, request, absent[name]))]


def _shortfall_sentence(name: str, judged: int, request: RequestedRun, not_offered: int) -> str:
    minimum = request.minimum_judged
    offered = (request.cases - not_offered) or request.cases
    if minimum is not None and not minimum.is_reached(judged, offered):
        of = f"{offered:,} cases" if offered == request.cases else f"the {offered:,} cases of what it offers"
        return f"{name} was judged in {judged:,} of {of}; at least {minimum} have to be (min_judged)"
    if request.is_hardly_judged(name, judged, not_offered):
        few = f"{name} was judged in {judged:,} of {offered:,} cases of what it offers, less than a tenth"
        advice = f"; {request.suggested_declarations[name]}" if name in request.suggested_declarations else ""
        return f"{few} (--min-judged {judged} accepts that){advice}"
    if not judged and name in request.requested_by_name:
        return f"{name} was asked for by name and not judged in {_requested_cases_text(request)}"
    return ""


def _requested_cases_text(request: RequestedRun) -> str:
    return "the only case" if request.cases == 1 else f"any of the {request.cases:,} cases"
