"""The largest error, and its statistical scale, that a rounding model allows at every stage of an operation.

``accumulated_bounds`` walks from the inputs of a case; ``introduced_bounds`` walks the same graph from the stages that
the implementation itself returned, each with its storage error. The formulas stand with the steps; ``docs/numerics.md``
derives them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.attention.errors import Bound, Real, as_float64
from attncheck.attention.graph import graph_of, reached
from attncheck.attention.problem import Problem
from attncheck.attention.rounding import RoundingModel
from attncheck.attention.softmax import Softmax
from attncheck.attention.step import NotFiniteError
from attncheck.attention.walk import error_walk, value_walk

__all__ = ["Arrays", "Bound", "Options", "accumulated_bounds", "bounds_of", "for_bounds", "introduced_bounds"]

Arrays = Mapping[str, NDArray[Any]]
Options = Mapping[str, Any]


def accumulated_bounds(
    operation: str,
    options: Options,
    inputs: Arrays,
    rounding: RoundingModel,
    exact: Mapping[str, Real],
    stages: Collection[str] | None = None,
) -> dict[str, Bound]:
    """Bound the error of every stage against the exact answer from the inputs.

    ``inputs`` are as stored, ``exact`` the exact stages rounded to float64, of which all are needed that ``stages``
    (by default all of them) follow from. Where the exact value is not finite, the bound is 0.
    """
    return bounds_of(Problem.of(operation, options, inputs), rounding, exact, exact if stages is None else stages)


def bounds_of(
    problem: Problem, rounding: RoundingModel, exact: Mapping[str, Real], stages: Collection[str]
) -> dict[str, Bound]:
    """Do the same for a problem, which may have some of the query rows and keys alone."""
    problem = for_bounds(problem)
    with np.errstate(all="ignore"):
        walk = error_walk(problem, rounding, value_walk(problem, _known(problem, exact)))
        asked = [name for name in exact if name in stages and name in walk.graph]
        return {name: _without_added(problem, name, walk.node(name).bound(rounding)) for name in asked}


def introduced_bounds(
    problem: Problem, rounding: RoundingModel, returned: Arrays, exact: Mapping[str, Real]
) -> dict[str, Bound] | None:
    """Bound the error of stages against their ``exact`` values from the implementation's own previous stages.

    ``returned`` are all stages that the implementation returned; all of ``exact`` follow from the same of them. A stage
    that was not returned is skipped, and its own errors are allowed to the one that follows; except the projections of
    multi_head_attention, without which there is no bound. None where such a predecessor is missing or one is, at an
    attended key, not finite; and for gradients, none of which follows from another.
    """
    if problem.operation == "attention_gradients":
        return None
    problem = for_bounds(problem)
    graph = graph_of(problem)
    stage = next(iter(exact))
    before = {name for name in returned if name not in exact and name in graph}
    found = set(reached(graph, stage, before))
    if any(name in graph and not graph[name].follows for name in found - before):
        return None
    if "masked" in before and problem.fill is None:
        # What the implementation itself masked says who is attended to, rightly or not.
        problem = problem.without_mask()
    starts = {name: problem.with_added(name, as_float64(returned[name])) for name in found & before}
    with np.errstate(all="ignore"):
        values = value_walk(problem, {**starts, **_known(problem, {name: as_float64(exact[name]) for name in exact})})
        try:
            walk = error_walk(problem, rounding, values, starts)
            return {name: _without_added(problem, name, walk.node(name).bound(rounding)) for name in exact}
        except NotFiniteError:
            return None


def _known(problem: Problem, exact: Mapping[str, Real]) -> dict[str, Any]:
    """Return the values of nodes that exact stages tell."""
    known: dict[str, Any] = {name: problem.with_added(name, array) for name, array in exact.items()}
    is_plain = not problem.added_keys and problem.options.get("lse_base") != "2"
    if is_plain and {"weights", "log_sum_exp"} <= exact.keys():
        known["exponentials"] = Softmax(exact["weights"], exact["log_sum_exp"])
    return known


def _without_added(problem: Problem, stage: str, bound: Bound) -> Bound:
    if not problem.added_keys:
        return bound
    return Bound(problem.without_added(stage, bound.max_error), problem.without_added(stage, bound.sigma))


def for_bounds(problem: Problem) -> Problem:
    """Pose a problem for error bounds: widen the inputs; what a row without a key gives is no matter of rounding."""
    if problem.is_wide:
        return problem
    kept = {name: value for name, value in problem.options.items() if name != "empty_rows"}
    return replace(problem.in_float64(), options=kept, is_wide=True)
