"""All other readings of one case in one dtype: each worked out once, when the first implementation that fails needs it.

A reading is an alternative to what the case says: a convention, a mistake, another step. A truth keeps what they come
to, so that the next implementation that fails the same case is compared with all of them at little cost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from attncheck.judging.alternatives import Alternative
from attncheck.judging.conventions import conventions_of
from attncheck.judging.departures import departures_of
from attncheck.judging.lowered_readings import readings_before_lowering
from attncheck.judging.mistakes import mistakes_of
from attncheck.judging.residuals import Approximation, approximate, residual
from attncheck.judging.truth import Stages, Truth, find_truth
from attncheck.reading.canonical import AttentionProblem, call_form

_OF_HEADS = ("heads", "kv_heads")


@dataclass(eq=False)
class Readings:
    """The readings of a case, with what they come to as far as anybody has asked."""

    truth: Truth
    posed: AttentionProblem
    _approximate: dict[Alternative, Approximation] = field(default_factory=dict)
    _truths: dict[tuple[Alternative, str, frozenset[str]], Truth | None] = field(default_factory=dict)
    _apart: dict[tuple[Alternative, frozenset[str]], float] = field(default_factory=dict)

    @classmethod
    def of(cls, truth: Truth, posed: AttentionProblem) -> Readings:
        """Return the readings of a truth, those that it has if it has any."""
        found: Readings = truth._readings.setdefault("all", cls(truth, posed))
        return found

    @cached_property
    def alternatives(self) -> tuple[Alternative, ...]:
        """Conventions first, then mistakes and steps."""
        operation, called = self.truth.operation, self.truth.as_called
        if called is not None:  # first, for what it was lowered to has options that nobody was asked for
            return (*readings_before_lowering(*called), *_made_of(operation, self.posed))
        return (*_made_of(operation, self.posed), *_of_delivered_mask(operation, self.posed))

    @cached_property
    def own(self) -> Approximation:
        """The case itself in float64."""
        return approximate(self.truth.operation, self.posed)

    def is_open(self, alternative: Alternative) -> bool:
        """Whether no distance says how near a reading is: float64 NumPy cannot do it."""
        return alternative.departs is not None or "softcap_follows" in alternative.posed.options

    def residual(self, alternative: Alternative, returned: Stages) -> float:
        """Return how far stages are from a reading."""
        return residual(self.approximation(alternative), returned, alternative.stage_aliases)

    def approximation(self, alternative: Alternative) -> Approximation:
        """Return a reading in float64."""
        if alternative not in self._approximate:
            self._approximate[alternative] = approximate(self.truth.operation, alternative.posed)
        return self._approximate[alternative]

    def separation(self, alternative: Alternative, stages: frozenset[str]) -> float:
        """Return how far the exact answer itself is from a reading, at some stages."""
        key = alternative, stages
        if key not in self._apart:
            exact = {stage: self.truth.exact[stage].high for stage in stages}
            self._apart[key] = self.residual(alternative, exact)
        return self._apart[key]

    def truth_of(self, alternative: Alternative, rounding_model: str, failing: Stages) -> Truth | None:
        """Return the exact answer of a reading; None where it has none."""
        if alternative.departs is None:
            key = alternative, "", frozenset[str]()
        else:
            key = alternative, rounding_model, frozenset(failing)
        if key not in self._truths:
            self._truths[key] = (
                truth_of(self.truth, alternative)
                if alternative.departs is None
                else alternative.departs(self.truth, rounding_model, failing)
            )
        return self._truths[key]


def _made_of(operation: str, posed: AttentionProblem) -> Iterator[Alternative]:
    makers = (conventions_of, mistakes_of, departures_of)
    return (each for make in makers for each in make(operation, posed))


def _of_delivered_mask(operation: str, posed: AttentionProblem) -> Iterator[Alternative]:
    """Yield what may be done to a mask that only the call has: of queries, or of positions that no argument tells."""
    asked = call_form(operation, posed.options, posed.inputs)
    mask = asked.inputs.get("mask")
    if mask is None or mask is posed.inputs.get("mask"):
        return
    kept = {name: posed.options[name] for name in ("empty_rows", *_OF_HEADS) if name in posed.options}
    asked = AttentionProblem({**asked.options, **kept}, asked.inputs)
    yield from (each for each in _made_of(operation, asked) if each.name.startswith("mask-") and not each.departs)


def truth_of(own: Truth, convention: Alternative) -> Truth:
    """Evaluate the exact answer of a reading, on the rows that are judged of the case."""
    posed = convention.posed
    whole, returned = own.query_rows is None, own.exact if own.inner else None
    found = find_truth(
        own.operation,
        posed.options,
        posed.inputs,
        own.dtype,
        supports_statistics=own.supports_statistics,
        whole=whole,
        returned=returned,
        store=own.store,
    )
    return found.with_wide_statistics() if own.has_wide_statistics else found


def relative_bound(truth: Truth, stages: Collection[str], rounding_model: str) -> float:
    """Return the mean bound of stages over their mean size, the largest of them."""
    largest, bounds = 0.0, truth.bounds(rounding_model)
    for stage in stages:
        exact, max_error = truth.exact[stage].high, bounds[stage].max_error
        judged = np.isfinite(exact) & np.isfinite(max_error)
        with np.errstate(over="ignore", invalid="ignore"):  # beyond float64's range nothing is near
            size, allowed = np.abs(exact[judged]).sum(), max_error[judged].sum()
            if size > 0:
                largest = max(largest, float(np.nan_to_num(allowed / size, posinf=0.0)))
    return largest
