"""The exact answer: every stage of an operation as a proven enclosure, from the numbers as stored.

Everything is evaluated in double words, of 106 bits. Where some radius is too large beside its element's scale
(``TOLERANCES``), it is evaluated in ball arithmetic (python-flint; Johansson 2017, "Arb: efficient arbitrary-precision
midpoint-radius interval arithmetic") at 128 bits, and again at twice as many as long as one is. ``docs/numerics.md``,
section 2, says what the scales are.

Query rows are independent of each other given key and value, so they are taken some at a time, and on a large shape
some rows can stand for all. Gradients add the rows up: they are evaluated whole. Where the score matrix of attention is
never held whole, its keys are taken in blocks, whose numerators and denominators add up, relative to the largest logit
so far. What error bounds need besides, the logits and weights, is then kept as float64 alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np
from flint import ctx
from numpy.typing import NDArray

from attncheck.attention.balls import Balls
from attncheck.attention.double_words import DoubleWords
from attncheck.attention.errors import Real
from attncheck.attention.exact_array import SETTLED, Enclosure, ExactArray, Exponentials, Flags, enclose, join, log_sum
from attncheck.attention.graph import graph_of, nearest
from attncheck.attention.problem import LOGITS, Computation, check_domain
from attncheck.attention.problem import OutsideDomain as OutsideDomain
from attncheck.attention.sampling import ADDS_QUERIES_UP
from attncheck.attention.walk import exact_walk, magnitude, magnitude_walk
from attncheck.reading.problem import Problem
from attncheck.reading.shapes import score_elements
from attncheck.spec import OPERATIONS, STAGES, Shape, computed_stages, query_axis, stages_of

Found = TypeVar("Found")

MIN_PRECISION = 128
MAX_PRECISION = 1 << 15
"""Bits. Scores of 1e600 need 2,100 for their exponentials; no case of finite float64 numbers is known to need more
than 8,192."""

_ROWS_AT_A_TIME = 64
"""At least: as many more as keep the score matrix below ``_ELEMENTS_AT_A_TIME``."""
_ELEMENTS_AT_A_TIME = 1 << 17
_OF_KEYS = tuple(
    name
    for part in ("projections", "normalizations", "rotations")
    for name in stages_of(part)
    if query_axis(name) is None
)
"""Stages that are the same for every part of the queries."""
TOLERANCES: Mapping[type[ExactArray], float] = {DoubleWords: 2.0**-90, Balls: 2.0**-80}
"""Of its scale, the largest radius in each arithmetic: a double word has room for no more."""
_LARGEST = np.finfo(np.float64).max
MIN_RADIUS = 2.0**-1072  # a radius is rounded up to a float64, of which the least is 2^-1074


class PrecisionExhausted(Exception):
    """Some radius is still too large at the highest precision that the oracle tries."""


def exact_stages(problem: Problem, stages: Sequence[str] | None = None) -> dict[str, Enclosure]:
    """Return the exact value of stages, in the shapes in which the backends return them.

    Inputs are as stored in the working dtype (float64, float32, float16, bfloat16; a mask is boolean), options
    those of the backends' functions, ``score`` (also "cosine") and ``softcap`` (c tanh(s / c), before the bias).
    ``stages`` defaults to those that the NumPy backend returns. Raises ``OutsideDomain``, ``PrecisionExhausted``, and
    ``ValueError`` for an option, input or stage that the oracle does not know.
    """
    computation = Computation.of(problem)
    check_domain(problem)
    returned = computed_stages(problem.operation, problem.options, problem.inputs)
    return _enclosures(computation, tuple(returned if stages is None else stages))


def exact_from(
    problem: Computation, returned: Mapping[str, NDArray[Any]], stages: Sequence[str]
) -> dict[str, Enclosure] | None:
    """Return the exact value of stages given an implementation's own stages before them, taken as exact.

    ``returned`` are whole arrays in the stages' shapes, and all ``stages`` follow from the same of them. One that is
    not there is composed from those before it. Minus infinity among returned scores is what a mask or bias leaves, and
    stays out of the softmax. None where one that is needed holds NaN, or another infinity, at a place that is attended;
    and for gradients, none of which follows from another. The problem is one that ``exact_stages`` has a value for.
    """
    if problem.operation in ADDS_QUERIES_UP:
        return None
    needed = predecessors(problem, returned, stages[0])
    whole = {name: problem.with_added(name, returned[name]) for name in needed}
    taken = {name: problem.as_predecessor(name, array, stages[0]) for name, array in whole.items()}
    usable = {name: array for name, array in taken.items() if array is not None}
    if len(usable) < len(needed):
        return None
    return _enclosures(replace(problem, returned=usable), stages)


def predecessors(problem: Computation, returned: Collection[str], stage: str) -> set[str]:
    """Return those of the returned stages that ``exact_from`` needs; without any, the stage follows from the inputs."""
    # Only projections are stages of the names of inputs that are not those inputs.
    is_own = OPERATIONS[problem.operation].has_projections
    known = {name for name in returned if name in STAGES and (is_own or name not in problem.inputs)}
    return nearest(graph_of(problem), stage, known)


def _enclosures(problem: Computation, stages: Sequence[str]) -> dict[str, Enclosure]:
    rows = problem.rows
    elements = max(score_elements(problem.operation, problem.options, problem.inputs), 1)
    size = max(_ROWS_AT_A_TIME, _ELEMENTS_AT_A_TIME * len(rows) // elements)
    starts = range(0, max(len(rows), 1), size)
    whole = len(starts) == 1 or problem.operation in ADDS_QUERIES_UP
    parts = [problem] if whole else [problem.of_rows(rows[start : start + size]) for start in starts]
    return with_enough_precision(
        lambda arithmetic: _attempt([replace(part, arithmetic=arithmetic) for part in parts], stages),
        f"{problem.operation}: {', '.join(stages)}",
    )


def with_enough_precision(attempt: Callable[[type[ExactArray]], Found | None], what: str) -> Found:
    """Return what an attempt finds in the first arithmetic that suffices; it returns None where one does not.

    Raises ``PrecisionExhausted`` where none does.
    """
    with np.errstate(all="ignore"):
        found = attempt(DoubleWords)
    SETTLED["double words" if found is not None else "balls"] += 1
    if found is not None:
        return found
    precision = MIN_PRECISION
    while precision <= MAX_PRECISION:
        with ctx.workprec(precision), np.errstate(all="ignore"):
            found = attempt(Balls)
        if found is not None:
            return found
        precision *= 2
    raise PrecisionExhausted(f"{what} not settled with {MAX_PRECISION} bits")


def _attempt(parts: Sequence[Computation], stages: Sequence[str]) -> dict[str, Enclosure] | None:
    """Evaluate in the arithmetic of the parts; None where it does not suffice."""
    pieces: dict[str, list[Enclosure]] = {stage: [] for stage in stages}
    shared: dict[str, Any] = {}
    for part in parts:
        walk, sums = exact_walk(part, shared), cache(partial(magnitude_walk, part))
        for stage in stages:
            array: ExactArray = walk.node(stage)
            enclosure = enclose(array)
            scale = lambda name=stage, walk=walk, sums=sums: magnitude(sums(), walk, name)  # noqa: E731
            if not _suffices(enclosure, array, TOLERANCES[part.arithmetic], scale):
                return None
            shape = _shape_of(stage, array, part)
            own = enclosure if shape == enclosure.shape else enclosure.reshaped(shape)
            pieces[stage].append(own.mapped(partial(part.without_added, stage)) if part.added_keys else own)
        shared = {name: walk.nodes[name] for name in _OF_KEYS if name in walk.nodes}
    return {stage: _joined(stage, found) for stage, found in pieces.items()}


def _shape_of(stage: str, array: ExactArray, part: Computation) -> Shape:
    """Return a stage's own shape, that of the input of a gradient; exact arrays have at least two axes."""
    of_input = stage.removeprefix("grad_")
    if of_input != stage:
        return part.array(of_input).shape
    return array.shape[:-1] if stage == "log_sum_exp" else array.shape


