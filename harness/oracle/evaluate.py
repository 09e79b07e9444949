"""The truth: every stage of an operation as a proven enclosure, from the numbers as stored.

Everything is evaluated in double words, of 106 bits. Where some radius exceeds 2^-90 of its element's scale, it is
evaluated in ball arithmetic (python-flint; Johansson 2017, "Arb: efficient arbitrary-precision midpoint-radius interval
arithmetic") at 128 bits, and again at twice as many while one exceeds 2^-80. The scale is the sum of the absolute terms
of a score, context, output or projection; the weight itself; and 1 + |L| of a log_sum_exp. Below 2^-1072, where float64
ends, no radius matters.

Query rows are independent of each other given key and value, so they are taken 64 at a time, and on a large shape some
rows can stand for all. Gradients add the rows up: they are evaluated whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from flint import ctx
from numpy.typing import NDArray

from attncheck.attention.balls import Balls
from attncheck.attention.double_words import DoubleWords
from attncheck.attention.exact_array import ExactArray
from attncheck.attention.graph import graph_of, nearest
from attncheck.attention.problem import OutsideDomain, Problem, check_domain
from attncheck.attention.walk import Walk, exact_walk, magnitude
from attncheck.oracle import SETTLED
from attncheck.oracle.enclosure import Enclosure, enclose, join
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
_OF_KEYS = tuple(
    name
    for part in ("projections", "normalizations", "rotations")
    for name in stages_of(part)
    if query_axis(name) is None
)
"""Stages that are the same for every part of the queries."""
TOLERANCES: Mapping[type[ExactArray], float] = {DoubleWords: 2.0**-90, Balls: 2.0**-80}
"""Of its scale, the largest radius in each arithmetic: a double word has room for no more."""
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
    operation: str,
    options: Mapping[str, Any],
    inputs: Mapping[str, NDArray[Any]],
    returned: Mapping[str, NDArray[Any]],
    stage: str,
    query_rows: Sequence[int] | None = None,
) -> Enclosure | None:
    """Return the exact value of a stage given an implementation's own stages before it, taken as exact.

    ``returned`` are whole arrays in the stages' shapes. A stage that is not there is composed from those before it.
    Minus infinity among returned scores is what a mask or bias leaves, and stays out of the softmax. None where a
    stage that is needed holds NaN, or another infinity, at a place that is attended; and for gradients, none of which
    follows from another.
    """
    if operation in ADDS_QUERIES_UP:
        return None
    problem = Problem.of(operation, options, inputs)
    check_domain(operation, options, inputs)
    needed = _nearest(problem, returned, stage)
    whole = {name: problem.with_added(name, returned[name]) for name in needed}
    taken = {name: problem.as_predecessor(name, array, stage) for name, array in whole.items()}
    usable = {name: array for name, array in taken.items() if array is not None}
    if len(usable) < len(needed):
        return None
    return _enclosures(replace(problem, returned=usable), (stage,), query_rows)[stage]


def predecessors(
    operation: str,
    options: Mapping[str, Any],
    inputs: Mapping[str, NDArray[Any]],
    returned: Collection[str],
    stage: str,
) -> frozenset[str]:
    """Return those of the returned stages that ``exact_from`` needs; without any, the stage follows from the inputs."""
    return frozenset(_nearest(Problem.of(operation, options, inputs), returned, stage))


def _nearest(problem: Problem, returned: Collection[str], stage: str) -> set[str]:
    # Only multi_head_attention has stages of the names of inputs that are not those inputs.
    is_own = problem.operation == "multi_head_attention"
    known = {name for name in returned if name in STAGES and (is_own or name not in problem.inputs)}
    return nearest(graph_of(problem), stage, known)


def _enclosures(problem: Problem, stages: Sequence[str], query_rows: Sequence[int] | None) -> dict[str, Enclosure]:
    rows = problem.rows if query_rows is None else problem.rows[np.asarray(query_rows, dtype=np.intp)]
    starts = range(0, max(len(rows), 1), _ROWS_AT_A_TIME)
    whole = query_rows is None and (len(starts) == 1 or problem.operation in ADDS_QUERIES_UP)
    parts = [problem] if whole else [problem.of_rows(rows[start : start + _ROWS_AT_A_TIME]) for start in starts]
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
        walk = exact_walk(part, shared)
        for stage in stages:
            array: ExactArray = walk.node(stage)
            enclosure = enclose(array)
            if not _suffices(enclosure, array, part, walk, stage):
                return None
            own = enclosure.reshaped(_shape_of(stage, array, part))
            pieces[stage].append(own.mapped(partial(part.without_added, stage)))
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


def _suffices(enclosure: Enclosure, array: ExactArray, part: Problem, walk: Walk, stage: str) -> bool:
    """Whether every radius is small; only where it is large beside the value itself is its scale worked out."""
    tolerance = TOLERANCES[part.arithmetic]
    # A ball beyond float64 has an infinite radius here, and is looked at below, where balls have no largest number.
    small = enclosure.radius <= np.clip(tolerance * np.abs(enclosure.high), MIN_RADIUS, np.finfo(np.float64).max)
    return bool(small.all() or (small | array.is_small_beside(magnitude(part, walk, stage), tolerance)).all())
