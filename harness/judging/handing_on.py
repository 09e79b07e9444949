"""Readings that simpler cases have named, tried on another failing case without the oracle.

In the place of the exact answer of a reading stand its stages in float64, and what float64 may be off by beside them.
So a reading that is handed on fits as it would there: every element of every stage is as near to it as an
implementation of its class has to be, and float64 once more, and it is another answer than the case's own. No
statistics are asked. What this cannot tell is for ``case_diagnosis.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.enclosure import Enclosure
from attncheck.attention.rounding import FORMATS
from attncheck.judging.alternatives import Alternative, empty_row_conventions
from attncheck.judging.diagnosis import ACCURACY
from attncheck.judging.judge_stages import agrees
from attncheck.judging.mistakes import with_bias_times
from attncheck.judging.readings import Readings
from attncheck.judging.residuals import approximate_stages
from attncheck.judging.scales import has_scale, scales_in_words
from attncheck.judging.truth import Truth, unsolved_truth, with_special_rows
from attncheck.judging.wrong_result import WrongResult, does_fit, fitted_numbers, judge_accuracy, with_scale_times
from attncheck.reading.case import Case
from attncheck.reading.inputs import Inputs
from attncheck.reading.lowering import AttentionProblem

Stages = Mapping[str, NDArray[Any]]

_MAX_ROOT = 16
"""A fitted factor that is, except for roundings, the root of a whole number up to this, or one over it, is that."""
_NEARLY = 2.0**-18


@dataclass(frozen=True)
class FailingCase:
    """A case in a dtype as an implementation fails it: the stages that fail, and those that are ``right``."""

    case: Case
    dtype: str
    inputs: Inputs
    failing: Stages
    right: Stages
    rounding_model: str

    def explained_by(self, names: Mapping[str, float | None]) -> list[Alternative]:
        """Return those of some readings that explain the case; a name has a factor where a number was fitted."""
        if not self.own.exact or not self.failing.keys() <= self.own.exact.keys():
            return []
        found = {each.name: each for each in reversed(list(filter(self._fits, self._possible(names))))}
        for fitted in fitted_numbers(self.own, self._posed, self.failing) if names.keys() - found.keys() else ():
            if fitted.name in names and fitted.name not in found and self._fits(fitted):
                found[fitted.name] = fitted
        return list(found.values())

    @cached_property
    def own(self) -> Truth:
        """The case itself, in float64."""
        options, inputs = self.case.options, self.inputs.arrays
        return self._approximate(self.case.operation, AttentionProblem(dict(options), dict(inputs)))

    @property
    def _posed(self) -> AttentionProblem:
        assert self.own.posed is not None
        return self.own.posed

    def _possible(self, names: Mapping[str, float | None]) -> Iterator[Alternative]:
        truth, posed = self.own, self._posed
        for each in Readings.of(truth, posed).alternatives:
            if each.name in names and not self._is_open(each):
                yield each
        yield from (each for each in empty_row_conventions(truth.operation, posed) if each.name in names)
        scale, bias = names.get("scale-fitted"), names.get("bias-fitted")
        if scale is not None and has_scale(truth.operation, posed):
            yield with_scale_times(truth.operation, posed, as_root(scale))
        if bias is not None and "bias" in posed.inputs:
            yield with_bias_times(posed, bias, scales_in_words(bias, 1.0)[0])
        if any(name.startswith(ACCURACY) for name in names):
            accuracy, _ = judge_accuracy(truth, posed, self.failing, self.rounding_model, agrees)
            yield from () if accuracy is None else (accuracy,)

    def _is_open(self, reading: Alternative) -> bool:
        """Whether float64 NumPy cannot do it."""
        return reading.departs is None and "softcap_follows" in reading.posed.options

    def _fits(self, reading: Alternative) -> bool:
        if reading.name.startswith(ACCURACY):
            return True
        if reading.departs is None:
            other: Truth | None = self._approximate(self.own.operation, reading.posed)
        else:
            other = reading.departs(self.own, self.rounding_model, self.failing)
        if other is None:
            return False
        arrays = {reading.stage_aliases.get(stage, stage): array for stage, array in self.failing.items()}
        have_shapes = all(stage in other.exact and other.exact[stage].shape == of.shape for stage, of in arrays.items())
        return have_shapes and does_fit(self._wrong, reading, other)

    @cached_property
    def _wrong(self) -> WrongResult:
        return WrongResult(self.own, self._posed, self.failing, self.rounding_model, self.right)

    def _approximate(self, operation: str, posed: AttentionProblem) -> Truth:
        """Return a truth whose exact answer is the one in float64; none where numbers of the problem are not finite."""
        base, plain = unsolved_truth(
            operation, posed.options, posed.inputs, self.dtype, supports_statistics=False, whole=True
        )
        stages = approximate_stages(base.operation, AttentionProblem(dict(base.options), dict(base.inputs)))
        rough = replace(base, exact={stage: _enclosed(array.astype(np.float64)) for stage, array in stages.items()})
        if any(self.failing.keys() - stages.keys()):
            return base
        bounds = rough.bounds(self.rounding_model)
        share = 2 * FORMATS["float64"].unit_roundoff / FORMATS[self.dtype].unit_roundoff
        exact = {
            stage: replace(found, radius=np.where(known, share * bounds[stage].max_error, found.radius))
            for stage, found in rough.exact.items()
            for known in [(found.radius == 0) & np.isfinite(found.high) & np.isfinite(bounds[stage].max_error)]
        }
        solved = with_special_rows(replace(rough, exact=exact), plain)
        wide = any(solved._is_wide(stage, array) for stage, array in {**self.failing, **self.right}.items())
        return solved.with_wide_statistics() if wide else solved


def as_root(factor: float) -> float:
    """Return the root of a small whole number, or one over it, for a number that is nearly that."""
    roots = [math.sqrt(number) for number in range(2, _MAX_ROOT + 1)]
    return next(
        (math.copysign(each, factor) for root in roots for each in (root, 1 / root)
         if abs(abs(factor) / each - 1) < _NEARLY),
        factor,
    )  # fmt: skip


def _enclosed(array: NDArray[np.float64]) -> Enclosure:
    """Take for exact what float64 gives: minus infinity is prescribed, and NaN or infinity says nothing."""
    unknown = np.isnan(array) | (array == np.inf)
    return Enclosure(array, np.zeros(array.shape), np.where(unknown, np.inf, 0.0))
