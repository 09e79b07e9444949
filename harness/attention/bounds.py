"""The largest error, and its statistical scale, that a rounding model allows at every stage of an operation.

The idea. A tolerance such as 1e-5 is too strict for one element and too lenient for another: the error of a score grows
with |q||k|, that of an output with the spread of the values. So each element has its own bound B, derived from the
inputs, the number format, and the roundings that an implementation declares (its rounding model). An error above B is
impossible under that model, in any order of summation: the implementation is wrong. An error below B may still be too
large to be rounding noise, so each element also has a scale sigma, from variances instead of worst cases.

How it proceeds. The ``error`` rule of each step takes the states of its operands, such as ``Logits`` with their largest
errors and variances, and returns its own state. A walk over the graph of steps applies the rules from the inputs to the
stage. The values that the formulas need are the exact ones, rounded to float64. The basis of all rules is the error of
an inner product of n terms, in any order (Jeannerod and Rump 2013):

    |fl(x.y) - x.y| <= n u |x|.|y|

and, for the scale, independent roundings of the partial sums. ``docs/numerics.md``, sections 4 to 6, derives the rules.

Two bounds of one stage:

* ``bound_accumulated_errors`` begin at the inputs of a case. They tell if the stage is right.
* ``bound_introduced_errors`` begin at the stages that the implementation itself returned, each with its storage error.
  They tell if this step is right, even if an earlier one is wrong. So they tell where an error begins.

The alternatives. Interval arithmetic does not know that the weights of a row share a maximum and a sum, so its
intervals are much wider than B. Measured tolerances need a trusted implementation for each format, and do not hold for
another shape.

If the score matrix is never stored, ``bound_accumulated_errors_by_rows`` takes some query rows at a time, with the keys
that they may attend to. Given key and value, the bound of a row depends only on what that row attends to. An exception
are numbers that all rows of a head share, such as the extremes of the values: with fewer rows, these bounds become
tighter.

``propagate_radii`` returns how far an exact result moves when every input moves by its radius: the allowance for
printed, rounded inputs (section 8). A document that prints its inputs rounded computed with other numbers than it
shows; so does a float32 run of a float64 document. These rules hold for radii of any size. They are evaluated in
float64, whose own rounding is far below any digit that a document prints.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.balls import Float64Array
from attncheck.attention.errors import Ball, Elementwise, Real, as_float64
from attncheck.attention.errors import Bound as Bound
from attncheck.attention.graph import graph_of, iterate_ancestors
from attncheck.attention.problem import LOGITS, Computation
from attncheck.attention.sampling import select_stage_rows
from attncheck.attention.softmax import Softmax
from attncheck.attention.step import NotFiniteError
from attncheck.attention.walk import error_walk, radius_walk, value_walk
from attncheck.reading.problem import Problem
from attncheck.spec import OPERATIONS, computed_stages, query_axis
from attncheck.spec.rounding import RoundingModel

Arrays = Mapping[str, NDArray[Any]]
ErrorState = TypeVar("ErrorState", bound=Elementwise)


def bound_accumulated_errors(
    problem: Problem, rounding: RoundingModel, exact: Mapping[str, Real], stages: Collection[str] | None = None
) -> dict[str, Bound]:
    """Bound the error of every stage against the exact answer from the inputs.

    Inputs are as stored, ``exact`` are the exact stages rounded to float64, of which all are needed that ``stages``
    (by default all of them) follow from. If the exact value is not finite, the bound is 0.
    """
    return bound_stages(Computation.from_problem(problem), rounding, exact, exact if stages is None else stages)


def bound_stages(
    problem: Computation, rounding: RoundingModel, exact: Mapping[str, Real], stages: Collection[str]
) -> dict[str, Bound]:
    """Do the same for a problem that may have only some of the query rows and keys."""
    problem = prepare_for_bounds(problem)
    with np.errstate(all="ignore"):
        walk = error_walk(problem, rounding, value_walk(problem, _values_of_known_nodes(problem, exact)))
        asked = [name for name in exact if name in stages and name in walk.graph]
        return {name: _drop_added_key(walk.evaluate(name).bound(rounding), problem, name) for name in asked}


def bound_introduced_errors(
    problem: Computation, rounding: RoundingModel, returned: Arrays, exact: Mapping[str, Real]
) -> dict[str, Bound] | None:
    """Bound the error of stages against their ``exact`` values from the implementation's own previous stages.

    ``returned`` are all stages that the implementation returned; all of ``exact`` follow from the same of them. A stage
    that was not returned is skipped, and its own errors are allowed to the one that follows; except the projections of
    multi_head_attention, without which there is no bound. None where such a predecessor is missing or one is, at an
    attended key, not finite; and for gradients, none of which follows from another.
    """
    if OPERATIONS[problem.operation].computes_gradients:
        return None
    problem = prepare_for_bounds(problem)
    graph = graph_of(problem)
    stage = next(iter(exact))
    before = {name for name in returned if name not in exact and name in graph}
    nodes = set(iterate_ancestors(graph, stage, before))
    if any(name in graph and not graph[name].operands for name in nodes - before):
        return None
    if "masked" in before and problem.mask_fill is None:
        # What the implementation itself masked says who is attended to, rightly or not.
        problem = problem.without_mask()
    starts = {name: problem.with_added_key(name, as_float64(returned[name])) for name in nodes & before}
    with np.errstate(all="ignore"):
        values = value_walk(
            problem, {**starts, **_values_of_known_nodes(problem, {name: as_float64(exact[name]) for name in exact})}
        )
        try:
            walk = error_walk(problem, rounding, values, starts)
            return {name: _drop_added_key(walk.evaluate(name).bound(rounding), problem, name) for name in exact}
        except NotFiniteError:
            return None


def _values_of_known_nodes(problem: Computation, exact: Mapping[str, Real]) -> dict[str, Any]:
    """Return the values of nodes that exact stages determine."""
    known: dict[str, Any] = {name: problem.with_added_key(name, array) for name, array in exact.items()}
    is_plain = not problem.added_keys and problem.options.get("lse_base") != "2"
    if is_plain and {"weights", "log_sum_exp"} <= exact.keys():
        known["exponentials"] = Softmax(exact["weights"], exact["log_sum_exp"])
    return known


def _drop_added_key(state: ErrorState, problem: Computation, stage: str) -> ErrorState:
    """Leave out the key that is added."""
    return state.map_arrays(partial(problem.without_added_key, stage)) if problem.added_keys else state


def prepare_for_bounds(problem: Computation) -> Computation:
    """Return a problem for error bounds: widen the inputs, and drop ``empty_rows``, which rounds nothing."""
    if problem.is_float64:
        return problem
    kept = {name: value for name, value in problem.options.items() if name != "empty_rows"}
    return replace(problem.in_float64(), options=kept, is_float64=True, arithmetic=Float64Array)


MAX_ELEMENTS_AT_A_TIME = 1 << 18
"""Elements of the score matrix at a time; about thirty arrays of so many float64 numbers are held at once."""


def bound_accumulated_errors_by_rows(
    problem: Problem, rounding: RoundingModel, exact: Mapping[str, Real], stages: Sequence[str]
) -> dict[str, Bound]:
    """Bound the error of stages without an axis of keys, as ``bound_accumulated_errors`` does."""
    computation = Computation.from_problem(problem)
    attended = next(exact[stage] for stage in reversed(LOGITS) if stage in exact) > -np.inf
    *_, queries, keys = attended.shape
    size = max(1, MAX_ELEMENTS_AT_A_TIME // max(math.prod(attended.shape) // max(queries, 1), 1))
    parts = []
    for start in range(0, max(queries, 1), size):
        rows = np.arange(start, min(start + size, queries))
        seen = np.flatnonzero(attended[..., rows, :].any(axis=tuple(range(attended.ndim - 1))))
        # From the first key that any of these rows attends to, to the last; a key without weight if there is none.
        first, stop = (int(seen[0]), int(seen[-1]) + 1) if len(seen) else (0, min(keys, 1))
        part = computation.select_rows(rows).select_keys(first, stop)
        of_part = {stage: _select_rows_and_keys(stage, array, rows, first, stop) for stage, array in exact.items()}
        parts.append(bound_stages(part, rounding, of_part, stages))
    return {stage: _concatenate(stage, [part[stage] for part in parts]) for stage in stages}


def _select_rows_and_keys(stage: str, array: Real, rows: NDArray[np.intp], first: int, stop: int) -> Real:
    part = select_stage_rows(stage, array, rows)
    return part if stage in ("output", "log_sum_exp") else part[..., first:stop]


def _concatenate(stage: str, parts: Sequence[Bound]) -> Bound:
    axis = query_axis(stage)
    assert axis is not None
    return Bound(
        np.concatenate([part.max_error for part in parts], axis), np.concatenate([part.sigma for part in parts], axis)
    )


def propagate_radii(problem: Problem, radii: Mapping[str, Real]) -> dict[str, Ball]:
    """Return every stage of a problem in canonical form as balls, from the radii of its numbers."""
    computation = Computation.from_problem(problem).in_float64()
    of_numbers = {name for name, array in problem.inputs.items() if array.dtype != np.bool_}
    moved = {name: computation.input_with_added_key(name, radii[name]) for name in of_numbers}
    with np.errstate(all="ignore"):
        walk = radius_walk(computation, moved)
        computed = computed_stages(problem.operation, problem.options, problem.inputs)
        return {stage: _drop_added_key(walk.evaluate(stage), computation, stage) for stage in computed}
