"""The truth: every stage of an operation as a proven enclosure, from the numbers as stored.

Everything is evaluated in double words, of 106 bits. Where some radius exceeds 2^-90 of its element's scale, it is
evaluated in ball arithmetic (python-flint; Johansson 2017, "Arb: efficient arbitrary-precision midpoint-radius interval
arithmetic") at 128 bits, and again at twice as many while one exceeds 2^-80. The scale is the sum of the absolute terms
of a score, context, output or projection; the weight itself; and 1 + |L| of a log_sum_exp. Below 2^-1072, where float64
ends, no radius matters.

Query rows are independent of each other given key and value, so they are taken some at a time, and on a large shape
some rows can stand for all. Gradients add the rows up: they are evaluated whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np
from flint import ctx
from numpy.typing import NDArray

from attncheck.attention.balls import Balls
from attncheck.attention.double_words import DoubleWords
from attncheck.attention.exact_array import ExactArray
from attncheck.attention.graph import graph_of, nearest
from attncheck.attention.problem import OutsideDomain, Problem, check_domain
from attncheck.attention.walk import exact_walk, magnitude, magnitude_walk
from attncheck.oracle import SETTLED
from attncheck.oracle.enclosure import Enclosure, enclose, join
from attncheck.reading.shapes import score_elements
from attncheck.spec import STAGES, Shape, computed_stages, query_axis, stages_of

__all__ = [
    "ADDS_QUERIES_UP",
    "OutsideDomain",
    "PrecisionExhausted",
    "exact_from",
    "exact_stages",
    "predecessors",
    "with_enough_precision",
]

Found = TypeVar("Found")

MIN_PRECISION = 128
MAX_PRECISION = 1 << 15
"""Bits. Scores of 1e600 need 2,100 for their exponentials; no case of finite float64 numbers is known to need more
than 8,192."""

ADDS_QUERIES_UP = frozenset({"attention_gradients"})
"""The gradients of key and value are sums over the query rows: none can stand for another."""
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


def exact_stages(
    operation: str,
    options: Mapping[str, Any],
    inputs: Mapping[str, NDArray[Any]],
    stages: Sequence[str] | None = None,
    query_rows: Sequence[int] | None = None,
) -> dict[str, Enclosure]:
    """Return the exact value of stages, in the shapes in which the backends return them.

    ``inputs`` are as stored in the working dtype (float64, float32, float16, bfloat16; a mask is boolean), ``options``
    those of the backends' functions, ``score`` (also "cosine") and ``softcap`` (c tanh(s / c), before the bias).
    ``stages`` defaults to those that the NumPy backend returns. ``query_rows`` leaves only these rows of every stage
    that has query rows; there are none to leave out of gradients, which add the rows up. Raises ``OutsideDomain``,
    ``PrecisionExhausted``, and ``ValueError`` for an option, input or stage that the oracle does not know.
    """
    problem = Problem.of(operation, options, inputs)
    if query_rows is not None and operation in ADDS_QUERIES_UP:
        raise ValueError(f"{operation} adds query rows up, so that none can be left out")
    check_domain(operation, options, inputs)
    asked = tuple(computed_stages(operation, options, inputs) if stages is None else stages)
    return _enclosures(problem, asked, query_rows)


def exact_from(
    problem: Problem,
    returned: Mapping[str, NDArray[Any]],
    stages: Sequence[str],
    query_rows: Sequence[int] | None = None,
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
    return _enclosures(replace(problem, returned=usable), stages, query_rows)


def predecessors(problem: Problem, returned: Collection[str], stage: str) -> set[str]:
    """Return those of the returned stages that ``exact_from`` needs; without any, the stage follows from the inputs."""
    # Only multi_head_attention has stages of the names of inputs that are not those inputs.
    is_own = problem.operation == "multi_head_attention"
    known = {name for name in returned if name in STAGES and (is_own or name not in problem.inputs)}
    return nearest(graph_of(problem), stage, known)


def _enclosures(problem: Problem, stages: Sequence[str], query_rows: Sequence[int] | None) -> dict[str, Enclosure]:
    rows = problem.rows if query_rows is None else problem.rows[np.asarray(query_rows, dtype=np.intp)]
    elements = max(score_elements(problem.operation, problem.options, problem.inputs), 1)
    size = max(_ROWS_AT_A_TIME, _ELEMENTS_AT_A_TIME * len(problem.rows) // elements)
    starts = range(0, max(len(rows), 1), size)
    whole = query_rows is None and (len(starts) == 1 or problem.operation in ADDS_QUERIES_UP)
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


def _attempt(parts: Sequence[Problem], stages: Sequence[str]) -> dict[str, Enclosure] | None:
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


def _shape_of(stage: str, array: ExactArray, part: Problem) -> Shape:
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
    """Whether every radius is small; only where it is large beside the value itself is its scale worked out."""
    # A ball beyond float64 has an infinite radius here, and is looked at below, where balls have no largest number.
    small = enclosure.radius <= np.minimum(np.maximum(tolerance * np.abs(enclosure.high), MIN_RADIUS), _LARGEST)
    return bool(small.all() or (small | array.is_small_beside(scale(), tolerance)).all())
