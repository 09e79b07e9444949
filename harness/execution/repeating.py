"""Many calls of a few problems in one process, in some order: the distinct results of each problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import monotonic

import numpy as np

from attncheck.execution.padding import PaddedCall
from attncheck.execution.worker import (
    Computed,
    Failure,
    Observation,
    Outcome,
    evaluate_on_backend,
    get_started_backend,
    with_observations,
)
from attncheck.reading.problem import Problem

_MAX_DISTINCT = 64
"""Distinct results of a problem that are kept. A choice: a kernel that adds in random order has no end of them."""


@dataclass(frozen=True, eq=False)
class DistinctResult:
    """A result, and the positions, among all calls, of the calls that returned it bit by bit."""

    outcome: Outcome
    positions: list[int] = field(default_factory=list)

    def distance_from(self, first: DistinctResult) -> float:
        """Return the largest difference from another result; infinite if one of them is no number."""
        mine, other = self.outcome, first.outcome
        if not (isinstance(mine, Computed) and isinstance(other, Computed)):
            return float("inf")
        with np.errstate(all="ignore"):
            gaps = [
                np.abs(array.astype(np.float64) - other.stages[name].astype(np.float64)).max(initial=0.0)
                if name in other.stages and other.stages[name].shape == array.shape
                else np.inf
                for name, array in mine.stages.items()
            ]
        return float(max((np.inf if np.isnan(gap) else gap for gap in gaps), default=np.inf))


@dataclass(frozen=True)
class RepeatedCalls:
    """The distinct results by problem, how many calls were made, and what was observed around them.

    ``dropped`` counts the calls by problem whose results were not kept, as there were too many.
    """

    results: tuple[tuple[DistinctResult, ...], ...]
    call_count: int
    observations: tuple[Observation, ...]
    dropped: tuple[int, ...]

    def strip_padding(self, paddings: Sequence[object]) -> RepeatedCalls:
        """Return the results without what padded calls have more."""
        stripped = tuple(
            tuple(replace(item, outcome=padding.strip_padding(item.outcome)) for item in items)
            if isinstance(padding, PaddedCall)
            else items
            for padding, items in zip(paddings, self.results, strict=True)
        )
        return replace(self, results=stripped)


def repeat_calls(
    implementation: str, problems: Sequence[Problem], order: Sequence[int], seconds: float, log: str
) -> RepeatedCalls:
    """Make calls in some order, until they are done or so many seconds are over; the last call of each is made last."""
    backend, deadline = get_started_backend(implementation, log), monotonic() + seconds
    by_bits: list[dict[bytes, DistinctResult]] = [{} for _ in problems]
    observations: dict[str, Observation] = {}
    dropped, count, last = [0] * len(problems), 0, len(order) - len(problems)
    for number, problem_number in enumerate(order):
        if number < last and monotonic() > deadline:
            continue
        outcome = with_observations(backend, evaluate_on_backend(backend, problems[problem_number]))
        observations.update({item.behaviour: item for item in outcome.observations})
        if isinstance(outcome, Failure):
            bits = f"{outcome.verdict} {outcome.message}".encode()
        else:
            bits = b"".join(name.encode() + array.tobytes() for name, array in outcome.stages.items())
        results = by_bits[problem_number]
        if bits in results or len(results) < _MAX_DISTINCT or number >= last:
            results.setdefault(bits, DistinctResult(replace(outcome, observations=()))).positions.append(count)
        else:
            dropped[problem_number] += 1
        count += 1
    distinct = tuple(tuple(results.values()) for results in by_bits)
    return RepeatedCalls(distinct, count, tuple(observations.values()), tuple(dropped))
