"""The exact answer: every stage of an operation as a proven enclosure, from the numbers as stored.

The idea. A reference implementation in float64 rounds, too. It cannot judge float64 at all, and if it has a fault, no
comparison shows it. So this module computes each number with a proven radius: the true value is within ``radius`` of
``high + low``, two float64 numbers. Inputs are exact by definition: they are the bits that every implementation gets.
The scale 1/sqrt(D) is the real number, not its rounding.

How it proceeds:

1. The problem is in canonical form (``reading/lowering.py``): one mask, one set of keys and values. A walk over the
   graph of steps (``graph.py``, ``walk.py``) evaluates the ``exact`` rule of each step.
2. The first arithmetic is double words, with 106 bits (``double_words.py``). Each operation adds its own error, from
   the literature, to the radii of its operands.
3. A radius must be small relative to the scale of its element (``TOLERANCES``): 2^-90 for double words. The scale is
   the sum of the absolute terms of a number, not the number itself: a sum that cancels to 0 has no relative accuracy.
4. If any radius is too large, the whole walk runs again in ball arithmetic (``balls.py``: FLINT's arb, Johansson 2017,
   "Arb: efficient arbitrary-precision midpoint-radius interval arithmetic"): at 128 bits, then twice as many, until
   every radius is below 2^-80 of its scale.

Why two arithmetics. For four heads of 64 queries and keys with a width of 32, NumPy takes 0.4 ms, double words 60 ms,
and balls 640 ms (one core, measured once). Balls alone would be right, but ten times slower. Double words alone could
not prove anything for scores of 1e600, or after cancellation that takes more than 106 bits.

Why in parts. Given key and value, query rows are independent of each other:

* Rows are evaluated 64 or more at a time, so that intermediate arrays stay small.
* On large shapes, some rows can stand for all (``sampling.py``). Gradients add rows up, so they are evaluated whole.
* If no stage with an axis of keys is needed, the score matrix of a long sequence is never stored. Its keys come in
  blocks, as in an online softmax. With m the largest logit so far, a block with a larger one, m', rescales the sums:

      l' = l e^(m - m') + sum_j e^(s_j - m'),    o' = o e^(m - m') + sum_j e^(s_j - m') v_j

  Error bounds need logits and weights, too. These are then kept in float64 (``BlockedResult.inner_stages``).

``docs/numerics.md``, section 2, defines the scales and proves the errors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np
from flint import ctx
from numpy.typing import NDArray

from attncheck.attention.balls import Balls, Magnitudes
from attncheck.attention.double_words import DoubleWords
from attncheck.attention.errors import Real
from attncheck.attention.exact_array import (
    Enclosure,
    ExactArray,
    Exponentials,
    Flags,
    concatenate_enclosures,
    log_row_sums,
    make_enclosure,
)
from attncheck.attention.graph import graph_of, nearest_known_ancestors
from attncheck.attention.problem import LOGITS, Computation, check_domain
from attncheck.attention.problem import OutsideDomain as OutsideDomain
from attncheck.attention.sampling import OPERATIONS_SUMMING_QUERIES
from attncheck.attention.walk import exact_walk, magnitude_walk, stage_magnitude
from attncheck.common.progress import ARITHMETIC_COUNTS
from attncheck.reading.problem import Problem
from attncheck.reading.shapes import count_scores
from attncheck.spec import OPERATIONS, STAGES, computed_stages, query_axis, stages_of_part

Result = TypeVar("Result")

MIN_PRECISION = 128  # the first power of two above the 106 bits of double words
MAX_PRECISION = 1 << 15
"""Bits. Scores of 1e600 need 2,100 for their exponentials; no case of finite float64 numbers is known to need more
than 8,192."""

_ROWS_AT_A_TIME = 64
"""At least: as many more as keep the score matrix below ``_ELEMENTS_AT_A_TIME``. A choice: fewer rows repeat the work
that all rows share; more take memory on long sequences."""
_ELEMENTS_AT_A_TIME = 1 << 17
_STAGES_WITHOUT_QUERIES = tuple(
    name
    for part in ("projections", "normalizations", "rotations")
    for name in stages_of_part(part)
    if query_axis(name) is None
)
"""Stages that are the same for every part of the queries."""
TOLERANCES: Mapping[type[ExactArray], float] = {DoubleWords: 2.0**-90, Balls: 2.0**-80}
"""Of its scale, the largest radius in each arithmetic: a double word has room for no more."""
_ROUGH_SIZE_MARGIN = 2.0**-10
"""Sizes in float64 are right to 40 bits, except near underflow. A radius that is so much smaller than allowed needs no
sizes in balls, which take as long as the numbers themselves."""
_LARGEST_FLOAT64 = np.finfo(np.float64).max
MIN_RADIUS = 2.0**-1072  # a radius is rounded up to a float64, of which the least is 2^-1074


class PrecisionExhausted(Exception):
    """Some radius is still too large at the highest precision that the oracle tries."""


def enclose_exact_stages(problem: Problem, stages: Sequence[str] | None = None) -> dict[str, Enclosure]:
    """Return the exact value of stages, in the shapes in which the backends return them.

    Inputs are as stored in the working dtype (float64, float32, float16, bfloat16; a mask is boolean), options
    those of the backends' functions, ``score`` (also "cosine") and ``softcap`` (c tanh(s / c), before the bias).
    ``stages`` defaults to those that the NumPy backend returns. Raises ``OutsideDomain``, ``PrecisionExhausted``, and
    ``ValueError`` for an option, input or stage that the oracle does not know.

    Example:
        >>> inputs = {"query": np.ones((1, 1, 1, 2)), "key": np.ones((1, 1, 3, 2)), "value": np.ones((1, 1, 3, 2))}
        >>> third = enclose_exact_stages(Problem("attention", {}, inputs), ["weights"])["weights"]
        >>> third.high[..., 0].item(), third.low[..., 0].item() == 2.0**-54 / 3  # 1/3 is high + low, to 106 bits
        (0.3333333333333333, True)
    """
    computation = Computation.from_problem(problem)
    check_domain(problem)
    returned = computed_stages(problem.operation, problem.options, problem.inputs)
    return _enclose_stages(computation, tuple(returned if stages is None else stages))


def evaluate_from_returned_stages(
    problem: Computation, returned: Mapping[str, NDArray[Any]], stages: Sequence[str]
) -> dict[str, Enclosure] | None:
    """Return the exact value of stages given an implementation's own stages before them, taken as exact.

    ``returned`` are whole arrays in the stages' shapes, and all ``stages`` follow from the same of them. One that is
    not there is composed from those before it. Minus infinity among returned scores is what a mask or bias leaves, and
    stays out of the softmax. None if one that is needed holds NaN, or another infinity, at a place that is attended;
    and for gradients, none of which follows from another. The problem is one that ``exact_stages`` has a value for.
    """
    if problem.operation in OPERATIONS_SUMMING_QUERIES:
        return None
    needed = nearest_returned_stages(problem, returned, stages[0])
    whole = {name: problem.with_added_key(name, returned[name]) for name in needed}
    taken = {name: problem.as_predecessor(name, array, stages[0]) for name, array in whole.items()}
    usable = {name: array for name, array in taken.items() if array is not None}
    if len(usable) < len(needed):
        return None
    return _enclose_stages(replace(problem, returned_stages=usable), stages)


def nearest_returned_stages(problem: Computation, returned: Collection[str], stage: str) -> set[str]:
    """Return the returned stages from which a stage follows directly; without any, it follows from the inputs."""
    # Only projections are stages of the names of inputs that are not those inputs.
    is_own = OPERATIONS[problem.operation].has_projections
    known = {name for name in returned if name in STAGES and (is_own or name not in problem.inputs)}
    return nearest_known_ancestors(graph_of(problem), stage, known)


def _enclose_stages(problem: Computation, stages: Sequence[str]) -> dict[str, Enclosure]:
    rows = problem.row_indices
    elements = max(count_scores(problem.operation, problem.options, problem.inputs), 1)
    size = max(_ROWS_AT_A_TIME, _ELEMENTS_AT_A_TIME * len(rows) // elements)
    starts = range(0, max(len(rows), 1), size)
    whole = len(starts) == 1 or problem.operation in OPERATIONS_SUMMING_QUERIES
    parts = [problem] if whole else [problem.select_rows(rows[start : start + size]) for start in starts]
    return raise_precision_until_enough(
        lambda arithmetic: _try_by_rows([part.with_arithmetic(arithmetic) for part in parts], stages),
        f"{problem.operation}: {', '.join(stages)}",
    )


def raise_precision_until_enough(attempt: Callable[[type[ExactArray]], Result | None], description: str) -> Result:
    """Return the result of an attempt in the first arithmetic that suffices; in any other, it returns None.

    Raises ``PrecisionExhausted`` if no arithmetic suffices.
    """
    with np.errstate(all="ignore"):
        result = attempt(DoubleWords)
    ARITHMETIC_COUNTS["double words" if result is not None else "balls"] += 1
    if result is not None:
        return result
    precision = MIN_PRECISION
    while precision <= MAX_PRECISION:
        with ctx.workprec(precision), np.errstate(all="ignore"):
            result = attempt(Balls)
        if result is not None:
            return result
        precision *= 2
    raise PrecisionExhausted(f"{description} not settled with {MAX_PRECISION} bits")


def _try_by_rows(parts: Sequence[Computation], stages: Sequence[str]) -> dict[str, Enclosure] | None:
    """Evaluate in the arithmetic of the parts; None if it does not suffice."""
    pieces: dict[str, list[Enclosure]] = {stage: [] for stage in stages}
    shared: dict[str, Any] = {}
    for part in parts:
        walk, sums = exact_walk(part, shared), cache(partial(magnitude_walk, part))
        in_balls = part.arithmetic is Balls
        for stage in stages:
            array: ExactArray = walk.evaluate(stage)
            enclosure, shape, tolerance = make_enclosure(array), array.shape, TOLERANCES[part.arithmetic]
            # A ball beyond float64 has an infinite radius here, and is compared in balls, which have no largest number.
            limit = np.minimum(np.maximum(tolerance * np.abs(enclosure.high), MIN_RADIUS), _LARGEST_FLOAT64)
            small = enclosure.radius <= limit
            if not small.all():
                sizes = stage_magnitude(sums(Magnitudes), walk, stage, in_balls=False)
                if in_balls:
                    known = np.where(np.isfinite(sizes.parts[0]), sizes.parts[0], 0.0)
                    small |= enclosure.radius <= _ROUGH_SIZE_MARGIN * tolerance * known
                if in_balls and not small.all():
                    sizes = stage_magnitude(sums(Balls), walk, stage, in_balls=True)
                if not (small.all() or (small | array.flag_small_radii(sizes, tolerance)).all()):
                    return None
            # Exact arrays have at least two axes; a gradient has the shape of its input.
            if stage.startswith("grad_"):
                shape = part.input_array(stage.removeprefix("grad_")).shape
            elif stage == "log_sum_exp":
                shape = shape[:-1]
            shaped = enclosure if shape == enclosure.shape else enclosure.reshaped(shape)
            pieces[stage].append(
                shaped.map_arrays(partial(part.without_added_key, stage)) if part.added_keys else shaped
            )
        shared = {name: walk.cached_nodes[name] for name in _STAGES_WITHOUT_QUERIES if name in walk.cached_nodes}
    return {stage: _concatenate(stage, enclosures) for stage, enclosures in pieces.items()}


def _concatenate(stage: str, pieces: Sequence[Enclosure]) -> Enclosure:
    if stage in _STAGES_WITHOUT_QUERIES:
        return pieces[0]
    return concatenate_enclosures(pieces, axis=-1 if stage == "log_sum_exp" else -2)


STAGES_WITHOUT_KEYS = frozenset({"log_sum_exp", "output"})
"""Stages of attention that have no axis of keys."""

MIN_ELEMENTS = 1 << 15
"""Elements of a score matrix that is small: every stage is worked out, as recognising a wrong result may want it."""

MAX_BLOCK_ELEMENTS = 1 << 17
"""Elements of the score matrix that are exact numbers at a time: some twenty float64 arrays of them in double words."""
_MIN_KEYS = 64
"""Keys of a block, at least. A choice: each block rescales the sums so far, which costs as much as a few keys."""
_MAX_RADIUS = 2.0**-84
"""How far a logit may be from the truth: e^s then is known to as many bits."""
_LARGEST_LOGIT = 2.0**52  # the error of s - L in float64 is derived up to here (docs/numerics.md, section 2)


@dataclass(frozen=True, eq=False)
class BlockedResult:
    """Enclosures of the requested stages; ``inner_stages``, in float64, are the others that their bounds need."""

    exact_stages: Mapping[str, Enclosure]
    inner_stages: Mapping[str, Real]


def needs_key_blocks(problem: Problem, stages: Collection[str]) -> bool:
    """Tell if these stages of a problem need no score matrix, and it would be large."""
    operation, options, inputs = problem.operation, problem.options, problem.inputs
    needs_none = (
        operation == "attention" and STAGES_WITHOUT_KEYS.issuperset(stages) and not options.get("softcap_follows")
    )
    needs_none = (
        needs_none
        and graph_of(Computation.from_problem_without_added_key(problem))["output"].operands == ("weights", "value")
        and options.get("mask_fill") is None
        and not any(spec.adds_key and name in inputs for name, spec in OPERATIONS[operation].inputs.items())
    )
    return needs_none and count_scores(operation, options, inputs) > MIN_ELEMENTS


def evaluate_by_key_blocks(problem: Problem, stages: Sequence[str]) -> BlockedResult | None:
    """Return the exact value of ``output`` and ``log_sum_exp``, with keys in blocks.

    None if a logit is so large that two float64 numbers say too little of it. As ``exact_stages``, raises
    ``OutsideDomain``, ``PrecisionExhausted`` and ``ValueError``.
    """
    computation = Computation.from_problem(problem)
    check_domain(problem)
    result = raise_precision_until_enough(
        lambda arithmetic: _try_by_key_blocks(replace(computation, arithmetic=arithmetic), stages),
        f"{problem.operation}: {', '.join(stages)}",
    )
    logits = (result.inner_stages[stage] for stage in LOGITS if stage in result.inner_stages)
    return result if all(((np.abs(array) <= _LARGEST_LOGIT) | (array == -np.inf)).all() for array in logits) else None


def _try_by_key_blocks(problem: Computation, stages: Sequence[str]) -> BlockedResult | None:
    """Evaluate in the problem's arithmetic; None if it does not suffice."""
    sums = _BlockSums.for_problem(problem)
    *leading, length = sums.attended.shape
    size = max(_MIN_KEYS, MAX_BLOCK_ELEMENTS // max(int(np.prod(leading)), 1))
    for start in range(0, length, size):
        if not sums.add_block(problem, slice(start, min(start + size, length))):
            return None
    exact = {
        "log_sum_exp": make_enclosure(log_row_sums(sums.exponentials)).reshaped(tuple(leading)),
        "output": make_enclosure(sums.mean_of_values()),
    }
    inner = sums.logits_and_weights(problem, exact["log_sum_exp"])
    scales = {"log_sum_exp": 1 + np.abs(exact["log_sum_exp"].high), "output": _output_magnitudes(problem, inner)}
    tolerance = TOLERANCES[problem.arithmetic]
    # An infinite radius of a number beyond float64 passes only if its scale is infinite, too.
    if any((exact[stage].radius > np.maximum(tolerance * scales[stage], MIN_RADIUS)).any() for stage in stages):
        return None
    inner |= {stage: enclosure.high for stage, enclosure in exact.items() if stage not in stages}
    return BlockedResult({stage: exact[stage] for stage in stages}, inner)


@dataclass(eq=False)
class _BlockSums:
    """Sums over the blocks so far.

    ``attended`` (B, H, Lq, Lk) says which keys take part; in an ``uniform_rows`` row, which has none, all count alike
    by convention. ``numerators`` are (B, H, Lq, Dv), sums and shifts of ``exponentials`` (B, H, Lq, 1). ``logits`` are
    float64, the last of them, ``last_logits_low``, to twice the precision.
    """

    attended: Flags
    uniform_rows: Flags
    numerators: ExactArray
    exponentials: Exponentials
    logits: dict[str, Real] = field(default_factory=dict)
    last_logits_low: Real = field(default_factory=lambda: np.zeros(0))

    @classmethod
    def for_problem(cls, problem: Computation) -> _BlockSums:
        shape = (*problem.input_array("query").shape[:-1], problem.input_array("key").shape[-2])
        attended = ~problem.flag_unattended(shape)
        even = np.asarray(problem.has_uniform_rows & ~attended.any(axis=-1, keepdims=True))
        numerators = problem.to_exact_array(np.zeros((*shape[:-1], problem.input_array("value").shape[-1])))
        none = problem.to_exact_array(np.zeros((*shape[:-1], 1)))
        computed = computed_stages(problem.operation, problem.options, problem.inputs)
        logits = {stage: np.zeros(shape) for stage in LOGITS[:-1] if stage in computed}
        return cls(attended, even, numerators, Exponentials(none, none, none), logits, np.zeros(shape))

    def add_block(self, problem: Computation, keys: slice) -> bool:
        """Add a block of keys; return whether the problem's arithmetic suffices."""
        counted = self.attended[..., keys] | self.uniform_rows
        rows = np.flatnonzero(counted.any(axis=(*range(counted.ndim - 2), -1)))
        if not len(rows):
            return True
        walk = exact_walk(problem.select_rows(rows).select_keys(keys.start, keys.stop))
        logits = walk.evaluate(list(self.logits)[-1])
        attended = self.attended[..., rows, keys]
        is_known = logits.flag_small_radii(logits.from_finite_numbers(np.ones((1, 1))), _MAX_RADIUS)
        if not is_known[attended].all():
            return False
        self._add_terms(rows, logits.with_attended(attended), walk.evaluate("value"))
        for stage, kept in self.logits.items():
            kept[..., rows, keys] = walk.evaluate(stage).high_low_radius()[0]
        self.last_logits_low[..., rows, keys] = logits.high_low_radius()[1]
        return True

    def _add_terms(self, rows: NDArray[np.intp], logits: ExactArray, value: ExactArray) -> None:
        """Add e^(s - shift), and its product with the values; the shift is about the largest logit so far."""
        where = (..., rows, slice(None))
        attended = logits.attended
        assert attended is not None
        shift, total, before = (
            array.map_parts(lambda part: part[where])
            for array in (self.exponentials.row_shift, self.exponentials.row_sum, self.numerators)
        )
        some, is_first = np.asarray(attended.any(axis=-1, keepdims=True)), total.flag_zeros()
        top = logits.approximate_row_maxima().select_where(some, shift)
        new_shift = shift.maximum(top).select_where(~is_first, top)
        factor = (shift - new_shift).exp().select_where(~is_first, 1.0)
        terms = (
            (logits.with_attended() - new_shift)
            .exp()
            .select_where(attended, 0.0)
            .select_where(~self.uniform_rows[where], 1.0)
        )
        total, numerators = total * factor + terms.sum(-1), before * factor + terms @ value.repeat_heads_for(terms)
        shifts, totals = (
            self.exponentials.row_shift.replace_at(where, new_shift),
            self.exponentials.row_sum.replace_at(where, total),
        )
        self.numerators = self.numerators.replace_at(where, numerators)
        self.exponentials = Exponentials(totals, shifts, totals)

    def mean_of_values(self) -> ExactArray:
        """Divide: the mean of the values; 0 in a row without a key."""
        return self.numerators * (1 / self.exponentials.row_sum.replace_zeros_by_ones())

    def logits_and_weights(self, problem: Computation, log_sum_exp: Enclosure) -> dict[str, Real]:
        """Return logits and weights in float64."""
        last = list(self.logits)[-1]
        with np.errstate(invalid="ignore", over="ignore"):  # a logit that is not attended may be larger than any sum
            rest = self.last_logits_low - log_sum_exp.low[..., np.newaxis]
            weights = np.minimum(np.exp(self.logits[last] - log_sum_exp.high[..., np.newaxis] + rest), 1)
        weights[~self.attended] = 0.0
        weights[self.uniform_rows[..., 0]] = 1 / max(weights.shape[-1], 1)
        forbidden = np.where(self.attended, self.logits[last], -np.inf)
        is_masked = "masked" in computed_stages(problem.operation, problem.options, problem.inputs)
        return {**self.logits, ("masked" if is_masked else last): forbidden, "weights": weights}


def _output_magnitudes(problem: Computation, inner: Mapping[str, Real]) -> Real:
    """Return p|v|, the scale with which the radius of an output is compared."""
    weights, value = inner["weights"], np.abs(problem.input_array("value").astype(np.float64))
    batch, heads, rows, length = weights.shape
    grouped = weights.reshape(batch, value.shape[1], -1, length)  # query heads that share a head of values, together
    return (grouped @ value).reshape(batch, heads, rows, -1)
