"""The exact result of attention whose score matrix is never held whole: its keys are taken in blocks.

    numerator_ic = sum_j e^(s_ij) v_jc      denominator_i = sum_j e^(s_ij)      output = numerator / denominator

add up over blocks. Balls have exponents of any size, so that no maximum has to be subtracted and none carried along.
Rows that attend to no key of a block have no part in it.

What error bounds need besides, the logits and weights, is kept as float64 alone. Logits are rounded to nearest, and a
weight is e^(s - L) from s and L as sums of two float64 numbers: its relative error is below 2^-42, far less than the
factor 1 + 2^-30 on every bound has room for (``docs/numerics.md``, section 2).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import Any

import numpy as np
from flint import arb
from numpy.typing import NDArray

from attncheck.attention.balls import BallArray, from_entries, log_of_sums
from attncheck.attention.problem import LOGITS, Problem, check_domain
from attncheck.attention.walk import exact_walk
from attncheck.oracle.enclosure import Enclosure, Real, enclose
from attncheck.oracle.evaluate import MIN_RADIUS, TOLERANCE, with_enough_precision
from attncheck.reading.shapes import score_elements
from attncheck.spec import OPERATIONS, computed_stages

RESULTS = frozenset({"log_sum_exp", "output"})
"""Stages of attention that have no axis of keys."""

MIN_ELEMENTS = 1 << 15
"""Elements of a score matrix that is small: every stage is worked out, as recognising a wrong result may want it."""

ELEMENTS_AT_A_TIME = 1 << 17
"""Elements of the score matrix of which there are balls at a time: about 100 bytes each, three times over."""
_MIN_KEYS = 64  # FLINT's fast matrix product starts when every dimension is large
_ACCURACY = 84
"""Bits to which every e^s must be known: s then is to within 2^-84."""
_LARGEST_LOGIT = 2.0**52
_ZERO, _ONE = arb(0), arb(1)

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
    found = with_enough_precision(lambda: _attempt(problem, stages), f"{operation}: {', '.join(stages)}")
    logits = (found.inner[stage] for stage in LOGITS if stage in found.inner)
    return found if all(((np.abs(each) <= _LARGEST_LOGIT) | (each == -np.inf)).all() for each in logits) else None


def _attempt(problem: Problem, stages: Sequence[str]) -> BlockedResult | None:
    """Evaluate at FLINT's current precision; None where it does not suffice."""
    sums = _Sums.of(problem)
    *leading, length = sums.attended.shape
    size = max(_MIN_KEYS, ELEMENTS_AT_A_TIME // max(int(np.prod(leading)), 1))
    for start in range(0, length, size):
        if not sums.add(problem, slice(start, min(start + size, length))):
            return None
    results = {"log_sum_exp": sums.log_sum_exp(), "output": sums.output()}
    exact = {stage: enclose(balls.entries(), balls.shape, balls.attended) for stage, balls in results.items()}
    exact["log_sum_exp"] = exact["log_sum_exp"].reshaped(tuple(leading))
    inner = sums.inner(problem, exact["log_sum_exp"])
    scales = {"log_sum_exp": 1 + np.abs(exact["log_sum_exp"].high), "output": _mean_magnitudes(problem, inner)}
    if not all(_suffices(exact[stage], scales[stage]) for stage in stages):
        return None
    inner |= {stage: enclosure.high for stage, enclosure in exact.items() if stage not in stages}
    return BlockedResult({stage: exact[stage] for stage in stages}, inner)


@dataclass(eq=False)
class _Sums:
    """Sums over the blocks so far, a row after the other in C order: (B, H, Lq).

    ``attended`` (B, H, Lq, Lk) says which keys take part; in an ``even`` row, which has none, all count alike by
    convention. ``logits`` are float64, the last of them, ``low``, to twice the precision.
    """

    attended: Flags
    even: Flags
    width: int
    numerators: list[list[arb]]
    denominators: list[arb]
    logits: dict[str, Real] = field(default_factory=dict)
    low: Real = field(default_factory=lambda: np.zeros(0))

    @classmethod
    def of(cls, problem: Problem) -> _Sums:
        shape = (*problem.array("query").shape[:-1], problem.array("key").shape[-2])
        attended = ~problem.unattended(shape)
        even = np.asarray(problem.has_uniform_rows & ~attended.any(axis=-1))
        width, rows = problem.array("value").shape[-1], int(np.prod(shape[:-1]))
        computed = computed_stages(problem.operation, problem.options, problem.inputs)
        logits = {stage: np.zeros(shape) for stage in LOGITS[:-1] if stage in computed}
        return cls(attended, even, width, [[_ZERO] * width] * rows, [_ZERO] * rows, logits, np.zeros(shape))

    def add(self, problem: Problem, keys: slice) -> bool:
        """Add a block of keys; return whether FLINT's current precision suffices."""
        counted = self.attended[..., keys] | self.even[..., np.newaxis]
        rows = np.flatnonzero(counted.any(axis=(*range(counted.ndim - 2), -1)))
        if not len(rows):
            return True
        walk = exact_walk(problem.of_rows(rows).of_keys(keys.start, keys.stop))
        logits = walk.node(list(self.logits)[-1])
        terms = self._exponentials(logits, rows, keys)
        if terms is None:
            return False
        value: BallArray = walk.node("value")
        products = terms @ value.for_heads_of(terms)
        for index, powers, product in zip(self._indices(rows), terms.rows(), products.rows(), strict=True):
            self.numerators[index] = [total + each for total, each in zip(self.numerators[index], product, strict=True)]
            self.denominators[index] = self.denominators[index] + sum(powers, _ZERO)
        for stage, kept in self.logits.items():
            entries = walk.node(stage).entries()
            kept[..., rows, keys] = np.array([float(ball) for ball in entries]).reshape(logits.shape)
        highs = self.logits[list(self.logits)[-1]][..., rows, keys].ravel().tolist()
        rests = [float(ball - high) for ball, high in zip(logits.entries(), highs, strict=True)]
        self.low[..., rows, keys] = np.array(rests).reshape(logits.shape)
        return True

    def _exponentials(self, logits: BallArray, rows: NDArray[np.intp], keys: slice) -> BallArray | None:
        """Return e^s, 0 where a key takes no part; None where one is not known well enough."""
        width = logits.shape[-1]
        flags = self.attended[..., rows, keys].reshape(-1, width).tolist()
        even = self.even[..., rows].ravel().tolist()
        terms: list[arb] = []
        for row, attended, counts_alike in zip(logits.rows(), flags, even, strict=True):
            if counts_alike:
                terms += [_ONE] * width
                continue
            taken = [ball.exp() for ball in compress(row, attended)]
            if any(power.rel_accuracy_bits() < _ACCURACY for power in taken):
                return None
            following = iter(taken)
            terms += taken if len(taken) == width else [next(following) if flag else _ZERO for flag in attended]
        return from_entries(logits.shape, terms)

    def _indices(self, rows: NDArray[np.intp]) -> list[int]:
        """Return where the sums of these rows of every head are."""
        indices = np.arange(len(self.denominators)).reshape(self.even.shape)
        return [int(index) for index in indices[..., rows].ravel()]

    def output(self) -> BallArray:
        """Divide: the mean of the values; 0 in a row without a key."""
        pairs = zip(self.numerators, self.denominators, strict=True)
        means = (row if total.is_zero() else [each / total for each in row] for row, total in pairs)
        return from_entries((*self.even.shape, self.width), list(chain.from_iterable(means)))

    def log_sum_exp(self) -> BallArray:
        """Return the logarithm of each denominator, -inf in a row without a key: (B, H, Lq, 1)."""
        return log_of_sums((*self.even.shape, 1), [_ZERO] * len(self.denominators), self.denominators)

    def inner(self, problem: Problem, log_sum_exp: Enclosure) -> dict[str, Real]:
        """Return logits and weights in float64."""
        last = list(self.logits)[-1]
        with np.errstate(invalid="ignore", over="ignore"):  # a logit that is not attended may be larger than any sum
            rest = self.low - log_sum_exp.low[..., np.newaxis]
            weights = np.minimum(np.exp(self.logits[last] - log_sum_exp.high[..., np.newaxis] + rest), 1)
        weights[~self.attended] = 0.0
        weights[self.even] = 1 / max(weights.shape[-1], 1)
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


def _suffices(enclosure: Enclosure, scale: Real) -> bool:
    """Whether every radius is small; beyond float64 there is nothing to tell, and no verdict."""
    return not bool((enclosure.radius > np.maximum(TOLERANCE * scale, MIN_RADIUS)).any())