def _joined(stage: str, pieces: Sequence[Enclosure]) -> Enclosure:
    if stage in _OF_KEYS:
        return pieces[0]
    return join(pieces, axis=-1 if stage == "log_sum_exp" else -2)


def _suffices(enclosure: Enclosure, array: ExactArray, tolerance: float, scale: Callable[[], ExactArray]) -> bool:
    """Tell if every radius is small; only where it is large beside the value itself is its scale worked out."""
    # A ball beyond float64 has an infinite radius here, and is looked at below, where balls have no largest number.
    small = enclosure.radius <= np.minimum(np.maximum(tolerance * np.abs(enclosure.high), MIN_RADIUS), _LARGEST)
    return bool(small.all() or (small | array.is_small_beside(scale(), tolerance)).all())


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


@dataclass(frozen=True, eq=False)
class BlockedResult:
    """Enclosures of the stages that were asked for; ``inner``, in float64, the others that their bounds follow from."""

    exact: Mapping[str, Enclosure]
    inner: Mapping[str, Real]


def are_blocked(problem: Problem, stages: Collection[str]) -> bool:
    """Tell if these stages of a problem need no score matrix, and it would be large."""
    operation, options, inputs = problem.operation, problem.options, problem.inputs
    needs_none = operation == "attention" and RESULTS.issuperset(stages) and not options.get("softcap_follows")
    needs_none = (
        needs_none
        and graph_of(Computation.as_given(problem))["output"].follows == ("weights", "value")
        and options.get("mask_fill") is None
        and not any(spec.adds_key and name in inputs for name, spec in OPERATIONS[operation].inputs.items())
    )
    return needs_none and score_elements(operation, options, inputs) > MIN_ELEMENTS


