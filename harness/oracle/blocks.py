"""The exact result of attention whose score matrix is never held whole: its keys are taken in blocks.

    numerator_ic = sum_j e^(s_ij) v_jc      denominator_i = sum_j e^(s_ij)      output = numerator / denominator

add up over blocks, relative to the largest logit so far: where a later one is larger, the sums so far are multiplied by
e^(old - new). Rows that attend to no key of a block have no part in it.

What error bounds need besides, the logits and weights, is kept as float64 alone. Logits are rounded to nearest, and a
weight is e^(s - L) from s and L as sums of two float64 numbers: its relative error is below 2^-42, far less than the
factor 1 + 2^-30 on every bound has room for (``docs/numerics.md``, section 2).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.exact_array import ExactArray, Exponentials, log_sum
from attncheck.attention.problem import LOGITS, Problem, check_domain
from attncheck.attention.walk import exact_walk
from attncheck.oracle.enclosure import Enclosure, Real, enclose
from attncheck.oracle.evaluate import MIN_RADIUS, TOLERANCES, with_enough_precision
from attncheck.reading.shapes import score_elements
from attncheck.spec import OPERATIONS, computed_stages

RESULTS = frozenset({"log_sum_exp", "output"})
"""Stages of attention that have no axis of keys."""

MIN_ELEMENTS = 1 << 15
"""Elements of a score matrix that is small: every stage is worked out, as recognising a wrong result may want it."""

ELEMENTS_AT_A_TIME = 1 << 17
"""Elements of the score matrix that are exact numbers at a time: some twenty float64 arrays of them in double words."""
_MIN_KEYS = 64
_MAX_RADIUS = 2.0**-84
"""How far a logit may be from the truth: e^s then is known to as many bits."""
_LARGEST_LOGIT = 2.0**52

Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class BlockedResult:
    """Enclosures of the stages that were asked for; ``inner``, in float64, the others that their bounds follow from."""

    exact: Mapping[str, Enclosure]
    inner: Mapping[str, Real]


def are_blocked(
    operation: str, options: Mapping[str, Any], inputs: Mapping[str, NDArray[Any]], stages: Collection[str]
) -> bool:
    """Whether these stages of a computation need no score matrix, and it would be large."""
    needs_none = operation == "attention" and RESULTS.issuperset(stages) and not options.get("softcap_follows")
    needs_none = (
        needs_none
        and {"value_factor", "value_projection"}.isdisjoint(inputs)
        and options.get("mask_fill") is None
        and not any(spec.adds_key and name in inputs for name, spec in OPERATIONS[operation].inputs.items())
    )
    return needs_none and score_elements(operation, options, inputs) > MIN_ELEMENTS


def exact_results(
    operation: str, options: Mapping[str, Any], inputs: Mapping[str, NDArray[Any]], stages: Sequence[str]
) -> BlockedResult | None:
    """Return the exact value of ``output`` and ``log_sum_exp``, with keys in blocks.

    None where a logit is so large that two float64 numbers say too little of it. As ``exact_stages``, raises
    ``OutsideDomain``, ``PrecisionExhausted`` and ``ValueError``.
    """
    problem = Problem.of(operation, options, inputs)
    check_domain(operation, options, inputs)
    found = with_enough_precision(
        lambda arithmetic: _attempt(replace(problem, arithmetic=arithmetic), stages),
        f"{operation}: {', '.join(stages)}",
    )
    logits = (found.inner[stage] for stage in LOGITS if stage in found.inner)
    return found if all(((np.abs(each) <= _LARGEST_LOGIT) | (each == -np.inf)).all() for each in logits) else None


def _attempt(problem: Problem, stages: Sequence[str]) -> BlockedResult | None:
    """Evaluate in the problem's arithmetic; None where it does not suffice."""
    sums = _Sums.of(problem)
    *leading, length = sums.attended.shape
    size = max(_MIN_KEYS, ELEMENTS_AT_A_TIME // max(int(np.prod(leading)), 1))
    for start in range(0, length, size):
        if not sums.add(problem, slice(start, min(start + size, length))):
            return None
    exact = {"log_sum_exp": enclose(log_sum(sums.powers)).reshaped(tuple(leading)), "output": enclose(sums.output())}
    inner = sums.inner(problem, exact["log_sum_exp"])
    scales = {"log_sum_exp": 1 + np.abs(exact["log_sum_exp"].high), "output": _mean_magnitudes(problem, inner)}
    if not all(_suffices(exact[stage], scales[stage], TOLERANCES[problem.arithmetic]) for stage in stages):
        return None
    inner |= {stage: enclosure.high for stage, enclosure in exact.items() if stage not in stages}
    return BlockedResult({stage: exact[stage] for stage in stages}, inner)


@dataclass(eq=False)
class _Sums:
    """Sums over the blocks so far.

    ``attended`` (B, H, Lq, Lk) says which keys take part; in an ``even`` row, which has none, all count alike by
    convention. ``numerators`` are (B, H, Lq, Dv), sums and shifts of ``powers`` (B, H, Lq, 1). ``logits`` are float64,
    the last of them, ``low``, to twice the precision.
    """

    attended: Flags
    even: Flags
    numerators: ExactArray
    powers: Exponentials
    logits: dict[str, Real] = field(default_factory=dict)
    low: Real = field(default_factory=lambda: np.zeros(0))

    @classmethod
    def of(cls, problem: Problem) -> _Sums:
        shape = (*problem.array("query").shape[:-1], problem.array("key").shape[-2])
        attended = ~problem.unattended(shape)
        even = np.asarray(problem.has_uniform_rows & ~attended.any(axis=-1, keepdims=True))
        numerators = problem.exact(np.zeros((*shape[:-1], problem.array("value").shape[-1])))
        none = problem.exact(np.zeros((*shape[:-1], 1)))
        computed = computed_stages(problem.operation, problem.options, problem.inputs)
        logits = {stage: np.zeros(shape) for stage in LOGITS[:-1] if stage in computed}
        return cls(attended, even, numerators, Exponentials(none, none, none), logits, np.zeros(shape))

    def add(self, problem: Problem, keys: slice) -> bool:
        """Add a block of keys; return whether the problem's arithmetic suffices."""
        counted = self.attended[..., keys] | self.even
        rows = np.flatnonzero(counted.any(axis=(*range(counted.ndim - 2), -1)))
        if not len(rows):
            return True
        walk = exact_walk(problem.of_rows(rows).of_keys(keys.start, keys.stop))
        logits = walk.node(list(self.logits)[-1])
        attended = self.attended[..., rows, keys]
        is_known = logits.is_small_beside(logits.of_numbers(np.ones((1, 1))), _MAX_RADIUS)
        if not is_known[attended].all():
            return False
        self._add_terms(rows, logits.with_attended(attended), walk.node("value"))
        for stage, kept in self.logits.items():
            kept[..., rows, keys] = walk.node(stage).split()[0]
        self.low[..., rows, keys] = logits.split()[1]
        return True

    def _add_terms(self, rows: NDArray[np.intp], logits: ExactArray, value: ExactArray) -> None:
        """Add e^(s - shift) and what it is of the values, the shift being the largest logit so far, or near it."""
        where = (..., rows, slice(None))
        attended = logits.attended
        assert attended is not None
        shift, total, before = (
            array.rearranged(lambda part: part[where])
            for array in (self.powers.shift, self.powers.total, self.numerators)
        )
        some, is_first = np.asarray(attended.any(axis=-1, keepdims=True)), total.is_zero()
        top = logits.largest_of_rows().where(some, shift)
        new_shift = shift.maximum(top).where(~is_first, top)
        factor = (shift - new_shift).exp().where(~is_first, 1.0)
        terms = (logits.with_attended() - new_shift).exp().where(attended, 0.0).where(~self.even[where], 1.0)
        total, numerators = total * factor + terms.sum(-1), before * factor + terms @ value.for_heads_of(terms)
        shifts, totals = self.powers.shift.with_part(where, new_shift), self.powers.total.with_part(where, total)
        self.numerators = self.numerators.with_part(where, numerators)
        self.powers = Exponentials(totals, shifts, totals)

    def output(self) -> ExactArray:
        """Divide: the mean of the values; 0 in a row without a key."""
        return self.numerators * (1 / self.powers.total.where(~self.powers.total.is_zero(), 1.0))

    def inner(self, problem: Problem, log_sum_exp: Enclosure) -> dict[str, Real]:
        """Return logits and weights in float64."""
        last = list(self.logits)[-1]
        with np.errstate(invalid="ignore", over="ignore"):  # a logit that is not attended may be larger than any sum
            rest = self.low - log_sum_exp.low[..., np.newaxis]
            weights = np.minimum(np.exp(self.logits[last] - log_sum_exp.high[..., np.newaxis] + rest), 1)
        weights[~self.attended] = 0.0
        weights[self.even[..., 0]] = 1 / max(weights.shape[-1], 1)
        forbidden = np.where(self.attended, self.logits[last], -np.inf)
        is_masked = "masked" in computed_stages(problem.operation, problem.options, problem.inputs)
        return {**self.logits, ("masked" if is_masked else last): forbidden, "weights": weights}


def _mean_magnitudes(problem: Problem, inner: Mapping[str, Real]) -> Real:
    """Return p|v|: what the radius of an output is small or large beside."""
    weights, value = inner["weights"], np.abs(problem.array("value").astype(np.float64))
    batch, heads, rows, length = weights.shape
    grouped = weights.reshape(batch, value.shape[1], -1, length)  # query heads that share a head of values, together
    means: Real = (grouped @ value).reshape(batch, heads, rows, -1)
    return means


def _suffices(enclosure: Enclosure, scale: Real, tolerance: float) -> bool:
    """Whether every radius is small; beyond float64 there is nothing to tell, and no verdict."""
    return not bool((enclosure.radius > np.maximum(tolerance * scale, MIN_RADIUS)).any())
