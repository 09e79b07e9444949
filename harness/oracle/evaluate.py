"""The truth: every stage of an operation as a proven enclosure, from the numbers as stored.

Everything is evaluated in ball arithmetic (python-flint) at 128 bits, and again at twice as many while some radius
exceeds 2^-80 of its element's scale. The scale is the sum of the absolute terms of a score, context, output or
projection; the weight itself; and max(1, |L|) of a log_sum_exp. Below 2^-1072, where float64 ends, no radius matters.

Query rows are independent of each other given key and value, so they are taken 64 at a time, and on a large shape some
rows can stand for all. Gradients add the rows up: they are evaluated whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from flint import arb, ctx
from numpy.typing import NDArray

from attncheck.attention.balls import BallArray
from attncheck.attention.graph import graph_of, nearest
from attncheck.attention.problem import OutsideDomain, Problem, check_domain
from attncheck.attention.walk import Walk, exact_walk, magnitude
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
_ROWS_AT_A_TIME = 64  # FLINT's fast matrix product starts when every dimension is large
_OF_KEYS = tuple(
    name
    for part in ("projections", "normalizations", "rotations")
    for name in stages_of(part)
    if query_axis(name) is None
)
"""Stages that are the same for every part of the queries."""
TOLERANCE = 2.0**-80
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
    return with_enough_precision(lambda: _attempt(parts, stages), f"{problem.operation}: {', '.join(stages)}")


def with_enough_precision(attempt: Callable[[], Found | None], what: str) -> Found:
    """Return what an attempt finds at the lowest precision that suffices; it returns None where that does not.

    Raises ``PrecisionExhausted`` where none does.
    """
    precision = MIN_PRECISION
    while precision <= MAX_PRECISION:
        with ctx.workprec(precision):
            found = attempt()
        if found is not None:
            return found
        precision *= 2
    raise PrecisionExhausted(f"{what} not settled with {MAX_PRECISION} bits")


def _attempt(parts: Sequence[Problem], stages: Sequence[str]) -> dict[str, Enclosure] | None:
    """Evaluate at FLINT's current precision; None where it does not suffice."""
    pieces: dict[str, list[Enclosure]] = {stage: [] for stage in stages}
    shared: dict[str, Any] = {}
    for part in parts:
        walk = exact_walk(part, shared)
        for stage in stages:
            balls: BallArray = walk.node(stage)
            enclosure = enclose(balls.entries(), balls.shape, balls.attended)
            if not _suffices(enclosure, balls, part, walk, stage):
                return None
            own = enclosure.reshaped(_shape_of(stage, balls, part))
            pieces[stage].append(own.mapped(partial(part.without_added, stage)))
        shared = {name: walk.nodes[name] for name in _OF_KEYS if name in walk.nodes}
    return {stage: _joined(stage, found) for stage, found in pieces.items()}


def _shape_of(stage: str, balls: BallArray, part: Problem) -> Shape:
    """Return a stage's own shape, that of the input of a gradient; balls have at least two axes."""
    of_input = stage.removeprefix("grad_")
    if of_input != stage:
        return part.array(of_input).shape
    return balls.shape[:-1] if stage == "log_sum_exp" else balls.shape


def _joined(stage: str, pieces: Sequence[Enclosure]) -> Enclosure:
    if stage in _OF_KEYS:
        return pieces[0]
    return join(pieces, axis=-1 if stage == "log_sum_exp" else -2)


def _suffices(enclosure: Enclosure, balls: BallArray, part: Problem, walk: Walk, stage: str) -> bool:
    """Whether every radius is small; only where it is large beside the value itself is its scale worked out."""
    # Values beyond float64 have an infinite radius and are looked at below, where balls have no largest number.
    small = np.clip(TOLERANCE * np.abs(enclosure.high), MIN_RADIUS, np.finfo(np.float64).max)
    doubtful = np.flatnonzero(~(enclosure.radius <= small))
    if not len(doubtful):
        return True
    entries, scales = balls.entries(), magnitude(part, walk, stage).entries()
    tolerance = arb(TOLERANCE)
    return all(bool(entries[index].rad() <= scales[index] * tolerance) for index in doubtful)