def exact_results(problem: Problem, stages: Sequence[str]) -> BlockedResult | None:
    """Return the exact value of ``output`` and ``log_sum_exp``, with keys in blocks.

    None where a logit is so large that two float64 numbers say too little of it. As ``exact_stages``, raises
    ``OutsideDomain``, ``PrecisionExhausted`` and ``ValueError``.
    """
    computation = Computation.of(problem)
    check_domain(problem)
    found = with_enough_precision(
        lambda arithmetic: _attempt_in_blocks(replace(computation, arithmetic=arithmetic), stages),
        f"{problem.operation}: {', '.join(stages)}",
    )
    logits = (found.inner[stage] for stage in LOGITS if stage in found.inner)
    return found if all(((np.abs(each) <= _LARGEST_LOGIT) | (each == -np.inf)).all() for each in logits) else None


def _attempt_in_blocks(problem: Computation, stages: Sequence[str]) -> BlockedResult | None:
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
    if not all(_sums_suffice(exact[stage], scales[stage], TOLERANCES[problem.arithmetic]) for stage in stages):
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
    def of(cls, problem: Computation) -> _Sums:
        shape = (*problem.array("query").shape[:-1], problem.array("key").shape[-2])
        attended = ~problem.unattended(shape)
        even = np.asarray(problem.has_uniform_rows & ~attended.any(axis=-1, keepdims=True))
        numerators = problem.exact(np.zeros((*shape[:-1], problem.array("value").shape[-1])))
        none = problem.exact(np.zeros((*shape[:-1], 1)))
        computed = computed_stages(problem.operation, problem.options, problem.inputs)
        logits = {stage: np.zeros(shape) for stage in LOGITS[:-1] if stage in computed}
        return cls(attended, even, numerators, Exponentials(none, none, none), logits, np.zeros(shape))

    def add(self, problem: Computation, keys: slice) -> bool:
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

    def inner(self, problem: Computation, log_sum_exp: Enclosure) -> dict[str, Real]:
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


def _mean_magnitudes(problem: Computation, inner: Mapping[str, Real]) -> Real:
    """Return p|v|: what the radius of an output is small or large beside."""
    weights, value = inner["weights"], np.abs(problem.array("value").astype(np.float64))
    batch, heads, rows, length = weights.shape
    grouped = weights.reshape(batch, value.shape[1], -1, length)  # query heads that share a head of values, together
    return (grouped @ value).reshape(batch, heads, rows, -1)


def _sums_suffice(enclosure: Enclosure, scale: Real, tolerance: float) -> bool:
    """Tell if every radius is small; beyond float64 there is nothing to tell, and no verdict."""
    return not bool((enclosure.radius > np.maximum(tolerance * scale, MIN_RADIUS)).any())
